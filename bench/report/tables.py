"""A Scoreboard as Markdown or for a terminal: its tables, and the caption without which figures mean nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group

from bench.analysis.attribution import Attribution, Gain, attribution
from bench.analysis.row import EQUAL, STATUS, Row, status_of
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.timing import Timing, timing
from bench.format import DASH, floor, gib, loss, number, percent, plain, ratio, with_interval
from bench.records.published import Published
from bench.report.caption import (
    caption,
    derived_peak,
    other_method,
    other_step,
)
from bench.report.notes import Method
from bench.report.peers import peers
from bench.report.published import beside
from bench.report.spent import spent
from bench.report.table import Sheet

TOKENS = 10_000_000_000
"""The published runs' length, by which hours, energy and money are stated."""


DISPENSABLE = (
    "Memory over",
    "Hours to 10B tokens",
    "Maths",
    "HFU",
    "MFU (own",
    "Of measured",
    "TPS per device",
    "Changed",
    "Loss",
    "MFU (bf16",
    "Efficiency",
    "Peak memory",
    "Speed-up",
)
"""Beginnings of the titles of columns that a narrow terminal does without, the first one first."""


def sheets(board: Scoreboard, price_per_hour: float | None = None, figures: Sequence[Published] = ()) -> list[Sheet]:
    """The scoreboard first, then what each change buys, how long what takes, and what 10B tokens cost, where known.

    figures: of others, of which those of like rungs are shown beside.
    """
    priced = [record for record in board.records if record.price_per_hour is not None]
    last = max(priced, key=lambda record: record.time, default=None)
    price = price_per_hour if price_per_hour is not None else last and last.price_per_hour
    attributed = attribution(board)
    name = f"{board.ladder} on {board.environment.machine}"
    result = [_scoreboard(board, name)]
    if attributed:
        result.append(_attribution(attributed, board, name))
    if against := peers(board):
        result.append(against)
    if times := timing(board):
        result.append(_timing(times, name))
    if kinds := spent(board):
        result.append(kinds)
    if any(row.tps and (price is not None or row.joules_per_token is not None) for row in board.rows):
        result.append(_cost(board, name, price))
    if next_to := beside(board, figures):
        result.append(next_to)
    return result


def _scoreboard(board: Scoreboard, name: str) -> Sheet:
    peak = ", derived peak" if derived_peak(board) else ""
    head = ["Rung", "Changed", "Maths", "TPS", "Speed-up", "Over rung before", "TPS per device", "Efficiency"]
    head += [
        f"MFU (bf16{peak})",
        f"MFU (own format{peak})",
        "HFU",
        "Of measured ceiling",
        "Peak memory (GiB)",
        "Memory over rung before",
        f"Loss at step {board.loss_step}" if board.loss_step else "Loss",
        "Hours to 10B tokens",
        "Status",
    ]
    several = any(row.toggles.world_size > 1 for row in board.rows)
    rows = [_cells(row, board, several) for row in board.rows]
    words = frozenset({0, 1, 2, 16})
    return Sheet(title=name, head=head, rows=rows, words=words, notes=caption(board), dispensable=DISPENSABLE)


def _cells(row: Row, board: Scoreboard, several: bool) -> list[str]:
    """One row as plain text, a dash for what was not measured. several: whether some rung has several ranks."""
    return [
        plain(row.rung),
        plain(", ".join(row.changed)) or DASH,
        (EQUAL if row.maths == EQUAL else "changed") if row.maths and row.tps else DASH,
        with_interval(number(row.tps.value) if row.tps else "", row.tps),
        "1.00x" if row is board.rows[0] and row.speedup else ratio(row.speedup),
        f"{ratio(row.gain)}, {row.verdict}" if row.gain and row.verdict else ratio(row.gain),
        number(row.tps.value / row.toggles.world_size) if row.tps and several else DASH,
        with_interval(percent(row.efficiency.value), row.efficiency) if row.efficiency else DASH,
        percent(row.mfu),
        percent(row.mfu_own),
        percent(row.hfu),
        percent(row.ceiling_share),
        f"{gib(row.peak_memory_bytes)}{' ‡' if other_method(row, board) else ''}",
        _memory_over_before(row, board),
        f"{loss(row.loss)} †" if other_step(row, board) else loss(row.loss),
        number(hours_to_10b(row.tps.value)) if row.tps else DASH,
        status_of(row),
    ]


def _memory_over_before(row: Row, board: Scoreboard) -> str:
    before = board.before(row)
    if not row.gain or not before or not before.peak_memory_bytes or not row.peak_memory_bytes:
        return DASH
    alike = before.peak_memory_method == row.peak_memory_method
    return f"{row.peak_memory_bytes / before.peak_memory_bytes:.2f}x" if alike else DASH


def hours_to_10b(tps: float) -> float:
    """Of training alone, without evaluation or checkpoints."""
    return TOKENS / tps / 3600


def _attribution(attributed: Sequence[Attribution], board: Scoreboard, name: str) -> Sheet:
    head = ["Rung", "Added in order", "Alone on the first rung", "Added last, to all others", "Direction"]
    rows = [
        [plain(each.rung), _gain(each.in_order), _gain(each.alone), _gain(each.last), each.agreement or DASH]
        for each in attributed
    ]
    title = f"What each change buys: {name}"
    return Sheet(title=title, head=head, rows=rows, words=frozenset({0, 4}), notes=_attribution_notes(board))


def _gain(gain: Gain) -> str:
    if not gain.ratio:
        return STATUS.get(gain.absent, gain.absent) or DASH
    return f"{ratio(gain.ratio)}, {gain.verdict or STATUS.get(gain.flaw, gain.flaw)}"


def _timing(times: Sequence[Timing], name: str) -> Sheet:
    head = ["Rung", "Start-up (s)", "Imports (s)", "Data (s)", "First step (s)", "First step, warm cache (s)"]
    head += ["Step, median (ms)", "Saved over rung before (ms)", "5 to 95 % of steps (ms)", "Making batches"]
    rows = []
    for each in times:
        low, high = each.step_low, each.step_high
        spread = DASH if low is None or high is None else f"{number(1e3 * low)} to {number(1e3 * high)}"
        rows.append(
            [
                plain(each.rung),
                number(each.startup),
                *(
                    number(seconds) if seconds is not None else DASH
                    for seconds in (each.imports, each.data, each.first_step, each.first_step_warm)
                ),
                number(1e3 * each.step) if each.step is not None else DASH,
                number(1e3 * each.saved) if each.saved is not None else DASH,
                spread,
                percent(each.batches),
            ]
        )
    title = f"Where the time goes: {name}"
    return Sheet(title=title, head=head, rows=rows, words=frozenset({0}), notes=timing_notes(times))


def _cost(board: Scoreboard, name: str, price: float | None) -> Sheet:
    rows = []
    for row in board.rows:
        if not row.tps:
            continue
        hours, joules = hours_to_10b(row.tps.value), row.joules_per_token
        rows.append(
            [
                plain(row.rung),
                number(hours),
                f"{joules:.3g}" if joules is not None else DASH,
                number(TOKENS * joules / 3.6e6) if joules is not None else DASH,
                number(hours * price) if price is not None else DASH,
            ]
        )
    head = ["Rung", "Hours", "Joules per token", "kWh", f"Cost at {price:g} per hour" if price is not None else "Cost"]
    title = f"10 billion tokens: {name}"
    return Sheet(title=title, head=head, rows=rows, words=frozenset({0}), notes=_cost_notes(board))


def _attribution_notes(board: Scoreboard) -> list[str]:
    """Of the table of what each change buys."""
    said = "Each figure is a ratio of tokens per second. What a change buys depends on what is switched on already: "
    notes: list[str] = [Method(f"{said}three answers, not one.")]
    return notes if board.delta is None else [*notes, f"Verdicts against the noise floor: {floor(board.delta)}."]


def _cost_notes(board: Scoreboard) -> list[str]:
    """Of the table of energy and money."""
    notes: list[str] = [Method("Hours at the TPS above, without evaluation or checkpoints.")]
    if any(row.joules_per_token is not None for row in board.rows):
        said = "Energy: the GPUs' own counters over the timed window; the rest of the machine is not in it."
    else:
        said = "Energy is absent: no energy counter was readable (NVIDIA GPUs of Volta and later have one)."
    notes.append(Method(said))
    return notes


def to_markdown(board: Scoreboard, price_per_hour: float | None = None, figures: Sequence[Published] = ()) -> str:
    """GitHub tables, each between its heading and its notes."""
    shown = sheets(board, price_per_hour, figures)
    return "\n".join(sheet.to_markdown("####" if place else "###") for place, sheet in enumerate(shown))


def to_terminal(
    board: Scoreboard, price_per_hour: float | None = None, width: int = 200, figures: Sequence[Published] = ()
) -> Group:
    """The same for rich, in `width` columns: what does not fit is left out, and that is said."""
    shown = sheets(board, price_per_hour, figures)
    parts = [part for sheet in shown for part in sheet.to_terminal(width)]
    return Group(*parts[:-1])


def timing_notes(times: Sequence[Timing]) -> list[str]:
    """Of the table of where the time goes."""
    external = ["External rungs: start-up is until the first progress line, first step and compilation included."]
    return [
        Method(
            "Medians over rounds. Start-up: imports (torch, and finding the device), opening the data, and weights. "
            "First step: with compilation where there is any; warm: with the compiler cache of an earlier round. "
            "Steps: those of all windows together, by the device's own clock where it has one; their spread tells how "
            "evenly the machine ran, not how certain a mean is. Saved: by the medians, where both steps have as many "
            "tokens; how certain that is, the scoreboard's ratio tells. Making batches: the host's share of the "
            "window; a GPU works meanwhile on what is queued."
        ),
        *(external if any(each.external for each in times) else []),
    ]

"""A Scoreboard as Markdown or for a terminal: its tables, and the caption without which figures mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.report.attribution import Attribution, Gain, attribution
from bench.report.caption import attribution_notes, caption, cost_notes, derived_peak, other_step, status_of
from bench.report.scoreboard import Row, Scoreboard
from bench.report.text import DASH, GIB, markdown, number, plain
from bench.stats import Estimate

TOKENS = 10_000_000_000
"""The published runs' length, by which hours, energy and money are stated."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, as text; columns that hold nothing but dashes are left out of it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int]
    """Places of the columns that hold words, not figures."""
    notes: Sequence[str]

    @property
    def shown(self) -> list[int]:
        return [place for place in range(len(self.head)) if any(row[place] != DASH for row in self.rows)]


def sheets(board: Scoreboard, price_per_hour: float | None = None) -> list[Sheet]:
    """The scoreboard first, then what each change buys, where that was measured, and what 10B tokens take."""
    attributed = attribution(board)
    name = f"{board.ladder} on {board.environment.machine}"
    result = [_scoreboard(board, name)]
    if attributed:
        result.append(_attribution(attributed, board, name))
    if any(row.tps for row in board.rows):
        result.append(_cost(board, name, price_per_hour))
    return result


def _scoreboard(board: Scoreboard, name: str) -> Sheet:
    loss = f"Loss at step {board.loss_step}" if board.loss_step else "Loss"
    peak = ", derived peak" if derived_peak(board) else ""
    head = ["Rung", "Changed", "TPS", "Speed-up", "Over rung before", "Verdict", f"MFU (bf16{peak})"]
    head += [f"MFU (own format{peak})"]
    head += ["HFU", "Of measured ceiling", "Peak memory (GiB)", loss, "Status"]
    rows = [_cells(row, board) for row in board.rows]
    return Sheet(title=name, head=head, rows=rows, words=frozenset({0, 1, 5, 12}), notes=caption(board))


def _cells(row: Row, board: Scoreboard) -> list[str]:
    """One row as plain text, a dash for what was not measured."""
    loss = f"{row.loss:.4f}" if row.loss is not None else DASH
    return [
        plain(row.rung),
        plain(", ".join(row.changed)) or DASH,
        _with_interval(number(row.tps.value) if row.tps else "", row.tps),
        "1.00x" if row is board.rows[0] and row.speedup else _ratio(row.speedup),
        _ratio(row.gain),
        row.verdict or DASH,
        _percent(row.mfu),
        _percent(row.mfu_own),
        _percent(row.hfu),
        _percent(row.ceiling_share),
        f"{row.peak_memory_bytes / GIB:.2f}" if row.peak_memory_bytes is not None else DASH,
        f"{loss} †" if other_step(row, board) else loss,
        status_of(row),
    ]


def _attribution(attributed: Sequence[Attribution], board: Scoreboard, name: str) -> Sheet:
    head = ["Rung", "Added in order", "Alone on the first rung", "Added last, to all others", "Direction"]
    rows = [
        [plain(each.rung), _gain(each.in_order), _gain(each.alone), _gain(each.last), each.agreement or DASH]
        for each in attributed
    ]
    title = f"What each change buys: {name}"
    return Sheet(title=title, head=head, rows=rows, words=frozenset({0, 4}), notes=attribution_notes(board))


def _gain(gain: Gain) -> str:
    return f"{_ratio(gain.ratio)} {gain.verdict}" if gain.ratio else gain.absent or DASH


def _cost(board: Scoreboard, name: str, price_per_hour: float | None) -> Sheet:
    recorded = [record.price_per_hour for record in board.records if record.price_per_hour is not None]
    price = price_per_hour if price_per_hour is not None else recorded[-1] if recorded else None
    rows = []
    for row in board.rows:
        if not row.tps:
            continue
        hours = TOKENS / row.tps.value / 3600
        joules = row.joules_per_token
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
    return Sheet(title=title, head=head, rows=rows, words=frozenset({0}), notes=cost_notes(board, price))


def _percent(share: float | None) -> str:
    if share is None:
        return DASH
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def _ratio(ratio: Estimate | None) -> str:
    return _with_interval(f"{ratio.value:.2f}x" if ratio else "", ratio)


def _with_interval(text: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    if estimate.half_width is None:
        return text
    # A wide interval is symmetric in its logarithm only, which +- would hide.
    if estimate.half_width > 0.5 and estimate.low is not None and estimate.high is not None:
        return f"{text} ({number(estimate.low)} to {number(estimate.high)})"
    return f"{text} ±{estimate.half_width:.1%}"


def to_markdown(board: Scoreboard, price_per_hour: float | None = None) -> str:
    """GitHub tables, each between its heading and its notes."""
    return "\n".join(
        _markdown(sheet, "###" if not place else "####") for place, sheet in enumerate(sheets(board, price_per_hour))
    )


def _markdown(sheet: Sheet, level: str) -> str:
    shown = sheet.shown
    lines = [f"{level} {markdown(sheet.title)}", "", f"| {' | '.join(sheet.head[place] for place in shown)} |"]
    lines.append(f"|{'|'.join('---' if place in sheet.words else '--:' for place in shown)}|")
    lines += [f"| {' | '.join(markdown(row[place]) for place in shown)} |" for row in sheet.rows]
    return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in sheet.notes)]).rstrip() + "\n"


def to_terminal(board: Scoreboard, price_per_hour: float | None = None) -> Group:
    """The same for rich."""
    parts: list[RenderableType] = []
    for sheet in sheets(board, price_per_hour):
        table = Table(title=Text(plain(sheet.title)), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place in sheet.shown:
            # On a narrow terminal words and figures break onto a second line rather than lose their ends.
            justify = "left" if place in sheet.words else "right"
            table.add_column(sheet.head[place], justify=justify, overflow="fold")
        for row in sheet.rows:
            table.add_row(*(Text(row[place]) for place in sheet.shown))
        parts += [table, *(Text(line, style="dim") for line in sheet.notes), Text()]
    return Group(*parts[:-1])

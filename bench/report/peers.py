"""Our fastest rung beside the other trainers of its ladder, measured in the same rounds on the same machine.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.compare import GOOD
from bench.analysis.rung_view import Entry, best, best_name, memory_over, over
from bench.analysis.scoreboard import Scoreboard
from bench.format import floor, gib, judged, listed, times
from bench.report.table import Column, Table
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, surely_ahead, verdict

NAMED = 6
"""Peers that a sentence names; the table has all of them."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """One peer, and how our fastest rung does against it; None is what was not measured, or does not compare."""

    entry: Entry
    over: Estimate | None
    """How many times as fast ours is, paired within rounds."""
    verdict: Verdict | None
    """None of a rung of ours that is in doubt, too."""
    clear: bool
    """Whether ours is called faster in words: all of the interval lies beyond the noise floor."""
    memory: float | None
    """How many times the peak memory ours needs."""


def against(board: Scoreboard) -> tuple[Entry | None, list[Against]]:
    """Our fastest rung, and each external one."""
    ours = best(board)
    found, doubted = [], ours is not None and bool(ours.row.doubts)
    for entry in (Entry(board=board, row=row) for row in board.rows if row.external):
        times = over(ours, entry) if ours else None
        found.append(
            Against(
                entry=entry,
                over=times,
                verdict=verdict(times, board.delta) if times and not doubted else None,
                clear=surely_ahead(times, board.delta) and not doubted,
                memory=_memory_over(ours, entry) if ours and entry.row.status in GOOD else None,
            )
        )
    return ours, found


def _memory_over(ours: Entry, entry: Entry) -> float | None:
    """Of the whole GPU where both are known, which is found out in one way; else as between rungs of ours."""
    mine, theirs = ours.gpu_memory_bytes, entry.gpu_memory_bytes
    return mine / theirs if mine and theirs else memory_over(ours, entry)


def peers(board: Scoreboard) -> Table | None:
    """A row for each external rung; None where the ladder has none."""
    ours, found = against(board)
    if not found:
        return None
    columns: list[Column[Against]] = [
        Column("Rung", lambda each: each.entry.row.rung, words=True),
        Column("Peer", lambda each: each.entry.row.trainer, words=True),
        Column("TPS", lambda each: each.entry.tps),
        Column("Tokens per step", lambda each: each.entry.row.tokens_per_step or None, "{:,}".format, drop=2),
        Column("Ours over it", lambda each: judged(each.over, each.verdict)),
        Column("MFU (bf16)", lambda each: each.entry.mfu, drop=1),
        Column("Peak memory (GiB)", lambda each: each.entry.row.peak_memory_bytes, gib),
        Column("Whole GPU (GiB)", lambda each: each.entry.gpu_memory_bytes, gib, drop=4),
        Column("Memory, ours over its", lambda each: each.memory, times),
        Column("Status", lambda each: each.entry.status, words=True, drop=3),
    ]
    return Table(
        title=f"Against peers: {board.ladder} on {board.environment.machine}",
        columns=columns,
        rows=found,
        notes=_notes(ours, found, board),
    )


def _notes(ours: Entry | None, found: Sequence[Against], board: Scoreboard) -> list[str]:
    if ours is None:
        return ["Nothing is held to these: no rung of ours is ok and of equal maths."]
    size = ours.row.tokens_per_step
    lines = [
        "External rungs are other trainers (docs/peers.md), timed by the arrival of their progress lines. "
        "They start from other weights and text, so no losses are compared, and no rung is held to one as "
        "the rung before.",
        f"Ours: {best_name(ours)}, {ours.tps} tokens per second, {size or 0:,} tokens per step. Ratios of "
        "tokens per second are paired within rounds, ± is the 95 % t interval; memory only where it was "
        "found out the same way. After its first step ours gave back what only compilation needed; peers "
        "keep that.",
    ]
    if ours.gpu_memory_bytes:
        lines.append(
            f"Whole GPU: what it had in use beyond what it had before, context and unused reserve included; "
            f"ours {gib(ours.gpu_memory_bytes)} GiB. Where it is known, memory is held to memory by it."
        )
    if any(each.entry.row.tokens_per_step not in (None, size) for each in found):
        lines.append(
            "Tokens per step differ: larger steps pay for their optimiser less often; ratios include that."
        )
    return [*lines, _claim(ours, found, board)]


def _claim(ours: Entry, found: Sequence[Against], board: Scoreboard) -> str:
    """How ours does against the peers that this run measured; of any other it tells nothing."""
    held = [each for each in found if each.over]
    if not held:
        return "No peer was measured."
    if ours.row.doubts:
        return "Nothing is claimed of these: ours is in doubt, as the scoreboard's warnings say."
    if any(each.verdict == "not replicated" for each in held):
        return f"Not replicated: whether ours is faster needs {LEAST_ROUNDS} rounds or more."
    if board.delta is None:
        return f"Nothing is claimed of these: without an A/A control of {LEAST_ROUNDS} rounds no lead is a sure one."
    ways = {
        "faster than": [each for each in held if each.clear],
        "not surely faster than": [each for each in held if not each.clear and each.verdict != "slower"],
        "slower than": [each for each in held if each.verdict == "slower"],
    }
    measured = f"{len(held)} peers measured in this run" if len(held) > 1 else "one peer measured in this run"
    if all(each.clear for each in held):
        named = f" ({_named(held)})" if len(held) <= NAMED else ""
        said = f"Ours is faster than {'each of ' * (len(held) > 1)}the {measured}{named}"
    else:
        said = f"Of the {measured}, ours is "
        said += "; ".join(f"{how} {_named(those)}" for how, those in ways.items() if those)
    said += ". Faster means here, unlike in a row, that the whole interval lies beyond the noise floor of "
    said += f"{floor(board.delta)}."
    control = board.rows[0]
    if not board.last_control and control.toggles.product_format() != ours.row.toggles.product_format():
        said += f" That is the noise of {control.rung}, in {control.toggles.product_format()}; of what other formats "
        said += "wander more the intervals tell."
    if missing := [each for each in found if not each.over]:
        said += f" Not measured, and so not held to ours: {_named(missing)}."
    if board.has_gaps or any(record.chosen for record in board.records):
        said += (
            " Not all rungs of the ladder were asked for: of peers among the others this run tells nothing."
        )
    return said


def _named(those: Sequence[Against]) -> str:
    return listed([each.entry.row.rung for each in those])

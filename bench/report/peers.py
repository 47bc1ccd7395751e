"""Our fastest rung beside the other trainers of its ladder, measured in the same rounds on the same machine.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.compare import GOOD
from bench.report.entry import Entry, best, best_name, memory_over, over
from bench.report.scoreboard import Scoreboard
from bench.report.sheet import Sheet
from bench.report.text import DASH, gib, plain, ratio
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, verdict


@dataclass(frozen=True, kw_only=True)
class Against:
    """One peer, and how our fastest rung does against it; None is what was not measured, or does not compare."""

    entry: Entry
    over: Estimate | None
    """How many times as fast ours is, paired within rounds."""
    verdict: Verdict | None
    memory: float | None
    """How many times the peak memory ours needs."""

    @property
    def clear(self) -> bool:
        """Whether ours is faster by more than the interval."""
        return self.over is not None and self.over.low is not None and self.over.low > 1


def against(board: Scoreboard) -> tuple[Entry | None, list[Against]]:
    """Our fastest rung, and each external one."""
    ours = best(board)
    found = []
    for entry in (Entry(board=board, row=row) for row in board.rows if row.external):
        times = over(ours, entry) if ours else None
        found.append(
            Against(
                entry=entry,
                over=times,
                verdict=verdict(times, board.delta) if times else None,
                memory=memory_over(ours, entry) if ours and entry.row.status in GOOD else None,
            )
        )
    return ours, found


def peers(board: Scoreboard) -> Sheet | None:
    """A row for each external rung; None where the ladder has none."""
    ours, found = against(board)
    if not found:
        return None
    name = f"{board.ladder} on {board.environment.machine}"
    return Sheet(
        title=f"Against peers: {name}",
        head=[
            "Rung",
            "Peer",
            "TPS",
            "Tokens per step",
            "Ours over it",
            "MFU (bf16)",
            "Peak memory (GiB)",
            "Memory, ours over its",
            "Status",
        ],
        rows=[_cells(each) for each in found],
        words=frozenset({0, 1, 8}),
        notes=[plain(note) for note in _notes(ours, found)],
        dispensable=("MFU", "Tokens", "Status"),
    )


def _cells(each: Against) -> list[str]:
    row = each.entry.row
    size = f"{row.tokens_per_step:,}" if row.tokens_per_step else DASH
    return [
        plain(row.rung),
        plain(", ".join(row.changed).removeprefix("external: ")),
        each.entry.tps,
        size,
        f"{ratio(each.over)}, {each.verdict}" if each.over else DASH,
        each.entry.mfu,
        gib(row.peak_memory_bytes),
        f"{each.memory:.2f}x" if each.memory else DASH,
        each.entry.status,
    ]


def _notes(ours: Entry | None, found: Sequence[Against]) -> list[str]:
    if ours is None:
        return ["Nothing is held to these: no rung of ours is ok."]
    size = ours.row.tokens_per_step
    lines = [
        "External rungs are other trainers (docs/peers.md), timed by the arrival of their progress lines. They start "
        "from other weights and text, so no losses are compared, and no rung is held to one as the rung before.",
        f"Ours: {best_name(ours)}, {ours.tps} tokens per second, {size or 0:,} tokens per step. Ratios of tokens per "
        "second are paired within rounds, ± is the 95 % t interval; memory only where it was found out the same way.",
    ]
    if any(each.entry.row.tokens_per_step not in (None, size) for each in found):
        lines.append("Tokens per step differ: larger steps pay for their optimiser less often; ratios include that.")
    return [*lines, _clear(found)]


def _clear(found: Sequence[Against]) -> str:
    """Whether ours is faster than every peer, as far as this run tells."""
    known = [each for each in found if each.over]
    if not known:
        return "No peer was measured."
    if any(each.over and each.over.low is None for each in known):
        return f"Not replicated: whether ours is faster needs {LEAST_ROUNDS} rounds or more."
    missing = [each.entry.row.rung for each in found if not each.over]
    without = f"; not measured: {', '.join(missing)}" if missing else ""
    if all(each.clear for each in known):
        what = "every peer" if not missing else "every peer that was measured"
        return f"Ours is faster than {what}: no interval reaches 1{without}."
    others = ", ".join(each.entry.row.rung for each in known if not each.clear)
    return f"Ours is not surely faster than {others}: the interval reaches 1 or lies below it{without}."

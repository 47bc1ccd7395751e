"""On what kinds of work each rung's steps spend their time. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.analysis.row import Row
from bench.analysis.run_records import by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, number, plain, with_interval
from bench.records.record import Record
from bench.report.notes import Method
from bench.report.table import Sheet
from bench.stats import beyond, paired_ratio

TITLES = {
    "products": "Products",
    "attention": "Attention",
    "compiled": "Compiled kernels",
    "optimizer": "AdamW",
    "copies": "Casts and copies",
    "exchange": "Between ranks",
    "other": "Other operations",
    "rest": "Rest",
}
"""Of the kinds of gpt2.breakdown.KINDS."""
NOTES = (
    Method(
        "Medians over rounds of one step on rank 0, under torch's profiler, which slows it a little. Sum: the step's "
        "time, but more where kinds of work overlap, as gloo's threads or NCCL's kernels do with the others."
    ),
    Method(
        "On a CPU an operation counts without those within it: batched products as attention, others as products, "
        "all of AdamW's step as AdamW. On a GPU kernels count: those that ran in AdamW's step as AdamW, others by "
        "their names, all products as products. Rest: Python, launches and waiting."
    ),
    Method(
        "A ratio beside a time is that to the rung before, where its whole interval lies beyond the noise floor: one "
        "step per round tells little, so of the others no difference is told."
    ),
    Method(
        "Rungs with unlike attention do not compare kind by kind: a fused one is attention as a whole, but what lies "
        "between the products of explicit and blocks (softmax, masks, exponentials) is other operations or compiled."
    ),
)


def spent(board: Scoreboard) -> Sheet | None:
    """A row for each rung of ours that was profiled, a column for each kind of work; None where nothing was."""
    rows = []
    for row in board.rows:
        now = _profiled(board.records_of(row))
        if not now:
            continue
        was = _profiled(board.records_of(before)) if (before := _held_to(board, row)) else {}
        total = number(1e3 * median(sum(each.values()) for each in now.values()))
        rows.append([plain(row.rung), total, *(_cell(kind, now, was, board.delta) for kind in TITLES)])
    if not rows:
        return None
    return Sheet(
        title=f"What a step is spent on: {board.ladder} on {board.environment.machine}",
        head=["Rung", "Sum (ms)", *(f"{title} (ms)" for title in TITLES.values())],
        rows=rows,
        words=frozenset({0}),
        notes=NOTES,
        dispensable=("Between", "Other", "Rest", "Casts"),
    )


Profiled = dict[tuple[int, str], dict[str, float]]
"""Seconds of one step by kind of work, by round and session."""


def _profiled(rung: Sequence[Record]) -> Profiled:
    return by_round(rung, lambda measurement: measurement.profiled_seconds or None)


def _held_to(board: Scoreboard, row: Row) -> Row | None:
    """The rung before, unless its steps are of another size."""
    before = board.before(row)
    return before if before and before.tokens_per_step == row.tokens_per_step else None


def _cell(kind: str, now: Profiled, was: Profiled, delta: float | None) -> str:
    """A kind that a round's step had nothing of took no time in it; one that no step had is a dash."""
    mine, theirs = ({key: each[kind] for key, each in of.items() if each.get(kind)} for of in (now, was))
    if not mine:
        return DASH
    text = number(1e3 * median(mine.get(key, 0.0) for key in now))
    changed = paired_ratio(mine, theirs)
    if changed is None or delta is None or not beyond(changed, delta):
        return text
    return f"{text}, {with_interval(f'{number(changed.value)}x', changed)}"

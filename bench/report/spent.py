"""On what kinds of work each rung's steps spend their time. Imports no torch."""

from __future__ import annotations

from statistics import median

from bench.report.notes import Method
from bench.report.rungs import cumulative
from bench.report.scoreboard import Scoreboard
from bench.report.sheet import Sheet
from bench.report.text import DASH, number, plain

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
        "Rungs with unlike attention do not compare kind by kind: a fused one is attention as a whole, but what lies "
        "between the products of explicit and blocks (softmax, masks, exponentials) is other operations or compiled."
    ),
)


def spent(board: Scoreboard) -> Sheet | None:
    """A row for each rung of ours that was profiled, a column for each kind of work; None where nothing was."""
    rows = []
    for rung in cumulative(board.records):
        found = [r.measurement.profiled_seconds for r in rung if r.status == "ok" and r.measurement]
        seconds = [each for each in found if each]
        if not seconds:
            continue
        kinds = [[each.get(kind) for each in seconds] for kind in TITLES]
        total = number(1e3 * median(sum(each.values()) for each in seconds))
        rows.append([plain(rung[0].rung), total, *(_milliseconds(kind) for kind in kinds)])
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


def _milliseconds(values: list[float | None]) -> str:
    """A kind that a round's step had nothing of took no time in it; one that no step had is a dash."""
    return number(1e3 * median(value or 0.0 for value in values)) if any(values) else DASH

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


def spent(board: Scoreboard) -> Sheet | None:
    """A row for each rung of ours that was profiled, a column for each kind of work; None where nothing was."""
    rows = []
    for rung in cumulative(board.records):
        found = [r.measurement.profiled_seconds for r in rung if r.status == "ok" and r.measurement]
        seconds = [each for each in found if each]
        if not seconds:
            continue
        kinds = [[each.get(kind) for each in seconds] for kind in TITLES]
        whole = number(1e3 * median(sum(each.values()) for each in seconds))
        rows.append([plain(rung[0].rung), whole, *(_milliseconds(kind) for kind in kinds)])
    if not rows:
        return None
    return Sheet(
        title=f"What a step is spent on: {board.ladder} on {board.environment.machine}",
        head=["Rung", "Step (ms)", *(f"{title} (ms)" for title in TITLES.values())],
        rows=rows,
        words=frozenset({0}),
        notes=[
            Method(
                "Medians over rounds of one step of each process, under torch's profiler, which slows it a little. "
                "Products: of linear layers and lm_head. Compiled kernels: those that torch.compile generated, but "
                "AdamW's. AdamW: all of its step. Rest: Python, launches and waiting. On a CPU an operation counts "
                "without those within it, and batched products are attention's; on a GPU its kernels count, and all "
                "products are products."
            )
        ],
        dispensable=("Between", "Other", "Rest", "Casts"),
    )


def _milliseconds(values: list[float | None]) -> str:
    """A kind that a round's step had nothing of took no time in it; one that no step had is a dash."""
    return number(1e3 * median(value or 0.0 for value in values)) if any(values) else DASH

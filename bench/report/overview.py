"""What runs a report shows, before it shows them: a line for each. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.rung_view import Entry, best, best_name
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, floor, number, plain, ratio
from bench.report.table import Sheet

HEAD = (
    "Run",
    "Model",
    "Begun (UTC)",
    "Rungs",
    "Rounds",
    "Noise floor",
    "First TPS",
    "Fastest rung",
    "TPS",
    "Over first",
)
DISPENSABLE = ("Begun", "Model", "First TPS", "Noise floor", "Rungs", "Rounds")


def overview(boards: Sequence[Scoreboard]) -> Sheet | None:
    """None for a single run, which needs none."""
    if len(boards) < 2:
        return None
    return Sheet(
        title=f"{len(boards)} runs",
        head=HEAD,
        rows=[_cells(board, best(board)) for board in boards],
        words=frozenset({0, 1, 2, 7}),
        notes=[
            "In the order of the tables beneath. Fastest rung: by mean tokens per second, of those of equal maths "
            "that nothing is held against; how surely, its scoreboard's notes tell. Runs on unlike models do not rank."
        ],
        dispensable=DISPENSABLE,
    )


def _cells(board: Scoreboard, entry: Entry | None) -> list[str]:
    first = board.rows[0]
    workload = board.records[0].workload
    return [
        plain(f"{board.ladder} on {board.environment.machine}"),
        plain(f"{workload['model']}, T = {workload['seq_len']}"),
        plain(board.begun[:16]),
        str(len(board.rows)),
        f"{board.rounds}{', interrupted' if board.interrupted else ''}",
        floor(board.delta) if board.delta is not None else DASH,
        number(first.tps.value) if first.tps else DASH,
        best_name(entry) if entry else "none",
        entry.tps if entry else DASH,
        ratio(entry.row.speedup) if entry and entry.row is not first else DASH,
    ]

"""What must be said of a sweep, and of batches that were too large. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from bench.analysis.row import Row
from bench.analysis.run_records import line_of
from bench.analysis.scoreboard import Scoreboard
from bench.format import plain
from gpt2.toggles import Toggles


def swept(board: Scoreboard) -> Iterator[str]:
    """A line for each matter; none where there is nothing to say."""
    if board.swept:
        yield (
            "A sweep: each row is one rung with other values; speed-ups and losses are held to the first. The rung "
            "before is the next smaller batch of the same toggles or else the first row."
        )
        fewer = [row for row in board.rows if row.tps and row.tps.rounds < board.rounds]
        dropped = [row for row in fewer if row.dropped]
        if dropped:
            names = "; ".join(plain(row.rung) for row in dropped)
            yield f"Far slower in the first round, or with something held against them, so not run in each: {names}."
        if cut := [plain(row.rung) for row in fewer if row not in dropped]:
            yield f"Not run in round {board.rounds}, in which the sweep ended: {'; '.join(cut)}."
    groups: dict[Toggles, list[Row]] = {}
    for row in board.own.rows:
        groups.setdefault(line_of(row.toggles, board.records[0].workload), []).append(row)
    for rows in groups.values():
        fails = [row.toggles.micro_batch_size for row in rows if row.status == "out_of_memory"]
        fits = [row for row in rows if row.tps]
        largest = max(fits, key=lambda row: row.toggles.micro_batch_size, default=None)
        if fails and largest and largest.toggles.micro_batch_size < min(fails):
            size = largest.toggles.micro_batch_size
            yield f"Largest batch that ran: {size} ({plain(largest.rung)}); {min(fails)} ran out of memory."

"""What must be said of a sweep, and of batches that were too large. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from bench.report.row import Row
from bench.report.rungs import line_of
from bench.report.scoreboard import Scoreboard
from bench.report.text import plain
from gpt2.toggles import Toggles


def swept(board: Scoreboard) -> Iterator[str]:
    """A line for each matter; none where there is nothing to say."""
    if any(record.kind == "sweep" for record in board.records):
        yield (
            "A sweep: each row is one rung with other values; speed-ups and losses are held to the first. The rung "
            "before is the next smaller batch of the same toggles or else the first row."
        )
        fewer = [plain(row.rung) for row in board.rows if row.tps and row.tps.rounds < board.rounds]
        if fewer:
            yield f"Far slower in the first round, or cut off by the time budget: {'; '.join(fewer)}."
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

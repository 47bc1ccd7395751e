"""What more devices gave, over all runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.rung_view import Entry, entries
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, gib, number, percent, plain, with_interval
from bench.report.notes import derived_notes, ranks_notes, sources
from bench.report.table import Sheet

HEAD = (
    "Run",
    "Rung",
    "Devices",
    "TPS",
    "TPS per device",
    "Linear would be",
    "Efficiency",
    "Over",
    "MFU (bf16)",
    "Peak memory (GiB)",
    "Status",
)


def scaling(boards: Sequence[Scoreboard]) -> Sheet | None:
    """The rungs on several devices, and above them those that their efficiency is over; None for less than three."""
    shown = [entry for board in boards for entry in _of(board)]
    if len(shown) < 3:  # a scoreboard tells as much of one rung and its reference
        return None
    return Sheet(
        title="Scaling",
        head=HEAD,
        rows=[_cells(entry) for entry in shown],
        words=frozenset({0, 1, 7, 10}),
        notes=[
            "TPS: of all devices together. Linear would be: the TPS of the rung that trains alike on fewer devices, "
            "named under Over, times as many devices. Efficiency: TPS over that, paired within rounds; ± is the 95 % "
            "t interval.",
            *ranks_notes(shown),
            *derived_notes(shown),
            sources(shown),
        ],
        dispensable=("Peak memory", "MFU", "TPS per", "Run", "Status", "Over"),
    )


def _of(board: Scoreboard) -> list[Entry]:
    over = {row.efficiency_over for row in board.rows if row.efficiency_over}
    several = any(row.toggles.world_size > 1 for row in board.rows)
    return [e for e in entries(board) if several and (e.row.toggles.world_size > 1 or e.row.rung in over)]


def _cells(entry: Entry) -> list[str]:
    row, devices = entry.row, entry.row.toggles.world_size
    fewer = next((each for each in entry.board.rows if each.rung == row.efficiency_over), None)
    linear = fewer.tps.value / fewer.toggles.world_size * devices if fewer and fewer.tps else None
    return [
        plain(f"{entry.board.ladder} on {entry.machine}"),
        plain(row.rung),
        str(devices),
        entry.tps,
        number(row.tps.value / devices) if row.tps else DASH,
        number(linear) if linear else DASH,
        with_interval(percent(row.efficiency.value), row.efficiency) if row.efficiency else DASH,
        plain(row.efficiency_over or DASH),
        entry.mfu,
        gib(row.peak_memory_bytes),
        entry.status,
    ]

"""What a reader sees of one run."""

from __future__ import annotations

from rich.console import Group

from bench.analysis.scoreboard import Scoreboard
from bench.report.single_run import tables


def to_markdown(board: Scoreboard, price_per_hour: float | None = None) -> str:
    shown = tables(board, price_per_hour)
    return "\n".join(table.to_markdown("####" if place else "###") for place, table in enumerate(shown))


def to_terminal(board: Scoreboard, width: int = 200) -> Group:
    return Group(*(part for table in tables(board) for part in table.to_terminal(width)))

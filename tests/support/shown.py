"""What a reader sees of one run."""

from __future__ import annotations

import os

from places import ROOT
from rich.console import Console, Group

from bench.analysis.scoreboard import Scoreboard
from bench.report.brief import Brief
from bench.report.one_run.tables import tables


def to_markdown(board: Scoreboard, price_per_hour: float | None = None) -> str:
    shown = tables(board, price_per_hour)
    return "\n".join(table.to_markdown("####" if place else "###") for place, table in enumerate(shown))


def check_golden(name: str, text: str) -> None:
    """Compare with the file of that name; GOLDEN=write pytest ... writes it anew: look at it then."""
    file = ROOT / "tests" / "golden" / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), (
        f"{file} differs; GOLDEN=write writes it: look at it then"
    )


def in_full(brief: Brief, width: int = 400) -> str:
    """All that --full prints of a command's answer."""
    console = Console(width=width)
    with console.capture() as captured:
        console.print(*brief.lines(width, full=True), sep="\n")
    return captured.get()


def to_terminal(board: Scoreboard, width: int = 200) -> Group:
    return Group(*(part for table in tables(board) for part in table.to_terminal(width)))

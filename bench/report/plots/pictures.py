"""Pictures of scoreboards: each a function of its own, drawn on light and on dark paper, as PNG and SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.analysis.scoreboard import Scoreboard
from bench.report.plots.boards import hardware, summary
from bench.report.plots.curves import (
    devices_by_step,
    devices_by_time,
    loss_by_step,
    loss_by_time,
    machines_by_step,
    machines_by_time,
)
from bench.report.plots.machine import block_times
from bench.report.plots.memory import memory_by_batch
from bench.report.plots.roofline import roofline
from bench.report.plots.rungs import attribution, climb, panels
from bench.report.plots.scaling import batch_sizes, world_sizes
from bench.report.plots.style import THEMES, save, svg, theme

OF_A_RUN: dict[str, Callable[[Scoreboard], Figure | None]] = {
    "climb": climb,
    "rungs": panels,
    "attribution": attribution,
    "roofline": roofline,
    "batch": batch_sizes,
    "memory-by-batch": memory_by_batch,
    "world-size": world_sizes,
    "loss-by-step": loss_by_step,
    "loss-by-time": loss_by_time,
    "loss-by-step-devices": devices_by_step,
    "loss-by-time-devices": devices_by_time,
    "block-times": block_times,
}
"""None where a run has nothing to show of it."""
WITH_PEERS = ("climb", "rungs", "block-times")
"""The other pictures are of toggles, and so of our own rungs."""
NOT_ON_PAGE = (
    "rungs",
    "loss-by-step",
    "loss-by-time",
    "loss-by-step-devices",
    "loss-by-time-devices",
    "block-times",
)
"""Their figures are in the page's tables, but for a run's curves of loss, which would take as much as all the
rest.
"""

OF_ALL: dict[str, Callable[[Sequence[Scoreboard]], Figure | None]] = {
    "summary": summary,
    "hardware": hardware,
    "loss-by-step-machines": machines_by_step,
    "loss-by-time-machines": machines_by_time,
}


def pictures(board: Scoreboard) -> dict[str, str]:
    """What the page shows of a run, as SVG on light paper."""
    shown = [what for what in OF_A_RUN if what not in NOT_ON_PAGE]
    with theme("light"):
        return {what: svg(figure) for what in shown if (figure := _of_a_run(what, board))}


def _of_a_run(what: str, board: Scoreboard) -> Figure | None:
    return OF_A_RUN[what](board if what in WITH_PEERS else board.own)


def of_all(boards: Sequence[Scoreboard]) -> dict[str, str]:
    """What several runs have to show together, likewise."""
    with theme("light"):
        return {what: svg(figure) for what, picture in OF_ALL.items() if (figure := picture(_own(boards)))}


def _own(boards: Sequence[Scoreboard]) -> list[Scoreboard]:
    return [board.own for board in boards]


def _stems(boards: Sequence[Scoreboard]) -> list[str]:
    """Beginnings of files' names: machine and ladder; of a second run of these, also when it began."""
    stems: list[str] = []
    for board in boards:
        stem = f"{board.environment.machine}-{board.file_name}"
        stems.append(f"{stem}-{re.sub(r'[^0-9T]', '', board.begun[:19])}" if stem in stems else stem)
    return stems


def draw(boards: Sequence[Scoreboard], out: Path) -> list[Path]:
    """Draw all that these runs have something to show of, into out/plots; gives the files. Raises OSError."""
    folder = out / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name in THEMES:
        suffix = "" if name == "light" else f"-{name}"
        with theme(name):
            for board, stem in zip(boards, _stems(boards), strict=True):
                for what in OF_A_RUN:
                    if figure := _of_a_run(what, board):
                        files += save(figure, folder / f"{stem}-{what}{suffix}")
            for what, picture_of_all in OF_ALL.items():
                if figure := picture_of_all(_own(boards)):
                    files += save(figure, folder / f"{what}{suffix}")
    return files

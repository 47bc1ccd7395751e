"""All pictures, drawn on light and on dark paper, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from bench.analysis.scoreboard import Scoreboard
from bench.records.published import Published
from bench.report.folder import stems
from bench.report.plots.atlas import atlas_picture
from bench.report.plots.curves import device_curves, run_curves, rung_curves
from bench.report.plots.machine import block_times
from bench.report.plots.memory import memory_by_batch
from bench.report.plots.roofline import roofline
from bench.report.plots.rungs import attribution, climb, panels
from bench.report.plots.scaling import batch_sizes, world_sizes
from bench.report.plots.style import THEMES, save, theme
from bench.report.plots.summary import summary

OF_A_RUN: dict[str, Callable[[Scoreboard], Figure | None]] = {
    "climb": climb,
    "rungs": panels,
    "attribution": attribution,
    "roofline": roofline,
    "batch": batch_sizes,
    "memory-by-batch": memory_by_batch,
    "world-size": world_sizes,
    "loss-by-step": partial(rung_curves, by_time=False),
    "loss-by-time": partial(rung_curves, by_time=True),
    "loss-by-step-devices": partial(device_curves, by_time=False),
    "loss-by-time-devices": partial(device_curves, by_time=True),
    "block-times": block_times,
}
"""Pictures of a run by name; a function returns None where a run has nothing to show."""
WITH_PEERS = ("climb", "rungs", "block-times")
"""Pictures that include other trainers; the others are of toggles, and so of our own rungs."""
WITH_PUBLISHED: dict[str, Callable[[Sequence[Scoreboard], Sequence[Published]], Figure | None]] = {
    "summary": summary,
    "atlas": atlas_picture,
}
"""Pictures of all results together, with published figures where they go with ours."""
OF_ALL: dict[str, Callable[[Sequence[Scoreboard]], Figure | None]] = {
    "loss-by-step-machines": partial(run_curves, by_time=False),
    "loss-by-time-machines": partial(run_curves, by_time=True),
}
"""Pictures of several runs together, likewise."""


def _of_a_run(board: Scoreboard, names: Sequence[str]) -> Iterator[tuple[str, Figure]]:
    for name in names:
        if figure := OF_A_RUN[name](board if name in WITH_PEERS else board.own):
            yield name, figure


def _of_all(
    boards: Sequence[Scoreboard], figures: Sequence[Published], every: Sequence[Scoreboard]
) -> Iterator[tuple[str, Figure]]:
    own = [board.own for board in boards]
    for name, with_figures in WITH_PUBLISHED.items():
        if figure := with_figures(every, figures):
            yield name, figure
    for name, picture in OF_ALL.items():
        if figure := picture(own):
            yield name, figure


def draw(
    boards: Sequence[Scoreboard],
    out: Path,
    figures: Sequence[Published] = (),
    passed_over: Sequence[Scoreboard] = (),
) -> list[Path]:
    """Draw all pictures of these runs into out/plots; returns the files. Raises OSError.

    figures: published ones. passed_over: other runs, for the pictures that are made of all results.
    """
    folder = out / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for paper in THEMES:
        suffix = "" if paper == "light" else f"-{paper}"
        with theme(paper):
            for board, stem in zip(boards, stems(boards), strict=True):
                for name, figure in _of_a_run(board, tuple(OF_A_RUN)):
                    files += save(figure, folder / f"{stem}-{name}{suffix}")
            for name, figure in _of_all(boards, figures, [*boards, *passed_over]):
                files += save(figure, folder / f"{name}{suffix}")
    return files

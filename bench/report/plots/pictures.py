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
from bench.report.plots.curves import block_times, device_curves, run_curves, rung_curves
from bench.report.plots.memory import memory_by_batch
from bench.report.plots.roofline import roofline
from bench.report.plots.rungs import attribution, climb, panels
from bench.report.plots.scaling import batch_sizes, world_sizes
from bench.report.plots.style import draw_on_both_papers
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
"""Pictures of a run by name; None where it has nothing to show."""
WITH_PEERS = ("climb", "rungs", "block-times")
"""Pictures that include other trainers; the others are of toggles, and so of our own rungs."""


def draw(
    boards: Sequence[Scoreboard],
    out: Path,
    figures: Sequence[Published] = (),
    passed_over: Sequence[Scoreboard] = (),
) -> list[Path]:
    """Draw all pictures of these runs into out/plots; returns the files. Raises OSError.

    figures: published ones. passed_over: other runs, for the pictures that are made of all results.
    """

    def pictures() -> Iterator[tuple[str, Figure | None]]:
        own, every = [board.own for board in boards], [*boards, *passed_over]
        for board, stem in zip(boards, stems(boards), strict=True):
            for name, picture in OF_A_RUN.items():
                yield f"{stem}-{name}", picture(board if name in WITH_PEERS else board.own)
        yield "summary", summary(every, figures)
        yield "atlas", atlas_picture(every, figures)
        yield "loss-by-step-machines", run_curves(own, by_time=False)
        yield "loss-by-time-machines", run_curves(own, by_time=True)

    return draw_on_both_papers(out, pictures)

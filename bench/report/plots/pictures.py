"""All pictures, drawn on light and on dark paper, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.analysis.scoreboard import Scoreboard
from bench.records.published import Published
from bench.report.folder import stems
from bench.report.plots.atlas import atlas_picture
from bench.report.plots.losses import losses_by_step
from bench.report.plots.rungs import climb, panels
from bench.report.plots.style import draw_on_both_papers
from bench.report.plots.summary import summary

OF_A_RUN: dict[str, Callable[[Scoreboard], Figure | None]] = {
    "climb": climb,
    "rungs": panels,
    "loss-by-step": losses_by_step,
}
"""Pictures of a run by name; None where it has nothing to show."""


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
        for board, stem in zip(boards, stems(boards), strict=True):
            for name, picture in OF_A_RUN.items():
                yield f"{stem}-{name}", picture(board)
        every = [*boards, *passed_over]
        yield "summary", summary(every, figures)
        yield "atlas", atlas_picture(every, figures)

    return draw_on_both_papers(out, pictures)

"""What helps on which hardware, as a picture: optimisation by machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.atlas import AtlasRow, Cell
from bench.format import plural, spread, times
from bench.records.published import Published
from bench.report.plots import style
from bench.report.several_runs.atlas import TITLE, pictured

COLUMN, ROW = 1.25, 0.31
"""Width and height of a cell, in inches."""
LETTERS = 50
"""Most letters in a line of a change's name."""
LOOKS: dict[str, dict[str, Any]] = {
    "faster": {"facecolor": style.FASTER, "alpha": 0.55, "lw": 0},
    "slower": {"facecolor": style.SLOWER, "alpha": 0.55, "lw": 0},
}
"""How a cell is drawn, by its verdict."""
UNSURE: dict[str, Any] = {"facecolor": style.NEITHER, "alpha": 0.22, "lw": 0}
PUBLISHED: dict[str, Any] = {
    "facecolor": "none",
    "edgecolor": style.NEITHER,
    "hatch": "////",
    "alpha": 0.45,
    "lw": 0.8,
}


def atlas_picture(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> Figure | None:
    """The gain of each change on each machine, as far as there is room; None for fewer than two machines."""
    found = pictured(boards, figures)
    if found is None:
        return None
    shown, machines, published = found.lines, found.machines, found.published
    heads = [*machines, *(f"{title}, published" for title in published)]
    figure = Figure(figsize=(3.6 + COLUMN * len(heads), 2.1 + ROW * len(shown)))
    axes = figure.add_subplot()
    at = style.label_rows(axes, [f"{'≠ ' if line.differs else ''}{line.title}" for line in shown], LETTERS)
    for y, line in zip(at, shown, strict=True):
        for x, title in enumerate(machines):
            if cell := line.cells.get(title):
                look = LOOKS.get(cell.verdict or "", UNSURE)
                _cell(axes, x, y, _written(cell), f"{line.title} on {title}", look)
        for x, title in enumerate(published, start=len(machines)):
            if title in line.published:
                gain = times(line.published[title])
                _cell(axes, x, y, gain, f"{line.title} on {title}, published", PUBLISHED)
    axes.set_xlim(-0.5, len(heads) - 0.5)
    axes.set_xticks(range(len(heads)), [style.wrapped(head, 18) for head in heads], fontsize=8.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    kinds = [Patch(**look, label=name) for name, look in LOOKS.items()]
    kinds.append(Patch(**UNSURE, label="no difference, or unclear"))
    kinds += [Patch(**PUBLISHED, label="published, not measured here")] if published else []
    figure.legend(handles=kinds, loc="outside lower left", ncols=4)
    title = "\n".join(filter(None, (_finding(shown), _reading(shown))))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, linespacing=1.3)
    return figure


def _cell(axes: Axes, x: int, y: float, words: str, tip: str, look: dict[str, Any]) -> None:
    box = axes.add_patch(Rectangle((x - 0.48, y - 0.44), 0.96, 0.88, **look))
    style.tooltip([box], f"{tip}: {words}")
    weight = "bold" if look in LOOKS.values() else "normal"
    axes.text(x, y, words, ha="center", va="center", fontsize=9 if len(words) < 14 else 7, fontweight=weight)


def _written(cell: Cell) -> str:
    """Gain and interval; the verdict is the colour."""
    assert cell.ratio
    interval = spread(cell.ratio) or f"({plural(cell.ratio.rounds, 'round')})"
    return f"{times(cell.ratio.value)} {interval}"


def _finding(shown: Sequence[AtlasRow]) -> str:
    """The change that was faster on most machines."""

    def gains(line: AtlasRow) -> list[float]:
        return sorted(
            cell.ratio.value for cell in line.cells.values() if cell.ratio and cell.verdict == "faster"
        )

    best = max(shown, key=lambda line: (len(gains(line)), max(gains(line), default=0.0)))
    found = gains(best)
    if not found:
        return f"{TITLE}: nothing is faster beyond the noise yet"
    much = " to ".join(dict.fromkeys((times(found[0]), times(found[-1]))))
    return f"{TITLE}: {best.title} helps most often: {much} on {len(found)} of {len(best.cells)}"


def _reading(shown: Sequence[AtlasRow]) -> str:
    words = ["Tokens per second over the rung before, ±: 95 % interval"]
    if any(line.differs for line in shown):
        words.append("≠: faster on one, slower on another")
    return "; ".join(words)

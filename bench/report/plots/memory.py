"""Peak memory by sequences per device, and the line that says what one more sequence takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.report.plots.alike import Group, by_batch
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import COLOURS, MARKERS, NEITHER, tip
from bench.report.scoreboard import Scoreboard
from bench.report.text import GIB, number
from gpt2.toggles import HOST, Toggles

LEAST_SIZES = 3
"""For a fit: through two points a line always goes."""
WIDE = 64
"""Sizes that are further apart than this factor stand on a log scale."""


@dataclass(frozen=True)
class Line:
    """Peak memory as `fixed` plus `each` for every sequence; GiB."""

    each: float
    fixed: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size

    def meets(self, limit: float) -> float | None:
        """The number of sequences, a fraction mostly, that take `limit`; None where more take no more."""
        return (limit - self.fixed) / self.each if self.each > 0 else None


def fitted(points: Sequence[tuple[int, float]]) -> Line:
    """Least squares, all sizes of the same weight. points: (sequences per device, GiB), of two sizes at least."""
    each, fixed = numpy.polyfit([size for size, _ in points], [gib for _, gib in points], 1)
    return Line(float(each), float(fixed))


def device_gib(board: Scoreboard, toggles: Toggles) -> float | None:
    """What one rank may fill: a device's memory, or its part of the host's. None where it is not known."""
    machine = board.environment
    if toggles.device == HOST or machine.xla_on_cpu:
        return machine.memory_bytes / GIB / max(1, toggles.world_size // (machine.nodes or 1))
    return machine.device_memory_bytes / GIB if machine.device_memory_bytes else None


def memory_by_batch(board: Scoreboard) -> Figure | None:
    """Measured peaks, the line through them, and where it says that memory ends beside where it did end."""
    measured = [(group, _points(group)) for group in by_batch(board)]
    lines = [(group, points) for group, points in measured if len({size for size, _ in points}) > 1]
    if not lines:
        return None
    figure = Figure(figsize=(WIDTH, 4.6 + 0.34 * len(lines)))
    axes = figure.add_subplot()
    corners: list[tuple[float, float]] = []
    for place, (group, points) in enumerate(lines):
        corners += _draw(axes, board, group, points, place)
    sizes, gibs = zip(*corners, strict=True)
    wide = max(sizes) > WIDE * min(sizes)
    if wide:
        axes.set_xscale("log", base=2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlim(min(sizes) / 1.3 if wide else 0, (1.6 if wide else 1.1) * max(sizes))
    axes.set_ylim(0, 1.2 * max(gibs))
    axes.set_xlabel(f"sequences per device{' (log scale, on which a line is bent)' if wide else ''}")
    axes.set_ylabel("peak memory, GiB")
    method = next(row.peak_memory_method for group, _ in lines for row in group.rows if row.peak_memory_method)
    figure.legend(loc="outside lower left", fontsize=8)
    title = f"{board.ladder}: memory by batch size; {method}\n{about(board, intervals=False)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _points(group: Group) -> list[tuple[int, float]]:
    """Of the rungs whose memory was found out as the first one's: other methods do not compare."""
    known = [row for row in group.rows if row.peak_memory_bytes is not None]
    alike = [row for row in known if row.peak_memory_method == known[0].peak_memory_method]
    return [(row.toggles.micro_batch_size, (row.peak_memory_bytes or 0) / GIB) for row in alike]


def _ended(groups: Iterable[Group]) -> set[int]:
    return {row.toggles.micro_batch_size for group in groups for row in group.rows if row.status == "out_of_memory"}


def _draw(
    axes: Axes, board: Scoreboard, group: Group, points: Sequence[tuple[int, float]], place: int
) -> list[tuple[float, float]]:
    """One line; gives the points that it must have room for."""
    colour = COLOURS[place]
    line, exact = fitted(points), len({size for size, _ in points}) < LEAST_SIZES
    ended = min(_ended([group]), default=None)
    limit = device_gib(board, group.rows[0].toggles)
    meets = line.meets(limit) if limit is not None and not exact else None
    corners: list[tuple[float, float]] = [*points]
    if ended is not None and limit is not None and meets is not None and meets >= 1:
        corners.append((meets, limit))
        axes.axhline(limit, color=NEITHER, ls=":", lw=1)
        axes.plot(meets, limit, MARKERS[place], ms=9, mfc="none", color=colour, label="_meets")
    along = numpy.geomspace(min(size for size, _ in corners), max(size for size, _ in corners), 40)
    axes.plot(along, [line.at(size) for size in along], "--" if exact else "-", color=colour, lw=1.3, label="_line")
    if ended is not None:
        at = ended, limit if limit is not None else max(gib for _, gib in points)
        above = sum(mark.get_label() == "_ended" and ended in numpy.ravel(mark.get_xdata()) for mark in axes.lines)
        axes.plot(*at, "X", ms=8, color=colour, label="_ended")
        axes.annotate("OOM", at, xytext=(7, 9 * above + 3), textcoords="offset points", fontsize=8, color=colour)
        corners.append(at)
    label = "\n".join(filter(None, (group.label, _said(line, len(points), exact, limit, meets, ended))))
    marks = axes.plot(*zip(*points, strict=True), MARKERS[place], ls="", color=colour, ms=6, label=label)
    tip(marks, label.replace("\n", ": "))
    return corners


def _said(line: Line, count: int, exact: bool, limit: float | None, meets: float | None, ended: int | None) -> str:
    """In words: the line, and where memory ends by it and in truth."""
    each = f"{number(line.each * 1024)} MiB per sequence + {number(line.fixed)} GiB"
    if exact:
        return f"{each} (2 sizes: no fit)" + (f"; OOM at {ended}" if ended else "")
    words = [f"{each} (fit of {count} sizes)"]
    if meets is not None and limit is not None:
        words.append(f"by the line {math.floor(meets) + 1:,} is the first beyond {limit:.1f} GiB")
    if ended is not None:
        words.append(f"first OOM at {ended:,}")
    return "; ".join(words)

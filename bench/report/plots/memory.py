"""Peak memory by sequences per device, with a fitted line for the memory of one more sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.analysis.scoreboard import Scoreboard
from bench.format import GIB, number
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.scaling import Group, by_batch
from bench.report.plots.style import COLOURS, MARKERS, NEITHER, PLAIN, tooltip
from bench.report.screen import machine_title
from gpt2.config.toggles import HOST, Toggles

LEAST_SIZES = 3
"""Fewest sizes for a fit: a line always goes through two points."""
WIDE = 64
"""Ratio of sizes from which their axis is logarithmic."""
FAR = 64
"""Multiple of the largest size tried beyond which nothing is predicted."""
LEAST_RISE = 0.01
"""Least rise of the peak over all sizes, as a share of the mean, for a line: less is rounding."""
CLEAR = 2
"""Least ratio of a line's rise to a point's largest distance from it: less is noise."""


@dataclass(frozen=True)
class Line:
    """Peak memory as `fixed` plus `per_sequence` for every sequence, in GiB."""

    per_sequence: float
    fixed: float

    def at(self, size: float) -> float:
        return self.fixed + self.per_sequence * size

    def meets(self, limit: float) -> float:
        """Number of sequences that take `limit`, mostly a fraction; below 1 where not even one fits."""
        return (limit - self.fixed) / self.per_sequence

    def rises(self, points: Sequence[tuple[int, float]]) -> bool:
        """Whether the memory of a sequence is more than the rounding and noise of these points."""
        sizes, gibs = zip(*points, strict=True)
        rise = self.per_sequence * (max(sizes) - min(sizes))
        off = max(abs(gib - self.at(size)) for size, gib in points)
        return rise >= LEAST_RISE * sum(gibs) / len(gibs) and rise > CLEAR * off


def fitted(points: Sequence[tuple[int, float]]) -> Line:
    """Least-squares line, all sizes of the same weight.

    points: (sequences per device, GiB), of two sizes at least.
    """
    per_sequence, fixed = numpy.polyfit([size for size, _ in points], [gib for _, gib in points], 1)
    return Line(float(per_sequence), float(fixed))


def device_gib(board: Scoreboard, toggles: Toggles) -> float | None:
    """Memory that one rank may fill: a device's, or its part of the host's; None where it is not known."""
    machine = board.environment
    if toggles.device == HOST or machine.xla_on_cpu:
        return machine.memory_bytes / GIB / max(1, toggles.world_size // (machine.nodes or 1))
    return machine.device_memory_bytes / GIB if machine.device_memory_bytes else None


def memory_by_batch(board: Scoreboard) -> Figure | None:
    """Measured peaks, the line through them, and predicted and observed end of memory."""
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
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set_xlim(min(sizes) / 1.3 if wide else 0, (1.6 if wide else 1.1) * max(sizes))
    axes.set_ylim(0, 1.2 * max(gibs))
    axes.set_xlabel(f"sequences per device{' (log scale, on which a line is bent)' if wide else ''}")
    axes.set_ylabel("peak memory, GiB")
    rows = [row for group, _ in lines for row in group.rows]
    method = next(row.peak_memory_method for row in rows if row.peak_memory_method)
    figure.legend(loc="outside lower left", fontsize=8)
    title = f"{_title(board, lines)}\n{about(board, intervals=False)}; {method}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _title(board: Scoreboard, lines: Sequence[tuple[Group, Sequence[tuple[int, float]]]]) -> str:
    """What one more sequence takes, where one line tells it."""
    found = [fitted(points) for _, points in lines if fitted(points).rises(points)]
    if len(found) != 1:
        return f"Memory by batch size on {machine_title(board)}"
    return f"One more sequence takes {number(found[0].per_sequence * 1024)} MiB on {machine_title(board)}"


def _points(group: Group) -> list[tuple[int, float]]:
    """Sizes and peaks of the rungs whose memory was measured as the first one's."""
    known = [row for row in group.rows if row.peak_memory_bytes is not None]
    alike = [row for row in known if row.peak_memory_method == known[0].peak_memory_method]
    return [(row.toggles.micro_batch_size, (row.peak_memory_bytes or 0) / GIB) for row in alike]


def _draw(
    axes: Axes, board: Scoreboard, group: Group, points: Sequence[tuple[int, float]], place: int
) -> list[tuple[float, float]]:
    """Draw one line; returns the points that it needs room for."""
    colour, line = COLOURS[place], fitted(points)
    sizes = {size for size, _ in points}
    rises, fit = line.rises(points), len(sizes) >= LEAST_SIZES
    too_large = [r.toggles.micro_batch_size for r in group.rows if r.status == "out_of_memory"]
    ended = min(too_large, default=None)
    limit = device_gib(board, group.rows[0].toggles)
    meets = line.meets(limit) if limit is not None and rises and fit else None
    corners: list[tuple[float, float]] = [*points]
    if ended is not None and limit is not None and meets is not None and 1 <= meets <= FAR * max(sizes):
        corners.append((meets, limit))
        axes.axhline(limit, color=NEITHER, ls=":", lw=1)
        axes.plot(meets, limit, MARKERS[place], ms=9, mfc="none", color=colour, label="_meets")
    if rises:
        along = numpy.geomspace(min(size for size, _ in corners), max(size for size, _ in corners), 40)
        heights = [line.at(size) for size in along]
        axes.plot(along, heights, "-" if fit else "--", color=colour, lw=1.3, label="_line")
    if ended is not None:
        at = ended, limit if limit is not None else max(gib for _, gib in points)
        marks = [mark for mark in axes.lines if mark.get_label() == "_ended"]
        above = sum(ended in numpy.ravel(mark.get_xdata()) for mark in marks)
        axes.plot(*at, "X", ms=8, color=colour, label="_ended")
        small = {"textcoords": "offset points", "fontsize": 8, "color": colour}
        axes.annotate("OOM", at, xytext=(7, 9 * above + 3), **small)
        corners.append(at)
    words = [_line(line, len(sizes)) if rises else _flat(points)]
    if meets is not None and limit is not None:
        words.append(_end(meets, limit, max(sizes)))
    if ended is not None:
        words.append(f"first OOM at {ended:,}")
    label = "\n".join(filter(None, (group.label, "; ".join(words))))
    marks = axes.plot(*zip(*points, strict=True), MARKERS[place], ls="", color=colour, ms=6, label=label)
    tooltip(marks, label.replace("\n", ": "))
    return corners


def _line(line: Line, count: int) -> str:
    """The line in words."""
    fixed = f"{'-' if line.fixed < 0 else '+'} {number(abs(line.fixed))} GiB"
    fit = f"fit of {count} sizes" if count >= LEAST_SIZES else "2 sizes: no fit"
    return f"{number(line.per_sequence * 1024)} MiB per sequence {fixed} ({fit})"


def _flat(points: Sequence[tuple[int, float]]) -> str:
    """In words: the peaks that no line explains."""
    gibs = sorted(gib for _, gib in points)
    ends = dict.fromkeys((number(gibs[0]), number(gibs[-1])))
    return f"{' to '.join(ends)} GiB: what a sequence takes does not show"


def _end(meets: float, limit: float, largest: int) -> str:
    """In words: where memory ends by the line."""
    if meets < 1:
        return f"by the line no batch fits into {limit:.1f} GiB"
    if meets > FAR * largest:
        return f"by the line {limit:.1f} GiB is far beyond what was tried"
    return f"by the line {math.floor(meets) + 1:,} is the first beyond {limit:.1f} GiB"

"""Rungs that differ in their batch only, or in their number of devices only, joined by lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter

from bench.analysis.row import Row
from bench.analysis.run_records import group_by, varying, without_batch
from bench.analysis.scoreboard import Scoreboard
from bench.format import number, percent
from bench.report.plots.rungs import WIDTH, Value, about, limit_axis, peak_gib
from bench.report.plots.style import COLOURS, MARKERS, NEITHER, PLAIN, draw_intervals, shortened, tooltip
from bench.report.screen import machine_title
from bench.stats import Estimate
from gpt2.config.toggles import Toggles

MOST = 6
"""Most lines in one picture; those of most rungs are kept."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rungs that are alike but for their size."""

    label: str
    """Toggles in which it differs from the other groups; empty for the only one."""
    rows: tuple[Row, ...]
    """Rows by size, the smallest first."""


def by_batch(board: Scoreboard) -> list[Group]:
    """Groups of rungs that differ in the sequences per device only, and in what follows from these."""
    by_toggles = group_by(board.rows, lambda row: without_batch(row.toggles, board.workload))
    return _groups(by_toggles, lambda row: row.toggles.micro_batch_size)


def by_devices(board: Scoreboard) -> list[Group]:
    """Groups of rungs that differ in the number of devices only; each sharding begins with one device."""
    by_toggles = group_by(board.rows, lambda row: replace(row.toggles, world_size=1, grad_accum_steps=1))
    alone = {key: [row for row in rows if row.toggles.world_size == 1] for key, rows in by_toggles.items()}
    for key, rows in by_toggles.items():
        if key.sharding != "none":
            rows += alone.get(replace(key, sharding="none"), [])
    return _groups(by_toggles, lambda row: row.toggles.world_size)


def _groups(by_toggles: dict[Toggles, list[Row]], size: Callable[[Row], int]) -> list[Group]:
    """The groups with several sizes, at most MOST."""
    lines = {key: rows for key, rows in by_toggles.items() if len({size(row) for row in rows}) > 1}
    kept = sorted(lines, key=lambda key: -len(lines[key]))[:MOST]
    kept = [key for key in lines if key in kept]
    return [Group(label=_difference(key, kept), rows=tuple(sorted(lines[key], key=size))) for key in kept]


def _difference(key: Toggles, others: Sequence[Toggles]) -> str:
    return shortened(", ".join(f"{name}={getattr(key, name)}" for name in varying(*others)), 60)


# --- Pictures

LABELLED = 1
"""Most lines whose points are labelled; labels of more would overlap."""


def batch_sizes(board: Scoreboard) -> Figure | None:
    """Tokens per second, share of the limit and memory by batch; what ran out of memory is marked."""
    groups = by_batch(board)
    sizes = sorted({row.toggles.micro_batch_size for group in groups for row in group.rows})
    if not any(row.tps for group in groups for row in group.rows):
        return None
    columns: list[tuple[str, Value]] = [
        ("tokens per second", lambda row: row.tps),
        limit_axis(board),
        ("peak memory, GiB", peak_gib),
    ]
    columns = [(t, value) for t, value in columns if any(value(row) for g in groups for row in g.rows)]
    labelled = len(groups) <= LABELLED
    figure = Figure(figsize=(1.6 * WIDTH * len(columns) / 3, 3.8 + 0.2 * len(groups)))
    for axes, (label, value) in zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True):
        for place, group in enumerate(groups):
            _line(axes, group, lambda row: row.toggles.micro_batch_size, value, place, labelled=labelled)
            if too_large := [r.toggles.micro_batch_size for r in group.rows if r.status == "out_of_memory"]:
                _out_of_memory(axes, min(too_large), place)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_apart(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("sequences per device (log scale)")
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.margins(0.12)
        # A window that went wrong may have an interval of any length: the axis ends before it.
        most = max(each.value for group in groups for row in group.rows if (each := value(row)))
        axes.set_ylim(0, min(1.05 * axes.get_ylim()[1], 1.6 * most))
    _finish(figure, groups, f"{_largest(board, groups)}\n{about(board)}")
    return figure


def world_sizes(board: Scoreboard) -> Figure | None:
    """Tokens per second, share of the limit and efficiency by devices, with perfect scaling beside."""
    groups = [
        group for group in by_devices(board) if len({r.toggles.world_size for r in group.rows if r.tps}) > 1
    ]
    if not groups:
        return None
    over = sorted({row.efficiency_over for group in groups for row in group.rows if row.efficiency_over})
    columns: list[tuple[str, Value]] = [
        ("tokens per second, all devices", lambda row: row.tps),
        limit_axis(board),
        (f"efficiency over {over[0] if len(over) == 1 else 'the same on fewer devices'}, %", _efficiency),
    ]
    columns = [(t, value) for t, value in columns if any(value(row) for g in groups for row in g.rows)]
    labelled = len(groups) <= LABELLED
    figure = Figure(figsize=(1.6 * WIDTH * max(2, len(columns)) / 3, 4 + 0.2 * len(groups)))
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for axes, (label, value) in zip(panels, columns, strict=True):
        for place, group in enumerate(groups):
            if axes is panels[0]:
                _linear(axes, group, label=None if place else "linear")
            _line(axes, group, lambda row: row.toggles.world_size, value, place, labelled=labelled)
        if value is _efficiency:
            axes.axhline(100, color=NEITHER, ls="--", lw=1)
        axes.set_ylabel(label)
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set_xlabel("devices")
        axes.set_xticks(sorted({row.toggles.world_size for group in groups for row in group.rows if row.tps}))
        axes.margins(0.12)
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        axes.set_xlim(panels[0].get_xlim())
    panels[0].legend()
    _finish(figure, groups, f"{_widest(board, groups)}\n{about(board)}")
    return figure


def _largest(board: Scoreboard, groups: Sequence[Group]) -> str:
    """The batch with most tokens per second, where the run's fastest sound rung is one of those drawn."""
    best = board.fastest
    if best is None or not any(best in group.rows for group in groups):
        return f"Batch sizes on {machine_title(board)}"
    most = f"{number(best.mean_tps)} tokens/s{'' if board.sure else ', if not surely'}"
    return f"A batch of {best.toggles.micro_batch_size} is fastest on {machine_title(board)}: {most}"


def _widest(board: Scoreboard, groups: Sequence[Group]) -> str:
    """How well the most devices scale, where that is known."""
    rows = [row for group in groups for row in group.rows if row.efficiency]
    if not rows:
        return f"Several devices: {machine_title(board)}"
    widest = max(row.toggles.world_size for row in rows)
    best = max(row.efficiency.value for row in rows if row.efficiency and row.toggles.world_size == widest)
    return f"{widest} devices reach {percent(best)} of linear scaling: {machine_title(board)}"


def _linear(axes: Axes, group: Group, label: str | None) -> None:
    """Draw perfect scaling from the fewest devices."""
    rows = [row for row in group.rows if row.tps]
    one = rows[0].mean_tps / rows[0].toggles.world_size
    linear = [(row.toggles.world_size, one * row.toggles.world_size) for row in rows]
    axes.plot(*zip(*linear, strict=True), "--", color=NEITHER, label=label, lw=1)


def _efficiency(row: Row) -> Estimate | None:
    return row.efficiency.divided_by(0.01) if row.efficiency else None


def _line(
    axes: Axes,
    group: Group,
    size: Callable[[Row], int],
    value: Value,
    place: int,
    *,
    labelled: bool,
) -> None:
    points = [(size(row), each, row) for row in group.rows if (each := value(row)) is not None]
    sizes, colour = [at for at, _, _ in points], COLOURS[place]
    draw_intervals(axes, sizes, [each for _, each, _ in points], upright=True, colour=colour)
    axes.plot(sizes, [each.value for _, each, _ in points], "-", color=colour, lw=1.5, label="_line")
    labelled_sizes = _apart(sizes) if labelled else []
    for at, each, row in points:
        y = each.value
        mark = axes.plot(at, y, MARKERS[place], color=colour, ms=6)
        tooltip(mark, f"{row.rung}: {number(y)}")
        if at in labelled_sizes:
            axes.annotate(number(y), (at, each.high or y), xytext=(4, 4), **SMALL)


SMALL = {"textcoords": "offset points", "fontsize": 8}


def _apart(sizes: Sequence[int]) -> list[int]:
    """Sizes far enough apart for labels on an axis of powers of two: bisection ends on neighbours."""
    kept: list[int] = []
    for size in sorted(set(sizes)):
        if not kept or size >= 1.4 * kept[-1]:
            kept.append(size)
    return kept


def _out_of_memory(axes: Axes, size: int, place: int) -> None:
    """Mark an out-of-memory size near the axis, each line at its own height."""
    at = 0.04 + 0.07 * place
    axes.plot(size, at, "X", ms=7, color=COLOURS[place], transform=axes.get_xaxis_transform(), clip_on=False)
    axes.annotate("OOM", (size, at), xycoords=("data", "axes fraction"), ha="right", xytext=(-7, -3), **SMALL)


def _finish(figure: Figure, groups: Sequence[Group], title: str) -> None:
    if len(groups) > 1:
        axes = figure.axes[0]
        for place, group in enumerate(groups):
            axes.plot([], [], "-", marker=MARKERS[place], color=COLOURS[place], label=group.label)
        marks, labels = axes.get_legend_handles_labels()
        named = [(mark, label) for mark, label in zip(marks, labels, strict=True) if label != "linear"]
        figure.legend(*zip(*named, strict=True), loc="outside lower center", ncols=2)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)

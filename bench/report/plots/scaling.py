"""Rungs that differ in their batch only, or in their number of devices only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, ScalarFormatter

from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import COLOURS, NEITHER
from bench.report.scoreboard import Row, Scoreboard
from bench.report.text import GIB, number
from gpt2.toggles import Toggles


def batch_sizes(board: Scoreboard) -> Figure | None:
    """Tokens per second, MFU and memory by sequences per device; what ran out of memory is marked."""
    rows = _longest(board, lambda t: replace(t, micro_batch_size=1, grad_accum_steps=1))
    sizes = [row.toggles.micro_batch_size for row in rows]
    if len(set(sizes)) < 2:
        return None
    figure = Figure(figsize=(2 * WIDTH, 4))
    every = figure.subplots(1, 3)
    for axes, label, colour, value in (
        (every[0], "tokens per second", COLOURS[0], lambda row: row.tps and row.tps.value),
        (every[1], "MFU, % of bf16 peak", COLOURS[2], lambda row: row.mfu and 100 * row.mfu),
        (every[2], "peak memory, GiB", COLOURS[3], lambda row: row.peak_memory_bytes and row.peak_memory_bytes / GIB),
    ):
        _line(axes, rows, sizes, value, colour)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(set(sizes)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("sequences per device (log scale)")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        for row in rows:
            if row.status == "out_of_memory":
                axes.axvline(row.toggles.micro_batch_size, color=NEITHER, ls=":")
                axes.annotate("OOM", (row.toggles.micro_batch_size, 0.5), xycoords=("data", "axes fraction"))
    figure.suptitle(f"{board.ladder}: batch size. {about(board, intervals=False)}", x=0.01, ha="left", fontsize=10)
    return figure


def world_sizes(board: Scoreboard) -> Figure | None:
    """Tokens per second and efficiency by devices, with what perfect scaling would be."""
    rows = _longest(board, lambda t: replace(t, world_size=1, grad_accum_steps=1, sharding="none"))
    rows = [row for row in rows if row.tps]
    sizes = [row.toggles.world_size for row in rows]
    if len(set(sizes)) < 2:
        return None
    figure = Figure(figsize=(1.6 * WIDTH, 4))
    speed, share = figure.subplots(1, 2)
    first = min(rows, key=lambda row: row.toggles.world_size)
    assert first.tps is not None
    linear = [first.tps.value / first.toggles.world_size * size for size in sizes]
    speed.plot(sizes, linear, "--", color=NEITHER, label="linear")
    _line(speed, rows, sizes, lambda row: row.tps and row.tps.value, COLOURS[0])
    speed.legend()
    speed.set_ylabel("tokens per second, all devices")
    speed.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    _line(share, rows, sizes, lambda row: row.efficiency and 100 * row.efficiency.value, COLOURS[2])
    share.axhline(100, color=NEITHER, ls="--")
    share.set_ylabel(f"efficiency over {first.rung}, %")
    for axes in (speed, share):
        axes.set_xlabel("devices")
        axes.set_xticks(sorted(set(sizes)))
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"{board.ladder}: several devices. {about(board, intervals=False)}", x=0.01, ha="left", fontsize=10
    )
    return figure


def _longest(board: Scoreboard, alike: Callable[[Toggles], Toggles]) -> list[Row]:
    """Of the rungs that are alike but for one thing, most."""
    groups: dict[Toggles, list[Row]] = {}
    for row in board.rows:
        groups.setdefault(alike(row.toggles), []).append(row)
    return max(groups.values(), key=len)


def _line(axes: Axes, rows: list[Row], sizes: list[int], value: Callable[[Row], float | None], colour: str) -> None:
    points = [(size, found, row) for size, row in zip(sizes, rows, strict=True) if (found := value(row)) is not None]
    axes.plot([size for size, _, _ in points], [found for _, found, _ in points], "o-", color=colour)
    for size, found, _ in points:
        axes.annotate(number(found), (size, found), textcoords="offset points", xytext=(4, 6), fontsize=8)

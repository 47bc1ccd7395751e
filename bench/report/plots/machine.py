"""How evenly the machine ran: noise and throttling show in the blocks of the timed windows."""

from __future__ import annotations

from datetime import datetime
from statistics import median

from matplotlib.figure import Figure

from bench.analysis.scoreboard import Scoreboard
from bench.format import times
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import colour_and_marker, legend_label
from bench.report.screen import machine_title


def block_times(board: Scoreboard) -> Figure | None:
    """Each block's duration over its rung's median, by the time when its process began."""
    start = datetime.fromisoformat(board.begun)
    rungs = board.records.measured_rungs
    wide = any(len(rung[0].rung) > 28 for rung in rungs)
    figure = Figure(figsize=(WIDTH, 4.2 + 0.2 * len(rungs) / (1 if wide else 2)))
    axes = figure.add_subplot()
    ratios: list[float] = []
    for place, rung in enumerate(rungs):
        blocks = [
            ((datetime.fromisoformat(r.time) - start).total_seconds() / 60, r.measurement)
            for r in rung
            if r.status == "ok" and r.measurement and r.measurement.block_seconds
        ]
        if not blocks:
            continue
        median_seconds = median(seconds for _, m in blocks for seconds in m.block_seconds)
        points = []
        for minutes, m in blocks:
            begun = minutes + (m.startup_seconds + (m.first_step_seconds or 0.0)) / 60
            for seconds in m.block_seconds:
                points.append((begun, seconds / median_seconds))
                begun += seconds / 60
        ratios += [ratio for _, ratio in points]
        axes.plot(
            *zip(*points, strict=True),
            ls="",
            ms=3.5,
            label=legend_label(rung[0].rung, 64),
            **colour_and_marker(place),
        )
    if not ratios:
        return None
    axes.axhline(1, color=axes.xaxis.label.get_color(), lw=0.8)
    axes.set_xlabel("minutes since the run began")
    axes.set_ylabel("block's duration over its rung's median")
    figure.legend(loc="outside lower left", fontsize=8, ncols=1 if wide else 2)
    worst = f"The slowest block took {times(max(ratios))} its rung's median on {machine_title(board)}"
    title = f"{worst}\n{about(board, intervals=False)}"
    axes.set_title(title, fontsize=10)
    return figure

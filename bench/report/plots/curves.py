"""Curves of losses: by step they must coincide, by time the faster one leads. How evenly the machine ran.

A picture of losses compares the rungs of a run, its numbers of devices, or several runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from statistics import median

from matplotlib.figure import Figure

from bench.analysis.row import Row
from bench.analysis.run_records import group_by, measured
from bench.analysis.scoreboard import Scoreboard
from bench.format import times
from bench.records.measurement import Measurement
from bench.report.plots.rungs import WIDTH, about, rounds_of
from bench.report.plots.style import colour_and_marker, legend_label, shortened
from bench.report.screen import machine_title

CLOSE = 1.03
"""Ratio of speeds below which curves by time coincide."""
NARROW = 30
"""Longest label that leaves room for another beside it, in characters."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of one rung from its first step on."""

    label: str
    measurement: Measurement
    tokens_per_second: float


def rung_curves(board: Scoreboard, *, by_time: bool) -> Figure | None:
    """The losses of each rung, by step or by training time at the speed of the timed window."""
    curves = _curves((board, row, row.rung) for row in board.rows)
    title = f"{_agreement(board) if not by_time else 'Loss by time'}\n{about(board, intervals=False)}"
    return _draw(curves, title, by_time=by_time) if curves else None


def device_curves(board: Scoreboard, *, by_time: bool) -> Figure | None:
    """The losses of the fastest sound rung on each number of devices; None for one number."""
    by_devices = group_by(board.rows, lambda row: row.toggles.world_size)
    fastest = [(devices, board.fastest_of(rows)) for devices, rows in sorted(by_devices.items())]
    curves = _curves((board, row, f"{devices} x: {row.rung}") for devices, row in fastest if row)
    if len(curves) < 2:
        return None
    title = f"Loss by {_axis(by_time)}: the fastest sound rung on each number of devices"
    return _draw(curves, f"{title}\n{about(board, intervals=False)}", by_time=by_time)


def _name_of(board: Scoreboard) -> str:
    """Machine and ladder of a run."""
    return f"{shortened(board.environment.machine, 40)}, {shortened(board.ladder)}"


def run_curves(boards: Sequence[Scoreboard], *, by_time: bool) -> Figure | None:
    """The losses of the fastest sound rung of each run of one workload, text and step size.

    They are those that most runs have; None for one run.
    """
    fastest = [
        (board, row)
        for board in boards
        for rows in group_by(board.rows, lambda row: row.tokens_per_step).values()
        if (row := board.fastest_of(rows)) and row.tokens_per_step is not None
    ]

    def task(run: tuple[Scoreboard, Row]) -> str:
        record, size = run[0].records_of(run[0].rows[0])[0], run[1].tokens_per_step
        return str([size, record.data_sha256, *sorted({**record.workload, "tokens_per_step": None}.items())])

    by_task = group_by(fastest, task)
    runs = max(by_task.values(), key=len, default=[])
    curves = _curves((board, row, f"{_name_of(board)}: {row.rung}") for board, row in runs)
    if len(curves) < 2:
        return None
    workload = runs[0][0].workload
    title = (
        f"{workload['model']} on {workload['data']}, {curves[0].measurement.tokens_per_step:,} tokens per "
        f"step: loss by {_axis(by_time)}\nthe fastest sound rung of each run that takes such steps; "
        f"{rounds_of([board for board, _ in runs])}"
    )
    return _draw(curves, title, by_time=by_time)


def _agreement(board: Scoreboard) -> str:
    """Whether the losses of all rungs passed their check."""
    wrong = [row.rung for row in board.rows if row.status in ("parity_failed", "ranks_differ")]
    if wrong:
        return f"Loss by step; it differs with {shortened(', '.join(wrong), 60)}"
    alike = sum(row.status == "ok" and row.external is None for row in board.rows)
    checked = "; no rung's loss failed its check" if alike > 1 else ""
    return f"Loss by step{checked}"


def _axis(by_time: bool) -> str:
    return "time" if by_time else "step"


def _curves(rows: Iterable[tuple[Scoreboard, Row, str]]) -> list[Curve]:
    """Curves of the rungs that have a speed and more than one loss."""
    curves = []
    for board, row, label in rows:
        measurement = measured(board.records_of(row))
        if measurement and row.tps and len(measurement.losses) > 1:
            curves.append(Curve(label=label, measurement=measurement, tokens_per_second=row.tps.value))
    return curves


def _draw(curves: Sequence[Curve], title: str, *, by_time: bool) -> Figure:
    """Draw the curves; steps of another size than the first curve's, which see other tokens, are dashed."""
    columns = 1 if any(len(curve.label) > NARROW for curve in curves) else 2
    figure = Figure(figsize=(WIDTH, 4.2 + 0.2 * math.ceil(len(curves) / columns)))
    axes = figure.add_subplot()
    for place, curve in enumerate(curves):
        losses = [loss if math.isfinite(loss) else math.nan for loss in curve.measurement.losses]
        tokens_per_step = curve.measurement.tokens_per_step
        seconds = tokens_per_step / curve.tokens_per_second
        steps = [n * seconds if by_time else float(n) for n in range(1, len(losses) + 1)]
        same_step = tokens_per_step == curves[0].measurement.tokens_per_step
        label = legend_label(curve.label, NARROW * 3 // columns)
        label += "" if same_step else f" ({tokens_per_step:,} tokens per step)"
        # Curves that coincide shine through: the first is the widest.
        beneath = min(3, sum(_coincide(curve, other) for other in curves[place + 1 :]))
        axes.plot(
            steps,
            losses,
            ls="-" if same_step else "--",
            lw=1.3 + 2.2 * beneath if by_time else 1.3 + 4 * (len(curves) - 1 - place) / len(curves),
            ms=4 + 3 * beneath if by_time else 4,
            markevery=max(1, len(steps) // 12),
            label=label,
            **colour_and_marker(place),
        )
    axes.set_xlabel("seconds of training, by the speed of the timed window" if by_time else "optimiser step")
    axes.set_ylabel("training loss (nats per token)")
    figure.legend(loc="outside lower left", fontsize=8, ncols=columns)
    alike = any(_coincide(*both) for both in combinations(curves, 2))
    title += "\nwhere curves coincide, the wider one lies beneath" if alike or not by_time else ""
    axes.set_title(title, fontsize=10)
    return figure


def _coincide(a: Curve, b: Curve) -> bool:
    """Whether one curve hides the other by time, where both lose alike."""
    slow, fast = sorted((a.tokens_per_second, b.tokens_per_second))
    return a.measurement.tokens_per_step == b.measurement.tokens_per_step and fast < CLOSE * slow


# --- Blocks of the timed windows: noise and throttling show in them


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

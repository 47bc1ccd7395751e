"""Losses: by step they must lie on one another, by time the faster one is ahead.

Of the rungs of a run, of its numbers of devices, and of runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from matplotlib.figure import Figure

from bench.analysis.row import Row
from bench.analysis.run_records import measured
from bench.analysis.scoreboard import Scoreboard
from bench.records.measurement import Measurement
from bench.report.plots.boards import name_of, rounds_of
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import labelled, look

CLOSE = 1.03
"""Speeds that are no further apart draw one curve."""
NARROW = 30
"""Letters of a label that leave room for another beside it."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The losses of one rung from its first step on."""

    label: str
    found: Measurement
    tokens_per_second: float


def loss_by_step(board: Scoreboard) -> Figure | None:
    """Rungs that take steps of another size see other tokens: dashed."""
    return _of_rungs(board, by_time=False)


def loss_by_time(board: Scoreboard) -> Figure | None:
    """At the speed of the timed window, start-up and compilation left out."""
    return _of_rungs(board, by_time=True)


def devices_by_step(board: Scoreboard) -> Figure | None:
    """The fastest sound rung on each number of devices."""
    return _of_devices(board, by_time=False)


def devices_by_time(board: Scoreboard) -> Figure | None:
    """The same, by the time that the steps take."""
    return _of_devices(board, by_time=True)


def machines_by_step(boards: Sequence[Scoreboard]) -> Figure | None:
    """The fastest sound rung of each run that computes the same."""
    return _of_machines(boards, by_time=False)


def machines_by_time(boards: Sequence[Scoreboard]) -> Figure | None:
    """The same, by the time that the steps take."""
    return _of_machines(boards, by_time=True)


def _of_rungs(board: Scoreboard, *, by_time: bool) -> Figure | None:
    curves = _curves((board, row, row.rung) for row in board.rows)
    if not curves:
        return None
    return _drawn(
        curves, f"{board.ladder}: loss by {_axis(by_time)}\n{about(board, intervals=False)}", by_time=by_time
    )


def _of_devices(board: Scoreboard, *, by_time: bool) -> Figure | None:
    by_size: dict[int, list[Row]] = {}
    for row in board.rows:
        by_size.setdefault(row.toggles.world_size, []).append(row)
    best = [(size, board.fastest_of(rows)) for size, rows in sorted(by_size.items())]
    curves = _curves((board, row, f"{size} x: {row.rung}") for size, row in best if row)
    if len(curves) < 2:
        return None
    title = f"{board.ladder}: loss by {_axis(by_time)}, the fastest sound rung on each number of devices"
    return _drawn(curves, f"{title}\n{about(board, intervals=False)}", by_time=by_time)


def _of_machines(boards: Sequence[Scoreboard], *, by_time: bool) -> Figure | None:
    """Of the runs of one workload and text: those whose sound rungs take steps of the size that most runs
    have.
    """
    found: dict[str, list[tuple[Scoreboard, Row]]] = {}
    for board in boards:
        by_size: dict[int, list[Row]] = {}
        for row in board.rows:
            if row.tokens_per_step is not None:
                by_size.setdefault(row.tokens_per_step, []).append(row)
        same = board.records_of(board.rows[0])[0]
        what = {**same.workload, "tokens_per_step": None, "text": same.data_sha256}
        for size, rows in by_size.items():
            if best := board.fastest_of(rows):
                found.setdefault(f"{size} {sorted(what.items())}", []).append((board, best))
    runs = max(found.values(), key=len, default=[])
    curves = _curves((board, row, f"{name_of(board)}: {row.rung}") for board, row in runs)
    if len(curves) < 2:
        return None
    workload = runs[0][0].records[0].workload
    title = (
        f"{workload['model']} on {workload['data']}, {curves[0].found.tokens_per_step:,} tokens per step: "
        f"loss by {_axis(by_time)}\nthe fastest sound rung of each run that takes such steps; "
        f"{rounds_of([board for board, _ in runs], intervals=False)}"
    )
    return _drawn(curves, title, by_time=by_time)


def _axis(by_time: bool) -> str:
    return "time" if by_time else "step"


def _curves(rows: Iterable[tuple[Scoreboard, Row, str]]) -> list[Curve]:
    """Of rungs that have a speed and more than one loss."""
    curves = []
    for board, row, label in rows:
        found = measured(board.records_of(row))
        if found and row.tps and len(found.losses) > 1:
            curves.append(Curve(label=label, found=found, tokens_per_second=row.tps.value))
    return curves


def _drawn(curves: Sequence[Curve], title: str, *, by_time: bool) -> Figure:
    """Steps of another size than the first curve's are dashed."""
    columns = 1 if any(len(curve.label) > NARROW for curve in curves) else 2
    figure = Figure(figsize=(WIDTH, 4.2 + 0.2 * math.ceil(len(curves) / columns)))
    axes = figure.add_subplot()
    first = curves[0].found.tokens_per_step
    for place, curve in enumerate(curves):
        losses = [loss if math.isfinite(loss) else math.nan for loss in curve.found.losses]
        seconds = curve.found.tokens_per_step / curve.tokens_per_second
        steps = [n * seconds if by_time else float(n) for n in range(1, len(losses) + 1)]
        style = "-" if curve.found.tokens_per_step == first else "--"
        more = "" if style == "-" else f" ({curve.found.tokens_per_step:,} tokens per step)"
        every = max(1, len(steps) // 12)
        label = f"{labelled(curve.label, NARROW * 3 // columns)}{more}"
        # Curves that lie on one another shine through: the first is the widest.
        beneath = min(3, sum(_coincide(curve, other) for other in curves[place + 1 :]))
        width = 1.3 + 2.2 * beneath if by_time else 1.3 + 4 * (len(curves) - 1 - place) / len(curves)
        size = 4 + 3 * beneath if by_time else 4
        axes.plot(steps, losses, ls=style, lw=width, ms=size, markevery=every, label=label, **look(place))
    axes.set_xlabel("seconds of training, by the speed of the timed window" if by_time else "optimiser step")
    axes.set_ylabel("training loss (nats per token)")
    figure.legend(loc="outside lower left", fontsize=8, ncols=columns)
    alike = any(_coincide(*both) for both in combinations(curves, 2))
    title += "\nwhere curves coincide, the wider one lies beneath" if alike or not by_time else ""
    axes.set_title(title, fontsize=10)
    return figure


def _coincide(one: Curve, other: Curve) -> bool:
    """Whether one hides the other, by time, where both lose alike."""
    same = one.found.tokens_per_step == other.found.tokens_per_step
    return same and max(one.tokens_per_second, other.tokens_per_second) < CLOSE * min(
        one.tokens_per_second, other.tokens_per_second
    )

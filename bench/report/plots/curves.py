"""Losses of the rungs: by step they must lie on one another, by time the faster rung is ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from bench.record import Measurement
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import look, shortened
from bench.report.rungs import measured
from bench.report.scoreboard import Row, Scoreboard


def loss_by_step(board: Scoreboard) -> Figure | None:
    """Rungs that take steps of another size see other tokens: dashed."""
    return _losses(board, by_time=False)


def loss_by_time(board: Scoreboard) -> Figure | None:
    """At the speed of the timed window, start-up and compilation left out."""
    return _losses(board, by_time=True)


def _losses(board: Scoreboard, *, by_time: bool) -> Figure | None:
    curves = [(row, found) for row, found in _measured(board) if len(found.losses) > 1]
    if not curves:
        return None
    figure = Figure(figsize=(WIDTH, 4.6))
    axes = figure.add_subplot()
    size = board.rows[0].tokens_per_step
    for place, (row, found) in enumerate(curves):
        losses = [loss if math.isfinite(loss) else math.nan for loss in found.losses]
        seconds = found.tokens_per_step / row.tps.value if row.tps else math.nan
        steps = [n * seconds if by_time else float(n) for n in range(1, len(losses) + 1)]
        style = "-" if found.tokens_per_step == size else "--"
        more = "" if style == "-" else f" ({found.tokens_per_step:,} tokens per step)"
        label = f"{shortened(row.rung)}{more}"
        axes.plot(
            steps, losses, ls=style, lw=1.4, ms=4, markevery=max(1, len(steps) // 12), label=label, **look(place)
        )
    axes.set_xlabel("seconds of training, by the speed of the timed window" if by_time else "optimiser step")
    axes.set_ylabel("training loss (nats per token)")
    axes.legend(fontsize=8)
    axes.set_title(
        f"{board.ladder}: loss by {'time' if by_time else 'step'}\n{about(board, intervals=False)}", fontsize=10
    )
    return figure


def _measured(board: Scoreboard) -> Iterator[tuple[Row, Measurement]]:
    for row in board.rows:
        found = measured(board.records_of(row))
        if found and row.tps:
            yield row, found

"""The losses of a run's rungs by optimiser step: they must coincide where the tokens of a step do."""

from __future__ import annotations

import math

from matplotlib.figure import Figure

from bench.analysis.scoreboard import Scoreboard
from bench.report.one_run.caption import other_step
from bench.report.one_run.tables import loss_curves
from bench.report.plots.rungs import WIDTH, about
from bench.report.plots.style import colour_and_marker, legend_label, shortened

NARROW = 30
"""Longest label that leaves room for another beside it, in characters."""


def losses_by_step(board: Scoreboard) -> Figure | None:
    """The losses of each rung; steps of another size than the first one's see other tokens, and are dashed.

    None where no rung has a speed and more than one loss.
    """
    curves = loss_curves(board)
    if not curves:
        return None
    columns = 1 if any(len(row.rung) > NARROW for row, _ in curves) else 2
    figure = Figure(figsize=(WIDTH, 4.2 + 0.2 * math.ceil(len(curves) / columns)))
    axes = figure.add_subplot()
    for place, (row, m) in enumerate(curves):
        same_step = not other_step(row, board)
        label = legend_label(row.rung, NARROW * 3 // columns)
        axes.plot(
            range(1, len(m.losses) + 1),
            [loss if math.isfinite(loss) else math.nan for loss in m.losses],
            ls="-" if same_step else "--",
            lw=1.3 + 4 * (len(curves) - 1 - place) / len(curves),  # the first shines through beneath others
            ms=4,
            markevery=max(1, len(m.losses) // 12),
            label=label if same_step else f"{label} ({m.tokens_per_step:,} tokens per step)",
            **colour_and_marker(place),
        )
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("training loss (nats per token)")
    figure.legend(loc="outside lower left", fontsize=8, ncols=columns)
    beneath = "where curves coincide, the wider one lies beneath"
    axes.set_title(f"{_agreement(board)}\n{about(board, intervals=False)}\n{beneath}", fontsize=10)
    return figure


def _agreement(board: Scoreboard) -> str:
    """Whether the losses of all rungs passed their check."""
    wrong = [row.rung for row in board.rows if row.status in ("parity_failed", "ranks_differ")]
    if wrong:
        return f"Loss by step; {shortened(', '.join(wrong), 60)} failed the check"
    alike = sum(row.status == "ok" and row.external is None for row in board.rows)
    checked = "; no rung's loss failed its check" if alike > 1 else ""
    return f"Loss by step{checked}"

"""Machines side by side, and how pictures of several runs name them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.analysis.compare import RANKED
from bench.analysis.cross_run import fastest_rung, of_one_task
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import number, plural
from bench.report.plots import style
from bench.report.plots.rungs import PER_RUNG, WIDTH
from bench.report.screen import machine_title
from bench.stats import LEAST_ROUNDS, Estimate, independent_ratio


def name_of(board: Scoreboard) -> str:
    """Machine and ladder of a run."""
    return f"{style.shortened(board.environment.machine, 40)}, {style.shortened(board.ladder)}"


def _task(boards: Sequence[Scoreboard]) -> str:
    workload = boards[0].records[0].workload
    return f"{workload['model']}, T = {workload['seq_len']}"


def rounds_of(boards: Sequence[Scoreboard], *, intervals: bool = True) -> str:
    """Number of rounds, and whether there are intervals."""
    counts = sorted({board.rounds for board in boards})
    rounds = f"{counts[0]} to {counts[-1]} rounds" if len(counts) > 1 else plural(counts[0], "round")
    return f"{rounds}{', bars: 95 % interval' if intervals and counts[-1] >= LEAST_ROUNDS else ''}"


def hardware(boards: Sequence[Scoreboard]) -> Figure | None:
    """The first and the fastest sound rung of each run, as multiples of the slowest first rung.

    A first rung that is not sound shows its status instead. None where no first rung is sound.
    """
    every = of_one_task([board for board in boards if not board.swept])
    runs = sorted((board for board in every if board.fastest), key=_most, reverse=True)
    firsts = [board for board in runs if _sound(board.rows[0])]
    if len(runs) < 2 or not firsts:
        return None
    slowest = min(firsts, key=_first_tps)
    figure = Figure(figsize=(1.25 * WIDTH, 1.9 + 1.5 * PER_RUNG * len(runs)))
    axes = figure.add_subplot()
    at = style.label_rungs(axes, [f"{name_of(board)}\ntorch {board.environment.torch}" for board in runs], 90)
    ends = [(1.0, 1.0, "")]
    for y, board in zip(at, runs, strict=True):
        for row, where, colour in (
            (board.rows[0], y - 0.19, style.NEITHER),
            (board.fastest, y + 0.19, style.COLOURS[0]),
        ):
            assert row is not None
            ends.append(_bar(axes, where, colour, board, row, slowest))
    style.fit_log_axis(axes, min(low for low, _, _ in ends), [(high, words) for _, high, words in ends])
    style.plain_log(axes.xaxis)
    least = f"{number(_first_tps(slowest))} tokens per second"
    axes.set_xlabel(f"speed-up over the slowest first rung, {least} (log scale)")
    kinds = [
        Patch(color=style.NEITHER, label="first rung"),
        Patch(color=style.COLOURS[0], label="fastest rung"),
    ]
    figure.legend(handles=kinds, loc="outside lower left", ncols=2)
    best = _times(runs[0], runs[0].fastest, slowest) if runs[0].fastest else None
    whole = f", {number(best.value)}x the slowest first rung" if best else ""
    title = f"{_task(runs)}: {machine_title(runs[0])} is fastest{whole}"
    figure.suptitle(
        f"{title}\nThe first and the fastest sound rung of each run; {rounds_of(runs)}",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return figure


def _most(board: Scoreboard) -> float:
    entry = fastest_rung(board)
    return entry.row.tps.value if entry and entry.row.tps else 0.0


def _first_tps(board: Scoreboard) -> float:
    first = board.rows[0].tps
    return first.value if first else 0.0


def _sound(row: Row) -> bool:
    return row.tps is not None and row.status in RANKED


def _bar(
    axes: Axes, where: float, colour: str, board: Scoreboard, row: Row, slowest: Scoreboard
) -> tuple[float, float, str]:
    """Draw one rung over the first of `slowest`; returns its left and right end and the words beside it."""
    times = _times(board, row, slowest) if _sound(row) else None
    if row.tps is None or times is None:
        words = f"{style.shortened(row.rung)}: {'no round in common' if _sound(row) else status_of(row)}"
        style.text_beside(axes, 1, where, words)
        return 1.0, 1.0, words
    bar = axes.barh(where, times.value - 1, 0.36, 1, color=colour, lw=0)
    words = f"{number(times.value)}x, {number(row.tps.value)} ({style.shortened(row.rung)})"
    style.tooltip(bar, f"{name_of(board)}: {words}")
    style.draw_intervals(axes, [where], [(times.value, times.low, times.high)])
    style.text_beside(axes, times.high or times.value, where, words)
    return times.low or times.value, times.high or times.value, words


def _times(board: Scoreboard, row: Row, slowest: Scoreboard) -> Estimate | None:
    """Ratio over the slowest run's first rung, paired by round within one run."""
    if board is slowest:
        return row.speedup
    speeds, reference = tps_by_round(board.records_of(row)), slowest.records_of(slowest.rows[0])
    return independent_ratio([*speeds.values()], [*tps_by_round(reference).values()])

"""How near the rungs came to the bound measured on their machine."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.analysis.bound import Bound, bound_of, most_tokens_per_second
from bench.analysis.row import Row, status_of
from bench.analysis.scoreboard import Scoreboard
from bench.format import number, percent
from bench.report.plots import style
from bench.report.plots.rungs import PER_RUNG, WIDTH, about
from bench.report.screen import limit_tps, machine_title

PARTS = (
    ("matmuls, at the measured ceiling", "products_ms", style.COLOURS[0]),
    ("attention on the causal half, likewise", "attention_ms", style.COLOURS[5]),
    ("AdamW's traffic, at the speed of memory", "optimizer_ms", style.COLOURS[2]),
)


def roofline(board: Scoreboard) -> Figure | None:
    """Tokens per second against the bound, and the parts of the bound in the time of a step."""
    bounds = [(row, bound_of(board, row)) for row in board.rows]
    if not any(bound and bound.total_ms is not None and row.tps for row, bound in bounds):
        return None
    figure = Figure(
        figsize=(1.6 * WIDTH, 1.9 + style.total_height([row.rung for row in board.rows], PER_RUNG))
    )
    speed, time = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    at = style.label_rungs(speed, [row.rung for row in board.rows])
    ends: list[tuple[float, str]] = []
    for y, (row, bound) in zip(at, bounds, strict=True):
        if row.tps is None or row.tokens_per_step is None:
            style.text_instead(speed, y, status_of(row))
            continue
        style.draw_intervals(speed, [y], [row.tps])
        speed.plot(row.tps.value, y, "o", ms=7, color=style.COLOURS[0], label=None if ends else "measured")
        most = most_tokens_per_second(bound, row.tokens_per_step) if bound else None
        if bound is None or most is None:
            ends.append((row.tps.high or row.tps.value, f"{number(row.tps.value)}; no ceiling measured"))
            style.text_beside(speed, ends[-1][0], y, ends[-1][1])
            style.text_instead(time, y, bound.absent if bound and bound.absent else "no ceiling measured")
            continue
        _parts(time, y, row.rung, bound, 1e3 * row.tokens_per_step / row.tps.value, first=not ends)
        ends.append(_against(speed, y, row, bound, most, first=not ends))
    style.fit_log_axis(speed, min(row.tps.value for row in board.rows if row.tps), ends, part=0.62)
    style.plain_log(speed.xaxis)
    speed.set_xlabel("tokens per second (log scale)")
    time.set_xlabel("% of the measured step")
    time.set_xlim(left=0)
    time.grid(axis="y", visible=False)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{_finding(board)}\n{about(board)}\n"
        "The bound is what no step here can beat: all other work and communication counts as free",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return figure


def _finding(board: Scoreboard) -> str:
    """How near the fastest sound rung came to the bound."""
    best = board.fastest
    most = limit_tps(board, best) if best else None
    if best is None or most is None:
        return f"How near to the bound of {machine_title(board)}"
    reached = f"{percent(best.mean_tps / most)} of the bound of {machine_title(board)}"
    return f"{style.shortened(best.rung, 40)} reaches {reached}"


def _against(axes: Axes, y: float, row: Row, bound: Bound, most: float, *, first: bool) -> tuple[float, str]:
    """Draw a rung's speed against the bound; returns where its words begin, and the words."""
    assert row.tps is not None
    axes.plot(
        [row.tps.value, most],
        [y, y],
        "-",
        lw=5,
        color=style.NEITHER,
        alpha=0.35,
        solid_capstyle="butt",
        zorder=1,
    )
    axes.plot(most, y, "|", ms=16, mew=2.5, color=style.COLOURS[1], label="bound" if first else None)
    reached = f"{number(row.tps.value)}: {percent(row.tps.value / most)} of {number(most)}"
    end = max(most, row.tps.high or row.tps.value)
    style.text_beside(axes, end, y, reached)
    style.tooltip(axes.lines[-1:], f"{row.rung}: tokens/s: {reached}; {bound.number_format}")
    return end, reached


def _parts(axes: Axes, y: float, rung: str, bound: Bound, took: float, *, first: bool) -> None:
    """Draw the bound's parts as shares of the measured step, which took so many milliseconds."""
    left = 0.0
    for label, name, colour in PARTS:
        part = 100 * getattr(bound, name) / took
        bar = axes.barh(y, part, 0.62, left, color=colour, lw=0, label=label if first else None)
        style.tooltip(bar, f"{rung}: {label}: {number(getattr(bound, name))} of {number(took)} ms")
        left += part
    if left < 100:
        label = "what the bound leaves out, and what could be faster"
        axes.barh(
            y, 100 - left, 0.62, left, color=style.NEITHER, alpha=0.35, lw=0, label=label if first else None
        )

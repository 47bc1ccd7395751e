"""The rungs of a ladder: the climb, and each figure on its own."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.analysis.bound import limit_tps
from bench.analysis.row import Row, status_of
from bench.analysis.scoreboard import Scoreboard
from bench.format import GIB, number, plural, times, tokens_per_second, verdict_word
from bench.report.one_run.screen import DERIVED_MFU, MFU, OF_LIMIT, most_gained, share_of_limit
from bench.report.plots import style
from bench.report.titles import machine_title
from bench.stats import LEAST_ROUNDS, Estimate, Verdict

WIDTH = 8.0
FAR = 2.0
"""How many times as far as the last bar the limit is drawn at most; else it is told in words."""
PER_RUNG = 0.42
"""Height of a rung, in inches."""
Value = Callable[[Row], Estimate | None]
"""What a picture shows of a row."""


def about(board: Scoreboard, intervals: bool = True) -> str:
    """Subtitle of a picture: ladder, model, machine, torch and rounds."""
    machine = board.environment
    rounds = plural(board.rounds, "round")
    rounds += ", whiskers: 95 % interval" if intervals and board.rounds >= LEAST_ROUNDS else ""
    ladder, where = style.shortened(board.ladder, 48), style.shortened(machine.machine, 40)
    what = f"{ladder}: {board.workload['model']} on {where}"
    return f"{what}, torch {machine.torch}; {rounds}"


def rounds_of(boards: Sequence[Scoreboard]) -> str:
    """Number of rounds of several runs."""
    counts = sorted({board.rounds for board in boards})
    return f"{counts[0]} to {counts[-1]} rounds" if len(counts) > 1 else plural(counts[0], "round")


def finding(board: Scoreboard) -> str:
    """What a run came to, for a title: the whole speed-up of sound rungs, and the rung that gave most."""
    where, best, first = machine_title(board), board.fastest, board.rows[0]
    if best is None:
        return f"No rung is sound on {where}"
    if (over := board.over_first(best)) is None:
        return f"{number(best.mean_tps)} tokens/s on {where}"
    whole = f"{times(over.value)} on {where}"
    if board.swept:
        return f"{whole}: fastest with {style.shortened(best.rung, 60)}"
    if gained := most_gained(board):
        return f"{whole}: {style.shortened(gained[0].rung, 40)} gave most"
    return f"{whole}, from {style.shortened(first.rung, 22)} to {style.shortened(best.rung, 22)}"


def climb(board: Scoreboard) -> Figure | None:
    """Tokens per second from the first rung to the last, its factors and the limit; None for a sweep."""
    if not board.climbs:
        return None
    figure = Figure(figsize=(WIDTH, 1.3 + style.total_height([row.rung for row in board.taken], PER_RUNG)))
    axes = figure.add_subplot()
    at = style.label_rows(axes, [row.rung for row in board.taken])
    measured = [(row, row.tps) for row in board.rows if row.tps]
    limit = limit_tps(board, board.fastest) if board.fastest else None
    ends = [(tps.high or tps.value, _said(row, tps)) for row, tps in measured]
    far = f"; limit {number(limit)}" if limit and limit > FAR * max(end for end, _ in ends) else ""
    style.fit_axis(axes, [*ends, *([(limit, "")] if limit and not far else [])])
    if limit and not far:
        axes.axvline(limit, color=style.NEITHER, lw=1, ls=":", zorder=0)
        axes.text(limit, -0.62, f"limit {number(limit)}", ha="center", va="bottom", fontsize=8)
    for y, row in zip(at, board.taken, strict=True):
        if row.tps is None:
            style.text_instead(axes, y, status_of(row))
            continue
        tip = f"{row.rung}: {tokens_per_second(row.tps)} tokens/s; {', '.join(row.changed)}"
        _draw_bar(axes, y, row, row.tps, _colour(row, measured[0][0]), _said(row, row.tps), tip)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(style.PLAIN)
    verdicts = {row.verdict for row, _ in measured if not row.external}
    dashed = "; dashed: no effect" if any(row.status == "inert" for row, _ in measured) else ""
    axes.set_xlabel(f"tokens per second{far}{_legend(verdicts)}{dashed}")
    figure.suptitle(f"{finding(board)}\n{about(board)}", x=0.01, ha="left", fontsize=10)
    return figure


def _legend(verdicts: Container[str | None]) -> str:
    """A line that says what the colours of the bars mean, as far as they occur."""
    colours: dict[str, tuple[Verdict, ...]] = {
        "green": ("faster",),
        "orange": ("slower",),
        "grey": ("same", "unclear"),
    }
    found = {colour: [verdict_word(v) for v in meant if v in verdicts] for colour, meant in colours.items()}
    said = [f"{colour} {' or '.join(words)}" for colour, words in found.items() if words]
    return f"\nover the rung before: {', '.join(said)}" if said else ""


def _said(row: Row, tps: Estimate) -> str:
    """What stands beside a bar: the speed, the speed-up over the rung before and its verdict."""
    if row.external:
        return f"{number(tps.value)}, another trainer"
    ran = row.status == "ok" and not row.expect  # which needs no word beside its speed
    word = verdict_word(row.verdict) if row.verdict else "" if ran else status_of(row)
    if row.status == "inert":
        return f"{number(tps.value)}, {word}"
    gain = [times(row.gain.value), word] if row.gain else []
    return ", ".join(filter(None, [number(tps.value), *gain, "other maths" * row.other_maths]))


def _draw_bar(axes: Axes, y: float, row: Row, shown: Estimate, colour: str, said: str, tip: str) -> None:
    """Draw a rung's bar, with its interval, words beside it and a tooltip."""
    style_of: dict[str, Any] = {"color": colour, "lw": 0}
    if row.external or row.status == "inert":  # an outline, for it is no step of the climb
        style_of = {"facecolor": "none", "edgecolor": colour, "lw": 1.4, "ls": "--"}
    bar = axes.barh(y, shown.value, height=0.62, **style_of)
    style.tooltip(bar, tip)
    style.draw_interval(axes, y, shown)
    style.text_beside(axes, max(shown.value, shown.high or 0.0), y, said)


def _colour(row: Row, first: Row) -> str:
    if row is first:
        return style.COLOURS[0]
    return {"faster": style.FASTER, "slower": style.SLOWER}.get(row.verdict or "", style.NEITHER)


def panels(board: Scoreboard) -> Figure | None:
    """Tokens per second, speed-up, share of the limit and peak memory of each rung, as far as known."""
    if not any(row.tps for row in board.rows):
        return None
    columns: list[tuple[str, Value]] = [
        ("tokens per second", lambda row: row.tps),
        ("speed-up over the first rung", lambda row: row.speedup),
        limit_axis(board),
        ("peak memory, GiB", peak_gib),
    ]
    coloured = zip(columns, style.COLOURS, strict=False)
    shown = [(*column, colour) for column, colour in coloured if any(map(column[1], board.rows))]
    width = 1.6 * WIDTH * (1 + len(shown)) / (1 + len(columns))
    height = 1.4 + style.total_height([row.rung for row in board.taken], PER_RUNG)
    figure = Figure(figsize=(width, height))
    every = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    at = style.label_rows(every[0], [row.rung for row in board.taken])
    for axes, (label, value, colour) in zip(every, shown, strict=True):
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)
        for y, row in zip(at, board.taken, strict=True):
            if (each := value(row)) is None:
                style.text_instead(axes, y, status_of(row) if row.status != "ok" else "absent")
                continue
            said = number(each.value)
            _draw_bar(axes, y, row, each, colour, said, tip=f"{row.rung}: {said}, {label}")
        axes.margins(x=0.22)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(style.PLAIN)
    figure.suptitle(f"{finding(board)}\n{about(board)}", x=0.01, ha="left", fontsize=10)
    return figure


LIMITS = {
    MFU: "MFU, % of bf16 peak",
    OF_LIMIT: "% of the limit",
    DERIVED_MFU: "MFU, % of bf16 peak, derived peak",
}
"""Label of an axis, by what its shares are of."""


def limit_axis(board: Scoreboard) -> tuple[str, Value]:
    """Label of an axis with shares of the limit, and the share of a row in percent, without an interval."""
    name, share_of = share_of_limit(board)

    def percent(row: Row) -> Estimate | None:
        share = share_of(row)
        return Estimate(100 * share, None, None, rounds=1) if share is not None else None

    return LIMITS[name], percent


def peak_gib(row: Row) -> Estimate | None:
    """Peak memory of all rounds, without an interval."""
    peak = row.peak_memory_bytes
    return Estimate(peak / GIB, None, None, rounds=1) if peak is not None else None

"""Several runs in one picture: each machine's climb, and machines side by side."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from bench.analysis.compare import RANKED
from bench.analysis.cross_run import fastest_rung
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import group_by, tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import number, percent, plural
from bench.report.caption import derived_peak
from bench.report.plots import style
from bench.report.plots.rungs import PER_RUNG, WIDTH, bounds, peak_gib
from bench.stats import LEAST_ROUNDS, Estimate, independent_ratio

MOST = 6
"""Most runs in the summary; the fastest are kept."""
FAR = 8
"""Ratio of peak memories from which their axis is logarithmic."""
NAMED = 16
"""Most rungs of all runs together that leave room for their names."""
WRONG = ("parity_failed", "ranks_differ")


def of_one_task(boards: Sequence[Scoreboard]) -> list[Scoreboard]:
    """The largest group of runs of one model and sequence length, whose tokens per second compare."""
    measured = [board for board in boards if any(row.tps for row in board.rows)]
    by_task = group_by(measured, lambda board: itemgetter("model", "seq_len")(board.records[0].workload))
    return max(by_task.values(), key=len, default=[])


def summary(boards: Sequence[Scoreboard]) -> Figure | None:
    """Tokens per second rung by rung, a line for each run, and the memory of each rung.

    Ladders that have little in common stand beside one another, on one scale.
    """
    every = of_one_task([board for board in boards if not board.swept])
    runs = sorted(every, key=_most, reverse=True)[:MOST]
    if not runs or max(len(_climb(board)) for board in runs) < 2:
        return None
    groups = related(runs)
    ladders = [merged([[row.rung for row in board.rows] for board in group]) for group in groups]
    named = sum(map(len, ladders)) <= NAMED
    if not named:
        lengths = [max(len(board.rows) for board in group) for group in groups]
        ladders = [[str(n) for n in range(1, 1 + length)] for length in lengths]
    columns = [len(rungs) for rungs in ladders]
    figure = Figure(figsize=(max(WIDTH, 3 + 0.62 * sum(columns)), 6.4 + 0.34 * len(runs)))
    panels = figure.subplots(
        2, len(groups), sharex="col", sharey="row", height_ratios=[5, 2], width_ratios=columns, squeeze=False
    )
    for group, rungs, speed, memory in zip(groups, ladders, *panels, strict=True):
        for board in group:
            places = [rungs.index(row.rung) if named else n for n, row in enumerate(board.rows)]
            _climbing(speed, board, places, runs.index(board), factors=len(runs) == 1)
            _memory(memory, board, places, runs.index(board))
        if len(groups) > 1:
            names_of_ladders = ", ".join(dict.fromkeys(board.ladder for board in group))
            speed.set_title(style.shortened(names_of_ladders, 12 + 8 * len(rungs)))
        turned = {"rotation": 35, "ha": "right"} if named else {}
        memory.set_xticks(range(len(rungs)), [style.shortened(rung, 24) for rung in rungs], **turned)
        memory.xaxis.set_minor_locator(NullLocator())
        memory.set_xlim(-0.6, len(rungs) - 0.4)
    _axes(panels[0][0], panels[1][0], runs)
    panels[1][0].set_xlabel("" if named else "rung of its own ladder, in order")
    figure.legend(loc="outside lower left", fontsize=8)
    more = f", the fastest {len(runs)} of {len(every)} runs" if len(runs) < len(every) else ""
    hollow = any(_hollow(row) for board in runs for row in _climb(board))
    more += "; hollow: something is held against it, or it is of other maths" if hollow else ""
    title = f"{_task(runs)}: speed and memory, rung by rung{more}\n{rounds_of(runs)}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def related(runs: Sequence[Scoreboard]) -> list[list[Scoreboard]]:
    """Groups of runs whose ladders share a panel: half of the shorter one's rungs have the other's names."""
    groups: list[list[Scoreboard]] = []
    for board in runs:
        rungs = {row.rung for row in board.rows}
        for group in groups:
            group_rungs = {row.rung for other in group for row in other.rows}
            if 2 * len(rungs & group_rungs) >= min(len(rungs), len(group_rungs)):
                group.append(board)
                break
        else:
            groups.append([board])
    return groups


def _axes(speed: Axes, memory: Axes, runs: Sequence[Scoreboard]) -> None:
    """Set up the vertical axes, which all panels of a row share."""
    speed.set_yscale("log")
    speed.margins(y=0.12)
    style.plain_log(speed.yaxis)
    speed.set_ylabel("tokens per second (log scale)")
    rows = [row for board in runs for row in board.rows]
    shown = [gib[0] for row in rows if (gib := peak_gib(row))]
    if shown and max(shown) > FAR * min(shown):
        memory.set_yscale("log")
        style.plain_log(memory.yaxis)
    else:
        memory.set_ylim(0, 1.15 * max(shown, default=1.0))
        memory.yaxis.set_major_locator(MaxNLocator(4))
    methods = {row.peak_memory_method for row in rows if row.peak_memory_bytes is not None}
    memory.set_ylabel("peak GiB" if len(methods) < 2 else "peak GiB,\nunlike methods")


def _memory(axes: Axes, board: Scoreboard, places: Sequence[int], place: int) -> None:
    known = [(at, gib[0]) for at, row in zip(places, board.rows, strict=True) if (gib := peak_gib(row))]
    at, gibs = [at for at, _ in known], [gib for _, gib in known]
    axes.plot(at, gibs, style.MARKERS[place], ls="-", lw=1, ms=4, color=style.COLOURS[place])


def _climb(board: Scoreboard) -> list[Row]:
    return [row for row in board.rows if row.tps]


def _most(board: Scoreboard) -> float:
    entry = fastest_rung(board)
    return entry.row.tps.value if entry and entry.row.tps else 0.0


def merged(ladders: Sequence[Sequence[str]]) -> list[str]:
    """All rungs' names once, in an order that agrees with each ladder's as far as these agree."""
    order: list[str] = []
    for ladder in sorted(ladders, key=len, reverse=True):
        at = 0
        for rung in ladder:
            if rung not in order:
                order.insert(at, rung)
            at = order.index(rung) + 1
    return order


def _hollow(row: Row) -> bool:
    return row.status != "ok" or row.other_maths


SMALL = {"textcoords": "offset points", "fontsize": 8, "ha": "center"}


def _climbing(axes: Axes, board: Scoreboard, places: Sequence[int], place: int, *, factors: bool) -> None:
    """Draw one run's line; a rung that does not compare is hollow, and one without a speed is a cross.

    places: of its rows from left to right.
    """
    colour, rows = style.COLOURS[place], _climb(board)
    points = [(at, row.tps.value) for at, row in zip(places, board.rows, strict=True) if row.tps]
    steps = {"drawstyle": "steps-mid", "lw": 1.2, "alpha": 0.6, "label": "_steps"}
    axes.plot(*zip(*points, strict=True), color=colour, **steps)
    intervals = [interval for row in rows if (interval := bounds(row.tps))]
    style.draw_intervals(axes, [x for x, _ in points], intervals, upright=True, colour=colour)
    for (x, y), row in zip(points, rows, strict=True):
        fill = "none" if _hollow(row) else colour
        marks = axes.plot(x, y, style.MARKERS[place], ms=6, color=colour, mfc=fill)
        style.tooltip(
            marks, f"{row.rung} on {board.environment.machine}: {number(y)} tokens/s, {status_of(row)}"
        )
        if factors:
            times = f"\n{row.gain.value:.2f}x" if row.gain else ""
            top = (row.tps.high if row.tps else None) or y
            axes.annotate(f"{number(y)}{times}", (x, top), xytext=(0, 5), **SMALL)
    for x, row in zip(places, board.rows, strict=True):
        if row.tps is None:
            at = (x, ([y for before, y in points if before < x] or [points[0][1]])[-1])
            axes.plot(*at, "x", ms=6, color=colour)
            axes.annotate(status_of(row), at, xytext=(0, 6), color=colour, **SMALL)
    axes.plot([], [], style.MARKERS[place], ls="-", color=colour, label=_said(board))


def _said(board: Scoreboard) -> str:
    """Legend of a run: how far it came, and whether its losses held."""
    rows, entry = _climb(board), fastest_rung(board)
    first, top = rows[0], entry.row if entry else rows[0]
    assert first.tps is not None
    assert top.tps is not None
    if top is first:
        last = "its first and fastest" if entry else "its first; none is ok and of equal maths"
        words = [f"{number(first.tps.value)} tokens/s with {style.shortened(first.rung)}, {last}"]
    else:
        words = [f"{number(first.tps.value)} to {number(top.tps.value)} tokens/s"]
        words += [f"{top.speedup.value:.1f}x with {style.shortened(top.rung)}"] if top.speedup else []
    words += ["in doubt"] if entry and top.caveats else []
    if top.ceiling_share is not None:
        words.append(f"{percent(top.ceiling_share)} of the measured ceiling")
    if top.mfu is not None:
        words.append(f"MFU {percent(top.mfu)}{' of a derived peak' if derived_peak(board) else ''}")
    wrong = [row.rung for row in rows if row.status in WRONG]
    words.append(f"loss differs: {style.shortened(', '.join(wrong))}" if wrong else "no loss differs")
    return f"{name_of(board)}, torch {board.environment.torch}\n{', '.join(words)}"


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
    axes.set_xlabel(f"times as fast as the slowest first rung, {least} (log scale)")
    kinds = [
        Patch(color=style.NEITHER, label="first rung"),
        Patch(color=style.COLOURS[0], label="fastest rung"),
    ]
    figure.legend(handles=kinds, loc="outside lower left", ncols=2)
    title = f"{_task(runs)}: the first and the fastest sound rung of each run"
    axes.set_title(f"{title}\n{rounds_of(runs)}", fontsize=10)
    return figure


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

"""The whole climb in one picture: a bar for each step from the slowest hardware to the fastest rung."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.atlas import changes
from bench.analysis.several_runs.rungs import Group
from bench.analysis.several_runs.steps import Step, steps
from bench.format import number, plain, times
from bench.records.published import Published
from bench.report.plots import style
from bench.report.plots.rungs import rounds_of
from bench.report.titles import hardware_title, task_title, told_apart

WIDTH = 10.5
PER_BAR = 0.31
"""Height of a bar, in inches."""
COLOURS: dict[Group, str] = dict(zip(("Hardware", "Software", "Distributed"), style.COLOURS, strict=False))
LETTERS = 54
"""Most letters in a line of a bar's name."""


def summary(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> Figure | None:
    """Tokens per second step by step; None for fewer than two measured steps. figures: published ones."""
    found = steps(boards, figures)
    ours = [step for step in found if step.rung]
    if not ours:
        return None
    lines: list[tuple[str, Step | None]] = []  # a heading has no step
    for own in _parts(found):
        lines += [(f"{_heading(own)}{_gain(own)}", None), *zip(_names(own), own, strict=True)]
    labels = [name for name, _ in lines]
    figure = Figure(figsize=(WIDTH, 1.5 + PER_BAR * len(labels)))
    axes = figure.add_subplot()
    at = style.label_rows(axes, labels, LETTERS)
    ends = [(step.tps, _beside(step)) for step in found]
    style.fit_log_axis(axes, 0.7 * min(step.tps for step in found), ends, part=1.1)
    left = axes.get_xlim()[0]
    for y, (name, step), label in zip(at, lines, axes.get_yticklabels(), strict=True):
        if step is None:
            label.set_fontweight("bold")
            continue
        colour = COLOURS[step.group]
        look: dict[str, Any] = {"color": colour, "lw": 0} if step.rung else _hatched(colour)
        bar = axes.barh(y, step.tps - left, 0.68, left, **look)
        style.tooltip(bar, f"{name}: {_beside(step)}")
        style.text_beside(axes, step.tps, y, _beside(step))
    axes.tick_params(axis="y", length=0)
    style.plain_log(axes.xaxis)
    axes.set_xlabel("tokens per second (log scale) · how many times the first bar")
    kinds = [Patch(facecolor=style.NEITHER, lw=0, label=_measured(ours))]
    sources = ", ".join(dict.fromkeys(step.figure.source for step in found if step.figure))
    if sources:
        kinds.append(Patch(**_hatched(style.NEITHER), label=f"published by {sources}, not measured here"))
    figure.legend(handles=kinds, loc="outside lower left", fontsize=8)
    figure.suptitle(_title(found, ours), x=0.01, ha="left", fontsize=11)
    return figure


def _beside(step: Step) -> str:
    return f"{number(step.tps)} · {_factor(step.over_first)}{'' if step.rung else ' · published'}"


def _hatched(colour: str) -> dict[str, Any]:
    return {"facecolor": "none", "edgecolor": colour, "hatch": "////", "lw": 1.0}


def _parts(found: Sequence[Step]) -> list[list[Step]]:
    """Steps under one heading: of one group, all ours on one machine, or all published; hardware is mixed."""
    parts = groupby(found, lambda step: (step.group, step.group == "Hardware" or step.rung is not None))
    return [list(own) for _, own in parts]


def _gain(own: Sequence[Step]) -> str:
    """What the steps of a part gain together over what they build on.

    Empty for published figures on several devices: those of a ladder need not be of one workload.
    """
    if own[0].group == "Distributed" and own[0].figure:
        return ""
    before = own[0].tps if own[0].group == "Hardware" else own[0].tps_before
    return f" · {_factor(own[-1].tps / before)}" if before and own[-1].tps > before else ""


def _heading(own: Sequence[Step]) -> str:
    if own[0].group == "Hardware":
        return "Hardware, plain baseline"
    where = list(dict.fromkeys(_where(step) for step in own))
    on = f" on {where[0]}" if len(where) == 1 else ""
    return f"{own[0].group}{on}"


def _where(step: Step) -> str:
    if step.figure:
        return plain(step.figure.on or "hardware not told")
    assert step.rung
    return hardware_title(step.rung)


def _names(own: Sequence[Step]) -> list[str]:
    """What each bar is: a machine under Hardware, elsewhere what was added."""
    if own[0].group == "Hardware":
        names = [step.rung.environment.machine if step.rung else "" for step in own]
        return told_apart(list(zip(map(_where, own), names, strict=True)))
    return [_added(step) for step in own]


def _added(step: Step) -> str:
    """A rung's name where it is the next of its run, else all toggles that differ from the step before."""
    if step.figure:
        return step.figure.rung
    assert step.rung
    if step.next_rung or step.before is None:
        return step.rung.row.rung
    changed = changes(step.before, step.rung.row.toggles)
    return ", ".join(f"{change.toggle}={change.value}" for change in changed)


def _measured(ours: Sequence[Step]) -> str:
    """Legend of our own bars: what was trained, with which torch, in how many rounds, of which ladders."""
    rungs = [step.rung for step in ours if step.rung]
    model, length = rungs[0].board.task
    torches = ", ".join(dict.fromkeys(rung.environment.torch for rung in rungs))
    rounds = rounds_of([rung.board for rung in rungs])
    ladders = style.shortened(", ".join(dict.fromkeys(rung.board.ladder for rung in rungs)), 60)
    return f"measured here: {model}, T = {length}, torch {torches}, {rounds}; ladders {ladders}"


def _title(found: Sequence[Step], ours: Sequence[Step]) -> str:
    """How far our own steps lead, and how far with published figures."""
    first, top = ours[0], max(ours, key=lambda step: step.tps)
    assert first.rung
    assert top.rung
    told = f"{task_title(first.rung.board)}: {_factor(top.tps / first.tps)} measured"
    title = f"{told}, from {_where(first)} to {_where(top)}"
    title += f" ({top.rung.incomplete})" if top.rung.incomplete else ""
    last = max(found, key=lambda step: step.tps)
    if last.figure:
        title += f"\nWith published figures {_factor(last.tps / found[0].tps)}, to {_where(last)}"
    return title


def _factor(ratio: float) -> str:
    return f"{ratio:,.0f}x" if ratio >= 10 else times(ratio)

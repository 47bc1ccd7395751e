"""The steps from the plain baseline on the slowest hardware to the fastest rung anywhere, ours and published.

for step in steps(boards, figures): print(step.group, step.tps, step.over_first)

What a rung is a step of, its facts say: toggles, machine and number of devices, never its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import Group, RungView, of_one_task
from bench.records.published import Published
from gpt2.config.toggles import CUDA, Toggles

MOST = 20
"""Most steps; the software steps that gain least are left out."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rung of ours, or a published figure: one of the two is None."""

    group: Group
    tps: float
    """Tokens per second of all devices."""
    over_first: float = 1.0
    """Speed-up over the first step."""
    rung: RungView | None = None
    figure: Published | None = None
    next_rung: bool = False
    """Whether it is the next rung of the same run after the step before."""
    before: Toggles | None = None
    """Toggles of our step that this one builds on; None for a machine's first."""
    tps_before: float | None = None
    """Tokens per second of the step that this one builds on, of the same run, machine or source."""


def steps(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> list[Step]:
    """All steps in order, of one model and sequence length; empty where fewer than two of them are ours.

    Hardware: the plain baseline on ever faster machines. Software: the rungs of the run that came furthest on
    one device, each faster than the one before. Distributed: likewise on several devices, from the fastest
    on one. Published: of the longest published ladder of this task, whose figures follow from one another; in
    Software and Distributed only where that has more steps than we measured.
    """
    runs = of_one_task([board.own for board in boards if not board.swept])
    sound = [RungView(board=board, row=row) for board in runs for row in board.sound]
    alone = [rung for rung in sound if rung.devices == 1]
    if not alone:
        return []
    top = max(alone, key=lambda rung: rung.row.mean_tps)
    baselines = _baselines(alone, top)
    start = next((rung for rung in baselines if _machine(rung) == _machine(top)), None)
    climb = [rung for rung in alone if rung.board is top.board and not is_plain(rung.row.toggles)]
    several = [rung for rung in sound if rung.devices > 1]
    widest = max(several, key=lambda rung: rung.row.mean_tps, default=None)
    spread = [rung for rung in several if widest and rung.board is widest.board]
    theirs = _published(figures, sound[0].board.task)
    found: list[Step] = [
        *_ours("Hardware", [(rung, None) for rung in baselines]),
        *(step for step in theirs if step.group == "Hardware"),
    ]
    found.sort(key=lambda step: step.tps)
    measured: dict[Group, list[Step]] = {
        "Software": _ours("Software", _rising(climb, start)),
        "Distributed": _ours("Distributed", _rising(spread, top)),
    }
    for group, ours in measured.items():
        others = [step for step in theirs if step.group == group]
        parts = [part for part in (ours, others if len(others) > len(ours) else []) if part]
        found += [step for part in sorted(parts, key=lambda part: part[0].tps) for step in part]
    if sum(step.rung is not None for step in found) < 2:
        return []
    return [replace(step, over_first=step.tps / found[0].tps) for step in _fewer(found)]


def is_plain(toggles: Toggles) -> bool:
    """Whether nothing is switched on; AdamW may be torch's own choice on the device."""
    default = Toggles()
    as_torch_has_it = (default.adamw, "foreach") if toggles.device == CUDA else (default.adamw,)
    alike = replace(toggles, device=default.device, adamw=default.adamw) == default
    return alike and toggles.adamw in as_torch_has_it


def _machine(rung: RungView) -> tuple[str, tuple[str, str, str]]:
    return rung.environment.machine, rung.device


def _baselines(rungs: Iterable[RungView], top: RungView) -> list[RungView]:
    """The plain baseline of each machine, the slowest first: of `top`'s run, or complete, or the fastest."""
    by_machine = group_by((rung for rung in rungs if is_plain(rung.row.toggles)), _machine)
    best = [
        max(each, key=lambda rung: (rung.board is top.board, not rung.incomplete, rung.row.mean_tps))
        for each in by_machine.values()
    ]
    return sorted(best, key=lambda rung: rung.row.mean_tps)


def _rising(rungs: Iterable[RungView], start: RungView | None) -> list[tuple[RungView, RungView | None]]:
    """The rungs that are faster than all before them and than `start`, each with the one before."""
    kept: list[tuple[RungView, RungView | None]] = []
    before = start
    for rung in rungs:
        if before is None or rung.row.mean_tps > before.row.mean_tps:
            kept.append((rung, before))
            before = rung
    return kept


def _ours(group: Group, rungs: Sequence[tuple[RungView, RungView | None]]) -> list[Step]:
    return [
        Step(
            group=group,
            tps=rung.row.mean_tps,
            rung=rung,
            next_rung=before is not None
            and before.board is rung.board
            and rung.row.before == before.row.index,
            before=before.row.toggles if before else None,
            tps_before=before.row.mean_tps if before else None,
        )
        for rung, before in rungs
    ]


def _published(figures: Sequence[Published], task: tuple[str, int]) -> list[Step]:
    """The longest published ladder of a task, of one source, each figure on one device faster than before."""
    ladder = [
        figure for figure in figures if figure.series == "ladder" and figure.tps and figure.task == task
    ]
    longest = max(group_by(ladder, lambda figure: figure.source).values(), key=len, default=[])
    found: list[Step] = []
    for place, figure in enumerate(longest):
        devices = figure.devices or 1
        new = place == 0 or figure.hardware != longest[place - 1].hardware
        group: Group = "Distributed" if devices > 1 else "Hardware" if new else "Software"
        before, tps = (found[-1].tps if found else None), figure.tps or 0.0
        if before is None or tps > before:
            found.append(Step(group=group, tps=tps, figure=figure, tps_before=before))
    return found


def _fewer(found: Sequence[Step]) -> list[Step]:
    """At most MOST steps, without the software steps that gain least."""
    kept = list(found)
    while len(kept) > MOST:
        gains = [
            (step.tps / step.tps_before, place)
            for place, step in enumerate(kept[:-1])
            if step.group == "Software" and step.tps_before
        ]
        if not gains:
            break
        _, place = min(gains)
        out, after = kept.pop(place), kept[place]
        if out.rung and after.rung and out.rung.board is after.rung.board:
            kept[place] = replace(after, next_rung=False, before=out.before, tps_before=out.tps_before)
        elif out.figure and after.figure:
            kept[place] = replace(after, tps_before=out.tps_before)
    return kept

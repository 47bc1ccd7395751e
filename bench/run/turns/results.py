"""What the turns of bench.run.turns.interleave come to: ratios, their noise floor and verdicts. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.ladder.ladder import Ladder
from bench.run.turns.interleave import CONTROL, Group
from bench.run.turns.paused_process import tokens_per_step
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, geometric_mean, noise_floor, verdict


@dataclass(frozen=True, kw_only=True)
class Result:
    """How many times as fast a rung was as the one that it is held to; both speeds are of their common turns."""

    rung: str
    over: str
    starts: Sequence[Sequence[tuple[float, float]]]
    """Those with turns: seconds of a step of (over, rung)."""
    tokens_per_second: Estimate
    over_tokens_per_second: Estimate
    ratio: Estimate
    verdict: Verdict | None = None
    """None of the control."""

    @property
    def turns(self) -> int:
        return sum(map(len, self.starts))

    @property
    def is_control(self) -> bool:
        return self.rung == self.over + CONTROL

    @property
    def replicated(self) -> bool:
        """Whether intervals are over starts; else they are over turns, and hold for these processes alone."""
        return len(self.starts) >= LEAST_ROUNDS


def results(ladder: Ladder, group: Group) -> list[Result]:
    """Of each pair that took turns, the control last."""
    tokens = {rung.name: tokens_per_step(ladder, rung) for rung in group.rungs}
    tokens |= {name + CONTROL: count for name, count in tokens.items()}
    found = []
    for pair in group.pairs:
        if not (starts := [turns for turns in pair.starts if turns]):
            continue
        over, rung = tokens[pair.over], tokens[pair.rung]
        found.append(
            Result(
                rung=pair.rung,
                over=pair.over,
                starts=starts,
                tokens_per_second=over_starts([[rung / r for _, r in turns] for turns in starts]),
                over_tokens_per_second=over_starts([[over / o for o, _ in turns] for turns in starts]),
                ratio=over_starts([[rung / r / (over / o) for o, r in turns] for turns in starts]),
            )
        )
    floor = floor_of(found)
    judged = [each if each.is_control else replace(each, verdict=_judged(each, floor)) for each in found]
    return sorted(judged, key=lambda each: each.is_control)


def over_starts(values: Sequence[Sequence[float]]) -> Estimate:
    """The geometric mean of turns, by start; its interval is that of the starts' own means.

    Turns of one start have its processes in common, so that their number says nothing of what others would
    do. Of fewer starts than LEAST_ROUNDS the interval is that of the turns.
    """
    if len(values) < LEAST_ROUNDS:
        return geometric_mean([value for turns in values for value in turns])
    return geometric_mean([geometric_mean(turns).value for turns in values])


def floor_of(found: Sequence[Result]) -> float | None:
    """The noise floor, by the control's ratio to the rung that it repeats; None where no control was
    replicated.
    """
    return noise_floor(next((each.ratio for each in found if each.is_control and each.replicated), None))


def _judged(result: Result, floor: float | None) -> Verdict:
    return verdict(result.ratio, floor) if result.replicated else "not replicated"

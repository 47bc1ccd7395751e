"""Statistics of repeated processes: means, paired ratios, intervals, the noise floor and verdicts.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

CONFIDENCE = 0.95
LEAST_ROUNDS = 3
"""Fewest rounds for an interval; with two, it would span a factor of two either way."""
LEAST_DELTA = 0.01
"""Smallest noise floor: smaller differences are of no interest, even where an interval excludes 1."""
SAME = 0.02
"""Largest difference of two rungs that are called the same."""
LOUD = 0.05
"""A noise floor above this is worth a warning."""
HIDDEN = 2.5
"""Times the noise floor: a difference of so much is found in a third of runs of 3 rounds, by simulation."""
LEAST_ROUNDS_UNTIL, MOST_ROUNDS_UNTIL = 5, 20
"""Fewest and most rounds of a run that goes on until its intervals are narrow."""

Verdict = Literal["faster", "slower", "same", "unclear", "not replicated", "no control"]


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds with its 95 % interval; the ends are None for fewer than LEAST_ROUNDS rounds."""

    value: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def half_width(self) -> float | None:
        """Half the interval's width relative to the value; the interval is symmetric in the logarithm."""
        return self.high / self.value - 1 if self.high is not None else None

    @property
    def excludes_one(self) -> bool:
        """Whether there is an interval, and 1 lies outside it."""
        return self.above(1) or self.below(1)

    def above(self, bound: float) -> bool:
        """Whether the whole interval lies above `bound`; False without an interval."""
        return self.low is not None and self.low > bound

    def below(self, bound: float) -> bool:
        """Whether the whole interval lies below `bound`; False without an interval."""
        return self.high is not None and self.high < bound

    def divided_by(self, number: float) -> Estimate:
        """The estimate of a share; its relative uncertainty stays."""
        low, high = (bound if bound is None else bound / number for bound in (self.low, self.high))
        return Estimate(self.value / number, low, high, self.rounds)

    def inverse(self) -> Estimate:
        """The estimate of the ratio the other way round."""
        low, high = (bound if bound is None else 1 / bound for bound in (self.high, self.low))
        return Estimate(1 / self.value, low, high, self.rounds)


def _t_quantile(freedom: float) -> float:
    """Student's t at the ends of a CONFIDENCE interval, for so many degrees of freedom."""
    # Imported here: it takes 0.4 s, and the processes that measure need no interval.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def geometric_mean(values: Sequence[float]) -> Estimate:
    """exp(mean(log)) of positive values, with the t interval of the logarithms (n - 1 degrees of freedom)."""
    logs = [math.log(value) for value in values]
    n, centre = len(logs), math.fsum(logs) / len(logs)
    if n < LEAST_ROUNDS:
        return Estimate(math.exp(centre), None, None, n)
    deviation = math.sqrt(math.fsum((x - centre) ** 2 for x in logs) / (n - 1))
    half = _t_quantile(n - 1) * deviation / math.sqrt(n)
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), n)


def block_error(block_seconds: Sequence[float]) -> float:
    """Relative standard error of a window's mean, from the scatter of its blocks; 0 for fewer than two."""
    n = len(block_seconds)
    if n < 2:
        return 0.0
    mean = math.fsum(block_seconds) / n
    return math.sqrt(math.fsum((x - mean) ** 2 for x in block_seconds) / (n - 1) / n) / mean


K = TypeVar("K", bound=Hashable)


def paired_ratio(values: Mapping[K, float], reference: Mapping[K, float]) -> Estimate | None:
    """Mean ratio of `values` to `reference`, both by round; None where no round has both.

    Pairing takes out what all processes of a round have in common.
    """
    ratios = [value / reference[round_] for round_, value in values.items() if round_ in reference]
    return geometric_mean(ratios) if ratios else None


def independent_ratio(values: Sequence[float], reference: Sequence[float]) -> Estimate | None:
    """Ratio of two means whose rounds have nothing in common, as those of two runs.

    The interval is Welch's, of the difference of the logarithms' means. It covers the variation within a run,
    not what changed on a machine between two. None where either is empty.
    """
    if not values or not reference:
        return None
    means, squares = [], []  # of the logarithms, and their means' squared errors
    for sample in (values, reference):
        logs = [math.log(value) for value in sample]
        means.append(math.fsum(logs) / len(logs))
        squares.append(math.fsum((x - means[-1]) ** 2 for x in logs) / max(1, len(logs) - 1) / len(logs))
    centre, rounds = means[0] - means[1], min(len(values), len(reference))
    if rounds < LEAST_ROUNDS:
        return Estimate(math.exp(centre), None, None, rounds)
    half = 0.0
    if sum(squares) > 0:
        sizes = (len(values), len(reference))
        freedom = sum(squares) ** 2 / sum(s**2 / (n - 1) for s, n in zip(squares, sizes, strict=True))
        half = _t_quantile(freedom) * math.sqrt(sum(squares))
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), rounds)


def noise_floor(controls: Sequence[Estimate], ratios: Sequence[Estimate]) -> float | None:
    """delta: the relative difference that two equal rungs may show; None without an interval of a control.

    controls: the ratio of each A/A control, which is a rung run again at the end of each round, to that rung.
    ratios: of each other rung to the one before, as geometric_mean() gives them, paired within rounds.
    It is the half-width of such a ratio's interval, from the scatter of all of them between rounds, because
    three rounds of a control alone may miss it by a factor of six. It is no less than what a control shows,
    whose place in the round differs most from its rung's: its mean, or the far end of an interval without 1.
    """
    known = [control for control in controls if control.half_width is not None]
    if not known:
        return None
    scattered = [each for each in (*known, *ratios) if each.half_width is not None]
    freedom = sum(each.rounds - 1 for each in scattered)
    variance = math.fsum((each.rounds - 1) * _variance(each) for each in scattered) / freedom
    fewest = min(each.rounds for each in scattered)
    half = _t_quantile(freedom) * math.sqrt(variance / fewest)
    return max(LEAST_DELTA, math.expm1(half), *map(_apart, known))


def _variance(estimate: Estimate) -> float:
    """Variance of the logarithms of single rounds, by the t interval of their mean."""
    assert estimate.low is not None
    assert estimate.high is not None
    half = math.log(estimate.high / estimate.low) / 2
    return estimate.rounds * (half / _t_quantile(estimate.rounds - 1)) ** 2


def _apart(control: Estimate) -> float:
    """How far a control is from its rung."""
    low, high = (control.low, control.high) if control.excludes_one else (control.value, control.value)
    assert low is not None
    assert high is not None
    return max(high, 1 / low) - 1


def verdict(ratio: Estimate, delta: float | None) -> Verdict:
    """Return `faster` or `slower` where the whole interval of a ratio lies beyond the noise floor.

    An interval that excludes 1 would not do: of the many ratios of a ladder without any effect, some would be
    `faster`. Two are the `same` where the whole interval differs from 1 by SAME at most.
    """
    if ratio.low is None or ratio.high is None:
        return "not replicated"
    if delta is None:
        return "no control"
    if ratio.above(1 + delta):
        return "faster"
    if ratio.below(1 / (1 + delta)):
        return "slower"
    return "same" if ratio.low >= 1 / (1 + SAME) and ratio.high <= 1 + SAME else "unclear"


def narrow_enough(ratios: Sequence[Estimate], width: float) -> bool:
    """Whether every interval's half-width is at most `width`; where the values lie plays no part."""
    return all(ratio.half_width is not None and ratio.half_width <= width for ratio in ratios)


PARITY_STEPS = 20
"""Most steps over which losses are compared: later, rounding alone can drive two runs apart."""


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the first steps of both; infinite where a loss is not finite or 0."""
    pairs = list(zip(losses, reference, strict=False))[:PARITY_STEPS]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(0.0 if a == b else abs(a - b) / abs(b) if b else math.inf for a, b in pairs)

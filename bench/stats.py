"""From repeated processes to figures: means, paired ratios with intervals and verdicts, and the loss guard.

Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit  # Student's t quantile; scipy.stats would take a second to import

CONFIDENCE = 0.95
LEAST_ROUNDS = 3
"""For an interval; from two rounds, with one degree of freedom, it would span a factor of two either way."""
LEAST_DELTA = 0.01
"""Differences below this are of no interest even where they could be told from noise."""

Verdict = Literal["faster", "slower", "same", "unclear", "not replicated"]


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds, and its 95 % interval; None where fewer than LEAST_ROUNDS say nothing of the spread."""

    value: float
    low: float | None
    high: float | None
    rounds: int

    @property
    def half_width(self) -> float | None:
        """Of the interval, relative to the value; its logarithm is symmetric."""
        return self.high / self.value - 1 if self.high is not None else None


def geometric_mean(values: Sequence[float]) -> Estimate:
    """exp(mean(log)) of positive values, with the t interval of the logarithms (n - 1 degrees of freedom)."""
    logs = [math.log(value) for value in values]
    n, centre = len(logs), math.fsum(logs) / len(logs)
    if n < LEAST_ROUNDS:
        return Estimate(math.exp(centre), None, None, n)
    deviation = math.sqrt(math.fsum((x - centre) ** 2 for x in logs) / (n - 1))
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(n)
    return Estimate(math.exp(centre), math.exp(centre - half), math.exp(centre + half), n)


def paired_ratio(values: Mapping[int, float], reference: Mapping[int, float]) -> Estimate | None:
    """How many times `reference` is `values`, both by round; pairing takes out what a whole round has in common.

    None where no round has both.
    """
    ratios = [values[round_] / reference[round_] for round_ in sorted(values.keys() & reference.keys())]
    return geometric_mean(ratios) if ratios else None


def noise_floor(control: Estimate | None) -> float:
    """delta: the relative difference below which two rungs count as the same.

    control: the ratio of the A/A control, that is the first rung run again at the end of each round, to the first
    rung. The half-width of its interval is what this machine's noise makes of no difference at all.
    """
    return max(LEAST_DELTA, (control.half_width or 0.0) if control else 0.0)


def verdict(ratio: Estimate, delta: float) -> Verdict:
    """What a speed-up's interval allows to be said; an interval that is merely wide never makes it `same`."""
    if ratio.low is None or ratio.high is None:
        return "not replicated"
    if ratio.low >= 1 / (1 + delta) and ratio.high <= 1 + delta:
        return "same"
    if ratio.low > 1:
        return "faster"
    return "slower" if ratio.high < 1 else "unclear"


def narrow_enough(ratios: Sequence[Estimate], width: float) -> bool:
    """Whether every interval's half-width is at most `width`; where the values lie plays no part."""
    return all(ratio.half_width is not None and ratio.half_width <= width for ratio in ratios)


PARITY_STEPS = 20
"""Losses are held to each other over this many steps at most: later, rounding alone can drive two runs apart."""


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the first steps that both have; infinite where a loss is not finite."""
    pairs = list(zip(losses, reference, strict=False))[:PARITY_STEPS]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)

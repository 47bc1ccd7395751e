"""From repeated processes to figures: means, paired ratios with intervals, and the loss guard. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit  # Student's t quantile; scipy.stats would take a second to import

CONFIDENCE = 0.95
LEAST_ROUNDS = 3
"""For an interval; from two rounds, with one degree of freedom, it would span a factor of two either way."""


@dataclass(frozen=True)
class Estimate:
    """A mean over rounds, and its 95 % interval; None where fewer than LEAST_ROUNDS say too little of the spread."""

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


PARITY_STEPS = 20
"""Losses are held to each other over this many steps at most: later, rounding alone can drive two runs apart."""


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Largest relative difference over the first steps that both have; infinite where a loss is not finite."""
    pairs = list(zip(losses, reference, strict=False))[:PARITY_STEPS]
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in pairs)

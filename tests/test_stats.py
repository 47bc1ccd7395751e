import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bench.stats import geometric_mean, loss_difference, paired_ratio


def test_the_interval_is_scipy_s_t_interval_of_the_logarithms() -> None:
    values = [101.0, 99.5, 103.2, 98.7, 100.4]
    found = geometric_mean(values)
    logs = np.log(values)
    low, high = scipy_stats.t.interval(0.95, 4, loc=logs.mean(), scale=scipy_stats.sem(logs))
    assert found.value == pytest.approx(scipy_stats.gmean(values))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))


@pytest.mark.parametrize("values", [[5.0], [5.0, 6.0]])
def test_one_or_two_rounds_have_no_interval(values: list[float]) -> None:
    found = geometric_mean(values)
    assert found.low is found.high is found.half_width is None


def test_the_half_width_is_relative_to_the_value() -> None:
    found = geometric_mean([100.0, 110.0, 90.0])
    assert found.high is not None
    assert found.half_width == pytest.approx(found.high / found.value - 1)


def test_speed_ups_are_paired_within_rounds() -> None:
    """A machine that slows down by half between rounds leaves a constant ratio constant."""
    ratio = paired_ratio({1: 200.0, 2: 100.0, 3: 50.0}, {1: 100.0, 2: 50.0, 3: 25.0})
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_rounds_that_only_one_rung_survived_do_not_count() -> None:
    ratio = paired_ratio({1: 200.0, 3: 80.0}, {1: 100.0, 2: 50.0})
    assert ratio is not None
    assert (ratio.value, ratio.rounds) == (2.0, 1)


def test_no_common_round_gives_no_ratio() -> None:
    assert paired_ratio({1: 1.0}, {2: 1.0}) is None


def test_losses_are_compared_over_the_steps_that_both_have() -> None:
    assert loss_difference([10.0, 9.0, 100.0], [10.0, 9.9]) == pytest.approx(0.9 / 9.9)


def test_a_loss_that_is_not_finite_differs_infinitely() -> None:
    assert loss_difference([10.0, math.nan], [10.0, 9.0]) == math.inf

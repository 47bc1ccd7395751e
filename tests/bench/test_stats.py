import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from bench.stats import (
    HIDDEN,
    Estimate,
    geometric_mean,
    loss_difference,
    narrow_enough,
    noise_floor,
    paired_ratio,
    verdict,
)


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


def test_a_loss_of_zero_is_equal_to_itself_and_infinitely_different_from_any_other() -> None:
    assert loss_difference([0.0, 5.0], [0.0, 5.0]) == 0.0
    assert loss_difference([0.1], [0.0]) == math.inf


def within(low: float, high: float) -> Estimate:
    return Estimate(math.sqrt(low * high), low, high, 5)


@pytest.mark.parametrize(
    ("low", "high", "delta", "found"),
    [
        (1.02, 1.10, 0.01, "faster"),
        (0.90, 0.98, 0.01, "slower"),
        (0.995, 1.005, 0.01, "same"),
        (1.002, 1.008, 0.01, "same"),  # excludes 1, by less than is of interest
        (1.002, 1.030, 0.01, "unclear"),  # excludes 1, but reaches into the noise floor
        (0.970, 0.998, 0.01, "unclear"),
        (0.990, 1.015, 0.10, "same"),  # within 2 %, whatever the floor
        (0.95, 1.05, 0.01, "unclear"),  # merely wide
        (0.97, 1.03, 0.04, "unclear"),  # within the noise floor, which does not make them the same
        (0.95, 1.05, 0.06, "unclear"),
        (0.95, 1.06, 0.05, "unclear"),
        (1.04, 1.05, 0.06, "unclear"),
        (1.04, 1.40, 0.06, "unclear"),
        (1.07, 1.40, 0.06, "faster"),
        (0.70, 0.94, 0.06, "slower"),
        (0.70, 0.95, 0.06, "unclear"),
        (1.31, 17.8, 4.73, "unclear"),
        (6.0, 17.8, 4.73, "faster"),
    ],
)
def test_a_verdict_follows_from_where_the_interval_lies(
    low: float, high: float, delta: float, found: str
) -> None:
    assert verdict(within(low, high), delta) == found


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_rounds_for_an_interval_are_not_replicated_however_large_the_difference(rounds: int) -> None:
    assert verdict(geometric_mean([3.0] * rounds), 0.01) == "not replicated"


def test_without_a_control_nothing_tells_noise_from_a_difference() -> None:
    assert verdict(within(1.5, 1.6), None) == "no control"
    assert verdict(geometric_mean([3.0]), None) == "not replicated"


def test_with_a_control_alone_the_noise_floor_is_its_half_width_but_never_below_one_percent() -> None:
    assert noise_floor([], [within(0.98, 1.02)]) is None
    assert noise_floor([geometric_mean([1.02])], [within(0.98, 1.02)]) is None
    assert noise_floor([within(0.999, 1.001)], []) == 0.01
    assert noise_floor([within(1 / 1.04, 1.04)], []) == pytest.approx(0.04)
    assert noise_floor([within(1 / 1.02, 1.04)], []) == pytest.approx(0.03, abs=0.001)


def test_the_noise_floor_is_the_half_width_by_the_pooled_scatter_of_all_ratios() -> None:
    control, other, large = np.random.default_rng(7).normal([[0.0], [0.1], [0.7]], 0.02, (3, 4))
    pooled = np.mean([np.var(logs, ddof=1) for logs in (control, other, large)])
    half = scipy_stats.t.ppf(0.975, 9) * np.sqrt(pooled / 4)
    estimates = [geometric_mean(np.exp(logs).tolist()) for logs in (control, other, large)]
    assert noise_floor(estimates[:1], estimates[1:]) == pytest.approx(np.expm1(half))


def test_the_noise_floor_is_for_the_ratio_of_fewest_rounds() -> None:
    control, few = np.random.default_rng(7).normal(0.0, 0.02, 10), np.array([0.01, -0.01, 0.02])
    pooled = (9 * np.var(control, ddof=1) + 2 * np.var(few, ddof=1)) / 11
    half = scipy_stats.t.ppf(0.975, 11) * np.sqrt(pooled / 3)
    estimates = [geometric_mean(np.exp(logs).tolist()) for logs in (control, few)]
    assert noise_floor(estimates[:1], estimates[1:]) == pytest.approx(np.expm1(half))


def test_the_noise_floor_is_no_less_than_how_far_a_control_is_from_its_rung() -> None:
    wide = within(1.09 / 1.15, 1.09 * 1.15)
    quiet = [within(0.999, 1.001)] * 20
    assert noise_floor([wide], quiet) == pytest.approx(0.09)
    assert noise_floor([within(1 / 1.09 / 1.15, 1.15 / 1.09)], quiet) == pytest.approx(0.09)


def test_ratios_of_too_few_rounds_for_an_interval_leave_the_noise_floor_as_it_is() -> None:
    assert noise_floor([within(1 / 1.04, 1.04)], [geometric_mean([2.0, 3.0])]) == pytest.approx(0.04)


def test_a_control_whose_interval_excludes_1_raises_the_floor_as_far_as_it_reaches() -> None:
    assert noise_floor([within(1.02, 1.03)], []) == pytest.approx(0.03)
    assert noise_floor([within(1 / 1.05, 1 / 1.04)], [within(0.999, 1.001)]) == pytest.approx(0.05)


def test_narrow_enough_looks_at_widths_and_never_at_values() -> None:
    far, near = within(2.0, 2.0 * 1.01**2), within(1 / 1.01, 1.01)
    assert narrow_enough([far, near], 0.011)
    assert not narrow_enough([far, near], 0.009)
    assert not narrow_enough([far, geometric_mean([1.0])], 0.5)


def simulate(
    ratio: float, rounds: int, generator: np.random.Generator, noise: float = 0.03
) -> tuple[dict, ...]:
    """Tokens per second of a first rung, its control and another rung; each round has a speed of its own."""
    drift = generator.normal(0.0, 0.1, rounds)

    def rung(factor: float) -> dict[int, float]:
        speeds = factor * np.exp(drift + generator.normal(0.0, noise, rounds))
        return dict(enumerate(speeds, start=1))

    return rung(1000.0), rung(1000.0), rung(1000.0 * ratio)


def floor_of(first: dict[int, float], control: dict[int, float]) -> float | None:
    ratio = paired_ratio(control, first)
    return noise_floor([ratio], []) if ratio else None


def ladder_of(
    speeds: Sequence[float], rounds: int, generator: np.random.Generator, noise: np.ndarray | None = None
) -> np.ndarray:
    """Tokens per second of rungs, and of the first and the last one again, by round.

    noise: of each rung; by default 3 %.
    """
    noise = np.full(len(speeds), 0.03) if noise is None else noise
    again = [*range(len(speeds)), 0, -1]
    drift = generator.normal(0.0, 0.1, rounds)
    scatter = generator.normal(0.0, 1.0, (len(again), rounds)) * noise[again][:, None]
    return np.asarray(speeds)[again][:, None] * np.exp(drift + scatter)


def judged(speeds: np.ndarray) -> tuple[list[Estimate], float | None]:
    """The ratio of each rung of ladder_of() to the one before, and the noise floor."""
    *rungs, first, last = (dict(enumerate(each)) for each in speeds.tolist())
    pairs = [*pairwise(rungs), (rungs[0], first), (rungs[-1], last)]
    *found, a, b = (ratio for before, rung in pairs if (ratio := paired_ratio(rung, before)))
    return found, noise_floor([a, b], found)


@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_the_interval_covers_the_true_ratio_nineteen_times_in_twenty(rounds: int) -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for _ in range(4000):
        first, _, other = simulate(1.3, rounds, generator)
        found = paired_ratio(other, first)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.3 <= found.high
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)


def test_a_change_without_effect_is_called_faster_at_most_one_time_in_two_hundred() -> None:
    generator = np.random.default_rng(7)
    called = {"faster": 0, "slower": 0, "same": 0, "unclear": 0}
    for _ in range(4000):
        first, control, other = simulate(1.0, 5, generator)
        found = paired_ratio(other, first)
        assert found is not None
        called[verdict(found, floor_of(first, control))] += 1
    assert called["faster"] / 4000 < 0.005
    assert called["slower"] / 4000 < 0.005


@pytest.mark.parametrize("rungs", [8, 18])
@pytest.mark.parametrize("rounds", [3, 5, 10])
def test_of_ladders_whose_changes_do_nothing_at_most_one_in_forty_holds_a_false_verdict(
    rounds: int, rungs: int
) -> None:
    generator = np.random.default_rng(7)
    false = 0
    for _ in range(1000):
        found, delta = judged(ladder_of([1.0] * rungs, rounds, generator))
        false += any(verdict(each, delta) in ("faster", "slower") for each in found)
    assert false / 1000 <= 0.025


@pytest.mark.parametrize(("rounds", "share"), [(3, 0.2), (5, 0.6), (10, 0.95)])
def test_of_gains_of_a_tenth_a_known_share_is_called_faster_under_noise_of_three_percent(
    rounds: int, share: float
) -> None:
    generator, called = np.random.default_rng(7), 0
    for _ in range(500):
        found, delta = judged(ladder_of([1.0, 1.1, *[1.1] * 6], rounds, generator))
        called += verdict(found[0], delta) == "faster"
    assert called / 500 == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(("rounds", "share"), [(3, 0.35), (5, 0.6), (10, 0.75)])
def test_of_gains_that_a_warning_calls_hidden_a_known_share_is_found_at_most(
    rounds: int, share: float
) -> None:
    generator, called = np.random.default_rng(7), 0
    for _ in range(500):
        speeds = ladder_of([1.0] * 8, rounds, generator)
        _, delta = judged(speeds)
        assert delta is not None
        first, second = (dict(enumerate(each)) for each in speeds[:2])
        gain = paired_ratio({key: tps * (1 + HIDDEN * delta) for key, tps in second.items()}, first)
        called += gain is not None and verdict(gain, delta) == "faster"
    assert called / 500 == pytest.approx(share, abs=0.06)


def test_a_real_gain_well_above_the_noise_is_called_faster() -> None:
    generator = np.random.default_rng(7)
    called = 0
    for _ in range(1000):
        first, control, other = simulate(1.25, 5, generator)
        found = paired_ratio(other, first)
        assert found is not None
        called += verdict(found, floor_of(first, control)) == "faster"
    assert called / 1000 > 0.95


@pytest.mark.parametrize(("rungs", "rounds", "most"), [(8, 3, 0.03), (18, 3, 0.07), (18, 10, 0.03)])
def test_of_ladders_whose_changes_do_nothing_few_have_a_leader_that_is_faster_than_another(
    rungs: int, rounds: int, most: float
) -> None:
    """The leader was chosen for leading, among many, which makes it likelier than of a single pair."""
    generator, led = np.random.default_rng(7), 0
    for _ in range(1000):
        speeds = ladder_of([1.0] * rungs, rounds, generator)
        _, delta = judged(speeds)
        best = max(range(rungs), key=lambda each: np.log(speeds[each]).mean())
        leads = [paired_ratio(*(dict(enumerate(speeds[n])) for n in (best, other))) for other in range(rungs)]
        led += any(lead is not None and verdict(lead, delta) == "faster" for lead in leads)
    assert 0 < led / 1000 <= most


@pytest.mark.parametrize(("rounds", "most"), [(3, 0.05), (5, 0.025)])
def test_under_unequal_noise_few_ladders_whose_changes_do_nothing_hold_a_false_verdict(
    rounds: int, most: float
) -> None:
    generator, false = np.random.default_rng(7), 0
    for _ in range(1000):
        noise = 0.03 * np.exp(
            generator.normal(0.0, 1.0, 18)
        )  # a sixth of them seven times as noisy as another sixth
        found, delta = judged(ladder_of([1.0] * 18, rounds, generator, noise))
        false += any(verdict(each, delta) in ("faster", "slower") for each in found)
    assert false / 1000 <= most


def test_stopping_on_width_alone_leaves_the_interval_s_coverage_and_the_value_unbiased() -> None:
    generator = np.random.default_rng(7)
    covered, logs = 0, []
    for _ in range(2000):
        first, _, other = simulate(1.3, 20, generator)
        found = paired_ratio(other, first)
        for rounds in range(5, 21):
            found = paired_ratio({n: other[n] for n in range(1, rounds + 1)}, first)
            assert found is not None
            if narrow_enough([found], 0.03):
                break
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.3 <= found.high
        logs.append(math.log(found.value))
    assert covered / 2000 > 0.90
    assert np.mean(logs) == pytest.approx(math.log(1.3), abs=0.002)


@given(low=st.floats(0.1, 10), width=st.floats(1, 10), wider=st.floats(1, 10), delta=st.floats(0.01, 5))
def test_knowing_less_never_says_more(low: float, width: float, wider: float, delta: float) -> None:
    known, vague = within(low, low * width), within(low / wider, low * width * wider)
    assert verdict(vague, delta) in ("unclear", verdict(known, delta))

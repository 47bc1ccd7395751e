from __future__ import annotations

import math

import pytest

from gpt2.pretrain.anomaly import MOST_PASSED, WINDOW, Guard, Policy, TrainingStopped


class Told(list[tuple[int, str]]):
    def __call__(self, step: int, text: str) -> None:
        self.append((step, text))


def guard(told: Told | None = None, **policy: object) -> Guard:
    return Guard(Policy(**policy), told if told is not None else Told(), {})  # type: ignore[arg-type]


def steady(guard: Guard) -> Guard:
    for step in range(WINDOW):
        assert guard.accepts(step, 3.0 + 0.01 * (step % 2), 1.0 + 0.1 * (step % 2))
    return guard


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (3.0, math.nan), (3.0, math.inf)]
)
def test_what_is_not_finite_ends_the_run_by_default(loss: float, norm: float) -> None:
    with pytest.raises(TrainingStopped, match=r"step 7: .*policy is to stop"):
        guard().accepts(7, loss, norm)


def test_what_is_not_finite_is_passed_over_and_said_where_the_policy_has_it() -> None:
    told = Told()
    assert not guard(told, not_finite="skip").accepts(7, math.nan, 1.0)
    assert told == [(7, "loss nan, gradient norm 1: this step was passed over")]


def test_an_infinite_norm_is_left_to_a_gradient_scaler_and_said() -> None:
    told = Told()
    assert not guard(told).accepts(3, 3.0, math.inf, scaled=True)
    assert told == [(3, "float16 overflowed, gradient norm inf: this step was passed over")]


@pytest.mark.parametrize("scaled", [True, False])
def test_many_steps_passed_over_in_a_row_end_the_run(scaled: bool) -> None:
    watched = guard(not_finite="skip")
    for step in range(MOST_PASSED - 1):
        assert not watched.accepts(step, 3.0, math.inf, scaled=scaled)
    again = Guard(Policy(not_finite="skip"), Told(), watched.state_dict())
    with pytest.raises(TrainingStopped, match=f"{MOST_PASSED} steps in a row were passed over"):
        again.accepts(99, 3.0, math.inf, scaled=scaled)
    assert watched.accepts(50, 3.0, 1.0)
    assert not watched.accepts(51, 3.0, math.inf, scaled=scaled)


@pytest.mark.parametrize(("loss", "norm", "named"), [(4.0, 1.0, "loss 4"), (3.0, 9.0, "gradient norm 9")])
def test_a_spike_is_passed_over_where_the_policy_has_it(loss: float, norm: float, named: str) -> None:
    told = Told()
    assert not steady(guard(told, spike="skip")).accepts(500, loss, norm)
    assert [(step, text.startswith(named)) for step, text in told] == [(500, True)]


def test_a_spike_is_trained_on_and_said_by_default() -> None:
    told = Told()
    assert steady(guard(told)).accepts(500, 4.0, 1.0)
    assert "trained on all the same" in told[0][1]


def test_a_falling_loss_is_no_spike() -> None:
    told = Told()
    assert steady(guard(told, spike="stop")).accepts(500, 0.1, 0.01)
    assert not told


def test_no_spike_is_told_before_there_are_enough_steps_to_hold_it_to() -> None:
    told = Told()
    assert guard(told, spike="stop").accepts(0, 11.0, 5.0)
    assert guard(told, spike="stop").accepts(1, 99.0, 50.0)
    assert not told


def test_what_is_passed_over_is_no_measure_for_what_comes() -> None:
    watched = steady(guard(spike="skip"))
    before = watched.state_dict()
    watched.accepts(500, 400.0, 1.0)
    assert watched.state_dict() == {**before, "passed": 1}


def test_a_guard_that_remembers_says_what_one_that_never_stopped_says() -> None:
    told = Told()
    watched = steady(guard(spike="skip"))
    again = Guard(Policy(spike="skip"), told, watched.state_dict())
    assert not again.accepts(500, 4.0, 1.0)
    assert again.accepts(501, 3.0, 1.0)

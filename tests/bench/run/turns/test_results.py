"""What turns come to: intervals over starts, and what is said of two rungs by them."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from bench.ladder.ladder import Ladder, load
from bench.run.turns.interleave import CONTROL, Group, Pair
from bench.run.turns.results import results
from bench.stats import geometric_mean

Turns = list[list[tuple[float, float]]]


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder("[{name: a}, {name: b, set: {adamw: fused}}]"))


def group(ladder: Ladder, rung: Turns, control: Turns) -> Group:
    pairs = [Pair(rung="a" + CONTROL, over="a", starts=control), Pair(rung="b", over="a", starts=rung)]
    return Group(rungs=ladder.rungs, pairs=pairs)


def drawn(random: np.random.Generator, starts: int, rounds: int, process: float, turn: float) -> Turns:
    """Two rungs alike, whose processes differ by a deviation of `process`, and their turns by `turn`."""
    of_start = random.normal(0, process, (starts, 1, 2))
    seconds = np.exp(of_start + random.normal(0, turn, (starts, rounds, 2)))
    return [[(float(o), float(r)) for o, r in turns] for turns in seconds]


def test_an_interval_is_that_of_the_starts_means_and_not_of_their_turns(ladder: Ladder) -> None:
    turns: Turns = [[(2.0, 1.0), (2.2, 1.0)], [(2.4, 1.0), (2.4, 1.1)], [(1.9, 1.0)]]
    found, _ = results(ladder, group(ladder, turns, [[(1.0, 1.0)]] * 3))
    means = [geometric_mean([2.0, 2.2]).value, geometric_mean([2.4, 2.4 / 1.1]).value, 1.9]
    assert asdict(found.ratio) == pytest.approx(asdict(geometric_mean(means)))
    assert (found.rung, found.turns, len(found.starts)) == ("b", 5, 3)


@pytest.mark.parametrize(("starts", "verdict"), [(1, "not replicated"), (2, "not replicated"), (3, "faster")])
def test_below_three_starts_nothing_is_said_of_two_rungs_however_many_turns_they_took(
    ladder: Ladder, starts: int, verdict: str
) -> None:
    turns = [[(2.0, 1.0 + 0.001 * turn + 0.001 * start) for turn in range(50)] for start in range(starts)]
    control = [[(1.0, 1.0 + 0.001 * start)] * 50 for start in range(starts)]
    found, again = results(ladder, group(ladder, turns, control))
    assert (found.verdict, again.verdict) == (verdict, None)
    assert found.ratio.low is not None
    assert found.ratio.low > 1.9


def test_a_start_without_turns_counts_for_nothing(ladder: Ladder) -> None:
    found, _ = results(ladder, group(ladder, [[(2.0, 1.0)], [], [(2.0, 1.0)]], [[(1.0, 1.0)]] * 3))
    assert (len(found.starts), found.verdict) == (2, "not replicated")


def test_without_a_control_that_was_replicated_there_is_no_verdict(ladder: Ladder) -> None:
    found, _ = results(ladder, group(ladder, [[(2.0, 1.0)]] * 3, [[(1.0, 1.0)]] * 2))
    assert found.verdict == "no control"


@pytest.mark.parametrize(("process", "turn"), [(0.026, 0.03), (0.026, 0.13), (0.06, 0.13), (0.02, 0.02)])
@pytest.mark.parametrize("starts", [3, 6])
def test_of_two_rungs_alike_one_in_twenty_at_most_is_called_faster_or_slower(
    ladder: Ladder, process: float, turn: float, starts: int
) -> None:
    random, wrong, tries = np.random.default_rng(1337), 0, 1000
    for _ in range(tries):
        two = (drawn(random, starts, 8, process, turn) for _ in range(2))
        found, _ = results(ladder, group(ladder, *two))
        wrong += found.verdict in ("faster", "slower")
    assert wrong / tries < 0.065  # of 1,000, three standard errors above 5 %

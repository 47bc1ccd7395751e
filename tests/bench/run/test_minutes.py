"""A run that is given its time: as many rounds as fit, and what is said where one does not."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import judged, process
from runs import GOOD, Silent, instead_of_workers

from bench.analysis.scoreboard import scoreboard
from bench.errors import BenchError
from bench.ladder.ladder import Ladder, load
from bench.records.record import Record, read
from bench.run import rounds, runner
from bench.run.command import Options
from bench.run.rounds import Climb, Rounds, TimeLimit

pytestmark = pytest.mark.usefixtures("quick_start")
TWO = "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}]"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only where a test says so."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def rounds_taken(source: Rounds | Climb, ladder: Ladder, clock: SimpleNamespace, *speeds: float) -> int:
    """How many rounds a source takes whose processes last ten seconds each, and have these speeds or one."""
    records: list[Record] = []
    for task, tps in zip(source.tasks(records, lambda _: None), speeds or repeat(100.0), strict=False):
        clock.now += 10.0
        records.append(judged(task, process(ladder, task, tps)))
        source.ended(records[-1], 10.0)
    return max(record.repetition for record in records if record.kind == "cumulative")


@pytest.mark.parametrize(("seconds", "taken"), [(5, 1), (79, 1), (80, 2), (119, 2), (120, 3), (1000, 5)])
def test_as_many_rounds_as_fit_are_taken_at_least_one_and_at_most_the_ladders(
    write_ladder, clock: SimpleNamespace, seconds: float, taken: int
) -> None:
    """Four processes a round: two rungs and their controls."""
    ladder = load(write_ladder(TWO, repeats=5))
    assert rounds_taken(Rounds(ladder, ladder.rungs, limit=TimeLimit(seconds)), ladder, clock) == taken


def test_rounds_that_an_interval_needs_may_take_longer_with_patience(write_ladder, clock) -> None:
    ladder = load(write_ladder(TWO, repeats=5))
    source = Rounds(ladder, ladder.rungs, limit=TimeLimit(45, patience=3.0))
    assert rounds_taken(source, ladder, clock) == 3


def test_of_a_run_until_a_width_five_rounds_are_enough_if_it_is_narrow(write_ladder, clock) -> None:
    ladder = load(write_ladder(TWO, until=0.05))
    assert rounds_taken(Rounds(ladder, ladder.rungs, limit=TimeLimit(9999)), ladder, clock) == 5


def test_a_round_that_was_interrupted_is_ended_first_however_narrow_the_intervals_are(write_ladder) -> None:
    ladder = load(write_ladder(TWO, until=0.05))
    records = [
        judged(task, process(ladder, task, 100.0))
        for repetition in range(1, 8)
        for task in Rounds(ladder, ladder.rungs).round(repetition)
    ]
    last = next(place for place, each in enumerate(records) if each.repetition == 7)
    source = Rounds(ladder, ladder.rungs)
    source.resume(records[: last + 1])
    task = next(source.tasks(records[: last + 1], lambda _: None))
    assert (task.kind, task.rung.name, task.repetition) == ("cumulative", "b", 7)


def test_a_run_until_a_width_plans_the_three_rounds_that_an_interval_needs(write_ladder) -> None:
    ladder = load(write_ladder(TWO, until=0.05))
    assert Rounds(ladder, ladder.rungs, limit=TimeLimit(9999)).planned_rounds == 3
    assert Rounds(ladder, ladder.rungs).planned_rounds == 5


@pytest.mark.parametrize(("seconds", "taken"), [(5, 1), (80, 2), (9999, 5)])
def test_time_that_is_to_be_filled_is_filled_with_rounds_until_they_are_narrow(
    seconds: float, taken: int, write_ladder, clock: SimpleNamespace
) -> None:
    ladder = load(write_ladder(TWO, repeats=3))
    assert (
        rounds_taken(Rounds(ladder, ladder.rungs, limit=TimeLimit(seconds, fill=True)), ladder, clock)
        == taken
    )


def test_as_long_as_they_are_not_narrow_rounds_fill_the_time_up_to_twenty(write_ladder, clock) -> None:
    ladder = load(write_ladder(TWO, repeats=3))
    source = Rounds(ladder, ladder.rungs, limit=TimeLimit(9999, fill=True))
    assert rounds_taken(source, ladder, clock, *[100.0, 130.0, 90.0] * 40) == 20


@pytest.mark.parametrize(
    ("override", "given"),
    [("protocol.repeats=4", True), ("protocol.until=0.5", True), ("protocol.block_seconds=2", False)],
)
def test_rounds_are_given_by_their_number_or_by_a_width(override: str, given: bool) -> None:
    assert Options(overrides=(override,)).rounds_given is given


def test_what_is_complete_does_not_depend_on_the_time_of_the_run_that_goes_on(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_workers(monkeypatch, GOOD)
    ladder = load(write_ladder(TWO, repeats=2))
    interrupted, complete = (runner.run(ladder, Options(out=tmp_path), Silent()).path for _ in range(2))
    interrupted.write_text("".join(interrupted.read_text().splitlines(keepends=True)[:3]))
    options = Options(out=tmp_path, minutes=60, resume=True)
    assert runner.run(ladder, options, Silent()).path == interrupted != complete


def test_a_run_that_is_resumed_knows_from_its_records_how_long_a_round_takes(write_ladder, clock) -> None:
    ladder = load(write_ladder(TWO, repeats=2))
    records: list[Record] = []
    for task in Rounds(ladder, ladder.rungs).tasks(records, lambda _: None):
        made = judged(task, process(ladder, task, 100.0))
        records.append(made.model_copy(update={"process_seconds": 600.0}))
    source = Rounds(ladder, ladder.rungs, limit=TimeLimit(60, fill=True))
    source.resume(records)
    assert not list(source.tasks(records, lambda _: None))


def test_time_left_is_that_of_the_rounds_that_are_planned_and_all_of_what_is_to_be_filled(clock) -> None:
    assert TimeLimit(300).seconds_to_go(120, certain=0) == 120
    assert TimeLimit(300).seconds_to_go(1000, certain=0) == 300
    assert TimeLimit(300, fill=True).seconds_to_go(120, certain=0) == 300
    assert TimeLimit(300, patience=3.0, fill=True).seconds_to_go(700, certain=0) == 700
    assert TimeLimit(300, patience=3.0, fill=True).seconds_to_go(1000, certain=0) == 900
    assert TimeLimit(300).seconds_to_go(1000, certain=400) == 400  # of a round that is run in any case


def test_trying_the_rungs_counts(write_ladder, clock: SimpleNamespace) -> None:
    """Three tries, then rounds of two processes: the first rung alone is carried."""
    ladder = load(write_ladder(TWO, repeats=5, carry="if_faster"))
    assert rounds_taken(Climb(ladder, ladder.rungs, limit=TimeLimit(30 + 45)), ladder, clock) == 2


def test_a_run_that_took_what_fitted_is_complete(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_workers(monkeypatch, GOOD)
    ladder = load(write_ladder(TWO, repeats=9, timeout_seconds=60))
    result = runner.run(ladder, Options(out=tmp_path, minutes=0.001, however_long=True), Silent())
    assert [record.protocol["repeats"] for record in result.records] == [1, 1, 1, 1]
    assert not scoreboard(result.records).interrupted


def test_far_too_little_time_is_refused_with_what_is_needed_and_the_first_record_kept(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_workers(monkeypatch, GOOD)
    ladder = load(write_ladder(TWO, repeats=9))
    with pytest.raises(
        BenchError, match=r"^--minutes 0\.0001: one window of each rung takes about .* here; give"
    ):
        runner.run(ladder, Options(out=tmp_path, minutes=0.0001), Silent())
    (file,) = tmp_path.rglob("*.jsonl")
    assert [record.rung for record in read(file)[0]] == ["a"]

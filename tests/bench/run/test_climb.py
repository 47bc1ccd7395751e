"""Ladders that carry what is faster: what is tried, what is carried, and what the rounds then measure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import judged, process
from samples import append

from bench.analysis.attribution import attribution
from bench.analysis.schedule import Task
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import exit_code, load_boards
from bench.analysis.timing import timing
from bench.format import status_word
from bench.ladder.ladder import Ladder, LadderError, load
from bench.records.measurement import Proof
from bench.records.record import Record
from bench.report.one_run.screen import findings, keeps, why_not_counted
from bench.run.rounds import Climb, TimeLimit
from bench.run.runner import lacks

SPEEDS = {"a": 100.0, "b": 150.0, "c": 60.0, "d": 300.0}
"""Tokens/s of rungs whose own change decides, whatever they stand on."""
FOUR = (
    "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}, "
    "{name: d, set: {vocab_multiple: 64}}]"
)


def climb(ladder: Ladder, run: Callable[[Task], Record], *, rungs: tuple[str, ...] = ()) -> list[Record]:
    """Records of a whole run, whose processes are made up by `run`."""
    source, records = Climb(ladder, ladder.chosen(rungs)), list[Record]()
    for task in source.tasks(records, lambda _: None):
        records.append(judged(task, run(task)))
        source.ended(records[-1], 1.0)
    return records


def go_on(
    ladder: Ladder,
    records: list[Record],
    run: Callable[[Task], Record],
    until: Callable[[Task], bool] = lambda task: False,
) -> None:
    """Add what a run makes that is resumed after these records, to its end or the task that `until` names."""
    source = Climb(ladder, ladder.rungs)
    source.resume(records)
    for task in source.tasks(records, lambda _: None):
        if until(task):
            break
        records.append(judged(task, run(task)))
        source.ended(records[-1])


def measured(made: Record, **changes: Any) -> Record:
    """The record with another measurement, where it has any."""
    found = made.measurement and made.measurement.model_copy(update=changes)
    return made.model_copy(update={"measurement": found})


def of_speeds(ladder: Ladder, speeds: dict[str, float], **changes: Any) -> list[Record]:
    return climb(ladder, lambda task: process(ladder, task, speeds[task.rung.name], **changes))


def of_one_ended(ladder: Ladder, rung: str, status: str) -> list[Record]:
    """Records of a run in which no process of one rung comes to measure."""
    ended = {rung: {"status": status, "error": "why", "measurement": None}}

    def run(task: Task) -> Record:
        return process(ladder, task, SPEEDS[task.rung.name], **ended.get(task.rung.name, {}))

    return climb(ladder, run)


def of_one_measured(ladder: Ladder, rung: str, **changes: Any) -> list[Record]:
    """Records of a run in which one rung's processes measured something else."""

    def run(task: Task) -> Record:
        made = process(ladder, task, SPEEDS[task.rung.name])
        return measured(made, **changes) if task.rung.name == rung else made

    return climb(ladder, run)


def rungs_of_rounds(records: list[Record]) -> list[str]:
    """Names of the rungs that the first round measured."""
    return [r.rung for r in records if r.kind == "cumulative" and r.repetition == 1]


def tries_of(records: list[Record]) -> list[tuple[str, int]]:
    """Names of the rungs that were tried alone, in order, and which try of each it was."""
    return [(r.rung, r.repetition) for r in records if r.scout and not r.scout.together]


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder(FOUR, carry="if_faster", repeats=3))


def test_a_slower_rung_is_left_out_and_the_next_stands_on_the_one_before_it(ladder: Ladder) -> None:
    records = of_speeds(ladder, SPEEDS)
    assert rungs_of_rounds(records) == ["a", "b", "d"]
    (last,) = [r for r in records if r.rung == "d" and r.kind == "cumulative" and r.repetition == 2]
    assert (last.toggles.all["attention"], last.toggles.all["adamw"]) == ("sdpa", "for_loop")


def test_a_ladder_whose_only_good_rung_is_the_last_ends_on_that_rung(ladder: Ladder) -> None:
    records = of_speeds(ladder, {"a": 100.0, "b": 90.0, "c": 20.0, "d": 110.0})
    assert rungs_of_rounds(records) == ["a", "d"]
    assert scoreboard(records).rows[-1].toggles == replace(ladder.rungs[0].toggles, vocab_multiple=64)


def test_where_nothing_is_faster_the_first_rung_alone_is_measured(ladder: Ladder) -> None:
    assert rungs_of_rounds(of_speeds(ladder, dict.fromkeys("abcd", 100.0))) == ["a"]


def test_a_gain_within_one_percent_is_not_carried(ladder: Ladder) -> None:
    assert rungs_of_rounds(of_speeds(ladder, {"a": 100.0, "b": 100.9, "c": 101.2, "d": 90.0})) == ["a", "c"]


def test_a_gain_within_the_difference_of_the_first_rungs_two_tries_is_not_carried_and_says_so(
    ladder: Ladder,
) -> None:
    def run(task: Task) -> Record:
        again = task.kind == "scout" and task.repetition == 2
        return process(ladder, task, {**SPEEDS, "a": 80.0 if again else 100.0, "b": 95.0}[task.rung.name])

    records = climb(ladder, run)
    assert rungs_of_rounds(records) == ["a", "d"]  # b is 1.19x of 80, and a itself 1.25x
    assert why_not_counted(scoreboard(records).rows[1]) == "not carried: 1.19x, within noise"


def test_a_gain_within_the_scatter_of_a_windows_blocks_is_not_carried(ladder: Ladder) -> None:
    def run(task: Task) -> Record:
        made = process(ladder, task, {**SPEEDS, "b": 115.0}[task.rung.name])
        assert made.measurement or task.rung.name == "c"
        if task.rung.name == "b" and made.measurement:
            mean = made.measurement.block_seconds[0]
            return measured(made, block_seconds=[0.5 * mean, 1.5 * mean] * 5)
        return made

    assert rungs_of_rounds(climb(ladder, run)) == ["a", "d"]


@pytest.mark.parametrize("status", ["out_of_memory", "unsupported", "failed", "timeout"])
def test_a_rung_that_does_not_run_is_left_out_with_its_reason(ladder: Ladder, status: str) -> None:
    records = of_one_ended(ladder, "b", status)
    row = scoreboard(records).rows[1]
    assert rungs_of_rounds(records) == ["a", "d"]
    assert (row.status, row.error, row.tps) == (status, "why", None)
    assert exit_code(records) == (6 if status in ("failed", "timeout") else 0)


def test_a_rung_that_is_faster_but_whose_losses_differ_is_left_out(ladder: Ladder) -> None:
    records = of_one_measured(ladder, "d", losses=[9.0, 8.0, 7.0, 6.0])
    assert rungs_of_rounds(records) == ["a", "b"]
    assert scoreboard(records).rows[-1].status == "parity_failed"
    assert exit_code(records) == 4


def test_a_rung_that_is_faster_but_had_no_effect_is_left_out(ladder: Ladder) -> None:
    inert = Proof(took_effect=False, evidence="the same kernels")
    records = of_one_measured(ladder, "b", proofs={"attention": inert})
    assert rungs_of_rounds(records) == ["a", "d"]
    assert scoreboard(records).rows[1].status == "inert"


def test_a_rung_that_changes_the_maths_is_never_carried(write_ladder) -> None:
    rungs = "[{name: a, set: {device: cpu}}, {name: b, set: {weights: bfloat16}}]"
    ladder = load(write_ladder(rungs, carry="if_faster"))
    assert ladder.rungs[1].toggles.maths()
    records = of_speeds(ladder, {"a": 100.0, "b": 500.0})
    assert rungs_of_rounds(records) == ["a"]
    assert scoreboard(records).rows[1].status == "other_maths"


def test_what_all_rungs_have_changes_the_maths_of_none_of_them(write_ladder) -> None:
    every = ["toggles.autocast=bfloat16", "toggles.adamw=compiled", "toggles.weights=bfloat16"]
    ladder = load(write_ladder("[{name: a}, {name: b, set: {attention: sdpa}}]", carry="if_faster"), every)
    assert rungs_of_rounds(of_speeds(ladder, {"a": 100.0, "b": 150.0})) == ["a", "b"]


def test_a_first_rung_of_whose_try_nothing_is_known_is_still_what_others_are_compared_with(
    ladder: Ladder,
) -> None:
    source, records = Climb(ladder, ladder.rungs), list[Record]()
    for task in source.tasks(records, lambda _: None):
        record = process(ladder, task, SPEEDS[task.rung.name])
        records.append(record if task.rung.name == "a" else judged(task, record))
        source.ended(records[-1], 1.0)
    assert rungs_of_rounds(records) == ["a", "b", "d"]


@pytest.mark.parametrize("held", [6, 7, 8, 9, 13])
def test_a_run_that_lacks_a_round_of_a_carried_rung_is_interrupted(ladder: Ladder, held: int) -> None:
    """Five tries, then rounds of five processes: three rungs and two controls."""
    whole = of_speeds(ladder, SPEEDS)
    assert scoreboard(whole[:held]).interrupted
    assert not scoreboard(whole).interrupted


def test_a_rung_that_needs_what_was_not_carried_says_so(write_ladder) -> None:
    """Three ranks take whole steps of six sequences at two or one a time, not at three."""
    first, second = "{name: a, set: {micro_batch_size: 3}}", "{name: b, set: {micro_batch_size: 2}}"
    task = "model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 192"
    rungs = f"[{first}, {second}, {{name: c, set: {{world_size: 3}}}}]"
    ladder = load(write_ladder(rungs, workload=task, carry="if_faster"))
    row = scoreboard(of_speeds(ladder, {"a": 100.0, "b": 50.0, "c": 900.0})).rows[2]
    assert row.status == "unsupported"
    assert (row.error or "").startswith("workload.tokens_per_step 192 is not a multiple of 288")


def test_the_first_rung_is_carried_even_where_it_does_not_run(ladder: Ladder) -> None:
    assert rungs_of_rounds(of_one_ended(ladder, "a", "out_of_memory")) == ["a", "b", "d"]


RETRY = (
    "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}, retry: true}, "
    "{name: c, set: {adamw: fused}}]"
)


def test_a_rung_to_be_retried_is_tried_once_more_on_top_of_all_others(write_ladder) -> None:
    ladder = load(write_ladder(RETRY, carry="if_faster"))
    records = of_speeds(ladder, {"a": 100.0, "b": 90.0, "c": 150.0, "b (second try)": 200.0})
    assert rungs_of_rounds(records) == ["a", "c", "b (second try)"]
    assert [row.rung for row in scoreboard(records).rows] == ["a", "b", "c", "b (second try)"]


def test_a_second_try_that_is_not_needed_is_no_part_of_what_later_ones_stand_on(write_ladder) -> None:
    """b is carried, and c replaces what it set; e's second try stands on c as the rounds do."""
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}, retry: true}, "
        "{name: c, set: {attention: blocks}}, {name: e, set: {adamw: fused}, retry: true}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster"))
    speeds = {"a": 100.0, "b": 130.0, "c": 150.0, "e": 90.0, "e (second try)": 200.0}
    records = of_speeds(ladder, speeds)
    tried = [r.toggles.all["attention"] for r in records if r.rung == "e (second try)"]
    assert set(tried) == {"blocks"}
    assert rungs_of_rounds(records) == ["a", "b", "c", "e (second try)"]


def test_a_rung_that_was_carried_is_not_tried_again(write_ladder) -> None:
    ladder = load(write_ladder(RETRY, carry="if_faster"))
    records = of_speeds(ladder, {"a": 100.0, "b": 130.0, "c": 150.0})
    assert rungs_of_rounds(records) == ["a", "b", "c"]
    assert not scoreboard(records).has_gaps


def test_of_chosen_rungs_only_those_are_tried_and_kept(ladder: Ladder) -> None:
    def run(task: Task) -> Record:
        return process(ladder, task, SPEEDS[task.rung.name])

    records = climb(ladder, run, rungs=("a", "d"))
    assert {r.rung for r in records} == {"a", "d"}
    assert records[-1].toggles.all["attention"] == "explicit"


def test_a_far_slower_rung_is_told_at_which_speed_to_end_itself(ladder: Ladder) -> None:
    limits = {}

    def run(task: Task) -> Record:
        limits.setdefault((task.kind, task.rung.name, task.repetition), task.stop_below)
        return process(ladder, task, {**SPEEDS, "c": 10.0}[task.rung.name])

    records = climb(ladder, run)
    assert limits["scout", "c", 1] == 75.0  # half of b's 150
    assert limits["scout", "a", 2] is None
    assert limits["cumulative", "d", 1] is None
    row = scoreboard(records).rows[2]
    assert (row.status, round(row.tried or 0, 3)) == ("not_carried", 0.067)
    assert why_not_counted(row) == "not carried: 0.07x"


@pytest.mark.parametrize(("expect", "code"), [("out_of_memory", 4), ("inert", 0)])
def test_a_rung_that_was_tried_refutes_that_it_has_no_memory_but_not_that_it_does_nothing(
    expect: str, code: int, write_ladder
) -> None:
    rungs = FOUR.replace("{name: c, ", f"{{name: c, expect: {expect}, ")
    records = of_speeds(load(write_ladder(rungs, carry="if_faster", repeats=3)), SPEEDS)
    assert scoreboard(records).rows[2].status == "not_carried"
    assert exit_code(records) == code


def without_tries(records: list[Record]) -> Scoreboard:
    return scoreboard([r for r in records if r.kind != "scout"])


FIVE = FOUR.replace("}]", "}, {name: e, set: {compile: default}}]")


def test_the_best_is_tried_again_after_two_tries_within_its_noise(write_ladder) -> None:
    """b's first window is of a fast minute, which c and d do not reach; e is compared with a later one."""
    ladder = load(write_ladder(FIVE, carry="if_faster"))

    def run(task: Task) -> Record:
        fast = task.kind == "scout" and task.repetition == 1
        speeds = {"a": 100.0, "b": 130.0 if fast else 120.0, "c": 130.0, "d": 129.0, "e": 128.0}
        return process(ladder, task, speeds[task.rung.name])

    records = climb(ladder, run)
    tries = tries_of(records)
    assert tries == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("b", 2), ("e", 1)]
    last = records[len(tries) - 1].scout
    assert last is not None
    assert (last.over, round(last.ratio or 0, 3), last.carried) == ("b", 1.067, True)
    assert rungs_of_rounds(records) == ["a", "b", "e"]


@pytest.mark.parametrize(("second", "carried"), [(116.0, True), (100.0, False)])
def test_a_rung_that_seems_faster_within_the_noise_is_judged_by_two_windows(
    ladder: Ladder, second: float, carried: bool
) -> None:
    """By the scatter of its blocks 0.067 is noise in one window, and 0.047 in two."""

    def run(task: Task) -> Record:
        speeds = {"a": 100.0, "b": second if task.repetition == 2 else 106.0, "c": 50.0, "d": 50.0}
        made = process(ladder, task, speeds[task.rung.name])
        if task.kind != "scout" or task.rung.name != "b" or not made.measurement:
            return made
        mean = made.measurement.block_seconds[0]
        return measured(made, block_seconds=[0.9 * mean, 1.1 * mean] * 5)

    records = climb(ladder, run)
    assert tries_of(records) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("d", 1)]
    assert rungs_of_rounds(records) == (["a", "b"] if carried else ["a"])
    row = scoreboard(records).rows[1]
    assert row.left_out != carried
    assert [r.rung for r in scoreboard(records).rows] == ["a", "b", "c", "d"]
    if not carried:
        assert why_not_counted(row) == "not carried: 1.03x, within noise"


def test_the_best_is_not_tried_again_after_rungs_that_are_clearly_slower(write_ladder) -> None:
    ladder = load(write_ladder(FIVE, carry="if_faster"))
    records = of_speeds(ladder, {"a": 100.0, "b": 130.0, "c": 100.0, "d": 110.0, "e": 120.0})
    assert tries_of(records) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]


def test_no_figure_of_a_measured_rung_comes_from_trying_it(ladder: Ladder) -> None:
    noise = random.Random(0)
    records = climb(
        ladder, lambda task: process(ladder, task, SPEEDS[task.rung.name] * noise.uniform(0.98, 1.02))
    )
    shown = {row.rung: row for row in scoreboard(records).rows if row.tps}
    alone = {row.rung: row for row in without_tries(records).rows}
    assert shown == alone
    assert scoreboard(records).rounds == 3


@pytest.mark.slow
def test_choosing_does_not_flatter_what_was_chosen(ladder: Ladder) -> None:
    """With no true effect at all, the last carried rung's speed-up covers 1 in 95 % of ladders."""
    noise, tops, covered = random.Random(1), 0, 0
    while tops < 400:
        records = climb(ladder, lambda task: process(ladder, task, 100.0 * noise.lognormvariate(0, 0.03)))
        *_, top = [row for row in scoreboard(records).rows if row.tps]
        if top.index and top.speedup:
            assert top.speedup.low is not None
            assert top.speedup.high is not None
            tops, covered = tops + 1, covered + (top.speedup.low <= 1 <= top.speedup.high)
    assert 0.92 < covered / tops < 0.98


@pytest.mark.parametrize("held", range(16))
def test_a_run_that_ended_anywhere_goes_on_with_what_is_missing(ladder: Ladder, held: int) -> None:
    whole = of_speeds(ladder, SPEEDS)
    records = whole[:held]
    go_on(ladder, records, lambda task: process(ladder, task, SPEEDS[task.rung.name]))
    assert {r.key for r in whole} <= {r.key for r in records}
    assert len({r.key for r in records}) == len(records)


@pytest.mark.parametrize("held", range(14))
def test_a_run_with_second_tries_goes_on_with_what_is_missing(write_ladder, held: int) -> None:
    """b seems faster within the difference of a's tries; after b and c, as fast as it, a is tried again."""
    ladder = load(write_ladder(FIVE, carry="if_faster", repeats=1))

    def run(task: Task) -> Record:
        speeds = {"a": 100.0, "b": 99.0, "c": 95.5, "d": 100.5, "e": 130.0}
        drift = 0.95 if task.kind == "scout" and task.rung.name == "a" and task.repetition == 2 else 1.0
        return process(ladder, task, speeds[task.rung.name] * drift)

    whole = climb(ladder, run)
    tries = tries_of(whole)
    assert {("b", 2), ("a", 3)} <= set(tries)
    records = whole[:held]
    go_on(ladder, records, run)
    # What is tried twice may differ, because the best is first tried again: the machine may have changed.
    assert {name for name, _ in tries_of(records)} == {"a", "b", "c", "d", "e"}
    assert len(set(tries_of(records))) == len(tries_of(records))
    assert rungs_of_rounds(records) == rungs_of_rounds(whole) == ["a", "e"]


def test_a_resumed_run_compares_with_the_best_as_it_is_now(ladder: Ladder) -> None:
    """The machine is 1.5 times as fast as it was before the break; c and d are as fast as b."""
    speeds = {"a": 100.0, "b": 120.0, "c": 120.0, "d": 120.0}

    def run(task: Task, session: str, faster: float) -> Record:
        return process(ladder, task, speeds[task.rung.name] * faster, session=session)

    records = list[Record]()
    go_on(ladder, records, lambda task: run(task, "before", 1.0), lambda task: task.rung.name == "c")
    go_on(ladder, records, lambda task: run(task, "after", 1.5))
    assert tries_of(records) == [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", 1), ("d", 1), ("b", 3)]
    assert rungs_of_rounds(records) == ["a", "b"]


def test_tries_of_before_a_break_are_not_averaged_with_those_after_it(write_ladder) -> None:
    """b seems faster within the noise; before it is tried again, the machine becomes half as fast."""
    ladder = load(write_ladder(FIVE, carry="if_faster"))

    def run(task: Task, session: str, faster: float) -> Record:
        slow = 0.95 if task.rung.name == "a" and task.repetition == 2 else 1.0
        speeds = {"a": 100.0, "b": 99.0, "c": 50.0, "d": 50.0, "e": 50.0}
        return process(ladder, task, speeds[task.rung.name] * slow * faster, session=session)

    def is_second_of_b(task: Task) -> bool:
        return (task.rung.name, task.repetition) == ("b", 2)

    records = list[Record]()
    go_on(ladder, records, lambda task: run(task, "before", 1.0), is_second_of_b)
    go_on(ladder, records, lambda task: run(task, "after", 0.5))
    again = next(r.scout for r in records if (r.rung, r.repetition, r.kind) == ("b", 2, "scout"))
    assert ("a", 3) in tries_of(records)
    assert again is not None
    assert (again.ratio, again.carried) == (pytest.approx(0.99), False)


Gains = dict[str, float | dict[str, float]]
SMALL: Gains = {"attention": 1.03, "adamw": 1.02, "vocab_multiple": 1.03, "cross_entropy": 1.02}
"""What each toggle gains, within the noise of noisy()."""


def noisy(ladder: Ladder, gains: Gains) -> Callable[[Task], Record]:
    """Rungs whose speed is the product of what each toggle gains; the first rung's two tries differ by 6 %.

    gains: by toggle, or by its value where they differ.
    """

    def run(task: Task) -> Record:
        speed = 94.0 if (task.kind, task.rung.index, task.repetition) == ("scout", 0, 1) else 100.0
        first = ladder.rungs[0].toggles
        for toggle, gain in gains.items():
            value = getattr(task.rung.toggles, toggle)
            if value != getattr(first, toggle):
                speed *= gain[value] if isinstance(gain, dict) else gain
        return process(ladder, task, speed)

    return run


def tried_together(records: list[Record]) -> list[tuple[list[str], bool]]:
    return [(r.scout.together, r.scout.carried) for r in records if r.scout and r.scout.together]


def test_rungs_within_the_noise_alone_are_carried_where_together_they_are_beyond_it(ladder: Ladder) -> None:
    records = climb(ladder, noisy(ladder, SMALL))
    assert tried_together(records) == [(["b", "c", "d"], True)]
    assert rungs_of_rounds(records) == ["a", "b", "c", "d"]
    board = scoreboard(records)
    assert not board.interrupted
    assert [row.rung for row in board.rows if row.tps] == ["a", "b", "c", "d"]
    said = "1.08x together (noise of the tries ±3 %), where alone none was clearly faster: "
    assert f"Kept as a group by short tries, {said}b, c, d." in [*findings(board)]


def test_rungs_that_are_no_faster_together_are_left_out_and_it_is_said(ladder: Ladder) -> None:
    records = climb(ladder, noisy(ladder, {"attention": 1.015, "adamw": 1.015}))
    assert tried_together(records) == [(["b", "c", "d"], False)]
    assert rungs_of_rounds(records) == ["a"]
    left_out = {row.rung: why_not_counted(row) for row in scoreboard(records).rows if row.left_out}
    assert left_out["b"] == left_out["c"] == "not carried: 1.01x, within noise"
    said = "1.03x together (noise of the tries ±3 %), where alone none was clearly faster: "
    assert f"Left out, as a group too, {said}b, c, d." in [*findings(scoreboard(records))]


def test_what_was_carried_above_those_that_are_tried_together_stays(ladder: Ladder) -> None:
    records = climb(ladder, noisy(ladder, {"attention": 1.03, "adamw": 1.03, "vocab_multiple": 1.5}))
    (joint,) = [r for r in records if r.scout and r.scout.together]
    assert (joint.rung, joint.toggles.as_toggles.vocab_multiple) == ("d", 64)
    assert tried_together(records) == [(["b", "c"], True)]
    assert rungs_of_rounds(records) == ["a", "b", "c", "d"]


def test_one_rung_within_the_noise_is_not_tried_once_more(ladder: Ladder) -> None:
    one: Gains = {"attention": 1.03, "adamw": 0.9, "vocab_multiple": 0.9}
    assert tried_together(climb(ladder, noisy(ladder, one))) == []


def test_a_rung_and_its_second_try_are_not_tried_together(write_ladder) -> None:
    rungs = FOUR.replace("sdpa}", "sdpa}, retry: true")
    ladder = load(write_ladder(rungs, carry="if_faster"))
    records = climb(ladder, noisy(ladder, {"attention": 1.03, "adamw": 0.9, "vocab_multiple": 0.9}))
    assert "b (second try)" in {rung for rung, _ in tries_of(records)}
    assert tried_together(records) == []


def test_of_rungs_that_set_one_toggle_the_faster_is_tried_with_the_others(write_ladder) -> None:
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: b, set: {adamw: foreach}}, {name: c, set: {adamw: fused}}, "
        "{name: d, set: {attention: sdpa}}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster"))
    gains: Gains = {"adamw": {"foreach": 1.03, "fused": 1.02}, "attention": 1.03}
    records = climb(ladder, noisy(ladder, gains))
    assert tried_together(records) == [(["b", "d"], True)]
    assert rungs_of_rounds(records) == ["a", "b", "d"]


def test_a_rung_whose_toggle_a_carried_one_sets_after_it_is_not_tried_with_others(write_ladder) -> None:
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: b, set: {adamw: foreach}}, {name: c, set: {adamw: fused}}, "
        "{name: d, set: {attention: sdpa}}, {name: e, set: {vocab_multiple: 64}}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster"))
    gains: Gains = {"adamw": {"foreach": 1.03, "fused": 1.5}, "attention": 1.03, "vocab_multiple": 1.03}
    records = climb(ladder, noisy(ladder, gains))
    assert tried_together(records) == [(["d", "e"], True)]
    assert rungs_of_rounds(records) == ["a", "c", "d", "e"]


def test_what_is_carried_together_is_what_a_second_try_stands_on(write_ladder) -> None:
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: e, set: {cross_entropy: closed_form}, retry: true}, "
        "{name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}, "
        "{name: d, set: {vocab_multiple: 64}}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster"))
    records = climb(ladder, noisy(ladder, {**SMALL, "cross_entropy": 0.9}))
    last = [r for r in records if r.kind == "scout"][-1]
    assert last.rung == "e (second try)"
    assert {last.toggles.as_toggles.attention, last.toggles.as_toggles.adamw} == {"sdpa", "fused"}


@pytest.mark.parametrize("held", range(20))
def test_a_run_with_rungs_tried_together_goes_on_with_what_is_missing(ladder: Ladder, held: int) -> None:
    whole = climb(ladder, noisy(ladder, SMALL))
    assert tried_together(whole)
    records = whole[:held]
    go_on(ladder, records, noisy(ladder, SMALL))
    assert rungs_of_rounds(records) == rungs_of_rounds(whole)
    assert len(tried_together(records)) == 1


def test_a_run_whose_rounds_have_begun_tries_nothing_more_when_it_goes_on(ladder: Ladder) -> None:
    """There was no time to try b, c and d together; with them the later rounds would measure other rungs."""
    source, records = Climb(ladder, ladder.rungs, limit=TimeLimit(0)), list[Record]()
    for task in source.tasks(records, lambda _: None):
        made = judged(task, noisy(ladder, SMALL)(task))
        records.append(made.model_copy(update={"process_seconds": 60.0}))
        source.ended(records[-1], 60.0)
    tries = tries_of(records)
    assert rungs_of_rounds(records) == ["a"]
    assert not tried_together(records)
    go_on(ladder, records, noisy(ladder, SMALL))
    assert not tried_together(records)
    assert tries_of(records) == tries
    assert {r.repetition for r in records if r.kind == "cumulative"} == {1, 2, 3}


BATCH_LAST = FOUR.replace("vocab_multiple: 64", "micro_batch_size: 4")


def test_a_larger_batch_is_not_held_against_a_rung_whose_try_failed(write_ladder) -> None:
    ladder = load(write_ladder(BATCH_LAST, carry="if_faster", repeats=3))

    def run(task: Task) -> Record:
        made = process(ladder, task, {**SPEEDS, "c": 200.0}[task.rung.name])
        return measured(made, losses=[9.0, 8.0, 7.0, 6.0]) if task.rung.name == "c" else made

    records = climb(ladder, run)
    assert rungs_of_rounds(records) == ["a", "b", "d"]
    found = {row.rung: row.status for row in scoreboard(records).rows}
    assert found == {"a": "ok", "b": "ok", "c": "parity_failed", "d": "ok"}


def test_a_larger_batch_is_held_against_the_kept_rung_that_its_losses_are_compared_with(write_ladder) -> None:
    """Between them lies one that was not kept."""
    ladder = load(write_ladder(BATCH_LAST, carry="if_faster", repeats=3))

    def run(task: Task) -> Record:
        made = process(ladder, task, SPEEDS[task.rung.name])
        of_rounds = (task.rung.name, task.kind) == ("b", "cumulative")
        return measured(made, losses=[9.0, 8.0, 7.0, 6.0]) if of_rounds else made

    last = scoreboard(climb(ladder, run)).rows[-1]
    assert (last.rung, last.status) == ("d", "parity_failed")
    assert last.error == "its losses are compared with b's, which differ themselves"


def test_time_left_of_a_climb_counts_what_a_rung_does_once_in_the_first_round_only(ladder: Ladder) -> None:
    """Two rungs are kept, so that a round has three of the ladder and two controls."""

    def left(once: float | None, first: int, last: int) -> float:
        tries = [each for each in of_speeds(ladder, SPEEDS) if each.kind == "scout"]
        took = [
            measured(each, once_seconds=once).model_copy(update={"process_seconds": 60.0}) for each in tries
        ]
        source = Climb(ladder, ladder.rungs)
        source.resume(took)
        return source.seconds_left(first, last) or 0.0

    assert left(None, 1, 1) - left(20.0, 1, 1) == pytest.approx(2 * 20.0)  # the controls
    assert left(None, 2, 3) - left(20.0, 2, 3) == pytest.approx(2 * 5 * 20.0)


def test_the_first_step_of_a_rung_is_timed_in_tries_of_the_same_toggles(ladder: Ladder) -> None:
    """Tried together, d compiles what the rounds measure; tried alone, it did not."""

    def run(task: Task) -> Record:
        took = 50.0 if task.together else 10.0 if task.kind == "scout" else 1.0
        cache = "cold" if task.kind == "scout" else "warm"
        return measured(noisy(ladder, SMALL)(task), first_step_seconds=took, compile_cache=cache)

    times = {each.rung: each.first_step for each in timing(scoreboard(climb(ladder, run)))}
    assert times == {"a": 10.0, "b": 10.0, "c": None, "d": 50.0}


def test_a_file_with_rungs_tried_together_is_read_and_shown(ladder: Ladder, tmp_path: Path) -> None:
    for each in climb(ladder, noisy(ladder, SMALL)):
        append(tmp_path / "climb.jsonl", each)
    (board,), warnings = load_boards([tmp_path / "climb.jsonl"])
    assert warnings == []
    assert [row.rung for row in board.rows if row.tps] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("status", ["failed", "timeout", "out_of_memory"])
def test_rungs_that_do_not_run_together_are_left_out_with_the_reason(ladder: Ladder, status: str) -> None:
    def run(task: Task) -> Record:
        made = noisy(ladder, SMALL)(task)
        ended = {"status": status, "error": "why", "measurement": None}
        return made.model_copy(update=ended) if task.together else made

    records = climb(ladder, run)
    assert rungs_of_rounds(records) == ["a"]
    assert exit_code(records) == 0
    (said,) = [line for line in findings(scoreboard(records)) if "group" in line]
    said_status = f"Left out, as a group too ({status_word(status)})"
    assert said == f"{said_status}, where alone none was clearly faster: b, c, d."


TOGETHER = {
    "a subset": (FOUR, {}, ("a", "b", "d"), ["b", "d"]),
    "a rung that is tried twice": (FOUR.replace("sdpa}", "sdpa}, retry: true"), {}, (), ["b", "c", "d"]),
    "fixed tokens per step": (
        FOUR.replace("vocab_multiple: 64", "micro_batch_size: 2"),
        {"workload": "model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 128"},
        (),
        ["b", "c", "d"],
    ),
    "what a kept rung sets after it": (
        FOUR.replace("sdpa}", "sdpa}}, {name: x, set: {attention: blocks}"),
        {},
        (),
        ["c", "d"],
    ),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_a_run_that_tried_rungs_together_lacks_nothing(case: str, write_ladder) -> None:
    rungs, changes, chosen, expected = TOGETHER[case]
    ladder = load(write_ladder(rungs, carry="if_faster", **changes))
    attention = {"sdpa": 1.03, "blocks": 2.0}
    gains: Gains = {**SMALL, "attention": attention, "micro_batch_size": 1.03}
    records = climb(ladder, noisy(ladder, gains), rungs=chosen)
    assert [names for names, _ in tried_together(records)] == [expected]
    assert not lacks(Climb(ladder, ladder.chosen(chosen)), records)


def test_where_time_is_short_no_rung_is_tried_twice(write_ladder) -> None:
    ladder = load(write_ladder(FIVE, carry="if_faster"))
    source, records = Climb(ladder, ladder.rungs, limit=TimeLimit(0.0)), list[Record]()
    for task in source.tasks(records, lambda _: None):
        speed = {"a": 95.0 if task.repetition == 2 else 100.0, "b": 98.0, "c": 97.0, "d": 96.0, "e": 97.0}
        made = judged(task, process(ladder, task, speed[task.rung.name]))
        records.append(made.model_copy(update={"process_seconds": 1.0}))
        source.ended(records[-1], 1.0)
    assert tries_of(records) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)]


def test_rungs_are_tried_together_as_long_as_the_rounds_fit_into_the_most_that_a_run_may_take(
    ladder: Ladder,
) -> None:
    """Second tries take part of the time that was asked for, and none is left."""
    source, records = Climb(ladder, ladder.rungs, limit=TimeLimit(1.0, patience=1000.0)), list[Record]()
    run = noisy(ladder, SMALL)
    for task in source.tasks(records, lambda _: None):
        records.append(judged(task, run(task)).model_copy(update={"process_seconds": 1.0}))
        source.ended(records[-1], 1.0)
    assert tries_of(records) == [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1), ("a", 3)]
    assert tried_together(records) == [(["b", "c", "d"], True)]


def test_how_much_the_best_differs_from_itself_is_noise_for_later_rungs(write_ladder) -> None:
    """b is 20 % slower when it is tried again; 1.1 times that is no clear gain."""
    ladder = load(write_ladder(FIVE, carry="if_faster"))

    def run(task: Task) -> Record:
        again = task.kind == "scout" and task.repetition == 2
        speeds = {"a": 100.0, "b": 120.0 if again else 144.0, "c": 144.0, "d": 144.0, "e": 130.0}
        return process(ladder, task, speeds[task.rung.name])

    records = climb(ladder, run)
    last = next(r.scout for r in records if r.rung == "e" and r.scout)
    assert (last.over, last.carried) == ("b", False)
    assert last.floor == pytest.approx((0.2**2 / 2) ** 0.5)  # a's two tries are alike


def test_a_break_between_the_first_rungs_two_tries_takes_a_third_to_know_the_noise(ladder: Ladder) -> None:
    """The machine is twice as fast after the break; b is as fast as a, whose tries differ by 25 %."""
    speeds = {1: 50.0, 2: 100.0, 3: 80.0}

    def run(task: Task) -> Record:
        first = task.kind == "scout" and task.rung.name == "a"
        others = {"a": 80.0, "b": 95.0, "c": 20.0, "d": 20.0}
        tps = speeds[task.repetition] if first else others[task.rung.name]
        return process(ladder, task, tps, session="before" if first and task.repetition == 1 else "after")

    records = list[Record]()
    go_on(ladder, records, run, lambda task: task.repetition == 2)
    go_on(ladder, records, run)
    assert tries_of(records)[:4] == [("a", 1), ("a", 2), ("a", 3), ("b", 1)]
    assert rungs_of_rounds(records) == ["a"]


def test_a_climb_that_leaves_a_rung_out_in_the_middle_says_that_rungs_keep_the_others(ladder: Ladder) -> None:
    board = scoreboard(of_speeds(ladder, SPEEDS))
    assert [row.rung for row in board.rows if row.left_out] == ["c"]
    assert keeps(board) == (
        "Short tries chose the rungs, each on top of those kept before; rounds measured them anew."
    )


def test_an_interrupted_try_is_made_again(ladder: Ladder) -> None:
    interrupted = process(
        ladder,
        Task(kind="scout", rung=ladder.rungs[0], repetition=1),
        1.0,
        status="interrupted",
        measurement=None,
    )
    source = Climb(ladder, ladder.rungs)
    source.resume([interrupted])
    task = next(source.tasks([interrupted], lambda _: None))
    assert (task.kind, task.rung.name, task.repetition) == ("scout", "a", 1)


def test_retry_in_a_ladder_that_always_carries_is_refused(write_ladder) -> None:
    with pytest.raises(LadderError, match=r"rung 'b': retry needs protocol.carry: if_faster"):
        load(write_ladder(RETRY))


def test_an_unknown_value_of_carry_is_refused(write_ladder) -> None:
    with pytest.raises(LadderError, match="carry"):
        load(write_ladder(FOUR, carry="sometimes"))


def test_each_change_alone_and_left_out_is_told_of_the_rungs_that_were_carried(write_ladder) -> None:
    """The last rung is not carried, and so the one before it ends the ladder that changes are left out of."""
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}, "
        "{name: d, set: {vocab_multiple: 64}}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster", repeats=3))
    speeds = {"a": 100.0, "b": 150.0, "c": 180.0, "d": 170.0}
    source, records = Climb(ladder, ladder.rungs, ablate=True), list[Record]()
    for task in source.tasks(records, lambda _: None):
        speed = {"alone": 120.0, "left_out": 140.0}.get(task.kind, speeds[task.rung.name])
        records.append(judged(task, process(ladder, task, speed)))
        source.ended(records[-1], 1.0)
    found = {each.rung: each for each in attribution(scoreboard(records))}
    assert list(found) == ["b", "c"]
    assert [round(each.ratio.value, 3) for each in (found["c"].in_order, found["c"].alone) if each.ratio] == [
        1.2,
        1.2,
    ]
    assert found["b"].last.ratio is not None


def test_a_table_of_times_holds_no_rung_that_was_only_tried(ladder: Ladder) -> None:
    records = of_speeds(ladder, SPEEDS)
    assert [each.rung for each in timing(scoreboard(records))] == ["a", "b", "d"]


def test_how_long_a_carried_rung_compiles_is_known_from_its_try(ladder: Ladder) -> None:
    """Which leaves its code to the rounds, whose first steps are short."""

    def run(task: Task) -> Record:
        made = process(ladder, task, SPEEDS[task.rung.name])
        if made.measurement is None:
            return made
        cold = task.kind == "scout"
        took = {"compile_cache": "cold" if cold else "warm", "first_step_seconds": 50.0 if cold else 5.0}
        return made.model_copy(update={"measurement": made.measurement.model_copy(update=took)})

    last = timing(scoreboard(climb(ladder, run)))[-1]
    assert (last.rung, last.first_step, last.first_step_warm) == ("d", 50.0, 5.0)


def test_a_ladder_that_names_one_that_looks_at_others_itself_is_refused(tmp_path: Path) -> None:
    task = "workload: {model: tiny, data: synthetic, seq_len: 32}"
    for name, other in (("one", "two"), ("two", "one")):
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\n{task}\nrungs: [{{name: plain}}, {{name: best, best_of: {other}.yaml}}]\n"
        )
    with pytest.raises(LadderError, match=r"best_of: two.yaml looks at another ladder itself; name that one"):
        load(tmp_path / "one.yaml")

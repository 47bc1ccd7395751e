from __future__ import annotations

from dataclasses import replace

import pytest
from samples import measurement, record

from bench.analysis.schedule import Schedule, Task, ablated, variant
from bench.ladder.ladder import Ladder, LadderError, load
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

THREE = (
    "[{name: first}, {name: bf16, set: {autocast: bfloat16}}, {name: foreach, set: {adamw: foreach}},"
    " {name: fused, set: {adamw: fused}}]"
)


def names(tasks) -> list[str]:
    return [task.title for task in tasks]


def finish(schedule: Schedule, task: Task, status: str = "ok", seconds: float = 10.0) -> None:
    done = record(task.rung.name, task.rung.index, task.repetition, kind=task.kind, status=status)
    schedule.ended(done, seconds)


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder(THREE, repeats=3))


def test_each_round_ends_with_the_first_and_the_last_rung_again(ladder: Ladder) -> None:
    schedule = Schedule(ladder, ladder.rungs)
    expected = ["first", "bf16", "foreach", "fused", "first (again)", "fused (again)"]
    assert names(schedule.round(1)) == names(schedule.round(2)) == expected


def test_one_round_has_no_control_because_it_gives_no_interval(write_ladder) -> None:
    ladder = load(write_ladder(THREE, repeats=1))
    assert names(Schedule(ladder, ladder.rungs).round(1)) == ["first", "bf16", "foreach", "fused"]


def test_the_controls_are_of_the_rungs_that_are_run(ladder: Ladder) -> None:
    schedule = Schedule(ladder, ladder.rungs[1:3])
    assert names(schedule.round(1)) == ["bf16", "foreach", "bf16 (again)", "foreach (again)"]


def test_the_last_control_is_of_the_last_rung_of_ours_that_is_meant_to_run(write_ladder) -> None:
    rungs = (
        "[{name: a}, {name: b, set: {adamw: foreach}}, "
        "{name: c, set: {adamw: fused}, expect: out_of_memory}, "
        "{name: n, external: {peer: own, model: tiny, seq_len: 32, tokens_per_step: 32, folder: x, "
        "command: python}}]"
    )
    ladder = load(write_ladder(rungs, repeats=3))
    tasks = Schedule(ladder, ladder.rungs).round(1)
    assert [task.rung.name for task in tasks if task.kind == "control"] == ["a", "b"]


def test_a_rung_that_is_not_supported_has_no_control(ladder: Ladder) -> None:
    schedule = Schedule(ladder, ladder.rungs)
    schedule.ended(record("fused", 3, status="unsupported"))
    assert names(schedule.round(1)) == ["first", "bf16", "foreach", "first (again)"]


def test_the_ceiling_is_measured_in_the_first_and_the_last_round(write_ladder) -> None:
    ladder = load(write_ladder("[{name: only}]", repeats=3, ceiling_seconds=0.1))
    schedule = Schedule(ladder, ladder.rungs)
    assert names(schedule.round(1))[-1] == "measured ceiling"
    assert names(schedule.round(3)) == ["only", "only (again)"]
    assert names(schedule.closing(3)) == ["measured ceiling"]


def test_of_one_round_the_ceiling_is_measured_once(write_ladder) -> None:
    ladder = load(write_ladder("[{name: only}]", repeats=1, ceiling_seconds=0.1))
    schedule = Schedule(ladder, ladder.rungs)
    assert len(names(schedule.round(1))) == 2
    assert names(schedule.closing(1)) == []


def test_where_time_is_short_the_ceiling_is_measured_once(write_ladder) -> None:
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}]"
    ladder = load(write_ladder(rungs, repeats=3, ceiling_seconds=0.1, control="last"))
    schedule = Schedule(ladder, ladder.rungs)
    assert names(schedule.round(1)) == ["a", "b", "b (again)", "measured ceiling"]
    assert names(schedule.closing(3)) == []


def test_every_kind_of_device_has_a_ceiling_of_its_own(write_ladder) -> None:
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {device: mps}}]"
    ladder = load(write_ladder(rungs, ceiling_seconds=0.1))
    ceilings = [task for task in Schedule(ladder, ladder.rungs).round(1) if task.is_ceiling]
    assert [task.rung.toggles.device for task in ceilings] == ["cpu", "mps"]


def test_a_device_of_which_nothing_is_supported_here_has_no_ceiling(write_ladder) -> None:
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {device: mps}}]"
    ladder = load(write_ladder(rungs, ceiling_seconds=0.1))
    schedule = Schedule(ladder, ladder.rungs)
    for name, index in (("a", 0), ("c", 2)):
        schedule.ended(record(name, index, status="unsupported"))
    left = [*schedule.round(1), *schedule.closing(2)]
    assert [task.rung.toggles.device for task in left if task.is_ceiling] == ["cpu", "cpu"]


def test_what_is_unsupported_is_not_tried_again(ladder: Ladder) -> None:
    schedule = Schedule(ladder, ladder.rungs)
    for task in list(schedule.round(1)):
        finish(schedule, task, "unsupported" if task.rung.name == "bf16" else "ok")
    assert names(schedule.round(2)) == ["first", "foreach", "fused", "first (again)", "fused (again)"]


def test_what_failed_is_tried_again_in_the_next_round(ladder: Ladder) -> None:
    schedule = Schedule(ladder, ladder.rungs)
    for task in list(schedule.round(1)):
        finish(schedule, task, "failed")
    assert len(names(schedule.round(2))) == 6


def test_a_resumed_schedule_holds_exactly_what_is_missing(ladder: Ladder) -> None:
    before, after = Schedule(ladder, ladder.rungs), Schedule(ladder, ladder.rungs)
    tasks = list(before.round(1))
    for task in tasks[:3]:
        finish(after, task)
    finish(after, tasks[3], "interrupted")
    assert names(after.round(1)) == ["fused", "first (again)", "fused (again)"]
    assert len(names(after.round(2))) == 6


def test_time_left_counts_what_is_still_to_come(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b}]", repeats=2))
    schedule = Schedule(ladder, ladder.rungs)
    assert schedule.seconds_left(1, 2) is None
    a, b, *_ = schedule.round(1)
    finish(schedule, a, seconds=10.0)
    assert schedule.seconds_left(1, 2) == 70.0  # b and the controls like a, then all four again
    finish(schedule, b, seconds=20.0)
    assert schedule.seconds_left(1, 2) == 2 * 15.0 + 10.0 + 20.0 + 2 * 15.0


@pytest.mark.parametrize(("state", "left"), [("cold", 32.5), ("shared", 32.5), ("warm", 60.0), (None, 60.0)])
def test_time_left_counts_little_of_the_compiling_that_the_next_process_of_a_rung_need_not_do(
    state: str | None, left: float, write_ladder
) -> None:
    ladder = load(write_ladder("[{name: a}]", repeats=1))
    compiled = measurement(
        compile_cache=state, first_step_seconds=51.0, block_steps=2, block_seconds=[2.0, 2.0, 2.0]
    )
    schedule = Schedule(ladder, ladder.rungs)
    schedule.ended(record("a", measurement=compiled), 60.0)
    assert schedule.seconds_left(2, 2) == pytest.approx(left)


@pytest.mark.parametrize(("resumed", "left"), [(False, 19.5), (True, 47.0)])
def test_time_left_does_not_count_again_what_a_rung_does_once(
    resumed: bool, left: float, write_ladder
) -> None:
    """13 s after the window; and compiling, unless the run is resumed, which deletes what was compiled."""
    ladder = load(write_ladder("[{name: a}]", repeats=1))
    took = {"once_seconds": 13.0, "compile_cache": "cold", "first_step_seconds": 51.0}
    done = record("a", measurement=measurement(block_steps=2, block_seconds=[2.0, 2.0, 2.0], **took))
    schedule = Schedule(ladder, ladder.rungs)
    if resumed:
        schedule.resume([done.model_copy(update={"process_seconds": 60.0})])
    else:
        schedule.ended(done, 60.0)
    assert schedule.seconds_left(2, 2) == pytest.approx(left)


@pytest.mark.parametrize(("done", "left"), [(["a"], ["a (again)", "b"]), (["a", "b"], [])])
def test_a_resumed_run_of_one_round_measures_the_first_rung_again_if_any_is_missing(
    write_ladder, done: list[str], left: list[str]
) -> None:
    """What was measured before the interruption pairs with nothing that comes after it."""
    ladder = load(write_ladder("[{name: a}, {name: b}]", repeats=1))
    schedule = Schedule(ladder, ladder.rungs)
    schedule.resume([record(name, index, 1) for index, name in enumerate(done)])
    assert names(schedule.round(1)) == left


def test_of_a_resumed_run_the_round_that_was_cut_in_two_alone_measures_the_first_rung_again(
    write_ladder,
) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b}]", repeats=3, control="last"))
    schedule = Schedule(ladder, ladder.rungs)
    round_1 = [record("a", 0, 1), record("b", 1, 1), record("b", 1, 1, kind="control")]
    schedule.resume([*round_1, record("a", 0, 2)])
    left = [names(schedule.round(number)) for number in (1, 2, 3)]
    assert left == [[], ["a (again)", "b", "b (again)"], ["a", "b", "b (again)"]]


# --- variants -----------------------------------------------------------------------------------------------


def test_alone_is_the_first_rung_with_one_rung_s_changes(ladder: Ladder) -> None:
    found = variant(ladder, ladder.rung("fused"), "alone")
    assert found is not None
    assert found.toggles == Toggles(adamw="fused")


def test_left_out_is_the_last_rung_without_one_rung_s_changes(ladder: Ladder) -> None:
    found = variant(ladder, ladder.rung("bf16"), "left_out")
    assert found is not None
    assert found.toggles == Toggles(adamw="fused")
    found = variant(ladder, ladder.rung("fused"), "left_out")
    assert found is not None
    assert found.toggles == Toggles(autocast="bfloat16", adamw="foreach")


def test_an_ablation_runs_nothing_that_another_process_runs_already(ladder: Ladder) -> None:
    """bf16 alone is the second rung; foreach left out changes nothing, for fused is set later; and so on."""
    schedule = Schedule(ladder, ladder.rungs, ablate=True)
    extra = [task for task in schedule.round(1) if task.kind in ("alone", "left_out")]
    assert names(extra) == ["foreach (alone)", "fused (alone)"]
    known = [rung.toggles for rung in ladder.rungs] + [task.rung.toggles for task in extra]
    assert len({str(toggles) for toggles in known}) == len(known)


def test_ablated_toggles_still_take_the_tokens_per_step_of_the_workload() -> None:
    workload = Workload(model="tiny", seq_len=128, tokens_per_step=1024)
    first = Toggles(grad_accum_steps=8)
    last = Toggles(autocast="bfloat16", micro_batch_size=4, grad_accum_steps=2)
    rungs = [first, replace(first, autocast="bfloat16"), last]
    assert ablated(rungs, 2, "alone", workload) == Toggles(micro_batch_size=4, grad_accum_steps=2)
    assert ablated(rungs, 2, "left_out", workload) == replace(first, autocast="bfloat16")


def test_an_ablation_that_makes_no_whole_is_named_and_left_out_of_the_run(write_ladder) -> None:
    """Without its second rung, the last one takes 2 x 6 sequences at once, for steps of 6."""
    workload = "model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 192"
    rungs = "[{name: a, set: {micro_batch_size: 2}}, {name: b, set: {micro_batch_size: 1}}, "
    rungs += "{name: c, set: {world_size: 6}}]"
    ladder = load(write_ladder(rungs, workload=workload))
    with pytest.raises(LadderError, match=r"rung 'c' alone: .* is not a multiple of"):
        variant(ladder, ladder.rung("c"), "alone")
    with pytest.raises(LadderError, match=r"rung 'b' left out: .* is not a multiple of"):
        variant(ladder, ladder.rung("b"), "left_out")
    assert names(Schedule(ladder, ladder.rungs, ablate=True).round(1)) == ["a", "b", "c"]


def test_a_rung_that_is_to_run_out_of_memory_at_the_end_takes_no_part_in_the_ablation(write_ladder) -> None:
    rungs = THREE[:-1] + ", {name: huge, set: {micro_batch_size: 4096}, expect: out_of_memory}]"
    ladder = load(write_ladder(rungs, repeats=1))
    found = variant(ladder, ladder.rung("bf16"), "left_out")
    assert found is not None
    assert found.toggles == Toggles(adamw="fused")
    assert variant(ladder, ladder.rung("huge"), "alone") is None


# --- parity -------------------------------------------------------------------------------------------------


PARITY: dict[str, tuple[str, str, Toggles | None]] = {
    "it is the rung before, accumulating as many tokens": (
        "adamw: fused",
        "micro_batch_size: 4, autocast: bfloat16",
        Toggles(adamw="fused", grad_accum_steps=4),
    ),
    "it divides its micro-batch where the steps are no multiple": (
        "micro_batch_size: 4",
        "micro_batch_size: 6",
        Toggles(micro_batch_size=2, grad_accum_steps=3),
    ),
    "it keeps the ranks of the rung before": (
        "world_size: 2",
        "world_size: 4",
        Toggles(world_size=2, grad_accum_steps=2),
    ),
    "it has no weights whose gradients cannot be accumulated": (
        "autocast: bfloat16, adamw: compiled, weights: bfloat16",
        "micro_batch_size: 4",
        Toggles(autocast="bfloat16", adamw="compiled", grad_accum_steps=4),
    ),
    "it does without CUDA graphs": (
        "device: cuda, compile: reduce-overhead",
        "micro_batch_size: 8",
        Toggles(device="cuda", compile="default", grad_accum_steps=8),
    ),
    "ranks that cannot take steps of that size have none": ("world_size: 2", "world_size: 3", None),
    "a rung that only accumulates more has none, which would be itself": (
        "micro_batch_size: 4",
        "micro_batch_size: 4, grad_accum_steps: 2",
        None,
    ),
}


@pytest.mark.parametrize("case", PARITY)
def test_a_parity_child_takes_as_large_steps_as_the_rung_that_it_checks(case: str, write_ladder) -> None:
    before, after, expected = PARITY[case]
    ladder = load(write_ladder(f"[{{name: a, set: {{{before}}}}}, {{name: b, set: {{{after}}}}}]"))
    found = variant(ladder, ladder.rungs[1], "parity")
    assert (found and found.toggles) == expected


def test_what_is_unsupported_here_has_no_parity_process(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b, set: {micro_batch_size: 4}}]"))
    schedule = Schedule(ladder, ladder.rungs)
    assert [task.kind for task in schedule.round(1)] == ["cumulative", "cumulative", "parity"]
    schedule.ended(record("b", 1, status="unsupported"))
    assert [task.kind for task in schedule.round(1)] == ["cumulative"]


def test_a_process_that_was_cut_short_before_its_proof_is_run_again(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b}]"))
    schedule = Schedule(ladder, ladder.rungs)
    schedule.resume([record("a", 0, measurement=measurement(proofs=None), interrupted_late=True)])
    assert [task.rung.name for task in schedule.round(1) if task.kind == "cumulative"] == ["a", "b"]


def test_only_a_rung_that_changes_the_tokens_per_step_has_a_parity_child_and_only_once(write_ladder) -> None:
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {micro_batch_size: 4}}, "
    rungs += "{name: d, set: {attention: sdpa}}, {name: e, set: {micro_batch_size: 2, grad_accum_steps: 2}}]"
    ladder = load(write_ladder(rungs, repeats=2))
    schedule = Schedule(ladder, ladder.rungs)
    assert [task.title for task in schedule.round(1) if task.kind == "parity"] == ["c (parity)"]
    assert [task.title for task in schedule.round(2) if task.kind == "parity"] == []


def test_a_first_rung_on_several_ranks_is_held_to_one_rank(write_ladder) -> None:
    rungs = "[{name: a, set: {world_size: 4, sharding: zero1}}, {name: b, set: {adamw: fused}}]"
    ladder = load(write_ladder(rungs))
    schedule = Schedule(ladder, ladder.rungs)
    (child,) = [task for task in schedule.round(1) if task.kind == "parity"]
    assert child.title == "a (parity)"
    assert child.rung.toggles == Toggles(grad_accum_steps=4)

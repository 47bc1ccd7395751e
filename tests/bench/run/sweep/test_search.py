"""What a sweep tries next, against a machine that is made up: so much memory, such speeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from samples import MACHINE, measurement, record

from bench.analysis.schedule import Task
from bench.analysis.scoreboard import scoreboard
from bench.ladder.ladder import Ladder, LadderError, load
from bench.ladder.sweep_axis import parse_all
from bench.records.record import Record
from bench.report.one_run.caption import caption
from bench.report.winner_ladder import ladder_to
from bench.run.runner import lacks
from bench.run.sweep import Search, as_ladder
from gpt2.config.toggles import Toggles

RUNGS = "[{name: a}, {name: b, set: {adamw: fused}}]"
Machine = Callable[[Task], Record]


def machine(
    fits: int = 10**9, speed: Callable[[Toggles], float] = lambda t: 1000.0 * t.micro_batch_size
) -> Machine:
    """Runs batches up to `fits` sequences; each takes 1 MiB."""

    def run(task: Task) -> Record:
        toggles = task.rung.toggles
        facts = {"kind": task.kind, "toggles": toggles, "repetition": task.repetition}
        if task.kind == "sweep" and toggles.micro_batch_size > fits:
            return record(task.rung.name, task.rung.index, status="out_of_memory", **facts)
        size = toggles.micro_batch_size * 2**20
        step = toggles.tokens_per_step(32)
        measured = measurement(speed(toggles), tokens_per_step=step, peak_memory_bytes=size)
        return record(task.rung.name, task.rung.index, measurement=measured, **facts)

    return run


def sweep(ladder: Ladder, *over: str, end: float = math.inf, best_only: bool = False) -> Search:
    base = ladder.rungs[-1]
    axes = parse_all(list(over))
    return Search(as_ladder(ladder, base, axes), base, axes, end, best_only)


def drive(
    search: Search, run: Machine, most: int | None = None
) -> tuple[list[Task], list[Record], list[str]]:
    """What was run, what came of it, and what was said."""
    tasks: list[Task] = []
    records: list[Record] = []
    said: list[str] = []
    for task in search.tasks(records, said.append):
        if len(tasks) == most:
            break
        tasks.append(task)
        records.append(run(task))
        search.ended(records[-1], 1.0)
    return tasks, records, said


def sizes(tasks: list[Task]) -> list[int]:
    return [
        task.rung.toggles.micro_batch_size for task in tasks if task.kind == "sweep" and task.repetition == 1
    ]


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder(RUNGS))


def in_steps_of(tokens: int, write_ladder) -> Ladder:
    task = f"model: tiny, data: synthetic, seq_len: 32, tokens_per_step: {tokens}"
    return load(write_ladder(RUNGS, workload=task))


def test_batches_double_until_one_does_not_fit_and_the_largest_that_fits_is_found(ladder: Ladder) -> None:
    search = sweep(ladder, "toggles.micro_batch_size=1,2,...")
    tasks, records, _ = drive(search, machine(fits=11))
    assert sizes(tasks)[:5] == [1, 2, 4, 8, 16]
    assert max(size for size in sizes(tasks) if size <= 11) == 11
    assert min(size for size in sizes(tasks) if size > 11) == 12
    said = "Largest batch that ran: 11 (micro_batch_size=11); 12 ran out of memory."
    assert said in caption(scoreboard(records))


@pytest.mark.parametrize("fits", range(1, 20))
def test_bisection_ends_at_the_largest_whatever_it_is(ladder: Ladder, fits: int) -> None:
    tasks, _, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,..."), machine(fits=fits))
    assert max(size for size in sizes(tasks) if size <= fits) == fits
    assert min(size for size in sizes(tasks) if size > fits) == fits + 1
    assert len(sizes(tasks)) == len(set(sizes(tasks)))


def test_where_steps_have_a_fixed_size_only_batches_that_divide_it_are_tried(write_ladder) -> None:
    fixed = in_steps_of(1536, write_ladder)
    tasks, _, _ = drive(sweep(fixed, "toggles.micro_batch_size=8,..."), machine(fits=13))
    assert sizes(tasks) == [8, 16, 12]  # of 48 sequences
    assert [task.rung.toggles.grad_accum_steps for task in tasks] == [6, 3, 4]


def test_a_listed_batch_above_one_that_did_not_fit_is_not_tried(ladder: Ladder) -> None:
    tasks, _, said = drive(sweep(ladder, "toggles.micro_batch_size=1,2,4,8"), machine(fits=2))
    assert sizes(tasks) == [1, 2, 4]
    assert said == ["no larger micro_batch_size than 4 is run: this one is out of memory"]


def test_each_value_of_another_toggle_has_batches_of_its_own(ladder: Ladder) -> None:
    search = sweep(ladder, "toggles.autocast=float32,bfloat16", "toggles.micro_batch_size=1,...")
    tasks, _, _ = drive(search, machine(fits=2))
    tried = [(t.rung.toggles.autocast, t.rung.toggles.micro_batch_size) for t in tasks if t.kind == "sweep"]
    assert tried == [(a, size) for a in ("float32", "bfloat16") for size in (1, 2, 4, 3)]
    assert tasks[0].rung.name == "autocast=float32, micro_batch_size=1"


def test_each_size_of_a_step_gets_one_process_that_accumulates_as_many_tokens(ladder: Ladder) -> None:
    search = sweep(ladder, "toggles.autocast=float32,bfloat16", "toggles.micro_batch_size=1,2")
    tasks, _, _ = drive(search, machine())
    (parity,) = [task for task in tasks if task.kind == "parity"]
    toggles = parity.rung.toggles
    assert (toggles.autocast, toggles.micro_batch_size, toggles.grad_accum_steps) == ("float32", 1, 2)
    assert "toggles.grad_accum_steps=2" in parity.rung.settings


@pytest.mark.parametrize(
    ("ranks", "mebibytes", "tried", "left"),
    [(1, 6, [1, 2, 4], "micro_batch_size=8 is not run"), (4, 15, [1, 2], "micro_batch_size=4 is not run")],
)
def test_on_a_processor_a_batch_beyond_the_memory_of_all_ranks_is_not_tried(
    write_ladder, ranks: int, mebibytes: int, tried: list[int], left: str
) -> None:
    ladder = load(write_ladder(f"[{{name: a, set: {{device: cpu, world_size: {ranks}}}}}]"))

    def run(task: Task) -> Record:
        small = MACHINE.model_copy(update={"memory_bytes": mebibytes * 2**20})
        return machine()(task).model_copy(update={"environment": small})

    tasks, _, said = drive(sweep(ladder, "toggles.micro_batch_size=1,..."), run)
    assert sizes(tasks) == tried
    assert [line.split(":")[0] for line in said] == [left]


def test_only_where_a_winner_is_sought_the_hopeless_run_no_more(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=3))
    for best_only, again in ((False, [1, 2, 4, 8]), (True, [1, 8])):
        search = sweep(ladder, "toggles.micro_batch_size=1,2,4,8", best_only=best_only)
        tasks, _, said = drive(search, machine())
        second = [t.rung.toggles.micro_batch_size for t in tasks if t.kind == "sweep" and t.repetition == 2]
        assert second == again
        dropped = [text for text in said if text.startswith("not run again")]
        assert len(dropped) == best_only
        assert all(text.endswith("micro_batch_size=2; micro_batch_size=4") for text in dropped)


def test_what_ran_in_fewer_rounds_than_the_first_is_never_the_fastest(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=3))

    def run(task: Task) -> Record:  # the largest batch is fast once
        slow = task.repetition > 1 and task.rung.toggles.micro_batch_size == 4
        return machine(speed=lambda t: 1.0 if slow else 1000.0 * t.micro_batch_size)(task)

    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,3,4", best_only=True), run)
    best = scoreboard(records).fastest
    assert best is not None
    assert best.toggles.micro_batch_size == 1


def test_a_candidate_that_never_ran_is_said_to_have_failed_and_nothing_of_its_rounds(ladder: Ladder) -> None:
    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2,4"), machine(fits=2))
    (failed,) = [row for row in scoreboard(records).rows if row.tps is None]
    assert (failed.status, failed.caveats) == ("out_of_memory", ())


def interrupted(ladder: Ladder, *speeds: float) -> tuple[Search, list[Record]]:
    """A sweep for a winner among four, ended after the first; then the machine slows down.

    speeds: then, of the first candidate's control and of the other three.
    """
    over = ("toggles.attention=explicit,sdpa", "toggles.adamw=for_loop,fused")
    _, records, _ = drive(sweep(ladder, *over, best_only=True), machine(speed=lambda _: 35839.0), 1)
    before = [record.model_copy(update={"session": "before"}) for record in records]
    resumed = sweep(ladder, *over, best_only=True)
    resumed.resume(before)
    candidates = [("explicit", "for_loop"), ("explicit", "fused"), ("sdpa", "for_loop")]
    then = dict(zip(candidates, speeds, strict=False))
    slow = machine(speed=lambda t: then.get((t.attention, t.adamw), speeds[-1]))
    _, after, _ = drive(resumed, slow)
    return resumed, [*before, *(record.model_copy(update={"session": "after"}) for record in after)]


def test_after_an_interruption_candidates_are_held_to_the_control_of_their_own_half(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a, set: {attention: explicit}}]", repeats=2))
    _, records = interrupted(ladder, 1685.0, 1174.0, 4803.0, 2495.0)
    again = [r.rung for r in records if r.kind == "sweep" and r.repetition == 2]
    assert again == ["attention=explicit, adamw=for_loop", "attention=sdpa, adamw=for_loop"]
    board = scoreboard(records)
    assert board.fastest
    assert board.fastest.rung == "attention=sdpa, adamw=for_loop"
    assert board.fastest.speedup
    assert board.fastest.speedup.value == pytest.approx(4803 / 1685)
    written = ladder_to(ladder, ladder.rungs[-1], board.fastest, board)
    said = "4,803 tokens/s, 2.85x the first candidate, the most of 4 candidates, 2 of which ran in all"
    assert said in written


def test_a_candidate_alone_in_its_half_of_a_round_is_not_dropped(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a, set: {attention: explicit}}]", repeats=2))
    over = ("toggles.adamw=for_loop,foreach,fused",)
    ran: list[Record] = []
    # The last alone came to its end.
    for half, speed in (("first", 100.0), ("second", 10.0), ("third", 10.0)):
        search = sweep(ladder, *over, best_only=True)
        search.resume(ran)
        run = machine(speed=lambda _, speed=speed: speed)
        _, records, _ = drive(search, run, None if half == "third" else 1)
        ran += [record.model_copy(update={"session": half}) for record in records]
    second = [r.toggles.all["adamw"] for r in ran if r.kind == "sweep" and r.repetition == 2]
    assert second == ["for_loop", "foreach", "fused"]


def test_the_first_candidate_is_repeated_as_the_control_of_each_round(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2))
    tasks, _, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2"), machine())
    assert [t.repetition for t in tasks if t.kind == "control"] == [1, 2]
    assert {t.rung.index for t in tasks if t.kind == "control"} == {0}


def test_nothing_begins_that_would_end_after_the_budget(ladder: Ladder) -> None:
    search = sweep(ladder, "toggles.micro_batch_size=1,2,...", end=time.monotonic() + 100)
    said: list[str] = []
    for number, task in enumerate(search.tasks([], said.append)):
        search.ended(machine()(task), 30.0 if number else 101.0)
    assert search.cut
    assert (search.cut.task.rung.name, search.cut.left) == ("micro_batch_size=2", 1)
    why = "--budget ended the sweep in round 1 of 1, before the largest micro_batch_size that fits was found"
    assert search.cut.why == why
    assert said == [f"micro_batch_size=2: not begun: {why}"]


def test_a_resumed_sweep_begins_nothing_that_took_longer_before_than_there_is_time(write_ladder) -> None:
    over = "toggles.adamw=for_loop,foreach,fused"
    ladder = load(write_ladder(RUNGS, repeats=2))
    _, records, _ = drive(sweep(ladder, over), machine(), 4)
    resumed = sweep(ladder, over, end=time.monotonic() + 50)
    resumed.resume([record.model_copy(update={"process_seconds": 60.0}) for record in records])
    assert next(resumed.tasks([], lambda _: None), None) is None
    assert resumed.cut


# Of two rounds of 5 each.
@pytest.mark.parametrize(("most", "left"), [(2, 8), (4, 6), (5, 5), (8, 2), (9, 1)])
def test_what_a_budget_leaves_undone_is_counted(write_ladder, most: int, left: int) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2, ceiling_seconds=0.01))
    search = sweep(ladder, "toggles.adamw=for_loop,foreach,fused")
    tasks = search.tasks([], lambda _: None)
    for _ in range(most):
        search.ended(machine()(next(tasks)), 1.0)
    search.end = 0.0
    assert next(tasks, None) is None
    assert search.cut
    assert search.cut.left == left


def test_what_a_budget_cut_off_is_told_from_what_was_dropped(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=3))
    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2,4,8", best_only=True), machine(), 12)
    said = caption(scoreboard(records))
    why = "Far slower in the first round, or with a caveat, so not run in each"
    assert f"{why}: micro_batch_size=2; micro_batch_size=4." in said
    assert "Not run in round 3, in which the sweep ended: micro_batch_size=8." in said


def test_a_sweep_without_the_control_of_a_round_was_interrupted(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2))
    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2"), machine())
    told = [record.model_copy(update={"protocol": {"repeats": 2}}) for record in records]
    assert all(scoreboard(told[:n]).interrupted for n in range(1, len(told)))
    assert not scoreboard(told).interrupted
    (said,) = [line for line in caption(scoreboard(told[:3])) if "interrupted" in line]
    why = "the sweep was interrupted in round 1 of 2; bench sweep with --resume runs what is missing"
    assert said == f"Warning: {why}."


def test_a_sweep_resumed_without_best_says_what_it_cannot_run_in_rounds_that_are_over(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2))
    over = "toggles.micro_batch_size=1,2,4,8"
    _, records, _ = drive(sweep(ladder, over, best_only=True), machine())
    resumed = sweep(ladder, over)
    resumed.resume(records)
    tasks, _, said = drive(resumed, machine())
    assert tasks == []
    (line,) = said
    assert line.startswith("round 2 is complete")
    assert "not run: micro_batch_size=2; micro_batch_size=4;" in line


def test_a_resumed_sweep_goes_on_where_it_was_and_comes_to_the_same_end(ladder: Ladder) -> None:
    over = "toggles.micro_batch_size=1,2,..."
    whole, records, _ = drive(sweep(ladder, over), machine(fits=11))
    for done in range(len(whole)):
        resumed = sweep(ladder, over)
        resumed.resume(records[:done])
        rest, _, _ = drive(resumed, machine(fits=11))
        left = [task.key for task in whole[done:]]
        control = [("control", 0, 1)] if done and any(kind == "sweep" for kind, _, _ in left) else []
        assert [task.key for task in rest] == left + control  # which is what the later part pairs with
        assert lacks(sweep(ladder, over), records[:done])
    assert not lacks(sweep(ladder, over), records)


def test_a_resumed_sweep_may_meet_its_candidates_in_another_order(ladder: Ladder) -> None:
    formats = "toggles.autocast=float32,bfloat16"
    _, records, _ = drive(sweep(ladder, formats, "toggles.micro_batch_size=1,2"), machine())
    longer = sweep(ladder, formats, "toggles.micro_batch_size=1,2,...")
    longer.resume(records)
    _, more, _ = drive(longer, machine(fits=2))
    by_index: dict[int, set[Toggles]] = {}
    for item in [r for r in (*records, *more) if r.kind == "sweep"]:
        by_index.setdefault(item.rung_index, set()).add(item.toggles.as_toggles)
    assert all(len(toggles) == 1 for toggles in by_index.values())
    assert len(by_index) == 8  # 1, 2, 4 and 3 in both


def test_where_the_first_candidate_fails_the_others_are_held_to_the_first_that_ran(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2))

    def run(task: Task) -> Record:
        toggles = task.rung.toggles
        if toggles.autocast == "float32":
            facts = {"kind": task.kind, "toggles": toggles, "repetition": task.repetition}
            return record(task.rung.name, task.rung.index, status="unsupported", error="no", **facts)
        return machine()(task)

    search = sweep(ladder, "toggles.autocast=float32,bfloat16", "toggles.micro_batch_size=1,2")
    tasks, records, _ = drive(search, run)
    assert {t.rung.toggles.autocast for t in tasks if t.kind in ("parity", "control")} == {"bfloat16"}
    board = scoreboard(records)
    first = [(row.toggles.autocast, row.toggles.micro_batch_size) for row in board.rows[:2]]
    assert first == [("bfloat16", 1), ("bfloat16", 2)]
    assert board.rows[1].speedup
    assert board.rows[1].speedup.value == pytest.approx(2)
    assert board.control
    assert board.fastest is board.rows[1]


def test_what_is_fast_and_trains_otherwise_knocks_nobody_out(write_ladder) -> None:
    ladder = load(write_ladder(RUNGS, repeats=2))
    speeds = {"for_loop": 1000.0, "fused": 2000.0, "foreach": 3000.0}

    def run(task: Task) -> Record:
        kind = task.rung.toggles.adamw
        losses = [10.9, 9.0, 8.0, 7.0] if kind == "foreach" else None
        measured = measurement(speeds[kind], losses, tokens_per_step=32)
        facts = {"kind": task.kind, "toggles": task.rung.toggles, "repetition": task.repetition}
        return record(task.rung.name, task.rung.index, measurement=measured, **facts)

    search = sweep(ladder, "toggles.adamw=for_loop,foreach,fused", best_only=True)
    tasks, records, _ = drive(search, run)
    second = [t.rung.toggles.adamw for t in tasks if t.kind == "sweep" and t.repetition == 2]
    assert second == ["for_loop", "fused"]
    best = scoreboard(records).fastest
    assert best
    assert best.toggles.adamw == "fused"


@pytest.mark.parametrize("most", range(5, 14))
def test_a_budget_that_ends_anywhere_after_the_first_round_leaves_the_same_winner(
    write_ladder, most: int
) -> None:
    search = sweep(load(write_ladder(RUNGS, repeats=3)), "toggles.micro_batch_size=1,2,4", best_only=True)
    _, records, _ = drive(search, machine(), most)
    best = scoreboard(records).fastest
    assert best
    assert best.toggles.micro_batch_size == 4


def test_several_ranks_are_held_to_one_that_accumulates(write_ladder) -> None:
    ladder = load(write_ladder("[{name: two, set: {world_size: 2}}]"))
    tasks, _, _ = drive(sweep(ladder, "toggles.adamw=for_loop,fused"), machine())
    (parity,) = [task for task in tasks if task.kind == "parity"]
    assert (parity.rung.toggles.world_size, parity.rung.toggles.grad_accum_steps) == (1, 2)


def test_doubling_ends_at_the_whole_step_where_that_is_fixed(write_ladder) -> None:
    tasks, _, _ = drive(sweep(in_steps_of(1536, write_ladder), "toggles.micro_batch_size=1,..."), machine())
    assert sizes(tasks) == [1, 2, 4, 8, 16, 48]


@pytest.mark.parametrize(
    ("tokens", "over", "complaint"),
    [
        (1536, "toggles.grad_accum_steps=1,2", "grad_accum_steps follows from"),
        (64, "toggles.micro_batch_size=3,5", r"rung .b. with other values: .* not a multiple"),
    ],
)
def test_accumulation_that_follows_from_the_steps_and_no_candidate_that_makes_a_whole_are_errors(
    tokens: int, over: str, complaint: str, write_ladder
) -> None:
    with pytest.raises(LadderError, match=complaint):
        sweep(in_steps_of(tokens, write_ladder), over)


def test_batches_stand_in_order_of_size_however_they_were_tried(ladder: Ladder) -> None:
    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2,..."), machine(fits=5))
    assert [row.toggles.micro_batch_size for row in scoreboard(records).rows] == [1, 2, 4, 5, 6, 8]


def test_the_ladder_to_the_best_says_that_others_worked_beside_its_measurements(ladder: Ladder) -> None:
    _, records, _ = drive(sweep(ladder, "toggles.micro_batch_size=1,2"), machine())
    quiet = scoreboard(records)
    assert "disturbed" not in ladder_to(ladder, ladder.rungs[-1], quiet.rows[-1], quiet)
    warning = "other work: others keep 0.80 cores busy; stop other programs (top shows them)"
    busy = [records[0], records[1].model_copy(update={"other_work_cores": 0.8}), *records[2:]]
    board = scoreboard(busy)
    said = f"{warning} and measure again (in 1 of {len(busy)} processes: micro_batch_size=2 in round 1)."
    written = ladder_to(ladder, ladder.rungs[-1], board.rows[-1], board)
    assert f"# Chosen from measurements that were disturbed: {said}\n" in written
    assert f"Warning: {said}" in caption(board)


def test_the_ladder_to_the_best_loads_and_ends_with_the_winner(ladder: Ladder, tmp_path: Path) -> None:
    search = sweep(ladder, "toggles.micro_batch_size=1,2", "toggles.autocast=float32,bfloat16")
    _, records, _ = drive(search, machine())
    board = scoreboard(records)
    assert board.rows[-1].tps
    out = tmp_path / "best.yaml"
    out.write_text(ladder_to(ladder, ladder.rungs[-1], board.rows[-1], board))
    best = load(out)
    assert [rung.name for rung in best.rungs] == ["a", "b", "micro_batch_size=2 and autocast=bfloat16"]
    last = ladder.rungs[-1]
    assert best.rungs[-1].toggles == replace(last.toggles, micro_batch_size=2, autocast="bfloat16")
    assert best.rungs[:2] == ladder.rungs[:2]
    assert best.workload == ladder.workload
    alike = replace(ladder, rungs=(replace(last, name=board.rows[-1].rung, index=0),))
    out.write_text(ladder_to(alike, replace(last, index=0), board.rows[-1], board))
    assert len({rung.name for rung in load(out).rungs}) == 2
    out.write_text(ladder_to(ladder, ladder.rungs[-1], board.rows[0], board))
    assert load(out).name != best.name
    assert load(out).name.startswith("test-best-")


def test_the_ladder_to_the_best_has_no_rung_above_the_one_that_was_varied(
    write_ladder, tmp_path: Path
) -> None:
    """Also where one below that was left out, as this machine does not support it."""
    rungs = (
        "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}, "
        "{name: d, set: {vocab_multiple: 64}}]"
    )
    ladder = load(write_ladder(rungs, carry="if_faster")).carrying(without=["b"])
    base = ladder.rung("c")
    axes = parse_all(["toggles.micro_batch_size=1,2"])
    _, records, _ = drive(Search(as_ladder(ladder, base, axes), base, axes, math.inf, False), machine())
    out = tmp_path / "best.yaml"
    board = scoreboard(records)
    out.write_text(ladder_to(ladder, base, board.rows[-1], board))
    written = load(out)
    assert [rung.name for rung in written.rungs] == ["a", "c", "micro_batch_size=2"]
    assert written.protocol.carry == "always"  # else the winner would stand on what is carried


def test_candidates_of_other_maths_are_not_among_those_that_the_winner_was_chosen_from(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a, set: {autocast: bfloat16}}]", repeats=2))
    over = ("toggles.residual=float32,bfloat16",)
    run = machine(speed=lambda t: 9e3 if t.residual != "float32" else 1e3)
    _, records, _ = drive(sweep(ladder, *over, best_only=True), run)
    board = scoreboard(records)
    assert board.fastest
    written = ladder_to(ladder, ladder.rungs[-1], board.fastest, board)
    assert "the most of 1 candidate in 2 rounds" in written
    assert "; 1 of other maths could not win." in written

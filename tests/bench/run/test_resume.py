from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from samples import MACHINE, append, record

from bench.cli.sweep import _runs, _tasks
from bench.errors import BenchError
from bench.ladder.ladder import Ladder, load
from bench.ladder.sweep_axis import parse_all
from bench.records.machine import Environment
from bench.records.record import Record, read
from bench.run.command import Options
from bench.run.resume import repair, runs_of
from bench.run.resume import unfinished as find_unfinished
from bench.run.runner import Rounds, RunResult, lacks


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder("[{name: a}, {name: b, set: {adamw: fused}}]"))


def results(out: Path, ladder: Ladder, stamp: str = "20260101T000000Z", **changes) -> Path:
    """A results file of one record, as a run of `ladder` would leave it."""
    facts = {
        "ladder": ladder.name,
        "ladder_hash": ladder.hash,
        "protocol": asdict(ladder.protocol),
        "workload": asdict(ladder.workload),
        "toggles": ladder.rungs[0].toggles,
        "rung": ladder.rungs[0].name,
        **changes,
    }
    item = record(**facts)
    path = out / item.environment.machine / f"{ladder.file_name}-{stamp}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    append(path, item)
    return path


def unfinished(out: Path, ladder: Ladder, machine: Environment, **asked: Any) -> Path:
    def missing(records: Sequence[Record]) -> bool:
        chosen = ladder.chosen(asked.get("chosen", ()))
        return lacks(Rounds(ladder, chosen, asked.get("ablate", False)), records)

    return find_unfinished(out, ladder, machine, lacks=missing, **asked)


def test_the_newest_run_of_the_ladder_is_gone_on_with(ladder: Ladder, tmp_path: Path) -> None:
    results(tmp_path, ladder, "20260101T000000Z", time="2026-01-01T00:00:00+00:00")
    newest = results(tmp_path, ladder, "20260102T000000Z", time="2026-01-02T00:00:00+00:00")
    assert unfinished(tmp_path, ladder, MACHINE) == newest


def test_a_ladder_whose_name_begins_alike_is_another_ladder(ladder: Ladder, tmp_path: Path) -> None:
    other = tmp_path / MACHINE.machine / f"{ladder.name}-other-20260103T000000Z.jsonl"
    other.parent.mkdir()
    append(other, record(ladder=f"{ladder.name}-other"))
    mine = results(tmp_path, ladder)
    assert unfinished(tmp_path, ladder, MACHINE) == mine


def test_where_there_is_nothing_to_go_on_with_that_is_said(ladder: Ladder, tmp_path: Path) -> None:
    said = r"no results of ladder 'test' to go on with \(test-\*.jsonl\); leave out --resume"
    with pytest.raises(BenchError, match=said):
        unfinished(tmp_path, ladder, MACHINE)


@pytest.mark.parametrize("damage", ["{", '{"schema": 2}\n'])
def test_a_run_of_the_ladder_that_cannot_be_read_is_named_and_no_other_taken_for_it(
    damage: str, ladder: Ladder, tmp_path: Path
) -> None:
    older = results(tmp_path, ladder, "20260101T000000Z", time="2026-01-01T00:00:00+00:00")
    unreadable = tmp_path / MACHINE.machine / "test-20260102T000000Z.jsonl"
    unreadable.write_text(damage + "\n{}\n")
    with pytest.raises(BenchError, match=f"{unreadable}.*move it away, to go on with {older}"):
        unfinished(tmp_path, ladder, MACHINE)


def test_a_damaged_file_of_an_older_run_does_not_keep_the_newest_from_going_on(
    ladder: Ladder, tmp_path: Path
) -> None:
    newest = results(tmp_path, ladder, "20260102T000000Z", time="2026-01-02T00:00:00+00:00")
    (tmp_path / MACHINE.machine / "test-20260101T000000Z.jsonl").write_text("{\n{}\n")
    assert unfinished(tmp_path, ladder, MACHINE) == newest


def here(**changes) -> Environment:
    return MACHINE.model_copy(update=changes)


@pytest.mark.parametrize(
    ("machine", "difference"),
    [
        (here(chip="NVIDIA H200"), "the chip was NVIDIA H100 80GB HBM3 and is NVIDIA H200"),
        (here(device_count=2), "the number of devices was 1 and is 2"),
        (here(memory_bytes=2**30), "the machine's memory was 68719476736 and is 1073741824"),
        (here(cpu_mhz=2600.0), "the CPU's clock (MHz) was 2000.0 and is 2600.0"),
        (here(nodes=2), "the number of nodes was 1 and is 2"),
        (here(usable_cores=1), "the number of usable cores was 8 and is 1"),
        (here(torch="2.12.0"), "torch was 2.11.0 and is 2.12.0"),
        (here(versions={"cuda": "13.0", "driver": "600.1"}), "driver was None and is 600.1"),
        (here(code_hash="other"), "the code of gpt2/ and bench/ (hash) was c0de and is other"),
        (here(variables={"LD_PRELOAD": "x.so"}), "the set environment was {} and is {'LD_PRELOAD': 'x.so'}"),
    ],
)
def test_another_machine_or_code_is_refused_and_the_difference_named(
    machine: Environment, difference: str, ladder: Ladder, tmp_path: Path
) -> None:
    path = results(tmp_path, ladder)
    with pytest.raises(BenchError) as refused:
        unfinished(tmp_path, ladder, machine)
    remedy = "repeat that run's options, or leave out --resume to start anew"
    assert str(refused.value) == f"{path}: cannot go on with it: {difference}; {remedy}"


@pytest.mark.parametrize(
    ("rungs", "workload", "difference"),
    [
        ("[{name: a}]", "model: tiny, seq_len: 32, seed: 7", r"workload\.seed was 1337 and is 7"),
        ("[{name: x}]", "model: tiny, seq_len: 32", "rung 1 was a and is x"),
        (
            "[{name: a, set: {adamw: fused}}]",
            "model: tiny, seq_len: 32",
            "adamw of rung 'a' was for_loop and is fused",
        ),
        ("[{name: a}, {name: b}]", "model: tiny, seq_len: 32", "workload or toggles"),
    ],
)
def test_another_ladder_of_the_same_name_is_refused_and_the_difference_named(
    rungs: str, workload: str, difference: str, write_ladder, tmp_path: Path
) -> None:
    results(tmp_path, load(write_ladder("[{name: a}]", workload="model: tiny, seq_len: 32")))
    with pytest.raises(BenchError, match=difference):
        unfinished(tmp_path, load(write_ladder(rungs, workload=workload)), MACHINE)


def test_other_rungs_another_text_another_peak_and_a_later_ablation_are_refused(
    ladder: Ladder, tmp_path: Path
) -> None:
    asked: dict[str, Any]
    results(tmp_path, ladder)
    unfinished(tmp_path, ladder, MACHINE, data_sha256="da7a")
    for asked, difference in (
        ({"chosen": ["a"]}, "--rungs was all rungs and is a"),
        ({"data_sha256": "0ther"}, r"the text \(sha256\) was da7a and is 0ther"),
        ({"ablate": True}, "--ablate was not given and is given"),
        ({"peak_tflops": 7.0}, r"--peak-tflops was not given and is 7\.0"),
    ):
        with pytest.raises(BenchError, match=difference):
            unfinished(tmp_path, ladder, MACHINE, **asked)


def test_of_several_files_the_newest_that_fits_is_gone_on_with(ladder: Ladder, tmp_path: Path) -> None:
    fits = results(tmp_path, ladder, time="2026-01-01T00:00:00+00:00")
    results(tmp_path, ladder, "20260102T000000Z", time="2026-01-02T00:00:00+00:00", ladder_hash="0" * 64)
    (fits.parent / f"{ladder.name}-broken.jsonl").write_text("no json\n")
    assert unfinished(tmp_path, ladder, MACHINE) == fits


def test_a_complete_run_is_passed_over_for_an_older_one_that_lacks_processes(
    write_ladder, tmp_path: Path
) -> None:
    one = load(write_ladder("[{name: a}]", repeats=1, ceiling_seconds=0))
    whole = results(tmp_path, one, "20260102T000000Z", time="2026-01-02T00:00:00+00:00")
    assert unfinished(tmp_path, one, MACHINE) == whole
    lacking = results(tmp_path, one, time="2026-01-01T00:00:00+00:00", status="interrupted")
    assert unfinished(tmp_path, one, MACHINE) == lacking


def test_a_ladder_over_several_devices_is_held_to_what_a_process_on_the_same_device_saw(
    write_ladder, tmp_path: Path
) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b, set: {device: cuda}}]"))
    path = results(tmp_path, ladder, environment=here(chip="Some CPU", device_count=8, versions={}))
    unused = here(chip="NVIDIA H200", device_count=2)  # which no rung has used yet
    assert unfinished(tmp_path, ladder, unused) == path
    with pytest.raises(BenchError, match="the CPU was Some CPU and is Another CPU"):
        unfinished(tmp_path, ladder, here(cpu="Another CPU"))
    first = read(path)[0][0]
    facts = {name: getattr(first, name) for name in ("ladder", "ladder_hash", "protocol", "workload")}
    append(path, record("b", 1, toggles=ladder.rungs[1].toggles, **facts))
    assert unfinished(tmp_path, ladder, MACHINE) == path
    with pytest.raises(BenchError, match="the chip was NVIDIA H100 80GB HBM3 and is NVIDIA H200"):
        unfinished(tmp_path, ladder, here(chip="NVIDIA H200"))


def test_a_little_less_memory_after_a_new_kernel_is_the_same_machine(ladder: Ladder, tmp_path: Path) -> None:
    results(tmp_path, ladder)
    unfinished(tmp_path, ladder, here(memory_bytes=int(MACHINE.memory_bytes * 0.995)))


def test_another_window_is_refused_but_more_rounds_are_not(write_ladder, tmp_path: Path) -> None:
    rungs = "[{name: a}]"
    results(tmp_path, load(write_ladder(rungs)))
    unfinished(tmp_path, load(write_ladder(rungs, repeats=9, timeout_seconds=7)), MACHINE)
    unfinished(tmp_path, load(write_ladder(rungs, until=0.02)), MACHINE)
    with pytest.raises(BenchError, match=r"protocol\.block_seconds was 0\.01 and is 2\.0"):
        unfinished(tmp_path, load(write_ladder(rungs, block_seconds=2.0)), MACHINE)


def test_load_commit_and_a_changed_checkout_are_no_other_machine(ladder: Ladder, tmp_path: Path) -> None:
    results(tmp_path, ladder)
    unfinished(tmp_path, ladder, here(load_average=9.0, commit="def", dirty=True))


def test_results_of_this_machine_come_before_newer_ones_of_another(ladder: Ladder, tmp_path: Path) -> None:
    mine = results(tmp_path, ladder)
    results(tmp_path, ladder, time="2027-01-01T00:00:00+00:00", environment=here(chip="NVIDIA H200"))
    assert unfinished(tmp_path, ladder, MACHINE) == mine


def test_a_torn_last_line_is_cut_off_and_what_follows_stays_readable(ladder: Ladder, tmp_path: Path) -> None:
    path = results(tmp_path, ladder)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    repair(path)
    assert path.read_bytes() == whole
    append(path, record())
    records, warnings = read(path)
    assert len(records) == 2
    assert warnings == []


def test_a_file_without_a_torn_line_is_left_as_it_is(ladder: Ladder, tmp_path: Path) -> None:
    path = results(tmp_path, ladder)
    whole = path.read_bytes()
    repair(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("turned", "repaired"),
    [
        (lambda whole: whole.rstrip(b"\n"), lambda whole: whole),
        (lambda whole: whole.rstrip(b"\n") + bytes(9), lambda whole: whole),
        (lambda whole: whole + bytes(9), lambda whole: whole),
        (lambda whole: whole + b" \t", lambda whole: whole),
        (lambda whole: whole + whole[:80] + bytes(9), lambda whole: whole),
        (
            lambda whole: b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n"),
            lambda w: b"\xef\xbb\xbf" + w[:-1] + b"\r\n",
        ),
        (lambda whole: whole + whole.rstrip(b"\n") + b" ", lambda whole: whole + whole[:-1] + b" \n"),
    ],
)
def test_no_whole_line_is_lost_by_going_on_with_an_edited_file(
    turned, repaired, ladder: Ladder, tmp_path: Path
) -> None:
    path = results(tmp_path, ladder)
    whole = path.read_bytes()
    path.write_bytes(turned(whole))
    before = read(path)[0]
    repair(path)
    assert path.read_bytes() == repaired(whole)
    append(path, record())
    assert read(path)[0] == [*before, record()]


def test_results_behind_a_link_are_gone_on_with(ladder: Ladder, tmp_path: Path) -> None:
    path = results(tmp_path / "disk", ladder)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "linked").symlink_to(path.parent)
    assert unfinished(tmp_path / "results", ladder, MACHINE) == tmp_path / "results" / "linked" / path.name


@pytest.mark.parametrize(
    ("change", "said"), [({"run_id": "another"}, "holds 2 runs"), ({}, "holds the process 'a'")]
)
def test_a_file_that_is_of_several_runs_or_was_appended_to_itself_is_not_gone_on_with(
    change: dict[str, str], said: str, ladder: Ladder, tmp_path: Path
) -> None:
    path = results(tmp_path, ladder)
    append(path, read(path)[0][0].model_copy(update=change))
    with pytest.raises(BenchError, match=said):
        unfinished(tmp_path, ladder, MACHINE)


def begun(ladder: Path, over: str, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """Of each task of a sweep that is resumed, whether there is a run of it to go on with; nothing runs."""
    asked: list[bool] = []

    def run(ladder: Ladder, options: Options, *_: object) -> RunResult:
        asked.append(options.resume)
        return RunResult(path=tmp_path, records=[], interrupted=False, error=None, cut=None)

    monkeypatch.setattr("bench.run.runner.run", run)
    tasks = list(_tasks(str(ladder), parse_all([over]), ()))
    results(out, tasks[0].candidates)
    _runs(tasks, Options(out=out, resume=True), 60.0, best_only=False)
    return asked


@pytest.mark.parametrize("name", ["test", "long " * 19], ids=["short", "cut in file names"])
def test_of_a_sweep_the_tasks_that_had_not_begun_are_begun(
    name: str, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = write_ladder(f"[{{name: {name}}}]")
    ladder.write_text(ladder.read_text().replace("name: test", f"name: {name}"))
    assert begun(ladder, "workload.seq_len=16,32", tmp_path / "out", monkeypatch, tmp_path) == [True, False]


def test_a_task_whose_name_begins_that_of_one_that_was_begun_is_no_part_of_it(
    write_ladder, tmp_path: Path
) -> None:
    ladder = load(write_ladder("[{name: a}]"))
    results(tmp_path, replace(ladder, name=f"{ladder.name}-2"))
    assert runs_of(tmp_path, ladder, []) == []

"""What goes wrong for real: processes killed, stopped and starved, disks filled. Nothing measured is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from places import ROOT
from waiting import held, holding, progress, until, workers

from bench.records.record import Record, read

pytestmark = pytest.mark.slow

TIMED_BLOCK = r'"window", "steps": \d+, "tps": \d'
"""What a worker says of itself once the first block of its window is timed, and the next one has begun."""
QUICK = {"block_seconds": 0.1, "blocks": 5}


def start(ladder: Path, out: Path, *arguments: str, hold: str | None = None) -> subprocess.Popen[str]:
    """hold: a rung whose worker is to be caught in the middle of its training by held()."""
    command = [sys.executable, "-m", "bench.cli", "run", str(ladder), "--out", str(out), *arguments]
    wide = {**os.environ, "COLUMNS": "200", **(holding(ladder.parent, hold) if hold else {})}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=wide
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    shown, said = process.communicate(timeout=600)
    return process.returncode, shown, said


def results(out: Path) -> tuple[Path, list[Record]]:
    (path,) = out.rglob("*.jsonl")
    return path, read(path)[0]


def ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=120)[1]


def test_a_killed_worker_is_a_row_and_the_ladder_goes_on(write_ladder, tmp_path: Path) -> None:
    process = start(write_ladder("[{name: a}, {name: b}]", **QUICK), tmp_path, hold="a")
    with held(process, "a") as (worker,):
        worker.kill()
    code, shown, _ = finish(process)
    assert code == 6
    assert "killed by SIGKILL" in shown
    assert [(r.rung, r.status) for r in results(tmp_path)[1]] == [("a", "failed"), ("b", "ok")]


def test_a_worker_that_is_stopped_within_its_window_takes_it_once_more_and_says_so(
    write_ladder, tmp_path: Path
) -> None:
    longer = {"block_seconds": 1.0, "blocks": 10, "max_window_seconds": 60}
    process = start(write_ladder("[{name: a}]", **longer), tmp_path)
    (worker,) = until(lambda: [each for each in workers(process, "a") if progress(each, TIMED_BLOCK)])
    worker.suspend()
    time.sleep(4)  # the fault itself: several blocks' time
    worker.resume()
    assert finish(process)[0] == 0
    (record,) = results(tmp_path)[1]
    measured = record.measurement
    assert measured is not None
    assert measured.set_aside_block_seconds is not None
    assert max(measured.set_aside_block_seconds) > 4
    assert any("stood still" in warning and "taken once more" in warning for warning in record.warnings)


def test_a_segmentation_fault_is_a_row_and_the_ladder_goes_on(write_ladder, tmp_path: Path) -> None:
    process = start(write_ladder("[{name: a}, {name: b}]", **QUICK), tmp_path, hold="a")
    with held(process, "a") as (worker,):
        worker.send_signal(signal.SIGSEGV)
    assert finish(process)[0] == 6
    first, second = results(tmp_path)[1]
    assert (first.status, (first.error or "").splitlines()[0][:17]) == ("failed", "killed by SIGSEGV")
    assert second.status == "ok"


def test_a_killed_rank_ends_its_peer_and_is_named_as_the_cause(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder("[{name: two, set: {world_size: 2}}, {name: b, set: {world_size: 1}}]", **QUICK)
    process = start(ladder, tmp_path, hold="two")
    with held(process, "two", ranks=2) as ranks:
        ranks[1].kill()
    assert finish(process)[0] == 6
    assert ended(ranks)
    first, second = (record for record in results(tmp_path)[1] if record.kind == "cumulative")
    assert (first.status, (first.error or "").splitlines()[0][:17]) == ("failed", "killed by SIGKILL")
    assert second.status == "ok"


def test_a_worker_that_hangs_is_ended_at_the_time_limit_with_all_its_ranks(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: two, set: {world_size: 2}}]", timeout_seconds=45)
    process = start(path, tmp_path, hold="two")  # and nobody lets it go on
    ranks = until(lambda: found if len(found := workers(process, "two")) == 2 else None)
    assert finish(process)[0] == 6
    assert ended(ranks)
    assert results(tmp_path)[1][0].status == "timeout"


def test_a_killed_runner_takes_its_worker_along_and_resume_runs_exactly_what_is_missing(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}, {name: c}]", **QUICK)
    process = start(path, tmp_path, hold="b")
    with held(process, "b") as found:
        process.send_signal(signal.SIGKILL)
    assert ended(found)  # though nobody has waited for the runner yet, and it is a zombie
    finish(process)
    file, before = results(tmp_path)
    assert [r.rung for r in before] == ["a"]
    with file.open("a") as torn:  # as if it had been killed while writing
        torn.write('{"schema": 1, "run_id"')
    code, shown, said = finish(start(path, tmp_path, "--resume"))
    assert code == 0, said
    assert "round 1/1  b: " in said
    assert "round 1/1  a: " not in said
    assert "| a" not in shown
    _, after = results(tmp_path)
    assert after[0] == before[0]
    assert [(r.kind, r.rung, r.status) for r in after] == [
        ("cumulative", "a", "ok"),
        ("control", "a", "ok"),  # what b and c pair with: the first rung ran before the interruption
        ("cumulative", "b", "ok"),
        ("cumulative", "c", "ok"),
    ]


def test_a_run_killed_while_rungs_are_tried_goes_on_with_that_and_keeps_what_was_found(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}, {name: c}]", carry="if_faster", **QUICK)
    process = start(path, tmp_path, hold="b")
    with held(process, "b") as found:
        process.send_signal(signal.SIGKILL)
    assert ended(found)
    finish(process)
    _, before = results(tmp_path)
    assert [(r.kind, r.rung, r.repetition) for r in before] == [("scout", "a", 1), ("scout", "a", 2)]
    code, _, said = finish(start(path, tmp_path, "--resume"))
    assert code == 0, said
    _, after = results(tmp_path)
    assert after[:2] == before
    tries = [r for r in after if r.kind == "scout"]  # noise decides whether a rung is tried once more
    assert list(dict.fromkeys(r.rung for r in tries)) == ["a", "b", "c"]
    assert after[: len(tries)] == tries
    assert (after[len(tries)].kind, after[len(tries)].rung) == ("cumulative", "a")
    assert all(r.scout is not None for r in tries)


def test_an_interrupted_run_is_resumed_where_it_was_and_then_counts_as_whole(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}]", **QUICK)
    process = start(path, tmp_path, hold="b")
    with held(process, "b"):
        process.send_signal(signal.SIGINT)
        code, shown, _ = finish(process)
    assert code == 130
    assert "was interrupted in round 1" in shown
    code, shown, said = finish(start(path, tmp_path, "--resume"))
    assert code == 0, said
    assert "was interrupted" not in shown
    assert [(r.kind, r.rung, r.status) for r in results(tmp_path)[1]] == [
        ("cumulative", "a", "ok"),
        ("cumulative", "b", "interrupted"),
        ("control", "a", "ok"),
        ("cumulative", "b", "ok"),
    ]


def test_a_run_that_still_goes_on_cannot_be_resumed_beside_it(write_ladder, tmp_path: Path) -> None:
    path = write_ladder("[{name: a}, {name: b}]", **QUICK)
    process = start(path, tmp_path, hold="b")
    with held(process, "b"):
        code, _, said = finish(start(path, tmp_path, "--resume"))
    assert (code, "another bench run is writing to it" in said) == (2, True), said
    assert finish(process)[0] == 0
    assert [r.rung for r in results(tmp_path)[1]] == ["a", "b"]


def test_resuming_a_finished_run_measures_nothing_and_shows_it(write_ladder, tmp_path: Path) -> None:
    path = write_ladder("[{name: a}]")
    assert finish(start(path, tmp_path))[0] == 0
    before = results(tmp_path)
    code, shown, _ = finish(start(path, tmp_path, "--resume"))
    assert code == 0
    assert "a " in shown
    assert results(tmp_path) == before


def test_resuming_with_another_ladder_is_one_line_and_exit_code_2(write_ladder, tmp_path: Path) -> None:
    path = write_ladder("[{name: a}]")
    assert finish(start(path, tmp_path))[0] == 0
    code, _, said = finish(start(path, tmp_path, "--resume", "--set", "workload.seed=7"))
    assert code == 2
    (line,) = said.strip().splitlines()
    assert "cannot go on with it: workload.seed was 1337 and is 7" in line
    assert len(results(tmp_path)[1]) == 1


def test_a_full_disk_ends_the_run_in_one_line_and_resume_goes_on_once_there_is_room(
    small_disk: Path, write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}, {name: c}]", **QUICK)
    process = start(path, small_disk, hold="b")
    with (
        held(process, "b"),
        contextlib.suppress(OSError),
        (small_disk / "filler").open("wb", buffering=0) as filler,
    ):
        while filler.write(b"x" * 512):
            pass
    code, shown, said = finish(process)
    assert code == 6
    last = said.strip().splitlines()[-1]
    assert "No space left on device" in last
    assert "--resume" in last
    assert "the last process, of rung 'b'" in last
    assert "b " in shown  # measured and shown, though it could not be kept
    file, before = results(small_disk)
    assert file.read_bytes().endswith(b"}\n")
    assert [r.rung for r in before] == ["a"]
    (small_disk / "filler").unlink()
    code, _, said = finish(start(path, small_disk, "--resume"))
    assert code == 0, said
    after = [(r.rung, r.status) for r in results(small_disk)[1] if r.kind == "cumulative"]
    assert after == [("a", "ok"), ("b", "ok"), ("c", "ok")]

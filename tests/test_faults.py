"""What goes wrong for real: processes killed, stopped and starved, disks filled. Nothing measured is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.records.record import Record, progress_path, read

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# Rungs train for seconds, so that a test can catch them at it.
LONG = {"block_seconds": 0.6, "blocks": 5, "timeout_seconds": 100}


def start(ladder: Path, out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.cli", "run", str(ladder), "--out", str(out), *arguments]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=wide
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    shown, said = process.communicate(timeout=200)
    return process.returncode, shown, said


def training(
    process: subprocess.Popen[str], rung: str, ranks: int = 1, phase: str = "warm-up|window"
) -> list[psutil.Process]:
    """The worker processes of a rung, once its first step is done, or it has come to a later phase."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
        with contextlib.suppress(psutil.Error, OSError, KeyError):
            children = psutil.Process(process.pid).children(recursive=True)
            found = [child for child in children if {"bench.worker", rung} <= set(child.cmdline())]
            found = [child for child in found if "torch.distributed.run" not in child.cmdline()]
            progress = progress_path(Path(found[0].environ()["BENCH_OUT"])) if len(found) == ranks else None
            if progress and re.search(f'"({phase})"', progress.read_text()):
                return sorted(found, key=lambda child: child.environ().get("RANK", "0"))
    raise AssertionError(f"{rung} never trained: {finish(process)}")


def results(out: Path) -> tuple[Path, list[Record]]:
    (path,) = out.rglob("*.jsonl")
    return path, read(path)[0]


def ended(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def test_a_killed_worker_is_a_row_and_the_ladder_goes_on(write_ladder, tmp_path: Path) -> None:
    process = start(write_ladder("[{name: a}, {name: b}]", **LONG), tmp_path)
    training(process, "a")[0].kill()
    code, shown, _ = finish(process)
    assert code == 6
    assert "killed by SIGKILL" in shown
    assert [(r.rung, r.status) for r in results(tmp_path)[1]] == [("a", "failed"), ("b", "ok")]


def test_a_worker_that_is_stopped_within_its_window_takes_it_once_more_and_says_so(
    write_ladder, tmp_path: Path
) -> None:
    process = start(write_ladder("[{name: a}]", **{**LONG, "blocks": 8, "timeout_seconds": 600}), tmp_path)
    (worker,) = training(process, "a", phase="window")
    worker.suspend()
    time.sleep(4)  # the fault itself: several blocks' time
    worker.resume()
    assert finish(process)[0] == 0
    (record,) = results(tmp_path)[1]
    measured = record.measurement
    assert measured is not None
    assert measured.set_aside_block_seconds is not None
    assert max(measured.set_aside_block_seconds) > 4
    assert max(measured.block_lost_seconds or [9]) < 3
    assert any("stood still" in warning and "taken once more" in warning for warning in record.warnings)


def test_a_segmentation_fault_is_a_row_and_the_ladder_goes_on(write_ladder, tmp_path: Path) -> None:
    process = start(write_ladder("[{name: a}, {name: b}]", **LONG), tmp_path)
    training(process, "a")[0].send_signal(signal.SIGSEGV)
    assert finish(process)[0] == 6
    first, second = results(tmp_path)[1]
    assert (first.status, (first.error or "").splitlines()[0][:17]) == ("failed", "killed by SIGSEGV")
    assert second.status == "ok"


def test_a_killed_rank_ends_its_peer_and_is_named_as_the_cause(write_ladder, tmp_path: Path) -> None:
    process = start(
        write_ladder("[{name: two, set: {world_size: 2}}, {name: b, set: {world_size: 1}}]", **LONG), tmp_path
    )
    ranks = training(process, "two", ranks=2)
    ranks[1].kill()
    assert finish(process)[0] == 6
    assert ended(ranks)
    first, second = (record for record in results(tmp_path)[1] if record.kind == "cumulative")
    assert (first.status, (first.error or "").splitlines()[0][:17]) == ("failed", "killed by SIGKILL")
    assert second.status == "ok"


def test_a_worker_that_hangs_is_ended_at_the_time_limit_with_all_its_ranks(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder(
        "[{name: two, set: {world_size: 2}}]", **{**LONG, "blocks": 1000, "timeout_seconds": 30}
    )
    process = start(path, tmp_path)
    ranks = training(process, "two", ranks=2)
    ranks[0].suspend()
    assert finish(process)[0] == 6
    assert ended(ranks)
    assert results(tmp_path)[1][0].status == "timeout"


def test_a_killed_runner_takes_its_worker_along_and_resume_runs_exactly_what_is_missing(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}, {name: c}]", **LONG)
    process = start(path, tmp_path)
    workers = training(process, "b")
    process.send_signal(signal.SIGKILL)
    assert ended(workers)  # though nobody has waited for the runner yet, and it is a zombie
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
        ("cumulative", "b", "ok"),
        ("cumulative", "c", "ok"),
        ("control", "a", "ok"),  # what b and c pair with: the first rung ran before the interruption
    ]


def test_an_interrupted_run_is_resumed_where_it_was_and_then_counts_as_whole(
    write_ladder, tmp_path: Path
) -> None:
    path = write_ladder("[{name: a}, {name: b}]", **LONG)
    process = start(path, tmp_path)
    training(process, "b")
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
        ("cumulative", "b", "ok"),
        ("control", "a", "ok"),
    ]


def test_a_run_that_still_goes_on_cannot_be_resumed_beside_it(write_ladder, tmp_path: Path) -> None:
    path = write_ladder("[{name: a}, {name: b}]", **LONG)
    process = start(path, tmp_path)
    training(process, "b")
    process.send_signal(signal.SIGSTOP)  # however long the other takes to start
    code, _, said = finish(start(path, tmp_path, "--resume"))
    process.send_signal(signal.SIGCONT)
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
    path = write_ladder("[{name: a}, {name: b}, {name: c}]", **LONG)
    process = start(path, small_disk)
    training(process, "b")
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 512):
            pass
    code, shown, said = finish(process)
    assert code == 6
    last = said.strip().splitlines()[-1]
    assert "No space left on device" in last
    assert "--resume" in last
    assert "b " in shown  # measured and shown, though it could not be kept
    file, before = results(small_disk)
    assert file.read_bytes().endswith(b"}\n")
    assert [r.rung for r in before] == ["a"]
    (small_disk / "filler").unlink()
    code, _, said = finish(start(path, small_disk, "--resume"))
    assert code == 0, said
    after = [(r.rung, r.status) for r in results(small_disk)[1] if r.kind == "cumulative"]
    assert after == [("a", "ok"), ("b", "ok"), ("c", "ok")]

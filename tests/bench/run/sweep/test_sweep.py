"""bench sweep, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from places import ROOT
from waiting import until

from bench.analysis.scoreboard import scoreboard
from bench.ladder.ladder import load
from bench.records.record import Record, read

pytestmark = pytest.mark.slow

RUNGS = "[{name: a, set: {attention: explicit}}, {name: b, set: {adamw: fused}}]"


def start(*arguments: str, memory: int | None = None) -> subprocess.Popen[str]:
    """memory: bytes that each process may have of its own."""
    limit = memory and (lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory)))
    return subprocess.Popen(
        [sys.executable, "-m", "bench.cli", "sweep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        preexec_fn=limit or None,
    )


def sweep(*arguments: str, memory: int | None = None) -> tuple[int, str, str]:
    process = start(*arguments, memory=memory)
    shown, said = process.communicate(timeout=600)
    return process.returncode, shown, said


def results(out: Path) -> list[Record]:
    (path,) = out.rglob("*.jsonl")
    return read(path)[0]


def kill_worker(process: subprocess.Popen[str], setting: str) -> None:
    """That of the candidate with this setting, as soon as it is there."""

    def killed() -> bool:
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if setting in child.cmdline():
                    child.kill()
                    return True
        return False

    until(killed, process)


def test_a_sweep_measures_each_candidate_and_writes_the_ladder_to_the_best(
    write_ladder, tmp_path: Path
) -> None:
    ladder, best = write_ladder(RUNGS), tmp_path / "best.yaml"
    out = tmp_path / "results"
    arguments = ("--over", "toggles.micro_batch_size=1,2", "--best", str(best), "--out", str(out))
    code, shown, said = sweep(f"{ladder}:a", *arguments)
    assert code == 0, said
    rows = [line.split()[:1] for line in shown.splitlines() if line.startswith("  ")]
    assert rows[:3] == [["micro_batch_size"], ["1"], ["2"]]
    records = results(out)
    kinds = [
        (r.kind, r.toggles.all["micro_batch_size"], r.toggles.all["grad_accum_steps"], r.status)
        for r in records
    ]
    assert kinds == [("sweep", 1, 1, "ok"), ("sweep", 2, 1, "ok"), ("parity", 1, 2, "ok")]
    assert records[2].measurement
    at_once, accumulated = (record.measurement.losses[0] for record in records[1:] if record.measurement)
    # Products of another size, which may be cut otherwise.
    assert at_once == pytest.approx(accumulated, rel=1e-6)
    assert not records[2].measurement.block_seconds
    assert load(best).rungs[-1].toggles.micro_batch_size in (1, 2)
    # What a record says runs it again does so.
    again = tmp_path / "again.json"
    command = records[2].command.replace("LADDER", str(ladder)).replace("m.json", str(again))
    subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT, check=True, capture_output=True)
    assert json.loads(again.read_text())["measurement"]["losses"] == records[2].measurement.losses


def test_a_batch_that_does_not_fit_is_an_answer(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder(RUNGS, workload="model: tiny, data: synthetic, seq_len: 128")
    out = tmp_path / "results"
    arguments = ("--over", "toggles.micro_batch_size=1,4096", "--out", str(out))
    code, shown, said = sweep(str(ladder), *arguments, memory=3 * 10**9)
    assert code == 0, said
    assert [(r.rung, r.status) for r in results(out)] == [
        ("micro_batch_size=1", "ok"),
        ("micro_batch_size=4096", "out_of_memory"),
    ]
    words = " ".join(shown.split())
    assert "Largest batch that ran: 1 (micro_batch_size=1); 4096 ran out of memory." in words


def test_an_interrupted_sweep_goes_on_with_resume(write_ladder, tmp_path: Path) -> None:
    ladder, out = write_ladder(RUNGS), tmp_path / "results"
    arguments = (str(ladder), "--over", "toggles.adamw=fused,foreach,for_loop", "--out", str(out))
    process = start(*arguments)
    until(lambda: list(out.rglob("*.jsonl")) and results(out), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 130
    code, _, said = sweep(*arguments, "--resume")
    assert code == 0, said
    done = [(r.kind, r.rung) for r in results(out) if r.status == "ok"]
    assert done[:3] == [("sweep", f"adamw={value}") for value in ("fused", "foreach", "for_loop")]
    assert done[3:] == [("control", "adamw=fused")]  # by which the later part is held to the first


def test_a_sweep_that_its_budget_ended_says_so_wherever_it_is_shown(write_ladder, tmp_path: Path) -> None:
    ladder, out = write_ladder(RUNGS, repeats=9), tmp_path / "results"
    arguments = ("--over", "toggles.adamw=fused,foreach,for_loop", "--budget", "0.4", "--out", str(out))
    code, shown, said = sweep(str(ladder), *arguments)
    assert code == 0, said
    *ran, left = results(out)
    assert {record.status for record in ran} == {"ok"}
    ended = f"--budget ended the sweep in round {left.repetition} of 9"
    assert (left.status, left.error, left.not_begun) == ("interrupted", f"not begun: {ended}", ended)
    assert f"{len(ran)} of about 36 processes measured" in said
    assert f"bench: {ended}; the same command with --resume goes on" in said
    assert f"! {ended}; bench sweep with --resume runs what is missing" in " ".join(shown.split())
    assert scoreboard(results(out)).interrupted


def test_each_workload_is_a_task_with_results_of_its_own(write_ladder, tmp_path: Path) -> None:
    ladder, out = write_ladder(RUNGS), tmp_path / "results"
    code, shown, said = sweep(str(ladder), "--over", "workload.seq_len=16,32", "--out", str(out))
    assert code == 0, said
    found = [read(path)[0] for path in sorted(out.rglob("*.jsonl"))]
    assert [(records[0].workload["seq_len"], records[0].ladder) for records in found] == [
        (16, "test, b, over seq_len=16"),
        (32, "test, b, over seq_len=32"),
    ]
    assert "T = 16" in shown
    assert "T = 32" in shown


def test_a_task_that_had_not_begun_is_begun_by_resume(write_ladder, tmp_path: Path) -> None:
    ladder, out = write_ladder(RUNGS), tmp_path / "results"
    over = ("--out", str(out), "--over")
    assert sweep(str(ladder), *over, "workload.seq_len=16")[0] == 0
    code, _, said = sweep(str(ladder), *over, "workload.seq_len=16,32", "--resume")
    assert code == 0, said
    assert sorted(read(path)[0][0].workload["seq_len"] for path in out.rglob("*.jsonl")) == [16, 32]


def test_overrides_are_for_all_rungs_and_a_candidate_s_own_values_for_one(
    write_ladder, tmp_path: Path
) -> None:
    rungs = "[{name: a, set: {micro_batch_size: 3, grad_accum_steps: 4}}, {name: b, set: {adamw: fused}}]"
    ladder, out = (
        write_ladder(rungs, workload="model: tiny, data: synthetic, seq_len: 32"),
        tmp_path / "results",
    )
    fixed = ("--set", "workload.tokens_per_step=256", "--set", "toggles.micro_batch_size=4")
    fixed += ("--set", "toggles.grad_accum_steps=2")
    code, _, said = sweep(str(ladder), *fixed, "--over", "toggles.micro_batch_size=1,2", "--out", str(out))
    assert code == 0, said
    accumulated = [
        (r.toggles.all["micro_batch_size"], r.toggles.all["grad_accum_steps"]) for r in results(out)
    ]
    assert accumulated == [(1, 8), (2, 4)]


def test_the_best_of_those_that_run_is_kept_though_another_fails(write_ladder, tmp_path: Path) -> None:
    ladder, best, out = write_ladder(RUNGS), tmp_path / "best.yaml", tmp_path / "results"
    arguments = ("--over", "toggles.threads=1,2", "--best", str(best))
    process = start(str(ladder), *arguments, "--out", str(out))
    kill_worker(process, "toggles.threads=2")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 6, said
    assert load(best).rungs[-1].toggles.threads == 1
    assert (
        sweep(str(ladder), *arguments)[2] == f"bench: --best {best}: is there already; choose another name\n"
    )


def test_what_cannot_be_swept_is_one_line_and_nothing_runs(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder(RUNGS)
    for arguments, says in (
        ((f"{ladder}:c", "--over", "toggles.adamw=fused"), "no rung is called 'c'"),
        ((str(ladder), "--over", "toggles.adam=fused"), "toggles has no 'adam'; did you mean 'adamw'?"),
        ((str(ladder), "--over", "workload.seq_len=16,32", "--best", "x.yaml"), "sweep toggles only"),
        ((str(ladder), "--over", "workload.data=a,b", "--data", str(ladder)), "is one corpus"),
        (("quick", "--over", "toggles.micro_batch_size=1,2"), "'best known' starts from the best of cpu"),
        (("nothing.yaml", "--over", "toggles.adamw=fused"), "nothing.yaml: No such file"),
    ):
        code, shown, said = sweep(*arguments, "--out", str(tmp_path / "results"))
        assert (code, shown) == (2, "")
        assert said.count("\n") == 1
        assert says in said
    assert not (tmp_path / "results").exists()

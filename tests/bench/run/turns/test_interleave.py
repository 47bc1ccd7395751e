"""bench turns, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import psutil
import pytest
import typer
from places import ROOT
from samples import MACHINE
from waiting import until

import bench.cli.turns
from bench.analysis.turns import load_turns
from bench.ladder.ladder import LadderError, Rung, load
from bench.process.pty_process import Program
from bench.run.runner import new_results
from bench.run.turns.interleave import (
    CONTROL,
    Group,
    Pair,
    TurnOptions,
    groups,
    open_with_last_that_ran,
    seconds_left,
)
from bench.run.turns.paused_process import started
from gpt2.files.shard_format import shard_header

RUNGS = """[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {micro_batch_size: 2}},
  {name: d, set: {attention: sdpa}}]"""
# Prints its steps as any trainer may, and to a file when the last one ended, by which it is seen to sleep.
TRAINER = """
import time
print("tokens per step 64", flush=True)
with open("steps.txt", "w") as file:
    for step in range(100_000):
        time.sleep(0.02)
        print(f"step {step}: loss 1.5", flush=True)
        print(time.monotonic(), file=file, flush=True)
"""


def turns(ladder: Path, out: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "bench.cli", "turns", str(ladder), "--out", str(out), *arguments]
    environ = {**os.environ, "COLUMNS": "200"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ, timeout=600)
    return ran.returncode, ran.stdout, ran.stderr


def kept(out: Path) -> dict[str, Any]:
    (path,) = out.rglob("turns-*.json")
    return json.loads(path.read_text())


def works_at(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cwd() == str(folder)
    return False


def nobody_at(folder: Path) -> bool:
    """Whether no process works there."""
    return str(folder) not in [process.info["cwd"] for process in psutil.process_iter(["cwd"])]


@pytest.fixture
def rungs(write_ladder) -> list[Rung]:
    return list(load(write_ladder(RUNGS)).rungs)


@pytest.mark.parametrize(
    ("first", "at_once", "expected"),
    [
        (False, 6, ["abcd"]),
        (False, 4, ["abc", "cd"]),
        (False, 3, ["ab", "bc", "cd"]),
        (True, 6, ["abcd"]),
        (True, 4, ["abc", "ad"]),
    ],
)
def test_each_rung_is_in_memory_with_the_one_that_it_is_held_to(
    rungs: list[Rung], first: bool, at_once: int, expected: list[str]
) -> None:
    found = groups(rungs, first, at_once)
    assert ["".join(rung.name for rung in part.rungs) for part in found] == expected
    assert all(len(part.rungs) + 1 <= at_once for part in found)


def test_turns_that_begin_in_one_second_have_files_of_their_own(write_ladder, tmp_path: Path) -> None:
    ladder = load(write_ladder(RUNGS))
    first, second = (new_results(ladder, tmp_path, MACHINE, "turns-{}.json") for _ in range(2))
    assert first != second
    assert {first.exists(), second.exists()} == {True}


def test_one_rung_has_nothing_to_take_turns_with(rungs: list[Rung]) -> None:
    with pytest.raises(LadderError, match="two rungs"):
        groups(rungs[:1], False, 6)


def test_a_rung_that_is_called_as_the_control_is_refused(rungs: list[Rung]) -> None:
    with pytest.raises(LadderError, match=r"rung 'a \(again\)': .* rename it"):
        groups([rungs[0], replace(rungs[1], name="a (again)")], False, 6)


@pytest.mark.slow
def test_ratios_are_of_tokens_within_rounds_to_the_rung_before_and_the_last_beside_itself(
    peer, tmp_path: Path
) -> None:
    ladder = peer(TRAINER, peer="own")
    code, shown, said = turns(ladder, tmp_path / "out", "--starts", "3", "--rounds", "2")
    assert code == 0, said
    (group,) = kept(tmp_path / "out")["groups"]
    pairs = {(pair["over"], pair["rung"]): pair for pair in group["pairs"]}
    assert list(pairs) == [("a", "other"), ("other", "other" + CONTROL)]
    tokens = {"a": 32, "other": 64, "other" + CONTROL: 64}
    for (over, rung), pair in pairs.items():
        assert [len(took["over"]) for took in pair["starts"]] == [2, 2, 2]
        ratios = [
            tokens[rung] / s / (tokens[over] / o)
            for took in pair["starts"]
            for o, s in zip(took["over"], took["rung"], strict=True)
        ]
        assert pair["ratio"]["value"] == pytest.approx(geometric_mean(ratios))
        assert pair["ratio"]["rounds"] == 3
        assert pair["tokens_per_second"]["value"] == pytest.approx(
            geometric_mean(tokens[rung] / s for took in pair["starts"] for s in took["rung"])
        )
    again = pairs["other", "other" + CONTROL]
    assert again["verdict"] is None
    # Where the control alone decides, the two are equal but for how they were rounded.
    assert group["noise_floor"] * (1 + 1e-9) >= again["ratio"]["high"] / again["ratio"]["value"] - 1
    assert f"{pairs['a', 'other']['ratio']['value']:.2f}x" in shown
    assert re.search("start 3 of 3, round 2 of 2: .*; about 0 s left", said)


@pytest.mark.parametrize(
    ("start", "number", "to_come", "seconds"),
    [(0, 0, 0, 5 + 2 * 20), (2, 1, 0, 0), (2, 0, 1, 5 + 3 * 20), (0, 1, 2, (2 + 6) * 20)],
)
def test_the_time_that_is_left_counts_the_starts_of_the_groups_to_come(
    rungs: list[Rung], start: int, number: int, to_come: int, seconds: float, write_ladder
) -> None:
    asked = TurnOptions(
        ladder=load(write_ladder(RUNGS)), rungs=rungs, first=False, starts=3, rounds=2, steps=1, at_once=3
    )
    assert seconds_left(asked, start, number, to_come, warm_up=10, each=5) == seconds


def test_a_first_round_that_is_cut_short_is_kept_as_far_as_it_went(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(
        asked: TurnOptions,
        group: Group,
        scratch: Path,
        tell: object,
        keep: object,
        to_come: int,
        check_text: object,
    ) -> None:
        group.pairs.append(Pair(rung="b", over="a", starts=[[(0.2, 0.1)]]))
        group.versions["b"] = "1.0"  # as if it were another trainer
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.run.turns.interleave.take_turns", cut)
    ladder = write_ladder(RUNGS)
    with pytest.raises(typer.Exit) as ended:
        bench.cli.turns.turns(ladder, rungs="a,b", out=tmp_path / "out")
    assert ended.value.exit_code == 130
    (pair,) = kept(tmp_path / "out")["groups"][0]["pairs"]
    assert (pair["ratio"]["value"], pair["verdict"]) == (2, "not replicated")
    said = capsys.readouterr()
    assert "kept in" in said.err
    assert "hold for these very processes alone" in " ".join(said.out.split())
    (read_back,), _ = load_turns([tmp_path / "out"])
    workload = load(ladder).workload
    assert read_back.task == (workload.model, workload.seq_len)
    assert (read_back.trainer, read_back.ratio.value, read_back.verdict) == ("b", 0.5, "not replicated")


@pytest.mark.slow
def test_an_external_rung_sleeps_while_ours_trains(peer, tmp_path: Path) -> None:
    long = ("--set", "toggles.micro_batch_size=128")  # of ours: a turn takes many times as long as theirs
    ladder = peer(TRAINER, peer="own")
    asked = ("--first", "--starts", "1", "--rounds", "5", "--steps", "4")
    code, _, said = turns(ladder, tmp_path / "out", *asked, *long)
    assert code == 0, said
    pair, _ = kept(tmp_path / "out")["groups"][0]["pairs"]
    (took,) = pair["starts"]
    turn = 4 * min(took["over"])
    ended = [float(line) for line in (tmp_path / "checkout" / "steps.txt").read_text().splitlines()]
    gaps = [after - before for before, after in pairwise(ended)]
    assert sum(gap > turn for gap in gaps) >= 4  # between its five turns and the start
    until(lambda: nobody_at(tmp_path / "checkout"))


def test_an_external_rung_is_stopped_between_its_turns_and_timed_only_awake(
    peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = load(peer(TRAINER, peer="own"))
    heard: list[tuple[float, int]] = []
    genuine = Program.lines

    def lines(self: Program, deadline: float) -> Iterator[tuple[float, str]]:
        for at, text in genuine(self, deadline):
            heard.extend((at, int(number)) for number in re.findall(r"^step (\d+):", text))
            yield at, text

    monkeypatch.setattr(Program, "lines", lines)
    with started(ladder, ladder.rung("other"), "other", tmp_path, None, ()) as paused:
        paused.steps(2)
        paused.stop()
        assert {each.status() for each in paused._program.processes()} == {psutil.STATUS_STOPPED}
        heard.clear()
        woken = time.perf_counter()
        paused.resume()
        seconds = paused.steps(3)
    (first, begun), (last, ended) = heard[0], heard[-1]
    assert first >= woken
    assert seconds == pytest.approx((last - first) / (ended - begun))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "complaint", "began"),
    [
        # Which steps it was stopped in, whose lines are forgotten, is the machine's affair.
        (("100_000", "12"), r"ended with exit code 0: step \d+: loss 1\.5", True),
        (("{step}", "{step % 12}"), r"it printed step \d+ after step \d+", True),
        (("loss 1.5", "loss nan"), "its loss is nan at step 0", False),
        (("step 64", "step 128"), "its steps are of 128 tokens, and the ladder says 64", False),
    ],
)
def test_a_rung_that_goes_wrong_is_named_ended_and_the_others_go_on(
    peer, tmp_path: Path, change: tuple[str, str], complaint: str, began: bool
) -> None:
    program = TRAINER.replace(*change)
    assert program != TRAINER
    ladder = peer(program, peer="own")
    asked = ("--first", "--starts", "2", "--rounds", "4", "--steps", "3")
    code, shown, said = turns(ladder, tmp_path / "out", *asked)
    assert code == 6
    assert re.search(f"other: {complaint}", said)
    if began:
        control = kept(tmp_path / "out")["groups"][0]["pairs"][-1]
        assert (control["rung"], [len(took["over"]) for took in control["starts"]]) == ("a" + CONTROL, [4])
        assert said.count("starting other") == 1  # nor is it started again
    assert re.search(complaint, shown)
    until(lambda: nobody_at(tmp_path / "checkout"))


@pytest.mark.slow
def test_a_rung_that_fails_in_the_last_pairs_is_told_by_the_results_too(peer, tmp_path: Path) -> None:
    ladder = peer(TRAINER, peer="own")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "bench.cli", "turns", str(ladder), "--rounds", "10000", "--starts", "1"]
    process = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stderr=subprocess.PIPE)
    until(lambda: any(path.stat().st_size for path in out.rglob("turns-*.json")), process)
    for trainer in [each for each in psutil.process_iter() if works_at(each, tmp_path / "checkout")]:
        trainer.kill()
    process.communicate(timeout=600)
    assert process.returncode == 6
    assert "other" in kept(out)["groups"][0]["failed"]


def tokens(path: Path, seed: int) -> None:
    """Put a shard of the tiny model's tokens at `path`, in place of what is there."""
    new, ids = path.with_suffix(".new"), np.random.default_rng(seed).integers(0, 500, 4000, np.uint16)
    new.write_bytes(shard_header(len(ids)) + ids.tobytes())
    new.replace(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ("text", "the text changed while the run went on; put it back, or begin anew"),
        ("script", "other: its code changed between starts: it was "),
    ],
)
def test_what_changes_between_starts_is_told_and_the_start_before_it_stays(
    peer, tmp_path: Path, changed: str, complaint: str
) -> None:
    ladder, out, text = peer(TRAINER, peer="own"), tmp_path / "out", tmp_path / "mine.bin"
    tokens(text, seed=1)
    command = [sys.executable, "-m", "bench.cli", "turns", str(ladder), "--set", "workload.data=mine"]
    command += ["--data", str(text), "--starts", "2", "--rounds", "1", "--out", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: any(path.stat().st_size for path in out.rglob("turns-*.json")), process)
    if changed == "text":
        tokens(text, seed=2)
    else:
        with (tmp_path / "checkout" / "train.py").open("a") as script:
            script.write("# another\n")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 6, said
    assert complaint in said
    pair = kept(out)["groups"][0]["pairs"][0]
    assert [len(start["rung"]) for start in pair["starts"]] == [1]


@pytest.mark.slow
def test_a_peer_that_is_not_here_is_unsupported_and_nothing_is_made_up_of_it(
    peer, tmp_path: Path, monkeypatch
) -> None:
    ladder = peer(TRAINER, peer="own")
    monkeypatch.delenv("CHECKOUT")
    code, shown, said = turns(ladder, tmp_path / "out", "--rounds", "3")
    assert code == 6  # for nothing was left to compare
    assert "not supported here" in shown
    assert "CHECKOUT" in shown
    assert "nothing is kept" in said
    assert not list((tmp_path / "out").rglob("*.json"))


@pytest.mark.parametrize(
    "absent", [{"b": "unsupported"}, {"b": "failed"}, {"a": "failed", "b": "unsupported"}, {}]
)
def test_a_group_opens_with_the_last_rung_before_it_that_ran(
    rungs: list[Rung], absent: dict[str, str]
) -> None:
    before, part = groups(rungs, False, 4)
    for name, how in absent.items():
        getattr(before, how)[name] = "why"
    before.rungs, part.rungs = rungs[:2], rungs[1:3]
    open_with_last_that_ran(part, [before])
    assert [rung.name for rung in part.rungs] == [{1: "a"}.get(len(absent), "b"), "c"]


@pytest.mark.slow
def test_a_rung_that_is_not_here_between_two_groups_costs_no_comparison(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    monkeypatch.setenv("CHECKOUT", str(tmp_path))
    theirs = "peer: own, model: tiny, seq_len: 32, tokens_per_step: 64, command: python train.py"
    rungs = [
        "{name: a, set: {device: cpu}}",
        f"{{name: b, external: {{{theirs}, folder: $NOWHERE}}}}",
        f"{{name: c, external: {{{theirs}, folder: $CHECKOUT}}}}",
    ]
    ladder = write_ladder(f"[{', '.join(rungs)}]")
    code, shown, _ = turns(ladder, tmp_path / "out", "--at-once", "3", "--rounds", "2", "--starts", "1")
    assert code == 0, shown
    found = kept(tmp_path / "out")["groups"]
    assert ("a", "c") in [(pair["over"], pair["rung"]) for group in found for pair in group["pairs"]]


@pytest.mark.slow
def test_a_reference_that_is_not_here_ends_its_group(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder("[{name: a, set: {device: mps}}, {name: b, set: {adamw: fused}}]")
    code, _, said = turns(ladder, tmp_path / "out", "--first", "--rounds", "3")
    assert code == 6
    assert "a, the reference of the others, took no turn" in said


@pytest.mark.slow
def test_a_full_disk_ends_it_in_one_line_with_what_was_measured_shown(
    write_ladder, small_disk: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "bench.cli", "turns", str(write_ladder(RUNGS)), "--rungs", "a,b"]
    process = subprocess.Popen(
        [*command, "--rounds", "10000", "--out", str(small_disk)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: any(path.stat().st_size for path in small_disk.rglob("turns-*.json")), process)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"x" * 512):
            pass
    shown, said = process.communicate(timeout=600)
    assert process.returncode == 6
    assert "No space left on device" in said.strip().splitlines()[-1]
    assert "b (again)" in shown
    assert kept(small_disk)["groups"][0]["pairs"][0]["starts"][0]["rung"]  # the last that found room
    assert not list(small_disk.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_what_was_measured_is_kept_and_no_process_is_left(
    peer, tmp_path: Path, number: int
) -> None:
    out = tmp_path / "out"
    ladder, pipe = peer(TRAINER, peer="own"), subprocess.PIPE
    command = [sys.executable, "-m", "bench.cli", "turns", str(ladder), "--rounds", "10000"]
    process = subprocess.Popen([*command, "--out", str(out)], cwd=ROOT, stdout=pipe, stderr=pipe)
    until(lambda: any(path.stat().st_size for path in out.rglob("turns-*.json")), process)
    process.send_signal(number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    assert said.endswith(b"bench: interrupted\n") == (number != signal.SIGKILL)
    assert kept(out)["groups"][0]["pairs"][0]["starts"][0]["rung"]
    until(lambda: nobody_at(tmp_path / "checkout"))

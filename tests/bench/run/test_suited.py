"""What a ladder that leaves rungs out by itself is without those that this machine does not support."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder, load
from bench.ladder.sweep_axis import parse_all
from bench.run import suited
from bench.run.command import Options, worker_command
from bench.run.suited import supported
from bench.run.sweep import as_ladder
from gpt2.training.reexec import python

CLIMB = """name: climb
workload: {model: tiny, data: synthetic, seq_len: 32}
protocol: {repeats: 1, carry: if_faster}
rungs: [{name: a, set: {device: cpu}}, {name: b, set: {attention: cudnn}}, {name: c, set: {adamw: fused}}]
"""


@pytest.fixture
def climb(tmp_path: Path) -> Ladder:
    (tmp_path / "climb.yaml").write_text(CLIMB)
    return load(tmp_path / "climb.yaml")


def test_it_leaves_out_what_this_machine_does_not_support_and_says_so(climb: Ladder) -> None:
    notes: list[str] = []
    overrides = ["toggles.micro_batch_size=2"]
    here = supported(load(climb.path, overrides), overrides, notes.append)
    assert [rung.name for rung in here.rungs] == ["a", "c"]
    top = here.rung("c").toggles
    assert (top.attention, top.adamw, top.micro_batch_size) == ("explicit", "fused", 2)
    assert notes == ["left out, as they do not suit this machine: b"]


@pytest.mark.usefixtures("asks_here")
def test_a_rung_that_is_asked_for_by_name_stays(climb: Ladder) -> None:
    assert [rung.name for rung in supported(climb, [], print, ["b"]).rungs] == ["a", "b", "c"]


@pytest.mark.usefixtures("asks_here")
def test_a_ladder_whose_device_is_not_here_stays_as_it_is(climb: Ladder) -> None:
    there = supported(climb, ["toggles.device=mps"], print)
    assert [rung.name for rung in there.rungs] == ["a", "b", "c"]


def test_a_ladder_that_keeps_every_rung_is_not_asked_about(
    climb: Ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*arguments: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(suited, "suited", asked)
    always = replace(climb, protocol=replace(climb.protocol, carry="always"))
    assert supported(always, [], print) is always


def test_a_worker_of_a_sweep_gets_the_rung_without_them(climb: Ladder) -> None:
    """Its candidates change a rung that stands on what is supported alone."""
    here = climb.carrying(without=["b"])
    swept = as_ladder(here, here.rung("c"), parse_all(["toggles.micro_batch_size=1,2"]))
    command = worker_command(swept, Task(kind="cumulative", rung=swept.rungs[1], repetition=1), Options())
    assert command[command.index("--without") + 1] == "b"
    own = command[command.index("--own") + 1]
    assert load(climb.path, [], {"c": [own]}).carrying(without=["b"]).rung("c").toggles == (
        swept.rungs[1].toggles
    )


def test_a_text_whose_name_begins_with_a_dash_is_no_option_of_a_worker(climb: Ladder) -> None:
    task = Task(kind="cumulative", rung=climb.rungs[0], repetition=1)
    command = worker_command(climb, task, Options(data=Path("./-t.txt")))
    assert command[command.index("--data") + 1] == "./-t.txt"


@pytest.mark.slow
def test_a_process_of_turns_trains_the_rung_without_them(climb: Ladder) -> None:
    command = [*python("bench.run.turns.step_printer"), str(climb.path), "c", "--without", "b"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline().startswith("step 0: loss ")
        finally:
            process.kill()

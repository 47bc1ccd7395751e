from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from longruns import (
    ROOT,
    broken_off,
    command,
    events,
    learned,
    notes,
    session,
    settings,
    tiny_run,
    with_toggles,
)
from typer.testing import CliRunner
from waiting import until

from gpt2.cli.main import app
from gpt2.config.validation import ConfigError
from gpt2.config.workload import PRESETS
from gpt2.data.batches import Batches
from gpt2.data.corpora.prepare import prepare
from gpt2.files.cache import DataError
from gpt2.files.lock import Locked, exclusive
from gpt2.model.model import build
from gpt2.pretrain import checkpoint_tensors, rank_main
from gpt2.pretrain import session as sessions
from gpt2.pretrain.anomaly import TrainingStopped
from gpt2.pretrain.checkpoint import CheckpointError, folders, read, seal
from gpt2.pretrain.config import Checkpoints, TrainingRun, load
from gpt2.pretrain.datasets import Source, open_data
from gpt2.pretrain.metrics import Event, Kind, MetricsError, MetricsFile, TensorBoard, WeightsAndBiases
from gpt2.pretrain.metrics import read as read_metrics
from gpt2.pretrain.session import SessionOptions
from gpt2.text import encode
from gpt2.training import distributed
from gpt2.training.stages import environment

pytestmark = pytest.mark.usefixtures("process_settings")


def test_steps_and_evaluations_come_in_order_and_the_last_step_is_looked_at(tmp_path: Path) -> None:
    found = [(event.kind, event.step) for event in events(tiny_run(steps=6), tmp_path)]
    steps = [("step", n) for n in range(1, 7)]
    assert found == [("leg", 0), ("val", 0), *steps[:4], ("val", 4), *steps[4:], ("val", 6)]


@pytest.mark.parametrize("after", [4, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 11))])
def test_a_run_broken_off_and_resumed_learns_bit_for_bit_what_one_that_never_stopped_does(
    after: int, tmp_path: Path
) -> None:
    run = tiny_run()
    first = learned(broken_off(run, tmp_path / "parts", after))
    second = learned(events(run, tmp_path / "parts", resume=True))
    assert first + second == learned(events(run, tmp_path / "whole"))
    assert [row["step"] for row in first if row["kind"] == "step"][-1] == after


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compiled", "accumulated", "bfloat16"])
def test_that_holds_under_other_toggles(name: str, tmp_path: Path) -> None:
    toggles = {
        "compiled": {"compile": "default", "adamw": "compiled", "clip": "in_step", "vocab_multiple": 64},
        "accumulated": {"micro_batch_size": 1, "adamw": "for_loop"},
        "bfloat16": {
            **{"autocast": "bfloat16", "attention": "blocks", "adamw": "compiled", "clip": "in_step"},
            **{"weight_casts": "optimizer", "tied_gradient": "rows", "micro_batch_size": 4},
        },
    }
    run = tiny_run(toggles=toggles[name], steps=8)
    whole = learned(events(run, tmp_path / "whole"))
    first = learned(broken_off(run, tmp_path / "parts", 5))
    assert first + learned(events(run, tmp_path / "parts", resume=True)) == whole


def test_the_validation_loss_is_the_mean_over_the_first_tokens_of_the_corpus(tmp_path: Path) -> None:
    it = session(tiny_run(), tmp_path)
    found = next(event for event in it if event.kind == "val")
    corpus = it.data.validation
    assert corpus is not None
    tokens = torch.from_numpy(corpus.read(0, 257).astype("int64"))
    with torch.no_grad():
        logits = it.training.model.logits(tokens[:-1].view(8, 32)).flatten(0, 1)
    assert found.values["tokens"] == 256
    assert found.values["loss"] == pytest.approx(F.cross_entropy(logits, tokens[1:]).item(), abs=1e-5)


@pytest.mark.parametrize(("steps_of_tokens", "said"), [(59, 0), (60, 1)])
def test_a_validation_as_long_as_twenty_steps_is_announced_once(
    steps_of_tokens: int, said: int, tmp_path: Path
) -> None:
    per_step = tiny_run().toggles.tokens_per_step(32)
    run = tiny_run(evaluation={"val_every": 4, "val_tokens": steps_of_tokens * per_step})
    found = events(run, tmp_path)
    told = [event for event in found if "takes as long as 20 steps" in event.values.get("text", "")]
    assert len(told) == said
    if said:
        assert found.index(told[0]) < [event.kind for event in found].index("val")


def test_validation_leaves_the_training_as_it_is(tmp_path: Path) -> None:
    often = tiny_run(evaluation={"val_every": 1, "val_tokens": 256})
    never = tiny_run(evaluation={"val_every": 0})
    steps = [
        [row for row in learned(events(run, tmp_path / str(n))) if row["kind"] == "step"]
        for n, run in enumerate((often, never))
    ]
    assert steps[0] == steps[1]


def test_the_learning_rate_of_each_step_is_the_schedule_s(tmp_path: Path) -> None:
    run = tiny_run(workload={"lr_decay_steps": 10, "lr_final_fraction": 0.0}, steps=12)
    rates = [event.values["lr"] for event in events(run, tmp_path) if event.kind == "step"]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 3, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7, eta_min=0.0)
    oracle = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[3])
    expected = []
    for _ in range(11):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert rates[:11] == pytest.approx(expected, abs=1e-9)
    assert rates[11] == 0.0


def test_checkpoints_are_kept_when_due_and_at_the_end_and_older_ones_go(tmp_path: Path) -> None:
    it = session(tiny_run(steps=10), tmp_path)
    seen, found = set[int](), []
    for event in it:
        found.append(event)
        seen |= {read(each).step for each in folders(tmp_path / "checkpoints")}
    assert seen == {4, 8}
    left = [read(each).step for each in folders(tmp_path / "checkpoints")]
    assert left[-2:] == [8, 10]
    losses = {event.step: event.values["loss"] for event in found if event.kind == "val"}
    assert min((4, 8, 10), key=losses.__getitem__) in left


class Ticking:
    """In place of the module `time` in gpt2.pretrain.session: with each step half a second passes."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += 0.25
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    clock = Ticking()
    monkeypatch.setattr(sessions, "time", clock)
    return clock


def test_a_leg_ends_before_its_time_is_over_with_a_checkpoint_that_the_next_goes_on_from(
    tmp_path: Path, ticking: Ticking
) -> None:
    run = tiny_run(steps=10_000, evaluation={"val_every": 0}, checkpoints={"every": 0})
    it = session(run, tmp_path, seconds=100.0)  # of which 90 are set aside for the last checkpoint
    steps = sum(event.kind == "step" for event in it)
    assert ticking.now <= 1010.0
    assert 15 <= steps <= 20
    assert it.ended_early is not None
    assert read(folders(tmp_path / "checkpoints")[-1]).step == steps


@pytest.mark.parametrize(
    ("taken", "seconds", "ends"),
    [
        (1, 70.0, True),  # the last checkpoint takes 60
        (1, 100.0, False),
        (2, 100.0, True),  # and before it one is due
        (2, 200.0, False),
    ],
)
def test_a_leg_s_end_is_foreseen_with_the_checkpoints_that_come(
    taken: int, seconds: float, ends: bool, tmp_path: Path, ticking: Ticking
) -> None:
    it = session(tiny_run(evaluation={"val_every": 0}), tmp_path, seconds=seconds)
    assert [next(it).step for _ in range(1 + taken)][-1] == taken
    assert it._should_end() == ends


@pytest.mark.parametrize(("seconds", "ends"), [(150.0, True), (200.0, False)])
def test_a_leg_s_end_is_foreseen_with_evaluations_that_an_earlier_leg_timed(
    seconds: float, ends: bool, tmp_path: Path, ticking: Ticking
) -> None:
    run = tiny_run(evaluation={"val_every": 3, "val_tokens": 256}, checkpoints={"every": 0})
    it = session(run, tmp_path)
    assert [next(it).kind, next(it).kind] == ["leg", "val"]
    it._evaluating_seconds = 50.0
    it.end("asked by the test")
    list(it)
    later = session(run, tmp_path, resume=True, seconds=seconds)
    assert next(later).kind == "leg"
    assert later.training.number == 1  # so that the evaluation before step 3 is near
    assert later._should_end() == ends


def test_what_a_resumed_run_has_otherwise_than_before_is_told(tmp_path: Path) -> None:
    broken_off(tiny_run(), tmp_path, 2)
    other = tiny_run(workload={"lr": 1e-3}, guard={"spike": "stop"})
    found = events(other, tmp_path, resume=True)
    assert notes(found) == ["goes on with workload.lr 0.001, before 0.003; guard.spike stop, before report"]


@pytest.mark.parametrize(
    ("rename", "advice"),
    [(True, "rename it step-00000004, or move it elsewhere"), (False, "move it elsewhere")],
    ids=["renamed", "copied"],
)
def test_a_run_is_not_resumed_beside_a_checkpoint_of_another_step_than_its_name(
    rename: bool, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny_run(steps=4)
    events(run, tmp_path)
    there = tmp_path / "checkpoints" / "step-00000004"
    (there.rename if rename else partial(shutil.copytree, there))(there.with_name("step-00000099"))
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path, resume=True)) == 2
    assert f"step-00000099 is the checkpoint of step 4; {advice}\n" in capsys.readouterr().err


@pytest.mark.parametrize("newest_only", [True, False])
def test_a_checkpoint_copied_without_its_facts_is_refused_and_no_recorded_step_is_lost(
    newest_only: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An older checkpoint in its place, or step 0, would lose the steps since."""
    run = tiny_run(steps=4, checkpoints={"every": 2, "keep": 2})
    events(run, tmp_path)
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path, resume=True)) == 0
    kept = sorted((tmp_path / "checkpoints").iterdir())
    assert [each.name for each in kept] == ["step-00000002", "step-00000004"]
    for each in kept[1:] if newest_only else kept:
        (each / "checkpoint.json").unlink()
    recorded = (tmp_path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path, resume=True)) == 2
    said = f"{kept[1]} holds weights but no checkpoint.json: only a part of it was copied; to go on from"
    assert f"{said} step-00000002, delete {kept[1]}" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == recorded


def test_a_resumed_run_without_a_checkpoint_says_that_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        rank_main.run_rank(tiny_run(steps=1), SessionOptions(folder=tmp_path / "mistyped", resume=True)) == 0
    )
    said = "checkpoints to go on from: the run begins at step 0"
    assert f"there is no checkpoint in {tmp_path / 'mistyped'}/{said}" in capsys.readouterr().err


def test_a_run_resumed_with_other_validation_tokens_says_that_losses_do_not_compare(tmp_path: Path) -> None:
    tokens = torch.arange(4000, dtype=torch.int16).remainder(500).numpy()
    tokens.tofile(tmp_path / "train.bin")
    tokens[:2000].tofile(tmp_path / "val.bin")
    run, source = tiny_run(steps=8, workload={"data": "mine"}), Source(path=tmp_path)
    it = session(replace(run, steps=4), tmp_path / "run", source=source)
    assert not any("other tokens" in str(event.values.get("text")) for event in it)
    tokens[1001:3001].tofile(tmp_path / "val.bin")
    found = events(run, tmp_path / "run", source=source, resume=True)
    assert "validated on other tokens than before: losses before and after do not compare" in notes(found)


def shards(folder: Path, separator: int | None = None) -> Source:
    """The same tokens to train on and to validate on."""
    tokens = torch.arange(4000, dtype=torch.int32).remainder(500).numpy().astype("uint16")
    if separator is not None:
        tokens[::100] = separator
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    return Source(path=folder)


def imported_with_another_vocabulary(folder: Path) -> Path:
    config = PRESETS["mini"]
    weights = {name: each.detach() for name, each in build(config, 0, torch.device("cpu")).named_parameters()}
    checkpoint_tensors.save_weights(folder, config, weights, other_vocabulary=True)
    return folder


@pytest.mark.parametrize("how", ["streamed", "text", "judged by text", "samples"])
def test_weights_of_another_vocabulary_take_no_text(
    how: str, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("To be, or not to be. " * 2000)
    read_as_tokens = shards(tmp_path)
    weights = imported_with_another_vocabulary(tmp_path / "weights")
    evaluation = {"val_every": 4 * (how == "judged by text"), "val_tokens": 256}
    evaluation |= {"sample_every": 4} if how == "samples" else {}
    run = tiny_run(
        workload={"model": "mini", "data": "a"},
        evaluation=evaluation,
        val_corpus=str(text) if how == "judged by text" else None,
    )
    source = Source(path=text, stream=how == "streamed") if how in ("streamed", "text") else read_as_tokens
    with pytest.raises(CheckpointError, match="was imported with a vocabulary that is not GPT-2's"):
        session(run, tmp_path / "run", source=source, begin_from=weights)


def test_what_is_trained_from_weights_of_another_vocabulary_is_known_to_be_of_it(tmp_path: Path) -> None:
    source, weights = shards(tmp_path), imported_with_another_vocabulary(tmp_path / "weights")
    run = tiny_run(steps=1, workload={"model": "mini", "data": "mine"}, evaluation={"val_every": 0})
    events(run, tmp_path / "run", source=source, begin_from=weights)
    events(replace(run, steps=2), tmp_path / "run", source=source, resume=True)
    kept = folders(tmp_path / "run" / "checkpoints")
    assert [(read(each).step, read(each).other_vocabulary) for each in kept] == [(1, True), (2, True)]


def test_an_evaluation_that_the_time_of_a_leg_does_not_hold_is_broken_off(
    tmp_path: Path, ticking: Ticking
) -> None:
    it = session(tiny_run(), tmp_path, seconds=100.0)
    assert next(it).kind == "leg"
    ticking.now += 150.0
    assert list(it) == []
    assert it.ended_early == "of this leg's 0.0278 hours there is time left for a checkpoint only"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "shards"])
def test_a_run_that_was_streamed_is_not_resumed_from_shards_nor_one_from_shards_streamed(
    stream: bool, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 2000)
    list(prepare(str(tmp_path / "a.txt"), tmp_path / "shards", processes=1))
    sources = [Source(path=tmp_path / "shards"), Source(path=tmp_path / "a.txt", stream=True)]
    run = tiny_run(steps=1, workload={"model": "mini", "data": "a"})
    events(run, tmp_path / "run", source=sources[stream])
    said = "on a stream of documents so far: say" if stream else "on shards so far: leave out"
    with pytest.raises(DataError, match=f"this run was trained {said} --stream"):
        session(run, tmp_path / "run", source=sources[not stream], resume=True)


def test_shards_are_trained_on_where_no_cache_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shards(tmp_path, separator=50256)
    monkeypatch.setenv("GPT2_CACHE_DIR", "/proc/nowhere")
    run = tiny_run(steps=1, workload={"model": "mini", "data": "mine"}, evaluation={"val_every": 0})
    assert events(run, tmp_path / "run", source=source)[-1].step == 1


def test_a_step_that_is_not_finite_ends_the_run_and_says_which(tmp_path: Path) -> None:
    it = session(tiny_run(evaluation={"val_every": 0}), tmp_path)
    assert [next(it).step for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    it.training.model.ln_f.weight.data.fill_(math.nan)
    said = next(it)
    assert (said.kind, said.step) == ("note", 6)
    assert said.values["text"].startswith("step 6: loss nan")
    with pytest.raises(TrainingStopped, match="step 6: loss nan"):
        next(it)


def test_a_step_passed_over_leaves_the_weights_and_is_told(tmp_path: Path) -> None:
    it = session(tiny_run(guard={"not_finite": "skip"}, evaluation={"val_every": 0}), tmp_path)
    assert [next(it).step for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    model = it.training.model
    before, spoilt = model.wte.weight.detach().clone(), model.ln_f.weight.detach().clone()
    model.ln_f.weight.data.fill_(math.nan)
    assert math.isnan(next(it).values["loss"])
    assert torch.equal(model.wte.weight, before)
    model.ln_f.weight.data.copy_(spoilt)
    note, *rest = it
    assert (note.kind, note.step, "passed over" in note.values["text"]) == ("note", 6, True)
    assert math.isfinite(rest[-1].values["loss"])


@pytest.mark.slow
def test_a_run_goes_on_under_other_toggles(tmp_path: Path) -> None:
    run = tiny_run(steps=8)
    whole = learned(events(run, tmp_path / "whole"))
    broken_off(run, tmp_path / "parts", 4)
    other = with_toggles(run, vocab_multiple=64, attention="sdpa", micro_batch_size=4, grad_accum_steps=1)
    said, *second = learned(events(other, tmp_path / "parts", resume=True))
    assert (said["kind"], said["step"]) == ("note", 4)
    assert "toggles.vocab_multiple 64, before 1" in said["text"]
    assert "workload" not in said["text"]
    for mine, theirs in zip(second, whole[-len(second) :], strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


def test_where_the_newest_checkpoint_is_damaged_it_is_said_how_to_go_on_from_the_one_before(
    tmp_path: Path,
) -> None:
    run = tiny_run(steps=8)
    events(run, tmp_path)
    before, newest = folders(tmp_path / "checkpoints")
    next(newest.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=rf"is missing; to go on from {before.name}, delete {newest}$"):
        session(run, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 7}, "workload.seed 1337, now it is 7"),
        ({"seq_len": 64}, "workload.seq_len 32, now it is 64"),
        ({"tokens_per_step": 256}, "workload.tokens_per_step 128, now it is 256"),
    ],
)
def test_a_run_that_would_train_on_other_batches_is_not_gone_on_with(
    changes: dict[str, int], said: str, tmp_path: Path
) -> None:
    broken_off(tiny_run(), tmp_path, 2)
    with pytest.raises(CheckpointError, match=said):
        session(tiny_run(workload=changes), tmp_path, resume=True)


def test_a_run_begins_from_the_weights_of_another(tmp_path: Path) -> None:
    first = session(tiny_run(steps=4), tmp_path / "first")
    last = list(first)[-1]
    second = events(
        tiny_run(steps=1), tmp_path / "second", begin_from=folders(tmp_path / "first/checkpoints")[-1]
    )
    assert second[1].values["loss"] == last.values["loss"]
    assert second[1].step == 0


def test_a_run_tells_whose_weights_it_began_with_after_it_was_resumed_too(tmp_path: Path) -> None:
    events(tiny_run(steps=4), tmp_path / "first")
    weights = folders(tmp_path / "first/checkpoints")[-1]
    begun = events(tiny_run(steps=1), tmp_path / "second", begin_from=weights)
    resumed = events(tiny_run(steps=2), tmp_path / "second", resume=True)
    assert [found[0].values["begun_from"] for found in (begun, resumed)] == [str(weights)] * 2
    assert read(folders(tmp_path / "second/checkpoints")[-1]).begun_from == str(weights)
    assert read(weights).begun_from == ""


def test_a_run_with_checkpoints_says_that_it_does_not_begin_from_others(tmp_path: Path) -> None:
    events(tiny_run(steps=4), tmp_path)
    (begin_from,) = folders(tmp_path / "checkpoints")
    found = events(tiny_run(steps=4), tmp_path, resume=True, begin_from=begin_from)
    assert any("--init-from" in note for note in notes(found))


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_that_is_to_end_while_it_is_evaluated_ends_then_with_a_checkpoint(
    step: int, tmp_path: Path
) -> None:
    run = tiny_run(steps=8, evaluation={"val_every": 4, "val_tokens": 1024})
    whole = learned(events(run, tmp_path / "whole"))
    it, passes = session(run, tmp_path / "parts"), 0
    assert it.evaluations.validation
    rows = it.evaluations.validation._mine

    def counted() -> Iterator[Any]:
        nonlocal passes
        for row in rows():
            if it.training.number == step:
                it.end("asked by the test")
            passes += 1
            yield row

    it.evaluations.validation._mine = counted  # type: ignore[method-assign]
    first = learned(list(it))
    assert passes % it.evaluations.validation.passes > 0  # it was not made to its end
    (kept,) = [read(each) for each in folders(tmp_path / "parts/checkpoints") if read(each).step == step]
    assert (kept.evaluated, kept.val_loss) == (False, None)
    assert first + learned(events(run, tmp_path / "parts", resume=True)) == whole


def test_a_checkpoint_is_gone_on_from_that_a_killed_process_was_putting_in_its_place(tmp_path: Path) -> None:
    run = tiny_run(steps=6)
    whole = learned(events(run, tmp_path / "whole"))
    first = learned(broken_off(run, tmp_path / "parts", 6))
    kept = folders(tmp_path / "parts/checkpoints")[-1]
    torn = kept.with_name(f"{kept.name}-00000000.part")
    torn.mkdir()  # of the one that is to come, which is not whole
    kept.rename(kept.with_name(f"{kept.name}-0123abcd.part"))
    assert first + learned(events(run, tmp_path / "parts", resume=True)) == whole
    assert read(kept).evaluated
    assert not [each for each in kept.parent.iterdir() if each.suffix == ".part"]


def test_a_checkpoint_that_holds_what_cannot_be_removed_is_replaced_all_the_same(
    tmp_path: Path, small_disk: Path
) -> None:
    run = tiny_run(steps=6)
    broken_off(run, tmp_path / "parts", 6)
    kept = folders(tmp_path / "parts/checkpoints")[-1]
    (kept / "export").mkdir()
    mounted = ["mount", "--bind", str(small_disk), str(kept / "export")]
    subprocess.run(mounted, check=True)
    try:
        events(run, tmp_path / "parts", resume=True)
        assert read(folders(tmp_path / "parts/checkpoints")[-1]).evaluated
    finally:
        for place in (tmp_path / "parts/checkpoints").glob("*/export"):
            subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_checkpoint_whose_place_cannot_be_taken_leaves_the_one_before(tmp_path: Path) -> None:
    run = tiny_run(steps=6)
    broken_off(run, tmp_path / "parts", 6)
    kept = folders(tmp_path / "parts/checkpoints")[-1]
    with pytest.raises(FileNotFoundError):
        seal(tmp_path / "parts/checkpoints/not-there", kept, read(kept), replace=True)
    assert read(kept).step == 6
    assert not [each for each in kept.parent.iterdir() if each.suffix == ".part"]


def test_a_run_that_was_broken_off_in_its_last_step_is_evaluated_and_kept_when_resumed(
    tmp_path: Path,
) -> None:
    run = tiny_run(steps=6)
    whole = learned(events(run, tmp_path / "whole"))
    first = learned(broken_off(run, tmp_path / "parts", 6))
    assert read(folders(tmp_path / "parts/checkpoints")[-1]).val_loss is None
    assert first + learned(events(run, tmp_path / "parts", resume=True)) == whole
    kept = read(folders(tmp_path / "parts/checkpoints")[-1])
    assert (kept.step, kept.evaluated, kept.val_loss) == (6, True, whole[-1]["loss"])
    assert learned(events(run, tmp_path / "parts", resume=True)) == []


@pytest.mark.parametrize("micro_batches", [6, 7])
def test_where_no_batch_comes_any_more_what_was_learnt_is_kept_first(
    micro_batches: int, tmp_path: Path
) -> None:
    run = tiny_run(steps=8, checkpoints={"every": 0})
    whole = learned(events(run, tmp_path / "whole"))

    def cut_off(items: Iterator[Any]) -> Iterator[Any]:
        yield from itertools.islice(items, micro_batches)
        raise DataError("the network is gone")

    it, first = session(run, tmp_path / "parts"), []
    it.waiting._items = cut_off(it.waiting._items)
    with pytest.raises(DataError, match="the network is gone"):
        first.extend(it)
    assert [read(each).step for each in folders(tmp_path / "parts/checkpoints")] == [3]
    assert learned(first) + learned(events(run, tmp_path / "parts", resume=True)) == whole


@pytest.mark.parametrize("name", ["v #2", "null", "2024", "yes", "a: b", "- c"])
def test_the_option_for_validation_is_a_path_and_no_yaml(name: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("{steps: 3, workload: {model: tiny, seq_len: 32}, val_corpus: another}")
    assert load(str(file), val_corpus=name).val_corpus == name


def test_where_the_validation_text_fails_what_was_learnt_is_kept_first(tmp_path: Path) -> None:
    run = tiny_run(steps=6, checkpoints={"every": 0}, evaluation={"val_every": 6, "val_tokens": 256})
    whole = learned(events(run, tmp_path / "whole"))
    it = session(run, tmp_path / "parts")
    genuine = it.evaluations.at

    def at(step: int, to_end: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        if step == 6:
            raise DataError("val.bin changed since it was opened")
        return genuine(step, to_end)

    it.evaluations.at = at
    first = list[Event]()
    with pytest.raises(DataError, match=r"val\.bin changed"):
        first.extend(it)
    kept = read(folders(tmp_path / "parts/checkpoints")[-1])
    assert (kept.step, kept.evaluated) == (6, False)
    assert learned(first) + learned(events(run, tmp_path / "parts", resume=True)) == whole


def test_the_wait_for_the_loader_is_told(tmp_path: Path) -> None:
    steps = [event for event in events(tiny_run(), tmp_path) if event.kind == "step"]
    assert all(0 <= event.values["wait_seconds"] < event.values["seconds"] for event in steps)


def test_a_resumed_run_s_metrics_are_no_condition(tmp_path: Path) -> None:
    written(tmp_path, events(tiny_run(steps=4), tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    assert MetricsFile(tmp_path, step=4).set_aside is None
    (tmp_path / "metrics.jsonl").write_text("{\n" * 3)
    assert MetricsFile(tmp_path, step=4).set_aside == tmp_path / "metrics-before.jsonl"


def test_metrics_that_lack_steps_before_the_checkpoint_are_gone_on_with(tmp_path: Path) -> None:
    written(tmp_path, events(tiny_run(steps=4), tmp_path))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:4]))
    assert MetricsFile(tmp_path, step=4).set_aside is None
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:4])


def test_metrics_of_two_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [Event(kind="step", step=step) for step in (1, 2)])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(MetricsError, match=r"metrics.jsonl: line 3 has step 1 after step 2: it holds"):
        list(read_metrics(tmp_path))


@pytest.mark.parametrize(("mode", "remedy"), [(None, "; WANDB_MODE=offline needs no key"), ("offline", "")])
def test_what_wandb_refuses_is_one_line_and_names_the_offline_mode_where_none_is_set(
    mode: str | None, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise ValueError("1 validation error\n  project\n    is invalid")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    with pytest.raises(MetricsError) as caught:
        WeightsAndBiases(tmp_path, "name", {}, "id")
    assert str(caught.value) == f"Weights & Biases: 1 validation error project is invalid{remedy}"


def test_metrics_that_no_checkpoint_goes_on_from_are_set_aside_and_not_lost(tmp_path: Path) -> None:
    written(tmp_path, events(tiny_run(steps=4), tmp_path))
    before = (tmp_path / "metrics.jsonl").read_text()
    assert MetricsFile(tmp_path).set_aside == tmp_path / "metrics-before.jsonl"
    assert (tmp_path / "metrics-before.jsonl").read_text() == before
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_file_called_like_metrics_that_are_being_written_stays(tmp_path: Path) -> None:
    (tmp_path / "metrics.part").write_text("mine")
    MetricsFile(tmp_path).close()
    assert (tmp_path / "metrics.part").read_text() == "mine"


def test_metrics_that_are_set_aside_take_the_place_of_no_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "metrics-before-2.jsonl").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("{\n" * 3)
    MetricsFile(tmp_path).close()
    (tmp_path / "metrics.jsonl").write_text("{\n" * 3)
    MetricsFile(tmp_path).close()
    assert (tmp_path / "metrics-before-2.jsonl").read_text() == "mine"


def test_evaluations_that_are_made_again_are_not_kept_twice(tmp_path: Path) -> None:
    kinds: tuple[Kind, ...] = ("step", "val", "sample", "note")
    written(tmp_path, [Event(kind=kind, step=step) for step in (3, 4, 5) for kind in kinds])
    MetricsFile(tmp_path, step=4, evaluated=False).close()
    found = [(event.kind, event.step) for event in read_metrics(tmp_path)]
    assert found == [*((kind, 3) for kind in kinds), ("step", 4), ("note", 4)]


def test_what_is_no_number_is_null_in_the_metrics(tmp_path: Path) -> None:
    written(tmp_path, [Event(kind="step", step=1, values={"loss": math.nan, "grad_norm": math.inf})])
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["loss"], row["grad_norm"]) == (None, None)


def test_validation_holds_one_forward_pass_at_a_time(tmp_path: Path) -> None:
    it = session(tiny_run(evaluation={"val_every": 4, "val_tokens": 1024}), tmp_path)
    assert it.evaluations.validation is not None
    alive = 0
    forward = it.training.model.forward

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            nonlocal alive
            alive += 1
            weakref.finalize(context, lower)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient

    def lower() -> None:
        nonlocal alive
        alive -= 1

    most = []

    def watched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        most.append(alive)
        return Kept.apply(forward(x, y))  # type: ignore[return-value]

    it.training.model.forward = watched  # type: ignore[method-assign]
    it.evaluations.validation.loss()
    assert most == [0] * it.evaluations.validation.passes


def test_resuming_where_nothing_was_kept_begins_the_run(tmp_path: Path) -> None:
    assert events(tiny_run(steps=1), tmp_path, resume=True)[0].values["resumed_from"] is None


def written(folder: Path, found: list[Event]) -> None:
    files = MetricsFile(folder)
    for event in found:
        files.write(event)
    files.close()


CONFIG = """
name: test
steps: 40
workload: {model: tiny, seq_len: 32, tokens_per_step: 128, lr: 3.0e-3}
toggles: {micro_batch_size: 2, adamw: fused, threads: 1}
evaluation: {val_every: 10, val_tokens: 256}
checkpoints: {every: 3, keep: 2}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "test.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_main, "_heed_signals", lambda session: contextlib.nullcontext(lambda: False))


def rows(folder: Path) -> list[dict[str, object]]:
    return learned(list(read_metrics(folder)))


KILLED = """
import os, signal, sys
from gpt2.cli import main
from gpt2.pretrain import checkpoint_tensors
from gpt2.pretrain.metrics import MetricsFile

kind, count, seconds = sys.argv.pop(1), int(sys.argv.pop(1)), float(sys.argv.pop(1))

def counted(genuine, now):
    def called(*arguments, **options):
        global count
        count -= 1
        if not count:
            now()
        return genuine(*arguments, **options)
    return called

if kind == "checkpoint":
    checkpoint_tensors.seal = counted(checkpoint_tensors.seal, lambda: os.kill(os.getpid(), signal.SIGKILL))
else:
    MetricsFile.write = counted(MetricsFile.write, lambda: signal.setitimer(signal.ITIMER_PROF, seconds))
main.main()
"""
"""`gpt2` that dies while it seals its checkpoint of that number, or some seconds of processor time after as
many lines of metrics, by a signal that nobody heeds: at the same point however busy the machine is.
"""


def killed(run: TrainingRun, kind: str, count: int, seconds: float, *arguments: str | Path) -> int:
    """The exit code of a `gpt2` that dies; see KILLED."""
    words = [sys.executable, "-c", KILLED, kind, str(count), str(seconds), *map(str, arguments)]
    environ = {**os.environ, **environment(run.toggles), "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=environ, capture_output=True, timeout=600, check=False).returncode


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_losses(
    config: Path, tmp_path: Path, no_signals: None
) -> None:
    run = load(str(config))
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "whole")) == 0
    chance = random.Random(6)
    again = ("train", config, "--out", tmp_path / "parts", "--resume")
    kills = 0
    while (code := killed(run, "line", chance.randint(8, 16), chance.uniform(0, 0.03), *again)) != 0:
        assert code == -signal.SIGPROF
        kills += 1
    assert kills >= 3
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_killed_while_a_checkpoint_is_being_written_goes_on_from_the_one_before(
    config: Path, tmp_path: Path, no_signals: None
) -> None:
    run = load(str(config))
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "whole")) == 0
    place = tmp_path / "parts" / "checkpoints"
    assert killed(run, "checkpoint", 3, 0, "train", config, "--out", tmp_path / "parts") == -signal.SIGKILL
    assert list(place.glob("*.part/*.safetensors"))
    assert read(folders(place)[-1]).step == 6
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "parts", resume=True)) == 0
    assert not list(place.glob("*.part"))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param([signal.SIGINT], marks=pytest.mark.slow),
        [signal.SIGINT] * 2,
        pytest.param([signal.SIGTERM, signal.SIGHUP], marks=pytest.mark.slow),
    ],
)
def test_signals_end_a_run_in_order_with_a_checkpoint_though_several_come_together(
    numbers: list[signal.Signals], config: Path, tmp_path: Path
) -> None:
    config.write_text(CONFIG.replace("steps: 40", "steps: 100000").replace("every: 3", "every: 0"))
    process = command("train", config, "--out", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and sum(1 for _ in metrics.open()) > 5, process)
    process.send_signal(numbers[0])
    lines = process.stderr
    assert lines
    until(lambda: "ending after this step" in lines.readline(), process)
    for number in numbers[1:]:  # while the checkpoint is written, if not before
        process.send_signal(number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    (kept,) = folders(tmp_path / "run" / "checkpoints")
    steps = [event.step for event in read_metrics(tmp_path / "run") if event.kind == "step"]
    assert read(kept).step == steps[-1]
    assert "--resume goes on" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_metrics_that_cannot_be_written_end_the_run_in_order_with_a_checkpoint(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Filling(MetricsFile):
        def write(self, event: Event) -> None:
            if event.step == 2:
                self._file = Path("/dev/full").open("w")  # noqa: SIM115
            super().write(event)

    monkeypatch.setattr(rank_main, "MetricsFile", Filling)
    assert rank_main.run_rank(tiny_run(steps=6), SessionOptions(folder=tmp_path)) == 6
    assert f"cannot write {tmp_path} (No space left on device)" in capsys.readouterr().err
    assert [read(each).step for each in folders(tmp_path / "checkpoints")] == [3]
    assert [event.step for event in read_metrics(tmp_path) if event.kind == "step"] == [1]


def test_a_disk_that_is_full_from_the_start_is_one_line_and_no_traceback(
    config: Path, small_disk: Path
) -> None:
    with contextlib.suppress(OSError):
        (small_disk / "other").write_bytes(bytes(2**24))
    process = command("train", config, "--out", small_disk / "run")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 2, said
    assert said == f"gpt2: cannot write {small_disk}/run/run.json (No space left on device)\n"


def test_a_copy_of_the_metrics_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Gone(TensorBoard):
        def __init__(self) -> None:
            self.taken = 0

        def write(self, event: Event) -> None:
            self.taken += 1
            raise OSError("the network is gone")

        def close(self, *, failed: bool = False) -> None:
            raise OSError("still gone")

    gone, made = Gone(), rank_main._sinks
    monkeypatch.setattr(rank_main, "_sinks", lambda *args, **more: [*made(*args, **more), gone])
    assert rank_main.run_rank(tiny_run(steps=3), SessionOptions(folder=tmp_path)) == 0
    assert gone.taken == 1
    assert (
        "Gone takes no more events (the network is gone); the run goes on without" in capsys.readouterr().err
    )
    assert [event.step for event in read_metrics(tmp_path) if event.kind == "step"] == [1, 2, 3]


def test_a_second_run_in_the_same_folder_is_refused(config: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("a line of another run\n")
    process = command("train", config, "--out", tmp_path / "run")
    _, said = process.communicate()
    assert (process.returncode, len(said.strip().splitlines())) == (2, 1), said
    assert "--resume goes on with it" in said


@pytest.mark.parametrize(("started", "wanted"), [pytest.param("8", "1", marks=pytest.mark.slow), ("1", "2")])
def test_ranks_that_somebody_started_and_nobody_asked_for_are_refused(
    started: str, wanted: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", started)
    process = command("train", config, "--out", tmp_path / "run", "--set", f"toggles.world_size={wanted}")
    _, said = process.communicate(timeout=600)
    assert (process.returncode, len(said.strip().splitlines())) == (2, 1), said
    assert f"set toggles.world_size={started}" in said


@pytest.mark.slow
def test_ranks_of_a_launcher_that_does_not_say_which_is_which_are_told_so_in_one_line(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    process = command("train", config, "--out", tmp_path / "run", "--set", "toggles.world_size=2")
    _, said = process.communicate(timeout=600)
    assert (process.returncode, len(said.strip().splitlines())) == (2, 1), said
    assert "RANK expected" in said


@pytest.mark.slow
def test_two_runs_never_write_to_one_folder(config: Path, tmp_path: Path) -> None:
    config.write_text(CONFIG.replace("steps: 40", "steps: 100000"))
    first = command("train", config, "--out", tmp_path / "run")
    until((tmp_path / "run" / "metrics.jsonl").exists, first)
    second = command("train", config, "--out", tmp_path / "run", "--resume")
    _, said = second.communicate()
    first.kill()
    assert (second.returncode, len(said.strip().splitlines())) == (2, 1), said
    assert "another gpt2 train is writing to" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "no configuration 'nosuch'"),
        (["tiny", "--set", "toggles.devcie=cpu"], "unknown key 'devcie'; did you mean 'device'?"),
        (["tiny", "--set", "steps=0"], "steps 0 is less than 1"),
        (["tiny", "--set", "steps"], "should be PATH=VALUE"),
        (["tiny", "--set", "workload.data=nowhere", "--set", "workload.model=gpt2"], "corpus 'nowhere'"),
        (["tiny", "--set", "toggles.device=cuda"], "cuda"),
        (["tiny", "--init-from", "nowhere"], "nowhere is no folder"),
    ],
)
def test_what_a_user_got_wrong_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(load("tiny").toggles).items():
        monkeypatch.setenv(name, value)  # else it would begin anew, in place of this process
    done = CliRunner().invoke(app, ["train", *arguments, "--out", str(tmp_path / "run")])
    assert (done.exit_code, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "compile"),
    [("none", "eager"), ("none", "default"), ("zero1", "eager"), ("zero2", "eager"), ("fsdp2", "eager")],
)
def test_a_run_goes_on_on_another_number_of_ranks(sharding: str, compile: str, tmp_path: Path) -> None:
    common = settings("workload.seq_len=32", "workload.tokens_per_step=128", "toggles.micro_batch_size=1")
    common += settings("steps=8", "checkpoints.every=4", "checkpoints.keep=9")
    common += settings("evaluation.val_tokens=256", "evaluation.val_every=4")
    two = settings("toggles.world_size=2", f"toggles.sharding={sharding}", f"toggles.compile={compile}")
    # The compiled one without accumulation, as on eight GPUs: DDP's graph is static then.
    two += settings(
        "toggles.vocab_multiple=64", f"toggles.micro_batch_size={2 if compile == 'default' else 1}"
    )

    def finished(*arguments: str | Path) -> None:
        process = command("train", "tiny", *common, *arguments)
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said

    finished("--out", tmp_path / "one")
    for before, after, name in (((), two, "one to two"), (two, (), "two to one")):
        finished(*before, "--out", tmp_path / name)
        newest = folders(tmp_path / name / "checkpoints")[-1]
        assert read(newest).step == 8
        shutil.rmtree(newest)
        finished(*after, "--out", tmp_path / name, "--resume")
        found, expected = (
            [row for row in rows(tmp_path / each) if row["kind"] in ("step", "val")] for each in (name, "one")
        )
        assert [row["step"] for row in found] == [row["step"] for row in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-4)


def test_events_are_json_that_pandas_reads(config: Path, tmp_path: Path, no_signals: None) -> None:
    import pandas as pd

    run = load(str(config), ["steps=4"])
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "run")) == 0
    table = pd.read_json(tmp_path / "run" / "metrics.jsonl", lines=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert list(table["kind"]) == [line["kind"] for line in lines]
    steps = table[table["kind"] == "step"]
    assert list(steps["loss"]) == pytest.approx([line["loss"] for line in lines if line["kind"] == "step"])


# --- folders


@pytest.mark.parametrize("log", [None, ""], ids=["no metrics", "empty metrics"])
def test_a_new_run_does_not_go_into_a_folder_with_checkpoints(
    log: str | None, tmp_path: Path, no_signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    events(tiny_run(steps=8), tmp_path)
    if log is not None:
        (tmp_path / "metrics.jsonl").write_text(log)
    before = [each.name for each in folders(tmp_path / "checkpoints")]
    assert rank_main.run_rank(tiny_run(steps=2), SessionOptions(folder=tmp_path)) == 2
    assert "has a run already: --resume goes on with it" in capsys.readouterr().err
    assert [each.name for each in folders(tmp_path / "checkpoints")] == before


@pytest.mark.parametrize("content", ["", "{", "[]", '\ufeff{"id": "known"}', '{"id": 7}'])
def test_a_run_goes_on_though_what_it_says_of_itself_is_damaged(
    content: str, tmp_path: Path, no_signals: None
) -> None:
    assert rank_main.run_rank(tiny_run(steps=2), SessionOptions(folder=tmp_path)) == 0
    (tmp_path / "run.json").write_text(content, encoding="utf-8")
    assert rank_main.run_rank(tiny_run(steps=4), SessionOptions(folder=tmp_path, resume=True)) == 0
    found = json.loads((tmp_path / "run.json").read_text())["id"]
    assert found == "known" if "known" in content else len(found) == 32


def test_a_run_beyond_the_steps_asked_for_says_so(
    tmp_path: Path, no_signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    rank_main.run_rank(tiny_run(steps=4), SessionOptions(folder=tmp_path))
    capsys.readouterr()
    assert rank_main.run_rank(tiny_run(steps=3), SessionOptions(folder=tmp_path, resume=True)) == 0
    assert "nothing to do: the run is at step 4, beyond the 3 that are asked for" in capsys.readouterr().err
    assert json.loads((tmp_path / "run.json").read_text())["run"]["steps"] == 4


def test_a_run_whose_folder_is_moved_says_so_and_keeps_what_it_learnt(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    genuine = MetricsFile.write

    def moving(self: MetricsFile, event: Event) -> None:
        genuine(self, event)
        if (event.kind, event.step) == ("step", 5):
            (tmp_path / "here").rename(tmp_path / "there")

        if (event.kind, event.step) == ("step", 7):  # nobody else may write into either folder
            for folder in ("here", "there"):
                with pytest.raises(Locked), exclusive(tmp_path / folder):
                    pass

    monkeypatch.setattr(MetricsFile, "write", moving)
    assert rank_main.run_rank(tiny_run(steps=8), SessionOptions(folder=tmp_path / "here")) == 0
    assert capsys.readouterr().err.count("here was moved or removed") == 1
    assert [read(each).step for each in folders(tmp_path / "here/checkpoints")] == [8]
    assert [event.step for event in read_metrics(tmp_path / "there") if event.kind == "step"] == list(
        range(1, 9)
    )


def test_a_run_whose_folder_is_moved_as_a_checkpoint_appears_goes_on(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    genuine = sessions.prune

    def moving(root: Path, keep: int) -> None:
        if not (tmp_path / "there").exists():
            (tmp_path / "here").rename(tmp_path / "there")
        genuine(root, keep)

    monkeypatch.setattr(sessions, "prune", moving)
    run = replace(tiny_run(steps=8), checkpoints=Checkpoints(every=4))
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "here")) == 0
    assert "here was moved or removed" in capsys.readouterr().err
    assert [read(each).step for each in folders(tmp_path / "there/checkpoints")] == [4]
    assert [read(each).step for each in folders(tmp_path / "here/checkpoints")] == [8]


def test_a_file_that_fails_within_a_run_is_one_line_with_the_newest_checkpoint(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise OSError(116, "Stale file handle", "/mnt/far")

    monkeypatch.setattr(sessions, "prune", failing)
    assert rank_main.run_rank(tiny_run(steps=8), SessionOptions(folder=tmp_path / "here")) == 6
    last = capsys.readouterr().err.splitlines()[-1]
    kept = folders(tmp_path / "here/checkpoints")[-1]
    assert last == f"gpt2: /mnt/far: Stale file handle; {kept} is the newest checkpoint"


def test_a_run_whose_folder_is_moved_with_its_last_checkpoint_ends_well(
    tmp_path: Path, no_signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sessions, "prune", lambda *_: (tmp_path / "here").rename(tmp_path / "there"))
    run = replace(tiny_run(steps=8), checkpoints=Checkpoints(every=0))
    assert rank_main.run_rank(run, SessionOptions(folder=tmp_path / "here")) == 0
    assert [read(each).step for each in folders(tmp_path / "there/checkpoints")] == [8]
    assert "all 8 steps are done" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "gone"), [(FileNotFoundError(), True), (OSError(116, "stale"), False)])
def test_a_folder_is_moved_only_where_the_file_system_says_so(
    error: OSError, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "stat", stat)
    assert rank_main._is_gone(tmp_path) is gone


def test_shards_whose_names_are_no_utf_8_are_trained_on(tmp_path: Path) -> None:
    for name in (b"train_\xff.bin", b"val_\xff.bin"):
        path = os.path.join(os.fsencode(tmp_path), name)
        torch.arange(2000 + len(name), dtype=torch.int16).remainder(500).numpy().tofile(os.fsdecode(path))
    run = tiny_run(steps=1, workload={"data": "mine"})
    place = SessionOptions(folder=tmp_path / "run", source=Source(path=tmp_path))
    assert rank_main.run_rank(run, place) == 0
    found = notes(list(read_metrics(tmp_path / "run")))
    assert any(r"train_\xff.bin" in note for note in found)


def test_no_checkpoint_is_kept_once_what_is_streamed_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(batches: Batches) -> None:
        raise DataError("mine.jsonl changed while it was read")

    monkeypatch.setattr(Batches, "check_unchanged", changed)
    with pytest.raises(DataError, match=r"mine\.jsonl changed"):
        events(tiny_run(steps=4), tmp_path)
    assert not folders(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ((("another sha256", None), None), "rank 1 would train or validate on other data than rank 0"),
        ((None, "no such folder"), "rank 1 cannot open the data: no such folder"),
    ],
    ids=["other data", "none"],
)
def test_a_rank_with_other_data_than_the_first_or_none_is_named_on_all(
    told: tuple, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "gather", lambda mine, _: [mine, told])
    with pytest.raises(DataError, match=complaint):
        events(tiny_run(steps=1), tmp_path)


def test_a_folder_whose_checkpoints_nobody_could_read_is_refused(
    tmp_path: Path, no_signals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = SessionOptions(folder=Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xe9")))
    assert rank_main.run_rank(tiny_run(steps=2), place) == 2
    assert r"r\xe9 is no UTF-8" in capsys.readouterr().err
    assert not place.folder.exists()


def test_validation_on_the_very_tokens_that_are_trained_on_is_told(tmp_path: Path) -> None:
    run = tiny_run(steps=1, workload={"data": "mine"})
    found = notes(events(run, tmp_path / "run", source=shards(tmp_path)))
    assert any("val.bin holds the very bytes of train.bin" in note for note in found)


@pytest.mark.parametrize(("documents", "told"), [(1, True), (20, True), (400, False)])
def test_a_prepared_corpus_shorter_than_a_step_is_told_of_one_document_and_of_many(
    documents: int, told: bool, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "To be, or not to be."}\n' * documents)
    list(prepare(str(tmp_path / "a.jsonl"), tmp_path / "shards", val_tokens=2, processes=1))
    shape = {"model": "mini", "data": "a", "seq_len": 4, "tokens_per_step": 1024}
    run = tiny_run(workload=shape, evaluation={"val_every": 0, "sample_every": 0})
    found = open_data(run, Source(path=tmp_path / "shards")).notes
    assert any("sequences repeat within a step" in note for note in found) is told


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "prepared"])
def test_validation_on_the_very_text_that_is_trained_on_is_told(
    stream: bool, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    """The shards differ, since they are cut from the text in different ways."""
    text = tmp_path / "a.txt"
    text.write_text("To be, or not to be. " * 2000)
    source = Source(path=text, stream=True)
    if not stream:
        list(prepare(str(text), tmp_path / "shards", val_corpus=str(text), val_tokens=2000, processes=1))
        source = Source(path=tmp_path / "shards")
    run = tiny_run(workload={"model": "mini", "data": "a"}, val_corpus=str(text) if stream else None)
    found = open_data(run, source).notes
    assert any(note.startswith("a.txt: trained on and validated on") for note in found)


def test_a_streamed_file_that_changes_ends_the_run_and_names_the_checkpoint_that_is_kept(
    tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    text = tmp_path / "a.txt"
    text.write_text("To be, or not to be. " * 2000)
    few = {"evaluation": {"val_every": 0, "sample_every": 0}, "checkpoints": {"every": 2}}
    run = tiny_run(steps=8, workload={"model": "mini", "data": "a"}, **few)
    it = session(run, tmp_path / "run", source=Source(path=text, stream=True))
    while next(it).step < 3:
        continue
    text.write_text("Or not to be. " * 3000)
    with pytest.raises(DataError, match=r"changed while it was read.*, --resume goes on from step-00000002"):
        list(it)
    assert [each.name for each in folders(tmp_path / "run" / "checkpoints")] == ["step-00000002"]


@pytest.mark.parametrize(("spared", "told"), [(500, True), (2000, False)])
def test_validation_on_first_tokens_that_another_preparation_trains_on_is_told(
    spared: int, told: bool, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    """Both are cut from the beginning of one text, of which the trained one spares less than the other."""
    text = tmp_path / "a.txt"
    text.write_text("To be, or not to be. " * 2000)
    for name, tokens in (("judged", 1000), ("trained", spared)):
        list(prepare(str(text), tmp_path / name, val_tokens=tokens, processes=1))
    run = tiny_run(workload={"model": "mini", "data": "a"}, val_corpus=str(tmp_path / "judged"))
    found = open_data(run, Source(path=tmp_path / "trained")).notes
    assert any(note.startswith("a.txt: trained on and validated on") for note in found) is told


@pytest.mark.parametrize("other", ["b.txt", None])
def test_validation_on_another_text_or_another_part_of_it_is_not_odd(
    other: str | None, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 2000)
    (tmp_path / "b.txt").write_text("That is the question. " * 2000)
    run = tiny_run(
        workload={"model": "mini", "data": "a"}, val_corpus=str(tmp_path / other) if other else None
    )
    found = open_data(run, Source(path=tmp_path / "a.txt", stream=True)).notes
    assert not any("validated on, so" in note for note in found)


@pytest.mark.parametrize(("name", "meant"), [("a_val.txt", "validation"), ("test.txt", "tests")])
def test_a_streamed_file_that_is_for_another_split_by_its_name_is_told(
    name: str, meant: str, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    (tmp_path / name).write_text("To be, or not to be. " * 2000)
    run = tiny_run(workload={"model": "mini", "data": "a"})
    found = open_data(run, Source(path=tmp_path / name, stream=True)).notes
    assert f"{name} is trained on, which by its name is for {meant}" in found


@pytest.mark.parametrize("named", ["./judge", "judge", "{here}/judge"])
def test_texts_that_are_here_are_judged_by_and_not_a_corpus_of_their_name(
    named: str, tmp_path: Path, own_cache: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "y.txt").write_text("To be, or not to be. " * 100)
    (tmp_path / "elsewhere.txt").write_text("noise " * 2000)
    list(prepare(str(tmp_path / "elsewhere.txt"), own_cache / "corpora" / "judge", processes=1))
    monkeypatch.chdir(tmp_path)
    run = tiny_run(workload={"model": "mini", "data": "synthetic"}, val_corpus=named.format(here=tmp_path))
    validation = open_data(run, Source()).validation
    assert validation is not None
    assert validation.read(0, 6).tolist() == [50256, *encode("To be, or not").tolist()]


@pytest.mark.parametrize("name", ["owner/name", "plain"])
def test_a_prepared_corpus_goes_by_its_name(
    name: str, tmp_path: Path, own_cache: Path, vocabulary: None
) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 2000)
    list(prepare(str(tmp_path / "a.txt"), own_cache / "corpora" / name, processes=1))
    run = tiny_run(workload={"model": "mini", "data": name})
    assert open_data(run, Source()).facts["name"] == "a"
    assert open_data(tiny_run(workload={"model": "mini"}, val_corpus=name), Source()).validation is not None


@pytest.mark.parametrize(
    ("key", "value"), [("seed", -1), ("lr", 1e39), ("weight_decay", 1e39), ("eps", 1e39)]
)
def test_numbers_that_torch_cannot_hold_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        tiny_run(workload={key: value})

"""The long run: take optimiser steps, evaluate the model at intervals, and write checkpoints to resume from.

with process_group(run.toggles, device):
    for event in Session(run, SessionOptions(folder=Path("runs/mine")), device): print(event)

The steps are those of gpt2.training.train, which the harness times. This module holds the clock, checkpoints
and policies; the caller (gpt2.pretrain.rank_main) displays and records the events.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.config.validation import ConfigError
from gpt2.device import Device
from gpt2.files.cache import DataError
from gpt2.prefetch import Waiting
from gpt2.pretrain import checkpoint_tensors
from gpt2.pretrain.anomaly import Guard, TrainingStopped
from gpt2.pretrain.checkpoint import (
    CheckpointError,
    Saved,
    Shape,
    folders,
    newest,
    prune,
    read,
    recover,
    step_folder,
)
from gpt2.pretrain.config import TrainingRun
from gpt2.pretrain.datasets import Data, Source, open_data
from gpt2.pretrain.evaluations import CutShort, Evaluations
from gpt2.pretrain.metrics import Event
from gpt2.provenance import code_hash, git_state
from gpt2.training import distributed
from gpt2.training.train import Training, micro_batches, train

SPARE_SECONDS = 60.0
"""Time reserved for the last checkpoint of a leg of limited time, until one has been timed."""


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The run's folder, its source of data, and the limits of this leg."""

    folder: Path
    resume: bool = False
    """Resume from the newest checkpoint in the folder, where there is one."""
    begin_from: Path | None = None
    """A checkpoint whose weights the run begins with, at step 0."""
    source: Source = field(default_factory=Source)
    seconds: float | None = None
    """Time limit of this leg, within which its last step and checkpoint must fit; None: no limit."""
    peak_flops: float | None = None
    """Dense bfloat16 peak of one device in FLOP/s, for MFU; None: the datasheet's figure, if known."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"


class Session(Iterator[Event]):
    """One stretch of a run, from its start or a checkpoint to its end or interruption; an iterator of events.

    Create it once per process. Events are the same on every rank except for memory and times; all ranks must
    take them. Raises CheckpointError, ConfigError, DataError, and TrainingStopped where the guard ends the
    run.
    """

    ended_early: str | None = None
    """Reason why the run is not complete, set when the leg ends early."""

    def __init__(self, run: TrainingRun, options: SessionOptions, device: Device) -> None:
        self.run, self.options, self.device = run, options, device
        self._begun = time.monotonic()
        if options.resume and distributed.rank() == 0:
            recover(options.checkpoints)
        found = folders(options.checkpoints) if options.resume else []
        # Rank 0 chooses, because others may see an older listing of a network drive.
        self.resumed_from = distributed.gather(found[-1] if found else None, run.toggles.processes)[0]
        saved = Saved(shape=Shape.of(run.workload.config), step=0, updates=0, tokens=0, evaluated=False)
        if self.resumed_from:
            saved = _read(self.resumed_from)
            _comparable(self.resumed_from, saved, run)
        self.data = _open_data(run, options.source, saved.data)
        rank = distributed.rank()
        batches = micro_batches(self.data.batches, run.toggles, rank=rank, first_step=saved.step)
        self.waiting = Waiting(device.feed(batches))
        self.training: Training = train(run.workload, run.toggles, device, self.waiting)
        self._notes: list[Event] = []
        for note in filter(None, self.data.notes):
            self._note(saved.step, note)
        self.guard = Guard(run.guard, self._note, saved.guard)
        if self.resumed_from:
            checkpoint_tensors.restore(self.resumed_from, saved, self.training)
            if changes := list(_changes(saved.run, asdict(run))):
                self._note(saved.step, f"goes on with {'; '.join(changes)}")
            if options.begin_from:
                self._note(
                    saved.step,
                    f"goes on from {self.resumed_from.name}: --init-from is for a run without checkpoints",
                )
        elif options.begin_from:
            checkpoint_tensors.begin_from(options.begin_from, self.training)
            other = read(options.begin_from).other_vocabulary
            saved = replace(saved, other_vocabulary=other, begun_from=str(options.begin_from))
        reads_text = self.data.is_text or run.evaluation.sample_every or run.evaluation.hellaswag_every
        if saved.other_vocabulary and reads_text:
            raise CheckpointError(
                f"{options.begin_from or self.resumed_from} was imported with a vocabulary that is not "
                "GPT-2's; train and validate it on folders of its own tokens, and set sample_every and "
                "hellaswag_every of evaluation to 0"
            )
        self._other_vocabulary = saved.other_vocabulary
        if run.guard.skips:  # which alone has to wait for the device before AdamW
            if device.lazy:
                reason = f"{device.kind} runs a step as one program: guard cannot skip one"
                raise ConfigError(f"{reason}; choose stop or report")
            self.training.accept = lambda loss, norm: self._accept(self.training.number + 1, loss, norm)
        self.evaluations = Evaluations(run, self.training, self.data)
        before, judged_by = saved.data.get("validation"), self.evaluations.judged_by
        if before and judged_by and before != judged_by:
            other = "validated on other tokens than before: losses before and after do not compare"
            self._note(saved.step, other)
        self._elapsed_before = saved.elapsed_seconds
        self._begun_from = saved.begun_from
        self.evaluate_first = not saved.evaluated
        """True if the evaluations due before the first step of this leg are still to be made."""
        self._evaluated_at = saved.step if saved.evaluated else -1
        self._val_loss = saved.val_loss
        self._loss_and_norm = (0.0, 0.0)
        self._asked_to_end = ""
        self._saving_seconds = SPARE_SECONDS
        self._taken = 0
        self._longest = 0.0
        self._evaluating_seconds = saved.evaluating_seconds
        chip = device.peaks()
        self._peak = options.peak_flops or (chip.bfloat16 if chip else None)
        self._devices = distributed.nodes() if device.shared_by_ranks else run.toggles.world_size
        self._events = self._go()

    def __next__(self) -> Event:
        return next(self._events)

    def end(self, why: str) -> None:
        """Ask the leg to end after the current step, with a checkpoint; safe in any signal handler."""
        self._asked_to_end = self._asked_to_end or why

    def _go(self) -> Iterator[Event]:
        training, run = self.training, self.run
        self.device.reset_peak_memory()
        yield self._event("leg", **self._facts())
        yield from self._pending_notes()
        due = self.evaluate_first
        save = due and self.resumed_from is not None  # rewrites the checkpoint with its evaluations
        try:
            while True:
                step = training.number
                if due and not self.ended_early:
                    yield from self._evaluate(step)
                if save and (step >= run.steps or self.ended_early or run.checkpoints.due(step)):
                    self._save()
                if step >= run.steps or self.ended_early:
                    return
                yield self._step()
                yield from self._pending_notes()
                due = save = True
        except DataError:
            self._rescue()
            raise
        except TrainingStopped as stopped:
            yield Event(kind="note", step=training.number, values={"text": str(stopped)})
            raise

    def _pending_notes(self) -> Iterator[Event]:
        while self._notes:
            yield self._notes.pop(0)

    def _evaluate(self, step: int) -> Iterator[Event]:
        begun, self._val_loss = time.monotonic(), None
        try:
            for event in self.evaluations.at(step, self._cannot_go_on):
                if event.kind == "val":
                    self._val_loss = event.values["loss"]
                yield replace(event, values={**event.values, "elapsed_seconds": self._elapsed()})
            self._evaluated_at = step
        except CutShort:
            self.ended_early = self._asked_to_end or "another rank was asked to end"
        self._evaluating_seconds = max(self._evaluating_seconds, time.monotonic() - begun)
        self.device.reset_peak_memory()

    def _step(self) -> Event:
        training, waited = self.training, self.waiting.seconds
        lr = self.run.workload.lr_at(training.number)
        start = time.perf_counter()
        taken = next(training)
        if training.accept is None:
            self._accept(training.number, taken.loss, taken.grad_norm)
        loss, norm = self._loss_and_norm
        seconds = time.perf_counter() - start
        self._taken += 1
        # A leg's first step compiles, so its time does not predict later steps.
        self._longest = seconds if self._taken <= 2 else max(self._longest, seconds)
        tps = taken.tokens / seconds
        flops, peak = tps * self.run.workload.flops_per_token, self._peak
        return self._event(
            "step",
            tokens=training.number * taken.tokens,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            seconds=seconds,
            elapsed_seconds=self._elapsed(),
            tps=tps,
            mfu=flops / (peak * self._devices) if peak else None,
            peak_memory_bytes=self.device.peak_memory().bytes,
            wait_seconds=self.waiting.seconds - waited,
        )

    def _accept(self, step: int, loss: Tensor, grad_norm: Tensor) -> bool:
        """Return whether the guard accepts this step; ranks share the mean loss, and requests to end."""
        values = torch.stack([loss.float(), torch.tensor(float(self._should_end()), device=loss.device)])
        mean, ending = distributed.mean(values, self.run.toggles.processes).tolist()
        if ending:
            self.ended_early = self._asked_to_end or "another rank was asked to end"
        self._loss_and_norm = mean, grad_norm.item()
        return self.guard.accepts(step, *self._loss_and_norm, scaled=self.training.scaler.is_enabled())

    def _should_end(self) -> bool:
        limit = self.options.seconds
        if limit is not None:
            spent = time.monotonic() - self._begun
            step = self.training.number
            following = (step + 1, step + 2)  # this step and the next must fit
            evaluating = self._evaluating_seconds if any(map(self.evaluations.due, following)) else 0.0
            saving = self._saving_seconds * (1 + any(map(self.run.checkpoints.due, following)))
            if spent + 2 * self._longest + 1.5 * (evaluating + saving) > limit:
                self._end_of_time(limit, 1.5 * saving)
        return bool(self._asked_to_end)

    def _cannot_go_on(self) -> bool:
        """Return whether an evaluation has to be broken off, while there is time for a checkpoint."""
        limit = self.options.seconds
        saving = 1.5 * self._saving_seconds if self._taken else 0.0  # there is nothing to keep yet
        if limit is not None and time.monotonic() - self._begun + saving > limit:
            self._end_of_time(limit, saving)
        return bool(self._asked_to_end)

    def _end_of_time(self, limit: float, kept: float) -> None:
        """kept: seconds that are kept for checkpoints."""
        why = f"of this leg's {limit / 3600:.3g} hours there is time left for a checkpoint only"
        if kept > limit:
            why = f"{kept:.0f} seconds are kept for a checkpoint, more than the {limit:.0f} of this leg"
        self.end(why)

    def _rescue(self) -> None:
        """Write a checkpoint when the data fails; of one process only, as other ranks may be mid-step."""
        already = newest(self.options.folder) == step_folder(self.options.checkpoints, self.training.number)
        if self.run.toggles.processes == 1 and self.training.number and not already:
            self._save()

    def _save(self) -> None:
        start = time.monotonic()
        try:
            self.data.batches.check_unchanged()  # or the checkpoint would hold what nobody can tell
        except DataError as error:
            before = folders(self.options.checkpoints)
            on = f"; once it is as it was, --resume goes on from {before[-1].name}" if before else ""
            raise DataError(f"{error}; no checkpoint was written of the last steps{on}") from None
        training = self.training
        evaluated, place = self._evaluated_at == training.number, self.data.batches.state(training.number)
        folder = step_folder(self.options.checkpoints, training.number)
        saved = Saved(
            shape=Shape.of(training.model.config),
            step=training.number,
            updates=checkpoint_tensors.updates(training),
            tokens=training.number * self.run.tokens_per_step,
            elapsed_seconds=self._elapsed(),
            run=asdict(self.run),
            data=self.data.facts | {"stream": place, "validation": self.evaluations.judged_by},
            scaler=training.scaler.state_dict(),
            guard=self.guard.state_dict(),
            evaluated=evaluated,
            val_loss=self._val_loss if evaluated else None,
            evaluating_seconds=self._evaluating_seconds,
            other_vocabulary=self._other_vocabulary,
            begun_from=self._begun_from,
        )
        checkpoint_tensors.save(folder, training, saved)
        if distributed.rank() == 0:
            prune(self.options.checkpoints, self.run.checkpoints.keep)
        self.device.release_memory()
        self._saving_seconds = time.monotonic() - start

    def _facts(self) -> dict[str, Any]:
        commit, changed = git_state()
        return {
            "resumed_from": self.resumed_from.name if self.resumed_from else None,
            "begun_from": self._begun_from or None,
            "chip": self.device.chip(),
            "devices": self.run.toggles.world_size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "corpus": self.data.facts["name"],
            "corpus_sha256": self.data.facts["sha256"],
            "commit": commit,
            "changed": changed,
            "code": code_hash(),
        }

    def _elapsed(self) -> float:
        return self._elapsed_before + time.monotonic() - self._begun

    def _note(self, step: int, text: str) -> None:
        self._notes.append(Event(kind="note", step=step, values={"text": text}))

    def _event(self, kind: Any, **values: Any) -> Event:
        return Event(kind=kind, step=self.training.number, values=values)


def _open_data(run: TrainingRun, source: Source, saved: dict[str, Any]) -> Data:
    """Open the run's data on every rank; one rank of each machine fills the cache for the others.

    saved: `data` of the checkpoint to resume from, empty without one. Raises DataError, or the rank's own
    exception, on all ranks where one fails or has data other than rank 0's.
    """
    ranks = run.toggles.processes
    data: Data | None = None
    error: Exception | None = None
    for firsts in (True, False):
        if (os.environ.get("LOCAL_RANK", "0") == "0") is firsts:
            try:
                data = open_data(run, source, saved)
            except Exception as raised:
                error = raised
        facts = data and (data.facts["sha256"], data.validation and data.validation.sha256)
        everyone = distributed.gather((facts, error and str(error)), ranks)
    if error is not None:
        raise error
    for rank, (theirs, problem) in enumerate(everyone):
        if problem:
            raise DataError(f"rank {rank} cannot open the data: {problem}")
        if theirs != everyone[0][0]:
            raise DataError(
                f"rank {rank} would train or validate on other data than rank 0: its files differ; give all "
                "machines the same (--data, GPT2_DATA_DIR, GPT2_CACHE_DIR)"
            )
    assert data is not None
    return data


def _read(folder: Path) -> Saved:
    """Read a checkpoint. Raises CheckpointError that says how to resume from the one before it."""
    try:
        return read(folder)
    except CheckpointError as error:
        kept = [each.name for each in folders(folder.parent)]
        older = kept[: kept.index(folder.name)] if folder.name in kept else kept
        before = older[-1] if older else "the beginning"
        raise CheckpointError(f"{error}; to go on from {before}, delete {folder}") from None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the configuration keys with changed values, as "workload.lr 0.0003, before 0.0006"."""
    for key, value in now.items():
        if isinstance(value, Mapping):
            yield from _changes(before.get(key, {}), value, f"{path}{key}.")
        elif (was := before.get(key)) != (list(value) if isinstance(value, tuple) else value):
            yield f"{path}{key} {value}, before {was}"


FIXED = ("model", "data", "seq_len", "seed", "tokens_per_step")
"""Workload keys that must not change on resuming: earlier steps had other data, or another model."""


def _comparable(folder: Path, saved: Saved, run: TrainingRun) -> None:
    """Raise CheckpointError where a run cannot resume from this checkpoint: no training, or another one."""
    if not saved.run:
        raise CheckpointError(
            f"{folder} holds weights alone, which gpt2 import wrote, and no training to go on with; move it "
            "out of the run's folder and begin from it with --init-from"
        )
    if not saved.step:
        return
    before, now = dict(saved.run["workload"]), asdict(run.workload)
    before["tokens_per_step"], now["tokens_per_step"] = saved.tokens // saved.step, run.tokens_per_step
    for name in FIXED:
        if before[name] != now[name]:
            raise CheckpointError(
                f"{folder}: the run began with workload.{name} {before[name]}, now it is {now[name]}; "
                "go on with what it had, or begin anew with --init-from"
            )

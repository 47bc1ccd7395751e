"""Save and load a training's tensors with torch.distributed.checkpoint, as safetensors.

Tensors have the plain model's names and logical shapes, however the model is compiled, padded, replicated or
sharded. A checkpoint saved under one set of toggles can therefore be resumed under another, on any number of
ranks. Reading runs no code.

    save(folder, training, Saved(...)); saved = read(folder); restore(folder, saved, training)
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from gpt2.config.workload import GPT2Config
from gpt2.files.atomic import new_folder
from gpt2.files.listing import name_problem
from gpt2.model.model import GPT2, build, shapes
from gpt2.pretrain.checkpoint import CheckpointError, Saved, Shape, folders, read, seal
from gpt2.training import distributed
from gpt2.training.train import Training

FILE_BYTES = 1 << 30
"""Approximate bytes of tensors per file; each file is assembled in memory."""
T = TypeVar("T")
AVERAGES = ("exp_avg", "exp_avg_sq")
FAILURES = (Exception, CheckpointException)
"""Exceptions to catch: CheckpointException is not an Exception, and safetensors raises several kinds."""


def save(folder: Path, training: Training, saved: Saved) -> None:
    """Write the checkpoint `folder` atomically, replacing one of that name; all ranks call this together.

    Raises CheckpointError on every rank where it cannot be written.
    """
    part: Path | None = None
    try:
        name = _on_first_rank(lambda: new_folder(folder).name)
        part = made = folder.with_name(name)
        _write(part, _named(training), training.model)
        _on_first_rank(lambda: seal(made, folder, saved, replace=True))
    except FAILURES as error:
        if part and distributed.rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        mended = "; mend that, or choose another --out"
        with contextlib.suppress(OSError):  # of the disk that has just failed
            if before := folders(folder.parent):
                mended = f"; once that is mended, --resume goes on from {before[-1].name}"
        raise CheckpointError(f"cannot write {folder} ({_cause(error)}){mended}") from None


def save_weights(
    folder: Path, config: GPT2Config, weights: Mapping[str, Tensor], *, other_vocabulary: bool = False
) -> None:
    """Write a checkpoint of weights only, as weights() returns them, from one process.

    other_vocabulary: whether they learnt another vocabulary's tokens than GPT-2's. Raises CheckpointError,
    also where something is there already.
    """
    if problem := name_problem(folder):
        raise CheckpointError(problem)
    part: Path | None = None
    try:
        part = new_folder(folder)
        _write(part, {f"model.{name}": tensor for name, tensor in weights.items()}, None)
        facts = Saved(shape=Shape.of(config), step=0, updates=0, tokens=0, other_vocabulary=other_vocabulary)
        seal(part, folder, facts, replace=False)
    except FAILURES as error:
        raise CheckpointError(f"cannot write {folder} ({_cause(error)})") from None
    finally:
        if part:
            shutil.rmtree(part, ignore_errors=True)


def weights(folder: Path) -> tuple[GPT2Config, dict[str, Tensor]]:
    """Return a checkpoint's model: float32 tensors on the CPU, named as GPT2's parameters, without padding.

    Raises CheckpointError.
    """
    saved = read(folder)
    config = saved.shape.config
    found = {name: torch.empty(shape) for name, shape in shapes(config).items()}
    _read(folder, saved, {f"model.{name}": tensor for name, tensor in found.items()})
    return config, found


@torch.no_grad()
def load_weights(model: GPT2, weights: Mapping[str, Tensor]) -> None:
    """Copy weights, as weights() returns them, into an unsharded model, without its padding rows."""
    for name, parameter in model.named_parameters():
        parameter[: weights[name].size(0)].copy_(weights[name])


def restore(folder: Path, saved: Saved, training: Training) -> None:
    """Restore a training to a checkpoint; all ranks must call this together.

    Raises CheckpointError where the model's shape differs, or the files cannot be read.
    """
    if saved.updates:
        _prepare(_local(training.optimizer), saved.updates)
    _fill(folder, saved, training, averages=saved.updates > 0)
    if saved.scaler and training.scaler.is_enabled():
        training.scaler.load_state_dict(saved.scaler)
    training.number = saved.step


def begin_from(folder: Path, training: Training) -> None:
    """Load only a checkpoint's weights into a training that has not begun; otherwise as restore()."""
    _fill(folder, read(folder), training, averages=False)


@torch.no_grad()
def _fill(folder: Path, saved: Saved, training: Training, *, averages: bool) -> None:
    """Copy a checkpoint's weights, and AdamW's averages if asked for, into a training."""
    tensors = {n: t for n, t in _tensors(training).items() if averages or n.startswith("model.")}
    theirs, ours = asdict(saved.shape), asdict(Shape.of(training.model.config))
    if differ := [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]:
        raise CheckpointError(f"{folder} is of another model: {', '.join(differ)}")
    full_tensor = {}  # sharded padded tensors, whose logical rows are not a view of this rank's part
    targets = {}
    for name, tensor in tensors.items():
        rows = _rows(name, training.model)
        if rows is not None and distributed.is_shard(tensor):
            full_tensor[name] = targets[name] = torch.zeros((rows, *tensor.shape[1:]), device=tensor.device)
        else:
            targets[name] = tensor if rows is None else tensor[:rows]
    _read(folder, saved, targets)
    for name, rows in full_tensor.items():
        distributed.fill(tensors[name], rows)
    for weight, copy in getattr(training.optimizer, "copies", {}).items():
        copy.detach().copy_(weight.detach())


def plain(training: Training) -> GPT2:
    """Return the unsharded model: the training's own, or a gathered copy; all ranks call this together."""
    if not training.toggles.shards_gradients:
        return training.model
    model = build(training.model.config, None, training.device.torch_device)
    for mine, theirs in zip(model.parameters(), training.model.parameters(), strict=True):
        mine.data = distributed.full_tensor(theirs.detach())
    return model


def updates(training: Training) -> int:
    """Return the number of steps that AdamW has applied, without skipped ones; the same on every rank."""
    states = _local(training.optimizer).state.values()
    mine = max((int(state["step"].item()) for state in states), default=0)
    return max(distributed.gather(mine, training.toggles.processes))


def _tensors(training: Training) -> dict[str, Tensor]:
    """Return the weights and this rank's AdamW averages by name, as they lie in memory."""
    found, optimizer = {}, _local(training.optimizer)
    for name, parameter in training.model.named_parameters():
        found[f"model.{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        found |= {f"optimizer.{name}.{each}": state[each] for each in AVERAGES if each in state}
    return found


def _named(training: Training) -> dict[str, Tensor]:
    """Return the tensors of _tensors() in their logical shapes."""
    return {
        name: tensor
        if (rows := _rows(name, training.model)) is None
        else distributed.full_tensor(tensor)[:rows].contiguous()
        for name, tensor in _tensors(training).items()
    }


def _rows(name: str, model: GPT2) -> int | None:
    """Return the number of logical rows of a padded tensor; None where all rows are logical."""
    padded = model.config.padded_vocab_size > model.config.vocab_size
    return model.config.vocab_size if padded and ".wte." in f".{name}." else None


def _local(optimizer: Any) -> Any:
    """Return the optimiser with this rank's state, which ZeroRedundancyOptimizer wraps."""
    return getattr(optimizer, "optim", optimizer)


def _prepare(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Allocate the state that AdamW would create in its first step, so that it can be filled."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                device = parameter.device if group.get("fused") else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for each in AVERAGES:
                    state[each] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"].fill_(updates)


def _write(part: Path, tensors: Mapping[str, Tensor], model: GPT2 | None) -> None:
    """Write tensors as safetensors; model: a training's, whose other ranks may have further tensors."""
    if model is None:
        numbers = {name: tensor.numel() for name, tensor in tensors.items()}
    else:
        kinds = ("model.{}", *(f"optimizer.{{}}.{each}" for each in AVERAGES))
        numbers = {kind.format(name): p.numel() for kind in kinds for name, p in model.named_parameters()}
    files, total = {}, 0
    for name, number in numbers.items():
        files[name] = 1 + total // FILE_BYTES
        total += 4 * number
    writer = HuggingFaceStorageWriter(str(part), fqn_to_index_mapping=files, save_distributed=True)
    with _quiet():
        save_distributed(dict(tensors), storage_writer=writer, no_dist=not torch.distributed.is_initialized())


class _Files(FileSystem):
    """A file system whose folders hold some files only."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [each for each in super().ls(path) if Path(each).name in self._names]


class _Reader(HuggingFaceStorageReader):
    """Reads the files that a checkpoint.json lists; torch's own takes every .safetensors of the folder."""

    problem: Exception | None = None
    """Why their headers cannot be read, of which torch passes on no more than that there is no metadata."""

    def __init__(self, folder: Path, names: Collection[str]) -> None:
        super().__init__(str(folder))
        self.fs = _Files(names)

    def read_metadata(self) -> Metadata:
        try:
            return super().read_metadata()
        except Exception as error:
            self.problem = error
            raise


def _read(folder: Path, saved: Saved, targets: dict[str, Tensor]) -> None:
    """Fill `targets` in place, converting number formats. Raises CheckpointError."""
    reader = _Reader(folder, saved.files)
    try:
        with _quiet():
            load(dict(targets), storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    except FAILURES as error:
        raise CheckpointError(f"{folder} cannot be read ({_cause(reader.problem or error)})") from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from warning that there is no process group, and from logging what it raises anyway."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable()
        try:
            yield
        finally:
            logging.disable(before)


def _on_first_rank(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 while the others wait, and return what it returned; raises its OSError on all
    ranks.
    """
    shared: list[Any] = [None, None]
    if distributed.rank() == 0:
        try:
            shared[0] = action()
        except OSError as error:
            shared[1] = error
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(shared)
    if shared[1]:
        raise shared[1]
    return shared[0]


def _cause(error: BaseException) -> str:
    """Return the underlying error as one line; torch.distributed.checkpoint wraps the errors of all ranks."""
    for failure in getattr(error, "failures", {}).values():
        error = failure[0] if isinstance(failure, tuple) else failure
        break
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[-1]

"""The training loop: an iterator of optimiser steps, without clock, logger or files.

for step in itertools.islice(train(workload, toggles, device, micro_batches), 10):
    print(step.loss.item())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt2.config.toggles import Toggles
from gpt2.config.validation import ConfigError
from gpt2.config.workload import Workload
from gpt2.device import Device
from gpt2.device.base import Batch
from gpt2.model.model import build
from gpt2.training import distributed, stages
from gpt2.training.optimizer import clip_gradients, leaves

if TYPE_CHECKING:
    from gpt2.data.batches import Batches
    from gpt2.data.corpora.stream import StreamedBatches


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step. The tensors stay on the device; reading them waits for it."""

    loss: Tensor
    """Mean cross-entropy of this rank's micro-batches, in nats; its mean over ranks is the batch's."""
    grad_norm: Tensor
    """Global gradient norm before clipping, equal on all ranks; not finite where the step was skipped."""
    tokens: int
    """Tokens of this step over all ranks."""


def micro_batches(
    batches: Batches | StreamedBatches, toggles: Toggles, *, rank: int = 0, first_step: int = 0
) -> Iterator[Batch]:
    """Yield this process's part of each global batch, in order: two int64 tensors (sequences, seq_len).

    Process `rank` of W takes, in micro-step m of a step, sequences (m W + rank) B to (m W + rank + 1) B.
    Raises ConfigError where the batches have more or fewer sequences per step than the toggles take.
    """
    given = batches.sequences_per_step
    taken = toggles.sequences * toggles.processes * toggles.grad_accum_steps
    if given != taken:
        what = f"the batches have {given} sequences per step, and these toggles take {taken}"
        raise ConfigError(f"{what}; give Batches the toggles' tokens_per_step")
    return _parts(batches, toggles, rank, first_step)


def _parts(
    batches: Batches | StreamedBatches, toggles: Toggles, rank: int, first_step: int
) -> Iterator[Batch]:
    B, W, A = toggles.sequences, toggles.processes, toggles.grad_accum_steps
    for step in count(first_step):
        for micro_step in range(A):
            x, y = batches.sequences(step, (micro_step * W + rank) * B, B)
            yield torch.from_numpy(x), torch.from_numpy(y)


class Training(Iterator[Step]):
    """An iterator of optimiser steps, whose model, optimiser and other parts are public; made by train().

    It ends where its batches end. `model` is the plain GPT2 (compiled in place where asked for). `wrapped` is
    the module whose forward pass runs: the model, or one of several replicas. Where ranks shard the weights,
    both are the same module, and its parameters are this rank's shards.
    """

    def __init__(
        self, workload: Workload, toggles: Toggles, device: Device, batches: Iterable[Batch]
    ) -> None:
        stages.configure_process(toggles, device)
        self.workload, self.toggles, self.device = workload, toggles, device
        self.model = build(stages.model_config(toggles, workload.config), workload.seed, device.torch_device)
        self.wrapped = stages.wrap_model(toggles, self.model, device)
        self.optimizer = stages.make_optimizer(toggles, workload, self.model)
        self.leaves = leaves(self.optimizer)
        self.autocast, self.scaler = stages.precision(toggles, device)
        device.end_step()  # a lazy device runs the set-up now, apart from the first step's program
        self.micro_batch: Batch | None = None
        """The last micro-batch, on the device, with the strides that compiled code expects."""
        self.number = 0
        """Steps taken so far, skipped ones included; this is the number of the next step."""
        self.accept: Callable[[Tensor, Tensor], bool] | None = None
        """Called with a step's loss and gradient norm; where it returns False, the weights stay unchanged."""
        self._batches = self._checked(batches)
        self._first = True
        self.graph = stages.step_graph(toggles, device, self._compute)
        """The recording of a whole step; None where the host launches its ops one by one."""
        self.replay = True
        """False takes the next steps op by op, so that a profiler sees what a recording hides."""

    def __next__(self) -> Step:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # which a recorded step reads, where it always lies
                group["lr"].fill_(self.workload.lr_at(self.number))
            else:
                group["lr"] = self.workload.lr_at(self.number)
        if self.graph:
            assert self.accept is None  # which is not asked by a recording
            batches = [next(self._batches) for _ in range(self.toggles.grad_accum_steps)]
            loss, grad_norm = self.graph(batches, replay=self.replay)
        else:
            put = self.device.put
            loss, grad_norm = self._compute((put(x), put(y)) for x, y in self._batches)
        if self._first and self.device.compilations():
            self.device.release_memory()
        self._first = False
        self.number += 1
        self.device.end_step()
        tokens = self.toggles.tokens_per_step(self.workload.seq_len)
        return Step(loss=loss, grad_norm=grad_norm, tokens=tokens)

    def _checked(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, as long as they are of the shape by which a step's tokens are counted."""
        shape = self.toggles.sequences, self.workload.seq_len
        for x, y in batches:
            if tuple(x.shape) != shape:
                what = (
                    f"a micro-batch is of shape {tuple(x.shape)}, and the workload and toggles make {shape}"
                )
                raise ConfigError(f"{what} (sequences, tokens of each)")
            yield x, y

    def _compute(self, batches: Iterator[Batch]) -> tuple[Tensor, Tensor]:
        """Train on a step's micro-batches; return the step's loss and gradient norm."""
        accumulated = self.toggles.grad_accum_steps
        losses = []
        for micro_step in range(accumulated):
            self.micro_batch = x, y = next(batches)
            with distributed.gradient_sync(self.wrapped, last=micro_step == accumulated - 1):
                with self.autocast():
                    micro_loss = self.wrapped(x, y)
                if accumulated > 1:  # a division by 1 would still add an op to the backward pass
                    micro_loss = micro_loss / accumulated
                self.device.sample_memory()
                self.scaler.scale(micro_loss).backward()
            losses.append(micro_loss.detach())
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.optimizer, self.leaves, self.workload.grad_clip, self.toggles.clip)
        # A copy, because a CUDA graph's output is overwritten when it runs again.
        loss = losses[0].clone() if accumulated == 1 else torch.stack(losses).sum()
        if self.accept is None or self.accept(loss, grad_norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not distributed.keeps_gradients(self.wrapped))
        return loss, grad_norm


def train(workload: Workload, toggles: Toggles, device: Device, batches: Iterable[Batch]) -> Training:
    """Return an endless iterator of optimiser steps; the caller decides when to stop.

    `batches` yields grad_accum_steps micro-batches per step (see micro_batches); one of another shape than
    the workload and the toggles make raises ConfigError, and so do toggles whose step is not of
    workload.tokens_per_step. Raises RanksError where several processes were not joined. The model is built
    before this returns.
    """
    taken, wanted = toggles.tokens_per_step(workload.seq_len), workload.tokens_per_step
    if wanted not in (None, taken):
        what = f"workload.tokens_per_step is {wanted:,}, and these toggles take steps of {taken:,}"
        raise ConfigError(f"{what}; give the toggles through gpt2.config.toggles.resolve(workload, toggles)")
    distributed.require_group(toggles)
    return Training(workload, toggles, device, batches)

"""The training loop: an iterator of optimiser steps that holds no clock, no logger and no file.

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

from gpt2 import parallel, stages
from gpt2.device import Device
from gpt2.model import build
from gpt2.optimizer import clip_gradients, leaves
from gpt2.toggles import Toggles
from gpt2.workload import Workload

if TYPE_CHECKING:
    from gpt2.data import Batches
    from gpt2.stream import StreamedBatches


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step. The tensors stay on the device: reading them waits for it."""

    loss: Tensor
    """Mean cross-entropy of this rank's micro-batches, in nats; the mean over ranks is that of the global batch."""
    grad_norm: Tensor
    """Global gradient norm before clipping, the same on every rank; not finite where float16's scaler skipped it."""
    tokens: int
    """Trained on in this step by all ranks together."""


def micro_batches(
    batches: Batches | StreamedBatches, toggles: Toggles, *, rank: int = 0, first_step: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's share of each global batch, in order: inputs and targets, int64 (sequences, seq_len).

    Micro-step m of a step takes, for process `rank` of W, sequences (m W + rank) B to (m W + rank + 1) B.
    """
    B, W, A = toggles.sequences, toggles.processes, toggles.grad_accum_steps
    assert batches.sequences_per_step == A * W * B
    for step in count(first_step):
        for micro_step in range(A):
            x, y = batches.sequences(step, (micro_step * W + rank) * B, B)
            yield torch.from_numpy(x), torch.from_numpy(y)


class Training(Iterator[Step]):
    """Optimiser steps without end, one per item, with what computes them open to be looked at; made by train().

    It ends where its batches end. `model` is the plain GPT2 (compiled in place where that is asked for), `wrapped`
    the module whose forward pass runs, one of several replicas where there are several ranks. Where these share the
    weights out, both are one, and its parameters are this rank's shards.
    """

    def __init__(
        self, workload: Workload, toggles: Toggles, device: Device, batches: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        stages.configure_process(toggles, device)
        self.workload, self.toggles, self.device = workload, toggles, device
        self.model = build(stages.model_config(toggles, workload.config), workload.seed, device.torch_device)
        self.wrapped = stages.wrap_model(toggles, self.model, device)
        self.optimizer = stages.make_optimizer(toggles, workload, self.model)
        self.leaves = leaves(self.optimizer)
        self.autocast, self.scaler = stages.precision(toggles, device)
        device.end_step()  # a step is a program of its own, without what came before it
        self.micro_batch: tuple[Tensor, Tensor] | None = None
        """The last one trained on: inputs and targets on the device, strides and all as compiled code expects them."""
        self.number = 0
        """Steps taken so far, those that were passed over included: which step comes next."""
        self.accept: Callable[[Tensor, Tensor], bool] | None = None
        """Asked with a step's loss and gradient norm; where it says no, the weights stay as they are."""
        self._batches = iter(batches)
        self._first = True

    def __next__(self) -> Step:
        for group in self.optimizer.param_groups:
            group["lr"] = self.workload.lr_at(self.number)
        accumulated = self.toggles.grad_accum_steps
        losses = []
        for micro_step in range(accumulated):
            x, y = (self.device.put(tokens) for tokens in next(self._batches))
            self.micro_batch = x, y
            with parallel.gradient_sync(self.wrapped, last=micro_step == accumulated - 1):
                with self.autocast():
                    micro_loss = self.wrapped(x, y)
                if accumulated > 1:  # a division by 1 would still be a step of the backward pass
                    micro_loss = micro_loss / accumulated
                self.device.sample_memory()
                self.scaler.scale(micro_loss).backward()
            losses.append(micro_loss.detach())
        self.scaler.unscale_(self.optimizer)
        grad_norm = clip_gradients(self.optimizer, self.leaves, self.workload.grad_clip, self.toggles.clip)
        # A copy: what a CUDA graph returned is overwritten when it runs again.
        loss = losses[0].clone() if accumulated == 1 else torch.stack(losses).sum()
        if self.accept is None or self.accept(loss, grad_norm):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not parallel.keeps_gradients(self.wrapped))
        if self._first and self.device.compilations():
            self.device.give_back()
        self._first = False
        self.number += 1
        self.device.end_step()
        return Step(loss=loss, grad_norm=grad_norm, tokens=self.toggles.tokens_per_step(self.workload.seq_len))


def train(workload: Workload, toggles: Toggles, device: Device, batches: Iterable[tuple[Tensor, Tensor]]) -> Training:
    """Train without end, one optimiser step per item; the caller decides when to stop.

    `batches` gives grad_accum_steps micro-batches per step (see micro_batches). With world_size > 1 the process
    group must be up (see parallel.process_group). The model is built before this returns.
    """
    return Training(workload, toggles, device, batches)

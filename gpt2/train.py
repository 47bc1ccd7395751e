"""The training loop: a generator of optimiser steps that holds no clock, no logger and no file.

for step in itertools.islice(train(workload, toggles, device, micro_batches), 10):
    print(step.loss.item())
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gpt2 import toggles as stages
from gpt2.data import Batches
from gpt2.device import Device
from gpt2.model import build
from gpt2.toggles import Toggles
from gpt2.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step. The tensors stay on the device: reading them waits for it."""

    loss: Tensor
    """Mean cross-entropy of this rank's micro-batches, in nats; the mean over ranks is that of the global batch."""
    grad_norm: Tensor
    """Global gradient norm before clipping, the same on every rank."""
    tokens: int
    """Trained on in this step by all ranks together."""


def micro_batches(batches: Batches, toggles: Toggles, *, rank: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each global batch, in order: inputs and targets, int64 (micro_batch_size, seq_len).

    Micro-step m of a step takes, for rank r of W, sequences (m W + r) B to (m W + r + 1) B.
    """
    B, W, A = toggles.micro_batch_size, toggles.world_size, toggles.grad_accum_steps
    assert batches.sequences_per_step == A * W * B
    for step in count():
        for micro_step in range(A):
            x, y = batches.sequences(step, (micro_step * W + rank) * B, B)
            yield torch.from_numpy(x), torch.from_numpy(y)


def train(
    workload: Workload, toggles: Toggles, device: Device, batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[Step]:
    """Train without end, one optimiser step per item; the caller decides when to stop.

    `batches` gives grad_accum_steps micro-batches per step (see micro_batches). With world_size > 1 the process
    group must be up (see device.process_group). The model is built before this returns.
    """
    stages.configure_process(toggles)
    config = stages.model_config(toggles, workload.config)
    plain = build(config, workload.seed, device.torch_device)
    model = stages.wrap_model(toggles, plain, device)
    optimizer = stages.make_optimizer(toggles, workload, plain)
    autocast, scaler = stages.precision(toggles, device)
    return _steps(workload, toggles, device, iter(batches), model, optimizer, autocast, scaler)


def _steps(
    workload: Workload,
    toggles: Toggles,
    device: Device,
    batches: Iterator[tuple[Tensor, Tensor]],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    autocast: Callable[[], AbstractContextManager[Any]],
    scaler: torch.amp.GradScaler,
) -> Iterator[Step]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = workload.lr_at(step)
        loss = torch.zeros((), device=device.torch_device)
        for micro_step in range(toggles.grad_accum_steps):
            x, y = (device.put(tokens) for tokens in next(batches))
            with stages.gradient_sync(model, last=micro_step == toggles.grad_accum_steps - 1):
                with autocast():
                    micro_loss = model(x, y) / toggles.grad_accum_steps
                device.sample_memory()
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, workload.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield Step(loss=loss, grad_norm=grad_norm, tokens=toggles.tokens_per_step(workload.seq_len))

"""Pull optimiser steps and time them: first step, warm-up, window, and what is wanted after it.

The clock is read only when the device has been waited for, and nothing reads a loss until all is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any, TypeVar

import torch

from bench.ladder import Protocol
from bench.record import Measurement, Rank
from gpt2.device import Device, PeakMemory
from gpt2.train import Step

T = TypeVar("T")

LEAST_BLOCKS = 5
MOST_WARMUP_STEPS = 100
"""Warm-up ends here even if something still compiles; the window then fails, which says what does."""


class Waiting(Iterator[T]):
    """An iterator that adds up the time its consumer waits for it."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank measured; the fields are those of bench.record.Measurement."""

    first_step_seconds: float
    warmup_steps: int
    block_steps: int
    block_seconds: list[float]
    losses: list[float]
    grad_norms: list[float]
    memory: PeakMemory
    recompiles: int
    data_wait_seconds: float


def measure(
    steps: Iterator[Step],
    device: Device,
    protocol: Protocol,
    data: Waiting,
    *,
    agree: Callable[[float], float] = lambda value: value,
    progress: Callable[[str, int, float | None], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Window:
    """Time one rung by pulling `steps`.

    agree: gives every rank the largest of the ranks' values, so that all take as many steps. progress: called
    with the phase, the steps so far and the tokens per second of the last block, while the clock is not running.
    """
    history: list[Step] = []
    tell = progress or (lambda phase, steps, tps: None)

    def pull(count: int) -> float:
        """Take `count` steps; returns the seconds until the device has finished them."""
        start = clock()
        for _ in range(count):
            history.append(next(steps))
        device.synchronize()
        return clock() - start

    tell("first step", 0, None)
    first_step_seconds = step_seconds = pull(1)
    compiling = True
    while (len(history) < protocol.min_warmup_steps or compiling) and len(history) < MOST_WARMUP_STEPS:
        tell("warm-up", len(history), None)
        compiled = device.compilations()
        step_seconds = pull(1)
        compiling = agree(float(device.compilations() > compiled)) > 0  # on any rank
    warmup_steps = len(history)

    step_seconds = agree(step_seconds)
    block_steps = max(1, round(protocol.block_seconds / step_seconds))
    blocks_in_time = math.floor(protocol.max_window_seconds / (block_steps * step_seconds))
    blocks = max(LEAST_BLOCKS, min(protocol.blocks, blocks_in_time))
    block_seconds: list[float] = []
    compiled, waited = device.compilations(), data.seconds
    device.reset_peak_memory()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(blocks):
            block_seconds.append(pull(block_steps))
            tokens = block_steps * history[-1].tokens
            tell("window", len(history), tokens / block_seconds[-1])
    memory = device.peak_memory()
    recompiles = device.compilations() - compiled
    waited = data.seconds - waited

    while len(history) < protocol.loss_steps:
        tell("losses", len(history), None)
        pull(min(max(block_steps, 10), protocol.loss_steps - len(history)))

    return Window(
        first_step_seconds=first_step_seconds,
        warmup_steps=warmup_steps,
        block_steps=block_steps,
        block_seconds=block_seconds,
        losses=torch.stack([step.loss for step in history]).tolist(),
        grad_norms=torch.stack([step.grad_norm for step in history]).tolist(),
        memory=memory,
        recompiles=recompiles,
        data_wait_seconds=waited,
    )


def combine(windows: list[Window], **facts: Any) -> Measurement:
    """One Measurement from the windows of all ranks, rank 0 first; `facts` are its fields that no rank measures."""
    slowest = max(windows, key=lambda window: sum(window.block_seconds))
    first = windows[0]
    return Measurement(
        block_steps=first.block_steps,
        block_seconds=slowest.block_seconds,
        first_step_seconds=max(window.first_step_seconds for window in windows),
        warmup_steps=first.warmup_steps,
        losses=[mean(values) for values in zip(*(window.losses for window in windows), strict=True)],
        grad_norms=first.grad_norms,
        peak_memory_bytes=_highest(window.memory.bytes for window in windows),
        peak_memory_method=first.memory.method,
        reserved_memory_bytes=_highest(window.memory.reserved_bytes for window in windows),
        run_peak_memory_bytes=_highest(window.memory.run_bytes for window in windows),
        alloc_retries=_highest(window.memory.alloc_retries for window in windows),
        recompiles=max(window.recompiles for window in windows),
        data_wait_seconds=max(window.data_wait_seconds for window in windows),
        ranks=[Rank(block_seconds=window.block_seconds, peak_memory_bytes=window.memory.bytes) for window in windows],
        **facts,
    )


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)

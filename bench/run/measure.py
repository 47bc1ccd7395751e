"""Pull optimiser steps and time them: first step, warm-up, window; then, untimed, the losses still wanted.

The clock is read only when the device has been waited for, and nothing reads a loss within a window.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from types import TracebackType
from typing import TypeVar

import torch

from bench.host.standstill import Instant, Pulse, standstills
from bench.host.telemetry import cpu_times
from bench.ladder.ladder import LEAST_BLOCKS, Protocol
from gpt2.device import ChipUse, Device, PeakMemory
from gpt2.prefetch import Waiting
from gpt2.training.train import Step

T = TypeVar("T")

Progress = Callable[[str, int, float | None], None]
"""Called with the phase, the steps so far and the tokens per second of the last block, the clock not running.
"""

MOST_WARMUP_STEPS = 100
"""Warm-up ends here even if something still compiles; the report then flags the rung as recompiled."""


class Collections:
    """Counts what Python's garbage collector does while this is entered: it stops the thread that feeds the
    device.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.count += 1
            self.seconds += time.perf_counter() - self._start


@dataclass(frozen=True)
class CpuUse:
    """CPU time within some seconds: of all processes of this machine, and of this process alone."""

    seconds: float
    busy_seconds: float
    own_seconds: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank measured; the fields are those of bench.records.record.Measurement."""

    first_step_seconds: float
    warmup_steps: int
    block_steps: int | None
    blocks: list[Instant]
    set_aside: list[Instant]
    """Blocks of a window before, within which some rank stood still; empty where the first window stands."""
    step_seconds: list[float]
    """Of each step in those blocks, by the device's own clock where it has one."""
    history: list[Step]
    """Every step so far, from the first; more_losses() adds to it."""
    memory: PeakMemory
    gpu_memory_bytes: int | None
    """That the process had taken of the whole GPU at the end of the window; None where nobody tells."""
    recompiles: int
    gc_collections: int
    gc_seconds: float
    energy_joules: float | None
    cpu: CpuUse | None
    """Of the window; None where nothing was timed."""
    programs_per_step: float | None
    host_reads: int | None
    chips: tuple[list[ChipUse], list[ChipUse]] | None
    """Just before and just after the window, where chips tell."""
    data_wait_seconds: float

    @property
    def block_seconds(self) -> list[float]:
        """Of each block, by the clock."""
        return [block.seconds for block in self.blocks]


def measure(
    steps: Iterator[Step],
    device: Device,
    protocol: Protocol,
    data: Waiting,
    *,
    agree: Callable[[float], float] = lambda value: value,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
    has_time: Callable[[float], bool] = lambda seconds: True,
    keep: Callable[[Window], object] = lambda window: None,
    pulse: Pulse | None = None,
    gpu_memory: Callable[[], int | None] = lambda: None,
) -> Window:
    """Time one rung by pulling `steps`.

    A window within which the process stood still, for the system stopped it or slept, is taken once more, if
    has_time() says of its seconds that there are as many left; keep() is given the first one before that.
    gpu_memory: bytes that the process has taken of the whole GPU by now. agree: gives every rank the largest
    of the ranks' values, so that all take as many steps. pulse: one that is entered; without it nobody looks
    whether the process stood still.
    """
    history: list[Step] = []
    tell = progress or (lambda phase, steps, tps: None)

    def pull(count: int) -> tuple[Instant, list[float]]:
        """Take `count` steps; returns the time until the device has finished them, and the seconds of each
        step.
        """
        start, marks = Instant.now(pulse, clock), [device.mark()]
        for _ in range(count):
            history.append(next(steps))
            marks.append(device.mark())
        device.synchronize()
        passed = Instant.now(pulse, clock) - start
        return passed, [device.seconds_between(*pair) for pair in pairwise(marks) if None not in pair]

    tell("first step", 0, None)
    first_step_seconds = pull(1)[0].seconds
    step_seconds = first_step_seconds
    compiling, warmed = True, 0.0
    while (len(history) < protocol.min_warmup_steps or compiling) and len(history) < MOST_WARMUP_STEPS:
        tell("warm-up", len(history), None)
        compiled = device.compilations()
        step_seconds = pull(1)[0].seconds
        compiling = agree(float(device.compilations() > compiled)) > 0  # on any rank
        warmed = 0.0 if compiling else warmed + step_seconds  # while code is compiled, a device idles
    # One block more, untimed, or several: clocks settle, and one step alone is a poor measure of many.
    block_steps = max(1, round(protocol.block_seconds / agree(step_seconds)))
    while block_steps > 1 or agree(warmed) < protocol.min_warmup_seconds:
        seconds = pull(block_steps)[0].seconds
        warmed += seconds
        block_steps = max(1, round(protocol.block_seconds / agree(seconds / block_steps)))
        if agree(warmed) >= protocol.min_warmup_seconds:
            break

    def window(set_aside: list[Instant]) -> Window:
        warmup_steps = len(history)
        blocks: list[Instant] = []
        each_step: list[float] = []
        tell("window", warmup_steps, None)
        compiled, waited = device.compilations(), data.seconds
        device.reset_peak_memory()
        chips, launched = device.use(), device.launches()
        energy, cpu = device.energy_joules(), cpu_times()
        # A recompilation is counted and flagged. Forbidding it, which torch.compiler.set_stance could, would
        # end one rank in the middle of a step and leave the others waiting for it.
        with Collections() as collections:
            while len(blocks) < protocol.blocks:
                lasted = sum(block.seconds for block in blocks)
                if len(blocks) >= LEAST_BLOCKS and agree(lasted) > protocol.max_window_seconds:
                    break
                block, of_steps = pull(block_steps)
                blocks.append(block)
                each_step += of_steps
                tell("window", len(history), block_steps * history[-1].tokens / block.seconds)
        spent, used, asked = device.energy_joules(), cpu_times(), device.launches()
        memory, chips_after = device.peak_memory(), device.use()
        timed = len(history) - warmup_steps
        return Window(
            first_step_seconds=first_step_seconds,
            warmup_steps=warmup_steps,
            block_steps=block_steps,
            blocks=blocks,
            set_aside=set_aside,
            step_seconds=each_step,
            history=history,
            memory=memory,
            gpu_memory_bytes=gpu_memory(),  # torch gives nothing back meanwhile, so that this is the most
            recompiles=device.compilations() - compiled,
            gc_collections=collections.count,
            gc_seconds=collections.seconds,
            energy_joules=spent - energy if spent is not None and energy is not None else None,
            cpu=CpuUse(used.clock - cpu.clock, used.busy - cpu.busy, used.own - cpu.own),
            programs_per_step=(asked.programs - launched.programs) / timed if asked and launched else None,
            host_reads=asked.reads - launched.reads if asked and launched else None,
            chips=(chips, chips_after) if chips is not None and chips_after is not None else None,
            data_wait_seconds=data.seconds - waited,
        )

    measured = window([])
    stood_still = (
        agree(float(bool(standstills(measured.blocks)))) > 0
    )  # on any rank, so that all measure again
    # What compiled within the window is for the report to tell, and compilers are not this process.
    compiled = agree(float(measured.recompiles)) > 0
    if stood_still and not compiled and not agree(float(not has_time(sum(measured.block_seconds)))):
        keep(measured)
        pull(block_steps)  # untimed, as before the first: caches are cold
        measured = window(measured.blocks)
    return measured


def first_losses(steps: Iterator[Step], device: Device, count: int) -> Window:
    """Take `count` steps for their losses; nothing but the first one is timed."""
    start = time.perf_counter()
    history = [next(steps)]
    device.synchronize()
    first_step_seconds = time.perf_counter() - start
    history.extend(islice(steps, count - 1))
    device.synchronize()
    return Window(
        first_step_seconds=first_step_seconds,
        warmup_steps=count,
        block_steps=None,
        blocks=[],
        set_aside=[],
        step_seconds=[],
        history=history,
        memory=PeakMemory(bytes=None, method="not measured"),
        gpu_memory_bytes=None,
        recompiles=0,
        gc_collections=0,
        gc_seconds=0.0,
        energy_joules=None,
        cpu=None,
        programs_per_step=None,
        host_reads=None,
        chips=None,
        data_wait_seconds=0.0,
    )


def more_losses(
    window: Window, steps: Iterator[Step], device: Device, wanted: int, progress: Progress | None = None
) -> None:
    """Train on, untimed, until the window's history has `wanted` steps."""
    while len(window.history) < wanted:
        if progress:
            progress("losses", len(window.history), None)
        window.history.extend(
            islice(steps, min(max(window.block_steps or 1, 10), wanted - len(window.history)))
        )
        device.synchronize()


def read(values: Iterable[torch.Tensor]) -> list[float]:
    """Scalars of the device, fetched all at once."""
    return torch.stack(list(values)).tolist()

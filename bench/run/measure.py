"""Pull optimiser steps and time them: first step, warm-up, window; then, untimed, further losses.

The clock is read only after synchronising the device, and no loss is read within a window.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import torch

from bench.host.standstill import Instant, Pulse, standstills
from bench.host.telemetry import CpuTimes, cpu_times
from bench.ladder.ladder import Protocol
from bench.process.worker_side import TooSlow
from gpt2.device import ChipUse, Device, PeakMemory
from gpt2.prefetch import Waiting
from gpt2.training.train import Step

Progress = Callable[[str, int, float | None], None]
"""Called between blocks with the phase, the steps so far and the tokens per second of the last block."""

MOST_WARMUP_STEPS = 100
"""Warm-up ends after these even if something still compiles; the report then says so."""


class Collections:
    """Counts and times Python's garbage collections, which stop the thread that feeds the device."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._start = 0.0

    def __enter__(self) -> Collections:
        gc.callbacks.append(self._called)
        return self

    def __exit__(self, *exception: object) -> None:
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        else:
            self.count += 1
            self.seconds += time.perf_counter() - self._start


@dataclass(frozen=True)
class CpuUse:
    """CPU time within an interval: of all processes of this machine, and of this process alone."""

    seconds: float
    busy_seconds: float
    own_seconds: float


def _cpu_use(before: CpuTimes, after: CpuTimes) -> CpuUse | None:
    if before.busy is None or after.busy is None:
        return None
    return CpuUse(after.clock - before.clock, after.busy - before.busy, after.own - before.own)


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one rank measured; see the fields of bench.records.measurement.Measurement."""

    first_step_seconds: float
    warmup_steps: int
    history: list[Step]
    """Every step so far, from the first; more_losses() adds to it."""
    block_steps: int | None = None
    blocks: list[Instant] = field(default_factory=list)
    set_aside: list[Instant] = field(default_factory=list)
    """Blocks of a first window in which a rank stood still; empty if the first window counts."""
    step_seconds: list[float] = field(default_factory=list)
    """Duration of each step of the blocks, by the device's own clock; empty if it has none."""
    memory: PeakMemory = field(default_factory=lambda: PeakMemory(bytes=None, method="not measured"))
    gpu_memory_bytes: int | None = None
    """Memory of the whole GPU that the process had taken at the end of the window; None if unknown."""
    recompiles: int = 0
    gc_collections: int = 0
    gc_seconds: float = 0.0
    energy_joules: float | None = None
    cpu: CpuUse | None = None
    """CPU time within the window; None if nothing was timed, or the system does not tell."""
    programs_per_step: float | None = None
    host_reads: int | None = None
    chips: tuple[list[ChipUse], list[ChipUse]] | None = None
    """Use of the chips just before and just after the window; None if unknown."""
    data_wait_seconds: float = 0.0

    @property
    def block_seconds(self) -> list[float]:
        """Wall-clock time of each block."""
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
    stop_below: float | None = None,
) -> Window:
    """Time one rung by pulling `steps`.

    A window in which the process stood still, because the system stopped it or slept, is taken once more if
    has_time(seconds of the window) allows; keep() receives the first one before that. agree: returns the
    largest of the ranks' values on every rank, so that all take equally many steps. pulse: detects
    standstills; it must be entered. gpu_memory: bytes that the process has taken of the whole GPU.
    stop_below: tokens/s that one of two warm-up steps has to reach, by the slowest rank. Raises TooSlow.
    """
    timing = _Timing(
        steps=steps,
        device=device,
        protocol=protocol,
        data=data,
        agree=agree,
        tell=progress or (lambda phase, steps, tps: None),
        clock=clock,
        pulse=pulse,
        gpu_memory=gpu_memory,
    )
    timing.first_step()
    timing.warm_up(stop_below)
    timing.settle()
    window = timing.window()
    stood_still = agree(float(bool(standstills(window.blocks)))) > 0  # on any rank: all measure again
    compiled = agree(float(window.recompiles)) > 0  # compilers run in other processes: no standstill
    if stood_still and not compiled and not agree(float(not has_time(sum(window.block_seconds)))):
        keep(window)
        timing.pull(timing.block_steps)  # untimed, because caches are cold
        window = timing.window(set_aside=window.blocks)
    return window


@dataclass(kw_only=True)
class _Timing:
    """The stages of measure(), in the order of its methods; for the fields without a word see there."""

    steps: Iterator[Step]
    device: Device
    protocol: Protocol
    data: Waiting
    agree: Callable[[float], float]
    tell: Progress
    clock: Callable[[], float]
    pulse: Pulse | None
    gpu_memory: Callable[[], int | None]
    history: list[Step] = field(default_factory=list)
    """Every step so far."""
    first_step_seconds: float = 0.0
    step_seconds: float = 0.0
    """Duration of the last step that was taken alone."""
    warmed: float = 0.0
    """Seconds of steps since the last compilation."""
    block_steps: int = 1

    def pull(self, count: int) -> tuple[Instant, list[float]]:
        """Take `count` steps; return their duration, synchronised, and the seconds of each step."""
        start, marks = Instant.now(self.pulse, self.clock), [self.device.mark()]
        for _ in range(count):
            self.history.append(next(self.steps))
            marks.append(self.device.mark())
        self.device.synchronize()
        passed = Instant.now(self.pulse, self.clock) - start
        return passed, [self.device.seconds_between(*pair) for pair in pairwise(marks) if None not in pair]

    def first_step(self) -> None:
        self.tell("first step", 0, None)
        self.first_step_seconds = self.step_seconds = self.pull(1)[0].seconds

    def warm_up(self, stop_below: float | None) -> None:
        """Take single steps until none of them compiles any more. Raises TooSlow."""
        compiling, slow_steps = True, 0
        while len(self.history) < MOST_WARMUP_STEPS and (
            compiling or slow_steps or len(self.history) < self.protocol.min_warmup_steps
        ):
            self.tell("warm-up", len(self.history), None)
            before = self.device.compilations()
            self.step_seconds = self.pull(1)[0].seconds
            compiling = self.agree(float(self.device.compilations() > before)) > 0  # on any rank
            # A device idles during compilation.
            self.warmed = 0.0 if compiling else self.warmed + self.step_seconds
            if stop_below is not None and not compiling:
                tps = self.history[-1].tokens / self.agree(self.step_seconds)
                slow_steps = slow_steps + 1 if tps < stop_below else 0
                if slow_steps == 2:  # one may have been disturbed
                    raise TooSlow(tps)

    def settle(self) -> None:
        """Find how many steps a block has, and leave blocks untimed until the warm-up has lasted.

        Clocks settle meanwhile, and the duration of one step is too noisy to size blocks by.
        """
        least = self.protocol.min_warmup_seconds
        self._size_blocks(self.step_seconds)
        while self.block_steps > 1 or self.agree(self.warmed) < least:
            seconds = self.pull(self.block_steps)[0].seconds
            self.warmed += seconds
            self._size_blocks(seconds / self.block_steps)
            if self.agree(self.warmed) >= least:
                break

    def _size_blocks(self, step_seconds: float) -> None:
        self.block_steps = max(1, round(self.protocol.block_seconds / self.agree(step_seconds)))

    def window(self, set_aside: Sequence[Instant] = ()) -> Window:
        """Time blocks. set_aside: those of a window before, which does not count."""
        device, warmup_steps = self.device, len(self.history)
        self.tell("window", warmup_steps, None)
        compiled, waited = device.compilations(), self.data.seconds
        device.reset_peak_memory()
        chips, launched = device.use(), device.launches()
        energy, cpu = device.energy_joules(), cpu_times()
        # Recompilations are counted, not forbidden by torch.compiler.set_stance, which would end one rank in
        # the middle of a step and leave the others waiting.
        with Collections() as collections:
            blocks, step_seconds = self._blocks()
        spent, used, launched_after = device.energy_joules(), cpu_times(), device.launches()
        memory, chips_after = device.peak_memory(), device.use()
        timed = len(self.history) - warmup_steps
        return Window(
            first_step_seconds=self.first_step_seconds,
            warmup_steps=warmup_steps,
            block_steps=self.block_steps,
            blocks=blocks,
            set_aside=[*set_aside],
            step_seconds=step_seconds,
            history=self.history,
            memory=memory,
            gpu_memory_bytes=self.gpu_memory(),  # the peak, as torch frees nothing meanwhile
            recompiles=device.compilations() - compiled,
            gc_collections=collections.count,
            gc_seconds=collections.seconds,
            energy_joules=spent - energy if spent is not None and energy is not None else None,
            cpu=_cpu_use(cpu, used),
            programs_per_step=(
                (launched_after.programs - launched.programs) / timed if launched_after and launched else None
            ),
            host_reads=launched_after.reads - launched.reads if launched_after and launched else None,
            chips=(chips, chips_after) if chips is not None and chips_after is not None else None,
            data_wait_seconds=self.data.seconds - waited,
        )

    def _blocks(self) -> tuple[list[Instant], list[float]]:
        """Take the window's blocks; return their durations, and the seconds of each of their steps."""
        protocol, blocks, step_seconds = self.protocol, list[Instant](), list[float]()
        while len(blocks) < protocol.blocks:
            lasted = sum(block.seconds for block in blocks)
            if len(blocks) >= protocol.least_blocks and self.agree(lasted) > protocol.max_window_seconds:
                break
            block, of_steps = self.pull(self.block_steps)
            blocks.append(block)
            step_seconds += of_steps
            tps = self.block_steps * self.history[-1].tokens / block.seconds
            self.tell("window", len(self.history), tps)
        return blocks, step_seconds


def first_losses(steps: Iterator[Step], device: Device, count: int) -> Window:
    """Take `count` steps for their losses; only the first is timed."""
    start = time.perf_counter()
    history = [next(steps)]
    device.synchronize()
    first_step_seconds = time.perf_counter() - start
    history.extend(islice(steps, count - 1))
    device.synchronize()
    return Window(first_step_seconds=first_step_seconds, warmup_steps=count, history=history)


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
    """Fetch scalars from the device, all at once."""
    return torch.stack(list(values)).tolist()

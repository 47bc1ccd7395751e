from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.ladder import Protocol
from bench.measure import MOST_WARMUP_STEPS, Waiting, combine, measure
from gpt2.device import Device, PeakMemory
from gpt2.train import Step

PROTOCOL = Protocol(min_warmup_steps=3, block_seconds=1.0, blocks=10, max_window_seconds=90)


class FakeDevice(Device):
    """Work is queued at once and takes its time when it is waited for, as on a GPU."""

    kind = "cpu"

    def __init__(self, step_seconds: float, compiling_steps: int = 0) -> None:
        super().__init__()
        self.now = 0.0
        self.step_seconds, self.compiling_steps = step_seconds, compiling_steps
        self.queued = self.steps = self.waits = 0
        self.reset_at: int | None = None

    def steps_of(self, tokens: int = 100) -> Iterator[Step]:
        while True:
            self.queued += 1
            self.steps += 1
            yield Step(loss=torch.tensor(float(self.steps)), grad_norm=torch.tensor(0.5), tokens=tokens)

    def synchronize(self) -> None:
        self.now += self.queued * self.step_seconds
        self.queued = 0
        self.waits += 1

    def compilations(self) -> int:
        return min(self.steps, self.compiling_steps)

    def reset_peak_memory(self) -> None:
        self.reset_at = self.steps

    def peak_memory(self) -> PeakMemory:
        return PeakMemory(bytes=123, method="fake", run_bytes=456)


def run(device: FakeDevice, protocol: Protocol = PROTOCOL, **options):
    return measure(device.steps_of(), device, protocol, Waiting([]), clock=lambda: device.now, **options)


def test_queued_work_is_waited_for_before_the_clock_is_read() -> None:
    window = run(FakeDevice(0.25))
    assert window.first_step_seconds == 0.25
    assert window.block_seconds == pytest.approx([1.0] * 10)


def test_a_block_is_as_many_steps_as_last_about_block_seconds() -> None:
    assert run(FakeDevice(0.1)).block_steps == 10
    assert run(FakeDevice(0.3)).block_steps == 3
    assert run(FakeDevice(5.0)).block_steps == 1


def test_within_a_block_nobody_waits_for_the_device() -> None:
    device = FakeDevice(0.01)
    window = run(device)
    assert window.block_steps == 100
    assert device.waits == window.warmup_steps + len(window.block_seconds)


def test_a_slow_rung_gets_fewer_blocks_but_never_less_than_five() -> None:
    assert len(run(FakeDevice(15.0)).block_seconds) == 6
    assert len(run(FakeDevice(60.0)).block_seconds) == 5


def test_warm_up_goes_on_until_nothing_compiles() -> None:
    assert run(FakeDevice(0.5)).warmup_steps == 3
    assert run(FakeDevice(0.5, compiling_steps=7)).warmup_steps == 8


def test_warm_up_goes_on_while_another_rank_compiles() -> None:
    other = iter([1.0, 1.0, 1.0, 1.0, 0.0])
    window = run(FakeDevice(0.5), agree=lambda value: max(value, next(other, 0.0)))
    assert window.warmup_steps == 6


def test_warm_up_ends_even_if_compiling_does_not() -> None:
    assert run(FakeDevice(0.5, compiling_steps=10**9)).warmup_steps == MOST_WARMUP_STEPS


def test_ranks_take_as_many_steps_as_the_slowest_one_would() -> None:
    assert run(FakeDevice(0.1), agree=lambda value: value * 5).block_steps == 2


def test_peak_memory_is_that_of_the_window() -> None:
    device = FakeDevice(0.5)
    window = run(device)
    assert device.reset_at == window.warmup_steps


def test_losses_are_those_of_every_step_from_the_first() -> None:
    window = run(FakeDevice(0.5))
    assert window.losses == [float(n + 1) for n in range(window.warmup_steps + 10 * 2)]
    assert len(window.grad_norms) == len(window.losses)


def test_losses_that_are_still_wanted_after_the_window_are_not_timed() -> None:
    window = run(FakeDevice(0.5), Protocol(min_warmup_steps=3, loss_steps=77))
    assert len(window.losses) == 77
    assert len(window.block_seconds) == 10


def test_waiting_for_data_is_counted_in_the_window_only() -> None:
    device = FakeDevice(0.5)
    data: Waiting[int] = Waiting([])
    data.seconds = 100.0  # before the window

    def steps() -> Iterator[Step]:
        for number, step in enumerate(device.steps_of(), start=1):
            data.seconds += 0.25 if number > 3 else 0.0
            yield step

    window = measure(steps(), device, PROTOCOL, data, clock=lambda: device.now)
    assert window.data_wait_seconds == 0.25 * 20


def test_a_recompilation_in_the_window_stops_it() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    compiled = torch.compile(step, backend="eager", dynamic=False)

    def steps() -> Iterator[Step]:
        for number in range(1000):
            size = 4 if number < 8 else 5
            yield Step(loss=compiled(torch.ones(size)), grad_norm=torch.tensor(0.0), tokens=1)

    class Real(FakeDevice):
        compilations = Device.compilations

    protocol = Protocol(min_warmup_steps=3, block_seconds=1e-9)
    with pytest.raises(RuntimeError, match="recompile"):
        measure(steps(), Real(0.5), protocol, Waiting([]))


FACTS = {
    "tokens_per_step": 200,
    "startup_seconds": 1.0,
    "compile_cache": None,
    "parameters": 1,
    "flops_per_token": 1,
    "flops_formula": "F",
    "peak_flops_bf16": None,
    "peak_flops_source": "unknown",
}


def test_several_ranks_count_by_the_slowest_the_hungriest_and_the_mean_loss() -> None:
    from dataclasses import replace

    fast = run(FakeDevice(0.5))
    slow = replace(
        fast,
        block_seconds=[s * 2 for s in fast.block_seconds],
        losses=[loss + 1 for loss in fast.losses],
        memory=PeakMemory(bytes=999, method="fake"),
    )
    found = combine([fast, slow], **FACTS)
    assert found.block_seconds == slow.block_seconds
    assert found.peak_memory_bytes == 999
    assert found.run_peak_memory_bytes == 456
    assert found.losses == [loss + 0.5 for loss in fast.losses]
    assert [rank.peak_memory_bytes for rank in found.ranks] == [123, 999]

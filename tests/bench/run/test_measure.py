from __future__ import annotations

import gc
import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from windows import FACTS, PROTOCOL, FakeDevice, run

from bench.ladder.ladder import Protocol, Rung
from bench.run import worker
from bench.run.aggregate import combine
from bench.run.measure import MOST_WARMUP_STEPS, CpuUse, Waiting, first_losses, measure, more_losses, read
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device import Device, PeakMemory
from gpt2.training.train import Step


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
    single_steps, settling_block = 3, 1
    assert device.waits == single_steps + settling_block + len(window.block_seconds)


def test_a_slow_rung_gets_fewer_blocks_but_never_less_than_five() -> None:
    assert len(run(FakeDevice(15.0)).block_seconds) == 7
    assert len(run(FakeDevice(60.0)).block_seconds) == 5


def test_a_window_that_turns_out_slower_than_its_warm_up_still_ends_in_time() -> None:
    device = FakeDevice(1.0)

    def steps() -> Iterator[Step]:
        for number, step in enumerate(device.steps_of()):
            device.step_seconds = 1.0 if number < 5 else 20.0
            yield step

    window = measure(steps(), device, PROTOCOL, Waiting([]), clock=lambda: device.now)
    assert sum(window.block_seconds) == pytest.approx(100.0, abs=20.0)


def test_blocks_are_sized_by_a_whole_block_not_by_one_step() -> None:
    """The last warm-up step alone was ten times slower than those of a block."""
    device = FakeDevice(0.5)

    def steps() -> Iterator[Step]:
        for number, step in enumerate(device.steps_of()):
            device.step_seconds = 0.5 if number < 3 else 0.05
            yield step

    window = measure(steps(), device, PROTOCOL, Waiting([]), clock=lambda: device.now)
    assert window.block_steps == 20


def test_warm_up_goes_on_until_nothing_compiles() -> None:
    assert run(FakeDevice(2.0)).warmup_steps == 3
    assert run(FakeDevice(2.0, compiling_steps=7)).warmup_steps == 8


def test_warm_up_goes_on_while_another_rank_compiles() -> None:
    other = iter([1.0, 1.0, 1.0, 1.0, 0.0])
    window = run(FakeDevice(2.0), agree=lambda value: max(value, next(other, 0.0)))
    assert window.warmup_steps == 6


def test_warm_up_lasts_for_the_protocol_s_seconds_after_the_first_step() -> None:
    device = FakeDevice(0.125)
    window = run(device, replace(PROTOCOL, min_warmup_seconds=8.0))
    assert (window.warmup_steps - 1) * 0.125 == 8.25  # two single steps, and eight blocks of a second


def test_warm_up_ends_even_if_compiling_does_not() -> None:
    assert run(FakeDevice(2.0, compiling_steps=10**9)).warmup_steps == MOST_WARMUP_STEPS


def test_ranks_take_as_many_steps_as_the_slowest_one_would() -> None:
    assert run(FakeDevice(0.1), agree=lambda value: value * 5).block_steps == 2


class Marked(FakeDevice):
    """A moment is that at which the work queued so far will be done, as with the events of a GPU."""

    def mark(self) -> float | None:
        return self.now + self.queued * self.step_seconds


def test_each_step_of_the_window_is_timed_by_the_device_s_own_clock_without_waiting_for_it() -> None:
    device, plain = Marked(0.25), FakeDevice(0.25)
    window = run(device)
    assert window.step_seconds == pytest.approx([0.25] * 40)
    run(plain)
    assert device.waits == plain.waits


def test_a_device_whose_events_disturb_it_has_no_times_of_steps() -> None:
    class Unmarked(FakeDevice):
        def mark(self) -> None:
            return None

    window = run(Unmarked(0.25))
    assert window.step_seconds == []
    losses = [[1.0] * len(window.history)]
    assert combine([window], losses, [1.0] * len(window.history), **FACTS).step_seconds is None


def test_peak_memory_is_that_of_the_window() -> None:
    device = FakeDevice(0.5)
    window = run(device)
    assert device.reset_at == window.warmup_steps


def test_losses_are_those_of_every_step_from_the_first() -> None:
    window = run(FakeDevice(0.5))
    assert window.block_steps is not None
    steps = window.warmup_steps + window.block_steps * len(window.block_seconds)
    assert read(step.loss for step in window.history) == [float(n + 1) for n in range(steps)]


def test_losses_that_are_still_wanted_after_the_window_are_taken_untimed() -> None:
    device = FakeDevice(0.5)
    steps = device.steps_of()
    window = measure(steps, device, PROTOCOL, Waiting([]), clock=lambda: device.now)
    timed = list(window.block_seconds)
    more_losses(window, steps, device, wanted=77)
    assert read(step.loss for step in window.history) == [float(n + 1) for n in range(77)]
    assert window.block_seconds == timed


def test_waiting_for_data_is_counted_in_the_window_only() -> None:
    device = FakeDevice(0.5)
    data: Waiting[int] = Waiting([])
    data.seconds = 100.0  # before the window

    def steps() -> Iterator[Step]:
        for number, step in enumerate(device.steps_of(), start=1):
            data.seconds += 0.25 if number > 3 + 2 else 0.0  # after three steps and a block of two
            yield step

    window = measure(steps(), device, PROTOCOL, data, clock=lambda: device.now)
    assert window.data_wait_seconds == 0.25 * 20


def test_memory_of_the_whole_gpu_is_sampled_after_the_window_on_the_rank_that_needs_most() -> None:
    device = FakeDevice(0.25)
    first = run(device, gpu_memory=lambda: device.steps)
    assert first.gpu_memory_bytes == len(first.history)
    windows = [replace(first, gpu_memory_bytes=each) for each in (5, None, 7)]
    assert combine(windows, [[1.0]] * 3, [1.0], **FACTS).gpu_memory_bytes == 7
    assert combine([run(FakeDevice(0.25))], [[1.0]], [1.0], **FACTS).gpu_memory_bytes is None


def test_what_a_gpu_has_in_use_is_looked_at_before_the_device_is_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def opened(toggles: Toggles) -> None:
        seen.append("opened")
        raise UnsupportedToggle("device", "cuda", "there is none")

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(worker, "GpuMemory", lambda place: seen.append(f"GPU {place}"))
    monkeypatch.setattr("gpt2.device.find", opened)
    rung = Rung(name="a", index=0, changed=[], expect=None, toggles=Toggles(device="cuda"))
    worker._run(None, rung, Namespace(out=tmp_path / "m.json"))  # type: ignore[arg-type]
    assert seen == ["GPU 1", "opened"]


def test_a_process_that_is_asked_for_no_proofs_says_so_after_its_window_only() -> None:
    """Until then its record lacks them, so that one broken off is not taken for complete."""
    steps = Namespace(device=Namespace(lazy=False), toggles=Toggles())
    asked = Namespace(proofs="none", gradients=False)
    found = worker._after_window(steps, Namespace(history=[]), 0, None, asked, [])  # type: ignore[arg-type]
    assert list(found) == [{"proofs": {}}]


class FakeCheck:
    """Gradients that are so far apart."""

    def __init__(self, difference: float, error: float | None) -> None:
        self.difference, self._error = difference, error

    def error_over_eager(self) -> float:
        if self._error is None:
            raise RuntimeError("out of memory")
        return self._error


@pytest.mark.parametrize(
    ("difference", "error", "expected"),
    [
        (0.01, 1.2, {"gradient_difference": 0.01}),
        (0.09, 1.2, {"gradient_difference": 0.09, "gradient_error_over_eager": 1.2}),
        (0.09, None, {"gradient_difference": 0.09, "gradient_error_over_eager": None}),
        (math.inf, 1.2, {"gradient_difference": math.inf}),
    ],
)
def test_what_a_number_format_explains_is_asked_only_where_gradients_are_far_apart_and_loses_no_difference(
    difference: float, error: float | None, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2.proofs.gradients.GradientCheck", lambda *given: FakeCheck(difference, error))
    steps = Namespace(micro_batch=(), toggles=Toggles(autocast="bfloat16"))
    told: list[str] = []
    assert worker._gradients(steps, told) == expected  # type: ignore[arg-type]
    lost = "gradients could not be compared with those in float32: RuntimeError: out of memory"
    assert told == ([] if error else [lost])


def test_a_recompilation_in_the_window_is_counted() -> None:
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
    assert measure(steps(), Real(0.5), protocol, Waiting([])).recompiles == 1


def test_garbage_collections_in_the_window_are_counted_and_timed() -> None:
    device = FakeDevice(0.5)

    def steps() -> Iterator[Step]:
        for number, step in enumerate(device.steps_of(), start=1):
            if number in (2, 10, 15):  # once before the window
                gc.collect()
            yield step

    window = measure(steps(), device, PROTOCOL, Waiting([]), clock=lambda: device.now)
    assert window.gc_collections >= 2
    assert 0 < window.gc_seconds < 60


def test_energy_is_that_of_the_window_and_absent_without_a_counter() -> None:
    class Metered(FakeDevice):
        def energy_joules(self) -> float:
            return 1000.0 + 3.0 * self.now

    assert run(Metered(0.5)).energy_joules == pytest.approx(3.0 * 10.0)
    assert run(FakeDevice(0.5)).energy_joules is None


def test_ranks_add_up_their_energy_unless_one_has_no_counter() -> None:
    window = replace(run(FakeDevice(0.5)), energy_joules=5.0)
    losses, norms = [[1.0], [1.0]], [1.0]
    assert combine([window, window], losses, norms, **FACTS).energy_joules == 10.0
    assert (
        combine([window, replace(window, energy_joules=None)], losses, norms, **FACTS).energy_joules is None
    )


def test_work_of_others_during_the_window_is_what_all_ranks_together_did_not_do() -> None:
    window = replace(run(FakeDevice(0.5)), cpu=CpuUse(10.0, 25.0, 8.0))
    other = replace(window, cpu=CpuUse(10.0, 25.0, 9.0))
    assert combine([window, other], [[1.0], [1.0]], [1.0], **FACTS).other_cores == pytest.approx(0.8)


def test_ranks_on_several_nodes_are_held_to_the_work_of_their_own_node() -> None:
    window = replace(run(FakeDevice(0.5)), cpu=CpuUse(10.0, 12.0, 9.0))
    busier = replace(window, cpu=CpuUse(10.0, 25.0, 9.0))
    assert combine([window, busier], [[1.0], [1.0]], [1.0], nodes=2, **FACTS).other_cores == pytest.approx(
        1.6
    )


def test_a_process_for_its_losses_alone_times_nothing_but_the_first_step() -> None:
    device = FakeDevice(0.5)
    window = first_losses(device.steps_of(), device, 5)
    assert read(step.loss for step in window.history) == [1.0, 2.0, 3.0, 4.0, 5.0]
    found = combine([window], [[1.0] * 5], [1.0] * 5, **FACTS)
    assert found.block_seconds == []
    assert found.block_steps is found.tokens_per_second is found.peak_memory_bytes is None


def test_several_ranks_count_by_the_slowest_the_hungriest_and_the_mean_loss() -> None:
    fast = run(FakeDevice(0.5))
    blocks = [replace(block, seconds=block.seconds * 2) for block in fast.blocks]
    slow = replace(fast, blocks=blocks, memory=PeakMemory(bytes=999, method="fake"))
    found = combine([fast, slow], [[4.0, 3.0], [5.0, 4.0]], [1.0, 1.0], **FACTS)
    assert found.block_seconds == slow.block_seconds
    assert found.peak_memory_bytes == 999
    assert found.run_peak_memory_bytes == 456
    assert found.losses == [4.5, 3.5]
    assert [rank.peak_memory_bytes for rank in found.ranks] == [123, 999]

"""Windows on a device whose clock is made up."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.ladder.ladder import Protocol
from bench.run.measure import Waiting, measure
from gpt2.device import Device, PeakMemory
from gpt2.training.train import Step

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

    def chip(self) -> str:
        return "fake"

    def reset_peak_memory(self) -> None:
        self.reset_at = self.steps

    def peak_memory(self) -> PeakMemory:
        return PeakMemory(bytes=123, method="fake", run_bytes=456)


def run(device: FakeDevice, protocol: Protocol = PROTOCOL, **options):
    return measure(device.steps_of(), device, protocol, Waiting([]), clock=lambda: device.now, **options)


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

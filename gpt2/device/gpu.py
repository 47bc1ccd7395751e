"""GPUs that torch has a module for with torch.cuda's interface: one for each rank."""

from __future__ import annotations

import gc
import os
from typing import Any, ClassVar

import torch

from gpt2.config.toggles import BASELINE, Toggles, UnsupportedToggle
from gpt2.device.base import Device, PeakMemory


class Gpu(Device):
    """One GPU of its kind, the LOCAL_RANK-th of this machine."""

    api: ClassVar[Any]
    """torch.cuda, or torch's module of the same interface for this kind."""
    noun: ClassVar[str]
    """What such GPUs are called in messages."""
    absent: ClassVar[str]
    """What to say where torch finds none."""
    _run_peak = 0

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        if not self.api.is_available():
            raise UnsupportedToggle("device", self.kind, self.absent)
        if local_rank >= self.count():
            raise UnsupportedToggle("world_size", local_rank + 1, self.too_many_ranks())
        self.torch_device = torch.device(self.kind, local_rank)
        self.ddp_device_ids = [local_rank]
        self.api.set_device(local_rank)

    def too_many_ranks(self) -> str:
        """Return why a rank beyond the GPUs of this machine is refused."""
        found = self.count()
        return f"more ranks than the {found} {self.noun}(s) here; choose at most {found}"

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", toggles.world_size))  # only this machine's ranks count
        if toggle == "world_size" and here > self.count():
            return self.too_many_ranks()
        return super().refuses(toggle, toggles)

    def synchronize(self) -> None:
        self.api.synchronize(self.torch_device)

    def mark(self) -> Any:
        event = self.api.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3

    def release_memory(self) -> None:
        gc.collect()
        self.api.empty_cache()  # else autotuning's buffers stay reserved, in fragments

    def reset_peak_memory(self) -> None:
        self._run_peak = max(self._run_peak, self.api.max_memory_allocated(self.torch_device))
        self.api.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> PeakMemory:
        peak = self.api.max_memory_allocated(self.torch_device)
        return PeakMemory(
            bytes=peak,
            method=f"allocated, window (torch.{self.kind})",
            reserved_bytes=self.api.max_memory_reserved(self.torch_device),
            run_bytes=max(peak, self._run_peak),
        )

    def chip(self) -> str:
        return self.api.get_device_name(self.torch_device)

    def count(self) -> int:
        return self.api.device_count()

    def memory_bytes(self) -> int | None:
        return self.api.get_device_properties(self.torch_device).total_memory

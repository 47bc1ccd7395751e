"""Intel GPUs, by torch.xpu, which has torch.cuda's interface."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpt2.config.toggles import BASELINE, Toggles, UnsupportedToggle
from gpt2.device.base import Device, PeakMemory


class Xpu(Device):
    """One Intel GPU."""

    kind = "xpu"
    ddp_backend = "xccl"
    profiler_activities = (ProfilerActivity.CPU, ProfilerActivity.XPU)

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        if not torch.xpu.is_available():
            reason = "torch finds no Intel GPU here; choose cpu, or install torch's build for XPUs"
            raise UnsupportedToggle("device", "xpu", reason)
        if local_rank >= torch.xpu.device_count():
            raise UnsupportedToggle("world_size", local_rank + 1, self._too_many_ranks())
        self.torch_device = torch.device("xpu", local_rank)
        self.ddp_device_ids = [local_rank]
        self._run_peak = 0
        torch.xpu.set_device(local_rank)

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        if toggle == "world_size" and toggles.world_size > torch.xpu.device_count():
            return self._too_many_ranks()
        return super().refuses(toggle, toggles)

    def _too_many_ranks(self) -> str:
        found = torch.xpu.device_count()
        return f"more ranks than the {found} Intel GPU(s) here; choose at most {found}"

    def synchronize(self) -> None:
        torch.xpu.synchronize(self.torch_device)

    def mark(self) -> Any:
        event = torch.xpu.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3

    def release_memory(self) -> None:
        gc.collect()
        torch.xpu.empty_cache()

    def reset_peak_memory(self) -> None:
        self._run_peak = max(self._run_peak, torch.xpu.max_memory_allocated(self.torch_device))
        torch.xpu.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> PeakMemory:
        peak = torch.xpu.max_memory_allocated(self.torch_device)
        return PeakMemory(
            bytes=peak,
            method="allocated, window (torch.xpu)",
            reserved_bytes=torch.xpu.max_memory_reserved(self.torch_device),
            run_bytes=max(peak, self._run_peak),
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        # Outside torch's allocator, the driver reports it in words of its own.
        said = ("out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")
        return super().is_out_of_memory(error) or any(each in str(error) for each in said)

    def chip(self) -> str:
        return torch.xpu.get_device_name(self.torch_device)

    def count(self) -> int:
        return torch.xpu.device_count()

    def memory_bytes(self) -> int | None:
        return torch.xpu.get_device_properties(self.torch_device).total_memory

    def versions(self) -> dict[str, str]:
        return {"driver": torch.xpu.get_device_properties(self.torch_device).driver_version}

"""Apple GPUs."""

from __future__ import annotations

import torch

from gpt2.config.toggles import BASELINE, Toggles, UnsupportedToggle
from gpt2.device.base import Device, PeakMemory
from gpt2.device.cpu import Cpu
from gpt2.hardware.host import total_memory


class Mps(Device):
    """The GPU of an Apple chip."""

    kind = "mps"
    waits_with_the_lock = True
    # Metal also refuses a single tensor above a size limit, however much memory is free.
    out_of_memory = ("MPS backend out of memory", "Invalid buffer size")

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        if not torch.backends.mps.is_available():
            raise UnsupportedToggle("device", "mps", "torch finds no Apple GPU here; choose cpu")
        super().__init__()
        self._highest = self._run_peak = 0

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        value = getattr(toggles, toggle)
        if toggle == "world_size" and value != 1:
            return "a Mac has one GPU; leave it at 1"
        if (toggle, value) == ("autocast", "bfloat16") and not torch.backends.mps.is_macos_or_newer(14, 0):
            return "bfloat16 on an Apple GPU needs macOS 14 or later; choose float16"
        return super().refuses(toggle, toggles)

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> None:
        return None  # events flush the queue, can be reordered and can hang (pytorch 162872, 196395)

    def sample_memory(self) -> None:
        # There is no counter of the peak. This reads the allocator's current figure without waiting.
        self._highest = max(self._highest, torch.mps.current_allocated_memory())

    def reset_peak_memory(self) -> None:
        self._run_peak, self._highest = max(self._run_peak, self._highest), 0

    def peak_memory(self) -> PeakMemory:
        run_peak = max(self._highest, self._run_peak)
        return PeakMemory(
            bytes=self._highest,
            method="allocated, sampled after forward passes (torch.mps)",
            reserved_bytes=torch.mps.driver_allocated_memory(),
            run_bytes=run_peak,
        )

    def chip(self) -> str:
        return Cpu().chip()  # the GPU has no name of its own; the name is that of the whole chip

    def memory_bytes(self) -> int | None:
        return total_memory()  # shared with the CPU

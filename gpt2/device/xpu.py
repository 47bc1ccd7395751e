"""Intel GPUs."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity

from gpt2.device.gpu import Gpu


class Xpu(Gpu):
    """One Intel GPU."""

    kind = "xpu"
    api = torch.xpu
    noun = "Intel GPU"
    absent = "torch finds no Intel GPU here; choose cpu, or install torch's build for XPUs"
    ddp_backend = "xccl"
    profiler_activities = (ProfilerActivity.CPU, ProfilerActivity.XPU)
    # Outside torch's allocator, the driver reports it in words of its own.
    out_of_memory = ("out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")

    def versions(self) -> dict[str, str]:
        return {"driver": torch.xpu.get_device_properties(self.torch_device).driver_version}

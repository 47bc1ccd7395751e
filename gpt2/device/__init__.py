"""The accelerator seam: everything that differs between kinds of device is a method of one class here.

A new device is one class in a module of its own, registered in DEVICES.
"""

from __future__ import annotations

import os

from gpt2.device.base import Device, PeakMemory
from gpt2.device.cpu import Cpu
from gpt2.device.cuda import Cuda
from gpt2.device.mps import Mps
from gpt2.toggles import Toggles, UnsupportedToggle, check

__all__ = ["DEVICES", "Cpu", "Cuda", "Device", "Mps", "PeakMemory", "find"]

DEVICES: dict[str, type[Device]] = {"cpu": Cpu, "cuda": Cuda, "mps": Mps}


def find(toggles: Toggles) -> Device:
    """The device of this process (its LOCAL_RANK under torchrun). Raises UnsupportedToggle."""
    check(toggles)
    if toggles.device not in DEVICES:
        known = ", ".join(DEVICES)
        raise UnsupportedToggle("device", toggles.device, f"this version trains on {known}; choose one of them")
    device = DEVICES[toggles.device](int(os.environ.get("LOCAL_RANK", 0)), toggles.cuda_graphs)
    check(toggles, device)
    return device

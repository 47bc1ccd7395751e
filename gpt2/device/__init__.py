"""The accelerator seam: everything that differs between kinds of device is a method of one class here.

A new device is one class in a module of its own, registered in DEVICES.
"""

from __future__ import annotations

import os
from dataclasses import fields

from gpt2 import support
from gpt2.device.base import ChipUse, Device, DeviceError, Launches, PeakMemory
from gpt2.device.cpu import Cpu
from gpt2.device.cuda import Cuda
from gpt2.device.mps import Mps
from gpt2.device.xla import Xla
from gpt2.toggles import Toggles, UnsupportedToggle

__all__ = [
    "DEVICES",
    "ChipUse",
    "Cpu",
    "Cuda",
    "Device",
    "DeviceError",
    "Launches",
    "Mps",
    "PeakMemory",
    "Xla",
    "check",
    "find",
]

DEVICES: dict[str, type[Device]] = {"cpu": Cpu, "cuda": Cuda, "mps": Mps, "xla": Xla}


def find(toggles: Toggles) -> Device:
    """The device of this process (its LOCAL_RANK under torchrun). Raises UnsupportedToggle, DeviceError."""
    support.check(toggles)
    if toggles.device not in DEVICES:
        raise UnsupportedToggle("device", toggles.device, f"is not one of {', '.join(DEVICES)}; choose one of them")
    device = DEVICES[toggles.device](toggles, int(os.environ.get("LOCAL_RANK", 0)))
    check(toggles, device)
    return device


def check(toggles: Toggles, device: Device) -> None:
    """Raise UnsupportedToggle where the kind of device, or this very one, cannot do a toggle."""
    support.check(toggles)
    for toggle in fields(toggles):
        if reason := device.refuses(toggle.name, toggles):
            raise UnsupportedToggle(toggle.name, getattr(toggles, toggle.name), reason)

"""The interface to accelerators: each kind of device is one class, with a method for everything that differs.

A new device is a row of gpt2.config.devices.DEVICES and a class in a module of its own, listed in DEVICES.
"""

from __future__ import annotations

import os
from dataclasses import fields

from gpt2.config import constraints
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device.base import ChipUse, Device, DeviceError, Launches, PeakMemory
from gpt2.device.cpu import Cpu
from gpt2.device.cuda import Cuda
from gpt2.device.mps import Mps
from gpt2.device.xla import Xla
from gpt2.device.xpu import Xpu
from gpt2.hardware.host import loopback_answers

__all__ = [
    "DEVICES", "ChipUse", "Cpu", "Cuda", "Device", "DeviceError", "Launches", "Mps", "PeakMemory", "Xla",
    "Xpu", "check", "find",
]  # fmt: skip

DEVICES: dict[str, type[Device]] = {each.kind: each for each in (Cpu, Cuda, Mps, Xpu, Xla)}


def find(toggles: Toggles) -> Device:
    """Open this process's device, number LOCAL_RANK. Raises UnsupportedToggle or DeviceError."""
    constraints.check(toggles)
    if toggles.device not in DEVICES:
        reason = f"is not one of {', '.join(DEVICES)}; choose one of them"
        raise UnsupportedToggle("device", toggles.device, reason)
    device = DEVICES[toggles.device](toggles, int(os.environ.get("LOCAL_RANK", 0)))
    check(toggles, device)
    return device


def check(toggles: Toggles, device: Device) -> None:
    """Raise UnsupportedToggle where the kind of device, or this one, does not support a toggle."""
    constraints.check(toggles)
    if toggles.processes > 1 and not loopback_answers():  # torch would try for half an hour
        reason = "has processes that meet at 127.0.0.1, which does not answer here; run: ip link set lo up"
        raise UnsupportedToggle("world_size", toggles.world_size, reason)
    for toggle in fields(toggles):
        if reason := device.refuses(toggle.name, toggles):
            raise UnsupportedToggle(toggle.name, getattr(toggles, toggle.name), reason)

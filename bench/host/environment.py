"""Describe the machine and the code of a measurement."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from bench.host.telemetry import SYSTEM, cpu_flags, cpu_mhz, variables
from bench.records.machine import Environment
from gpt2.device import Cpu, Device
from gpt2.hardware.clock import measured_mhz
from gpt2.hardware.host import cpuinfo, flags, identity, total_memory, usable_cores
from gpt2.provenance import code_hash, git_state


def describe(device: Device, given: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of a process on `device`. given: variables that its toggles set."""
    commit, dirty = git_state()
    cpu = Cpu()
    return Environment(
        chip=device.chip(),
        device_count=device.count(),
        device_memory_bytes=device.memory_bytes(),
        cpu=cpu.chip(),
        cpu_cores=cpu.count(),
        usable_cores=usable_cores(),
        cpu_flags=cpu_flags(),
        cpu_mhz=highest_cpu_mhz(),
        measured_cpu_mhz=measured_mhz() if "hypervisor" in flags(SYSTEM) else None,
        cpu_identity=identity(cpuinfo(SYSTEM)),
        memory_bytes=total_memory(),
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        versions=device.versions(),
        variables=variables(given),
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        code_hash=code_hash(),
        commit=commit,
        dirty=dirty,
    )


def highest_cpu_mhz(root: Path = SYSTEM) -> float | None:
    """Return the CPU's highest clock; in a virtual machine, which does not know it, the current one."""
    with contextlib.suppress(Exception):  # psutil raises several kinds on Apple chips and in virtual machines
        if highest := psutil.cpu_freq().max:
            return highest
    return cpu_mhz(root) if "hypervisor" in flags(root) else None  # elsewhere the clock varies

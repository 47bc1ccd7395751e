"""The CPU as a device; other devices also take facts about the host from it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import psutil

from gpt2.config.toggles import Toggles
from gpt2.device.base import Device, PeakMemory
from gpt2.hardware import host


class Cpu(Device):
    """The machine's CPUs as one device."""

    kind = "cpu"
    _run_peak = 0
    shared_by_ranks = True
    out_of_memory = ("can't allocate memory",)

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        value = getattr(toggles, toggle)
        if toggle == "allocator" and (missing := host.missing_allocator(str(value))):
            return missing
        compiles = (toggle == "compile" and value != "eager") or (toggle, value) == ("adamw", "compiled")
        if compiles and (missing := host.missing_compiler()):
            return missing
        if (toggle, value) == ("attention", "brgemm"):
            return host.missing_brgemm(toggles.autocast)
        if (toggle, value) == ("affinity", "pinned") and not hasattr(os, "sched_getaffinity"):
            return f"{platform.system()} lets no thread be kept on a core; choose free"
        return super().refuses(toggle, toggles)

    def release_memory(self) -> None:
        gc.collect()
        if sys.platform != "linux":
            return
        library = ctypes.CDLL(None)  # each allocator has its own function for this
        if hasattr(library, "mallctl"):  # jemalloc; 4096 stands for all of its arenas
            library.mallctl(b"arena.4096.purge", None, None, None, ctypes.c_size_t(0))
        elif hasattr(library, "MallocExtension_ReleaseFreeMemory"):  # tcmalloc
            library.MallocExtension_ReleaseFreeMemory()
        elif hasattr(library, "malloc_trim"):  # glibc
            library.malloc_trim(0)

    def reset_peak_memory(self) -> None:
        self._run_peak = max(self._run_peak, _resident_peak())
        self._cleared = False
        with contextlib.suppress(OSError):  # Linux only, and some containers forbid it
            Path("/proc/self/clear_refs").write_text("5")
            self._cleared = True

    def peak_memory(self) -> PeakMemory:
        peak = _resident_peak()
        run_peak = max(peak, self._run_peak)
        if self._cleared:
            return PeakMemory(bytes=peak, method="resident, window (VmHWM)", run_bytes=run_peak)
        return PeakMemory(bytes=run_peak, method="resident, whole run (ru_maxrss)", run_bytes=run_peak)

    def chip(self) -> str:
        if name := host.named_by(host.cpuinfo()):
            return name
        if sys.platform == "darwin":
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
        return platform.processor() or platform.machine()

    def count(self) -> int:
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1

    def peaks(self) -> None:
        return None  # on a Mac the CPU's name would find the GPU's datasheet

    def memory_bytes(self) -> int | None:
        return host.total_memory()


def _resident_peak() -> int:
    if (held := host.memory_peak()) is not None:
        return held
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere

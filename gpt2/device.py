"""The accelerator seam: everything that differs between cpu, cuda and mps is a method of one class here.

A new device is one class, registered in DEVICES.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import re
import resource
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity

from gpt2 import peaks
from gpt2.peaks import Chip
from gpt2.toggles import Toggles, UnsupportedToggle, check, usable_cores


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Memory at its highest, in bytes, and how that was found out: figures of unlike methods do not compare."""

    bytes: int | None
    method: str
    reserved_bytes: int | None = None
    """Held by torch's allocator, used or not."""
    run_bytes: int | None = None
    """Highest of the whole process, initialisation and compilation included."""
    alloc_retries: int | None = None
    """Times the allocator had to give memory back and try again; more than 0 makes the speed suspect."""


class Device(ABC):
    """One accelerator as the trainer sees it; the defaults suit a device that finishes each call at once."""

    kind: str
    ddp_backend = "gloo"
    ddp_device_ids: list[int] | None = None
    shared_by_ranks = False
    """Whether all ranks of a machine work on one device, whose peak then counts once."""
    profiler_activities = (ProfilerActivity.CPU,)
    """What torch's profiler must watch to see all that runs."""

    def __init__(self, local_rank: int = 0, cuda_graphs: bool = False) -> None:
        self.torch_device = torch.device(self.kind)

    def refuses(self, toggle: str, value: object) -> str | None:
        """Why this very device cannot do `toggle: value`, with what to choose instead; None if it can."""
        return None

    def synchronize(self) -> None:
        """Wait until all queued work is done; without this one times the launch."""
        return

    def mark(self) -> Any:
        """Note this moment in the device's queue of work, without waiting for it; None where that cannot be done."""
        return time.perf_counter()

    def seconds_between(self, first: Any, second: Any) -> float:
        """Between two moments that mark() noted, once the device has been waited for."""
        return second - first

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        """A CPU tensor on this device."""
        return tokens.to(self.torch_device)

    def sample_memory(self) -> None:
        """Called between each forward pass and its backward pass, when most memory is in use."""
        return

    def compilations(self) -> int:
        """Times that torch set out to compile a function so far, in vain ones included; steady once warmed up."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported means nothing was compiled
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def energy_joules(self) -> float | None:
        """Energy that this device has used since some moment in the past: of interest is the difference of two."""
        return None

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Forget the highest memory so far, so that the next peak_memory() speaks of the window."""

    @abstractmethod
    def peak_memory(self) -> PeakMemory:
        """Highest memory since reset_peak_memory()."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error` is this device's way of saying that memory ran out."""
        return isinstance(error, torch.OutOfMemoryError | MemoryError)

    @abstractmethod
    def chip(self) -> str:
        """The name of one device, as it calls itself."""

    def count(self) -> int:
        """Devices of this kind on this machine."""
        return 1

    def peaks(self, cpu_flags: Collection[str]) -> Chip | None:
        """Datasheet figures of one device; None where it is not known. cpu_flags: see bench.environment."""
        return peaks.lookup(self.chip())

    def memory_bytes(self) -> int | None:
        """Memory of one device."""
        return None

    def versions(self) -> dict[str, str]:
        """Driver and libraries that this device's speed depends on."""
        return {}


class Cpu(Device):
    kind = "cpu"
    shared_by_ranks = True

    def reset_peak_memory(self) -> None:
        self._run_peak = _resident_peak()
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

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "can't allocate memory" in str(error)

    def chip(self) -> str:
        with contextlib.suppress(OSError):
            if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
                return match.group(1)
        if sys.platform == "darwin":
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
        return platform.processor() or platform.machine()

    def count(self) -> int:
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1

    def peaks(self, cpu_flags: Collection[str]) -> Chip | None:
        # No datasheet states it, and on a Mac the GPU, whose datasheet may, goes by the CPU's name.
        clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
        mhz = (clock.max or clock.current) if clock else None
        return peaks.derived_cpu(usable_cores(), mhz, cpu_flags)

    def memory_bytes(self) -> int | None:
        return psutil.virtual_memory().total


def _resident_peak() -> int:
    with contextlib.suppress(OSError):
        if match := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


class Cuda(Device):
    kind = "cuda"
    ddp_backend = "nccl"
    profiler_activities = (ProfilerActivity.CPU, ProfilerActivity.CUDA)

    def __init__(self, local_rank: int = 0, cuda_graphs: bool = False) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedToggle(
                "device", "cuda", "torch finds no CUDA device here; choose cpu, or install a CUDA build of torch"
            )
        if local_rank >= torch.cuda.device_count():
            raise UnsupportedToggle("world_size", local_rank + 1, self._too_many_ranks())
        self.torch_device = torch.device("cuda", local_rank)
        self.ddp_device_ids = [local_rank]
        self._cuda_graphs = cuda_graphs
        torch.cuda.set_device(local_rank)

    def refuses(self, toggle: str, value: object) -> str | None:
        ampere = torch.cuda.get_device_capability(self.torch_device) >= (8, 0)
        if (toggle, value) == ("autocast", "bfloat16") and not ampere:
            return f"{self.chip()} has no bfloat16 units (Ampere and later have); choose float16"
        if (toggle, value) == ("matmul_precision", "high") and not ampere:
            return f"{self.chip()} has no TF32 units (Ampere and later have); choose highest"
        if (toggle, value) == ("attention", "flash") and not ampere:
            return f"{self.chip()} is older than FlashAttention's kernels (Ampere and later); choose efficient"
        if toggle == "world_size" and isinstance(value, int) and value > torch.cuda.device_count():
            return self._too_many_ranks()
        return None

    def _too_many_ranks(self) -> str:
        found = torch.cuda.device_count()
        return f"more ranks than the {found} CUDA device(s) here; choose at most {found}"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1e3

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        # From pinned memory the copy is queued like any other work; from pageable memory the driver may wait.
        return tokens.pin_memory().to(self.torch_device, non_blocking=True)

    def reset_peak_memory(self) -> None:
        self._run_peak = torch.cuda.max_memory_allocated(self.torch_device)
        self._retries = self._alloc_retries()
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> PeakMemory:
        peak = torch.cuda.max_memory_allocated(self.torch_device)
        reserved = torch.cuda.max_memory_reserved(self.torch_device)
        return PeakMemory(
            # What a CUDA graph works in does not count as allocated once it is recorded (pytorch issue 121932).
            bytes=reserved if self._cuda_graphs else peak,
            method=f"{'reserved' if self._cuda_graphs else 'allocated'}, window (torch.cuda)",
            reserved_bytes=reserved,
            run_bytes=max(peak, self._run_peak),
            alloc_retries=self._alloc_retries() - self._retries,
        )

    def _alloc_retries(self) -> int:
        return torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0)

    def chip(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def count(self) -> int:
        return torch.cuda.device_count()

    def is_out_of_memory(self, error: BaseException) -> bool:
        # Outside torch's allocator memory runs out in other words: the driver's, cuBLAS's, NCCL's.
        text = str(error)
        return super().is_out_of_memory(error) or "out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text

    def memory_bytes(self) -> int | None:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    def energy_joules(self) -> float | None:
        import pynvml

        # NVML counts all devices of the machine, torch those of CUDA_VISIBLE_DEVICES: the UUID is common to both.
        uuid = f"GPU-{torch.cuda.get_device_properties(self.torch_device).uuid}"
        with contextlib.suppress(pynvml.NVMLError):  # no driver library, or older than Volta
            pynvml.nvmlInit()
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(uuid)) / 1e3
        return None

    def versions(self) -> dict[str, str]:
        import pynvml  # the NVIDIA driver's own library; needed on NVIDIA machines only

        found = {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            found["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
        return found


class Mps(Device):
    kind = "mps"

    def __init__(self, local_rank: int = 0, cuda_graphs: bool = False) -> None:
        if not torch.backends.mps.is_available():
            raise UnsupportedToggle("device", "mps", "torch finds no Apple GPU here; choose cpu")
        super().__init__()
        self._highest = self._run_peak = 0

    def refuses(self, toggle: str, value: object) -> str | None:
        if toggle == "world_size" and value != 1:
            return "a Mac has one GPU; leave it at 1"
        return None

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> None:
        # Its events cut the queue short each time, can swap places and can hang when read (pytorch 162872, 196395).
        return None

    def sample_memory(self) -> None:
        # There is no counter of the peak. This reads the allocator's own figure and waits for nothing.
        self._highest = max(self._highest, torch.mps.current_allocated_memory())

    def reset_peak_memory(self) -> None:
        self._run_peak, self._highest = self._highest, 0

    def peak_memory(self) -> PeakMemory:
        run_peak = max(self._highest, self._run_peak)
        return PeakMemory(
            bytes=self._highest,
            method="allocated, sampled after forward passes (torch.mps)",
            reserved_bytes=torch.mps.driver_allocated_memory(),
            run_bytes=run_peak,
        )

    def is_out_of_memory(self, error: BaseException) -> bool:
        return super().is_out_of_memory(error) or "MPS backend out of memory" in str(error)

    def chip(self) -> str:
        return Cpu().chip()  # the GPU has no name of its own; the chip that carries both has

    def memory_bytes(self) -> int | None:
        return psutil.virtual_memory().total  # shared with the CPU


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


@contextlib.contextmanager
def process_group(toggles: Toggles, device: Device) -> Iterator[int]:
    """Join the ranks that train together; gives this process's rank.

    Raises RuntimeError where the process was not started once per rank, as torchrun does.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != toggles.world_size:
        raise RuntimeError(
            f"world_size is {toggles.world_size} but {started} process(es) were started; start it with "
            f"python -m torch.distributed.run --standalone --nproc-per-node {toggles.world_size} -m ..."
        )
    if toggles.world_size == 1:
        yield 0
        return
    bound = device.torch_device if device.ddp_device_ids else None
    torch.distributed.init_process_group(device.ddp_backend, device_id=bound)
    yield torch.distributed.get_rank()
    # Not after an error, when other ranks may be waiting in a collective. DDP's reference cycles hold on to
    # the group, whose threads are joined only when it is freed; a thread left over aborts the process at its exit.
    gc.collect()
    torch.distributed.destroy_process_group()

"""The base class of devices: what the trainer and the harness need from any accelerator."""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpt2.config.devices import DEVICES
from gpt2.config.toggles import BASELINE, Toggles
from gpt2.errors import GPT2Error
from gpt2.hardware import peaks
from gpt2.hardware.peaks import Chip

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of one micro-batch, int64 (sequences, seq_len) each."""


class DeviceError(GPT2Error):
    """A device that exists but cannot be opened; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Peak memory in bytes, and the method of measuring it; methods do not compare."""

    bytes: int | None
    method: str
    reserved_bytes: int | None = None
    """Memory held by torch's allocator, used or not."""
    run_bytes: int | None = None
    """Peak of the whole process, including initialisation and compilation."""
    alloc_retries: int | None = None
    """Times that the allocator had to free memory and retry; more than 0 makes the speed suspect."""


@dataclass(frozen=True, kw_only=True)
class ChipUse:
    """Memory and utilisation of one chip at one moment, from its own counters."""

    index: int
    memory_bytes: int
    memory_total_bytes: int
    duty_cycle_percent: float
    """Share of the last seconds in which its matrix units were busy."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Counts of what a device that compiles whole steps has run so far."""

    programs: int
    """Compiled programs run, ideally one per optimiser step."""
    together: int
    """Those of the programs that ran on all devices together."""
    reads: int
    """Values that the host fetched from the device, each of which waits for it."""


class Device(ABC):
    """One accelerator as the trainer sees it; the defaults suit a device that runs each call at once."""

    kind: str
    """A key of gpt2.config.devices.DEVICES."""
    ddp_backend = "gloo"
    ddp_device_ids: list[int] | None = None
    shared_by_ranks = False
    """True if all ranks of a machine share one device, whose peak FLOP/s then count once."""
    profiler_activities = (ProfilerActivity.CPU,)
    """Activities that torch's profiler must record to see everything that runs."""
    out_of_memory: tuple[str, ...] = ()
    """What errors say of too little memory, besides those that have a class of their own."""

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        self.torch_device = torch.device(self.kind)

    @property
    def lazy(self) -> bool:
        """True if ops are recorded and run as a whole program: tensors have no addresses of their own."""
        return not DEVICES[self.kind].eager

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        """Return why this device does not support the value of `toggle`, with an alternative, or None."""
        value = getattr(toggles, toggle)
        known = hasattr(torch.nn.functional, "linear_cross_entropy")
        if (toggle, value) == ("cross_entropy", "linear") and not known:
            return f"torch {torch.__version__} has no linear_cross_entropy; take 2.13, or choose closed_form"
        return None

    waits_with_the_lock = False
    """True if synchronize() holds Python's lock, so that no other Python thread runs meanwhile."""

    def synchronize(self) -> None:
        """Wait until all queued work is done; without it, a timing measures only the launch."""
        return

    def mark(self) -> Any:
        """Record the current point in the device's queue without waiting; None where that is not possible."""
        return time.perf_counter()

    def seconds_between(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks of mark(), after the device has been synchronised."""
        return second - first

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Return an iterator over the same batches, prepared for this device."""
        return iter(batches)

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor on this device; its rows are split where one process feeds several."""
        return tokens.to(self.torch_device)

    def spread(self, tensor: torch.Tensor) -> int:
        """Return the number of devices over which the rows of a tensor from put() are split."""
        return 1

    def end_step(self) -> None:
        """Called at the end of each optimiser step; a lazy device runs the recorded ops here."""
        return

    @contextlib.contextmanager
    def recording_only(self) -> Iterator[None]:
        """Context for a step that is run only to see its ops; a device that records ops need not run them."""
        yield

    def set_matmul_precision(self, precision: str) -> None:
        """Set how float32 matmuls are computed: a value of Toggles.matmul_precision."""
        torch.set_float32_matmul_precision(precision)

    def matmul_precision(self) -> str:
        """Return the setting of set_matmul_precision(), as the library that applies it reports it."""
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # torch raises once the setting was changed through its newer API
            return "changed since"

    def release_memory(self) -> None:
        """Return memory to the system that only compilation or writing a checkpoint needed."""
        return

    def segments(self) -> tuple[int, int] | None:
        """Return the numbers of expandable and of all segments of torch's allocator; None without one."""
        return None

    def sample_memory(self) -> None:
        """Called between each forward and backward pass, when memory use is highest."""
        return

    def compilations(self) -> int:
        """Return how often torch has compiled or recorded a graph so far; constant once warm."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # if it is not imported, nothing was compiled
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def use(self) -> list[ChipUse] | None:
        """Return each chip's current counters, where only the training process can read them; else None."""
        return None

    def launches(self) -> Launches | None:
        """Return the counts of programs run so far; None where ops are launched one by one."""
        return None

    def energy_joules(self) -> float | None:
        """Return this device's energy counter in joules, of which differences count; None without one."""
        return None

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset the peak, so that the next peak_memory() covers the time from here on."""

    @abstractmethod
    def peak_memory(self) -> PeakMemory:
        """Return the peak memory since reset_peak_memory()."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether `error` is this device's form of an out-of-memory error."""
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        return known or any(each in str(error) for each in self.out_of_memory)

    @abstractmethod
    def chip(self) -> str:
        """Return the name of one device, as it reports it."""

    def count(self) -> int:
        """Return the number of devices of this kind on this machine."""
        return 1

    def peaks(self) -> Chip | None:
        """Return datasheet figures of one device; None where none is known, as of every CPU."""
        return peaks.lookup(self.chip())

    def memory_bytes(self) -> int | None:
        """Return the memory of one device in bytes; None where it is not known."""
        return None

    def versions(self) -> dict[str, str]:
        """Return versions of the driver and libraries that affect this device's speed, by name."""
        return {}

"""The seam itself: what the trainer and the harness ask of any accelerator."""

from __future__ import annotations

import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from gpt2 import peaks
from gpt2.peaks import Chip
from gpt2.toggles import BASELINE, Toggles

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets of one micro-batch."""


class DeviceError(RuntimeError):
    """A device that is here but cannot be opened; the message says why and what to do."""


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


@dataclass(frozen=True, kw_only=True)
class ChipUse:
    """One chip's memory and occupation at one moment, by its own counters."""

    index: int
    memory_bytes: int
    memory_total_bytes: int
    duty_cycle_percent: float
    """Share of the last seconds in which its matrix units had work."""


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What a device that compiles whole steps has been asked so far."""

    programs: int
    """Compiled programs run; one for each optimiser step is as it should be."""
    together: int
    """Those of them that all devices ran together."""
    reads: int
    """Values that the host fetched from the device, each of which waits for it."""


class Device(ABC):
    """One accelerator as the trainer sees it; the defaults suit a device that finishes each call at once."""

    kind: str
    ddp_backend = "gloo"
    ddp_device_ids: list[int] | None = None
    shared_by_ranks = False
    """Whether all ranks of a machine work on one device, whose peak then counts once."""
    lazy = False
    """Whether ops are recorded, and run only as a whole: tensors then have no addresses of their own."""
    profiler_activities = (ProfilerActivity.CPU,)
    """What torch's profiler must watch to see all that runs."""

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        self.torch_device = torch.device(self.kind)

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        """Why this very device cannot do the value of `toggle`, with what to choose instead; None if it can."""
        value = getattr(toggles, toggle)
        if (toggle, value) == ("cross_entropy", "linear") and not hasattr(torch.nn.functional, "linear_cross_entropy"):
            return f"torch {torch.__version__} has no linear_cross_entropy; take 2.13, or choose closed_form"
        return None

    waits_with_the_lock = False
    """Whether synchronize() keeps Python's lock, so that no other thread of Python runs meanwhile."""

    def synchronize(self) -> None:
        """Wait until all queued work is done; without this one times the launch."""
        return

    def mark(self) -> Any:
        """Note this moment in the device's queue of work, without waiting for it; None where that cannot be done."""
        return time.perf_counter()

    def seconds_between(self, first: Any, second: Any) -> float:
        """Between two moments that mark() noted, once the device has been waited for."""
        return second - first

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches, as this device takes them best."""
        return iter(batches)

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        """A CPU tensor on this device; where one process feeds several, each gets its share of the rows."""
        return tokens.to(self.torch_device)

    def spread(self, tensor: torch.Tensor) -> int:
        """Over how many devices the rows of a tensor that put() placed lie."""
        return 1

    def end_step(self) -> None:
        """Called at the end of each optimiser step: whoever records work to run it as one does so here."""
        return

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Around a step of which nothing but the ops is wanted; whoever records ops need not run them."""
        yield

    def set_matmul_precision(self, precision: str) -> None:
        """Choose how float32 products are computed: a value of Toggles.matmul_precision."""
        torch.set_float32_matmul_precision(precision)

    def matmul_precision(self) -> str:
        """What set_matmul_precision() was last given, as the library that obeys it tells."""
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # torch refuses to say once it was set through its newer API
            return "changed since"

    def give_back(self) -> None:
        """Return memory to the system that only compilation, or writing a checkpoint, needed."""
        return

    def segments(self) -> tuple[int, int] | None:
        """Segments of torch's allocator that can grow, and all of them; None where it has none."""
        return None

    def sample_memory(self) -> None:
        """Called between each forward pass and its backward pass, when most memory is in use."""
        return

    def compilations(self) -> int:
        """Times that torch set out to compile a function so far, in vain ones included; steady once warmed up."""
        dynamo = sys.modules.get("torch._dynamo.utils")  # not imported means nothing was compiled
        return dynamo.counters["frames"]["total"] if dynamo else 0

    def use(self) -> list[ChipUse] | None:
        """What each chip's own counters say now, where they can only be read by the process that trains."""
        return None

    def launches(self) -> Launches | None:
        """What it was asked to run so far; None where ops are launched one by one."""
        return None

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

    def peaks(
        self,
        cpu_flags: Collection[str] = (),
        cpu_mhz: float | None = None,
        cpu_identity: Mapping[str, str] | None = None,
    ) -> Chip | None:
        """Datasheet figures of one device; None where it is not known.

        A CPU's are derived from its instruction sets, its highest clock and its identity (gpt2.hardware.host), as
        bench.host.environment reads them.
        """
        return peaks.lookup(self.chip())

    def memory_bytes(self) -> int | None:
        """Memory of one device."""
        return None

    def versions(self) -> dict[str, str]:
        """Driver and libraries that this device's speed depends on."""
        return {}

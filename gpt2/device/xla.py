"""TPUs through torch_xla, and its CPU backend, which runs the same code where there is no TPU.

Ops are recorded and run as one compiled program per optimiser step. One process feeds several devices: the
rows of each batch are split over a mesh of all of them (SPMD), and XLA inserts the communication.
"""

# pyright: reportMissingImports=false
# torch_xla pins its own version of torch and is not part of the usual environment.

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpt2.config.toggles import BASELINE, Toggles, UnsupportedToggle
from gpt2.device.base import ChipUse, Device, DeviceError, Launches, PeakMemory
from gpt2.device.cpu import Cpu
from gpt2.hardware.peaks import Chip

PRECISION = {"highest": "highest", "high": "high", "medium": "default"}
"""torch_xla's names of Toggles.matmul_precision: on a TPU, six, three or one bfloat16 matmul for each."""


INSTALL = (
    "pip install -e '.[tpu]' on a TPU's machine, '.[xla]' (with PJRT_DEVICE=CPU) on another, or choose cpu"
)


class Xla(Device):
    """A TPU, or several under SPMD, or XLA's CPU backend."""

    kind = "xla"
    out_of_memory = ("RESOURCE_EXHAUSTED",)

    def __init__(self, toggles: Toggles = BASELINE, local_rank: int = 0) -> None:
        chosen = "PJRT_DEVICE" in os.environ  # checked before torch_xla sets it itself
        try:
            import torch_xla
            import torch_xla._internal.tpu
            import torch_xla.backends
            import torch_xla.core.xla_model
            import torch_xla.debug.metrics
            import torch_xla.distributed.spmd
        except ImportError as error:
            reason = f"torch_xla does not load ({error}); {INSTALL}"
            raise UnsupportedToggle("device", "xla", reason) from None
        self._xla = torch_xla
        self._only_records = False
        if toggles.world_size > 1:
            torch_xla.runtime.use_spmd()
        try:
            self.torch_device = torch_xla.device()
        except (RuntimeError, OSError) as error:  # OSError: PJRT_DEVICE=TPU without libtpu
            told = str(error).strip().splitlines()[0]
            if isinstance(error, RuntimeError) and torch_xla._internal.tpu.num_available_chips():
                reason = f"XLA cannot open the TPU ({told}); end what else holds it, such as a notebook"
                raise DeviceError(reason) from None
            raise UnsupportedToggle("device", "xla", f"XLA cannot open it ({told}); {INSTALL}") from None
        self._on_cpu = torch_xla.runtime.device_type() == "CPU"
        if self._on_cpu and not chosen and torch_xla._internal.tpu.num_available_chips():
            reason = f"there is a TPU, but no libtpu to use it by; {INSTALL}"
            raise UnsupportedToggle("device", "xla", reason)
        self.shared_by_ranks = self._on_cpu  # virtual devices of one and the same CPU
        self._found = torch_xla.runtime.global_runtime_device_count()
        self._spread = None
        if toggles.world_size > 1:
            spmd = torch_xla.distributed.spmd
            mesh = spmd.Mesh(list(range(self._found)), (self._found,), ("data",))
            self._spread = spmd.ShardingSpec(mesh, ("data", None))

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        value = getattr(toggles, toggle)
        # The CPU backend has as many devices as are asked for.
        if toggle == "world_size" and value not in (1, self._found) and not self._on_cpu:
            found = self._found
            return f"a batch is spread over all of the {found} device(s) here; choose 1 or {found}"
        return super().refuses(toggle, toggles)

    def put(self, tokens: torch.Tensor) -> torch.Tensor:
        send = self._xla.core.xla_model.send_cpu_data_to_device
        (there,) = send([tokens], self.torch_device, input_sharding=self._spread)
        return there

    def spread(self, tensor: torch.Tensor) -> int:
        spec = self._xla._XLAC._get_xla_sharding_spec(tensor)  # such as {devices=[2,1]0,1}
        rows = re.match(r"\{devices=\[(\d+)", spec)
        return int(rows.group(1)) if rows else 1

    @contextlib.contextmanager
    def recording_only(self) -> Iterator[None]:
        # torch's profiler keeps all tensors whose shapes it records. XLA would make each of them an output of
        # a program compiled for that alone: 20 GB more for GPT-2, at 2 x 1,024 tokens.
        self._only_records = True
        try:
            yield
        finally:
            self._only_records = False

    def end_step(self) -> None:
        if not self._only_records:
            self._xla.sync()

    def synchronize(self) -> None:
        if self._only_records:
            return
        self._xla.sync()
        # sync(wait=True) returns while the program still runs: seen with torch_xla 2.9.
        self._xla.core.xla_model.wait_device_ops()

    def mark(self) -> Any:
        return None  # the host runs ahead, and the device's queue has no clock

    def compilations(self) -> int:
        return self._xla.debug.metrics.counter_value("UncachedCompile") or 0

    def launches(self) -> Launches:
        def times(name: str) -> int:
            return (self._xla.debug.metrics.metric_data(name) or (0,))[0]

        alone, together = times("ExecuteTime"), times("ExecuteReplicatedTime")
        return Launches(programs=alone + together, together=together, reads=times("TransferFromDeviceTime"))

    def set_matmul_precision(self, precision: str) -> None:
        backends = self._xla.backends
        logging.getLogger(backends.__name__).setLevel(logging.ERROR)  # else each call warns of two APIs
        backends.set_mat_mul_precision(PRECISION[precision])

    def matmul_precision(self) -> str:
        ours = {name: precision for precision, name in PRECISION.items()}
        return ours[self._xla.backends.get_mat_mul_precision()]

    def reset_peak_memory(self) -> None:
        return  # torch_xla cannot reset its peak

    def peak_memory(self) -> PeakMemory:
        if self._spread:
            return PeakMemory(bytes=None, method="absent: torch_xla does not tell it under SPMD")
        told = self._memory_info()
        if told is None:
            return PeakMemory(bytes=None, method="absent: XLA's backend for this device does not tell it")
        peak = told.get("peak_bytes_used")
        return PeakMemory(bytes=peak, method="allocated, whole run (torch_xla)", run_bytes=peak)

    def _memory_info(self) -> dict[str, int] | None:
        with contextlib.suppress(RuntimeError):  # not on the CPU, and not under SPMD
            return self._xla.core.xla_model.get_memory_info(self.torch_device)
        return None

    def use(self) -> list[ChipUse] | None:
        # tpu_info works in the process that holds the TPU; which exceptions it raises is not documented.
        with contextlib.suppress(Exception):
            from tpu_info import device, metrics

            chip, _ = device.get_local_chips()
            assert chip is not None
            return [
                ChipUse(
                    index=each.device_id,
                    memory_bytes=each.memory_usage,
                    memory_total_bytes=each.total_memory,
                    duty_cycle_percent=each.duty_cycle_pct,
                )
                for each in metrics.get_chip_usage(chip)
            ]
        return None

    def chip(self) -> str:
        return Cpu().chip() if self._on_cpu else _tpu_name()

    def count(self) -> int:
        return Cpu().count() if self._on_cpu else self._found

    def peaks(self) -> Chip | None:
        return None if self._on_cpu else super().peaks()

    def memory_bytes(self) -> int | None:
        if self._on_cpu:
            return Cpu().memory_bytes()
        if (chip := super().peaks()) and chip.memory_bytes:
            return chip.memory_bytes  # XLA's own figure is not available under SPMD
        told = self._memory_info()
        return told["bytes_limit"] if told else None

    def versions(self) -> dict[str, str]:
        found = {"xla_backend": str(self._xla.runtime.device_type())}
        for package in ("torch_xla", "libtpu"):
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(package)
        return found


def _tpu_name() -> str:
    """Return the TPU's name as gpt2.hardware.peaks has it, such as "TPU v3"; "TPU" where not known."""
    with contextlib.suppress(Exception):
        from tpu_info import device

        chip, _ = device.get_local_chips()
        if chip is not None:
            return f"TPU {chip.value.name}"
    with contextlib.suppress(Exception):  # asks the cloud's metadata server, which may not exist
        from torch_xla._internal import tpu

        return f"TPU {tpu.get_tpu_type().replace('litepod', 'e')}"
    return "TPU"

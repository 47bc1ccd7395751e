"""The kinds of device and what each can do, for toggles, checks and device classes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["cpu", "cuda", "mps", "xpu", "xla"]


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device."""

    name: DeviceName
    eager: bool = True
    """It runs op by op, or code from torch.compile; else ops are recorded and run as a whole program."""
    one_process: bool = False
    """One process feeds all devices, with one program split over them; else each has a process."""
    compiles_adamw: bool = False
    """torch compiles an AdamW for it."""
    scales_in_adamw: bool = False
    """Its fused AdamW applies a gradient scale, and skips the update on overflow."""
    shards: bool = False
    """torch shares out optimiser state, gradients and weights over its ranks."""
    high_precision: Literal["tf32", "float32"] = "tf32"
    """The format of a float32 matmul at matmul_precision high; a TPU sums three bfloat16 matmuls."""


DEVICES: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(name="cpu", compiles_adamw=True, scales_in_adamw=True, shards=True),
        DeviceKind(name="cuda", compiles_adamw=True, scales_in_adamw=True, shards=True),
        DeviceKind(name="mps"),
        DeviceKind(name="xpu", compiles_adamw=True),
        DeviceKind(name="xla", eager=False, one_process=True, high_precision="float32"),
    )
}

HOST, CUDA, XLA = "cpu", "cuda", "xla"
"""HOST is the device whose memory and threads are the machine's own."""


def devices(can: Callable[[DeviceKind], bool]) -> frozenset[str]:
    """Return the names of the kinds for which `can` holds."""
    return frozenset(name for name, kind in DEVICES.items() if can(kind))

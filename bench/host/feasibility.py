"""What of a ladder can run on this machine: its devices, their memory, and the time that a CPU takes.

Refused are number formats that a CPU emulates too slowly to meet the time limit. Without kernels for bfloat16
or float16 (oneDNN has them from AVX-512 on), torch multiplies number by number: 0.9 to 1.3 GFLOP/s per thread
on a third-generation EPYC, where float32 has 86. A step of GPT-2 124M would take eleven minutes.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from functools import cache

import torch

from bench.ladder.ladder import Ladder
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.device import DEVICES, Device, DeviceError

SIDE = 256
"""Side of the square matmul that is timed: 40 ms where it is slowest, and larger ones are slower still."""
SECONDS = 0.2
"""Duration of the attempts, several because other programs may run."""
TIMES_SLOWER_IF_EMULATED = 4.0
"""A format this many times slower than float32 is emulated."""


def devices_here(kinds: Iterable[str]) -> tuple[dict[str, Device], dict[str, str]]:
    """Open each of these kinds of device once; return those that are here, and why the others are not."""
    here: dict[str, Device] = {}
    missing: dict[str, str] = {}
    for kind in dict.fromkeys(kinds):
        try:
            with warnings.catch_warnings(action="ignore"):  # they are for processes that train
                here[kind] = DEVICES[kind](Toggles(), 0)
        except (UnsupportedToggle, DeviceError) as error:
            missing[kind] = str(error)
    return here, missing


def check_time(ladder: Ladder, toggles: Toggles) -> None:
    """Raise UnsupportedToggle where a rank's fewest steps take longer than the ladder's time limit.

    Estimated from a matmul in the rung's number format, timed on one thread. A format about as fast as
    float32 is never refused, because there is no better choice.
    """
    if toggles.device != HOST or toggles.autocast == "float32":
        return
    workload, protocol = ladder.workload, ladder.protocol
    tokens = (
        (protocol.min_warmup_steps + protocol.least_blocks)
        * toggles.tokens_per_step(workload.seq_len)
        / toggles.world_size
    )
    needed = tokens * workload.flops_per_token / protocol.timeout_seconds
    rate = product_rate(toggles.autocast, needed)
    if rate >= needed or product_rate("float32") < TIMES_SLOWER_IF_EMULATED * rate:
        return
    raise UnsupportedToggle(
        "autocast",
        toggles.autocast,
        f"this CPU has no units for it: a thread makes {rate / 1e9:.3g} GFLOP/s, and "
        f"{product_rate('float32') / 1e9:.3g} in float32, so that a window outlasts protocol.timeout_seconds "
        f"{protocol.timeout_seconds:g}; choose float32",
    )


TIGHT = 0.9
"""Share of a device's memory that is safe to use.

Programs get less than the datasheet says (of 16 GiB, 14.6 to 15 on a T4, 15.5 on a TPU v3 core), and
libraries take some of that.
"""


def fits(ladder: Ladder, toggles: Toggles, device: Device) -> bool:
    """Return whether training is estimated to fit into the device's memory, as far as that is known."""
    from gpt2.training.memory_estimate import estimate

    here = device.memory_bytes()
    ranks = toggles.world_size if device.shared_by_ranks else 1
    return here is None or estimate(ladder.workload, toggles).total * ranks <= TIGHT * here


@cache
def product_rate(number_format: str, enough: float = math.inf) -> float:
    """Return the FLOP/s of a small matmul on one thread of this CPU, the best of a few.

    Several threads wait for each other, up to ten times as long where other programs run. enough: FLOP/s at
    which the first attempt is final.
    """
    x = torch.ones(SIDE, SIDE, dtype=getattr(torch, number_format))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = torch.mm(x, x)
        begun, best = time.perf_counter(), 0.0
        while best < enough and time.perf_counter() - begun < SECONDS:
            start = time.perf_counter()
            torch.mm(x, x, out=out)
            best = max(best, 2 * SIDE**3 / (time.perf_counter() - start))
    finally:
        torch.set_num_threads(threads)
    return best

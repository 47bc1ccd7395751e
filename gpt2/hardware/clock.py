"""Measure the clock of x86 cores: a virtual machine is often told a nominal one. Imports no torch."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import mean

from gpt2.hardware.host import usable_cores

ADD, MULTIPLY = b"\x48\x01\xc8", b"\x0f\xaf\xc0"
"""Machine code of add rax, rcx and of imul eax, eax, each of which has to wait for the one before."""
CYCLES = {ADD: 1, MULTIPLY: 3}
"""Cycles until the result is there, on each core since Intel's Nehalem and AMD's Zen (Agner Fog's tables)."""
LINKS = 100
LOOPS = 5_000
ATTEMPTS = 200
"""The fastest counts: in the others the core ran something else, too, or had not yet raised its clock."""


def measured_mhz(instruction: bytes = ADD) -> float | None:
    """Return the mean clock of this process's cores in MHz, all at work at once, in some 30 ms.

    By chains of dependent instructions of known latency; at wide vectors it may be lower. None where that
    cannot be done: on other processors and systems, and where data may not be run as code.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    body = instruction * LINKS
    back = -(len(body) + 3 + 6)  # over the chain, dec rdi and the jump itself
    code = body + b"\x48\xff\xcf" + b"\x0f\x85" + back.to_bytes(4, "little", signed=True) + b"\xc3"
    try:
        page = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened kernel refuses pages that are written and run
        return None
    page.write(code)
    run = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    cycles, cores = LOOPS * LINKS * CYCLES[instruction], usable_cores()

    def of_one_core(_: int) -> float:
        return max(1e3 * cycles / _nanoseconds(run) for _ in range(ATTEMPTS))

    with ThreadPoolExecutor(cores) as pool:
        return mean(pool.map(of_one_core, range(cores)))


def _nanoseconds(run: Callable[[int], None]) -> int:
    begun = time.perf_counter_ns()
    run(LOOPS)
    return time.perf_counter_ns() - begun

"""Time within a window that was not the program's: it was stopped, or the machine slept or gave it no processor.

before = Instant.now(); ...; block = Instant.now() - before
standstills([block, ...])                  # {2: 5.0}: in the third block of several, for about 5 seconds

A process that works as before uses as much of the processor per second as before, however slow its work has become.
Where a block lasts longer than the others and its process used no more of the processor for it, it stood still.
Imports no torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LONGER = 1.25
"""Times the median block that a block lasts which is looked at."""
FAR_LONGER = 2.0
"""Times the median block that a block lasts of which nothing else need be known."""
LEAST_SECONDS = 0.25
"""Over the median block; less than this is what any machine's blocks differ by."""
BUSY = 0.5
"""Processors that a process uses from which their time tells anything: while a device works, some only wait for it."""
ASLEEP_SECONDS = 0.1
"""Of the machine, from which a block does not count: its clocks and caches are cold afterwards."""


@dataclass(frozen=True, kw_only=True)
class Instant:
    """A moment by several clocks, or what passed between two."""

    seconds: float
    """By a clock that goes on while the process is stopped, but not while the machine sleeps."""
    cpu_seconds: float | None
    """Of all threads of this process; None where that was not looked at."""
    asleep_seconds: float | None
    """Of the machine; None where the system does not tell."""

    @classmethod
    def now(cls, clock: Callable[[], float] = time.perf_counter) -> Instant:
        return cls(seconds=clock(), cpu_seconds=time.process_time(), asleep_seconds=_asleep_seconds())

    def __sub__(self, earlier: Instant) -> Instant:
        return Instant(
            seconds=self.seconds - earlier.seconds,
            cpu_seconds=_difference(self.cpu_seconds, earlier.cpu_seconds),
            asleep_seconds=_difference(self.asleep_seconds, earlier.asleep_seconds),
        )


def standstills(blocks: Sequence[Instant]) -> dict[int, float]:
    """Blocks of a window that the process did not work throughout: by number from 0, the seconds that it did not."""
    if not blocks:
        return {}
    usual = statistics.median(block.seconds for block in blocks)
    used = [block.cpu_seconds / max(block.seconds, 1e-9) for block in blocks if block.cpu_seconds is not None]
    busy = statistics.median(used) if len(used) == len(blocks) else 0.0
    found = {}
    for number, block in enumerate(blocks):
        over = block.seconds - usual
        long = over > LEAST_SECONDS and block.seconds > LONGER * usual
        idle = block.seconds - block.cpu_seconds / busy if busy > BUSY and block.cpu_seconds is not None else None
        if (block.asleep_seconds or 0.0) > ASLEEP_SECONDS:
            found[number] = (block.asleep_seconds or 0.0) + max(0.0, over)
        elif long and (block.seconds > FAR_LONGER * usual if idle is None else idle > over / 2):
            found[number] = over
    return found


def told(blocks: Sequence[Instant], then: str) -> list[str]:
    """A warning for each block that the process did not work throughout. then: what came of it."""
    return [
        f"stood still: for about {seconds:.1f} s in block {number + 1} of {len(blocks)} the process did not run: it "
        f"was stopped, the machine slept, or others had its processors; {then}"
        for number, seconds in standstills(blocks).items()
    ]


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else max(0.0, later - earlier)


def _asleep_seconds() -> float | None:
    """Seconds that the machine has slept since it started; from an arbitrary point, so only differences mean much."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux, whose CLOCK_MONOTONIC stops meanwhile
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if (uptime := getattr(time, "CLOCK_UPTIME_RAW", None)) is not None:  # macOS, whose CLOCK_MONOTONIC goes on
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(uptime)
    return None

"""Time within a window that was not the program's: it was stopped, or the machine slept or gave it no processor.

before = Instant.now(); ...; block = Instant.now() - before        # seconds by the clock, of the processor, asleep
standstills([block, ...])                                          # {2: 5.0}: in the third block, about 5 seconds

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
ASLEEP_SECONDS = 0.1
"""Of the machine, from which a block does not count: its clocks and caches are cold afterwards."""


@dataclass(frozen=True, kw_only=True)
class Instant:
    """A moment by several clocks, or what passed between two."""

    seconds: float
    """By a clock that goes on while the process is stopped, but not while the machine sleeps."""
    cpu_seconds: float
    """Of all threads of this process."""
    asleep_seconds: float | None
    """Of the machine; None where the system does not tell."""

    @classmethod
    def now(cls, clock: Callable[[], float] = time.perf_counter) -> Instant:
        return cls(seconds=clock(), cpu_seconds=time.process_time(), asleep_seconds=_asleep_seconds())

    def __sub__(self, earlier: Instant) -> Instant:
        told = self.asleep_seconds is not None and earlier.asleep_seconds is not None
        return Instant(
            seconds=self.seconds - earlier.seconds,
            cpu_seconds=self.cpu_seconds - earlier.cpu_seconds,
            asleep_seconds=max(0.0, self.asleep_seconds - earlier.asleep_seconds) if told else None,
        )


def standstills(
    seconds: Sequence[float],
    cpu_seconds: Sequence[float] | None = None,
    asleep_seconds: Sequence[float] | None = None,
) -> dict[int, float]:
    """The blocks of a window that the process did not work throughout, by number from 0, and for about how long not.

    seconds, cpu_seconds, asleep_seconds: of each block, as Instant has them; None where they are not known.
    """
    if not seconds:
        return {}
    usual = statistics.median(seconds)
    busy = statistics.median(c / s for c, s in zip(cpu_seconds, seconds, strict=True)) if cpu_seconds else 0.0
    found = {}
    for block, lasted in enumerate(seconds):
        over = lasted - usual
        stood = lasted - cpu_seconds[block] / busy if cpu_seconds and busy else None
        asleep = asleep_seconds[block] if asleep_seconds else 0.0
        long = over > LEAST_SECONDS and lasted > LONGER * usual
        if asleep > ASLEEP_SECONDS:
            found[block] = asleep + max(0.0, over)
        elif long and (stood > over / 2 if stood is not None else lasted > FAR_LONGER * usual):
            found[block] = over
    return found


def _asleep_seconds() -> float | None:
    """Seconds that the machine has slept since it started; from an arbitrary point, so only differences mean much."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux, whose CLOCK_MONOTONIC stops meanwhile
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    if hasattr(time, "CLOCK_UPTIME_RAW"):  # macOS, whose CLOCK_MONOTONIC goes on
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_UPTIME_RAW)
    return None

"""Detect standstills: time in which the process was stopped, had no processor, or the machine slept.

with Pulse() as pulse:
    before = Instant.now(pulse); ...; block = Instant.now(pulse) - before
standstills([block, ...])                  # {2: 5.0}: in the third block of several, for about 5 seconds

A thread that only wakes up regularly tells two kinds of long blocks apart: it wakes up while the work waits
for data or a device, and does not while the process does not run. Imports no torch.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpt2.device import Device

PERIOD = 0.1
"""Seconds between beats of the pulse."""
LEAST_SECONDS = 0.25
"""Shortest standstill; schedulers let a thread wait less than this on any machine."""
ASLEEP_SECONDS = 0.1
"""Shortest sleep of the machine after which a block does not count, its caches being cold."""
FAR_LONGER = 2.0
"""Ratio to the median block above which a block is reported, whatever the reason."""


class Pulse:
    """Measures, while entered, for how long this process does not run.

    A thread beats every PERIOD. A gap between two beats is lost time unless the thread that entered this
    worked meanwhile, as code that holds Python's lock does. Code that holds the lock while it waits looks
    like a standstill: see Device.waits_with_the_lock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, worked: Callable[[], float] | None = None
    ) -> None:
        """worked: processor time of the thread that enters this; by default the system's account."""
        self._clock = clock
        self._given = worked
        self._worked: Callable[[], float] = worked or time.process_time
        self._last, self._last_worked, self._lost = 0.0, 0.0, 0.0
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Pulse:
        # macOS lacks this; there the time of all threads is used.
        if self._given is None and hasattr(time, "pthread_getcpuclockid"):
            own = time.pthread_getcpuclockid(threading.get_ident())
            self._worked = lambda: time.clock_gettime(own)
        self._last, self._last_worked = self._clock(), self._worked()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        if self._thread:
            self._thread.join()

    def lost_seconds(self) -> float:
        """Return the seconds that the process has not run, in stretches of at least LEAST_SECONDS."""
        with self._lock:
            now, worked = self._clock(), self._worked()
            lost = now - self._last - PERIOD - (worked - self._last_worked)
            if lost > LEAST_SECONDS:
                self._lost += lost
            self._last, self._last_worked = now, worked
            return self._lost

    def _beat(self) -> None:
        while not self._end.wait(PERIOD):
            self.lost_seconds()


def pulse_beside(device: Device) -> AbstractContextManager[Pulse | None]:
    """Return a pulse for work on a device; None where waiting for it looks like a standstill."""
    return nullcontext() if device.waits_with_the_lock else Pulse()


@dataclass(frozen=True, kw_only=True)
class Instant:
    """A moment by several clocks, or the difference of two."""

    seconds: float
    """Wall-clock time, which goes on while the process is stopped, but not while the machine sleeps."""
    lost_seconds: float | None
    """Time for which the process did not run; None if unknown."""
    asleep_seconds: float | None
    """Time for which the machine slept; None if unknown."""

    @classmethod
    def now(cls, pulse: Pulse | None, clock: Callable[[], float] = time.perf_counter) -> Instant:
        lost = pulse.lost_seconds() if pulse else None
        return cls(seconds=clock(), lost_seconds=lost, asleep_seconds=_asleep_seconds())

    def __sub__(self, earlier: Instant) -> Instant:
        return Instant(
            seconds=self.seconds - earlier.seconds,
            lost_seconds=_difference(self.lost_seconds, earlier.lost_seconds),
            asleep_seconds=_difference(self.asleep_seconds, earlier.asleep_seconds),
        )


def standstills(blocks: Sequence[Instant]) -> dict[int, float]:
    """Return the lost seconds of blocks with a standstill, by number of the block from 0."""
    lost_seconds = {}
    for number, block in enumerate(blocks):
        asleep = block.asleep_seconds or 0.0
        lost = (block.lost_seconds or 0.0) + (asleep if asleep > ASLEEP_SECONDS else 0.0)
        if lost > 0.0:
            lost_seconds[number] = lost
    return lost_seconds


def far_longer(block_seconds: Sequence[float]) -> list[int]:
    """Return the numbers, from 0, of blocks far longer than the median one."""
    usual = statistics.median(block_seconds) if block_seconds else 0.0
    return [
        number
        for number, seconds in enumerate(block_seconds)
        if seconds > FAR_LONGER * usual and seconds - usual > LEAST_SECONDS
    ]


def uneven(block_seconds: Sequence[float], why: str) -> list[str]:
    """Return a warning if blocks are far longer than the median one. why: the possible cause."""
    if not (long := far_longer(block_seconds)):
        return []
    return [
        f"uneven: {len(long)} of {len(block_seconds)} blocks lasted over twice as long as the median one, up "
        f"to {max(block_seconds):.1f} s: {why}"
    ]


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else max(0.0, later - earlier)


def _asleep_seconds() -> float | None:
    """Return the seconds that the machine has slept, from an arbitrary point; None if unknown."""
    if hasattr(time, "CLOCK_BOOTTIME"):  # Linux, whose CLOCK_MONOTONIC stops meanwhile
        return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)
    uptime = getattr(time, "CLOCK_UPTIME_RAW", None)
    if uptime is not None:  # macOS, whose CLOCK_MONOTONIC goes on
        return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(uptime)
    return None

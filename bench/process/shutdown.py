"""End a run in order on Ctrl-C, on SIGTERM at the end of a job, or on SIGHUP of a closed terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from gpt2.signals import handled, was_dropped


@dataclass
class Stop:
    """Whether the user has asked for the end of a run."""

    requested: bool = False


class StopSignal(Protocol):
    """Anything that may ask for the end of a process."""

    @property
    def requested(self) -> bool: ...


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Make the signals set a flag instead of raising an exception; repeated signals have no more effect."""
    stop = Stop()

    def ask(signum: int, frame: object) -> None:
        stop.requested = True  # no threading.Event: setting one while it is waited for could deadlock

    with handled(ask):
        yield stop


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make the first of the signals raise KeyboardInterrupt, and ignore the others."""
    raised = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal raised
        if not raised or was_dropped():
            raised = True
            raise KeyboardInterrupt

    with handled(interrupt):
        yield

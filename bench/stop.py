"""End a run in order on Ctrl-C, SIGTERM, sent at the end of a job, or SIGHUP, of a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Protocol


@dataclass
class Stop:
    """Whether the user has asked for an end."""

    asked: bool = False


class Ending(Protocol):
    """Whatever may ask for an end."""

    @property
    def asked(self) -> bool: ...


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """Let them ask for an end by a flag that is looked at, not by an exception amidst things.

    However many there are, they count as one, and what the end takes is not interrupted.
    """
    stop = Stop()

    def ask(signum: int, frame: object) -> None:
        stop.asked = True  # no threading.Event: setting one while it is being waited for could lock up

    with _handled(ask):
        yield stop


def interruptible() -> contextlib.AbstractContextManager[None]:
    """Let each of them raise KeyboardInterrupt, which only Ctrl-C does by itself."""
    return _handled(signal.default_int_handler)


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """By this handler; outside the main thread, where Python allows none, all is left as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)

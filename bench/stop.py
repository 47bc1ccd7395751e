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


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first of them raise KeyboardInterrupt, which only Ctrl-C does by itself; what the end takes goes on."""
    asked = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    with _handled(interrupt):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """By this handler; outside the main thread, where Python allows none, all is left as it is.

    So is SIGHUP where it is ignored, as under nohup, which is to outlive its terminal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {each: signal.signal(each, handler) for each in numbers}
    try:
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)

"""What asks a process to end: Ctrl-C, SIGTERM at the end of a job, SIGHUP of a closed terminal. Imports no torch."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


def ending() -> list[signal.Signals]:
    """The signals; without SIGHUP where it is ignored, as under nohup, which is to outlive its terminal."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """By this handler; outside the main thread, where Python allows none, all is left as it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {each: signal.signal(each, handler) for each in ending()}
    try:
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)

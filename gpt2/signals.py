"""Signals that ask a process to end: Ctrl-C, SIGTERM of a job, SIGHUP of a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


def ending() -> list[signal.Signals]:
    """Return these signals, without SIGHUP where it is ignored, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle these signals with `handler` within the block, where Python allows it: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {each: signal.signal(each, handler) for each in ending()}
    try:
        yield
    finally:
        for each, before in previous.items():
            signal.signal(each, before)

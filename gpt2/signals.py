"""Signals that ask a process to end: Ctrl-C, SIGTERM of a job, SIGHUP of a closed terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType


def signal_name(number: int) -> str:
    """Return the name of a signal that ended a process, and for SIGKILL that the system may have sent it."""
    memory = ", as the system does where memory is short" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{memory}"


def ending() -> list[signal.Signals]:
    """Return these signals, without SIGHUP where it is ignored, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


DELIBERATE_SECONDS = 1.0


@dataclass
class Asked:
    """What signals have asked a process for: the first to end in order, a later Ctrl-C to end at once.

    A closed terminal can send SIGHUP twice, by its shell and by the system, and service managers send SIGTERM
    and SIGHUP together: these ask once. So does a Ctrl-C that a wrapper passes on, DELIBERATE_SECONDS or less
    after the first signal. torchrun passes on a second Ctrl-C as SIGTERM.
    """

    first: int | None = None
    at_once: bool = False
    _since: float = 0.0

    def hear(self, number: int) -> None:
        """Take note of a signal, when it comes."""
        if self.first is None:
            self._since, self.first = time.monotonic(), number
        elif number == signal.SIGINT or (number == signal.SIGTERM and self.first == signal.SIGINT):
            self.at_once |= time.monotonic() > self._since + DELIBERATE_SECONDS


@contextlib.contextmanager
def listening(hear: Callable[[int], object]) -> Iterator[None]:
    """Within the block, call `hear` with each of these signals when it comes, in a thread.

    Python runs their handlers, which must be set already, in the main thread alone, and late where that is
    within a long call of torch's. The block is entered in the main thread.
    """
    heard, rung = os.pipe()
    os.set_blocking(rung, False)
    before = signal.set_wakeup_fd(rung, warn_on_full_buffer=False)

    def wait() -> None:
        while number := os.read(heard, 1):
            if number[0] in ending():
                hear(number[0])
        os.close(heard)

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(rung)  # which ends the thread


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


@contextlib.contextmanager
def interrupt_held_back() -> Iterator[None]:
    """Let a Ctrl-C within the block take effect at its end, in the main thread.

    A process started in the block never hears one, as it inherits a blocked signal. Here that is not enough:
    any other thread takes the signal then, and Python raises KeyboardInterrupt in the main thread all the
    same; and multiprocessing unblocks it when it starts its resource tracker.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)  # None, if Python did not set it: then it could not be restored
    ours = before is not None and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, lambda *_: came.set())
    try:
        heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
        if came.is_set():
            signal.raise_signal(signal.SIGINT)


AGAIN_SECONDS = 0.1
_dropped = threading.Event()


def heed_every_interrupt() -> None:
    """Send Ctrl-C again where Python drops it: within a destructor or a callback, as an import has them."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            return before(dropped)
        _dropped.set()
        again = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread begins while Python ends, as it was asked to
            again.start()

    sys.unraisablehook = hook


def was_dropped() -> bool:
    """Whether Python has dropped a KeyboardInterrupt since this was last asked."""
    dropped = _dropped.is_set()
    _dropped.clear()
    return dropped

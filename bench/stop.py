"""End a run in order on Ctrl-C, SIGTERM or SIGHUP: by a flag that is looked at, not an exception amidst things."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Let Ctrl-C, SIGTERM, sent at the end of a job, and SIGHUP, of a closed terminal, ask for an end.

    However many there are, they count as one, and what the end takes is not interrupted. Where Python allows no
    handlers, outside the main thread, all is left as it is.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(signum: int, frame: object) -> None:
        stop.asked = True  # no threading.Event: setting one while it is being waited for could lock up

    previous = {each: signal.signal(each, ask) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)

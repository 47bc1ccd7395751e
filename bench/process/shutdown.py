"""End a run in order on Ctrl-C, SIGTERM, sent at the end of a job, or SIGHUP, of a closed terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from gpt2.signals import handled


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

    with handled(ask):
        yield stop


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first of them raise KeyboardInterrupt, which only Ctrl-C does by itself; what the end takes
    goes on.
    """
    asked = False

    def interrupt(signum: int, frame: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    with handled(interrupt):
        yield

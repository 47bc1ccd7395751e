"""One writer at a time in a folder or to a file. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class Locked(Exception):
    """Another process writes there."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder against a second writer, where the file system can; let go of when the process ends, too.

    Raises Locked, or OSError where the folder cannot be written to.
    """
    with (folder / ".lock").open("a") as file:
        lock(file)
        yield


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed, where the file system can. Raises Locked where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked from None
    except OSError:
        pass  # some network drives have no locks

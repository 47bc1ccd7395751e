"""One writer at a time in a folder. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Locked(Exception):
    """Another process writes to the folder."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder against a second writer, where the file system can; let go of when the process ends, too.

    Raises Locked, or OSError where the folder cannot be written to.
    """
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked from None
        except OSError:
            pass  # some network drives have no locks
        yield

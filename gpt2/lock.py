"""A lock that allows a folder one writer at a time. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


class Locked(Exception):
    """Another process writes to the folder."""


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, where the file system supports locks; it ends with the process, too.

    Raises Locked, or OSError where the folder is not writable.
    """
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Locked from None
        except OSError:
            pass  # some network file systems have no locks
        yield

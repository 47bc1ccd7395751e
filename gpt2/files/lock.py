"""A lock that allows a folder or a file one writer at a time. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


class Locked(Exception):
    """Another process writes there."""


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder, where the file system has locks; it ends with the process.

    Raises Locked, or OSError where the folder is not writable.
    """
    with (folder / ".lock").open("a") as file:
        lock(file)
        yield


def leave(folder: Path) -> None:
    """Remove a folder again that holds nothing but its lock, if nobody has moved it."""
    if folder.is_dir() and [each.name for each in folder.iterdir()] == [".lock"]:
        (folder / ".lock").unlink()
        folder.rmdir()


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed, where the file system can. Raises Locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked from None
    except OSError:
        pass  # some network drives have no locks

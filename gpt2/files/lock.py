"""A lock that allows a folder or a file one writer at a time. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Collection, Iterator
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


@contextlib.contextmanager
def own(folder: Path, worthless: Collection[str] = ()) -> Iterator[None]:
    """The same of a folder that is made where it is missing, and removed again if it was made in vain.

    worthless: names of files without which an empty folder is as good.
    """
    fresh = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        try:
            yield
        finally:
            if fresh and folder.is_dir():  # nobody has moved it
                _remove_if_only(folder, {".lock", *worthless})


def _remove_if_only(folder: Path, names: Collection[str]) -> None:
    files = list(folder.iterdir())
    if all(each.name in names for each in files):
        for each in files:
            each.unlink()
        folder.rmdir()


def lock(file: IO[Any]) -> None:
    """Lock an open file until it is closed, where the file system can. Raises Locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Locked from None
    except OSError:
        pass  # some network drives have no locks

"""Write files and folders whole or not at all, under temporary names that nobody else has. Imports no torch.

with whole_file(Path("metrics.jsonl")) as file: ...
with whole_folder(Path("exported")) as part: ...

A name that can be guessed, such as NAME.part, may be that of somebody's file: it would be overwritten, or
removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PART = ".part"
"""How temporary names end: NAME-, eight random characters, and this."""
RANDOM = r"-[a-z0-9_]{8}"
LONGEST = 200
"""Bytes of the target's name in a temporary one, which may have 255."""


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file beside `target`, to write and to read, that replaces it once it is on the disk.

    It is removed where something fails; a killed process leaves it. Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=_prefix(target), suffix=PART)
    part = Path(name)
    try:
        with open(handle, "wb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a power failure could leave the name without its content
        part.chmod(0o666 & ~_umask())  # temporary files are readable by their owner only
        part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()  # frees space where the disk is full
        raise


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Create a folder to fill that gets the name `target` in the end, and is removed where something fails.

    Raises OSError; where `target` is there by then, and not an empty folder, too.
    """
    part = new_folder(target)
    try:
        yield part
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def new_folder(target: Path) -> Path:
    """Create an empty folder beside `target`, with the folders above it. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=target.parent, prefix=_prefix(target), suffix=PART))
    part.chmod(0o777 & ~_umask())
    return part


def left_over(folder: Path, names: str) -> list[Path]:
    """Return what killed processes left in a folder of temporary files and folders; names: a regular
    expression of the targets' names.
    """
    temporary = re.compile(f"(?:{names}){RANDOM}{re.escape(PART)}")
    return [each for each in sorted(folder.iterdir()) if temporary.fullmatch(each.name)]


def _prefix(target: Path) -> str:
    return os.fsdecode(os.fsencode(target.name)[:LONGEST]) + "-"


def _umask() -> int:
    os.umask(mask := os.umask(0o077))  # reading it means setting it
    return mask

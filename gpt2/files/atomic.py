"""Write files and folders whole or not at all, under temporary names that nobody else has. Imports no torch.

with atomic_write(Path("index.json"), DataError, "make room") as file: file.write(b"{}")
with atomic_folder(Path("exported")) as part: (part / "config.json").write_text("{}")

A name that can be guessed, such as NAME.part, may be that of a user's file, which would be lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

LONGEST = 200
"""Bytes of the final name in a temporary one; a file system allows 255 in all."""


@contextlib.contextmanager
def atomic_write(
    path: Path, raises: type[Exception] = OSError, advice: str = "", *, sync: bool = True
) -> Iterator[BufferedRandom]:
    """Open a file that replaces `path` once the block has ended without an error; makes its folder.

    Where it cannot be written, raises `raises`, with `advice`. sync: wait for the disk, or a power failure
    could leave the name without its content. A killed process leaves the temporary file (see leftovers()).
    """
    part = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(handle, "wb+") as file:
                yield file
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()  # frees space where the disk is full
            raise
    except OSError as error:
        if raises is OSError:
            if error.filename in (None, str(part)):
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise
        more = f"; {advice}" if advice else ""
        raise raises(f"cannot write {path} ({error.strerror or error}){more}") from None


def atomic_text(path: Path, text: str | bytes) -> None:
    """Put this text into a file, whole or not at all; it keeps its mode, and a link stays a link.

    Raises OSError, also where the file may not be written.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = None
        if target.exists():
            with target.open("r+b"):
                mode = target.stat().st_mode & 0o7777
        with atomic_write(target) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text if isinstance(text, bytes) else text.encode())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Create a folder to fill that becomes `path` once the block has ended without an error.

    Raises OSError; also where `path` is by then something else than an empty folder.
    """
    part = new_folder(path)
    try:
        yield part
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def new_folder(path: Path) -> Path:
    """Create an empty folder beside `path`, which is to become it, and the folders above. Raises OSError."""
    part = _temporary(path)
    part.mkdir(parents=True)
    return part


def leftovers(folder: Path, names: str) -> list[Path]:
    """Return the temporary files and folders that killed processes left; names: a pattern of final names.

    There are none where the folder does not exist, which its owner may have moved.
    """
    temporary = re.compile(rf"(?:{names})-[0-9a-f]{{8}}\.part")
    try:
        return [each for each in sorted(folder.iterdir()) if temporary.fullmatch(each.name)]
    except FileNotFoundError:
        return []


def _temporary(path: Path) -> Path:
    name = os.fsencode(path.name)[:LONGEST].decode(errors="ignore")  # never half a character
    return path.with_name(f"{name}-{secrets.token_hex(4)}.part")

"""Write files whole or not at all. Imports no torch.

with atomic_write(Path("index.json"), DataError, "make room") as file: file.write(b"{}")
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path


@contextlib.contextmanager
def atomic_write(
    path: Path,
    raises: type[Exception] = OSError,
    advice: str = "",
    *,
    one_writer: bool = False,
    sync: bool = True,
) -> Iterator[BufferedRandom]:
    """Open a file that replaces `path` once the block has ended without an error; makes its folder.

    Where it cannot be written, raises `raises`, with `advice`. one_writer: write to NAME.part, which the next
    one overwrites if this one is killed; else to a name of its own, as others may write at once. sync: wait
    for the disk, or a power failure could leave the name without its content.
    """
    part = path.with_name(f"{path.name}.{'part' if one_writer else secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb+") as file:
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
            raise
        more = f"; {advice}" if advice else ""
        raise raises(f"cannot write {path} ({error.strerror or error}){more}") from None

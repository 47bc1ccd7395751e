"""The format of token shards, which is llm.c's: a header, then 16-bit token ids. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

TOKEN = np.dtype("<u2")
# llm.c's shard header: int32 magic, version, number of tokens, zeros (dev/data/data_common.py)
HEADER_BYTES = 1024
MAGIC = 20240520
VERSION = 1


def header(*numbers: int) -> bytes:
    """Return the 1,024-byte header of a file of llm.c: these numbers as int32, then zeros."""
    return np.array(numbers, dtype="<i4").tobytes().ljust(HEADER_BYTES, b"\0")


def shard_header(tokens: int) -> bytes:
    """Return the header of an llm.c shard."""
    return header(MAGIC, VERSION, tokens)


def is_whole(path: Path) -> bool:
    """Return whether one of our shards is as long as its header says."""
    size = path.stat().st_size - HEADER_BYTES
    return size % TOKEN.itemsize == 0 and first_bytes(path) == shard_header(max(0, size) // TOKEN.itemsize)


def first_bytes(path: Path) -> bytes:
    """Return up to HEADER_BYTES bytes from the beginning of a file."""
    with path.open("rb") as file:
        return file.read(HEADER_BYTES)

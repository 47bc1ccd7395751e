"""Token files: those of nanoGPT and llm.c read as they are, ours written like llm.c's. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

TOKEN = np.dtype("<u2")
HEADER_INTS = 256  # llm.c's shard header: int32 magic, version, number of tokens, zeros (dev/data/data_common.py)
HEADER_BYTES = 4 * HEADER_INTS
MAGIC = 20240520
VERSION = 1


class DataError(Exception):
    """A corpus that cannot be used; the message says which, why and what to do."""


def cache_dir() -> Path:
    """Where token shards and downloads are kept: $GPT2_CACHE_DIR, else the user's cache folder."""
    if configured := os.environ.get("GPT2_CACHE_DIR"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2-bench"


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Write `target` whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            try:
                yield file
            except BaseException:
                Path(file.name).unlink()
                raise
        os.umask(mask := os.umask(0o077))  # there is no other way to ask for it
        os.chmod(file.name, 0o666 & ~mask)  # as any other file: a temporary one is its owner's alone
        os.replace(file.name, target)
    except OSError as error:
        where = "; set GPT2_CACHE_DIR to a writable folder" if target.is_relative_to(cache_dir()) else ""
        raise DataError(f"cannot write {target} ({error.strerror}){where}") from None


def shard_header(tokens: int) -> bytes:
    """The 1,024 bytes before the tokens of an llm.c shard."""
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens
    return header.tobytes()


class Shards:
    """Token files read as one sequence, memory-mapped."""

    def __init__(self, name: str, arrays: list[np.ndarray], sha256: str) -> None:
        self.name, self.sha256 = name, sha256
        self.warnings: tuple[str, ...] = ()
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])
        self.tokens: int | None = int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """See Corpus.read; the range may cross shards."""
        parts = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        start -= int(self._ends[shard - 1]) if shard else 0
        while count:
            part = self._arrays[shard][start : start + count]
            parts.append(part)
            count, start, shard = count - len(part), 0, shard + 1
        return np.concatenate(parts)


def open_shards(name: str, paths: list[Path], vocab_size: int) -> Shards:
    """The files, in this order, as one corpus. Raises DataError where one is damaged or beyond the vocabulary."""
    arrays = [_map_shard(path) for path in paths]
    found = _fingerprint(paths, arrays)
    if found["largest"] >= vocab_size:
        raise DataError(
            f"corpus {name!r}: token id {found['largest']} is beyond the model's vocabulary of {vocab_size}; "
            "choose a model with the vocabulary that made the tokens (tiny has only that of the synthetic corpus)"
        )
    return Shards(name, arrays, found["sha256"])


def _map_shard(path: Path) -> np.ndarray:
    """Memory-map one .bin file: llm.c's by its header, else nanoGPT's, which has none."""
    size = path.stat().st_size
    if size == 0 or size % TOKEN.itemsize:
        raise DataError(f"{path}: {size} bytes are no whole number of uint16 tokens")
    if size >= HEADER_BYTES:
        header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
        magic, version, tokens = (int(value) for value in header[:3])
        # No text holds 506 equal tokens after its first six, so zeros there mark a header of some kind.
        if magic == MAGIC or not header[3:].any():
            if magic != MAGIC:
                raise DataError(f"{path}: header magic {magic} is not {MAGIC}, llm.c's GPT-2 token shards")
            if version != VERSION:
                raise DataError(f"{path}: llm.c shard version {version} is not {VERSION}")
            if size != HEADER_BYTES + tokens * TOKEN.itemsize:
                raise DataError(
                    f"{path}: the header promises {tokens} tokens, the file holds "
                    f"{(size - HEADER_BYTES) // TOKEN.itemsize}; it was cut off or damaged"
                )
            if not tokens:
                raise DataError(f"{path}: holds no tokens")
            return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES)
    return np.memmap(path, dtype=TOKEN, mode="r")


def _fingerprint(paths: list[Path], arrays: list[np.ndarray]) -> dict:
    """sha256 and largest id of all tokens; read once, then remembered by path, size and time of change."""
    stats = [path.stat() for path in paths]
    identity = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    remembered = cache_dir() / "fingerprints" / f"{key}.json"
    if remembered.exists():
        return json.loads(remembered.read_text())
    digest, largest = hashlib.sha256(), 0
    for array in arrays:
        for start in range(0, len(array), 1 << 24):
            part = np.ascontiguousarray(array[start : start + (1 << 24)])
            digest.update(part.data)
            largest = max(largest, int(part.max()))
    result = {"sha256": digest.hexdigest(), "largest": largest}
    with replacing(remembered) as file:
        file.write(json.dumps(result).encode())
    return result

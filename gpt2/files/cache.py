"""The user's cache: where it is, how files are written into it, and when facts cached about other files are
valid.

with replacing(cache_dir() / "tokens" / "x.bin") as file: ...    # written whole or not at all
sha256_of(Path("input.txt"))                       # of the whole file
remembered([path], "tokens", lambda: {...})        # caches facts that take reading these files

A file's name, size and modification time can all stay while its content changes. Cached facts are therefore
used only while each file's size, times, inode and a sample of its bytes are unchanged. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from gpt2.files.temporary import whole_file

SAMPLES = 16
"""Number of places of a file that are sampled before its cached facts are used, the first and last bytes
included.
"""
SAMPLE_BYTES = 4096
SETTLED_SECONDS = 2.0
"""Facts of a file changed more recently than this are not cached: a coarse clock may hide another change."""


class DataError(Exception):
    """A corpus that cannot be used; the message says which, why and what to do."""


def cache_dir() -> Path:
    """Return the folder for token shards and downloads: $GPT2_CACHE_DIR, else the user's cache folder.

    Raises DataError where the user has no home directory.
    """
    if configured := os.environ.get("GPT2_CACHE_DIR"):
        return Path(configured)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "gpt2-bench"
    try:
        return Path.home() / ".cache" / "gpt2-bench"
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        raise DataError(
            "this user has no home directory to keep tokens in; set GPT2_CACHE_DIR to a folder"
        ) from None


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `target` once it is written, so that `target` is whole or
    unchanged.

    Raises DataError where it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(target) as file:
            yield file
    except OSError as error:
        where = ""
        with contextlib.suppress(DataError):
            where = "; set GPT2_CACHE_DIR to a writable folder" if target.is_relative_to(cache_dir()) else ""
        raise DataError(f"cannot write {target} ({error.strerror}){where}") from None


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, from the cache where it is still valid. Raises OSError, or
    DataError.
    """
    return cached_facts([path], "bytes", lambda: {"sha256": _digest(path)})["sha256"]


def cached_facts(paths: Sequence[Path], what: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that `read` computes from these files, from the cache while the files are unchanged.

    `what` names the kind of facts and their version. Where the cache cannot be written, the files are read
    each time. Raises whatever `read` raises, OSError, and DataError where a file changes while it is read.
    """
    places = [str(path.resolve()) for path in paths]
    key = hashlib.sha256(json.dumps([what, *places]).encode()).hexdigest()
    before = _look(paths)
    with contextlib.suppress(DataError, OSError, ValueError, TypeError, KeyError):
        kept = json.loads((cache_dir() / "fingerprints" / f"{key}.json").read_text(encoding="utf-8"))
        if kept["files"] == before:
            return kept["facts"]
    facts = read()
    if (after := _look(paths)) != before:
        changed = next(path for path, one, two in zip(paths, before, after, strict=True) if one != two)
        raise DataError(f"{changed} changed while it was read; run again once nothing writes to it")
    newest = max(
        look["ctime_ns"] for look in before
    )  # not mtime, which unpacking an archive may set to any time
    if time.time_ns() - newest > SETTLED_SECONDS * 1e9:
        with contextlib.suppress(DataError), replacing(cache_dir() / "fingerprints" / f"{key}.json") as file:
            file.write(json.dumps({"files": before, "facts": facts}).encode())
    return facts


def changed(files: dict[Path, str]) -> Path | None:
    """Return the first file whose sha256 differs from the one given, or None. Raises OSError, or DataError."""
    return next((path for path, sha256 in files.items() if sha256_of(path) != sha256), None)


def _look(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a JSON-able fingerprint of each file that can be taken without reading the whole file."""
    looks = []
    for path in paths:
        stat = path.stat()
        digest = hashlib.sha256(b"".join(samples(path)))
        looks.append(
            {
                "size": stat.st_size,
                "mtime_ns": stat.st_mtime_ns,
                "ctime_ns": stat.st_ctime_ns,
                "inode": [stat.st_dev, stat.st_ino],
                "sample": digest.hexdigest(),
            }
        )
    return looks


def samples(path: Path) -> Iterator[bytes]:
    """Yield SAMPLE_BYTES bytes from each of SAMPLES places of a file, the first and last bytes included."""
    with path.open("rb") as file:
        last = max(0, os.fstat(file.fileno()).st_size - SAMPLE_BYTES)
        for place in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
            file.seek(place)
            yield file.read(SAMPLE_BYTES)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

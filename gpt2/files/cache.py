"""The user's cache: where it is, and when facts kept there about other files are valid.

sha256_of(Path("input.txt"))                       # of the whole file
cached_facts([path], "tokens", lambda: {...})      # caches facts that take reading these files

A file's name, size and modification time can all stay while its content changes. Cached facts are therefore
used only while each file's size, times, inode and a sample of its bytes are unchanged. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2.errors import GPT2Error
from gpt2.files.atomic import atomic_write

SAMPLES = 16
"""Places of a file that are sampled before its cached facts are used, the first and last bytes included."""
SAMPLE_BYTES = 4096
WRITABLE = "set GPT2_CACHE_DIR to a writable folder"
"""Advice where a file of the cache cannot be written."""
SETTLED_SECONDS = 2.0
"""Facts of a file changed more recently than this are not cached: a coarse clock may hide another change."""


class DataError(GPT2Error):
    """A corpus that cannot be used; the message says which, why and what to do."""


def cache_dir() -> Path:
    """Return the folder for token shards and downloads: $GPT2_CACHE_DIR, else the user's cache folder.

    Raises DataError where the user has no home directory.
    """
    if configured := os.environ.get("GPT2_CACHE_DIR"):
        return Path(os.path.expanduser(configured))
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "gpt2-bench"
    try:
        return Path.home() / ".cache" / "gpt2-bench"
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        raise DataError(
            "this user has no home directory to keep tokens in; set GPT2_CACHE_DIR to a folder"
        ) from None


@contextlib.contextmanager
def readable(what: str, path: Path) -> Iterator[None]:
    """Raise an OSError within the block as a DataError; what: begins its message."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{what}: cannot read {error.filename or path} ({error.strerror})") from None


def data_dir() -> Path | None:
    """Return the user's folder of corpora, $GPT2_DATA_DIR; None where there is none."""
    given = os.environ.get("GPT2_DATA_DIR")
    return Path(os.path.expanduser(given)) if given else None


def at_hand(*names: str) -> Path | None:
    """Return the first of these files or folders in $GPT2_DATA_DIR, else in the cache; None without one."""
    for folder in (data_dir(), cache_dir() / "corpora"):
        for name in names:
            if folder and (candidate := folder / name).exists():
                return candidate
    return None


def download(what: str, url: str, name: str, sha256: str, ways: str) -> Path:
    """Download a file of known content into the cache and return its path. Raises DataError.

    what: begins the message; ways: ends it, with other ways to get the file.
    """
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:  # the latter where it breaks off
        reason = getattr(error, "reason", error)
        raise DataError(f"{what} is not at hand and could not be downloaded ({reason}); {ways}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{what}: {url} does not give the known file; {ways}")
    target = cache_dir() / "corpora" / name
    with atomic_write(target, DataError, WRITABLE) as file:
        file.write(content)
    return target


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's bytes, cached while it is unchanged. Raises OSError or DataError."""
    return cached_facts([path], "bytes", lambda: {"sha256": _digest(path)})["sha256"]


def cached_facts(paths: Sequence[Path], what: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the facts that `read` computes from these files, from the cache while the files are unchanged.

    `what` names the kind of facts and their version. Where the cache cannot be written, the files are read
    each time. Raises whatever `read` raises, OSError, and DataError where a file changes while it is read.
    """
    places = [str(path.resolve()) for path in paths]
    key = hashlib.sha256(json.dumps([what, *places]).encode()).hexdigest()
    before = [_sampled(path) for path in paths]
    with contextlib.suppress(DataError, OSError, ValueError, TypeError, KeyError):
        kept = json.loads(_facts_file(key).read_text(encoding="utf-8"))
        if kept["files"] == before:
            return kept["facts"]
    facts = read()
    if (after := [_sampled(path) for path in paths]) != before:
        changed = next(path for path, one, two in zip(paths, before, after, strict=True) if one != two)
        raise DataError(f"{changed} changed while it was read; run again once nothing writes to it")
    newest = max(each["ctime_ns"] for each in before)  # not mtime, which archives set to any time
    if time.time_ns() - newest > SETTLED_SECONDS * 1e9:
        kept = json.dumps({"files": before, "facts": facts}).encode()
        with contextlib.suppress(DataError, OSError), atomic_write(_facts_file(key)) as file:
            file.write(kept)
    return facts


def _facts_file(key: str) -> Path:
    return cache_dir() / "fingerprints" / f"{key}.json"


def fingerprint(path: Path) -> dict[str, Any]:
    """Return a file's size, times and inode, JSON-able, which tell of most changes. Raises OSError."""
    stat = path.stat()
    times = {"mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
    return {"size": stat.st_size, **times, "inode": [stat.st_dev, stat.st_ino]}


def _sampled(path: Path) -> dict[str, Any]:
    """Return a file's fingerprint with a digest of samples of its bytes."""
    return {**fingerprint(path), "sample": hashlib.sha256(b"".join(samples(path))).hexdigest()}


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

"""The index.json of a folder of prepared shards: its contents, and the position to resume from.

index = read_index(Path("data/fineweb-edu"))      # None where there is none
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gpt2.files.atomic import atomic_write
from gpt2.files.cache import DataError
from gpt2.files.shard_format import HEADER_BYTES, TOKEN

VERSION = 1
NANOGPT_FILES = {"train": "train.bin", "val": "val.bin"}
"""nanoGPT's file of each split."""
AGAIN = "what is whole stays: once that is mended, run the same again to go on"


@dataclass
class Index:
    """Contents of an index.json, written by gpt2.data.corpora.prepare."""

    name: str
    """Prefix of the shards' file names; the corpus's own name is corpus["corpus"]."""
    settings: dict[str, Any]
    """The settings asked for; a folder accepts no others."""
    corpus: dict[str, Any]
    """gpt2.data.corpora.sources.Documents.source of the training shards."""
    validation: dict[str, Any]
    """gpt2.data.corpora.sources.Documents.source of the validation shard."""
    vocabulary: dict[str, Any]
    finished: bool = False
    tokens: int = 0
    documents: int = 0
    """Number of documents that begin in the shards."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """file, split (train or val), tokens, documents and sha256 of each shard, in the order of writing."""
    position: dict[str, Any] | None = None
    """Start of the next shard: a position in the corpus, and the number of tokens after it to skip."""
    version: int = VERSION

    def lacking(self, folder: Path) -> Path | None:
        """Return the first shard that is missing or of the wrong length; see damaged() for contents."""
        for entry in self.shards:
            path = folder / entry["file"]
            if not path.is_file() or path.stat().st_size != HEADER_BYTES + entry["tokens"] * TOKEN.itemsize:
                return path
        return None

    def damaged(self, folder: Path) -> list[str]:
        """Return the shards that are missing or fail their checksum."""
        wrong = []
        for entry in self.shards:
            found = None
            with contextlib.suppress(OSError), (folder / entry["file"]).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry["sha256"]:
                wrong.append(entry["file"])
        return wrong

    def write(self, folder: Path) -> None:
        """Replace the folder's index.json atomically. Raises DataError."""
        with atomic_write(folder / "index.json", DataError, AGAIN) as file:
            file.write(json.dumps(asdict(self), indent=1).encode())


def read_index(folder: Path) -> Index | None:
    """Return a folder's index, or None. Raises DataError where it is damaged or of another version."""
    path = folder / "index.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); prepare the corpus into another folder") from None
    known = isinstance(found, dict) and found.get("version") == VERSION
    if not known or set(found) != {f.name for f in fields(Index)}:
        other = f"{path} is not an index of version {VERSION}"
        raise DataError(f"{other}; prepare the corpus into another folder")
    return Index(**found)


def assert_free_for_nanogpt(target: Path) -> None:
    """Raise DataError where nanoGPT's files are in a folder, which those of a new preparation would be."""
    for path in (target / name for name in NANOGPT_FILES.values()):
        if path.exists():
            raise DataError(f"{path} is there already; remove it, or give --nanogpt another folder")


def to_nanogpt(folder: Path, target: Path) -> None:
    """Write a preparation as nanoGPT's train.bin and val.bin, without headers; if they are there, they stay.

    Raises DataError where the preparation is not finished, a file of that name holds other tokens, or the
    disk is full.
    """
    index = read_index(folder)
    if index is None or not index.finished:
        raise DataError(f"{folder} holds no finished preparation")
    try:
        target.mkdir(parents=True, exist_ok=True)
        lacking = [split for split, name in NANOGPT_FILES.items() if not (target / name).exists()]
        for split in NANOGPT_FILES.keys() - lacking:
            if _sha256(_tokens(index, folder, split)) != _sha256(_chunks(target / NANOGPT_FILES[split], 0)):
                raise _holds_other_tokens(target / NANOGPT_FILES[split])
    except OSError as error:
        raise DataError(f"cannot write into {target} ({error.strerror})") from None
    for split in lacking:
        with atomic_write(target / NANOGPT_FILES[split], DataError, AGAIN) as file:
            file.writelines(_tokens(index, folder, split))


def _tokens(index: Index, folder: Path, split: str) -> Iterator[bytes]:
    """Yield the tokens of a split's shards, as bytes."""
    for entry in index.shards:
        if entry["split"] == split:
            yield from _chunks(folder / entry["file"], HEADER_BYTES)


def _chunks(path: Path, start: int) -> Iterator[bytes]:
    """Yield a file's bytes from `start` on."""
    with path.open("rb") as file:
        file.seek(start)
        while chunk := file.read(1 << 23):
            yield chunk


def _sha256(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _holds_other_tokens(path: Path) -> DataError:
    return DataError(f"{path} is there already and holds other tokens; give --nanogpt another folder")

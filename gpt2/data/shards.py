"""Token files: nanoGPT's and llm.c's are read as they are, ours are written like llm.c's."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.config.workload import TEXT_VOCABULARY
from gpt2.files.cache import DataError, cached_facts, fingerprint, sha256_of
from gpt2.files.listing import kind_of
from gpt2.files.shard_format import HEADER_BYTES, MAGIC, TOKEN, VERSION, first_bytes

LLAMA_MAGIC, EVALUATION_MAGIC = 20240801, 20240522
SCANNED = 1 << 24
"""Tokens scanned at a time."""
UNWRITTEN = 64
"""Length of an aligned run of zeros that marks unwritten data.

No GPT-2 text has token 0 (an exclamation mark) twice in a row, because two of them are one token.
"""
FEWEST_TO_TELL = 8
"""Smallest number of tokens for which zeros at every other position are no coincidence."""
FEWEST_TO_COMPARE, FEWEST_KINDS, ALIKE = 1024, 3, 0.12
"""Fewest bytes and distinct bytes for comparing distributions, and the distance of similar ones."""


class Shards:
    """Memory-mapped token files as one sequence; a Corpus."""

    def __init__(
        self, name: str, arrays: list[np.ndarray], sha256: str, *, vocab_size: int | None = None
    ) -> None:
        self.name, self.sha256 = name, sha256
        self.files: dict[Path, str] = {}
        """sha256 of each file, header included; empty where the tokens are in memory."""
        self.warnings: tuple[str, ...] = ()
        self.is_text = False
        """True if these are known to be tokens of GPT-2's vocabulary."""
        self._arrays = arrays
        self._fingerprints: list[tuple[Path, dict[str, Any]]] = []
        self._vocab_size = vocab_size
        self._ends = np.cumsum([len(array) for array in arrays])
        self.tokens: int | None = int(self._ends[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """See Corpus.read; the range may cross shards. Raises DataError where a file has changed."""
        first = shard = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        start -= int(self._ends[shard - 1]) if shard else 0
        while count:
            self._check(shard)  # pages beyond the end of a file that was cut short end the process
            part = self._arrays[shard][start : start + count]
            parts.append(part)
            count, start, shard = count - len(part), 0, shard + 1
        found = np.concatenate(parts)
        for each in range(first, shard):
            self._check(each)  # so that nothing is taken which was written meanwhile
        if self._vocab_size is not None and found.max(initial=0) >= self._vocab_size:
            raise DataError(
                f"corpus {self.name!r}: its files changed since they were opened: token id {found.max()} is "
                f"beyond the model's vocabulary of {self._vocab_size}"
            )
        return found

    def watch(self, files: dict[Path, str], fingerprints: list[dict[str, Any]]) -> None:
        """Record the files, their sha256 and their state, so that reads notice changes."""
        self.files = files
        self._fingerprints = list(zip(files, fingerprints, strict=True))

    def _check(self, shard: int) -> None:
        """Raise DataError where a file was written to; one that replaces it leaves the mapped tokens."""
        if not self._fingerprints:
            return
        path, before = self._fingerprints[shard]
        try:
            now = fingerprint(path)
            if now == before or now["inode"] != before["inode"]:
                return
            same = sha256_of(path) == self.files[path]
        except OSError:  # the file was removed
            return
        if not same:
            raise DataError(f"corpus {self.name!r}: {path} changed since it was opened; put back what it was")
        self._fingerprints[shard] = path, now


def open_shards(name: str, paths: list[Path], vocab_size: int) -> Shards:
    """Open the files, in this order, as one corpus.

    Each file is read once in full: its width is verified, its ids are checked against the vocabulary, and its
    content gives the corpus's sha256. Raises DataError where one is damaged, or of another width or
    vocabulary.
    """
    for folder in {path.parent for path in paths}:
        _refuse_other_vocabulary(folder, vocab_size)
    fingerprints = [fingerprint(path) for path in paths]
    found = cached_facts(paths, "tokens 2", lambda: _read_all(paths))
    for path, largest, unwritten in zip(paths, found["largest"], found["unwritten"], strict=True):
        if unwritten is not None and vocab_size >= TEXT_VOCABULARY:
            raise DataError(
                f"corpus {name!r}: {path.name} has nothing but zeros from token {unwritten:,} on, "
                f"{UNWRITTEN} or more, as a file has that was not written to its end, or padding; write it "
                "anew, without"
            )
        if largest >= vocab_size:
            raise DataError(
                f"corpus {name!r}: token id {largest} of {path.name} is beyond the model's vocabulary of "
                f"{vocab_size}; choose a model with the vocabulary that made the tokens (tiny has only that "
                "of the synthetic corpus), and see that they are little-endian uint16"
            )
    corpus = Shards(name, [_map_shard(path) for path in paths], found["sha256"], vocab_size=vocab_size)
    corpus.watch(dict(zip(paths, found["files"], strict=True)), fingerprints)
    return corpus


def _map_shard(path: Path) -> np.memmap:
    """Memory-map one .bin file: llm.c's by its header, else nanoGPT's, which has none. Raises DataError."""
    size, begins = path.stat().st_size, first_bytes(path)
    if kind := kind_of(begins):
        raise DataError(f"{path} is {kind}; tokens are plain little-endian uint16, or llm.c's shards")
    if size == 0 or size % TOKEN.itemsize:
        raise DataError(f"{path}: {size} bytes are no whole number of uint16 tokens")
    if size >= HEADER_BYTES:
        header = np.frombuffer(begins, dtype="<i4")
        magic, version, tokens = (int(value) for value in header[:3])
        # No text has 506 equal tokens after its first six, so zeros there are a header of some kind.
        if magic in (MAGIC, EVALUATION_MAGIC) or not header[3:].any():
            if magic == EVALUATION_MAGIC:
                raise DataError(f"{path} holds questions of llm.c's evaluation, no text; leave it out")
            if magic == LLAMA_MAGIC:
                advice = "prepare the text anew with GPT-2's vocabulary"
                raise DataError(f"{path} holds Llama 3's uint32 tokens; {advice}")
            if magic != MAGIC:
                raise DataError(f"{path}: header magic {magic} is not {MAGIC}, llm.c's GPT-2 token shards")
            if version != VERSION:
                raise DataError(f"{path}: llm.c shard version {version} is not {VERSION}")
            if size != HEADER_BYTES + tokens * TOKEN.itemsize:
                held = f"the file holds {(size - HEADER_BYTES) // TOKEN.itemsize}"
                promise = f"{path}: the header promises {tokens} tokens, {held}"
                raise DataError(f"{promise}; it was cut off or damaged")
            if not tokens:
                raise DataError(f"{path}: holds no tokens")
            return np.memmap(path, dtype=TOKEN, mode="r", offset=HEADER_BYTES)
    return np.memmap(path, dtype=TOKEN, mode="r")


def _read_all(paths: list[Path]) -> dict[str, Any]:
    """Return the sha256 of all tokens, and per file its sha256, largest id and first unwritten position.

    Raises DataError for a file of another width.
    """
    whole = hashlib.sha256()
    files: list[str] = []
    largest: list[int] = []
    unwritten: list[int | None] = []
    for path in paths:
        array = _map_shard(path)
        has_header = array.offset > 0
        digest = hashlib.sha256(first_bytes(path) if has_header else b"")
        most, empty = 0, None
        zeros = [True, True]  # all even positions, all odd positions are 0
        for start in range(0, len(array), SCANNED):
            part = np.ascontiguousarray(array[start : start + SCANNED])
            whole.update(part.data)
            digest.update(part.data)
            most = max(most, int(part.max()))
            whole_stretches = part[: len(part) // UNWRITTEN * UNWRITTEN].reshape(-1, UNWRITTEN)
            if empty is None and not (filled := whole_stretches.any(axis=1)).all():
                empty = start + int(np.argmin(filled)) * UNWRITTEN
            zeros = [zero and not part[place::2].any() for place, zero in enumerate(zeros)]
        if not has_header and len(array) >= FEWEST_TO_TELL:
            _refuse_other_width(path, array, zeros)
        files.append(digest.hexdigest())
        largest.append(most)
        unwritten.append(empty)
    return {"sha256": whole.hexdigest(), "files": files, "largest": largest, "unwritten": unwritten}


def _refuse_other_width(path: Path, array: np.ndarray, zeros: list[bool]) -> None:
    """Raise DataError where a headerless file was not written as uint16.

    zeros: whether all even and all odd positions are 0, as with ids of GPT-2's vocabulary in 4 or 8 bytes; no
    text has token 0, an exclamation mark, at every other position.
    """
    if any(zeros):
        every_other = "every other uint16 of it is 0: its ids have 4 or 8 bytes"
        wide = "all its tokens are 0" if all(zeros) else every_other
        raise DataError(f"{path} holds no uint16 tokens: {wide}; write them with numpy's .astype('<u2')")
    # In plain text and in one-byte ids, bytes at even and odd positions have similar distributions, at a
    # distance below 0.1; in uint16 ids it is about 0.7, for GPT-2's tokens of English or code.
    places = array[:SCANNED].view(np.uint8).reshape(-1, 2)
    low, high = (np.bincount(places[:, place], minlength=256)[1:] for place in (0, 1))
    if min(low.sum(), high.sum()) < FEWEST_TO_COMPARE or np.count_nonzero(high) < FEWEST_KINDS:
        return
    if np.abs(low / low.sum() - high / high.sum()).sum() / 2 < ALIKE:
        raise DataError(
            f"{path} holds no uint16 tokens but bytes, as plain text or ids of one byte each; name a text "
            ".txt, or write ids with numpy's .astype('<u2')"
        )


def _refuse_other_vocabulary(folder: Path, vocab_size: int) -> None:
    """Raise DataError where a meta.pkl beside the tokens names another vocabulary size than the model's.

    nanoGPT's character-level data come with one: {"vocab_size": 65, "itos": ..., "stoi": ...}.
    """
    path = folder / "meta.pkl"
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            size = _PlainUnpickler(file).load()["vocab_size"]
    except Exception:  # a pickle can raise anything
        size = None
    if isinstance(size, int) and size != vocab_size:
        raise DataError(
            f"{path} says that the tokens beside it are of a vocabulary of {size}, the model's is of "
            f"{vocab_size}; prepare the text with GPT-2's vocabulary (gpt2 prepare FILE.txt), or choose a "
            "model of that vocabulary"
        )


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that reads plain values and runs no code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is code")

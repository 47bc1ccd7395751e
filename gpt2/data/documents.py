"""Documents of prepared shards in a new order each epoch. Imports no torch.

corpus = in_new_order(open_corpus("fineweb-edu", vocab_size=50257, path=folder), seed=1337)
batches = Batches(corpus, seq_len=1024, tokens_per_step=524288, seed=1337)       # reads it in sequence
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpt2.data.batches import Corpus
from gpt2.data.shards import Shards
from gpt2.files.atomic import atomic_write
from gpt2.files.cache import DataError, cache_dir

SEPARATOR = 50256
"""Token id of <|endoftext|>, which precedes each document."""
STRIDE = 32
"""Every STRIDE-th document's position in an epoch is stored; those between are computed on reading."""
SCANNED = 1 << 24
"""Tokens scanned at a time."""


def in_new_order(corpus: Corpus, seed: int) -> Corpus:
    """Return the corpus with its documents shuffled anew each epoch; itself where it is a single one.

    Batches reads a shuffled corpus in sequence; it cuts a single text into chunks and shuffles those.
    """
    if not isinstance(corpus, Shards):
        return corpus
    shuffled = ShuffledDocuments(corpus, seed)
    return shuffled if shuffled.documents > 1 else corpus


@dataclass(frozen=True)
class _Epoch:
    order: np.ndarray
    """Document numbers in the order of the epoch, uint32."""
    marks: np.ndarray
    """Tokens before document 0, STRIDE, 2 STRIDE, ... of the order, int64."""


class ShuffledDocuments:
    """An endless Corpus: all documents in an order drawn from (seed, epoch), epoch after epoch.

    Each epoch contains every token once. A document begins at its <|endoftext|>, the first at token 0. Any
    range can be read. Memory for 10 million documents: 42 MB for each epoch in use (at most two), and 80 MB
    mapped from the file of document boundaries. Drawing an epoch of that size takes a second.
    """

    tokens: int | None = None

    def __init__(self, corpus: Shards, seed: int) -> None:
        assert corpus.tokens
        self.name, self.sha256, self.warnings = corpus.name, corpus.sha256, corpus.warnings
        self.seed = seed
        self.epoch_tokens = corpus.tokens
        self._corpus = corpus
        self._bounds = _bounds(corpus)
        self.documents = len(self._bounds) - 1
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def read(self, start: int, count: int) -> np.ndarray:
        """See Corpus.read; the range may cross documents and epochs."""
        parts = []
        while count:
            epoch, place = divmod(start, self.epoch_tokens)
            part = self._read_in_epoch(self._epoch(epoch), place, min(count, self.epoch_tokens - place))
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def _read_in_epoch(self, epoch: _Epoch, place: int, count: int) -> np.ndarray:
        mark = int(np.searchsorted(epoch.marks, place, side="right")) - 1
        place -= int(epoch.marks[mark])
        parts = []
        while count:
            documents = epoch.order[mark * STRIDE : (mark + 1) * STRIDE].astype(np.int64)
            begins, ends = self._bounds[documents], self._bounds[documents + 1]
            until = np.cumsum(ends - begins)
            first = int(np.searchsorted(until, place, side="right"))
            begins[first] = ends[first] - (until[first] - place)
            for begin, end in zip(begins[first:].tolist(), ends[first:].tolist(), strict=True):
                part = self._corpus.read(begin, min(count, end - begin))
                parts.append(part)
                count -= len(part)
                if not count:
                    break
            mark, place = mark + 1, 0
        return np.concatenate(parts)

    def _draw_epoch(self, epoch: int) -> _Epoch:
        order = np.arange(self.documents, dtype=np.uint32)
        np.random.default_rng([self.seed, epoch]).shuffle(order)
        marks = np.empty(-(-self.documents // STRIDE), dtype=np.int64)
        before, rows = 0, 1 << 15
        for first in range(0, len(marks), rows):  # in parts, to bound the memory for lengths
            documents = order[first * STRIDE : (first + rows) * STRIDE].astype(np.int64)
            lengths = self._bounds[documents + 1] - self._bounds[documents]
            ends = before + np.cumsum(lengths)
            marks[first : first + rows] = (ends - lengths)[::STRIDE]
            before = int(ends[-1])
        assert before == self.epoch_tokens
        return _Epoch(order, marks)


def _bounds(corpus: Shards) -> np.ndarray:
    """Return the start of each document and the end of the last: int64, mapped from a cached file."""
    assert corpus.tokens
    cached = None
    with contextlib.suppress(DataError):  # no home directory: in memory, as where it cannot be written
        cached = cache_dir() / "documents" / f"{corpus.sha256}.npy"
    if cached and (kept := _kept(cached)) is not None:
        return kept
    found = [np.zeros(1, dtype=np.int64)]
    for start in range(0, corpus.tokens, SCANNED):
        part = corpus.read(start, min(SCANNED, corpus.tokens - start))
        places = start + np.flatnonzero(part == SEPARATOR)
        found.append(places[places > 0])
    bounds = np.concatenate([*found, [corpus.tokens]])
    if cached:
        with contextlib.suppress(OSError), atomic_write(cached) as file:
            np.save(file, bounds)
    mapped = _kept(cached) if cached else None
    return bounds if mapped is None else mapped


def _kept(path: Path) -> np.ndarray | None:
    """Map the cached boundaries; None where there is no file, or it is incomplete."""
    try:
        return np.load(path, mmap_mode="r").view(np.ndarray)  # indexing a plain array is several times faster
    except (OSError, ValueError, EOFError):
        return None

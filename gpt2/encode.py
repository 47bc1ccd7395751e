"""Documents to token ids, in order, by several processes at once. Imports no torch.

with Encoder(processes=8) as encoder:
    for batch in encoder.encoded(documents, position=None): ...     # batch.tokens, and where the batch begins
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from gpt2.cache import DataError
from gpt2.corpora import Documents, Piece
from gpt2.documents import SEPARATOR
from gpt2.shards import TOKEN
from gpt2.text import TokeniseError, gpt2_encoding
from gpt2.text import encode as encode_text

BATCH_CHARS = 1 << 20
"""Characters encoded together: 250,000 tokens or so of English."""
BATCH_PIECES = 4096
"""Documents encoded together, where they are short."""


class Batch(NamedTuple):
    """Documents read one after another, and what they became."""

    position: dict[str, Any] | None
    """Where the documents begin in their source; None is its beginning."""
    characters: int
    tokens: np.ndarray
    """uint16; each document after its <|endoftext|>."""


Encoded = tuple[np.ndarray, list[TokeniseError]]


def processors() -> int:
    """Logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(pieces: list[Piece]) -> Encoded:
    """Token ids of these pieces, uint16, and what was wrong with those that had to be left out."""
    found, errors = [np.empty(0, dtype=TOKEN)], []
    for piece in pieces:
        try:
            found.append(encode_one(piece))
        except TokeniseError as error:
            errors.append(error)
    return np.concatenate(found), errors


def encode_one(piece: Piece) -> np.ndarray:
    """Token ids of one piece, uint16, <|endoftext|> before them where it begins a document. Raises TokeniseError."""
    found = encode_text(piece.text, piece.where)  # other threads go on meanwhile
    return np.concatenate([np.array([SEPARATOR], dtype=TOKEN), found]) if piece.begins else found


class Encoder:
    """Processes that encode, ended with the block; in this process where there is to be one."""

    def __init__(self, processes: int | None = None, warn: Callable[[str], None] | None = None) -> None:
        """warn: is told of each document that is left out; where None, such a one is an error."""
        gpt2_encoding()  # what is wrong with the vocabulary is said here, once
        self.processes = processes or processors()
        self.left_out = 0
        """Documents that could not be tokenised, so far."""
        self._warn = warn
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Encoder:
        if self.processes > 1:
            # Not forked: reading the corpus has threads of its own.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.processes, mp_context=spawn, initializer=_begin_worker)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def encoded(self, documents: Documents, position: dict[str, Any] | None) -> Iterator[Batch]:
        """The documents from `position` on, in their order. At most two batches per process are in memory.

        A document that cannot be tokenised is left out, with a warning. A text file is one document, read in pieces:
        it is not left out, nor a piece of it, but raises TokeniseError.
        """
        leave_out = self._warn is not None and documents.kind != "text"
        waiting: deque[tuple[dict[str, Any] | None, int, Future[Encoded] | list[Piece]]] = deque()
        try:
            for began, pieces in _batches(documents, position):
                characters = sum(len(piece.text) for piece in pieces)
                waiting.append((began, characters, self._pool.submit(encode, pieces) if self._pool else pieces))
                if len(waiting) >= (2 * self.processes if self._pool else 1):
                    yield self._finished(*waiting.popleft(), leave_out)
            while waiting:
                yield self._finished(*waiting.popleft(), leave_out)
        except BrokenProcessPool:
            raise DataError(
                "a process that tokenised was ended from outside (out of memory?); run the same again to go on, "
                "with fewer processes"
            ) from None

    def _finished(
        self, position: dict[str, Any] | None, characters: int, work: Future[Encoded] | list[Piece], leave_out: bool
    ) -> Batch:
        tokens, errors = work.result() if isinstance(work, Future) else encode(work)
        for error in errors:
            if not leave_out or self._warn is None:
                raise error
            self._warn(f"{error}; it is left out")
            self.left_out += 1
        return Batch(position, characters, tokens)


def _batches(
    documents: Documents, position: dict[str, Any] | None
) -> Iterator[tuple[dict[str, Any] | None, list[Piece]]]:
    if position is not None:
        documents.load_state_dict(position)
    pieces: list[Piece] = []
    characters = 0
    for piece in documents:
        pieces.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARS or len(pieces) >= BATCH_PIECES:
            following = documents.state_dict()  # before it is read any further
            yield position, pieces
            pieces, characters, position = [], 0, following
    if pieces:
        yield position, pieces


class Tokens:
    """Encoded batches as one sequence that is taken part by part."""

    def __init__(self, batches: Iterator[Batch], *, limit: int | None, place: dict[str, Any] | None = None) -> None:
        self._batches = batches
        self._left = limit
        self._skip = place["skip"] if place else 0
        self._batch = Batch(None, 0, np.empty(0, dtype=TOKEN))
        self._used = 0
        self.taken: int = place["taken"] if place else 0
        self.documents: int = place["documents"] if place else 0
        """Tokens taken, and documents that begin in them, from the beginning of the corpus."""
        self.characters: int = place["characters"] if place else 0
        """Of the batches so far, from the beginning of the corpus."""

    def more(self) -> bool:
        """Whether there is another token within the limit."""
        if self._left == 0:
            return False
        while self._used >= len(self._batch.tokens):
            batch = next(self._batches, None)
            if batch is None:
                return False
            self.characters += 0 if self._skip else batch.characters  # one gone on with was counted before
            self._batch, self._used = batch, min(self._skip, len(batch.tokens))
            self._skip -= self._used
        return True

    def take(self, most: int) -> np.ndarray:
        """At least one token and at most these many; more() must have been asked."""
        most = most if self._left is None else min(most, self._left)
        part = self._batch.tokens[self._used : self._used + most]
        self._used += len(part)
        self.taken += len(part)
        self.documents += int((part == SEPARATOR).sum())
        self._left = None if self._left is None else self._left - len(part)
        return part

    def position(self) -> dict[str, Any]:
        """Of the next token: the batch it is in, and how many of that batch's tokens come before it."""
        return {
            "state": self._batch.position,
            "skip": self._used,
            "taken": self.taken,
            "documents": self.documents,
            "characters": self.characters if self._used else self.characters - self._batch.characters,
        }


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers in order
    gpt2_encoding()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    # A killed parent cannot tell its workers, and they would wait for work for ever.
    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()

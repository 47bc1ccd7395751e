"""Tokenise documents in order, in several processes. Imports no torch.

with Encoder(processes=8) as encoder:
    for batch in encoder.encoded(documents, position=None): ...     # batch.tokens, and where the batch begins
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from gpt2.data.corpora.sources import Documents, Piece
from gpt2.data.documents import SEPARATOR
from gpt2.errors import limit_met
from gpt2.files.cache import DataError
from gpt2.files.shard_format import TOKEN
from gpt2.signals import interrupt_held_back
from gpt2.text import TokeniseError, gpt2_encoding
from gpt2.text import encode as encode_text

BATCH_CHARS = 1 << 20
"""Characters encoded together: about 250,000 tokens of English."""
BATCH_PIECES = 4096
"""Largest number of documents encoded together; reached where they are short."""


class Batch(NamedTuple):
    """Consecutive documents and their tokens."""

    position: dict[str, Any] | None
    """Position of the first document in the source; None for its beginning."""
    characters: int
    tokens: np.ndarray
    """Token ids, uint16; <|endoftext|> precedes each document."""


Encoded = tuple[np.ndarray, list[TokeniseError]]


def processors() -> int:
    """Return the number of logical processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode(pieces: list[Piece]) -> Encoded:
    """Return the pieces' token ids, uint16, and the errors of those that were left out."""
    found, errors = [np.empty(0, dtype=TOKEN)], []
    for piece in pieces:
        try:
            found.append(encode_one(piece))
        except TokeniseError as error:
            errors.append(error)
    return np.concatenate(found), errors


def encode_one(piece: Piece) -> np.ndarray:
    """Return a piece's token ids, uint16, after <|endoftext|> where it begins a document.

    Raises TokeniseError.
    """
    found = encode_text(piece.text, piece.where)  # releases Python's lock
    return np.concatenate([np.array([SEPARATOR], dtype=TOKEN), found]) if piece.begins else found


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Raises DataError where no process or thread can be started.

    Ctrl-C reaches what is started, too: it is deaf to it from its first moment on, and it is given all that
    it needs to start before this process obeys.
    """
    try:
        with interrupt_held_back():
            yield
    except BrokenProcessPool:  # it had started
        raise
    except (OSError, RuntimeError) as error:  # the latter for threads
        why = limit_met(error) or getattr(error, "strerror", None) or error
        raise DataError(f"a process that tokenises cannot be started: {why}, or take --processes 1") from None


def _try_room(processes: int) -> None:
    """Start as many threads for a moment as the pool will need. Raises RuntimeError where a limit forbids it.

    A pool whose own threads cannot start neither ends nor works.
    """
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(THREADS_OF_POOL + 2 * processes):  # a worker has two: see _begin_worker()
            thread = threading.Thread(target=over.wait)
            thread.start()
            started.append(thread)
    finally:
        over.set()
        for thread in started:
            thread.join()


THREADS_OF_POOL = 3
"""The executor's manager, the feeder of its queue, and multiprocessing's resource tracker, a process."""


class Encoder:
    """A pool of tokenising processes, as a context manager; with one process the work is done in this one."""

    def __init__(self, processes: int | None = None, warn: Callable[[str], None] | None = None) -> None:
        """Prepare the pool. Raises DataError where the vocabulary is not available.

        processes: default one per logical processor. warn: called with a line for each document that is left
        out; where None, such a document is an error.
        """
        gpt2_encoding()  # reports a missing vocabulary here, once
        self.processes = processes or processors()
        self.left_out = 0
        """Number of documents so far that could not be tokenised."""
        self._warn = warn
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Encoder:
        if self.processes > 1:
            # Not forked, because reading the corpus uses threads.
            spawn = multiprocessing.get_context("spawn")
            with _starting():
                _try_room(self.processes)
                self._pool = ProcessPoolExecutor(self.processes, mp_context=spawn, initializer=_begin_worker)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def encoded(self, documents: Documents, position: dict[str, Any] | None) -> Iterator[Batch]:
        """Yield the documents from `position` on, encoded, in order; two batches per process are held.

        A document that cannot be tokenised is left out with a warning. A text file is one document read in
        pieces; none of it is left out, and a failure raises TokeniseError.
        """
        warn = self._warn if documents.kind != "text" else None
        waiting: deque[tuple[dict[str, Any] | None, int, Future[Encoded] | list[Piece]]] = deque()
        if position is not None:
            documents.load_state_dict(position)
        try:
            for pieces, following in groups(documents, documents.state_dict, BATCH_PIECES, BATCH_CHARS):
                characters = sum(len(piece.text) for piece in pieces)
                with _starting():
                    work = self._pool.submit(encode, pieces) if self._pool else pieces
                waiting.append((position, characters, work))
                position = following
                if len(waiting) >= (2 * self.processes if self._pool else 1):
                    yield self._finished(*waiting.popleft(), warn)
            while waiting:
                yield self._finished(*waiting.popleft(), warn)
        except BrokenProcessPool:
            raise DataError(
                "a process that tokenised was ended from outside (out of memory?); run the same again to go "
                "on, with fewer processes"
            ) from None

    def _finished(
        self,
        position: dict[str, Any] | None,
        characters: int,
        work: Future[Encoded] | list[Piece],
        warn: Callable[[str], None] | None,
    ) -> Batch:
        tokens, errors = work.result() if isinstance(work, Future) else encode(work)
        for error in errors:
            if warn is None:
                raise error
            warn(f"{error}; it is left out")
            self.left_out += 1
        return Batch(position, characters, tokens)


def groups(
    pieces: Iterable[Piece], position: Callable[[], dict[str, Any]], most_pieces: int, most_characters: int
) -> Iterator[tuple[list[Piece], dict[str, Any]]]:
    """Yield the pieces in groups, each ended as it reaches a limit, with position() as it is after them."""
    group: list[Piece] = []
    characters = 0
    for piece in pieces:
        group.append(piece)
        characters += len(piece.text)
        if len(group) >= most_pieces or characters >= most_characters:
            yield group, position()
            group, characters = [], 0
    if group:
        yield group, position()


class Tokens:
    """Encoded batches as one sequence of tokens, taken part by part."""

    def __init__(
        self, batches: Iterator[Batch], *, limit: int | None, place: dict[str, Any] | None = None
    ) -> None:
        self._batches = batches
        self._left = limit
        self._skip = place["skip"] if place else 0
        self._batch = Batch(None, 0, np.empty(0, dtype=TOKEN))
        self._used = 0
        self.taken: int = place["taken"] if place else 0
        self.documents: int = place["documents"] if place else 0
        """Tokens taken, and documents that begin in them, counted from the beginning of the corpus."""
        self.characters: int = place["characters"] if place else 0
        """Characters of the batches so far, counted from the beginning of the corpus."""

    def more(self) -> bool:
        """Return whether another token is available within the limit."""
        if self._left == 0:
            return False
        while self._used >= len(self._batch.tokens):
            batch = next(self._batches, None)
            if batch is None:
                return False
            self.characters += 0 if self._skip else batch.characters  # a resumed batch was counted before
            self._batch, self._used = batch, min(self._skip, len(batch.tokens))
            self._skip -= self._used
        return True

    def take(self, most: int) -> np.ndarray:
        """Return 1 to `most` tokens, uint16; call more() first."""
        most = most if self._left is None else min(most, self._left)
        part = self._batch.tokens[self._used : self._used + most]
        self._used += len(part)
        self.taken += len(part)
        self.documents += int((part == SEPARATOR).sum())
        self._left = None if self._left is None else self._left - len(part)
        return part

    def position(self) -> dict[str, Any]:
        """Return the position of the next token, JSON-able: its batch, and the tokens before it there."""
        return {
            "state": self._batch.position,
            "skip": self._used,
            "taken": self.taken,
            "documents": self.documents,
            "characters": self.characters if self._used else self.characters - self._batch.characters,
        }


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent shuts its workers down
    gpt2_encoding()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    # A killed parent cannot notify its workers, which would wait for work for ever.
    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()

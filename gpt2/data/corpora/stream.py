"""Batches directly from a corpus, without shards on disk, with a position for checkpoints. Imports no torch.

batches = StreamedBatches(open_documents("fineweb-edu"), seq_len=1024, tokens_per_step=524288, seed=1337)
x, y = batches.sequences(step=0, first=0, count=4)      # as gpt2.data.batches.Batches, steps in rising order
state = batches.state(step=0)                           # JSON-able; give it to a later StreamedBatches
"""

from __future__ import annotations

import atexit
import hashlib
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gpt2.data.corpora.encode import encode_one, groups, processors
from gpt2.data.corpora.sources import Documents, Piece
from gpt2.data.shards import Shards
from gpt2.files.cache import DataError
from gpt2.files.listing import listed
from gpt2.files.shard_format import TOKEN
from gpt2.prefetch import MOST_AHEAD, Prefetched

BLOCK_DOCUMENTS = 8192
BLOCK_CHARS = 64 << 20
"""Largest number of characters in a block; with the blocks read ahead it takes some 250 MB for English."""
PIECE_CHARS = 1 << 14
"""Approximate characters of the pieces in which a text is shuffled and held out: 4,000 tokens of English."""
KEPT = MOST_AHEAD + 16
"""Number of recent steps whose position is kept; a loader may be that far ahead of the checkpoint."""


@dataclass(frozen=True)
class HeldOut:
    """The first documents of a corpus, for validation; a stream that is given them leaves them out."""

    corpus: Shards
    """Their tokens, as many as were asked for, in memory."""
    digests: frozenset[bytes]
    """Digest of each document, by which it is recognised wherever it occurs."""


def hold_out(documents: Documents, tokens: int, *, or_all: bool = False) -> HeldOut:
    """Read the first `tokens` tokens of a corpus, and hold out the documents that they come from.

    The last of these documents is held out as a whole. The documents are consumed: open them again to train.
    Raises DataError where the corpus is shorter, unless `or_all` is set.
    """
    assert tokens > 0
    documents.cut(PIECE_CHARS)
    parts: list[np.ndarray] = []
    digests = set()
    left = tokens
    for piece in documents:
        parts.append(encode_one(piece)[:left])
        digests.add(_digest(piece))
        left -= len(parts[-1])
        if not left:
            break
    if left and not (or_all and parts):
        fewer = f"has {tokens - left} tokens, fewer than the {tokens} to hold out"
        raise DataError(f"corpus {documents.name!r} {fewer}")
    ids = np.concatenate(parts)
    sha256 = hashlib.sha256(ids.astype(TOKEN).tobytes()).hexdigest()
    corpus = Shards(documents.name, [ids], sha256)
    corpus.is_text = True
    return HeldOut(corpus, frozenset(digests))


class _BlockPosition(NamedTuple):
    """Position of a block."""

    epoch: int
    block: int
    position: dict[str, Any] | None
    """Position in the documents, as Documents.state_dict() gives it; None is the beginning of the epoch."""


class _Block(NamedTuple):
    place: _BlockPosition
    tokens: np.ndarray
    """Tokens of the block's documents, in shuffled order."""


class StreamedBatches:
    """The global batch of every step, from documents that are shuffled in blocks as they are read.

    `block_documents` documents are read, their tokens are put in an order drawn from (seed, epoch, block),
    and the next block follows. Documents in `held_out` are left out (see hold_out). A text file counts piece
    by piece. Each epoch reads the files in an order of its own. A batch depends on the corpus, the seed and
    the step alone: each rank reads the whole stream and takes its rows. Raises DataError as the corpus does,
    or where `state` belongs to another corpus or other settings.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        seq_len: int,
        tokens_per_step: int,
        seed: int,
        held_out: HeldOut | None = None,
        block_documents: int = BLOCK_DOCUMENTS,
        state: dict[str, Any] | None = None,
    ) -> None:
        assert tokens_per_step % seq_len == 0
        self.seq_len, self.seed = seq_len, seed
        self.sequences_per_step = tokens_per_step // seq_len
        self._held_out = held_out.digests if held_out else frozenset()
        self._identity: dict[str, Any] = {"seed": seed, "block_documents": block_documents}
        self._identity |= {"held_out": held_out.corpus.sha256 if held_out else None}
        self._identity |= {"source": documents.source}
        if documents.kind == "text":
            self._identity["piece_chars"] = PIECE_CHARS
        documents.cut(PIECE_CHARS)
        self._documents = documents
        place, skip, first = _BlockPosition(0, 0, None), 0, 0
        if state is not None:
            _refuse_others(state, self._identity, documents.name)
            place = _BlockPosition(state["epoch"], state["block"], state["position"])
            skip, first = state["skip"], state["step"]
        self._working = threading.Lock()
        """Held while a block is being read."""
        self._ending = False
        atexit.register(self._end)
        self._blocks = Prefetched(self._guarded(self._read(place)), lambda block: block, ahead=1)
        self._held: deque[_Block] = deque()
        self._used = skip
        """Tokens of the first held block that earlier steps have used."""
        self._first, self._step = first, first - 1
        self._tokens = np.empty(0, dtype=np.int64)
        self._states: dict[int, dict[str, Any]] = {}
        self._note_state(first, place)

    def sequences(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences first to first + count of the batch of `step`; see Batches.sequences.

        A step can be asked for again until a later one is; earlier ones are no longer available.
        """
        assert max(self._first, self._step) <= step
        assert first + count <= self.sequences_per_step
        while self._step < step:
            self._advance()
        rows = np.arange(first, first + count)[:, None] * self.seq_len
        taken = self._tokens[rows + np.arange(self.seq_len + 1)]
        return taken[:, :-1], taken[:, 1:]

    def state(self, step: int) -> dict[str, Any]:
        """Return the position before `step`, JSON-able, from which a new stream gives the same batches.

        Available for the next step and the last KEPT steps that were asked for.
        """
        assert step in self._states, f"the position before step {step} is not kept: {sorted(self._states)}"
        return self._states[step]

    def check_unchanged(self) -> None:
        """Raises DataError where a local file is no longer what it was when the stream began."""
        self._documents.check_unchanged()

    def _advance(self) -> None:
        wanted = self.sequences_per_step * self.seq_len
        parts, place = [], self._used
        while sum(len(block.tokens) for block in self._held) - self._used < wanted + 1:
            self._held.append(next(self._blocks))
        left = wanted + 1  # the last target is the first input of the next step
        for block in self._held:
            part = block.tokens[place : place + left]
            parts.append(part)
            place, left = max(0, place - len(block.tokens)), left - len(part)
        self._tokens = np.concatenate(parts).astype(np.int64)
        self._used += wanted
        while self._used >= len(self._held[0].tokens):
            self._used -= len(self._held.popleft().tokens)
        self._step += 1
        self._note_state(self._step + 1, self._held[0].place)

    def _note_state(self, step: int, place: _BlockPosition) -> None:
        self._states[step] = {**self._identity, **place._asdict(), "skip": self._used, "step": step}
        for old in [kept for kept in self._states if kept < step - KEPT]:
            del self._states[old]

    def _end(self) -> None:
        """Wait until no block is being read at exit: a thread inside pyarrow would abort it."""
        self._ending = True
        self._working.acquire(timeout=10)

    def _guarded(self, blocks: Iterator[_Block]) -> Iterator[_Block]:
        while True:
            with self._working:
                block = next(blocks)
            yield block

    def _read(self, place: _BlockPosition) -> Iterator[_Block]:
        """Yield blocks from `place` on, without end; runs in a thread of its own, ahead of the trainer."""
        with ThreadPoolExecutor(min(processors(), 8), thread_name_prefix="tokenise") as pool:
            epoch, number, position = place
            while True:
                self._documents.restart([self.seed, epoch])
                if position is not None:
                    self._documents.load_state_dict(position)
                begun = position is not None
                most, now = self._identity["block_documents"], self._documents.state_dict
                for pieces, following in groups(self._pieces(), now, most, BLOCK_CHARS):
                    begun = True
                    tokens = _encoded(pool, pieces)
                    order = np.random.default_rng([self.seed, epoch, number]).permutation(len(tokens))
                    shuffled = np.concatenate([tokens[i] for i in order])
                    yield _Block(_BlockPosition(epoch, number, position), shuffled)
                    number, position = number + 1, following
                self._documents.check_unchanged()
                if not begun:
                    raise DataError(f"corpus {self._documents.name!r} has no document that is not held out")
                epoch, number, position = epoch + 1, 0, None

    def _pieces(self) -> Iterator[Piece]:
        """Yield the documents not held out; of one that cannot be read, a change of its file is the cause."""
        try:
            for piece in self._documents:
                if self._ending:
                    raise DataError("the process is ending")
                if not self._held_out or _digest(piece) not in self._held_out:
                    yield piece
        except DataError:
            if not self._ending:
                self._documents.check_unchanged()
            raise


def _encoded(pool: ThreadPoolExecutor, pieces: list[Piece]) -> list[np.ndarray]:
    few = [pieces[first : first + 32] for first in range(0, len(pieces), 32)]
    return [ids for part in pool.map(lambda part: [encode_one(piece) for piece in part], few) for ids in part]


def _digest(piece: Piece) -> bytes:
    return hashlib.blake2b(piece.text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _refuse_others(state: dict[str, Any], identity: dict[str, Any], name: str) -> None:
    older = ""
    if any(isinstance(size, int) for _, size in state.get("source", {}).get("files", [])):
        older = "which kept sizes of the corpus' files and no checksums"
    elif state.keys() & identity.keys() != identity.keys():
        older = "whose positions mean something else"
    if older:
        raise DataError(
            f"corpus {name!r}: the checkpoint is of an older version, {older}; go on with that version, or "
            "begin a new run from its weights with --init-from"
        )
    had, now = (Counter(map(tuple, each.get("files", []))) for each in (state["source"], identity["source"]))
    if other := sorted({file for file, _ in (had - now) + (now - had)}):
        raise DataError(
            f"corpus {name!r}: the checkpoint's position in the stream is for other files: {listed(other)} "
            "came, went or changed since; go on with the files as they were"
        )
    for key, value in identity.items():
        if state.get(key) != value:
            if key == "source":  # its files have been compared
                what = _differing(state[key], value, *(name for name in value if name != "files"))
            elif key == "held_out":
                what = "other tokens held out for validation (see evaluation and --val-corpus)"
            else:
                what = _differing(state, identity, key)
            raise DataError(
                f"corpus {name!r}: the checkpoint's position in the stream is for {what}; go on with the "
                "same corpus and settings"
            )


def _differing(had: dict[str, Any], now: dict[str, Any], *keys: str) -> str:
    return ", ".join(f"{key} {had.get(key)}, not {now[key]}" for key in keys if had.get(key) != now[key])

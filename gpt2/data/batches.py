"""Corpora as one long sequence of token ids, and the batches cut from them. Imports no torch.

corpus = open_corpus("tinyshakespeare", vocab_size=50257, path=Path("input.txt"))
batches = Batches(corpus, seq_len=1024, tokens_per_step=4096, seed=1337)
x, y = batches.sequences(step=0, first=0, count=4)          # two (4, 1024) arrays, y one token ahead of x
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpt2.data.index import read_index
from gpt2.data.shards import Shards, open_shards
from gpt2.data.splits import odd_to_train_on, open_split
from gpt2.data.synthetic import Synthetic
from gpt2.files.cache import DataError, at_hand, cache_dir, download, readable
from gpt2.text import end_of_text_written, tokenise

GENERATED = "synthetic"
"""Name of the generated corpus, which needs no files."""
DOCUMENTS = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
"""Suffixes of files that hold documents, which gpt2.data.corpora.sources reads; they are not plain text."""


class Corpus(Protocol):
    """A sequence of token ids that is read on demand."""

    name: str
    tokens: int | None
    """Length in tokens; None for an endless corpus."""
    sha256: str
    """sha256 of the tokens as little-endian uint16 (of the first 2^20 for an endless corpus)."""
    warnings: tuple[str, ...]

    def read(self, start: int, count: int) -> np.ndarray:
        """Return token ids start to start + count, an integer array of shape (count,)."""
        ...


@dataclass(frozen=True)
class KnownCorpus:
    """A corpus that can be downloaded."""

    url: str
    text_sha256: str
    tokens_sha256: str


KNOWN = {
    "tinyshakespeare": KnownCorpus(
        url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        text_sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        tokens_sha256="25c01b32b32f41897a6359dd222ec114992dc30c357bcafbfe6c56672f76cd31",
    ),
}


def open_corpus(name: str, *, vocab_size: int, seed: int = 0, path: Path | str | None = None) -> Corpus:
    """Find the corpus `name` and make its tokens readable.

    synthetic needs no files. Any other name is looked for at `path`, then as
    $GPT2_DATA_DIR/NAME(.txt|.bin|/), then in the cache, and is downloaded where its address is known. A text
    file is tokenised once and cached by content; .bin shards of nanoGPT and llm.c are read as they are; a
    folder stands for its training shards (see gpt2.data.splits). Raises DataError where nothing is found, or
    the tokens do not fit the vocabulary.
    """
    if name == GENERATED:
        if path is not None:
            raise DataError(f"the synthetic corpus is generated; it cannot be read from {path}")
        return Synthetic(vocab_size, seed)
    source = Path(path) if path is not None else find(name)
    if not (source.is_file() or source.is_dir()):
        what = "is no file and no folder" if source.exists() else "does not exist"
        raise DataError(f"corpus {name!r}: {source} {what}")
    with readable(f"corpus {name!r}", source):
        corpus = _open(name, source, vocab_size)
    if name in KNOWN:
        corpus.warnings += _doubts(name, source, corpus)
    return corpus


def _doubts(name: str, source: Path, corpus: Shards) -> tuple[str, ...]:
    """A warning where tokens are not those of the known corpus of that name, or nothing tells that."""
    if source.is_file():
        return () if corpus.sha256 == KNOWN[name].tokens_sha256 else (not_the_known(name),)
    if (index := read_index(source)) is None:
        untold = f"{source} has no index.json, so nothing tells that it holds the known {name}"
        return (f"{untold}; compare losses with care",)
    return (not_the_known(name),) if differs_from_known({**index.corpus, "corpus": name}) else ()


def differs_from_known(source: Mapping[str, Any]) -> bool:
    """Return whether a Documents.source has the name of a known text but other content."""
    known = KNOWN.get(source["corpus"]) if "corpus" in source else None
    # Older versions kept sizes instead.
    texts = [sha256 for _, sha256 in source["files"] if isinstance(sha256, str)]
    return known is not None and texts not in ([], [known.text_sha256])


def not_the_known(name: str) -> str:
    """Return a warning that the text used under this name is not the known one."""
    return f"what is given as {name} is not the known {name}; compare losses with care"


def find(name: str) -> Path:
    """Return the path of a corpus, downloading it where it is not on disk. Raises DataError."""
    if found := at_hand(f"{name}.txt", f"{name}.bin", name):
        return found
    if name in KNOWN:
        return download_text(name)
    raise DataError(f"corpus {name!r} is not at hand and has no known address; {_ways(name)}")


def download_text(name: str) -> Path:
    """Download a known corpus's text into the cache and return its path. Raises DataError."""
    known = KNOWN[name]
    return download(f"corpus {name!r}", known.url, f"{name}.txt", known.text_sha256, _ways(name))


def _ways(name: str) -> str:
    return (
        f"prepare it (gpt2 prepare), give its place with --data PATH, or put {name}.txt, {name}.bin or a "
        f"folder {name}/ of .bin shards into $GPT2_DATA_DIR or {cache_dir() / 'corpora'}; or take generated "
        "text (--set workload.data=synthetic)"
    )


def _open(name: str, source: Path, vocab_size: int) -> Shards:
    """Open a folder's training shards, or a single file of tokens or text. Raises DataError or OSError."""
    if source.is_dir():
        return open_split(name, source, "train", vocab_size)
    is_tokens = source.suffix.lower() == ".bin"
    if not is_tokens and source.name.lower().endswith(DOCUMENTS):
        advice = f"gpt2 prepare {source} makes shards of them"
        raise DataError(f"corpus {name!r}: {source} holds documents; {advice}")
    corpus = open_shards(name, [source if is_tokens else tokenise(source)], vocab_size)
    corpus.is_text = not is_tokens
    if not is_tokens and (written := end_of_text_written(source)):
        corpus.warnings += (written,)
    corpus.warnings += (*odd_to_train_on(source),)
    return corpus


def inputs_and_targets(corpus: Corpus, chunks: Iterable[int], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return chunks of a corpus cut every seq_len tokens: int64 (count, seq_len), targets one token ahead."""
    rows = np.stack([corpus.read(chunk * seq_len, seq_len + 1) for chunk in chunks]).astype(np.int64)
    return rows[:, :-1], rows[:, 1:]


def repeated(tokens: int, tokens_per_step: int) -> tuple[str, ...]:
    """Return a warning where a corpus of `tokens` is shorter than a step; else nothing."""
    if tokens > tokens_per_step:
        return ()
    return (
        f"the corpus has {tokens} tokens, fewer than the {tokens_per_step + 1} of a step with its last "
        "target; sequences repeat within a step",
    )


class Batches:
    """The global batch of every step, a function of (seed, step, tokens per step) and nothing else.

    The corpus is cut into chunks of seq_len tokens. Each epoch reads all chunks in a new order drawn from the
    seed; an endless corpus is read in sequence. Ranks, micro-batches and accumulation only select which of a
    step's sequences a process takes, so that no sequence is taken twice. Raises DataError where the corpus is
    shorter than a sequence, a step is not of whole sequences, or the seed is negative.
    """

    def __init__(self, corpus: Corpus, *, seq_len: int, tokens_per_step: int, seed: int) -> None:
        if seq_len < 1 or tokens_per_step < seq_len or tokens_per_step % seq_len:
            raise DataError(
                f"{tokens_per_step} tokens per step: is no multiple of the {seq_len} of a sequence"
            )
        if seed < 0:
            raise DataError(f"seed {seed}: is below 0")
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.sequences_per_step = tokens_per_step // seq_len
        self.warnings: tuple[str, ...] = corpus.warnings
        self._chunks: int | None = None
        if corpus.tokens is not None:
            if corpus.tokens < seq_len + 1:
                needed = f"a sequence of {seq_len} needs {seq_len + 1}"
                raise DataError(f"corpus {corpus.name!r} has {corpus.tokens} tokens, {needed}")
            self._chunks = (corpus.tokens - 1) // seq_len
            self.warnings += repeated(corpus.tokens, tokens_per_step)
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def sequences(self, step: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences first to first + count of the global batch of `step`.

        Returns inputs and targets, two int64 arrays (count, seq_len); targets are one token ahead.
        """
        assert first + count <= self.sequences_per_step
        begin = step * self.sequences_per_step + first
        return inputs_and_targets(self.corpus, map(self._chunk, range(begin, begin + count)), self.seq_len)

    def state(self, step: int) -> None:
        """Return the position before `step` for a checkpoint: none, as the step alone determines it."""

    def check_unchanged(self) -> None:
        """Do nothing: shards tell of changes as they are read."""

    def _chunk(self, index: int) -> int:
        """Return the chunk that is the training's sequence number `index`."""
        if self._chunks is None:
            return index
        epoch, place = divmod(index, self._chunks)
        return int(self._order(epoch)[place])

    def _draw_order(self, epoch: int) -> np.ndarray:
        assert self._chunks is not None
        return np.random.default_rng([self.seed, epoch]).permutation(self._chunks)

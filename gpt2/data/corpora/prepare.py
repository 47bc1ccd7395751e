"""Tokenise a corpus into shards in llm.c's format, for training.

for progress in prepare("fineweb-edu", Path("data/fineweb-edu")):
    print(progress.tokens, progress.tokens_per_second, progress.remaining_seconds)
corpus = open_corpus("fineweb-edu", vocab_size=50257, path=Path("data/fineweb-edu"))   # the training shards

The folder then holds NAME_val_000000.bin, NAME_train_000001.bin, ... and index.json. llm.c reads the shards
as they are; nanoGPT maps one headerless file per split, which gpt2.data.index.to_nanogpt() writes. Run by
`gpt2 prepare`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt2.config.workload import TEXT_VOCABULARY
from gpt2.data.corpora.encode import Batch, Encoder, Tokens
from gpt2.data.corpora.sources import (
    Documents,
    has_validation,
    open_documents,
    open_validation_corpus,
    shared_files,
)
from gpt2.data.documents import SEPARATOR
from gpt2.data.index import AGAIN, Index, read_index
from gpt2.data.splits import odd_to_train_on, token_files
from gpt2.files.atomic import atomic_write, leftovers
from gpt2.files.cache import DataError
from gpt2.files.lock import Locked, own
from gpt2.files.shard_format import HEADER_BYTES, TOKEN, shard_header

SHARD_TOKENS = 100_000_000
VOCABULARY = {"name": "gpt2", "size": TEXT_VOCABULARY, "separator": SEPARATOR}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Progress of a preparation."""

    file: str
    """Name of the shard being written."""
    documents: int
    tokens: int
    """Tokens in all shards so far, earlier sessions included."""
    tokens_per_second: float
    """Rate of this session."""
    remaining_seconds: float | None
    """Estimated time left; None where the corpus's size is not known."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a preparation; see prepare()."""

    corpus: str
    text_column: str | None = None
    revision: str | None = None
    val_corpus: str | None = None
    val_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("val_tokens", "shard_tokens", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise DataError(f"{name.replace('_', ' ')} must be at least 1, not {value}")

    def recorded(self) -> dict[str, Any]:
        """Return the settings as the index stores them: of paths only the last part, since folders move."""
        paths = {"corpus": self.corpus, "val_corpus": self.val_corpus}
        return {**vars(self), **{key: _last_part(value) for key, value in paths.items()}}


def prepare(
    corpus: str,
    folder: Path,
    *,
    processes: int | None = None,
    warn: Callable[[str], None] | None = None,
    tell: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Iterator[Prepared]:
    """Write a corpus's tokens into shards, with `processes` processes (one per processor where None).

    <|endoftext|> precedes each document. Shards have `shard_tokens` tokens each, and the last one what is
    left. Validation is at most `val_tokens` tokens (a shard where None) of the corpus's own validation split
    or of `val_corpus`. Without either, it is the first `val_tokens` of the corpus, by default its first
    shard, or its first tenth where it ends within that. `max_tokens` limits the tokens taken from the corpus,
    including validation that is cut from it. See Settings for the rest.

    `warn` is called with a line for each document that cannot be tokenised and is left out, at the end with
    their number, and with other warnings about files and texts; where it is None, such a document is an
    error. `tell` is called at the beginning with a description of the files taken.

    Killed at any moment, the same call resumes after the last whole shard and writes the same shards as an
    uninterrupted call; once finished it does nothing. Raises DataError for other settings in the same folder,
    a damaged or unreachable corpus, or a full disk.
    """
    asked = Settings(corpus=corpus, **settings)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(own(folder, worthless=["index.json"]))
        except Locked:
            raise DataError(f"another preparation is writing to {folder}; wait for it, or end it") from None
        except OSError as error:
            other = "choose another --out, or set GPT2_CACHE_DIR to a writable folder"
            raise DataError(f"cannot write into {folder} ({error.strerror}); {other}") from None
        job = _begin(asked, folder)
        if job is None:
            return
        tell(f"to train on: {job.training.taken}")
        if job.validation is not None:
            tell(f"for validation: {job.validation.taken}")
        if warn is not None:
            documents = [job.training, *([job.validation] if job.validation is not None else [])]
            odd = odd_to_train_on(Path(os.path.expanduser(corpus)))
            odd += shared_files(job.index.corpus, job.index.validation)
            for line in dict.fromkeys([*odd, *(line for each in documents for line in each.warnings)]):
                warn(line)
        with Encoder(processes, warn) as encoder:
            yield from job.run(encoder)
        if encoder.left_out and warn is not None:
            warn(f"{encoder.left_out:,} document(s) could not be tokenised and are left out")


@dataclass
class _Job:
    """One preparation, from its current state to its end."""

    asked: Settings
    folder: Path
    index: Index
    training: Documents
    validation: Documents | None
    """None where validation is taken from the beginning of the training corpus."""
    started: float = field(default_factory=time.monotonic)
    before: int = 0
    """Tokens written by earlier sessions."""

    def run(self, encoder: Encoder) -> Iterator[Prepared]:
        self.before = self.index.tokens
        for torn in leftovers(self.folder, rf"index\.json|{re.escape(self.index.name)}_(train|val)_\d+\.bin"):
            with contextlib.suppress(OSError):
                torn.unlink()
        if self.validation is not None and not self.index.shards:
            tokens = Tokens(encoder.encoded(self.validation, None), limit=self._val_tokens)
            entry = yield from self._shard("val", tokens, self._val_tokens, estimated=False)
            self._keep([entry], None)
        place = self.index.position or {"state": None, "skip": 0, "taken": 0, "documents": 0, "characters": 0}
        limit = None if self.asked.max_tokens is None else self.asked.max_tokens - place["taken"]
        tokens = Tokens(encoder.encoded(self.training, place["state"]), limit=limit, place=place)
        if not self.index.shards:
            entry = yield from self._shard("val", tokens, self._val_tokens)
            self._keep([entry] if tokens.more() else self._tenth(entry), tokens.position())
        while tokens.more():
            entry = yield from self._shard("train", tokens, self.asked.shard_tokens)
            self._keep([entry], tokens.position())
        if not any(entry["split"] == "train" for entry in self.index.shards):
            raise DataError(f"corpus {self.index.name!r} holds no training tokens")
        for documents in filter(None, (self.training, self.validation)):
            documents.check_unchanged()
        self.index.finished, self.index.position = True, None
        self.index.write(self.folder)

    @property
    def _val_tokens(self) -> int:
        return self.asked.val_tokens or self.asked.shard_tokens

    def _shard(
        self, split: str, tokens: Tokens, wanted: int, *, estimated: bool = True
    ) -> Generator[Prepared, None, dict[str, Any]]:
        """Write the next shard of a split, and return its entry in the index.

        estimated: whether to estimate the time left, as tokens of the training corpus allow.
        """
        number = sum(entry["split"] == "train" for entry in self.index.shards) + 1 if split == "train" else 0
        path = self.folder / f"{self.index.name}_{split}_{number:06d}.bin"
        count, before = 0, tokens.documents
        with atomic_write(path, DataError, AGAIN) as file:
            file.write(bytes(HEADER_BYTES))
            while count < wanted and tokens.more():
                part = tokens.take(wanted - count)
                file.write(part.tobytes())
                count += len(part)
                total = self._total(tokens) if estimated else None
                yield self._progress(path.name, count, tokens.documents - before, total)
            if not count:
                raise DataError(f"corpus {self.index.name!r} holds no {split} tokens")
            file.seek(0)
            file.write(shard_header(count))
            file.seek(0)
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        documents = tokens.documents - before
        return {"file": path.name, "split": split, "tokens": count, "documents": documents, "sha256": sha256}

    def _tenth(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """Split a corpus that ended within its first shard: a tenth for validation, the rest for training."""
        path = self.folder / entry["file"]
        ids = np.fromfile(path, dtype=TOKEN, offset=HEADER_BYTES)
        if self.asked.val_tokens is not None or len(ids) < 10:
            path.unlink()
            why = f"all {len(ids)} tokens of corpus {self.index.name!r} would be validation"
            raise DataError(f"{why}; ask for fewer validation tokens, or take them from another corpus")
        tenth = len(ids) // 10
        entries = []
        for split, part in (("train", ids[tenth:]), ("val", ids[:tenth])):
            batch = Batch(None, 0, part)
            shard = self._shard(split, Tokens(iter([batch]), limit=None), len(part))
            entries.append(_result(shard))
        return entries[::-1]

    def _keep(self, entries: list[dict[str, Any]], position: dict[str, Any] | None) -> None:
        index = self.index
        index.shards += entries
        index.tokens = sum(entry["tokens"] for entry in index.shards)
        index.documents = sum(entry["documents"] for entry in index.shards)
        index.position = position
        index.write(self.folder)

    def _total(self, tokens: Tokens) -> float | None:
        """Estimate the tokens of all shards together from those of the training corpus so far."""
        documents = self.training
        found = documents.tokens
        if documents.bytes_of_text and tokens.characters:
            found = tokens.taken * documents.bytes_of_text / tokens.characters
        elif documents.documents and tokens.documents:
            found = tokens.taken * documents.documents / tokens.documents
        limits = [limit for limit in (found, self.asked.max_tokens) if limit is not None]
        apart = self.index.shards[0]["tokens"] if self.validation is not None else 0
        return apart + min(limits) if limits else None

    def _progress(self, file: str, count: int, documents: int, total: float | None) -> Prepared:
        tokens = self.index.tokens + count
        rate = (tokens - self.before) / max(time.monotonic() - self.started, 1e-9)
        remaining = None if total is None else max(total - tokens, 0.0) / rate
        return Prepared(
            file=file,
            documents=self.index.documents + documents,
            tokens=tokens,
            tokens_per_second=rate,
            remaining_seconds=remaining,
        )


def _begin(asked: Settings, folder: Path) -> _Job | None:
    """Open the corpus and the folder's index, and check that they match; None where all is prepared.

    Raises DataError.
    """
    kept = read_index(folder)
    if kept is None and (strangers := token_files(folder)):
        stranger = f"{folder} holds {strangers[0].name} and no index.json"
        raise DataError(f"{stranger}; prepare into a folder of its own")
    index = kept if kept is not None and kept.shards else None  # an attempt ended early: begin anew
    if index is not None:
        _refuse_others(index.settings, asked.recorded(), folder)
        if index.finished:
            if wrong := index.damaged(folder):
                others = f", and {len(wrong) - 1} more" if wrong[1:] else ""
                where = folder / wrong[0]
                raise DataError(f"{where} is missing or damaged{others}; prepare anew into another folder")
            if not Path(os.path.expanduser(asked.corpus)).exists():  # a hub's, which is pinned
                return None
    revision = index.corpus.get("revision") if index is not None else asked.revision
    training = open_documents(asked.corpus, text_column=asked.text_column, revision=revision)
    validation = _validation(asked, training, index)
    source = validation.source if validation is not None else {"first tokens of": training.name}
    if index is None:
        index = Index(_prefix(training.name), asked.recorded(), training.source, source, VOCABULARY)
        index.write(folder)
    _refuse_others(index.corpus, training.source, folder)
    _refuse_others(index.validation, source, folder)
    if path := index.lacking(folder):
        raise DataError(f"{path} is missing or not as long as index.json says; prepare into another folder")
    return None if index.finished else _Job(asked, folder, index, training, validation)


def _validation(asked: Settings, training: Documents, index: Index | None) -> Documents | None:
    revision, column = index.validation.get("revision") if index else None, asked.text_column
    if asked.val_corpus is not None:
        return open_validation_corpus(asked.val_corpus, text_column=column, revision=revision)
    if not has_validation(asked.corpus):
        return None
    revision = revision or training.origin.get("revision")
    return open_documents(asked.corpus, split="validation", text_column=column, revision=revision)


def _refuse_others(had: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for key in sorted({*had, *now}):
        if had.get(key) != now.get(key):
            changed = "its files" if key == "files" else f"{key} {had.get(key)!r}, not {now.get(key)!r}"
            other = "was prepared from other files, or by an older version, which kept no checksums of them"
            what = other if key == "files" else f"was prepared with {changed}"
            raise DataError(f"{folder} {what}; ask for the same, delete it, or give another folder by --out")


def _result(shard: Generator[Prepared, None, dict[str, Any]]) -> dict[str, Any]:
    while True:
        try:
            next(shard)
        except StopIteration as ended:
            return ended.value


def _prefix(name: str) -> str:
    """Return the prefix of shard names: the corpus's name, or "corpus" where that says train or val."""
    return "corpus" if re.search("train|val", name.lower()) else name


def _last_part(corpus: str | None) -> str | None:
    return Path(corpus).resolve().name if corpus and Path(os.path.expanduser(corpus)).exists() else corpus

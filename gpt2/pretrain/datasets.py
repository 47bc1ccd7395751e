"""Open a run's training and validation data, check them, and resume at a checkpoint's position.

data = open_data(run, Source()); x, y = data.batches.sequences(step=0, first=0, count=4)
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt2.data.batches import GENERATED, Batches, Corpus, open_corpus, repeated
from gpt2.data.batches import KNOWN as KNOWN_TEXTS
from gpt2.data.corpora.hub import KNOWN
from gpt2.data.corpora.sources import (
    has_validation,
    open_documents,
    open_validation_corpus,
    shared_files,
)
from gpt2.data.corpora.stream import StreamedBatches, hold_out
from gpt2.data.documents import in_new_order
from gpt2.data.index import Index, read_index
from gpt2.data.shards import Shards
from gpt2.data.splits import odd_to_train_on, open_validation, token_files
from gpt2.files.cache import DataError, cache_dir, data_dir
from gpt2.files.listing import listed, printable
from gpt2.pretrain.config import TrainingRun


@dataclass(frozen=True, kw_only=True)
class Source:
    """The source of tokens, as the user specified it."""

    path: Path | None = None
    """Path of the corpus; None: where gpt2 prepare put it, or where a corpus of that name is found."""
    stream: bool = False
    """Stream documents from the corpus instead of reading shards from disk."""
    text_column: str | None = None
    """Column of text in a stream's files, where it cannot be inferred."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Global batches, the validation corpus, and the facts about them that a checkpoint records."""

    batches: Batches | StreamedBatches
    validation: Corpus | None
    """None where the run takes no validation loss."""
    facts: dict[str, str]
    """name, and sha256 of the tokens or of a stream's source."""
    is_text: bool
    """True if tokens that are trained or validated on are known to be of GPT-2's vocabulary."""
    notes: tuple[str, ...] = ()
    """Messages for the user: the files trained and validated on, and warnings about them."""


def prepared_folder(name: str) -> Path:
    """Return the default folder of a corpus prepared by gpt2 prepare."""
    return cache_dir() / "corpora" / name


def open_data(run: TrainingRun, source: Source, saved: dict[str, Any] | None = None) -> Data:
    """Open the run's training and validation data.

    saved: `data` of the checkpoint to resume from, or None. Raises DataError where something is missing, or
    differs from what the checkpoint was trained on.
    """
    if saved and bool(saved.get("stream")) is not source.stream:
        before, way = ("shards", "leave out") if source.stream else ("a stream of documents", "say")
        raise DataError(f"this run was trained on {before} so far: {way} --stream")
    data = _stream(run, source, (saved or {}).get("stream")) if source.stream else _shards(run, source)
    if saved and saved["sha256"] != data.facts["sha256"]:
        raise DataError(
            f"corpus {data.facts['name']!r} is not what this run was trained on so far ({saved['name']!r}, "
            f"{saved['sha256'][:12]}, not {data.facts['sha256'][:12]}); say with --data where that lies"
        )
    return data


def _shards(run: TrainingRun, source: Source) -> Data:
    workload = run.workload
    name, vocab_size = workload.data, workload.config.vocab_size
    folder = source.path if source.path is not None or name == GENERATED else _prepared(name)
    index = read_index(folder) if folder is not None and folder.is_dir() else None
    if index:
        name = index.corpus["corpus"]
    corpus = open_corpus(name, vocab_size=vocab_size, seed=workload.seed, path=folder)
    batches = Batches(
        in_new_order(corpus, workload.seed),
        seq_len=workload.seq_len,
        tokens_per_step=run.tokens_per_step,
        seed=workload.seed,
    )
    validation: Corpus | None = None
    judged, odd = "", list[str]()
    if run.evaluation.val_every:
        if run.val_corpus is not None:
            trained, spared = index.corpus if index else {}, _first_tokens(index)
            validation, judged, odd = _other_validation(
                run, run.val_corpus, trained, source.text_column, spared=spared
            )
        elif name == GENERATED:  # the same distribution with another seed
            validation = open_corpus(name, vocab_size=vocab_size, seed=workload.seed + 1)
        elif folder is not None and folder.is_dir():
            validation = open_validation(name, folder, vocab_size)
        else:
            raise DataError(
                f"corpus {name!r} has no validation shard; {_how_to_prepare(folder or Path(name))}, name "
                "another corpus with --val-corpus, or train without: --set evaluation.val_every=0"
            )
    parts = [_taken("trained on", corpus), judged or _taken("validated on", validation)]
    files = "; ".join(part for part in parts if part) if folder and folder.is_dir() else judged
    notes = [files, *batches.warnings, *odd]
    if batches.corpus is not corpus and corpus.tokens is not None:  # shuffled documents are read without end
        notes += repeated(corpus.tokens, run.tokens_per_step)
    if index and validation and run.val_corpus is None:
        notes += shared_files(index.corpus, index.validation)
    if isinstance(corpus, Shards) and isinstance(validation, Shards):
        trained = {sha256: printable(path.name) for path, sha256 in corpus.files.items()}
        notes += [
            f"{printable(path.name)} holds the very bytes of {trained[sha256]}, which is trained on: its "
            "loss tells nothing of text that was never seen"
            for path, sha256 in validation.files.items()
            if sha256 in trained
        ]
    if source.text_column and run.val_corpus is None:
        notes.append("--text-column has no effect: shards have no columns (it is for --stream)")
    return Data(
        batches=batches,
        validation=validation,
        facts={"name": name, "sha256": corpus.sha256},
        is_text=any(isinstance(each, Shards) and each.is_text for each in (corpus, validation)),
        notes=tuple(notes),
    )


def _taken(what: str, corpus: Corpus | None) -> str:
    """Return a description of a corpus's files for the user; empty where it has no shards on disk."""
    if not isinstance(corpus, Shards) or not corpus.files:
        return ""
    return f"{what}: {corpus.tokens:,} tokens of {listed([path.name for path in corpus.files])}"


def _stream(run: TrainingRun, source: Source, place: dict[str, Any] | None) -> Data:
    workload, held_out, apart = run.workload, None, ""
    name = str(source.path) if source.path is not None else workload.data
    # A hub repository may have changed since the run began; resuming takes the revision of its first leg.
    revision = place["source"].get("revision") if place else None
    opened = partial(open_documents, name, text_column=source.text_column, revision=revision)
    documents = opened()
    validation: Corpus | None = None
    judged, odd = "", list[str]()
    if run.evaluation.val_every:
        if run.val_corpus is not None:
            validation, judged, odd = _other_validation(
                run, run.val_corpus, documents.source, source.text_column
            )
        elif has_validation(name):
            own = opened(split="validation")
            odd = [*shared_files(documents.source, own.source), *own.warnings]
            validation = hold_out(own, run.evaluation.val_tokens + 1, or_all=True).corpus
            judged = f"validated on: {own.taken}"
        else:
            held_out = hold_out(opened(), run.evaluation.val_tokens + 1)
            validation = held_out.corpus
            apart = f", without its first {held_out.corpus.tokens:,} tokens, which are for validation"
    streamed = StreamedBatches(
        documents,
        seq_len=workload.seq_len,
        tokens_per_step=run.tokens_per_step,
        seed=workload.seed,
        held_out=held_out,
        state=place,
    )
    sha256 = hashlib.sha256(json.dumps(documents.source, sort_keys=True).encode()).hexdigest()
    return Data(
        batches=streamed,
        validation=validation,
        facts={"name": documents.name, "sha256": sha256},
        is_text=True,
        notes=(
            "; ".join(filter(None, (f"trained on: {documents.taken}{apart}", judged))),
            *odd_to_train_on(Path(os.path.expanduser(name))),
            *dict.fromkeys([*documents.warnings, *odd]),
        ),
    )


def _how_to_prepare(path: Path) -> str:
    if path.suffix.lower() == ".bin":
        return "give the folder that holds shards for both"
    return f"run gpt2 prepare {shlex.quote(str(path))}"


def validation_shards(name: str, vocab_size: int, trained_seed: int) -> Corpus:
    """Open the validation shards of a prepared corpus, given by name or folder. Raises DataError.

    trained_seed: that of the training, whose generated corpus is another than this one.
    """
    if name == GENERATED:
        return open_corpus(name, vocab_size=vocab_size, seed=trained_seed + 1)
    folder = _named(name)
    if folder is None and Path(os.path.expanduser(name)).exists():
        raise DataError(f"{name} is no folder of shards; {_how_to_prepare(Path(name))}")
    if folder is None:
        raise DataError(f"no prepared corpus {name!r}: gpt2 prepare {name}, or give a folder of shards")
    return open_validation(name, folder, vocab_size)


def _other_validation(
    run: TrainingRun, name: str, trained: Mapping[str, Any], text_column: str | None, *, spared: int = 0
) -> tuple[Corpus, str, list[str]]:
    """Open validation data from another corpus: its prepared validation shards, or its first documents.

    trained: Documents.source of what is trained on; empty where that is not known. spared: tokens at its
    beginning that are not trained on. Returns the corpus, a description of its files, and warnings.
    """
    folder = _named(name)
    if folder is not None:
        corpus = open_validation(name, folder, run.workload.config.vocab_size)
        index = read_index(folder)
        judged = index.validation if index else {}
        if index and (tokens := _first_tokens(index)):
            first, trained_first = (list(each.get("files", ())[:1]) for each in (index.corpus, trained))
            judged = {} if first == trained_first and tokens <= spared else {"files": first}
        return corpus, _taken("validated on", corpus), shared_files(trained, judged)
    documents = open_validation_corpus(name, text_column=text_column)
    first = hold_out(documents, run.evaluation.val_tokens + 1, or_all=True).corpus
    odd = [*shared_files(trained, documents.source), *documents.warnings]
    return first, f"validated on: {documents.taken}", odd


def _first_tokens(index: Index | None) -> int:
    """Return how many tokens at the beginning of its corpus a preparation has for validation."""
    if index is None or "files" in index.validation:  # which is of files of its own
        return 0
    return sum(each["tokens"] for each in index.shards if each["split"] == "val")


def _named(name: str) -> Path | None:
    """Return a folder of shards, given by path or corpus name; None for texts of that name that are here."""
    path = Path(os.path.expanduser(name))
    if path.is_dir() and token_files(path):
        return path
    return None if path.exists() and name not in (*KNOWN, *KNOWN_TEXTS) else _prepared(name)


def _prepared(name: str) -> Path | None:
    """Return the folder of shards prepared under a corpus's name (possibly OWNER/NAME); None for a path."""
    if Path(name).is_absolute() or Path(name).parts[:1] == ("~",) or name.startswith("."):
        return None
    given = data_dir()
    for folder in (*([given / name] if given else []), prepared_folder(name)):
        if folder.is_dir() and token_files(folder):
            return folder
    return None

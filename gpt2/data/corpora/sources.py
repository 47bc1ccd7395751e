"""Corpora as streams of documents: from the Hugging Face hub, or from text, JSON Lines and Parquet files.

documents = open_documents("fineweb-edu")      # or a path, a URL, or OWNER/NAME[:CONFIG] of the hub
for piece in documents: ...                    # piece.text, piece.begins
position = documents.state_dict()              # position of the next piece; JSON-able

gpt2.data.corpora.prepare writes them into shards; gpt2.data.corpora.stream trains on them directly. Imports
no torch; `datasets`, which may import it, is imported only when a corpus is opened.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2.data import batches
from gpt2.data.corpora.hub import KNOWN, hub_files, import_datasets
from gpt2.data.corpora.readers import (
    FILE_KINDS,
    NoColumn,
    parquet_rows,
    read_json_lines,
    read_parquet,
    read_text,
    text_column_of,
)
from gpt2.data.splits import files_of_split, split_of
from gpt2.files.cache import DataError, readable, sha256_of
from gpt2.files.listing import files_below, listed, printable
from gpt2.text import end_of_text_written

TEXTS = tuple(batches.KNOWN)
"""Known corpora that consist of a single text; gpt2.data.batches finds or downloads them."""
READERS = {"text": read_text, "json": read_json_lines, "parquet": read_parquet}
HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


class Piece(NamedTuple):
    """A document, or part of a long one."""

    text: str
    begins: bool
    """True at the beginning of a document; False where the text continues the piece before."""
    where: str = "a document"
    """File, and line or row, for messages about this piece."""


class Documents:
    """The documents of one split of a corpus, read lazily in the order of its files.

    Iteration starts at the loaded position, else at the first document. It raises DataError where the source
    is damaged, contains no text, or stays unreachable after all retries of `datasets`.
    """

    def __init__(
        self,
        name: str,
        split: str,
        files: Sequence[str],
        column: str | None,
        origin: dict[str, str | None],
        left_out: str = "",
    ) -> None:
        """Open the files of one split.

        left_out: description of the files of the folder that belong to no split. Raises DataError.
        """
        self.left_out = left_out
        self.name, self.split = name, split
        self.files = list(files)
        self.kind = _kind(name, self.files)
        self.text_column = text_column_of(name, self.kind, self.files, column)
        self.origin = origin
        self._in_order = self.files
        self._at_start = True
        self._piece_chars: int | None = None
        self._dataset = self._open()

    @cached_property
    def source(self) -> dict[str, Any]:
        """Identity of the corpus, JSON-able; positions are valid only while it is unchanged.

        Local files are identified by their sha256, which takes reading each once, and named without their
        folder, which may move; a hub repository is identified by its revision. Raises DataError where a file
        cannot be read, or changes meanwhile.
        """
        with readable(f"corpus {self.name!r}", Path(self.files[0])):
            files = [
                [printable(Path(file).name), sha256_of(Path(file))] if _is_local(file) else [file, None]
                for file in self.files
            ]
        return {**self.origin, "split": self.split, "text_column": self.text_column, "files": files}

    def check_unchanged(self) -> None:
        """Raise DataError where a local file differs from what `source` recorded."""
        for file, (_, sha256) in zip(self.files, self.source["files"], strict=True):
            try:
                same = not sha256 or sha256_of(Path(file)) == sha256
            except OSError as error:
                raise DataError(f"{error.filename} changed while it was read ({error.strerror})") from None
            if not same:
                raise DataError(f"{file} changed while it was read; begin anew once nothing writes to it")

    @property
    def warnings(self) -> list[str]:
        """Warnings about this corpus for the user."""
        found = [batches.not_the_known(self.name)] if batches.differs_from_known(self.source) else []
        found += [f"left out: {self.left_out}"] * bool(self.left_out)
        by_content: dict[str, list[str]] = {}
        for name, sha256 in self.source["files"]:
            by_content.setdefault(sha256 or name, []).append(name)
        for same in by_content.values():
            if same[1:]:
                twice = "its text counts as often, and may be trained and validated on"
                found.append(f"{listed(same)}: the same file {len(same)} times; {twice}")
        if self.kind in ("text", "json"):
            plain = (file for file in self.files if _is_local(file) and not file.lower().endswith(".gz"))
            found += filter(None, (end_of_text_written(Path(file)) for file in plain))
        return found

    @property
    def taken(self) -> str:
        """Description of the files and the text column that are read, for the user."""
        names = [Path(file).name if _is_local(file) else file for file in self.files]
        column = f", column {self.text_column!r}" if self.kind != "text" else ""
        return f"{listed(names)}{column}"

    @cached_property
    def bytes_of_text(self) -> int | None:
        """Bytes of local, uncompressed text or JSON files, else None; used to estimate the time left."""
        if self.kind == "parquet" or any(file.endswith(".gz") or not _is_local(file) for file in self.files):
            return None
        return sum(Path(file).stat().st_size for file in self.files)

    @cached_property
    def documents(self) -> int | None:
        """Number of documents in local Parquet files, else None."""
        if self.kind != "parquet" or not all(map(_is_local, self.files)):
            return None
        return parquet_rows(self.files)

    @property
    def tokens(self) -> float | None:
        """Approximate number of tokens, or None where it is not known."""
        known = "repository" in self.origin and self.split == "train"
        return KNOWN[self.name].tokens if known and self.name in KNOWN else None

    def __iter__(self) -> Iterator[Piece]:
        blank = self._at_start
        for example in self._dataset:
            self._at_start = False
            text = example["text"] or ""
            blank = blank and (not text or text.isspace())
            yield Piece(text, example.get("begins", True), example["where"])
        if self._at_start:
            raise DataError(f"corpus {self.name!r} holds no document: {self.files[0]} is empty")
        if blank:
            raise DataError(f"corpus {self.name!r} holds no text: its documents are all blank")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next piece, as `datasets` gives it; JSON-able."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position at which the next iteration starts."""
        self._at_start = False
        place = state["examples_iterable"]  # the file (a shard to `datasets`), and its pieces already read
        if self.kind == "parquet" and place["shard_idx"] < len(self.files):
            begun = self._in_order[place["shard_idx"]]
            self._dataset = self._open(begun=begun, skip=place["shard_example_idx"])
        self._dataset.load_state_dict(state)

    def restart(self, seed: Sequence[int] | None = None) -> None:
        """Start over, with the files in an order drawn from `seed`, or in their own where it is None."""
        count = len(self.files)
        order = range(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self._in_order = [self.files[i] for i in order]
        self._at_start = True
        self._dataset = self._open()

    def cut(self, piece_chars: int) -> None:
        """Start over, cutting texts into pieces of about `piece_chars` characters, which positions count."""
        self._piece_chars = piece_chars
        self.restart()

    def _open(self, **skipped: Any) -> Any:
        arguments = {"files": self._in_order, **skipped}
        if self.kind == "text":
            arguments["piece_chars"] = self._piece_chars
        else:
            arguments["column"] = self.text_column
        datasets = import_datasets()
        try:
            return datasets.IterableDataset.from_generator(READERS[self.kind], gen_kwargs=arguments)
        except OSError as error:
            what = f"cannot write into the cache {datasets.config.HF_DATASETS_CACHE} ({error.strerror})"
            raise DataError(f"{what}; set GPT2_CACHE_DIR to a folder that takes files") from None


def open_documents(
    name: str, *, split: str = "train", text_column: str | None = None, revision: str | None = None
) -> Documents:
    """Open a corpus: a name in KNOWN, tinyshakespeare, a path, a URL, or OWNER/NAME[:CONFIG] of the hub.

    A path is a .txt, .jsonl, .jsonl.gz or .parquet file, or a folder of such files. A text file is one
    document; each line of JSON and each row of Parquet is one. `text_column` names their column of text;
    where None, it is text or content, or the only column of text. gpt2.data.splits decides which files of a
    folder belong to a split; hidden files are ignored (see gpt2.files.listing). `revision` selects a revision
    of a hub repository, the newest where None; the result's `origin` says which was taken. Raises DataError
    with a one-line message that says what to do.
    """
    import_datasets()
    if name in KNOWN:
        known = KNOWN[name]
        column = text_column or "text"
        split = known.split(name, split)
        files, origin = hub_files(name, known.path, known.config, split, revision)
        return Documents(name, split, files, column, origin)
    if name in TEXTS:
        path = batches.find(name)
        path = path if path.suffix == ".txt" else batches.download_text(name)
        return Documents(name, split, [str(path)], None, {"corpus": name})
    if re.match(r"https?://|hf://", name):
        return Documents(Path(name).name.split(".")[0], split, [name], text_column, {"corpus": name})
    if (path := Path(os.path.expanduser(name))).exists():
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"corpus {name!r} is no file and no folder; write its text into a file first")
        files, left_out = ([path], "") if path.is_file() else _files_in(path, split)
        stem = stem_of(path)
        if stem == batches.GENERATED:
            taken = f"a corpus called {stem} is taken for the generated one"
            raise DataError(f"{path}: {taken}; rename it")
        return Documents(stem, split, [str(file) for file in files], text_column, {"corpus": stem}, left_out)
    if HUB.fullmatch(name) and not _has_kind(name):
        repository, _, config = name.partition(":")
        own_name = repository.split("/")[1]
        files, origin = hub_files(own_name, repository, config or None, split, revision)
        return Documents(own_name, split, files, text_column, origin)
    raise _unknown(name)


def shared_files(training: Mapping[str, Any], validation: Mapping[str, Any]) -> list[str]:
    """Return a warning where two Documents.source have a file in common: trained and validated on."""
    trained, judged = (
        {
            sha256 if _is_local(file) else file: file
            for file, sha256 in source.get("files", ())
            if isinstance(sha256, str) or not _is_local(file)  # older versions kept sizes instead
        }
        for source in (training, validation)
    )
    if not (shared := [judged[each] for each in judged if each in trained]):
        return []
    untold = "so its validation loss tells nothing of text that was never seen"
    return [f"{listed(shared)}: trained on and validated on, {untold}"]


def open_validation_corpus(name: str, *, text_column: str | None, revision: str | None = None) -> Documents:
    """Open another corpus for validation: its validation split where it has one, else its training split.

    text_column: the training corpus's column, used where this corpus has it. Raises DataError; see
    open_documents().
    """
    split = "validation" if has_validation(name) else "train"
    try:
        return open_documents(name, split=split, text_column=text_column, revision=revision)
    except NoColumn as error:
        try:
            return open_documents(name, split=split, revision=revision)
        except DataError:
            raise error from None


def stem_of(path: Path) -> str:
    """Return a corpus's name: its folder's name, or its file's name up to the first dot."""
    return printable(path.name.lstrip(".").split(".")[0] if path.is_file() else path.resolve().name)


def shadowed_path(name: str) -> Path | None:
    """Return a file or folder of texts in the working directory that shares a known corpus's name, or None.

    The known corpus is used in its place.
    """
    path = Path(name)
    if name not in (*KNOWN, *TEXTS) or not path.exists() or (path / "index.json").exists():
        return None
    with contextlib.suppress(DataError):  # a folder that cannot be read through is no reason to stop
        return path if path.is_file() or any(_has_kind(file.name) for file in files_below(path)) else None
    return None


def has_validation(name: str) -> bool:
    """Return whether the corpus has a validation split of its own."""
    if name in KNOWN:
        return KNOWN[name].validation is not None
    path = Path(os.path.expanduser(name))
    files = [file for file in files_below(path) if _has_kind(file.name)] if path.is_dir() else []
    return any(split_of(file.relative_to(path)) == "val" for file in files)


def _files_in(folder: Path, split: str) -> tuple[list[Path], str]:
    """Return the files of a split, and which files of the folder belong to none. Raises DataError."""
    found = files_below(folder)
    files = [file for file in found if _has_kind(file.name)]
    if not files:
        raise DataError(f"corpus {str(folder)!r}: the folder holds no file of {', '.join(FILE_KINDS)}")
    chosen = files_of_split(str(folder), folder, files, "train" if split == "train" else "val")
    others = [file.name for file in found if not _has_kind(file.name)]
    tests = [file.name for file in files if split_of(file.relative_to(folder)) == "test"]
    left_out = [f"{listed(others)} (of no known kind)"] * bool(others)
    left_out += [f"{listed(tests)} (for tests)"] * bool(tests)
    # A title may contain the word train, so texts that name no split are trained on, too.
    return sorted([*chosen.taken, *chosen.left_out]), " and ".join(left_out)


def _has_kind(name: str) -> bool:
    return name.lower().endswith(tuple(FILE_KINDS))


def _kind(name: str, files: Sequence[str]) -> str:
    # A query may follow the name in an address; in a file's own name a question mark is one.
    names = [(file if _is_local(file) else file.partition("?")[0]).lower() for file in files]
    kinds = {kind for each in names for suffix, kind in FILE_KINDS.items() if each.endswith(suffix)}
    if len(kinds) != 1:
        found = "a mixture of " + " and ".join(sorted(kinds)) if kinds else f"{files[0]}, of no known kind"
        named = " (JSON Lines, an object on each line, are to be named .jsonl)"
        hint = named if names[0].endswith((".json", ".ndjson")) else ""
        hint = " (unpack it first)" if names[0].endswith((".gz", ".bz2", ".xz", ".zst", ".zip")) else hint
        hint = " (shards are given by their folder)" if names[0].endswith(".bin") else hint
        raise DataError(f"corpus {name!r} is {found}; give files of one kind: {', '.join(FILE_KINDS)}{hint}")
    if kinds == {"text"} and not _is_local(files[0]):
        raise DataError(f"corpus {name!r}: a text file is read from the disk only; download {files[0]}")
    return kinds.pop()


def _is_local(file: str) -> bool:
    return "://" not in file


def _unknown(name: str) -> DataError:
    if "/" in name or _has_kind(name):
        return DataError(f"corpus {name!r} does not exist")
    names = [*KNOWN, *TEXTS]
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? Known: " if near else "known: "
    others = "or give a file, a folder, or OWNER/NAME of the hub"
    return DataError(f"unknown corpus {name!r}; {guess}{', '.join(names)}; {others}")

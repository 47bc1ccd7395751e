"""Decide which files of a folder are for training and which for validation, for tokens and texts alike.

files_of_split("mine", folder, files, "train")     # Split(taken=[...], left_out=[...])
corpus = open_split("mine", folder, "train", vocab_size=50257)

A file's split is the last word in its name that names one: fineweb_val_000000.bin, val.bin, wiki.valid.jsonl
and webtext-test-1.parquet name one, part_000.bin does not. A folder within the corpus named after a split
(train/, val/) sets it for all files below. Training uses the files that say train or, if there are none,
those that name no split; validation uses those that say validation; files that say test are never used.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Literal, NamedTuple

from gpt2.data.index import read_index
from gpt2.data.shards import Shards, open_shards
from gpt2.files.cache import DataError, readable
from gpt2.files.listing import files_in, listed, printable

Name = Literal["train", "val"]
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation", "holdout"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
MEANT_FOR = {"val": "validation", "test": "tests"}
HELD_OUT = re.compile(r"h[eo]ld[-_ ]?out", re.IGNORECASE)
WITH_SET = re.compile(r"(set|data|split)$")
"""Suffixes as in trainset and valdata."""
WORD = re.compile(r"[A-Z]?[a-z\u00df-\uffff]+|[A-Z]+(?![a-z])")
"""A word of a file name, with all scripts' letters: a text called médiéval is not for validation."""


class Split(NamedTuple):
    """The files of one split, in order."""

    taken: list[Path]
    left_out: list[Path]
    """Files that name no split where others say train; they may include the validation data."""


def split_of(path: PurePath) -> str | None:
    """Return the split that a file's path within its corpus names: train, val or test; else None."""
    for part in path.parts:
        words = [WITH_SET.sub("", word.lower()) for word in WORD.findall(HELD_OUT.sub("holdout", part))]
        said = [WORDS[word] for word in words if word in WORDS]
        if said:
            return said[-1]
    return None


def odd_to_train_on(path: Path) -> list[str]:
    """Return a warning where a single file that is trained on is for validation or tests by its name."""
    said = split_of(PurePath(path.name)) if path.is_file() else None
    if said not in MEANT_FOR:
        return []
    return [f"{printable(path.name)} is trained on, which by its name is for {MEANT_FOR[said]}"]


def files_of_split(name: str, folder: Path, files: Sequence[Path], split: Name) -> Split:
    """Select the files of one split from those of a corpus. Raises DataError where there are none."""
    said = {file: split_of(file.relative_to(folder)) for file in files}
    named = [file for file in files if said[file] == split]
    unnamed = [file for file in files if said[file] is None]
    if split == "train" and not named:
        named, unnamed = unnamed, []
    if not named:
        held = f"only files for validation or tests, as {files[0].name}" if files else "nothing"
        if split == "val":
            raise DataError(
                f"corpus {name!r}: {folder} holds no file for validation, which has val, valid, validation, "
                "dev, eval or holdout in its name"
            )
        raise DataError(
            f"corpus {name!r}: {folder} holds {held}, by their names; none is left to train on. To train on "
            "one all the same, rename it, or give the file itself"
        )
    return Split(named, unnamed if split == "train" else [])


def token_files(folder: Path) -> list[Path]:
    """Return the token files of a folder, sorted. Raises DataError where a link is dangling, or OSError."""
    return [path for path in files_in(folder) if path.suffix.lower() == ".bin"]


def open_split(name: str, folder: Path, split: Name, vocab_size: int) -> Shards:
    """Open a folder's shards of one split, as listed in its index.json, or else by their names.

    Raises DataError where there are none, or one is damaged, differs from index.json or exceeds the
    vocabulary.
    """
    index = read_index(folder)
    if index is not None:
        if not index.finished:
            raise DataError(f"{folder} is not prepared to its end; run the same gpt2 prepare again")
        ours = [entry for entry in index.shards if entry["split"] == split]
        entries = {folder / entry["file"]: entry["sha256"] for entry in ours}
        if missing := [path for path in entries if not path.is_file()]:
            raise DataError(f"{missing[0]} is missing; put it back, or prepare anew into another folder")
        if not entries:
            lacks = f"{folder / 'index.json'} lists no {split} shard"
            raise DataError(f"{lacks}; prepare anew into another folder")
        corpus = open_shards(name, list(entries), vocab_size)
        corpus.is_text = True
        for path, sha256 in corpus.files.items():
            if sha256 != entries[path]:
                raise DataError(f"{path} is not what gpt2 prepare wrote; prepare anew into another folder")
        return corpus
    shards = token_files(folder)
    if not shards:
        advice = "folders within it are not looked into; gpt2 prepare makes shards of texts"
        raise DataError(f"corpus {name!r}: {folder} holds no .bin shard; {advice}")
    taken, left_out = files_of_split(name, folder, shards, split)
    tests = [path.name for path in shards if split_of(path.relative_to(folder)) == "test"]
    corpus = open_shards(name, taken, vocab_size)
    if tests and split == "train":
        corpus.warnings += (f"left out: {listed(tests)} (for tests)",)
    if left_out:
        others = f" and {len(left_out) - 1} more" if left_out[1:] else ""
        corpus.warnings += (
            f"{left_out[0].name}{others} of the corpus' folder is not trained on: it names no split, and "
            f"{taken[0].name} says train",
        )
    return corpus


def open_validation(name: str, folder: Path, vocab_size: int) -> Shards:
    """Open a folder's validation shards, as open_split(). Raises DataError, also where one cannot be read."""
    with readable(f"corpus {name!r}", folder):
        return open_split(name, folder, "val", vocab_size)

"""Which files of a folder are trained on, and which are for validation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2.data.batches import open_corpus
from gpt2.data.corpora.prepare import prepare
from gpt2.data.corpora.sources import open_documents
from gpt2.data.splits import open_validation, split_of
from gpt2.files.cache import DataError

V = 50257
TRAINING, VALIDATION, TESTS = 100, 20_000, 40_000
"""The first id of the tokens of each."""


def shard(path: Path, first: int, count: int = 600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.arange(first, first + count).astype("<u2").tofile(path)


SAYS = [
    ("train", ["train.bin", "fineweb_train_000001.bin", "pretrain_train_000001.bin", "TRAIN-00.bin"]),
    ("train", ["myTrainData.bin", "trainset.bin"]),
    ("val", ["val.bin", "fineweb_val_000000.bin", "x.valid.jsonl", "wiki-validation-00000-of-00001.parquet"]),
    ("val", ["VAL.bin", "valset_0.bin", "validdata.bin", "valData.bin", "pretrain_val_000000.bin"]),
    ("val", ["train_val_000000.bin", "dev.txt", "held_out.txt", "eval0.bin"]),
    ("test", ["test.bin", "webtext-test-1.parquet", "x.testing.txt"]),
    (None, ["médiéval.txt", "part_000.bin", "valley.bin", "trainspotting.txt"]),
    (None, ["evaluate_me.txt", "latest.bin", "pretrain.bin"]),
]


@pytest.mark.parametrize(("split", "name"), [(split, name) for split, names in SAYS for name in names])
def test_a_name_says_its_split_by_whole_words_the_last_one_first(split: str | None, name: str) -> None:
    assert split_of(Path(name)) == split


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("val/part_000.bin", "val"),
        ("train/test-cases.txt", "train"),
        ("a/val/b/0.txt", "val"),
        ("books/x.txt", None),
    ],
)
def test_a_folder_says_the_split_of_all_below(path: str, split: str | None) -> None:
    assert split_of(Path(path)) == split


FOLDERS = {  # what is trained on, what is for validation, and what is for neither
    "nanoGPT": (["train.bin"], ["val.bin"], []),
    "llm.c": (["fineweb_train_000001.bin", "fineweb_train_000002.bin"], ["fineweb_val_000000.bin"], []),
    "numbers": (["part_000.bin", "part_001.bin"], ["val.bin"], []),
    "named after a split": (["pretrain_train_1.bin"], ["pretrain_val_0.bin"], ["pretrain_test_0.bin"]),
    "capitals": (["Train-0.bin"], ["Valid-0.bin"], ["TEST-0.bin"]),
    "tests beside numbers": (["0.bin", "1.bin"], ["dev.bin"], ["test.bin"]),
    "a whole beside its parts": (["train.bin"], ["val.bin"], ["all.bin"]),
    "copies of another system's": (["train.bin"], ["val.bin"], ["._train.bin", ".hidden.bin"]),
}


@pytest.mark.parametrize("link", [Path.hardlink_to, Path.symlink_to])
def test_a_link_to_a_shard_is_no_second_shard(link: Any, tmp_path: Path) -> None:
    shard(tmp_path / "train_0.bin", TRAINING)
    link(tmp_path / "train_1.bin", tmp_path / "train_0.bin")
    assert open_corpus("mine", vocab_size=V, path=tmp_path).tokens == 600


@pytest.mark.parametrize("kind", FOLDERS)
def test_no_token_is_on_both_sides_and_none_of_the_tests_on_either(kind: str, tmp_path: Path) -> None:
    for first, names in zip((TRAINING, VALIDATION, TESTS), FOLDERS[kind], strict=True):
        for name in names:
            shard(tmp_path / name, first)
    training = open_corpus("mine", vocab_size=V, path=tmp_path)
    validation = open_validation("mine", tmp_path, vocab_size=V)
    assert training.tokens
    assert validation.tokens
    assert training.tokens == 600 * len(FOLDERS[kind][0])
    assert validation.tokens == 600 * len(FOLDERS[kind][1])
    assert training.read(0, training.tokens).max() < VALIDATION
    assert validation.read(0, validation.tokens).min() >= VALIDATION
    assert validation.read(0, validation.tokens).max() < TESTS


@pytest.mark.parametrize("kind", FOLDERS)
def test_texts_are_split_by_the_same_rule(kind: str, tmp_path: Path) -> None:
    for names in FOLDERS[kind]:
        for name in names:
            (tmp_path / name).with_suffix(".txt").write_text(name)
    for split, names in (("train", FOLDERS[kind][0]), ("validation", FOLDERS[kind][1])):
        if kind == "a whole beside its parts" and split == "train":
            names = ["all.bin", *names]
        found = [Path(file).stem for file in open_documents(str(tmp_path), split=split).files]
        assert found == [Path(name).stem for name in names]


def test_texts_in_folders_named_after_splits_are_split_by_those(tmp_path: Path) -> None:
    for name in ("train/a.txt", "val/a.txt", "test/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    for split, folder in (("train", "train"), ("validation", "val")):
        (file,) = open_documents(str(tmp_path), split=split).files
        assert Path(file).parent.name == folder


@pytest.mark.parametrize("name", ["val.bin", "fineweb_val_000000.bin", "test_0.bin"])
def test_a_folder_of_validation_alone_is_not_trained_on(name: str, tmp_path: Path) -> None:
    shard(tmp_path / name, VALIDATION)
    with pytest.raises(
        DataError, match=f"only files for validation or tests, as {name}.*give the file itself"
    ):
        open_corpus("mine", vocab_size=V, path=tmp_path)
    corpus = open_corpus("mine", vocab_size=V, path=tmp_path / name)
    assert f"{name} is trained on, which by its name is for" in corpus.warnings[0]


def test_what_is_left_out_of_training_though_no_name_says_so_is_said(tmp_path: Path) -> None:
    for name in ("train.bin", "all.bin", "more.bin"):
        shard(tmp_path / name, TRAINING)
    corpus = open_corpus("mine", vocab_size=V, path=tmp_path)
    assert corpus.warnings == (
        "all.bin and 1 more of the corpus' folder is not trained on: it names no split, and train.bin says "
        "train",
    )


def test_a_shard_that_is_a_broken_link_is_named_and_a_folder_of_that_name_is_no_shard(tmp_path: Path) -> None:
    shard(tmp_path / "train_0.bin", TRAINING)
    (tmp_path / "train_1.bin").mkdir()
    assert open_corpus("mine", vocab_size=V, path=tmp_path).tokens == 600
    (tmp_path / "train_2.bin").symlink_to(tmp_path / "gone.bin")
    with pytest.raises(DataError, match=r"train_2\.bin is a link to what is not there"):
        open_corpus("mine", vocab_size=V, path=tmp_path)


def test_shards_of_any_case_are_taken(tmp_path: Path) -> None:
    shard(tmp_path / "TRAIN.BIN", TRAINING)
    shard(tmp_path / "VAL.BIN", VALIDATION)
    assert open_corpus("mine", vocab_size=V, path=tmp_path).tokens == 600


def test_a_second_way_to_a_shard_is_no_second_shard(tmp_path: Path) -> None:
    shard(tmp_path / "train.bin", TRAINING)
    (tmp_path / "latest_train.bin").symlink_to("train.bin")
    corpus = open_corpus("mine", vocab_size=V, path=tmp_path)
    assert corpus.tokens == 600
    assert [path.name for path in corpus.files] == ["train.bin"]  # type: ignore[attr-defined]


def test_an_index_that_lists_no_shard_of_a_split_is_named(tmp_path: Path, vocabulary: None) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 200)
    list(prepare(str(tmp_path / "a.txt"), tmp_path / "out", processes=1))
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    index["shards"] = [entry for entry in index["shards"] if entry["split"] == "train"]
    (tmp_path / "out" / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"index\.json lists no val shard"):
        open_validation("a", tmp_path / "out", vocab_size=V)


def test_what_of_a_folder_of_texts_is_left_out_is_told(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt", "test.txt", "c.json", "d.jsonl.zst"):
        (tmp_path / name).write_text(f"text of {name}")
    documents = open_documents(str(tmp_path))
    assert documents.taken == "a.txt, b.txt"
    assert documents.warnings == ["left out: c.json, d.jsonl.zst (of no known kind) and test.txt (for tests)"]


def test_shards_for_tests_are_told_to_be_left_out(tmp_path: Path) -> None:
    for name in ("train.bin", "val.bin", "test.bin"):
        shard(tmp_path / name, TRAINING)
    assert open_corpus("mine", vocab_size=V, path=tmp_path).warnings == ("left out: test.bin (for tests)",)

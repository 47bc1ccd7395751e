import gzip
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.data import shards
from gpt2.data.batches import Batches, Corpus, DataError, open_corpus
from gpt2.data.documents import in_new_order
from gpt2.data.shards import Shards
from gpt2.files import cache
from gpt2.files.shard_format import MAGIC, shard_header
from gpt2.text import tokenise

V = 50257


def llmc_shard(path: Path, ids: np.ndarray, header: bytes | None = None) -> Path:
    path.write_bytes((shard_header(len(ids)) if header is None else header) + ids.astype("<u2").tobytes())
    return path


def nanogpt_shard(path: Path, ids: np.ndarray) -> Path:
    path.write_bytes(ids.astype("<u2").tobytes())
    return path


def numbers(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, V, count)


# --- text


def test_tiny_shakespeare_has_338025_tokens_that_decode_to_its_text(shakespeare: Path) -> None:
    import tiktoken

    corpus = open_corpus("tinyshakespeare", vocab_size=V, path=shakespeare)
    assert corpus.tokens == 338_025
    assert corpus.warnings == ()
    text = tiktoken.get_encoding("gpt2").decode(corpus.read(0, 338_025).tolist())
    assert text == shakespeare.read_text(encoding="utf-8")


def test_text_is_tokenised_once_and_found_again_by_content(tmp_path: Path, vocabulary: None) -> None:
    first, copy = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("To be, or not to be", encoding="utf-8")
    copy.write_bytes(first.read_bytes())
    shard = tokenise(first)
    written = shard.stat().st_mtime_ns
    assert tokenise(copy) == shard
    assert shard.stat().st_mtime_ns == written


def test_a_special_token_in_the_text_is_ordinary_text(tmp_path: Path, vocabulary: None) -> None:
    text = tmp_path / "a.txt"
    text.write_text("<|endoftext|>", encoding="utf-8")
    corpus = open_corpus("mine", vocab_size=V, path=text)
    assert corpus.tokens is not None
    assert corpus.tokens > 1


def test_other_text_under_a_known_name_is_said(tmp_path: Path) -> None:
    shard = nanogpt_shard(tmp_path / "a.bin", numbers(2000))
    (warning,) = open_corpus("tinyshakespeare", vocab_size=V, path=shard).warnings
    assert "is not the known tinyshakespeare" in warning


def test_shards_that_nothing_tells_of_under_a_known_name_are_said(tmp_path: Path) -> None:
    nanogpt_shard(tmp_path / "train.bin", numbers(2000))
    nanogpt_shard(tmp_path / "val.bin", numbers(200))
    (warning,) = open_corpus("tinyshakespeare", vocab_size=V, path=tmp_path).warnings
    assert "nothing tells that it holds the known tinyshakespeare" in warning
    assert open_corpus("mine", vocab_size=V, path=tmp_path).warnings == ()


@pytest.mark.parametrize(
    ("content", "complaint"), [(b"abc\xff\xfe", r"a\.txt is not UTF-8"), (b"", r"a\.txt holds no text")]
)
def test_text_without_a_token_or_of_no_utf8_is_refused_by_its_own_name(
    content: bytes, complaint: str, tmp_path: Path, vocabulary: None
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        open_corpus("mine", vocab_size=V, path=tmp_path / "a.txt")


def test_without_vocabulary_and_network_the_error_names_the_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    text = tmp_path / "a.txt"
    text.write_text("abc")
    with pytest.raises(DataError, match=r"TIKTOKEN_CACHE_DIR.*or give tokens"):
        open_corpus("mine", vocab_size=V, path=text)


# --- where corpora lie


def test_without_network_the_error_names_the_ways_to_give_a_corpus() -> None:
    with pytest.raises(DataError, match=r"could not be downloaded.*--data PATH.*\$GPT2_DATA_DIR"):
        open_corpus("tinyshakespeare", vocab_size=V)


def test_an_unknown_corpus_is_refused_with_the_ways_to_give_it() -> None:
    with pytest.raises(DataError, match=r"'fineweb'.*no known address.*--data PATH"):
        open_corpus("fineweb", vocab_size=V)


@pytest.mark.parametrize("place", ["data dir", "cache"])
def test_a_named_corpus_is_found_without_a_path(
    place: str, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path if place == "data dir" else own_cache / "corpora"
    folder.mkdir(exist_ok=True)
    nanogpt_shard(folder / "mine.bin", numbers(3000))
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path))
    assert open_corpus("mine", vocab_size=V).tokens == 3000


def test_a_given_path_wins_over_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nanogpt_shard(tmp_path / "mine.bin", numbers(3000))
    monkeypatch.setenv("GPT2_DATA_DIR", str(tmp_path))
    given = nanogpt_shard(tmp_path / "other.bin", numbers(2000))
    assert open_corpus("mine", vocab_size=V, path=given).tokens == 2000


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt does not exist"):
        open_corpus("mine", vocab_size=V, path=tmp_path / "nowhere.txt")


# --- shards


@pytest.mark.parametrize("write", [llmc_shard, nanogpt_shard])
def test_shards_of_both_kinds_are_read_as_they_are(write, tmp_path: Path) -> None:
    ids = numbers(5000)
    corpus = open_corpus("mine", vocab_size=V, path=write(tmp_path / "a.bin", ids))
    assert np.array_equal(corpus.read(0, 5000), ids)
    assert corpus.sha256 == hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest()


def test_a_folder_of_shards_reads_as_one_sequence_without_validation_shards(tmp_path: Path) -> None:
    ids = numbers(3000)
    llmc_shard(tmp_path / "web_train_000001.bin", ids[:1000])
    llmc_shard(tmp_path / "web_train_000002.bin", ids[1000:])
    llmc_shard(tmp_path / "web_val_000000.bin", ids[:500])
    corpus = open_corpus("web", vocab_size=V, path=tmp_path)
    assert np.array_equal(corpus.read(0, 3000), ids)
    assert np.array_equal(corpus.read(990, 20), ids[990:1010])


def test_shards_are_mapped_not_loaded(tmp_path: Path) -> None:
    corpus = open_corpus("mine", vocab_size=V, path=nanogpt_shard(tmp_path / "a.bin", numbers(5000)))
    assert isinstance(corpus, Shards)
    assert all(isinstance(array, np.memmap) for array in corpus._arrays)


def in_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files had been written long ago, so that what is read of them is remembered."""
    now = time.time_ns()
    monkeypatch.setattr(cache.time, "time_ns", lambda: now + 3600 * 10**9)


def overwritten(path: Path, ids: np.ndarray) -> None:
    with path.open("r+b") as file:
        file.write(ids.astype("<u2").tobytes())


def replaced(path: Path, ids: np.ndarray) -> None:
    path.rename(path.with_suffix(".old"))
    nanogpt_shard(path, ids)


def moved_in(path: Path, ids: np.ndarray) -> None:
    nanogpt_shard(path.with_suffix(".new"), ids).replace(path)


def linked(path: Path, ids: np.ndarray) -> None:
    other = nanogpt_shard(path.with_name("other.bin"), ids)
    path.unlink()
    path.symlink_to(other)


@pytest.mark.parametrize("swap", [overwritten, replaced, moved_in, linked])
def test_a_shard_swapped_for_one_of_equal_size_and_time_is_told_by_its_content(
    swap: Callable[[Path, np.ndarray], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", numbers(3000))
    then = path.stat()
    in_an_hour(monkeypatch)
    before = open_corpus("mine", vocab_size=V, path=path).sha256
    swap(path, numbers(3000)[::-1])
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    after = open_corpus("mine", vocab_size=V, path=path)
    assert after.sha256 == hashlib.sha256(numbers(3000)[::-1].astype("<u2").tobytes()).hexdigest() != before


def test_a_swapped_shard_beyond_the_vocabulary_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", numbers(3000))
    then = path.stat()
    in_an_hour(monkeypatch)
    open_corpus("mine", vocab_size=V, path=path)
    overwritten(path, np.full(3000, 50300))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(DataError, match=r"token id 50300 of train\.bin is beyond"):
        open_corpus("mine", vocab_size=V, path=path)


@pytest.mark.parametrize(
    "ids", [np.full(3000, 50300), numbers(3000)[::-1]], ids=["beyond the vocabulary", "others"]
)
def test_a_shard_that_something_writes_into_while_it_is_read_is_refused(
    tmp_path: Path, ids: np.ndarray
) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", numbers(3000))
    corpus = open_corpus("mine", vocab_size=V, path=path)
    corpus.read(0, 100)
    overwritten(path, ids)
    os.utime(path, ns=(0, 1))  # some clocks tick too slowly for a test
    with pytest.raises(DataError, match=r"train\.bin changed since it was opened; put back what it was"):
        corpus.read(0, 100)


def test_a_shard_that_is_cut_short_while_it_is_read_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", numbers(1 << 16))
    corpus = open_corpus("mine", vocab_size=V, path=path)
    corpus.read(0, 100)
    os.truncate(path, 0)
    with pytest.raises(DataError, match=r"train\.bin changed since it was opened"):
        corpus.read(50_000, 100)


def test_what_is_written_into_a_shard_while_a_part_of_it_is_copied_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", numbers(3000))
    corpus = open_corpus("mine", vocab_size=V, path=path)
    copy, others = np.concatenate, numbers(3000)[::-1]

    def copied_from_what_is_being_written(parts: list[np.ndarray]) -> np.ndarray:
        overwritten(path, others)
        os.utime(path, ns=(0, 1))  # some clocks tick too slowly for a test
        return copy(parts)

    monkeypatch.setattr(shards.np, "concatenate", copied_from_what_is_being_written)
    with pytest.raises(DataError, match=r"train\.bin changed since it was opened"):
        corpus.read(0, 100)


def test_a_shard_that_is_touched_or_replaced_or_gone_is_read_on_as_it_was(tmp_path: Path) -> None:
    path = nanogpt_shard(tmp_path / "train.bin", ids := numbers(3000))
    corpus = open_corpus("mine", vocab_size=V, path=path)
    path.touch()
    assert corpus.read(0, 100).tolist() == ids[:100].tolist()
    nanogpt_shard(tmp_path / "other.bin", ids[::-1].copy()).replace(path)
    assert corpus.read(0, 100).tolist() == ids[:100].tolist()
    path.unlink()
    assert corpus.read(0, 100).tolist() == ids[:100].tolist()


@pytest.mark.parametrize("where", ["at its end", "amid it", "behind a header"])
def test_a_shard_that_was_not_written_throughout_is_refused(tmp_path: Path, where: str) -> None:
    ids = numbers(3000)
    ids[2000:2300] = 0
    if where == "at its end":
        ids = ids[:2300]
    path = (llmc_shard if where == "behind a header" else nanogpt_shard)(tmp_path / "train.bin", ids)
    with pytest.raises(DataError, match=r"nothing but zeros from token 2,048 on"):
        open_corpus("mine", vocab_size=V, path=path)
    # Of characters, 0 may be a blank.
    assert open_corpus("mine", vocab_size=50256, path=path).tokens == len(ids)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")

    def read() -> dict[str, str]:
        path.write_text("after!")
        return {}

    with pytest.raises(DataError, match=r"a\.txt changed while it was read"):
        cache.cached_facts([path], "test", read)


def test_what_was_read_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = []

    def read() -> dict[str, int]:
        readings.append(1)
        return {"count": len(readings)}

    path = tmp_path / "a.txt"
    path.write_text("before")
    in_an_hour(monkeypatch)
    assert [cache.cached_facts([path], "test", read)["count"] for _ in range(3)] == [1, 1, 1]
    path.write_text("after!")
    assert cache.cached_facts([path], "test", read)["count"] == 2


def test_what_was_just_written_is_not_remembered_for_its_clock_may_not_tell_the_next_change(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    readings = iter(range(9))
    found = [cache.cached_facts([path], "test", lambda: {"n": next(readings)})["n"] for _ in range(3)]
    assert found == [0, 1, 2]


def test_a_damaged_memory_of_a_file_is_read_anew(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = nanogpt_shard(tmp_path / "a.bin", numbers(3000))
    in_an_hour(monkeypatch)
    right = open_corpus("mine", vocab_size=V, path=path).sha256
    (kept,) = (own_cache / "fingerprints").iterdir()
    for content in ("", "[]", "{}", '{"files": []}', "\x00" * 40):
        kept.write_text(content)
        assert open_corpus("mine", vocab_size=V, path=path).sha256 == right


# --- width of tokens


def small_ids(count: int = 3000, below: int = 509) -> np.ndarray:
    return np.random.default_rng(1).integers(1, below, count)


def of_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype="u1")


OTHER_WIDTHS = {
    "uint32": small_ids().astype("<u4"),
    "int32 of GPT-2's ids": numbers(3000).astype("<i4"),
    "int64": small_ids().astype("<i8"),
    "uint64 of GPT-2's ids": numbers(3000).astype("<u8"),
    "big-endian uint32": small_ids().astype(">u4"),
    "big-endian int64": small_ids().astype(">i8"),
    "nothing but zeros": np.zeros(500, dtype="<u2"),
    "one byte each, of 65 characters": small_ids(8000, 65).astype("u1"),
    "one byte each, zero among them": (small_ids(8000, 41) - 1).astype("u1"),
    "plain text": of_bytes(b"It was the best of times, it was the worst of times, " * 200),
}


@pytest.mark.parametrize("kind", OTHER_WIDTHS)
def test_tokens_of_another_width_are_refused(kind: str, tmp_path: Path) -> None:
    OTHER_WIDTHS[kind].tofile(tmp_path / "train.bin")
    with pytest.raises(DataError, match=r"train\.bin holds no uint16 tokens"):
        open_corpus("mine", vocab_size=V, path=tmp_path / "train.bin")


def test_one_shard_of_another_width_among_others_is_refused(tmp_path: Path) -> None:
    nanogpt_shard(tmp_path / "train_0.bin", numbers(3000))
    small_ids().astype("<i4").tofile(tmp_path / "train_1.bin")
    with pytest.raises(DataError, match=r"train_1\.bin holds no uint16 tokens"):
        open_corpus("mine", vocab_size=V, path=tmp_path)


FEW_KINDS_OF_TOKENS = {
    "characters as uint16": (small_ids(3000, 65), 65),
    "a vocabulary of one byte": (small_ids(3000, 256), 256),
    "the synthetic vocabulary": (small_ids(3000), 509),
    "one token again and again": (np.full(3000, 257), V),
    "mostly padding": (np.where(np.arange(3000) % 9, 0, numbers(3000)), V),
    "two tokens by turns": (np.tile([3, 50256], 1500), V),
    "uniform over GPT-2's vocabulary": (np.random.default_rng(0).integers(0, V, 200_000), V),
    "few tokens": (np.array([5, 0, 7, 0]), V),
    "the byte tokens of a script": (small_ids(8000, 130) + 120, V),
}


@pytest.mark.parametrize("kind", FEW_KINDS_OF_TOKENS)
def test_uint16_tokens_of_few_kinds_are_read(kind: str, tmp_path: Path) -> None:
    ids, vocab_size = FEW_KINDS_OF_TOKENS[kind]
    path = nanogpt_shard(tmp_path / "train.bin", ids)
    assert open_corpus("mine", vocab_size=vocab_size, path=path).read(0, len(ids)).tolist() == ids.tolist()


KINDS = [("npy", "npy file"), ("npz", "npz"), ("gzip", "compressed by gzip")]


@pytest.mark.parametrize(("save", "kind"), [*KINDS, ("torch", "torch file"), ("pickle", "pickle")])
def test_another_kind_of_file_named_bin_is_called_what_it_is(save: str, kind: str, tmp_path: Path) -> None:
    path, ids = tmp_path / "train.bin", numbers(3000).astype("<u2")
    if save == "gzip":
        path.write_bytes(gzip.compress(ids.tobytes()))
    elif save == "pickle":
        path.write_bytes(pickle.dumps(ids, protocol=4))
    elif save == "torch":
        torch.save(torch.zeros(9), path)
    else:
        with path.open("wb") as file:
            (np.save if save == "npy" else np.savez)(file, ids)
    with pytest.raises(DataError, match=f"train.bin is .*{kind}"):
        open_corpus("mine", vocab_size=V, path=path)


class Touch:
    """Whoever unpickles this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (Path(self.path),)


def test_tokens_of_characters_are_told_by_the_meta_pkl_beside_them(tmp_path: Path) -> None:
    nanogpt_shard(tmp_path / "train.bin", small_ids(3000, 65))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65, "itos": {0: "a"}, "stoi": {"a": 0}}))
    assert open_corpus("mine", vocab_size=65, path=tmp_path).tokens == 3000
    for path in (tmp_path, tmp_path / "train.bin"):
        with pytest.raises(DataError, match=r"meta\.pkl says .* a vocabulary of 65, the model's is of 50257"):
            open_corpus("mine", vocab_size=V, path=path)


@pytest.mark.parametrize("content", ["code", "no pickle", "no size"])
def test_a_meta_pkl_that_says_no_vocabulary_is_no_proof_and_runs_no_code(
    content: str, tmp_path: Path
) -> None:
    nanogpt_shard(tmp_path / "train.bin", small_ids(3000, 65))
    contents = {
        "code": pickle.dumps(Touch(str(tmp_path / "ran"))),
        "no pickle": b"hello",
        "no size": pickle.dumps([1]),
    }
    (tmp_path / "meta.pkl").write_bytes(contents[content])
    assert open_corpus("mine", vocab_size=V, path=tmp_path).tokens == 3000
    assert not (tmp_path / "ran").exists()


def test_a_step_that_is_not_of_whole_sequences_is_refused() -> None:
    corpus = open_corpus("synthetic", vocab_size=V)
    for tokens in (0, 63, 100):
        with pytest.raises(
            DataError, match=f"{tokens} tokens per step: is no multiple of the 64 of a sequence"
        ):
            Batches(corpus, seq_len=64, tokens_per_step=tokens, seed=0)


def test_the_place_of_a_corpus_may_be_given_as_text(tmp_path: Path) -> None:
    nanogpt_shard(tmp_path / "train.bin", numbers(3000))
    assert open_corpus("mine", vocab_size=V, path=str(tmp_path / "train.bin")).tokens == 3000


def header(magic: int = MAGIC, version: int = 1, tokens: int = 100) -> bytes:
    ints = np.zeros(256, dtype="<i4")
    ints[:3] = magic, version, tokens
    return ints.tobytes()


FOREIGN = {
    "of Llama 3": (header(magic=20240801) + bytes(200), "Llama 3's uint32 tokens"),
    "of llm.c's evaluation": (
        np.array([20240522, 1, 10, 77, *[0] * 252], "<i4").tobytes() + bytes(200),
        "questions of llm.c's evaluation",
    ),
    "another magic": (header(magic=20240802) + bytes(200), "magic 20240802 is not 20240520"),
    "another version": (header(version=2) + bytes(200), "version 2 is not 1"),
    "too few tokens": (header(tokens=101) + bytes(200), "promises 101 tokens, the file holds 100"),
    "no tokens": (header(tokens=0), "holds no tokens"),
    "nothing": (b"", "0 bytes"),
    "three bytes": (b"abc", "3 bytes are no whole number"),
    "an id beyond the vocabulary": (
        np.insert(numbers(2999), 1234, 50257).astype("<u2").tobytes(),
        r"token id 50257 of a\.bin is beyond the model's vocabulary of 50257",
    ),
    "a larger vocabulary in four bytes": (
        np.random.default_rng(1).integers(0, 128_000, 3000).astype("<u4").tobytes(),
        "is beyond the model's vocabulary",
    ),
    "big-endian": (numbers(3000).astype(">u2").tobytes(), "see that they are little-endian uint16"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_damaged_or_foreign_shard_is_refused(kind: str, tmp_path: Path) -> None:
    content, complaint = FOREIGN[kind]
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        open_corpus("mine", vocab_size=V, path=tmp_path / "a.bin")


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.bin shard"):
        open_corpus("mine", vocab_size=V, path=tmp_path)


def test_an_unwritable_cache_is_named_where_text_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: None
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPT2_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "a.txt").write_text("some text")
    with pytest.raises(DataError, match="set GPT2_CACHE_DIR to a writable folder"):
        open_corpus("mine", vocab_size=V, path=tmp_path / "a.txt")


def test_tokens_are_read_without_a_cache_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPT2_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = nanogpt_shard(tmp_path / "a.bin", numbers(3000))
    assert open_corpus("mine", vocab_size=V, path=path).tokens == 3000


# --- batches


def corpus_of(tmp_path: Path, count: int) -> Corpus:
    return open_corpus("mine", vocab_size=V, path=nanogpt_shard(tmp_path / "a.bin", np.arange(count) % V))


def test_targets_are_one_token_ahead_of_inputs(tmp_path: Path) -> None:
    batches = Batches(corpus_of(tmp_path, 5000), seq_len=16, tokens_per_step=64, seed=0)
    x, y = batches.sequences(0, 0, 4)
    assert x.shape == y.shape == (4, 16)
    assert np.array_equal(y, x + 1)


def test_an_epoch_reads_every_chunk_once_and_the_next_in_another_order(tmp_path: Path) -> None:
    batches = Batches(corpus_of(tmp_path, 40 * 16 + 1), seq_len=16, tokens_per_step=4 * 16, seed=0)
    starts = [batches.sequences(step, 0, 4)[0][:, 0] for step in range(20)]
    orders = [np.concatenate(epoch) for epoch in (starts[:10], starts[10:])]
    assert all(sorted(order) == list(range(0, 640, 16)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 5000)

    def first(seed: int) -> np.ndarray:
        return Batches(corpus, seq_len=16, tokens_per_step=64, seed=seed).sequences(0, 0, 4)[0]

    assert np.array_equal(first(1), first(1))
    assert not np.array_equal(first(1), first(2))


def test_a_corpus_shorter_than_a_step_wraps_with_a_warning(tmp_path: Path) -> None:
    batches = Batches(corpus_of(tmp_path, 50), seq_len=16, tokens_per_step=16 * 8, seed=0)
    (warning,) = batches.warnings
    assert "50 tokens, fewer than the 129 of a step" in warning
    assert batches.sequences(0, 0, 8)[0].shape == (8, 16)


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 16)
    with pytest.raises(DataError, match="has 16 tokens, a sequence of 16 needs 17"):
        Batches(corpus, seq_len=16, tokens_per_step=16, seed=0)


def test_a_pipe_is_no_corpus(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(DataError, match="is no file and no folder"):
        open_corpus("mine", vocab_size=V, path=tmp_path / "train.bin")


@pytest.mark.parametrize("damage", [0, 136], ids=["empty", "cut off"])
def test_where_documents_begin_is_found_anew_where_what_is_remembered_is_damaged(
    damage: int, tmp_path: Path, own_cache: Path
) -> None:
    ids = numbers(3000)
    ids[::50] = 50256
    corpus = open_corpus("mine", vocab_size=V, path=llmc_shard(tmp_path / "train.bin", ids))
    whole = in_new_order(corpus, 1).read(0, 3000)
    (remembered,) = own_cache.glob("documents/*.npy")
    os.truncate(remembered, damage)
    assert in_new_order(corpus, 1).read(0, 3000).tolist() == whole.tolist()

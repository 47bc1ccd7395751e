"""Documents in a new order each epoch, held to a plain copy that concatenates them one by one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2.data.batches import Batches, DataError, open_corpus
from gpt2.data.documents import SEPARATOR, ShuffledDocuments, in_new_order
from gpt2.data.shards import Shards
from gpt2.data.splits import open_validation
from gpt2.data.synthetic import Synthetic
from gpt2.files.shard_format import shard_header

V = 50257


def shards(lengths: list[int], *, first: int = SEPARATOR, cut: int = 1) -> Shards:
    """Documents of these lengths in `cut` shards; each token but the separator tells its place."""
    ids = np.arange(sum(lengths)) % SEPARATOR
    ids[np.cumsum([0, *lengths[:-1]])] = SEPARATOR
    ids[0] = first
    parts = [part for part in np.array_split(ids.astype("<u2"), cut) if len(part)]
    return Shards("mine", parts, hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest())


def plainly(corpus: Shards, seed: int, epochs: int) -> np.ndarray:
    """The same order made the simple way: split at separators, permute, put together."""
    assert corpus.tokens
    whole = corpus.read(0, corpus.tokens)
    begins = np.flatnonzero(whole == SEPARATOR)
    documents = np.split(whole, begins[begins > 0])
    out = []
    for epoch in range(epochs):
        order = np.arange(len(documents), dtype=np.uint32)
        np.random.default_rng([seed, epoch]).shuffle(order)
        out += [documents[i] for i in order]
    return np.concatenate(out)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=150),
    first=st.sampled_from([SEPARATOR, 7]),
    cut=st.integers(1, 5),
    where=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(deadline=None, max_examples=150)
def test_any_range_is_that_of_the_documents_put_together_one_by_one(lengths, first, cut, where) -> None:
    corpus = shards(lengths, first=first, cut=cut)
    shuffled = ShuffledDocuments(corpus, seed=3)
    expected = plainly(corpus, 3, epochs=3)
    start, end = sorted(int(share * len(expected)) for share in where)
    assert np.array_equal(shuffled.read(start, end - start), expected[start:end])


def test_an_epoch_has_every_token_of_every_document_once_and_the_next_another_order() -> None:
    corpus = shards([5, 1, 30, 7, 7, 12, 3, 9] * 20, cut=3)
    shuffled = ShuffledDocuments(corpus, seed=0)
    n = shuffled.epoch_tokens
    epochs = [shuffled.read(epoch * n, n) for epoch in range(3)]
    assert all(np.array_equal(np.sort(epoch), np.sort(corpus.read(0, n))) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(epochs[1], epochs[2])


def test_the_seed_alone_decides_the_order_of_documents() -> None:
    corpus = shards([10] * 50)
    first = ShuffledDocuments(corpus, seed=1).read(0, 500)
    assert np.array_equal(first, ShuffledDocuments(corpus, seed=1).read(0, 500))
    assert not np.array_equal(first, ShuffledDocuments(corpus, seed=2).read(0, 500))


def test_batches_read_an_endless_order_straight_on() -> None:
    shuffled = in_new_order(shards([11] * 40), seed=5)
    batches = Batches(shuffled, seq_len=16, tokens_per_step=64, seed=5)
    rows = np.concatenate([batches.sequences(step, 0, 4)[0].reshape(-1) for step in range(20)])
    assert np.array_equal(rows, plainly(shards([11] * 40), 5, epochs=3)[: len(rows)])


def test_where_documents_begin_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = shards([10] * 50)
    before = ShuffledDocuments(corpus, seed=1).read(0, 1000)
    asked: list[int] = []
    read = corpus.read
    monkeypatch.setattr(corpus, "read", lambda start, count: asked.append(count) or read(start, count))
    again = ShuffledDocuments(corpus, seed=1)
    assert asked == []
    assert np.array_equal(again.read(0, 1000), before)


@pytest.mark.parametrize("lengths", [[100], [1]])
def test_one_document_stays_as_it_is(lengths: list[int]) -> None:
    corpus = shards(lengths)
    assert in_new_order(corpus, seed=0) is corpus


def test_text_without_a_separator_stays_as_it_is() -> None:
    corpus = shards([100], first=1)
    assert in_new_order(corpus, seed=0) is corpus


def test_generated_text_stays_as_it_is() -> None:
    corpus = Synthetic(509, 0)
    assert in_new_order(corpus, seed=0) is corpus


def test_memory_for_ten_million_documents_is_bounded() -> None:
    documents = 10_000_000
    shuffled = object.__new__(ShuffledDocuments)
    shuffled.seed, shuffled.documents, shuffled.epoch_tokens = 0, documents, 3 * documents
    shuffled._bounds = np.arange(0, 3 * documents + 1, 3)
    epoch = shuffled._draw_epoch(0)
    assert epoch.order.nbytes + epoch.marks.nbytes < 45e6
    assert np.array_equal(epoch.marks, np.arange(0, 3 * documents, 3 * 32))


def shard(path: Path, ids: np.ndarray) -> None:
    path.write_bytes(shard_header(len(ids)) + ids.astype("<u2").tobytes())


def test_validation_is_in_plain_order(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, V, 3000)
    shard(tmp_path / "mine_val_000000.bin", ids)
    shard(tmp_path / "mine_train_000001.bin", ids[::-1])
    validation = open_validation("mine", tmp_path, vocab_size=V)
    assert validation.tokens == 3000
    assert np.array_equal(validation.read(0, 3000), ids)
    (tmp_path / "same.bin").write_bytes(ids.astype("<u2").tobytes())
    assert validation.sha256 == open_corpus("same", vocab_size=V, path=tmp_path / "same.bin").sha256


def test_a_folder_without_validation_is_refused(tmp_path: Path) -> None:
    shard(tmp_path / "mine_train_000001.bin", np.arange(1000))
    with pytest.raises(DataError, match="holds no file for validation, which has val,"):
        open_validation("mine", tmp_path, vocab_size=V)

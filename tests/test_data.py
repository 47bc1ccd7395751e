import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import shards
from gpt2.data import Batches, Corpus, DataError, open_corpus
from gpt2.shards import Shards, shard_header
from gpt2.text import tokenise
from gpt2.toggles import Toggles
from gpt2.train import micro_batches

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
    assert "not those of the known tinyshakespeare" in warning


def test_text_that_is_not_utf8_is_refused(tmp_path: Path, vocabulary: None) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"abc\xff\xfe")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8"):
        open_corpus("mine", vocab_size=V, path=text)


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


def test_a_changed_shard_gets_a_new_fingerprint(tmp_path: Path) -> None:
    path = nanogpt_shard(tmp_path / "a.bin", numbers(3000))
    before = open_corpus("mine", vocab_size=V, path=path).sha256
    nanogpt_shard(path, numbers(3002)[::-1])
    assert open_corpus("mine", vocab_size=V, path=path).sha256 != before


def header(magic: int = shards.MAGIC, version: int = 1, tokens: int = 100) -> bytes:
    ints = np.zeros(256, dtype="<i4")
    ints[:3] = magic, version, tokens
    return ints.tobytes()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (header(magic=20240801) + bytes(200), "magic 20240801 is not 20240520"),
        (header(version=2) + bytes(200), "version 2 is not 1"),
        (header(tokens=101) + bytes(200), "promises 101 tokens, the file holds 100"),
        (header(tokens=0), "holds no tokens"),
        (b"", "0 bytes"),
        (b"abc", "3 bytes are no whole number"),
    ],
)
def test_a_damaged_or_foreign_shard_is_refused(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        open_corpus("mine", vocab_size=V, path=tmp_path / "a.bin")


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    ids = numbers(3000)
    ids[1234] = 50257
    with pytest.raises(DataError, match="token id 50257 is beyond the model's vocabulary of 50257"):
        open_corpus("mine", vocab_size=V, path=nanogpt_shard(tmp_path / "a.bin", ids))


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.bin shard"):
        open_corpus("mine", vocab_size=V, path=tmp_path)


def test_text_without_a_token_is_refused_by_its_own_name(tmp_path: Path, vocabulary: None) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt holds no text"):
        open_corpus("mine", vocab_size=V, path=tmp_path / "empty.txt")


def test_an_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPT2_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="set GPT2_CACHE_DIR to a writable folder"):
        open_corpus("mine", vocab_size=V, path=nanogpt_shard(tmp_path / "a.bin", numbers(3000)))


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
    epochs = [[batches.sequences(step, 0, 4)[0][:, 0] for step in range(10 * e, 10 * e + 10)] for e in range(2)]
    orders = [np.concatenate(epoch) for epoch in epochs]
    assert all(sorted(order) == list(range(0, 640, 16)) for order in orders)
    assert not np.array_equal(orders[0], orders[1])


def test_the_seed_alone_decides_the_order(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 5000)

    def first(seed: int) -> np.ndarray:
        return Batches(corpus, seq_len=16, tokens_per_step=64, seed=seed).sequences(0, 0, 4)[0]

    assert np.array_equal(first(1), first(1))
    assert not np.array_equal(first(1), first(2))


@given(ranks=st.integers(1, 4), micro=st.integers(1, 4), accumulation=st.integers(1, 4), step=st.integers(0, 3))
@settings(deadline=None, max_examples=40)
def test_ranks_and_micro_batches_split_the_global_batch_without_overlap(
    ranks: int, micro: int, accumulation: int, step: int
) -> None:
    toggles = Toggles(world_size=ranks, micro_batch_size=micro, grad_accum_steps=accumulation)
    tokens = toggles.tokens_per_step(8)
    batches = Batches(open_corpus("synthetic", vocab_size=509, seed=3), seq_len=8, tokens_per_step=tokens, seed=3)
    whole, _ = batches.sequences(step, 0, batches.sequences_per_step)
    taken = []
    for rank in range(ranks):
        shares = micro_batches(batches, toggles, rank=rank)
        mine = [next(shares)[0].numpy() for _ in range((step + 1) * accumulation)][step * accumulation :]
        taken.append(np.stack(mine))  # (accumulation, micro, T)
    together = np.stack(taken, axis=1).reshape(-1, 8)  # micro-steps outermost, then ranks
    assert np.array_equal(together, whole)


def test_a_corpus_shorter_than_a_step_wraps_with_a_warning(tmp_path: Path) -> None:
    batches = Batches(corpus_of(tmp_path, 50), seq_len=16, tokens_per_step=16 * 8, seed=0)
    (warning,) = batches.warnings
    assert "50 tokens, fewer than one step's 128" in warning
    assert batches.sequences(0, 0, 8)[0].shape == (8, 16)


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 16)
    with pytest.raises(DataError, match="has 16 tokens, a sequence of 16 needs 17"):
        Batches(corpus, seq_len=16, tokens_per_step=16, seed=0)

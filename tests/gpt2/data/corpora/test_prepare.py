"""Shards from a corpus, as llm.c's and nanoGPT's own readers see them, killed and gone on with."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import streams
from places import ROOT
from waiting import until

from gpt2.data.batches import open_corpus
from gpt2.data.corpora.prepare import Prepared, prepare
from gpt2.data.corpora.sources import stem_of
from gpt2.data.index import Index, assert_free_for_nanogpt, read_index, to_nanogpt
from gpt2.data.splits import open_validation
from gpt2.files.cache import DataError, fingerprint

TEXTS = streams.documents(600)
EOT = 50256


@pytest.fixture
def corpus(tmp_path: Path, vocabulary: None) -> str:
    """600 documents in three files of Parquet, some 40,000 tokens."""
    return str(streams.folder(tmp_path / "mine", TEXTS, 3))


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of few documents, so that a shard ends within one and there are many."""
    monkeypatch.setattr("gpt2.data.corpora.encode.BATCH_CHARS", 3000)


def test_a_corpus_that_is_not_there_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for out in ("new", "there"):
        with pytest.raises(DataError, match="nowhere"):
            list(prepare(str(tmp_path / "nowhere.txt"), tmp_path / out))
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_a_text_too_short_for_training_leaves_no_folder(tmp_path: Path, vocabulary: None) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    with pytest.raises(DataError, match="all 3 tokens"):
        list(prepare(str(tmp_path / "a.txt"), tmp_path / "out", processes=1))
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def made(corpus: str, out: Path, **settings) -> Index:
    settings.setdefault("shard_tokens", 5000)
    settings.setdefault("processes", 1)
    for _ in prepare(corpus, out, **settings):
        pass
    index = read_index(out)
    assert index is not None
    return index


def expected(texts: list[str]) -> np.ndarray:
    """tiktoken's own tokens, an <|endoftext|> before each document, as llm.c and build-nanogpt make them."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return np.array([token for text in texts for token in [EOT, *encoding.encode_ordinary(text)]])


def llmc_reads(path: Path) -> np.ndarray:
    """A shard as llm.c's data loader reads it: 256 ints, of which the third counts the tokens that follow."""
    with path.open("rb") as file:
        header = np.frombuffer(file.read(256 * 4), dtype=np.int32)
        tokens = np.frombuffer(file.read(), dtype=np.uint16)
    assert (header[0], header[1]) == (20240520, 1)
    assert header[2] == len(tokens)
    return tokens


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.bin"))}


# --- what is written


def test_llmc_reads_all_documents_in_order_validation_first(
    corpus: str, tmp_path: Path, small_batches: None
) -> None:
    index = made(corpus, tmp_path / "out")
    names = [entry["file"] for entry in index.shards]
    assert names[:2] == ["mine_val_000000.bin", "mine_train_000001.bin"]
    parts = [llmc_reads(tmp_path / "out" / name) for name in names]
    assert {len(part) for part in parts[:-1]} == {5000}
    assert np.array_equal(np.concatenate(parts), expected(TEXTS))


def test_several_processes_write_the_same_shards_as_one(
    corpus: str, tmp_path: Path, small_batches: None
) -> None:
    made(corpus, tmp_path / "one")
    made(corpus, tmp_path / "three", processes=3)
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


def test_the_trainer_finds_the_training_shards_and_the_validation_apart(corpus: str, tmp_path: Path) -> None:
    index = made(corpus, tmp_path / "out")
    ids = expected(TEXTS)
    trained = open_corpus("mine", vocab_size=50257, path=tmp_path / "out")
    assert trained.tokens == len(ids) - 5000 == index.tokens - 5000
    assert np.array_equal(trained.read(0, len(ids) - 5000), ids[5000:])
    assert np.array_equal(
        open_validation("mine", tmp_path / "out", vocab_size=50257).read(0, 5000), ids[:5000]
    )


def test_nanogpt_maps_one_file_without_a_header_per_split(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    to_nanogpt(tmp_path / "out", tmp_path / "nano")
    train, val = (tmp_path / "nano" / f"{split}.bin" for split in ("train", "val"))
    ids = expected(TEXTS)
    assert np.array_equal(np.memmap(train, dtype=np.uint16, mode="r"), ids[5000:])
    assert np.array_equal(np.memmap(val, dtype=np.uint16, mode="r"), ids[:5000])
    assert open_corpus("mine", vocab_size=50257, path=tmp_path / "nano").tokens == len(ids) - 5000


def test_the_index_tells_tokens_documents_and_checksums(corpus: str, tmp_path: Path) -> None:
    index = made(corpus, tmp_path / "out")
    assert (index.finished, index.name, index.documents) == (True, "mine", 600)
    assert index.vocabulary == {"name": "gpt2", "size": 50257, "separator": EOT}
    assert {entry["file"]: entry["sha256"] for entry in index.shards} == contents(tmp_path / "out")
    ids = expected(TEXTS)
    ends = np.cumsum([0, *(entry["tokens"] for entry in index.shards)])
    assert [entry["documents"] for entry in index.shards] == [
        int((ids[a:b] == EOT).sum()) for a, b in pairwise(ends)
    ]
    assert index.tokens == len(ids)


def test_a_long_text_is_tokenised_in_pieces_as_if_it_were_whole(shakespeare: Path, tmp_path: Path) -> None:
    made(str(shakespeare), tmp_path / "out", shard_tokens=100_000, processes=2)
    parts = [llmc_reads(path) for path in sorted((tmp_path / "out").glob("*train*"))]
    whole = np.concatenate([llmc_reads(tmp_path / "out" / "tinyshakespeare_val_000000.bin"), *parts])
    assert np.array_equal(whole, expected([shakespeare.read_text(encoding="utf-8")]))
    assert len(whole) == 338_025 + 1


@pytest.mark.parametrize("blanks", [" ", "\t", "\xa0", "\n", "a", pytest.param("漢", marks=pytest.mark.slow)])
def test_a_document_with_a_million_of_one_character_is_tokenised(
    blanks: str, tmp_path: Path, vocabulary: None
) -> None:
    plain = [text.replace("<|endoftext|>", "") for text in TEXTS[:40]]
    texts = [*plain[:20], "before" + blanks * 1_000_000 + "after", *plain[20:]]
    said: list[str] = []
    index = made(str(streams.json_lines(tmp_path / "mine.jsonl", texts)), tmp_path / "out", warn=said.append)
    assert (index.documents, said) == (41, [])


def test_what_is_odd_about_the_texts_for_validation_is_told_too(tmp_path: Path, vocabulary: None) -> None:
    (tmp_path / "mine" / "val").mkdir(parents=True)
    (tmp_path / "mine" / "a.txt").write_text("To be, or not to be: that is the question. " * 100)
    (tmp_path / "mine" / "val" / "b.txt").write_text("Whether 'tis nobler<|endoftext|> in the mind " * 100)
    said: list[str] = []
    made(str(tmp_path / "mine"), tmp_path / "out", warn=said.append)
    assert any("b.txt" in line and "<|endoftext|>" in line for line in said)


class Panic(BaseException):
    """As pyo3's PanicException is: no Exception."""


@pytest.fixture
def failing(vocabulary: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that panics at a text with BAD in it."""
    from types import SimpleNamespace

    from gpt2 import text as tokenising

    encoding = tokenising.gpt2_encoding()

    def encode(text: str, **settings) -> np.ndarray:
        if "BAD" in text:
            raise Panic("RuntimeError(StackOverflow)")
        return encoding.encode_to_numpy(text, **settings)

    monkeypatch.setattr(tokenising, "gpt2_encoding", lambda: SimpleNamespace(encode_to_numpy=encode))


@pytest.mark.parametrize("bad", [{0}, {7}, {199}, {3, 4, 150}, {198, 199}])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_document_that_cannot_be_tokenised_is_left_out_named_and_counted(
    kind: str, bad: set[int], tmp_path: Path, failing: None, small_batches: None
) -> None:
    plain = [text.replace("<|endoftext|>", "") for text in TEXTS[:200]]
    texts = [f"BAD {text}" if number in bad else text for number, text in enumerate(plain)]
    path = streams.WRITERS[kind](tmp_path / f"mine.{kind}", texts)
    said: list[str] = []
    index = made(str(path), tmp_path / "out", warn=said.append, val_tokens=1000)
    kept = expected([text for number, text in enumerate(texts) if number not in bad])
    assert (index.documents, index.tokens) == (200 - len(bad), len(kept))
    row = {"jsonl": "line", "parquet": "row"}[kind]
    why = "cannot be tokenised (tiktoken: RuntimeError(StackOverflow)); it is left out"
    named = [f"{path}, {row} {number + 1} {why}" for number in sorted(bad)]
    assert said == [*named, f"{len(bad)} document(s) could not be tokenised and are left out"]


def test_without_a_way_to_warn_a_document_that_cannot_be_tokenised_is_an_error(
    tmp_path: Path, failing: None
) -> None:
    path = streams.json_lines(tmp_path / "mine.jsonl", ["a", "BAD"])
    with pytest.raises(DataError, match=r"mine\.jsonl, line 2 cannot be tokenised"):
        made(str(path), tmp_path / "out")


def test_no_piece_of_a_text_is_left_out(tmp_path: Path, failing: None) -> None:
    path = streams.text(tmp_path / "mine.txt", ["a", "BAD", "c"])
    with pytest.raises(DataError, match=r"mine\.txt cannot be tokenised"):
        made(str(path), tmp_path / "out", warn=lambda _: None)


@pytest.mark.parametrize("name", ["train", "carnival", "val"])
def test_a_corpus_named_like_a_split_is_not_mistaken_for_one(
    name: str, tmp_path: Path, vocabulary: None
) -> None:
    index = made(
        str(streams.json_lines(tmp_path / f"{name}.jsonl", TEXTS[:100])), tmp_path / "out", shard_tokens=2000
    )
    ids = expected(TEXTS[:100])
    assert open_corpus(name, vocab_size=50257, path=tmp_path / "out").tokens == len(ids) - 2000
    assert open_validation(name, tmp_path / "out", vocab_size=50257).tokens == 2000
    assert index.corpus["corpus"] == name


# --- validation and limits


def test_a_corpus_own_validation_split_is_its_validation(corpus: str, tmp_path: Path) -> None:
    streams.parquet(Path(corpus) / "validation-00000.parquet", TEXTS[:10])
    index = made(corpus, tmp_path / "out")
    assert np.array_equal(llmc_reads(tmp_path / "out" / "mine_val_000000.bin"), expected(TEXTS[:10]))
    trained = [llmc_reads(tmp_path / "out" / e["file"]) for e in index.shards if e["split"] == "train"]
    assert np.array_equal(np.concatenate(trained), expected(TEXTS))
    assert index.validation["split"] == "validation"


def test_validation_can_be_the_first_tokens_of_another_corpus(corpus: str, tmp_path: Path) -> None:
    other = streams.json_lines(tmp_path / "other.jsonl", TEXTS[::-1])
    index = made(corpus, tmp_path / "out", val_corpus=str(other), val_tokens=1234)
    assert np.array_equal(llmc_reads(tmp_path / "out" / "mine_val_000000.bin"), expected(TEXTS[::-1])[:1234])
    assert index.validation["corpus"] == "other"
    assert index.tokens == len(expected(TEXTS)) + 1234


def test_the_first_tokens_are_validation_as_many_as_asked_for(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out", val_tokens=777)
    assert len(llmc_reads(tmp_path / "out" / "mine_val_000000.bin")) == 777
    assert np.array_equal(llmc_reads(tmp_path / "out" / "mine_train_000001.bin"), expected(TEXTS)[777:5777])


def test_a_corpus_within_one_shard_gives_its_first_tenth_to_validation(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out", shard_tokens=10**6)
    ids = expected(TEXTS)
    assert np.array_equal(llmc_reads(tmp_path / "out" / "mine_val_000000.bin"), ids[: len(ids) // 10])
    assert np.array_equal(llmc_reads(tmp_path / "out" / "mine_train_000001.bin"), ids[len(ids) // 10 :])
    assert len(contents(tmp_path / "out")) == 2


def test_a_corpus_that_would_be_all_validation_is_refused(corpus: str, tmp_path: Path) -> None:
    said = r"all \d+ tokens of corpus 'mine' would be validation; ask for fewer"
    with pytest.raises(DataError, match=said):
        made(corpus, tmp_path / "out", val_tokens=10**6)
    assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize("most", [5000, 5001, 12_345])
def test_no_more_tokens_are_taken_than_asked_for(most: int, corpus: str, tmp_path: Path) -> None:
    index = made(corpus, tmp_path / "out", max_tokens=most, val_tokens=1000)
    parts = [llmc_reads(tmp_path / "out" / entry["file"]) for entry in index.shards]
    assert np.array_equal(np.concatenate(parts), expected(TEXTS)[:most])


def test_progress_ends_at_the_whole_and_tells_the_time_left(
    corpus: str, tmp_path: Path, small_batches: None
) -> None:
    told: list[Prepared] = list(prepare(corpus, tmp_path / "out", shard_tokens=5000, processes=1))
    ids = expected(TEXTS)
    assert (told[-1].documents, told[-1].tokens) == (600, len(ids))
    assert [p.tokens for p in told] == sorted(p.tokens for p in told)
    assert all(p.tokens_per_second > 0 for p in told)
    half = told[len(told) // 2]
    assert half.remaining_seconds == pytest.approx((len(ids) - half.tokens) / half.tokens_per_second, rel=0.1)


# --- killed and gone on with


PROGRAM = """
import signal, sys
from pathlib import Path
import gpt2.data.corpora.encode
from gpt2.data.corpora.prepare import prepare
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has none
    gpt2.data.corpora.encode.BATCH_CHARS = 3000
    for progress in prepare(sys.argv[1], Path(sys.argv[2]), shard_tokens=1500, processes=int(sys.argv[3])):
        print(progress.tokens, flush=True)
        sys.stdin.readline()  # never ahead of who reads this
"""


def start(corpus: str, out: Path, processes: int) -> subprocess.Popen[str]:
    program = out.parent / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), corpus, str(out), str(processes)]
    own = {**os.environ, "PYTHONPATH": str(ROOT), "USE_TORCH": "0"}  # `datasets` starts in half the time
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=own)


def whole_shards(folder: Path) -> None:
    """Every shard that can be seen is whole."""
    for path in folder.glob("*.bin"):
        llmc_reads(path)


INTERRUPTED = """
import signal
from gpt2.cli.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
main()
"""


def test_ctrl_c_while_processes_start_is_one_line(corpus: str, tmp_path: Path) -> None:
    """A terminal sends it to them, too."""
    words = ["prepare", corpus, "--out", str(tmp_path / "out"), "--processes", "3"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "USE_TORCH": "0"},
        start_new_session=True,
    )
    started = psutil.Process(process.pid)
    until(lambda: any("spawn_main" in " ".join(each.cmdline()) for each in started.children()), process)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 130, said
    lines = [line for line in said.splitlines() if not line.startswith("gpt2: to train on")]
    assert lines == ["gpt2: interrupted; the same command goes on after the last whole shard"]


@pytest.mark.slow
def test_killed_again_and_again_it_writes_the_shards_of_one_never_killed(corpus: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    grown = 0
    for processes, how in ((1, signal.SIGKILL), (2, signal.SIGKILL), (2, signal.SIGINT), (2, signal.SIGKILL)):
        process = start(corpus, tmp_path / "out", processes)
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 20)):
            process.stdout.readline()
            print(file=process.stdin, flush=True)
        time.sleep(rng.random() * 0.02)  # at any point of a batch
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(how)
        process.communicate(timeout=600)
        assert process.returncode == -how
        assert not psutil.wait_procs(workers, timeout=120)[1]  # none is left behind
        whole_shards(tmp_path / "out")
        index = read_index(tmp_path / "out")
        grown += bool(index and index.shards)
    assert grown >= 2  # it went on from whole shards
    process = start(corpus, tmp_path / "out", 2)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    made(corpus, tmp_path / "never", shard_tokens=1500)
    assert contents(tmp_path / "out") == contents(tmp_path / "never")
    assert read_index(tmp_path / "out") == read_index(tmp_path / "never")
    assert list((tmp_path / "out").glob("*.part")) == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
@pytest.mark.parametrize("apart", [False, True])
def test_left_off_after_any_batch_it_writes_the_same_shards(
    kind: str, apart: bool, tmp_path: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt2.data.corpora.encode.BATCH_CHARS", 1500)
    monkeypatch.setattr("gpt2.data.corpora.readers.PIECE_CHARS", 700)
    place = streams.folder(tmp_path / "mine", TEXTS[:200], 3, kind)
    if apart:
        streams.WRITERS[kind](place / f"val.{kind}", TEXTS[200:230])
    made(str(place), tmp_path / "never", shard_tokens=1000)
    for after in (1, 2, 3, 5, 8, 13, 21):
        told = prepare(str(place), tmp_path / "out", shard_tokens=1000, processes=1)
        for _ in range(after):
            next(told, None)
        told.close()  # type: ignore[attr-defined]
        whole_shards(tmp_path / "out")
    made(str(place), tmp_path / "out", shard_tokens=1000)
    assert contents(tmp_path / "out") == contents(tmp_path / "never")


def test_asking_again_for_what_is_finished_does_nothing(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert list(prepare(corpus, tmp_path / "out", shard_tokens=5000, processes=1)) == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("change", ["settings", "files"])
@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_or_files_in_the_same_folder_are_refused(
    change: str, finished: bool, corpus: str, tmp_path: Path
) -> None:
    told = prepare(corpus, tmp_path / "out", shard_tokens=5000, processes=1)
    for progress in told:
        if "000001" in progress.file and not finished:  # then the shard before it is whole
            break
    told.close()  # type: ignore[attr-defined]
    if change == "settings":
        said = "was prepared with shard_tokens 5000, not 6000; ask for the same"
        with pytest.raises(DataError, match=said):
            made(corpus, tmp_path / "out", shard_tokens=6000)
    else:
        streams.parquet(Path(corpus) / "train-00002.parquet", TEXTS[:7])
        with pytest.raises(DataError, match="was prepared from other files"):
            made(corpus, tmp_path / "out")


def blue_to_teal(folder: Path) -> None:
    text = folder / "notes.txt"
    text.write_text(text.read_text().replace("blue", "teal"))


def another_of_the_same_name(folder: Path) -> None:
    text = folder / "notes.txt"
    size = text.stat().st_size
    text.unlink()
    text.write_text("x" * size)


def two_lines_exchanged(folder: Path) -> None:
    text = folder / "notes.txt"
    first, second, *rest = text.read_text().splitlines()
    text.write_text("\n".join([second, first, *rest]) + "\n")


@pytest.mark.parametrize("change", [blue_to_teal, another_of_the_same_name, two_lines_exchanged])
@pytest.mark.parametrize("what", ["file", "folder"])
def test_another_text_of_equal_name_size_and_time_is_not_called_ready(
    change: Callable[[Path], None], what: str, tmp_path: Path, vocabulary: None
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "notes.txt").write_text("".join(f"line {i} is blue\n" for i in range(300)))
    asked = str(folder / "notes.txt" if what == "file" else folder)
    then = (folder / "notes.txt").stat()
    made(asked, tmp_path / "out")
    change(folder)
    os.utime(folder / "notes.txt", ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(DataError, match="was prepared from other files"):
        made(asked, tmp_path / "out")


def test_a_shard_swapped_after_its_preparation_is_not_trained_on(corpus: str, tmp_path: Path) -> None:
    index = made(corpus, tmp_path / "out")
    path = tmp_path / "out" / index.shards[-1]["file"]
    content = bytearray(path.read_bytes())
    content[2000:2002] = b"\x07\x00"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name} is not what gpt2 prepare wrote"):
        open_corpus("mine", vocab_size=50257, path=tmp_path / "out")


def test_a_shard_that_no_preparation_wrote_is_not_trained_on(corpus: str, tmp_path: Path) -> None:
    index = made(corpus, tmp_path / "out")
    shard = tmp_path / "out" / index.shards[-1]["file"]
    shutil.copy(shard, shard.with_name(f"{index.name}_train_000099.bin"))
    taken = open_corpus("mine", vocab_size=50257, path=tmp_path / "out").tokens
    assert taken == sum(entry["tokens"] for entry in index.shards if entry["split"] == "train")


def test_an_attempt_that_came_to_nothing_is_in_nobody_s_way(tmp_path: Path, vocabulary: None) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "one"}\n{"text": \n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2"):
        made(str(folder), tmp_path / "out")
    (folder / "a.jsonl").write_text('{"text": "one, two, three, four, five, six, seven"}\n')
    assert made(str(folder), tmp_path / "out").finished


@pytest.mark.parametrize("missing", [True, False])
def test_what_is_finished_and_no_longer_whole_is_said_when_asked_for_again(
    missing: bool, corpus: str, tmp_path: Path
) -> None:
    index = made(corpus, tmp_path / "out")
    shard = tmp_path / "out" / index.shards[-1]["file"]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.unlink() if missing else shard.write_bytes(content)
    said = rf"{shard.name} is missing or damaged; prepare anew into another folder"
    with pytest.raises(DataError, match=said):
        made(corpus, tmp_path / "out")


def test_a_shard_that_has_gone_is_said(corpus: str, tmp_path: Path) -> None:
    told = prepare(corpus, tmp_path / "out", shard_tokens=1000, processes=1)
    for progress in told:
        if "000002" in progress.file:
            break
    told.close()  # type: ignore[attr-defined]
    (tmp_path / "out" / "mine_train_000001.bin").unlink()
    with pytest.raises(DataError, match=r"mine_train_000001\.bin is missing"):
        made(corpus, tmp_path / "out", shard_tokens=1000)


def test_broken_off_after_its_first_shard_was_in_place_and_before_the_index_told_it_goes_on(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken_off(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gpt2.data.corpora.prepare._Job._keep", broken_off)
        with pytest.raises(KeyboardInterrupt):
            made(corpus, tmp_path / "out")
    assert list((tmp_path / "out").glob("*.bin"))
    made(corpus, tmp_path / "out")
    made(corpus, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("theirs_train_000001.bin", "1234", r"holds theirs_train_000001\.bin and no index\.json"),
        ("val.BIN", "mine", r"holds val\.BIN and no index\.json"),
        ("index.json", "{", r"index\.json.*prepare the corpus into another folder"),
        ("index.json", '{"version": 99}', r"index\.json.*prepare the corpus into another folder"),
        ("index.json", "[]", r"index\.json.*prepare the corpus into another folder"),
    ],
)
def test_a_folder_of_other_shards_or_a_damaged_or_foreign_index_is_refused(
    file: str, content: str, complaint: str, corpus: str, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / file).write_text(content)
    with pytest.raises(DataError, match=complaint):
        made(corpus, tmp_path / "out")


def test_a_second_preparation_of_the_same_folder_is_refused(corpus: str, tmp_path: Path) -> None:
    told = prepare(corpus, tmp_path / "out", shard_tokens=5000, processes=1)
    next(told)
    with pytest.raises(DataError, match="another preparation is writing to"):
        made(corpus, tmp_path / "out")
    told.close()  # type: ignore[attr-defined]


# --- what goes wrong


def test_a_full_disk_is_one_line_and_what_is_whole_stays(
    small_disk: Path, tmp_path: Path, vocabulary: None
) -> None:
    corpus = str(streams.json_lines(tmp_path / "large.jsonl", streams.documents(9000)))
    with pytest.raises(
        DataError, match=r"cannot write .*\(No space left on device\); what is whole stays"
    ) as said:
        made(corpus, small_disk / "out", shard_tokens=100_000)
    assert "\n" not in str(said.value)
    whole_shards(small_disk / "out")
    index = read_index(small_disk / "out")
    assert index is not None
    assert len(index.shards) >= 3
    assert list((small_disk / "out").glob("*.part")) == []


def test_once_there_is_room_it_goes_on_after_a_full_disk(
    small_disk: Path, tmp_path: Path, vocabulary: None
) -> None:
    corpus = str(streams.json_lines(tmp_path / "large.jsonl", streams.documents(2000)))
    (small_disk / "filler").write_bytes(bytes(900_000))
    with pytest.raises(DataError, match="No space left"):
        made(corpus, small_disk / "out", shard_tokens=30_000)
    (small_disk / "filler").unlink()
    made(corpus, small_disk / "out", shard_tokens=30_000)
    made(corpus, tmp_path / "never", shard_tokens=30_000)
    assert contents(small_disk / "out") == contents(tmp_path / "never")


def test_where_no_process_can_be_started_is_one_line(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("multiprocessing.popen_spawn_posix.util.spawnv_passfds", refuse)
    with pytest.raises(DataError, match="cannot be started: Too many open files; raise the limit"):
        list(prepare(corpus, tmp_path / "out", processes=2))


def test_where_too_few_threads_can_be_started_for_its_processes_is_one_line(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a container's limit on processes, within which the pool would wait for ever."""
    genuine, started = threading.Thread.start, list[threading.Thread]()

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 5:
            raise RuntimeError("can't start new thread")
        genuine(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(DataError, match="no process or thread could be started; raise the limit"):
        list(prepare(corpus, tmp_path / "out", processes=2))
    assert not any(thread.is_alive() for thread in started)


def test_a_worker_ended_from_outside_is_one_line(corpus: str, tmp_path: Path, small_batches: None) -> None:
    told = prepare(corpus, tmp_path / "out", processes=2, shard_tokens=1500)
    next(told)
    for child in psutil.Process().children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
    with pytest.raises(DataError, match=r"a process that tokenised was ended from outside"):
        for _ in told:
            pass


def test_a_bad_line_ends_it_by_name_and_what_is_whole_stays(tmp_path: Path, vocabulary: None) -> None:
    path = streams.json_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes() + b"{")
    with pytest.raises(DataError, match=r"a\.jsonl, line 601: no JSON"):
        made(str(path), tmp_path / "out")
    whole_shards(tmp_path / "out")


@pytest.mark.parametrize("name", ["shard_tokens", "max_tokens", "val_tokens"])
def test_a_number_below_one_is_refused(name: str, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{name.replace('_', ' ')} must be at least 1, not 0"):
        made(corpus, tmp_path / "out", **{name: 0})


def test_a_corpus_that_is_not_prepared_has_no_nanogpt_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no finished preparation"):
        to_nanogpt(tmp_path, tmp_path / "nano")


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_a_corpus_that_changes_while_it_is_prepared_is_refused(
    kind: str, tmp_path: Path, vocabulary: None
) -> None:
    path = streams.WRITERS[kind](tmp_path / f"mine.{kind}", TEXTS)
    told = prepare(str(path), tmp_path / "out", shard_tokens=1000, processes=1)
    next(told)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"word1", b"WORD2"))
    with pytest.raises(DataError, match=rf"mine\.{kind} changed while it was read"):
        list(told)
    index = read_index(tmp_path / "out")
    assert index is not None
    assert not index.finished
    with pytest.raises(DataError, match="is not prepared to its end"):
        open_corpus("mine", vocab_size=50257, path=tmp_path / "out")


def test_a_corpus_that_goes_while_it_is_prepared_is_refused(tmp_path: Path, vocabulary: None) -> None:
    path = streams.text(tmp_path / "mine.txt", TEXTS)
    told = prepare(str(path), tmp_path / "out", shard_tokens=1000, processes=1)
    next(told)
    path.unlink()
    with pytest.raises(DataError, match=r"mine\.txt changed while it was read \(No such file or directory\)"):
        list(told)


@pytest.mark.parametrize(
    ("columns", "taken"),
    [(["prompt", "completion"], "completion"), (["text", "completion"], "completion"), (["text"], "text")],
    ids="+".join,
)
def test_another_validation_corpus_gives_the_same_column_where_it_has_it(
    columns: list[str], taken: str, tmp_path: Path, vocabulary: None
) -> None:
    for name, own in (("a", ["prompt", "completion"]), ("b", columns)):
        rows = [json.dumps({column: f"{column} {n}" for column in own}) for n in range(300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    told: list[str] = []
    asked = {"text_column": "completion", "val_corpus": str(tmp_path / "b.jsonl"), "tell": told.append}
    made(str(tmp_path / "a.jsonl"), tmp_path / "out", **asked)
    assert told == ["to train on: a.jsonl, column 'completion'", f"for validation: b.jsonl, column {taken!r}"]


def test_another_validation_corpus_whose_column_cannot_be_told_is_refused_by_the_column_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"completion": "a"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "answer": "b"}')
    asked = {"text_column": "completion", "val_corpus": str(tmp_path / "b.jsonl")}
    with pytest.raises(DataError, match=r"b\.jsonl has no column 'completion', but prompt, answer"):
        made(str(tmp_path / "a.jsonl"), tmp_path / "out", **asked)


@pytest.mark.parametrize("name", ["synthetic.txt", "synthetic.jsonl"])
def test_a_corpus_named_as_the_generated_one_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a"}')
    with pytest.raises(
        DataError, match="a corpus called synthetic is taken for the generated one; rename it"
    ):
        made(str(tmp_path / name), tmp_path / "out")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("notes.txt", "notes"),
        (".notes.txt", "notes"),
        ("my.notes.v2.txt", "my"),
        (".txt", "txt"),
        ("my.texts", "my.texts"),
    ],
)
def test_a_corpus_is_called_after_its_file_or_folder(path: str, name: str, tmp_path: Path) -> None:
    (tmp_path / path).mkdir() if path == "my.texts" else (tmp_path / path).touch()
    assert stem_of(tmp_path / path) == name


def test_a_link_to_a_file_gives_its_own_name_and_one_to_a_folder_the_folder_s(tmp_path: Path) -> None:
    (tmp_path / "4d7a21").touch()
    (tmp_path / "book.txt").symlink_to("4d7a21")
    (tmp_path / "books").mkdir()
    (tmp_path / "latest").symlink_to("books")
    assert stem_of(tmp_path / "book.txt") == "book"
    assert stem_of(tmp_path / "latest") == "books"


def test_nanogpt_s_files_cannot_go_into_a_file(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    (tmp_path / "there").touch()
    with pytest.raises(DataError, match=r"cannot write into .*there \(File exists\)"):
        to_nanogpt(tmp_path / "out", tmp_path / "there")


@pytest.mark.parametrize("name", ["train.bin.part", "val.bin.part"])
def test_a_file_called_like_what_is_being_written_for_nanogpt_stays(
    name: str, corpus: str, tmp_path: Path
) -> None:
    made(corpus, tmp_path / "out")
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / name).write_text("mine")
    to_nanogpt(tmp_path / "out", tmp_path / "nano")
    assert (tmp_path / "nano" / name).read_text() == "mine"


def test_nanogpt_s_files_of_another_corpus_are_not_replaced(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    (tmp_path / "nano").mkdir()
    (tmp_path / "nano" / "val.bin").write_bytes(b"another's")
    with pytest.raises(DataError, match=r"val\.bin is there already and holds other tokens"):
        to_nanogpt(tmp_path / "out", tmp_path / "nano")
    assert [file.name for file in (tmp_path / "nano").iterdir()] == ["val.bin"]
    assert (tmp_path / "nano" / "val.bin").read_bytes() == b"another's"


def test_nanogpt_s_files_of_the_same_preparation_are_left_as_they_are(corpus: str, tmp_path: Path) -> None:
    made(corpus, tmp_path / "out")
    to_nanogpt(tmp_path / "out", tmp_path / "nano")
    before = fingerprint(tmp_path / "nano" / "train.bin")
    (tmp_path / "nano" / "val.bin").unlink()
    to_nanogpt(tmp_path / "out", tmp_path / "nano")
    assert fingerprint(tmp_path / "nano" / "train.bin") == before
    assert np.array_equal(np.fromfile(tmp_path / "nano" / "val.bin", dtype=np.uint16), expected(TEXTS)[:5000])


def test_a_preparation_is_not_begun_for_a_folder_that_has_nanogpt_s_files(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(b"another's")
    with pytest.raises(DataError, match="is there already; remove it, or give --nanogpt another folder"):
        assert_free_for_nanogpt(tmp_path)


@pytest.mark.parametrize("given", ["valid.jsonl", "my_test.txt"])
def test_a_file_that_is_for_another_split_by_its_name_is_told(given: str, tmp_path: Path) -> None:
    line = json.dumps({"text": "To be, or not to be. " * 300}) + "\n"
    (tmp_path / given).write_text(line * 3)
    told: list[str] = []
    list(prepare(str(tmp_path / given), tmp_path / "out", processes=1, warn=told.append))
    assert any(line.startswith(f"{given} is trained on, which by its name is for") for line in told)


def test_a_text_that_is_trained_and_validated_on_is_told(corpus: str, tmp_path: Path) -> None:
    told: list[str] = []
    list(prepare(corpus, tmp_path / "out", val_corpus=corpus, processes=1, warn=told.append))
    assert any("trained on and validated on" in line for line in told)


def test_a_corpus_in_a_pipe_is_refused_with_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no file and no folder; write its text into a file first"):
        made(str(tmp_path / "pipe"), tmp_path / "out")


def test_a_file_called_like_a_shard_that_is_being_written_stays(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine_train_000001.bin.part").write_text("mine")
    made(corpus, tmp_path / "out")
    assert (tmp_path / "out" / "mine_train_000001.bin.part").read_text() == "mine"


def test_what_a_killed_preparation_was_writing_is_removed(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    torn = tmp_path / "out" / "mine_train_000001.bin-0123abcd.part"
    torn.touch()
    made(corpus, tmp_path / "out")
    assert not torn.exists()

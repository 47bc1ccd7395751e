"""Batches straight from a corpus: any stop gone on from, any number of ranks, a network that breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streams
from places import ROOT

import gpt2.data.corpora.stream
from gpt2.config.toggles import Toggles
from gpt2.data.corpora.sources import Documents, open_documents
from gpt2.data.corpora.stream import KEPT, StreamedBatches, hold_out
from gpt2.files.cache import DataError
from gpt2.prefetch import MOST_AHEAD, Prefetched

TEXTS = streams.documents(300)
EOT = 50256
T, SEQUENCES = 16, 32
"""Length of a sequence, and sequences of a step: an epoch is some 40 steps."""


@pytest.fixture(params=["parquet", "jsonl"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, vocabulary: None) -> str:
    return str(streams.folder(tmp_path / "mine", TEXTS, 4, request.param))


def stream(corpus: str | Documents, *, seed: int = 3, block: int = 37, **options: Any) -> StreamedBatches:
    documents = open_documents(corpus) if isinstance(corpus, str) else corpus
    return StreamedBatches(
        documents, seed=seed, seq_len=T, tokens_per_step=T * SEQUENCES, block_documents=block, **options
    )


def read(batches: StreamedBatches, steps: range) -> list[np.ndarray]:
    return [batches.sequences(step, 0, SEQUENCES)[0] for step in steps]


def ids_of(batches: StreamedBatches, steps: int) -> np.ndarray:
    return np.concatenate([x.reshape(-1) for x in read(batches, range(steps))])


def two_epochs(batches: StreamedBatches, tokens: int) -> list[list[tuple[int, ...]]]:
    """The documents of the first two epochs, each of so many tokens."""
    ids = ids_of(batches, 2 * tokens // (T * SEQUENCES) + 1)
    return [documents_of(ids[at : at + tokens]) for at in (0, tokens)]


def documents_of(ids: np.ndarray) -> list[tuple[int, ...]]:
    begins = np.flatnonzero(ids == EOT)
    return [tuple(ids[a:b].tolist()) for a, b in pairwise([*begins, len(ids)])]


def expected() -> list[tuple[int, ...]]:
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    return [(EOT, *encoding.encode_ordinary(text)) for text in TEXTS]


# --- what comes


def test_targets_are_one_token_ahead_and_steps_go_straight_on(corpus: str) -> None:
    batches = stream(corpus)
    rows = [batches.sequences(step, 0, SEQUENCES) for step in range(5)]
    assert all(x.shape == y.shape == (SEQUENCES, T) and x.dtype == y.dtype == np.int64 for x, y in rows)
    x, y = (np.concatenate([row[i].reshape(-1) for row in rows]) for i in (0, 1))
    assert np.array_equal(x[1:], y[:-1])


def test_an_epoch_has_every_document_once_and_the_next_another_order(corpus: str) -> None:
    wanted = expected()
    first, second = two_epochs(stream(corpus), sum(map(len, wanted)))
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != wanted
    assert first != second


def test_one_file_in_one_block_has_another_order_in_the_next_epoch(tmp_path: Path, vocabulary: None) -> None:
    path = str(streams.parquet(tmp_path / "one.parquet", TEXTS[:60]))
    wanted = expected()[:60]
    first, second = two_epochs(stream(path, block=60), sum(map(len, wanted)))
    assert sorted(first) == sorted(second) == sorted(wanted)
    assert first != second


def test_files_come_in_another_order_in_the_next_epoch(corpus: str) -> None:
    wanted = expected()
    epochs = two_epochs(stream(corpus, block=1), sum(map(len, wanted)))  # in the order of their files
    files = [wanted[first : first + 75] for first in range(0, 300, 75)]
    orders = [[files.index(epoch[first : first + 75]) for first in range(0, 300, 75)] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == [0, 1, 2, 3]
    assert orders[0] != orders[1]


def test_documents_are_shuffled_within_blocks_of_as_many_as_asked_for(
    tmp_path: Path, vocabulary: None
) -> None:
    path = str(streams.parquet(tmp_path / "one.parquet", TEXTS))
    ids = ids_of(stream(path, block=50), 25)
    came, wanted = documents_of(ids), expected()
    assert sorted(came[:50]) == sorted(wanted[:50])
    assert sorted(came[50:100]) == sorted(wanted[50:100])
    assert came[:50] != wanted[:50]


def test_long_documents_end_a_block_early(
    tmp_path: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt2.data.corpora.stream, "BLOCK_CHARS", 2000)
    batches = stream(str(streams.parquet(tmp_path / "one.parquet", TEXTS)), block=10**6)
    read(batches, range(12))
    assert batches.state(12)["block"] >= 5


@pytest.mark.parametrize("other", ["seed", "step"])
def test_the_seed_and_the_step_decide_the_batch(other: str, corpus: str) -> None:
    a, b = stream(corpus), stream(corpus, seed=4 if other == "seed" else 3)
    x = a.sequences(2, 0, SEQUENCES)[0]
    assert np.array_equal(b.sequences(2, 0, SEQUENCES)[0], x) == (other == "step")
    assert not np.array_equal(a.sequences(3, 0, SEQUENCES)[0], x)


def test_a_text_file_is_shuffled_piece_by_piece(shakespeare: Path) -> None:
    import tiktoken

    ids = ids_of(stream(str(shakespeare)), 338_026 // 512)
    assert (ids == EOT).sum() == 1
    begin = int(np.flatnonzero(ids == EOT)[0])
    text = shakespeare.read_text(encoding="utf-8")
    assert text.startswith(tiktoken.get_encoding("gpt2").decode(ids[begin + 1 : begin + 1000].tolist()))


def test_what_is_held_out_for_validation_never_comes_in_any_epoch(corpus: str) -> None:
    wanted = expected()
    held = hold_out(open_documents(corpus), 2000)
    ids = np.array([token for document in wanted for token in document])[:2000]
    assert held.corpus.tokens == 2000
    assert np.array_equal(held.corpus.read(0, 2000), ids)
    apart = len(documents_of(ids))  # the last of them is held out whole
    rest = [document for document in wanted if document not in set(wanted[:apart])]
    length = sum(map(len, rest))
    steps = 2 * length // (T * SEQUENCES) + 1
    batches = stream(corpus, held_out=held)
    came = ids_of(batches, steps)
    for at in (0, length):
        assert sorted(documents_of(came[at : at + length])) == sorted(rest)
    with pytest.raises(DataError, match="is for other tokens held out for validation"):
        stream(corpus, state=batches.state(steps))


def test_of_one_text_little_more_is_held_out_than_was_asked_for(shakespeare: Path) -> None:
    held = hold_out(open_documents(str(shakespeare)), 1025)
    whole = tokens_of_text(shakespeare)
    batches = stream(str(shakespeare), held_out=held)
    wanted = (len(whole) - 6000) // (T * SEQUENCES)
    came = ids_of(batches, wanted)
    assert batches.state(wanted)["epoch"] == 0
    assert len(set(came.tolist())) > 0.9 * len(set(whole))


def tokens_of_text(path: Path) -> list[int]:
    import tiktoken

    return tiktoken.get_encoding("gpt2").encode_ordinary(path.read_text(encoding="utf-8"))


def test_more_cannot_be_held_out_than_there_is(corpus: str) -> None:
    with pytest.raises(DataError, match=r"has \d+ tokens, fewer than the 1000000 to hold out"):
        hold_out(open_documents(corpus), 10**6)
    everything = hold_out(open_documents(corpus), sum(map(len, expected())))
    with pytest.raises(DataError, match="no document that is not held out"):
        stream(corpus, held_out=everything).sequences(0, 0, 1)


# --- ranks and accumulation


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(ranks: int, corpus: str) -> None:
    from gpt2.training.train import micro_batches

    whole = read(stream(corpus), range(4))
    toggles = Toggles(world_size=ranks, micro_batch_size=4, grad_accum_steps=SEQUENCES // 4 // ranks)
    A = toggles.grad_accum_steps
    streamed: Any = [stream(corpus) for _ in range(ranks)]
    micro = [micro_batches(each, toggles, rank=rank) for rank, each in enumerate(streamed)]
    shares = [Prefetched(each, _same) for each in micro]
    for step in range(4):
        taken = [[next(share)[0].numpy() for _ in range(A)] for share in shares]
        together = np.stack(taken, axis=1).reshape(-1, T)  # micro-steps outermost, then ranks
        assert np.array_equal(together, whole[step])


def _same(item: Any) -> Any:
    return item


# --- positions


def test_from_any_step_it_goes_on_with_the_batches_of_one_never_stopped(corpus: str) -> None:
    steps = range(100)
    never = stream(corpus)
    states, rows = [], []
    for step in steps:
        states.append(json.dumps(never.state(step)))
        rows.append(never.sequences(step, 0, SEQUENCES))
    assert json.loads(states[-1])["epoch"] >= 2
    rng = np.random.default_rng(0)
    for stop in [1, *rng.integers(2, 60, 4)]:
        again = stream(corpus, state=json.loads(states[stop]))
        later = int(stop + rng.integers(1, 15))
        for step in range(stop, later):
            x, y = again.sequences(step, 0, SEQUENCES)
            assert np.array_equal(x, rows[step][0])
            assert np.array_equal(y, rows[step][1])
        once_more = stream(corpus, state=json.loads(json.dumps(again.state(later))))
        for step in range(later, later + 25):
            assert np.array_equal(once_more.sequences(step, 0, SEQUENCES)[1], rows[step][1])


def test_the_position_of_a_step_is_known_while_a_loader_is_ahead(corpus: str) -> None:
    batches = stream(corpus)
    before = {}
    for step in range(KEPT + 5):
        before[step] = batches.state(step)
        batches.sequences(step, 0, 1)
    assert all(batches.state(step) == before[step] for step in range(5, KEPT + 5))
    with pytest.raises(AssertionError, match="position before step 4 is not kept"):
        batches.state(4)


def test_the_next_step_s_position_is_known_while_a_gpu_s_loader_is_as_far_ahead_as_it_goes(
    corpus: str,
) -> None:
    batches = stream(corpus)
    before = batches.state(0)
    for step in range(MOST_AHEAD + 2):  # ready, one that waits for room, and one in the making
        batches.sequences(step, 0, 1)
    assert batches.state(0) == before


def test_one_step_may_be_left_out(corpus: str) -> None:
    straight = read(stream(corpus), range(6))
    assert np.array_equal(stream(corpus).sequences(5, 0, SEQUENCES)[0], straight[5])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("seed", "is for seed 3, not 4"),
        ("block", "block_documents 37, not 40"),
        ("files", r"for other files: train-00000.* came, went or changed"),
        ("name", r"stream is for corpus .*, not .*renamed; go on with the same corpus and settings"),
    ],
)
def test_a_position_in_another_stream_is_refused(change: str, complaint: str, corpus: str) -> None:
    batches = stream(corpus)
    read(batches, range(3))
    state = batches.state(3)
    if change == "files":
        streams.folder(
            Path(corpus), TEXTS[1:], 4, "parquet" if next(Path(corpus).glob("*.parquet"), None) else "jsonl"
        )
    if change == "name":
        corpus = str(Path(corpus).rename(Path(corpus).with_name("renamed")))
    changed: dict[str, Any] = {"seed": {"seed": 4}, "block": {"block": 40}}.get(change, {})
    with pytest.raises(DataError, match=complaint):
        stream(corpus, state=state, **changed)


# --- what goes wrong


def test_a_network_that_breaks_in_the_middle_ends_it_in_one_line_and_the_position_goes_on(
    tmp_path: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets.config

    for what in ("READ", "OPEN"):
        monkeypatch.setattr(datasets.config, f"STREAMING_{what}_MAX_RETRIES", 2)
        monkeypatch.setattr(datasets.config, f"STREAMING_{what}_RETRY_INTERVAL", 0.05)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    place = streams.folder(tmp_path / "mine", TEXTS, 4)
    never = read(stream(str(place)), range(50))
    server = streams.Server(place)
    files = [f"{server.url}/{file.name}" for file in sorted(place.glob("*.parquet"))]

    def over_network() -> Documents:
        return Documents("mine", "train", files, "text", {"corpus": "mine"})

    broken = stream(over_network())
    states = [broken.state(0)]

    def until_it_breaks() -> None:
        for step in range(50):
            assert np.array_equal(broken.sequences(step, 0, SEQUENCES)[0], never[step])
            states.append(broken.state(step + 1))
            if not step:
                server.given, server.most_files = set(), 1

    with pytest.raises(DataError, match=r"cannot be read any further.*nothing is lost.*checkpoint") as said:
        until_it_breaks()
    assert "\n" not in str(said.value)
    last = len(states) - 1
    assert 0 < last < 49
    server.most_files = None
    again = read(stream(over_network(), state=states[-1]), range(last, 50))
    assert all(np.array_equal(a, b) for a, b in zip(again, never[last:], strict=True))
    server.stop()


def test_a_damaged_file_is_said_where_its_batch_is_asked_for(tmp_path: Path, vocabulary: None) -> None:
    place = streams.folder(tmp_path / "mine", TEXTS, 2, "jsonl")
    for file in place.iterdir():
        file.write_bytes(file.read_bytes() + b"{")
    batches = stream(str(place))
    with pytest.raises(DataError, match=r"train-0000\d\.jsonl, line 151: no JSON"):
        read(batches, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_process_ends_in_order_though_its_stream_is_still_read(
    kind: str, tmp_path: Path, vocabulary: None
) -> None:
    corpus = str(streams.folder(tmp_path / "mine", TEXTS * 20, 4, kind))
    program = (
        "from gpt2.data.corpora.sources import open_documents\n"
        "from gpt2.data.corpora.stream import StreamedBatches\n"
        f"documents = open_documents({corpus!r})\n"
        "b = StreamedBatches(documents, seq_len=16, tokens_per_step=64, seed=1, block_documents=50)\n"
        "print(b.sequences(0, 0, 4)[0].shape, flush=True)\n"
        f"half_read = iter(open_documents({corpus!r})); next(half_read); half_read.close()"
    )
    own = {**os.environ, "USE_TORCH": "0"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, cwd=ROOT, env=own
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "(4, 16)\n", "")


def test_a_line_half_written_while_it_is_trained_on_is_told_as_a_change_and_not_as_damage(
    tmp_path: Path, vocabulary: None
) -> None:
    place = streams.folder(tmp_path / "mine", TEXTS * 20, 2, "jsonl")
    batches = stream(str(place))
    read(batches, range(1))
    for file in place.iterdir():
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"train-0000\d\.jsonl changed while it was read"):
        read(batches, range(1, 4000))


def test_a_file_that_changes_while_it_is_trained_on_is_told_at_the_end_of_the_epoch(corpus: str) -> None:
    batches = stream(corpus)
    read(batches, range(2))
    for file in Path(corpus).iterdir():
        file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(DataError, match=r"train-0000\d\.\w+ (changed while it was read|cannot be read)"):
        read(batches, range(2, 200))


def test_a_file_whose_name_is_no_utf_8_has_a_place_that_can_be_written_down(
    tmp_path: Path, vocabulary: None
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    batches = stream(str(path))
    first = read(batches, range(2))
    state = json.loads(json.dumps(batches.state(2), ensure_ascii=False).encode().decode())
    again = stream(str(path), state=state)
    assert np.array_equal(again.sequences(2, 0, SEQUENCES)[0], batches.sequences(2, 0, SEQUENCES)[0])
    assert len(first) == 2


def test_a_place_of_a_version_before_texts_were_cut_is_said_to_be_of_an_older_one(
    tmp_path: Path, vocabulary: None
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    batches = stream(str(tmp_path / "a.txt"))
    read(batches, range(1))
    state = batches.state(1) or {}
    del state["piece_chars"]
    with pytest.raises(DataError, match="older version, whose positions mean something else"):
        stream(str(tmp_path / "a.txt"), state=state)


def test_a_file_that_changes_within_an_epoch_is_told(tmp_path: Path, vocabulary: None) -> None:
    path = streams.json_lines(tmp_path / "mine.jsonl", TEXTS)
    batches = stream(str(path))
    read(batches, range(1))
    batches.check_unchanged()
    streams.json_lines(path, TEXTS[::-1])
    with pytest.raises(DataError, match=r"mine\.jsonl changed while it was read"):
        batches.check_unchanged()


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        streams.json_lines(tmp_path / folder / "part.jsonl", [f"{folder} {text}" for text in TEXTS])
    batches = stream(str(tmp_path))
    read(batches, range(1))
    streams.json_lines(tmp_path / "a" / "part.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"other files: part\.jsonl came, went or changed"):
        stream(str(tmp_path), state=batches.state(1))


def test_a_place_of_an_older_version_is_said_to_be_of_one(corpus: str) -> None:
    batches = stream(corpus)
    read(batches, range(1))
    state = json.loads(json.dumps(batches.state(1)))
    state["source"]["files"] = [[name, 1234] for name, _ in state["source"]["files"]]
    with pytest.raises(DataError, match="the checkpoint is of an older version, which kept sizes"):
        stream(corpus, state=state)

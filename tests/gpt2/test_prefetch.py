"""Items made ahead of their use, and how long their consumer waits for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from places import ROOT

from bench.run import measure
from bench.run.measure import Waiting
from gpt2.prefetch import Prefetched, how_many

PATIENCE = 20.0
"""Seconds until a thread that does nothing counts as stuck."""


def same(item: int) -> int:
    return item


def test_items_keep_their_order_and_are_prepared_in_another_thread() -> None:
    threads = set()

    def prepare(item: int) -> int:
        threads.add(threading.get_ident())
        return -item

    assert list(Prefetched(range(5), prepare)) == [0, -1, -2, -3, -4]
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_no_more_items_are_made_ahead_than_asked_for() -> None:
    made = threading.Semaphore(0)

    def endless() -> Iterator[int]:
        for number in range(10**9):
            yield number
            made.release()  # when the next one is asked for: this one is ready

    items = Prefetched(endless(), same, ahead=2)
    assert made.acquire(timeout=PATIENCE)
    assert made.acquire(timeout=PATIENCE)
    assert not made.acquire(timeout=0.2)  # two are ready, and the third waits for room
    assert next(items) == 0
    assert made.acquire(timeout=PATIENCE)


def test_how_many_items_are_made_ahead_may_depend_on_the_first_one() -> None:
    made = threading.Semaphore(0)

    def endless() -> Iterator[int]:
        for number in range(3, 10**9):
            yield number
            made.release()

    items = Prefetched(endless(), same, ahead=lambda first: first)
    assert all(made.acquire(timeout=PATIENCE) for _ in range(3))
    assert not made.acquire(timeout=0.2)
    assert next(items) == 3


@pytest.mark.parametrize(("sequences", "ahead"), [(1, 64), (4, 64), (16, 16), (64, 4), (256, 2), (1024, 2)])
def test_many_small_micro_batches_are_made_ahead_and_of_large_ones_two(sequences: int, ahead: int) -> None:
    assert how_many(sequences * 2 * 1024 * 8) == ahead  # inputs and targets of 1,024 tokens, int64


@pytest.mark.parametrize("place", ["the items", "their preparation"])
def test_an_error_in_the_thread_is_raised_where_its_item_is_taken_and_again_after(place: str) -> None:
    def items() -> Iterator[int]:
        yield 1
        if place == "the items":
            raise ValueError("no more text")
        yield 2

    def prepare(item: int) -> int:
        if item == 2:
            raise ValueError("no more text")
        return item

    prefetched = Prefetched(items(), prepare)
    assert next(prefetched) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="no more text"):
            next(prefetched)


def test_a_process_ends_though_its_endless_items_are_still_being_made() -> None:
    imports = "import itertools; from gpt2.prefetch import Prefetched"
    program = f"{imports}; print(next(Prefetched(itertools.count(), int)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        cwd=ROOT,
    )
    assert done.stdout == "0\n"


def test_what_is_made_ahead_is_not_waited_for_and_what_is_not_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, all_made = [0.0], threading.Event()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def slow() -> Iterator[int]:
        for number in range(2):
            now[0] += 5.0  # what making one takes
            yield number
        all_made.set()

    plain = Waiting(slow())
    assert list(plain) == [0, 1]
    assert plain.seconds == 10.0
    all_made.clear()
    ahead = Waiting(Prefetched(slow(), same, ahead=3))
    assert all_made.wait(PATIENCE)  # as while a step is computed
    assert list(ahead) == [0, 1]
    assert ahead.seconds == 0.0

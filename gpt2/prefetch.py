"""Fetch and prepare items of an iterator while earlier ones are in use. Imports no torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_AHEAD = 64
"""Items that Prefetched keeps ready at most, by how_many()."""
SMALL_BYTES = 4 << 20
"""What these may hold together before there are fewer of them."""


def how_many(item_bytes: int) -> int:
    """Return how many items of this size to keep ready: many where they are small, and at least 2.

    At a small batch a step takes less time than the thread now and then takes for one item, for want of
    Python's lock or at the start of an epoch.
    """
    return max(2, min(MOST_AHEAD, SMALL_BYTES // item_bytes))


class Prefetched(Iterator[T], Generic[T]):
    """Items of an iterator, passed through `prepare` by a thread that keeps up to `ahead` of them ready.

    ahead: a number, or a function that returns it for the first prepared item. Exceptions in the thread, and
    the end of the items, are raised here after all items before them.
    """

    def __init__(
        self, items: Iterable[T], prepare: Callable[[T], T], *, ahead: int | Callable[[T], int] = 2
    ) -> None:
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
        self._end: BaseException | None = None
        # A daemon thread, so that it ends with the process even if items are left.
        work = (items, prepare, ahead)
        threading.Thread(target=self._work, args=work, name="prefetch", daemon=True).start()

    def _work(self, items: Iterable[T], prepare: Callable[[T], T], ahead: int | Callable[[T], int]) -> None:
        try:
            for number, item in enumerate(items):
                prepared = prepare(item)
                if number == 0:  # before anything is put
                    self._ready.maxsize = ahead(prepared) if callable(ahead) else ahead
                self._ready.put((prepared, None))
            self._ready.put((None, StopIteration()))
        except BaseException as error:
            self._ready.put((None, error))

    def __next__(self) -> T:
        if self._end is None:
            item, self._end = self._ready.get()
        if self._end is not None:
            raise self._end
        return item  # type: ignore[return-value]


class Waiting(Iterator[T]):
    """An iterator that measures how long its consumer waits for it, in seconds."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start

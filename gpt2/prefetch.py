"""Fetch and prepare items of an iterator while earlier ones are in use. Imports no torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetched(Iterator[T], Generic[T]):
    """Items of an iterator, each passed through `prepare`, by a thread that keeps up to `ahead` of them ready.

    Exceptions in the thread, and the end of the items, are raised here after all items before them.
    """

    def __init__(self, items: Iterable[T], prepare: Callable[[T], T], *, ahead: int = 2) -> None:
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=ahead)
        self._end: BaseException | None = None
        # A daemon thread, so that it ends with the process even if items are left.
        threading.Thread(target=self._work, args=(items, prepare), name="prefetch", daemon=True).start()

    def _work(self, items: Iterable[T], prepare: Callable[[T], T]) -> None:
        try:
            for item in items:
                self._ready.put((prepare(item), None))
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

"""Take items from an iterator, and prepare them, while the item before them is worked on. Imports no torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetched(Iterator[T], Generic[T]):
    """The items of an iterator, each through `prepare`, in a thread that keeps `ahead` of them ready.

    What goes wrong there, or the end of the items, is raised here, once all items before it were taken.
    """

    def __init__(self, items: Iterable[T], prepare: Callable[[T], T], *, ahead: int = 2) -> None:
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=ahead)
        self._end: BaseException | None = None
        # A daemon: it ends with the process, whether or not all items were taken.
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
    """An iterator that adds up the time its consumer waits for it."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.seconds += time.perf_counter() - start

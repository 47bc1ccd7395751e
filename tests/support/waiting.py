"""Waits for conditions, and clocks that a test turns on: nothing here counts on how fast a machine is."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from bench.records.record import progress_path

T = TypeVar("T")

PATIENCE = 120.0
"""Seconds after which what is waited for counts as never to come; a machine may halt for some of them."""


def until(found: Callable[[], T | None], process: subprocess.Popen[Any] | None = None) -> T:
    """Wait for a condition; returns what it found.

    process: what is to bring it about. Raises AssertionError where that ends before, and after PATIENCE.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        ended = process is not None and process.poll() is not None
        if result := found():
            return result
        assert not ended, f"it ended before, with exit code {process and process.returncode}"
        assert time.monotonic() < deadline, f"it did not happen within {PATIENCE:g} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether no process of this id runs; one that nobody has waited for yet counts as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def await_gone(*pids: int) -> None:
    """Wait until these processes have ended."""
    until(lambda: all(map(is_gone, pids)))


def said_in(path: Path) -> str:
    """What a process has written into this file, once it has."""
    return until(lambda: path.read_text() if path.exists() else None)


class Clock:
    """In place of the module `time` in a module under test: an hour passes at once when `over` holds.

    Sleeps take their time, so that processes get on meanwhile.
    """

    def __init__(self, over: Callable[[], object] = lambda: False) -> None:
        self._over = over
        self._passed = 0.0

    def monotonic(self) -> float:
        if not self._passed and self._over():
            self._passed = 3600.0
        return 1000.0 + self._passed

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Sleepless:
    """In place of the module `time` in a module under test: sleeping turns the clock on and takes no time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# --- workers that wait to be caught

HOLDS = """
import os, re, signal, sys
from pathlib import Path

def hold(rung, marker):
    genuine = Path.write_text

    def write_text(self, data, *args, **options):
        written = genuine(self, data, *args, **options)
        if re.match('{"phase": "(warm-up|window)"', data):
            Path.write_text = genuine
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:  # once is enough: this is another process of the rung
                return written
            os.kill(os.getpid(), signal.SIGSTOP)
        return written

    Path.write_text = write_text

words = sys.orig_argv
if "bench.worker" in words and "torch.distributed.run" not in words:
    for number, rung in enumerate(os.environ["HELD_RUNGS"].split("|")):
        if rung in words and os.environ.get("RANK", "0") == os.environ["HELD_RANK"]:
            hold(rung, os.path.join(os.path.dirname(__file__), f"held-{number}"))
"""
"""A sitecustomize.py, which every Python process runs first. A worker of certain rungs stops itself when it
says that its first step is done, the first time that the rung runs: however late a test looks, it is there.
"""


def holding(folder: Path, *rungs: str, rank: int = 0) -> dict[str, str]:
    """Environment variables for a runner whose workers of these rungs stop themselves; see held()."""
    place = folder / "holds"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(HOLDS)
    paths = filter(None, (str(place), os.environ.get("PYTHONPATH")))
    return {"PYTHONPATH": os.pathsep.join(paths), "HELD_RUNGS": "|".join(rungs), "HELD_RANK": str(rank)}


@contextlib.contextmanager
def held(runner: subprocess.Popen[str], rung: str, ranks: int = 1) -> Iterator[list[psutil.Process]]:
    """The workers of a rung, lowest rank first; one of them stands still after its first step.

    At the end it goes on, if it is still there. The runner was started with holding().
    """
    found = until(lambda: _stopped(runner, rung, ranks), runner)
    try:
        yield found
    finally:
        for worker in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()


def workers(runner: subprocess.Popen[str], rung: str) -> list[psutil.Process]:
    """Those of a rung that are there now, lowest rank first."""
    found = []
    for child in psutil.Process(runner.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            words = child.cmdline()
            if {"bench.worker", rung} <= set(words) and "torch.distributed.run" not in words:
                found.append((int(child.environ().get("RANK", 0)), child.pid, child))
    return [child for _, _, child in sorted(found)]


def progress(worker: psutil.Process, pattern: str) -> bool:
    """Whether a worker has said last that it is so far."""
    with contextlib.suppress(psutil.Error, OSError, KeyError):
        path = progress_path(Path(worker.environ()["BENCH_OUT"]))
        return bool(re.search(pattern, path.read_text()))
    return False


def _stopped(runner: subprocess.Popen[str], rung: str, ranks: int) -> list[psutil.Process] | None:
    with contextlib.suppress(psutil.Error):
        found = workers(runner, rung)
        if len(found) == ranks and any(each.status() == psutil.STATUS_STOPPED for each in found):
            return found
    return None

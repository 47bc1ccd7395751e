"""The worker's side of bench.process.supervisor: outcome, progress, and ending with the runner.

The two sides communicate by files: the Outcome, and beside it the progress.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil

from bench.process.supervisor import CACHE, CODE
from bench.records.measurement import CacheState
from bench.records.record import Outcome, progress_path
from gpt2.files.atomic import atomic_write


class TooSlow(Exception):
    """A rung's first steps are below the tokens/s that were asked for, so that it ends early."""

    def __init__(self, tokens_per_second: float) -> None:
        super().__init__(f"its first steps ran at {tokens_per_second:.3g} tokens/s")
        self.tokens_per_second = tokens_per_second


def _seconds_so_far() -> float:
    """Return the seconds since this process was started.

    On Linux by the clock since boot, by which the kernel notes a process's start and which nobody can set;
    elsewhere by the wall clock, and 0 where that was set back since or nothing tells the start.
    """
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        after_name = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    with contextlib.suppress(psutil.Error):  # a process that does not find itself, without /proc
        return max(0.0, time.time() - psutil.Process().create_time())
    return 0.0


_STARTED = time.monotonic() - _seconds_so_far()
"""Start of this process by time.monotonic(), the clock of the runner's time limit, which stops in sleep."""


def age() -> float:
    """Return the seconds since this process was started."""
    return time.monotonic() - _STARTED


def give_way(process: int | None = None) -> None:
    """Let Linux end this process, or another, before the user's others where memory runs out."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process or 'self'}/oom_score_adj").write_text("500")


RUNNER = "BENCH_RUNNER_PID"
"""Environment variable with the id of the process that started this one."""


def leave_with_runner(last: Callable[[], object] = lambda: None) -> None:
    """End this process when the runner that started it is gone. last: called before that."""
    runner = int(os.environ.get(RUNNER, 0))

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(runner)  # recognised by its start, too, not only by its id
            # In a container without an init, a killed runner stays as a zombie.
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(2.0)
        last()
        os._exit(1)

    if runner:
        threading.Thread(target=watch, daemon=True).start()


_FILLED = "filled-by-bench"
"""Beginning of the name of a file that marks a rung's code in a cache as complete, not cut off by a kill."""


def mark_of(cache: Path, code: str | None) -> Path:
    """Return the file that marks this rung's code in a cache as complete."""
    return cache / "-".join(filter(None, (_FILLED, code)))


def compile_cache() -> CacheState | None:
    """Return the state of the compiler's cache that the runner gave this rung; None if it gave none.

    warm: all code of this rung is there; shared: that of other rungs, of which it may find parts.
    """
    cache = os.environ.get(CACHE)
    if cache is None:
        return None
    if mark_of(Path(cache), os.environ.get(CODE)).exists():
        return "warm"
    return "shared" if any(Path(cache).glob(f"{_FILLED}*")) else "cold"


def mark_compile_cache() -> bool:
    """Mark this rung's code in its cache as complete; return whether anything was compiled."""
    cache = os.environ.get(CACHE)
    if cache is None or not Path(cache).is_dir() or not any(Path(cache).iterdir()):
        return False
    mark_of(Path(cache), os.environ.get(CODE)).touch()
    return True


def write(out: Path, outcome: Outcome) -> None:
    """Write an outcome to `out`, replacing the file as a whole."""
    with atomic_write(out, sync=False) as file:
        file.write(outcome.as_json().encode())


def cause(error: Exception) -> str:
    """Return an error's class and the first line of its message, and whether a disk was full."""
    first, *others = f"{type(error).__name__}: {error}".strip().splitlines()
    full = os.strerror(errno.ENOSPC)  # which a compiler says further down
    return f"{first}: {full}" if full not in first and any(full in line for line in others) else first


def failure(error: Exception, *, out_of_memory: bool) -> Outcome:
    """Print an unexpected error's traceback, and return its outcome."""
    traceback.print_exception(error)
    return Outcome(status="out_of_memory" if out_of_memory else "failed", error=cause(error))


def exit_code(outcome: Outcome) -> int:
    """Print the error of an outcome; return 0 if it is ok, else 1."""
    if outcome.error:
        print(outcome.error, file=sys.stderr)
    return 0 if outcome.status == "ok" else 1


class ProgressFile:
    """Tells the runner the phase, steps and tokens/s of this process, by one JSON object in a file."""

    def __init__(self, out: Path) -> None:
        self._path = progress_path(out)

    def __call__(self, phase: str, steps: int, tps: float | None) -> None:
        with contextlib.suppress(OSError):  # a full disk affects the display only
            self._path.write_text(json.dumps({"phase": phase, "steps": steps, "tps": tps}))


def leave(exit_code: int) -> None:
    """Exit without finalizing the interpreter, which gloo's threads sometimes abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

"""What every measuring process does for the parent that started it; its other side is
bench.process.supervisor.

The two meet at files only: the Outcome, and beside it word of how far the process is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from bench.process.supervisor import CACHE
from bench.records.record import Outcome, progress_path
from gpt2.files.atomic import atomic_write

_STARTED = time.monotonic() - (time.time() - psutil.Process().create_time())
"""When this process was, by the clock that the runner's time limit goes by: it rests while the machine
sleeps.
"""


def age() -> float:
    """Seconds since this process was started."""
    return time.monotonic() - _STARTED


def give_way() -> None:
    """Where memory runs out, let Linux end this process and not the user's others."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def leave_with_runner(last: Callable[[], object] = lambda: None) -> None:
    """End this process when the runner that started it is gone: nobody would read what it measures.

    last: what is done before.
    """
    runner = int(os.environ.get("BENCH_RUNNER_PID", 0))

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(runner)  # which is not taken for a later one of the same id
            # Where nobody waits for it, as in a container without an init, a killed runner stays as a zombie.
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(2.0)
        last()
        os._exit(1)

    if runner:
        threading.Thread(target=watch, daemon=True).start()


_FILLED = "filled-by-bench"
"""A file in a compiler's cache that says that all of a rung's code is in it, not only what came before a
kill.
"""


def compile_cache() -> Literal["cold", "warm"] | None:
    """State of the compiler's cache that the runner gave this rung; None where nobody gave one."""
    cache = os.environ.get(CACHE)
    if cache is None:
        return None
    return "warm" if (Path(cache) / _FILLED).exists() else "cold"


def compile_cache_filled() -> bool:
    """Whether anything was compiled into the cache; if so, the next process finds it warm. To be called when
    warm.
    """
    cache = os.environ.get(CACHE)
    if cache is None or not Path(cache).is_dir() or not any(Path(cache).iterdir()):
        return False
    (Path(cache) / _FILLED).touch()
    return True


def write(out: Path, outcome: Outcome) -> None:
    """Replace the file as a whole."""
    with atomic_write(out, sync=False) as file:
        file.write(outcome.model_dump_json().encode())


def cause(error: Exception) -> str:
    """Its kind and the first line of its message, for an Outcome."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


class Progress:
    """Tells the runner how far this process is: one JSON object, written anew each time."""

    def __init__(self, out: Path) -> None:
        self._path = progress_path(out)

    def __call__(self, phase: str, steps: int, tps: float | None) -> None:
        with contextlib.suppress(OSError):  # a full disk spoils the display only
            self._path.write_text(json.dumps({"phase": phase, "steps": steps, "tps": tps}))


def leave(exit_code: int) -> None:
    """End at once, when all is written: taking the interpreter down in order could only fail.

    gloo's threads now and then abort it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)

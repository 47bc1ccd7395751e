"""One child process from start to end: started, watched, ended with all that it started, and its end
explained.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from pydantic import ValidationError

from bench.process.shutdown import Ending
from bench.records.record import Outcome, progress_path

POLL_SECONDS = 0.25
ERROR_LINES = 15
MOST_OUTPUT = 2**20
"""Bytes of what a process printed last that are kept."""
MARK = "BENCH_OUT"
"""Environment variable by which all processes of one rung are known, whoever started them."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that names the folder in which a rung's compiler keeps what it has compiled."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    exit_code: int | None
    reason: Literal["exit", "timeout", "interrupted"]
    output: str
    """Its last MOST_OUTPUT bytes."""
    kernel_killed: bool
    """Whether the kernel killed some process for memory meanwhile."""
    seconds: float = 0.0
    """From its start to its end."""


def supervise(
    command: list[str],
    environ: dict[str, str],
    out: Path,
    timeout: float,
    working: Callable[[str, int, float | None], None],
    stop: Ending,
) -> Ended:
    """Start a process in a session of its own, pass its progress on, and end it with all it started.

    It ends early at the time limit, or when `stop` asks for it.
    """
    log = out.with_suffix(".log")
    progress = progress_path(out)
    kills = kernel_kills()
    begun = time.monotonic()
    deadline = begun + timeout
    reason: Literal["exit", "timeout", "interrupted"] = "exit"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            env={**environ, MARK: str(out)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < deadline and not stop.asked:
                time.sleep(POLL_SECONDS)
                with contextlib.suppress(OSError, ValueError):  # not there yet, or being written
                    state = json.loads(progress.read_text())
                    working(state["phase"], state["steps"], state["tps"])
            if process.poll() is None:
                reason = "interrupted" if stop.asked else "timeout"
        finally:
            process.kill()
            process.wait()
            end_marked(str(out))
    output = _end_of(log)
    code = process.returncode if reason == "exit" else None
    seconds = time.monotonic() - begun
    return Ended(
        exit_code=code, reason=reason, output=output, kernel_killed=kernel_kills() > kills, seconds=seconds
    )


def _end_of(log: Path) -> str:
    """As much of it as explains how a process ended."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MOST_OUTPUT))
        return file.read().decode(errors="replace")


def end_marked(mark: str, variable: str = MARK) -> None:
    """Kill every other process that carries a mark in this environment variable, by default a rung's.

    torchrun's workers and compilers outlive their parents.
    """
    for _ in range(5):  # a process may start another while it is being killed
        others = (process for process in psutil.process_iter() if process.pid != os.getpid())
        left = [process for process in others if _mark(process, variable) == mark]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=10)


def _mark(process: psutil.Process, variable: str) -> str | None:
    try:
        return process.environ().get(variable) if process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):  # gone, or somebody else's
        return None


def kernel_kills() -> int:
    """Processes that the Linux kernel has killed for want of memory since it started; 0 elsewhere."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(match.group(1))
    return 0


def classify(out: Path, ended: Ended, timeout: float) -> Outcome:
    """How the process ended: by its own word where it left one, else by its exit."""
    word = said(out)
    late = f"took longer than protocol.timeout_seconds {timeout:g}"
    last = tail(ended.output)
    if word and word.status == "ok":
        # The window was complete. What came after it, checks, more losses or the exit, may have gone wrong.
        how = f"{_how(ended)}: {last[-1]}" if last else _how(ended)
        ends = {"timeout": late, "interrupted": "interrupted", "exit": how if ended.exit_code else ""}
        wrong = ends[ended.reason]
        warnings = [*word.warnings, f"after the window: {wrong}"] if wrong else word.warnings
        return word.model_copy(
            update={"warnings": warnings, "interrupted_late": ended.reason == "interrupted"}
        )
    if ended.reason == "interrupted":
        return Outcome(status="interrupted", error="by Ctrl-C or a signal")
    if ended.reason == "timeout":
        return Outcome(status="timeout", error=late)
    if _signal(ended) == signal.SIGKILL and ended.kernel_killed:
        return Outcome(status="out_of_memory", error=_how(ended))
    if word and not _signal(ended):
        lines = [word.error or word.status, *(last if word.status == "failed" else [])]
        return word.model_copy(update={"error": "\n".join(lines)})
    lines = [f"{_how(ended)}: {last[-1]}", *last[:-1]] if last else [_how(ended)]
    return Outcome(status="failed", error="\n".join(lines))


def said(out: Path) -> Outcome | None:
    """What the process wrote, if it did."""
    with contextlib.suppress(OSError, ValidationError):
        return Outcome.model_validate_json(out.read_text(encoding="utf-8"))
    return None


def _how(ended: Ended) -> str:
    number = _signal(ended)
    if number == signal.SIGKILL and ended.kernel_killed:
        return "killed by the kernel for want of memory"
    return f"killed by {number.name}" if number else f"exit code {ended.exit_code}"


def _signal(ended: Ended) -> signal.Signals | None:
    """The signal that killed the process or, by torchrun's account, the first of its ranks to be killed."""
    if ended.exit_code is not None and ended.exit_code < 0:
        return signal.Signals(-ended.exit_code)
    named = [int(number) for number in re.findall(r"Signal (\d+) \(SIG\w+\) received by PID", ended.output)]
    return next(
        (signal.Signals(n) for n in named if n != signal.SIGTERM), None
    )  # torchrun ends the others by SIGTERM


def tail(output: str) -> list[str]:
    """The last lines of what a process printed."""
    return output.strip().splitlines()[-ERROR_LINES:]

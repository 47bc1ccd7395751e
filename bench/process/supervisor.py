"""Start one child process, watch it, end it with all that it started, and explain its end."""

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

from bench.process.shutdown import StopSignal
from bench.records.record import Outcome, progress_path
from gpt2.errors import MORE_PROCESSES
from gpt2.signals import signal_name

POLL_SECONDS = 0.25
ERROR_LINES = 15
MOST_OUTPUT = 2**20
"""Bytes kept of the end of a process's output."""
MARK = "BENCH_OUT"
"""Environment variable that marks all processes of one rung, whoever started them."""
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that names the folder of a rung's compiled code."""
CODE = "BENCH_CODE"
"""Environment variable that names this rung's code among that of others in the same folder."""


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """Exit code, output and duration of a process that has ended."""

    exit_code: int | None
    reason: Literal["exit", "timeout", "interrupted"]
    output: str
    """Its last MOST_OUTPUT bytes, decoded."""
    kernel_killed: bool
    """Whether the kernel killed a process for want of memory meanwhile."""
    seconds: float = 0.0
    """Wall-clock time from start to end."""

    @property
    def was_cut_off(self) -> bool:
        """Whether it was ended from without, amid whatever it did."""
        return self.reason != "exit" or self.kernel_killed or (self.exit_code or 0) < 0


def supervise(
    command: list[str],
    environ: dict[str, str],
    out: Path,
    timeout: float,
    working: Callable[[str, int, float | None], None],
    stop: StopSignal,
) -> ProcessEnd:
    """Run a process in a session of its own, and end it with all it started.

    It is ended early after `timeout` seconds, or when `stop` is requested. working: called with its phase,
    steps and tokens/s.
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
            while process.poll() is None and time.monotonic() < deadline and not stop.requested:
                time.sleep(POLL_SECONDS)
                with contextlib.suppress(OSError, ValueError):  # not there yet, or being written
                    state = json.loads(progress.read_text())
                    working(state["phase"], state["steps"], state["tps"])
            if process.poll() is None:
                reason = "interrupted" if stop.requested else "timeout"
        finally:
            process.kill()
            process.wait()
            end_marked(str(out))
    output = end_of(log)
    return ProcessEnd(
        exit_code=process.returncode if reason == "exit" else None,
        reason=reason,
        output=output,
        kernel_killed=kernel_kills() > kills,
        seconds=time.monotonic() - begun,
    )


def end_of(log: Path, most: int = MOST_OUTPUT) -> str:
    """Return the last `most` bytes of a log, decoded."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - most))
        return file.read().decode(errors="replace")


def end_marked(mark: str, variable: str = MARK) -> None:
    """Kill every other process whose environment variable has this value; by default those of a rung.

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
    """Return how many processes the Linux kernel has killed for want of memory; 0 elsewhere."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE):
            return int(match.group(1))
    return 0


def classify(out: Path, ended: ProcessEnd, timeout: float) -> Outcome:
    """Return the outcome that a process wrote to `out`, or what its exit tells."""
    written = read_outcome(out)
    late = f"took longer than protocol.timeout_seconds {timeout:g}"
    last = tail(ended.output)
    if written and written.status == "ok":
        # The window was complete; checks, more losses or the exit may have failed after it.
        how = f"{_how(ended)}: {last[-1]}" if last else _how(ended)
        problems = {"timeout": late, "interrupted": "interrupted", "exit": how if ended.exit_code else ""}
        problem = problems[ended.reason]
        warnings = [*written.warnings, f"after the window: {problem}"] if problem else written.warnings
        return written.model_copy(
            update={"warnings": warnings, "interrupted_late": ended.reason == "interrupted"}
        )
    if ended.reason == "interrupted":
        return Outcome(status="interrupted", error="by Ctrl-C or a signal")
    if ended.reason == "timeout":
        return Outcome(status="timeout", error=late)
    if _signal(ended) == signal.SIGKILL and ended.kernel_killed:
        return Outcome(status="out_of_memory", error=_how(ended))
    if written and not _signal(ended):
        lines = [written.error or written.status, *(last if written.status == "failed" else [])]
        return written.model_copy(update={"error": "\n".join(lines)})
    why = short_of_threads(ended.output) or (last[-1] if last else "")
    lines = [f"{_how(ended)}: {why}", *last[:-1]] if why else [_how(ended)]
    return Outcome(status="failed", error="\n".join(lines))


def read_outcome(out: Path) -> Outcome | None:
    """Return the outcome that a process wrote to `out`; None if there is none."""
    with contextlib.suppress(OSError, ValidationError):
        return Outcome.model_validate_json(out.read_text(encoding="utf-8"))
    return None


def _how(ended: ProcessEnd) -> str:
    number = _signal(ended)
    if number == signal.SIGKILL and ended.kernel_killed:
        return "killed by the kernel for want of memory"
    return f"killed by {number.name}" if number else how_it_ended(ended.exit_code)


def how_it_ended(exit_code: int | None) -> str:
    """Return in words how a child ended, by its exit code as subprocess has it."""
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal_name(-exit_code)}"
    return f"exit code {exit_code}"


def _signal(ended: ProcessEnd) -> signal.Signals | None:
    """Return the signal that killed the process or, by torchrun's log, the first of its ranks."""
    if ended.exit_code is not None and ended.exit_code < 0:
        return signal.Signals(-ended.exit_code)
    named = [int(number) for number in re.findall(r"Signal (\d+) \(SIG\w+\) received by PID", ended.output)]
    # torchrun ends the other ranks by SIGTERM.
    return next((signal.Signals(n) for n in named if n != signal.SIGTERM), None)


def short_of_threads(output: str) -> str:
    """Return what to do where a process said that it could start no thread; empty where it did not.

    Its last line rarely tells: OpenBLAS, for one, interrupts its own process after saying so.
    """
    signs = ("pthread_create failed", "Thread creation failed", "can't start new thread")
    if any(sign in output for sign in signs):  # of OpenBLAS, of OpenMP, of Python
        return f"no more threads may be started; {MORE_PROCESSES}"
    return ""


def tail(output: str) -> list[str]:
    """Return the last lines of a process's output."""
    return output.strip().splitlines()[-ERROR_LINES:]

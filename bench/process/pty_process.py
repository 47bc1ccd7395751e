"""A program that is not ours, run at a terminal of its own so that it writes out each line when it prints it.

By a pipe, C's and Python's libraries would hold lines back; and when this process ends, however it does, the
terminal goes and the program with it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import re
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from bench.host.telemetry import GpuMemory, cpu_times
from bench.process.supervisor import MARK, end_marked, kernel_kills
from gpt2.hardware.host import memory_peak

LAST_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1
"""By which a program ends with the one that started it even if it heeds no terminal's end."""
LONGEST_LINE = 4096
"""Bytes of one that are looked at and kept."""
VM_HWM = "resident, window (VmHWM)"
"""As bench.worker's processes on a CPU call the same thing: the most that one process held since the window
began.
"""
NVML = "whole GPU, beyond what was used before (NVML, sampled)"
TOLD = "allocated, whole run (by its own log)"
NOT_MEASURED = "not measured"


class Program:
    """One program from start to end; use it as a context manager, which ends it with all that it started."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        processors: Collection[int] | None = None,
    ) -> None:
        """processors: the logical ones that it may use; None: those that this process may."""
        self.exit_code: int | None = None
        """Minus the signal's number where one ended it; None while it runs."""
        self._mark, self._kills = environ.get(MARK), kernel_kills()
        self._pid, self._terminal = pty.fork()  # before any thread is started
        if not self._pid:
            _become(words, folder, environ, processors)
        os.set_inheritable(self._terminal, False)  # by a later program, which would keep this one's terminal

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def lines(self, deadline: float) -> Iterator[tuple[float, str]]:
        """Each line and when it came, by time.perf_counter(), until the program closes its terminal or time
        is up.

        Of a longer line only the first LONGEST_LINE bytes.
        """
        rest = b""
        while (left := deadline - time.perf_counter()) > 0:
            if not select.select([self._terminal], [], [], left)[0]:
                continue
            try:
                read = os.read(self._terminal, 65536)
            except OSError:  # Linux says so where others give nothing
                read = b""
            at = time.perf_counter()
            *whole, rest = re.split(rb"[\r\n]+", rest + read)
            rest = rest[:LONGEST_LINE]
            yield from ((at, text) for line in whole if (text := _text(line)))
            if not read:
                self._wait(LAST_SECONDS)
                break
        if text := _text(rest):
            yield time.perf_counter(), text

    def forget(self) -> None:
        """Drop what it has printed and nobody has read yet."""
        while select.select([self._terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                if os.read(self._terminal, 65536):
                    continue
            return

    def processes(self) -> list[psutil.Process]:
        """The program and all that it started and that still runs; none once it has ended."""
        if self.exit_code is not None:  # its number may be another's by now
            return []
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(self._pid)
            return [program, *program.children(recursive=True)]
        return []

    @property
    def killed_for_memory(self) -> bool:
        """By the Linux kernel, as far as that can be told; other systems do not tell."""
        return self.exit_code == -signal.SIGKILL and kernel_kills() > self._kills

    @property
    def ending(self) -> str:
        """How it ended, for a sentence that begins with its name."""
        if self.killed_for_memory:
            return "was killed by the kernel for want of memory"
        code = self.exit_code or 0
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def end(self) -> None:
        """By SIGTERM, and SIGKILL where that does not do; by its mark too what it started in sessions of
        their own.
        """
        left = self.processes() if self.exit_code is None else []
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGTERM)
            self._wait(LAST_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._wait(LAST_SECONDS)  # before psutil does, in end_marked
        if self._mark:
            end_marked(self._mark)
        with contextlib.suppress(OSError):
            os.close(self._terminal)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.exit_code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                return
            else:
                time.sleep(0.02)


def _text(line: bytes) -> str:
    return line[:LONGEST_LINE].decode(errors="replace").strip()


def _become(
    words: Sequence[str], folder: Path, environ: Mapping[str, str], processors: Collection[int] | None
) -> None:
    """In the forked process: never returns."""
    try:
        if LIBC:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if processors:
            os.sched_setaffinity(0, processors)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # who asks for input would wait for ever
        os.chdir(folder)
        os.execvpe(words[0], list(words), dict(environ))
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


@dataclass
class Usage:
    """What a program takes of the machine while it is timed, looked at between its lines."""

    program: Program
    on_gpu: bool
    peak_memory_bytes: int | None = None
    """Of the window, of the process that needed most."""
    run_peak_memory_bytes: int | None = None
    """Of all up to the end of the window."""
    other_cores: float | None = None
    """Cores that other processes kept busy during the window, on average."""
    told_bytes: int | None = None
    """The most that its allocator has had in use so far, by its own log; on a CPU the system tells better."""

    def __post_init__(self) -> None:
        # The first GPU in sight is the one that a peer is given (bench.run.peers.child_env).
        self._gpu = GpuMemory() if self.on_gpu else None
        self._processes: list[psutil.Process] = []
        self._cleared = False

    @property
    def peak(self) -> int | None:
        """By the program's own account, where it gives one: what its allocator keeps unused does not count
        there.
        """
        return self.told_bytes or self.peak_memory_bytes

    @property
    def method(self) -> str:
        """Of peak."""
        if self.told_bytes:
            return TOLD
        if self.peak_memory_bytes is None:
            return NOT_MEASURED
        return NVML if self.on_gpu else VM_HWM

    def begin(self) -> None:
        """The window begins."""
        # Looked for once: the program trains meanwhile, and finding them reads of every process on the
        # machine.
        self._processes = self.program.processes()
        if not self.on_gpu:
            self.run_peak_memory_bytes = self._resident_peak()
            self._cleared = self._clear()
        self._times, self._own = cpu_times(), self._cpu_seconds()
        self.look()

    def hear(self, told: int | None) -> None:
        """What a line of the program's log says of its memory, if it does."""
        if told and self.on_gpu:
            self.told_bytes = told

    def look(self) -> None:
        """A block has ended; the program may be gone when the next one should."""
        if (now := self._memory()) is not None:
            self.peak_memory_bytes = max(now, self.peak_memory_bytes or 0)
            self.run_peak_memory_bytes = max(now, self.run_peak_memory_bytes or 0)
        times, own = cpu_times(), self._cpu_seconds()
        if own is not None and self._own is not None and times.clock > self._times.clock:
            others = times.other_cores_since(self._times) - (own - self._own) / (
                times.clock - self._times.clock
            )
            self.other_cores = max(0.0, others)

    def _memory(self) -> int | None:
        if self._gpu:
            return self._gpu.taken()
        return self._resident_peak() if self._cleared else None

    def _resident_peak(self) -> int | None:
        """VmHWM of the process that has the highest; None where the system does not tell."""
        peaks = [memory_peak(process.pid) for process in self._processes]
        return max((peak for peak in peaks if peak is not None), default=None)

    def _clear(self) -> bool:
        """Begin the peaks anew; some containers forbid it."""
        with contextlib.suppress(OSError):
            for process in self._processes:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            return True
        return False

    def _cpu_seconds(self) -> float | None:
        """Of the program and all that it started, those included that are gone and were waited for."""
        found = []
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                found.append(sum(times[:4]))  # its own, and its children's that it has waited for
        return sum(found) if found else None

"""Run a program that is not ours at a pseudo-terminal, so that it writes out each line when it prints it.

At a pipe, the libraries of C and Python buffer lines. When this process ends, the terminal is closed, which
ends the program, too. Imports no torch.
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

import psutil

from bench.host.telemetry import GpuMemory, cpu_times
from bench.process.supervisor import MARK, end_marked, how_it_ended, kernel_kills
from gpt2.hardware.host import memory_peak

LAST_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1
"""Option of prctl that ends a program with its parent, even if it ignores SIGHUP."""
LONGEST_LINE = 4096
"""Bytes of a line that are kept."""
VM_HWM = "resident, window (VmHWM)"
"""Method of measuring memory, named as bench.worker does: peak of one process since the window began."""
NVML = "whole GPU, beyond what was used before (NVML, sampled)"
BY_ITS_LOG = "allocated, whole run (by its own log)"
NOT_MEASURED = "not measured"


class Program:
    """A running program; as a context manager, it ends the program with all that it started."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environ: Mapping[str, str],
        processors: Collection[int] | None = None,
    ) -> None:
        """processors: logical CPUs that it may use; None for those of this process."""
        self.exit_code: int | None = None
        """Negative signal number if a signal ended it; None while it runs."""
        self._mark, self._kills = environ.get(MARK), kernel_kills()
        self._pid, self._terminal = pty.fork()  # before any thread is started
        if not self._pid:
            _become(words, folder, environ, processors)
        os.set_inheritable(self._terminal, False)  # a later program would keep this one's terminal open

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    def lines(self, deadline: float) -> Iterator[tuple[float, str]]:
        """Yield each line with its time of arrival, until the program closes its terminal or the deadline.

        Times are those of time.perf_counter(). Lines are cut at LONGEST_LINE bytes.
        """
        rest = b""
        while (left := deadline - time.perf_counter()) > 0:
            if not select.select([self._terminal], [], [], left)[0]:
                continue
            try:
                read = os.read(self._terminal, 65536)
            except OSError:  # Linux's end of file; other systems return nothing
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
        """Drop unread output."""
        while select.select([self._terminal], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                if os.read(self._terminal, 65536):
                    continue
            return

    def processes(self) -> list[psutil.Process]:
        """Return the program and all running processes that it started; none once it has ended."""
        if self.exit_code is not None:  # its process id may be reused
            return []
        with contextlib.suppress(psutil.Error):
            program = psutil.Process(self._pid)
            return [program, *program.children(recursive=True)]
        return []

    @property
    def killed_for_memory(self) -> bool:
        """Whether the Linux kernel probably killed it for want of memory."""
        return self.exit_code == -signal.SIGKILL and kernel_kills() > self._kills

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence that begins with its name."""
        if self.killed_for_memory:
            return "was killed by the kernel for want of memory"
        code = self.exit_code or 0
        return f"{'was' if code < 0 else 'ended with'} {how_it_ended(code)}"

    def end(self) -> None:
        """End it by SIGTERM, then SIGKILL; by its mark also what it started in other sessions."""
        left = self.processes()
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
    """Replace the forked process by the program; never returns."""
    try:
        if LIBC:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if processors:
            os.sched_setaffinity(0, processors)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a program that asks for input gets none
        os.chdir(folder)
        os.execvpe(words[0], list(words), dict(environ))
    except OSError as error:
        os.write(2, f"{words[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


@dataclass
class Usage:
    """Memory and processors used by a program, sampled between its lines."""

    program: Program
    on_gpu: bool
    peak_memory_bytes: int | None = None
    """Peak within the window, of the process with the most."""
    run_peak_memory_bytes: int | None = None
    """Peak up to the end of the window."""
    other_cores: float | None = None
    """Mean cores kept busy by other processes in the window."""
    allocator_bytes: int | None = None
    """Peak of its allocator by its own log, on a GPU."""

    def __post_init__(self) -> None:
        # A peer is given the first visible GPU (bench.run.peers.checkout).
        self._gpu = GpuMemory() if self.on_gpu else None
        self._processes: list[psutil.Process] = []
        self._cleared = False

    @property
    def peak(self) -> int | None:
        """Peak memory: by the program's log if it has it, which does not count unused memory."""
        return self.allocator_bytes or self.peak_memory_bytes

    @property
    def method(self) -> str:
        """How the peak was measured."""
        if self.allocator_bytes:
            return BY_ITS_LOG
        if self.peak_memory_bytes is None:
            return NOT_MEASURED
        return NVML if self.on_gpu else VM_HWM

    def begin(self) -> None:
        """Begin the window."""
        # Searched once, because the search reads every process of the machine while the program trains.
        self._processes = self.program.processes()
        if not self.on_gpu:
            self.run_peak_memory_bytes = self._resident_peak()
            self._cleared = self._clear()
        self._times, self._own = cpu_times(), self._cpu_seconds()
        self.sample()

    def note_allocated(self, allocator_bytes: int | None) -> None:
        """Take the peak memory of the program's log, if it has one."""
        if allocator_bytes and self.on_gpu:
            self.allocator_bytes = allocator_bytes

    def sample(self) -> None:
        """Sample at the end of a block; the program may have ended at the end of the next."""
        if (now := self._memory()) is not None:
            self.peak_memory_bytes = max(now, self.peak_memory_bytes or 0)
            self.run_peak_memory_bytes = max(now, self.run_peak_memory_bytes or 0)
        times, own = cpu_times(), self._cpu_seconds()
        if own is not None and self._own is not None and times.clock > self._times.clock:
            own_cores = (own - self._own) / (times.clock - self._times.clock)
            if (others := times.other_cores_since(self._times)) is not None:
                self.other_cores = max(0.0, others - own_cores)

    def _memory(self) -> int | None:
        if self._gpu:
            return self._gpu.taken()
        return self._resident_peak() if self._cleared else None

    def _resident_peak(self) -> int | None:
        """Return the highest VmHWM of the processes; None if unknown."""
        peaks = [memory_peak(process.pid) for process in self._processes]
        return max((peak for peak in peaks if peak is not None), default=None)

    def _clear(self) -> bool:
        """Reset the peaks; return False where a container forbids it."""
        with contextlib.suppress(OSError):
            for process in self._processes:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            return True
        return False

    def _cpu_seconds(self) -> float | None:
        """Return the CPU time of the processes, and of children that they have waited for."""
        seconds = []
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds.append(sum(times[:4]))  # its own, and its children's that it has waited for
        return sum(seconds) if seconds else None

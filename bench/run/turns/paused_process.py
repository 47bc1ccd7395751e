"""A trainer's process, ours or another's, that is stopped except in its turns. Imports no torch."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bench.errors import BenchError
from bench.ladder.ladder import Ladder, Rung
from bench.ladder.peers import CANNOT_RUN, PEERS, LogLine
from bench.process.pty_process import Program
from bench.process.supervisor import CACHE, MARK
from bench.process.worker_side import give_way
from bench.run.command import ladder_words, path_word
from bench.run.peers.checkout import MissingPeer, locate_and_check, origin, peer_variables, processors
from bench.run.peers.trainer_log import LogError, TrainerLog
from gpt2.config.toggles import MATMUL_CHOICES
from gpt2.hardware.host import memory_held, memory_peak
from gpt2.training.reexec import own_variables, python

STOP_SECONDS = 10.0
"""Limit for stopping a process, which may wait for a disk, or for the host of a virtual machine."""


class TurnError(BenchError):
    """A rung that cannot take its turns; the message says why."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        """unsupported: the rung cannot run on this machine, which is no failure."""
        super().__init__(message)
        self.unsupported = unsupported


class PausedProcess:
    """A trainer's process between turns; made by started()."""

    def __init__(self, program: Program, log: TrainerLog, seconds: float) -> None:
        """seconds: limit of one call of steps(), compilation included."""
        self._program, self._log, self._seconds = program, log, seconds

    @property
    def version(self) -> str | None:
        """Version of another trainer; None for ours."""
        return self._log.version

    def steps(self, count: int) -> float:
        """Let it train for at least `count` timed steps; return seconds per step. Raises TurnError.

        The first step, in which it may have been stopped, is not timed.
        """
        begun: LogLine | None = None
        try:
            for line in self._log.lines(time.perf_counter() + self._seconds):
                if not math.isfinite(line.loss):
                    raise TurnError(f"its loss is {line.loss} at step {line.step}")
                if begun is None or line.at == begun.at:  # lines that arrive together are of different times
                    begun = line
                elif line.step - begun.step >= count:
                    return (line.at - begun.at) / (line.step - begun.step)
        except LogError as error:
            raise TurnError(str(error)) from None
        raise self._too_few_steps()

    def _too_few_steps(self) -> TurnError:
        program, last = self._program, self._log.last_line
        if program.exit_code is None:
            return TurnError(f"too few steps within {self._seconds:g} s; its last line: {last}")
        if program.exit_code == CANNOT_RUN:
            return TurnError(last, unsupported=True)
        if program.killed_for_memory:
            return TurnError(f"{program.ending}; have fewer processes with --at-once or --rungs")
        return TurnError(f"{program.ending}: {last}")

    def stop(self) -> None:
        """Stop it, and drop its unread output, which has no time. Raises TurnError if it does not stop."""
        deadline = time.monotonic() + STOP_SECONDS
        while running := list(filter(_running, self._program.processes())):  # also those started meanwhile
            if time.monotonic() > deadline:
                raise TurnError(
                    f"it did not stop within {STOP_SECONDS:g} s, and would slow down the other rungs"
                )
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            time.sleep(0.001)
        self._program.forget()

    def resume(self) -> None:
        for process in self._program.processes():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def memory_to_come(self) -> int:
        """Bytes below its peak that it holds now, as between two steps; 0 if the system does not tell."""
        total = 0
        for process in self._program.processes():
            peak, held = memory_peak(process.pid), memory_held(process.pid)
            if peak is not None and held is not None:  # None for a process that has just ended
                total += peak - held
        return total


def _running(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextlib.contextmanager
def started(
    ladder: Ladder, rung: Rung, name: str, scratch: Path, data: Path | None, overrides: Sequence[str]
) -> Iterator[PausedProcess]:
    """Start a rung's process, not stopped; end it with all that it started. Raises TurnError if missing.

    name: of this process, unique in the scratch folder.
    """
    if rung.external:
        peer, cpus = PEERS[rung.external.peer], processors(rung.toggles, PEERS[rung.external.peer])
        try:
            folder, words = locate_and_check(rung.external, rung.toggles, ladder.path)
        except MissingPeer as error:
            raise TurnError(str(error), unsupported=True) from None
        version, own = origin(peer, folder, words), {}
    else:
        peer, cpus, folder, version, own = PEERS["own"], None, Path.cwd(), None, own_variables()
        copy = str(ladder.copy_in(scratch))  # the file may be edited before all have started
        words = [*python("bench.run.turns.step_printer"), str(ladder.path), rung.name, "--copy", copy]
        words += ["--data", path_word(data)] if data else []
        words += ladder_words(ladder, rung, overrides)
    with contextlib.ExitStack() as stack:
        # Empty for each process: compiled code and cached code lie differently in memory.
        cache = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="inductor-", dir=scratch, ignore_cleanup_errors=True)
        )
        environ = {
            **os.environ,
            **own,
            **peer_variables(rung.toggles, peer, cache),
            MARK: f"{scratch} {name}",
            "TMPDIR": str(scratch),
            CACHE: cache,
            MATMUL_CHOICES: "",
        }
        program = stack.enter_context(Program(words, folder, environ, cpus))
        log = TrainerLog(program, peer, rung.tokens_per_step(ladder.workload.seq_len), version)
        paused = PausedProcess(program, log, ladder.protocol.timeout_seconds)
        for process in program.processes():
            give_way(process.pid)
        try:
            yield paused
        finally:
            paused.resume()  # a stopped process does not handle SIGTERM

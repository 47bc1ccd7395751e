"""One rung's process, ours or another trainer's, that trains while it is awake and is stopped in between.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from bench.ladder.ladder import Ladder, Rung
from bench.ladder.peers import CANNOT_RUN, PEERS, Line
from bench.process.pty_process import Program
from bench.process.supervisor import CACHE, MARK
from bench.run.peers.checkout import MissingPeer, found, origin
from bench.run.peers.child_env import processors, variables
from gpt2.hardware.host import memory_held, memory_peak
from gpt2.training.reexec import own_variables, python

STOP_SECONDS = 10.0
"""In which processes that were told to stop have stopped: a signal takes them at once, but for those that
wait for a disk, and a virtual machine may halt for seconds.
"""


class TurnError(Exception):
    """A rung that cannot take its turns; the message says why."""

    def __init__(self, message: str, *, unsupported: bool = False) -> None:
        """unsupported: it is not here, which is no failure."""
        super().__init__(message)
        self.unsupported = unsupported


class Sleeper:
    """A process and the lines that it prints; made by started()."""

    def __init__(
        self, program: Program, peer: str, tokens_per_step: int, seconds: float, version: str | None
    ) -> None:
        """seconds: how long a step may be waited for, the first one with its compilation too."""
        self._program, self._peer, self._tokens, self._seconds = (
            program,
            PEERS[peer],
            tokens_per_step,
            seconds,
        )
        self._origin, self._told = version, ""
        self._last, self._step = "it printed nothing", -1

    @property
    def version(self) -> str | None:
        """Of another trainer: what its log says, and its checkout's commit or its script's hash."""
        return ", ".join(filter(None, (self._told, self._origin))) or None

    def steps(self, count: int) -> float:
        """Let it train until `count` steps or more were timed, from the end of one to that of another.

        Gives seconds per step. The step in which it slept only begins the time. Raises TurnError.
        """
        begun: Line | None = None
        for line in self._lines():
            if begun is None or line.at == begun.at:  # what came together was printed at different times
                begun = line
            elif line.step - begun.step >= count:
                return (line.at - begun.at) / (line.step - begun.step)
        raise AssertionError  # _lines ends by raising

    def sleep(self) -> None:
        """Stop it, and forget what it has printed, for nobody knows when. Raises TurnError where it goes on."""
        deadline = time.monotonic() + STOP_SECONDS
        while awake := list(filter(_awake, self._program.processes())):  # those that it starts meanwhile, too
            if time.monotonic() > deadline:
                raise TurnError(
                    f"could not be stopped within {STOP_SECONDS:g} s, and would be in the way of the others"
                )
            for process in awake:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            time.sleep(0.001)
        self._program.forget()

    def wake(self) -> None:
        for process in self._program.processes():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def memory_to_come(self) -> int:
        """Bytes that it has held at its peak and does not hold now, as between two steps; 0 where nobody
        tells.
        """
        total = 0
        for process in self._program.processes():
            peak, held = memory_peak(process.pid), memory_held(process.pid)
            if peak is not None and held is not None:  # neither is told of one that has ended meanwhile
                total += peak - held
        return total

    def _lines(self) -> Iterator[Line]:
        """Progress lines as they come, each of a later step than the one before."""
        for at, text in self._program.lines(time.perf_counter() + self._seconds):
            self._last = text
            self._told = self._peer.version_of(text) or self._told
            if (tokens := self._peer.tokens_of(text)) not in (None, self._tokens):
                raise TurnError(f"its steps are of {tokens:,} tokens, and the ladder says {self._tokens:,}")
            if line := self._peer.read(text, at):
                if not math.isfinite(line.loss):
                    raise TurnError(f"its loss is {line.loss} at step {line.step}")
                if line.step <= self._step:
                    raise TurnError(f"it printed step {line.step} after step {self._step}")
                self._step = line.step
                yield line
        if self._program.exit_code is None:
            raise TurnError(f"too few steps within {self._seconds:g} s; its last line: {self._last}")
        if self._program.exit_code == CANNOT_RUN:
            raise TurnError(self._last, unsupported=True)
        if self._program.killed_for_memory:
            raise TurnError(f"{self._program.ending}; have fewer processes with --at-once or --rungs")
        raise TurnError(f"{self._program.ending}: {self._last}")


def _awake(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def tokens_per_step(ladder: Ladder, rung: Rung) -> int:
    """Of an external rung as its ladder vouches for it."""
    if rung.external:
        return rung.external.tokens_per_step
    return rung.toggles.tokens_per_step(ladder.workload.seq_len)


@contextlib.contextmanager
def started(
    ladder: Ladder, rung: Rung, name: str, scratch: Path, data: Path | None, overrides: Sequence[str]
) -> Iterator[Sleeper]:
    """A rung's process, awake, and ended with all that it started. Raises TurnError where it is not here.

    name: of this process among those of the same scratch folder.
    """
    folder, version, peer, cpus = Path.cwd(), None, "own", None
    own: dict[str, str] = {}
    if rung.external:
        peer, cpus = rung.external.peer, processors(rung.toggles, PEERS[rung.external.peer])
        try:
            folder, words = found(rung.external, rung.toggles, ladder.path)
        except MissingPeer as error:
            raise TurnError(str(error), unsupported=True) from None
        version = origin(PEERS[peer], folder, words)
    else:
        own, words = own_variables(), [*python("bench.run.turns.step_printer"), str(ladder.path), rung.name]
        words += ["--data", str(data)] if data else []
        words += [part for override in overrides for part in ("--set", override)]
    with contextlib.ExitStack() as stack:
        # Empty for each: a process that compiled its code has it otherwise in memory than one that found it
        # compiled.
        cache = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="inductor-", dir=scratch, ignore_cleanup_errors=True)
        )
        environ = {
            **os.environ,
            **own,
            **variables(rung.toggles, PEERS[peer], cache),
            MARK: f"{scratch} {name}",
            "TMPDIR": str(scratch),
            CACHE: cache,
        }
        program = stack.enter_context(Program(words, folder, environ, cpus))
        sleeper = Sleeper(
            program, peer, tokens_per_step(ladder, rung), ladder.protocol.timeout_seconds, version
        )
        with contextlib.suppress(OSError):  # where memory runs out, all give way as those of bench run do
            for process in program.processes():
                Path(f"/proc/{process.pid}/oom_score_adj").write_text("500")
        try:
            yield sleeper
        finally:
            sleeper.wake()  # a stopped process would not see that it is asked to end

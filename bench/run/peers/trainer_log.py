"""Read the log of a trainer while it runs, and time it by its progress lines. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from bench.errors import BenchError
from bench.ladder.ladder import Protocol
from bench.ladder.peers import LogLine, Peer
from bench.process.pty_process import Program
from bench.process.supervisor import ERROR_LINES

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What makes a terminal change colours, which some trainers print wherever they run."""
MOST_PASSED_ON = 2**18
"""Characters of a log that are passed on as they come: thousands of progress lines."""


class LogError(BenchError):
    """A log that nothing can be timed by; the message says why."""


class LogRelay:
    """Pass a log on to stdout: all of a usual one, the beginning and the end of a flood."""

    def __init__(self, folder: Path, shown: str) -> None:
        """folder: of the trainer's checkout; `shown` replaces its path."""
        self._folder, self._shown = folder, shown
        self.last: deque[str] = deque(maxlen=ERROR_LINES)
        self._characters, self._held_back = 0, 0

    def take(self, text: str) -> None:
        text = text.replace(str(self._folder), self._shown)
        self.last.append(text)
        if self._characters < MOST_PASSED_ON:
            print(text, flush=True)
            self._characters += len(text)
        else:
            self._held_back += 1

    def end(self) -> None:
        """Print the last of the lines that were held back."""
        shown = min(self._held_back, len(self.last))
        if self._held_back > shown:
            print(f"... {self._held_back - shown:,} lines left out ...")
        for text in list(self.last)[len(self.last) - shown :]:
            print(text, flush=True)


class TrainerLog:
    """The log of one trainer, ours or another, and what it says besides its progress."""

    def __init__(
        self,
        program: Program,
        peer: Peer,
        tokens_per_step: int,
        origin: str | None = None,
        relay: LogRelay | None = None,
    ) -> None:
        """tokens_per_step: as the ladder has it. origin: commit of the checkout, or hash of the script."""
        self._program, self._peer, self._tokens_per_step = program, peer, tokens_per_step
        self._origin, self._relay = origin, relay
        self._version: str | None = None
        self._step: int | None = None
        self.last_line = "it printed nothing"
        self.memory_bytes: int | None = None
        """Peak of its allocator, by its own account; None if it gives none."""

    @property
    def version(self) -> str | None:
        """Version by its log and its origin; None if neither is known."""
        return ", ".join(filter(None, (self._version, self._origin))) or None

    def lines(self, deadline: float) -> Iterator[LogLine]:
        """Yield progress lines as they arrive, until the program ends or at `deadline` (perf_counter).

        Raises LogError where steps do not increase or have another number of tokens than the ladder says.
        """
        for at, text in self._program.lines(deadline):
            text = COLOURS.sub("", text)
            self.last_line = text
            if self._relay:
                self._relay.take(text)
            self._version = self._peer.version_of(text) or self._version
            self.memory_bytes = self._peer.memory_of(text) or self.memory_bytes
            if line := self._peer.read(text, at):
                if self._step is not None and line.step <= self._step:
                    raise LogError(
                        f"it printed step {line.step} after step {self._step}; let one process alone print, "
                        "and train once"
                    )
                self._step = line.step
                yield line
            elif (tokens := self._peer.tokens_of(text)) not in (None, self._tokens_per_step):
                raise LogError(
                    f"its steps are of {tokens:,} tokens, and the ladder says {self._tokens_per_step:,}"
                )


class LogTiming:
    """Time a trainer in blocks between the arrivals of its progress lines, which are taken as they arrive.

    As in bench.run.measure there is a warm-up and a window of blocks of equal size, all of which count.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.lines: list[LogLine] = []
        self.block_steps: int | None = None
        self.block_seconds: list[float] = []
        self._settling: LogLine | None = None
        """Start of the untimed block before the window."""
        self._block_start: LogLine | None = None
        self._window = 0
        """Index of the line at which the window began."""

    def take(self, line: LogLine) -> None:
        """Take a line, of a later step than the last. Raises LogError if the window is unsound."""
        self.lines.append(line)
        if self._block_start:
            if not math.isfinite(line.loss):  # arithmetic with NaN or infinity has another speed
                raise LogError(f"its loss is not a number: {line.loss} at step {line.step}")
            self._timed(self._block_start, line)
        elif self._settling:
            self._settle(self._settling, line)
        elif self._is_warm(line):
            self._settling = line

    def _is_warm(self, line: LogLine) -> bool:
        """Whether the steps since the first line are as many, and took as long, as the protocol asks."""
        steps, seconds = line.step - self.lines[0].step, line.at - self.lines[0].at
        return steps >= self._protocol.min_warmup_steps and seconds >= self._protocol.min_warmup_seconds

    def _settle(self, start: LogLine, line: LogLine) -> None:
        """Leave one block untimed: clocks settle, and one step alone tells little of a block's steps.

        Ends after a time, not a number of steps: if two lines are read at once, the second's interval is 0.
        """
        seconds = line.at - start.at
        if seconds >= self._protocol.block_seconds:
            interval = line.step - self.lines[-2].step  # a block has whole intervals between two lines
            lines = self._protocol.block_seconds * (line.step - start.step) / seconds / interval
            self.block_steps = interval * max(1, round(lines))
            self._block_start, self._window = line, len(self.lines) - 1

    def _timed(self, start: LogLine, line: LogLine) -> None:
        assert self.block_steps
        steps = line.step - start.step
        if steps < self.block_steps:
            return
        if steps > self.block_steps:
            raise LogError(
                f"its lines come unevenly: {self.block_steps} steps make a block, and after step "
                f"{start.step} came step {line.step}; let it log at regular steps"
            )
        if line.at <= start.at:
            raise LogError("all lines of a block came at once; let it write out each line when it prints it")
        self.block_seconds.append(line.at - start.at)
        self._block_start = line

    @property
    def in_window(self) -> bool:
        return self._block_start is not None

    @property
    def enough(self) -> bool:
        """Whether there are as many blocks as a window needs."""
        return len(self.block_seconds) >= self._protocol.least_blocks

    @property
    def complete(self) -> bool:
        """Whether there are as many blocks as the protocol wants, or as fit into max_window_seconds."""
        wanted, most = self._protocol.blocks, self._protocol.max_window_seconds
        return len(self.block_seconds) >= wanted or (self.enough and sum(self.block_seconds) > most)

    @property
    def warmup_steps(self) -> int:
        """Steps before the window; a first line that stands for several steps counts as one."""
        last = self.lines[self._window] if self.in_window else self.lines[-1]
        return last.step - self.lines[0].step + 1

    @property
    def _window_lines(self) -> list[LogLine]:
        assert self._block_start
        return [line for line in self.lines[self._window :] if line.step <= self._block_start.step]

    @property
    def step_seconds(self) -> list[float] | None:
        """Duration of each step of the window; None where lines are several steps apart."""
        pairs = list(pairwise(self._window_lines))
        if any(after.step - before.step > 1 for before, after in pairs):
            return None
        return [after.at - before.at for before, after in pairs if after.at > before.at] or None

    @property
    def claimed_seconds(self) -> list[float] | None:
        """Step durations of the window by the trainer's own account; None if it gives none."""
        claims = [line.claimed_seconds for line in self._window_lines[1:]]
        return [claim for claim in claims if claim] or None

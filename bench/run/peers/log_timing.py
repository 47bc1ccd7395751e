"""Time another trainer in blocks between the arrivals of its progress lines.

As in bench.run.measure there is a warm-up and a window of blocks of equal size, all of which count. Imports
no torch.
"""

from __future__ import annotations

import math
from itertools import pairwise

from bench.ladder.ladder import Protocol
from bench.ladder.peers import Line
from bench.run.peers.trainer_log import LogError


class LogTiming:
    """Form warm-up and window from progress lines, which are taken as they arrive."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.lines: list[Line] = []
        self.block_steps: int | None = None
        self.block_seconds: list[float] = []
        self._settling: Line | None = None
        """Start of the untimed block before the window."""
        self._block_start: Line | None = None
        self._window = 0
        """Index of the line at which the window began."""

    def take(self, line: Line) -> None:
        """Take a line, of a later step than the last. Raises LogError if the window is unsound."""
        before = self.lines[-1] if self.lines else None
        self.lines.append(line)
        if before is None:
            return
        if self._block_start:
            if not math.isfinite(line.loss):  # arithmetic with NaN or infinity has another speed
                raise LogError(f"its loss is not a number: {line.loss} at step {line.step}")
            self._timed(self._block_start, line)
        elif self._settling:
            self._settle(self._settling, line)
        elif self._is_warm(line):
            self._settling = line

    def _is_warm(self, line: Line) -> bool:
        """Whether the steps since the first line are as many, and took as long, as the protocol asks."""
        steps, seconds = line.step - self.lines[0].step, line.at - self.lines[0].at
        return steps >= self._protocol.min_warmup_steps and seconds >= self._protocol.min_warmup_seconds

    def _steps_of_block(self, seconds: float, steps: int, interval: int) -> int:
        """Steps that take about block_seconds, a multiple of the interval between two lines."""
        lines = self._protocol.block_seconds * steps / seconds / interval
        return interval * max(1, round(lines))

    def _settle(self, start: Line, line: Line) -> None:
        """Leave one block untimed: clocks settle, and one step alone tells little of a block's steps.

        It ends by time, not after so many steps: of two lines that came together, because this process was
        busy, the second seems to have taken no time.
        """
        if line.at - start.at >= self._protocol.block_seconds:
            interval = line.step - self.lines[-2].step
            self.block_steps = self._steps_of_block(line.at - start.at, line.step - start.step, interval)
            self._block_start, self._window = line, len(self.lines) - 1

    def _timed(self, start: Line, line: Line) -> None:
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
    def _window_lines(self) -> list[Line]:
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

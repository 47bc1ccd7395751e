"""The timed window of a trainer that we cannot look into: blocks between the arrivals of its progress lines.

As in bench.run.measure there is a warm-up and a window of blocks of equal size, none of them chosen. Imports
no torch.
"""

from __future__ import annotations

import math
from itertools import pairwise

from bench.ladder.ladder import LEAST_BLOCKS, Protocol
from bench.ladder.peers import Line


class ArrivalError(Exception):
    """Progress lines that no sound window can be formed of; the message says why."""


class Arrivals:
    """Takes progress lines as they come; a window begins and ends at one."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.lines: list[Line] = []
        self.block_steps: int | None = None
        self.block_seconds: list[float] = []
        self._settling: Line | None = None
        """Where the untimed block before the window began."""
        self._mark: Line | None = None
        """Where the present block began."""
        self._window = 0
        """Place of the line at which the window began."""

    def take(self, line: Line) -> None:
        """Raises ArrivalError where the numbers of the steps do not grow evenly, or a loss of the window is
        none.
        """
        before = self.lines[-1] if self.lines else None
        self.lines.append(line)
        if before is None:
            return
        if line.step <= before.step:
            raise ArrivalError(
                f"it printed step {line.step} after step {before.step}; let one process alone print, and "
                "train once"
            )
        if self._mark:
            if not math.isfinite(line.loss):  # such sums are not those of training
                raise ArrivalError(f"its loss is not a number: {line.loss} at step {line.step}")
            self._timed(self._mark, line)
        elif self._settling:
            self._settle(self._settling, line)
        elif self._is_warm(line):
            self._settling = line

    def _is_warm(self, line: Line) -> bool:
        """Whether the steps since the first line are as many, and took as long, as the protocol asks."""
        steps, seconds = line.step - self.lines[0].step, line.at - self.lines[0].at
        return steps >= self._protocol.min_warmup_steps and seconds >= self._protocol.min_warmup_seconds

    def _block_steps(self, seconds: float, steps: int, interval: int) -> int:
        """As many as take about a block's seconds, in whole intervals between two lines."""
        lines = self._protocol.block_seconds * steps / seconds / interval
        return interval * max(1, round(lines))

    def _settle(self, start: Line, line: Line) -> None:
        """One block more, untimed: clocks settle, and one step alone is a poor measure of many.

        It lasts as long as a block, and not as many steps as one would seem to have: of two lines that came
        together, because this process was busy or had to wait, the second seems to have taken no time.
        """
        if line.at - start.at >= self._protocol.block_seconds:
            interval = line.step - self.lines[-2].step
            self.block_steps = self._block_steps(line.at - start.at, line.step - start.step, interval)
            self._begin(line)

    def _begin(self, line: Line) -> None:
        self._mark, self._window = line, len(self.lines) - 1

    def _timed(self, mark: Line, line: Line) -> None:
        assert self.block_steps
        steps = line.step - mark.step
        if steps < self.block_steps:
            return
        if steps > self.block_steps:
            raise ArrivalError(
                f"its lines come unevenly: {self.block_steps} steps make a block, and after step {mark.step} "
                f"came step {line.step}; let it log at regular steps"
            )
        if line.at <= mark.at:
            raise ArrivalError(
                "a whole block's lines came at once: let it write out each line when it prints it"
            )
        self.block_seconds.append(line.at - mark.at)
        self._mark = line

    @property
    def timing(self) -> bool:
        """Whether the window has begun."""
        return self._mark is not None

    @property
    def enough(self) -> bool:
        """Whether there are as many blocks as a window needs."""
        return len(self.block_seconds) >= LEAST_BLOCKS

    @property
    def complete(self) -> bool:
        """Whether there are as many as the protocol wants, or would take longer than it allows."""
        wanted, most = self._protocol.blocks, self._protocol.max_window_seconds
        return len(self.block_seconds) >= wanted or (self.enough and sum(self.block_seconds) > most)

    @property
    def warmup_steps(self) -> int:
        """Before the window; of the steps that the first line tells of only the last one counts."""
        last = self.lines[self._window] if self.timing else self.lines[-1]
        return last.step - self.lines[0].step + 1

    @property
    def _of_window(self) -> list[Line]:
        assert self._mark
        return [line for line in self.lines[self._window :] if line.step <= self._mark.step]

    @property
    def step_seconds(self) -> list[float] | None:
        """Of each step of the window; None where lines are several steps apart."""
        pairs = list(pairwise(self._of_window))
        if any(after.step - before.step > 1 for before, after in pairs):
            return None
        return [after.at - before.at for before, after in pairs if after.at > before.at] or None

    @property
    def claimed_seconds(self) -> list[float] | None:
        """Of those steps of the window that the peer tells the duration of, by its own account."""
        claims = [line.claimed_seconds for line in self._of_window[1:]]
        return [claim for claim in claims if claim] or None

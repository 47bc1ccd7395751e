"""Read the log of a trainer while it runs. Imports no torch."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from bench.errors import BenchError
from bench.ladder.peers import Line, Peer
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

    def lines(self, deadline: float) -> Iterator[Line]:
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

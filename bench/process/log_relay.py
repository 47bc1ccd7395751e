"""What a peer prints, passed on to whoever wants to see it: all of a usual log, the two ends of a flood.

Imports no torch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from bench.process.supervisor import ERROR_LINES

MOST_PASSED_ON = 2**18
"""Characters: thousands of progress lines, and no burden on a disk."""


@dataclass
class Log:
    """Takes lines without the place where the peer's checkout lies."""

    folder: Path
    shown: str
    """In place of that."""
    last: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))
    passed_on: int = 0
    """Characters."""
    held: int = 0
    """Lines since there were enough of them."""

    def take(self, text: str) -> str:
        text = text.replace(str(self.folder), self.shown)
        self.last.append(text)
        if self.passed_on < MOST_PASSED_ON:
            print(text, flush=True)
            self.passed_on += len(text)
        else:
            self.held += 1
        return text

    def end(self) -> None:
        """Pass on the last of what was held."""
        shown = min(self.held, len(self.last))
        if self.held > shown:
            print(f"... {self.held - shown:,} lines left out ...")
        for text in list(self.last)[len(self.last) - shown :]:
            print(text, flush=True)

"""Progress display of a long run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from gpt2.data.corpora.prepare import Prepared
from gpt2.format import duration
from gpt2.pretrain.metrics import Event
from gpt2.terminal import PLAIN_SECONDS, LiveLine

SMOOTH = 20
"""Number of recent steps over which speed and remaining time are averaged."""


class Display(LiveLine):
    """A metrics sink that prints events to the terminal; use it as a context manager."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self.steps = steps
        self._line = Text("starting")
        self._printed = 0.0
        self._recent: list[float] = []
        super().__init__(lambda: self._line, console)

    def write(self, event: Event) -> None:
        if event.kind == "step":
            self._step(event)
        else:
            self.print(Text(f"step {event.step}: {_as_text(event)}"))

    def close(self, *, failed: bool = False) -> None:
        return

    def _step(self, event: Event) -> None:
        values = event.values
        self._recent = [*self._recent[1 - SMOOTH :], values["seconds"]]
        seconds = sum(self._recent) / len(self._recent)
        parts = [
            f"step {event.step}/{self.steps}",
            f"loss {values['loss']:.4f}",
            f"norm {values['grad_norm']:.2f}",
            f"lr {values['lr']:.2e}",
            f"{values['tps'] * values['seconds'] / seconds:,.0f} tokens/s",
            f"MFU {values['mfu']:.1%}" if values["mfu"] is not None else "",
            f"{held / 2**30:.2f} GiB" if (held := values["peak_memory_bytes"]) is not None else "",
            f"{duration(seconds * (self.steps - event.step))} left",
        ]
        self._line = Text("  ".join(part for part in parts if part))
        now = time.monotonic()
        last = event.step == self.steps
        if not self.is_drawn and (last or now - self._printed >= PLAIN_SECONDS):
            self._printed = now
            self.print(self._line)


def preparing(progress: Iterator[Prepared]) -> None:
    """Show the progress of gpt2.data.corpora.prepare.prepare() until it ends."""
    printed = time.monotonic()
    line = Text("opening the corpus")
    with LiveLine(lambda: line) as live:
        for each in progress:
            left = f"  {duration(each.remaining_seconds)} left" if each.remaining_seconds is not None else ""
            line = Text(
                f"{each.file}  {each.documents:,} documents  {each.tokens:,} tokens  "
                f"{each.tokens_per_second:,.0f} tokens/s{left}"
            )
            if not live.is_drawn and time.monotonic() - printed >= PLAIN_SECONDS:
                printed = time.monotonic()
                live.print(line)


def _as_text(event: Event) -> str:
    values = event.values
    if event.kind == "val":
        return f"validation loss {values['loss']:.4f} on {values['tokens']:,} tokens of {values['corpus']}"
    if event.kind == "hellaswag":
        return (
            f"HellaSwag ({values['style']}) acc {values['acc']:.4f}, acc_norm {values['acc_norm']:.4f} "
            f"of {values['examples']:,}, trained on {values['corpus']}"
        )
    if event.kind == "sample":
        return f"{values['prompt']!r} goes on: {values['text']!r}"
    if event.kind == "leg":
        where = f"goes on from {values['resumed_from']}" if values["resumed_from"] else "begins"
        return f"{where} on {values['devices']} x {values['chip']}, corpus {values['corpus']}"
    return values["text"]

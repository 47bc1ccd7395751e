"""Show the progress of a run on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from bench.analysis.schedule import Task
from bench.analysis.warnings import disturbances
from bench.format import NUMBER, duration, number, plain
from bench.records.record import Record
from gpt2.terminal import LiveLine


class Progress(LiveLine):
    """A bench.run.executor.Watcher that prints; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._title = ""
        self._state = ""
        self._start = 0.0
        self._left: float | None = None
        self._warned: set[str] = set()
        super().__init__(self._line, console)

    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None:
        self._title = f"round {task.repetition}/{rounds}  {plain(task.title)}"
        self._state, self._start, self._left = "starting", time.monotonic(), seconds_left
        if not self.is_drawn:
            left = f", about {duration(seconds_left)} left" if seconds_left is not None else ""
            self.print(Text(f"{self._title} ...{left}"))

    def note(self, text: str) -> None:
        self.print(Text(text))

    def waiting(self, what: str) -> None:
        """Show what a node waits for."""
        self._title, self._state, self._start, self._left = what, "", time.monotonic(), None
        if not self.is_drawn:
            self.print(Text(what))

    def working(self, phase: str, steps: int, tps: float | None) -> None:
        speed = f", {number(tps)} tokens/s in the last block" if tps is not None else ""
        self._state = f"{phase}, step {steps + 1}{speed}"

    def finished(self, record: Record) -> None:
        measured = record.measurement
        if record.ceiling:
            best = record.ceiling.best
            result = f"{best.flops_per_second / 1e12:.3g} TFLOP/s ({best.number_format})"
        elif measured and record.status == "ok":
            tps = measured.tokens_per_second
            if measured.first_step_seconds is not None:
                first = f"first step {number(measured.first_step_seconds)} s"
            else:
                first = f"first line after {number(measured.startup_seconds)} s"
            result = f"{number(tps)} tokens/s, {first}" if tps else f"{len(measured.losses)} losses, {first}"
        else:
            reason = (record.error or "").strip().splitlines()
            result = f"{record.status}: {plain(reason[0])}" if reason else record.status
        self.print(Text(f"{self._title}: {result}"))
        warnings = disturbances(record)  # always shown, because they come and go
        for warning in record.warnings:
            kind = NUMBER.sub("#", warning)  # each kind once; the report counts them
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.append(warning)
        for warning in warnings:
            self.print(Text(f"  warning: {plain(warning)}"))

    def _line(self) -> Text:
        if not self._title:
            return Text("checking the machine and the data")
        elapsed = time.monotonic() - self._start
        left = f", about {duration(max(0.0, self._left - elapsed))} left" if self._left is not None else ""
        state = f": {self._state}" if self._state else ""
        return Text(f"{self._title}{state} ({duration(elapsed)}{left})", overflow="ellipsis", no_wrap=True)

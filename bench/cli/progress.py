"""Show the progress of a run on stderr: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from bench.analysis.schedule import Task
from bench.analysis.warnings import disturbances
from bench.format import NUMBER, duration, number, plain
from bench.records.record import Record
from gpt2.terminal import stderr_console


class Progress:
    """A bench.run.executor.Watcher that prints; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or stderr_console()
        self._title = ""
        self._state = ""
        self._start = 0.0
        self._left: float | None = None
        self._warned: set[str] = set()
        # Redrawn rarely, because the machine is being measured.
        self._live = Live(
            console=self._console, refresh_per_second=2, transient=True, get_renderable=self._line
        )

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None:
        self._title = f"round {task.repetition}/{rounds}  {plain(task.title)}"
        self._state, self._start, self._left = "starting", time.monotonic(), seconds_left
        if not self._console.is_terminal:
            left = f", about {duration(seconds_left)} left" if seconds_left is not None else ""
            self._print(f"{self._title} ...{left}")

    def note(self, text: str) -> None:
        self._print(text)

    def waiting(self, what: str) -> None:
        """Show what a node waits for."""
        self._title, self._state, self._start, self._left = what, "", time.monotonic(), None
        if not self._console.is_terminal:
            self._print(what)

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
        self._print(f"{self._title}: {result}")
        warnings = disturbances(record)  # always shown, because they come and go
        for warning in record.warnings:
            kind = NUMBER.sub("#", warning)  # each kind once; the report counts them
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.append(warning)
        for warning in warnings:
            self._print(f"  warning: {plain(warning)}")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)

    def _line(self) -> Text:
        if not self._title:
            return Text("checking the machine and the data")
        elapsed = time.monotonic() - self._start
        left = f", about {duration(max(0.0, self._left - elapsed))} left" if self._left is not None else ""
        state = f": {self._state}" if self._state else ""
        return Text(f"{self._title}{state} ({duration(elapsed)}{left})", overflow="ellipsis", no_wrap=True)

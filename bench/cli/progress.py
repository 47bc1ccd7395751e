"""Show the progress of a run on stderr: a growing block on a terminal, elsewhere a line for each process."""

from __future__ import annotations

import time
from statistics import geometric_mean

from rich.console import Console, Group
from rich.text import Text

from bench.analysis.run_records import not_carried, together
from bench.analysis.schedule import Task
from bench.analysis.warnings import disturbances
from bench.format import NUMBER, duration, number, plain, status_word, times
from bench.records.record import RUNGS, Record
from bench.report.one_run.screen import bar
from gpt2.terminal import LiveLine

NAME_COLUMNS, BAR_COLUMNS = 28, 20


class Progress(LiveLine):
    """A bench.run.executor.Watcher that prints; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._title = ""
        self._state = ""
        self._start = 0.0
        self._begun = time.monotonic()
        self._left: float | None = None
        self._warned: set[str] = set()
        self._rungs: dict[str, list[Record]] = {}
        """Records of each rung so far, in the ladder's order; for the block on a terminal."""
        super().__init__(self._block, console)

    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None:
        where = "trying" if task.kind == "scout" else f"round {task.repetition}/{rounds}"
        again = " again" if task.kind == "scout" and task.repetition > 1 and not task.together else ""
        self._title = f"{where}{again}  {plain(task.title)}"
        self._state, self._start, self._left = "starting", time.monotonic(), seconds_left

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
        if record.kind in (*RUNGS, "scout"):
            # Its rounds, or its tries before them.
            name = " and ".join(together(record)) or record.rung
            before = [r for r in self._rungs.get(name, []) if r.kind == record.kind]
            self._rungs[name] = [*before, record]
        if not self.is_drawn or record.status != "ok":
            left = self._seconds_left()
            after = f"; about {duration(left)} left" if left is not None else ""
            self.print(Text(f"{self._title}: {_result(record)}{after}"))
        warnings = disturbances(record)  # always shown, because they come and go
        for warning in record.warnings:
            kind = NUMBER.sub("#", warning)  # each kind once; the report counts them
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.append(warning)
        for warning in warnings:
            self.print(Text(f"  warning: {plain(warning)}"))

    def _seconds_left(self) -> float | None:
        return None if self._left is None else max(0.0, self._left - (time.monotonic() - self._start))

    def _block(self) -> Group:
        """The rungs measured so far, and what runs now."""
        room = max(3, self.console.height - 4)
        lines, before = [], None
        for name, records in self._rungs.items():
            speed, words = _so_far(records)
            gain = f"  {times(speed / before)}" if speed and before else ""
            told = f"{number(speed):>10} tokens/s{gain}" if speed else f"  {words}"
            lines.append(
                Text(f"{name[:NAME_COLUMNS]:<{NAME_COLUMNS}}{told}", overflow="ellipsis", no_wrap=True)
            )
            before = speed or before
        return Group(*lines[-room:], self._line())

    def _line(self) -> Text:
        if not self._title:
            return Text("checking the machine and the data")
        now = time.monotonic()
        left = self._seconds_left()
        state = f": {self._state}" if self._state else ""
        text = f"{self._title}{state} ({duration(now - self._start)}"
        if left is not None:
            passed = now - self._begun
            text += f", about {duration(left)} left)  {bar(passed / (passed + left + 1e-9), BAR_COLUMNS)}"
        else:
            text += ")"
        return Text(text, overflow="ellipsis", no_wrap=True)


def _result(record: Record) -> str:
    """What came of a process, and of a try whether its rung is carried."""
    if record.scout is None or record.scout.over is None:
        return _measured(record)
    if record.scout.over == record.rung and not record.scout.together:  # the best, tried again
        return _measured(record)
    carried = "carried" if record.scout.carried else "not carried"
    if record.scout.ratio is None:
        return f"{carried}, {_measured(record)}"
    return f"{_measured(record)}; {carried}: {times(record.scout.ratio)} {plain(record.scout.over or '')}"


def _measured(record: Record) -> str:
    measured = record.measurement
    if record.ceiling:
        best = record.ceiling.best
        return f"{best.flops_per_second / 1e12:.3g} TFLOP/s ({best.number_format})"
    if measured and record.status == "ok":
        tps = measured.tokens_per_second
        if measured.first_step_seconds is not None:
            first = f"first step {number(measured.first_step_seconds)} s"
        else:
            first = f"first line after {number(measured.startup_seconds)} s"
        return f"{number(tps)} tokens/s, {first}" if tps else f"{len(measured.losses)} losses, {first}"
    reason = (record.error or "").strip().splitlines()
    word = status_word(record.status)
    return f"{word}: {plain(reason[0])}" if reason else word


def _so_far(records: list[Record]) -> tuple[float | None, str]:
    """Mean tokens per second over the rounds so far, or why there are none."""
    if not_carried(records[-1]):
        return None, _result(records[-1])
    speeds = [
        tps
        for r in records
        if r.status == "ok" and r.measurement and (tps := r.measurement.tokens_per_second)
    ]
    return (geometric_mean(speeds), "") if speeds else (None, _result(records[-1]))

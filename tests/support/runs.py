"""Runs of ladders within a test: a watcher that only remembers, and workers that train nothing."""

from __future__ import annotations

import sys

import pytest
from samples import measurement

from bench.analysis.schedule import Task
from bench.records.record import Outcome, Record
from bench.run import executor as processes

MADE_UP = Outcome(status="ok", measurement=measurement())


GOOD = f"import os, pathlib; pathlib.Path(os.environ['BENCH_OUT']).write_text({MADE_UP.model_dump_json()!r})"
"""A worker that trains nothing, and says that it was measured."""


class Silent:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def note(self, text: str) -> None: ...

    def waiting(self, what: str) -> None: ...

    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None: ...

    def working(self, phase: str, steps: int, tps: float | None) -> None:
        self.phases.append(phase)

    def finished(self, record: Record) -> None: ...


def instead_of_workers(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have a run start this program, or GOOD for a rung `good`, and not the worker that its record names."""
    genuine = processes.supervise

    def supervise(argv: list[str], *rest):
        return genuine([sys.executable, "-c", GOOD if "good" in argv else script], *rest)

    monkeypatch.setattr(processes, "supervise", supervise)

"""Records of a run's processes, made up from its tasks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from samples import measurement, record

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder
from bench.records.record import Record


def process(ladder: Ladder, task: Task, tps: float, **changes: Any) -> Record:
    """The record of a task that ran at this speed; one that is too slow ends itself."""
    too_slow = task.stop_below is not None and tps < task.stop_below
    facts = {
        "kind": task.kind,
        "ladder": ladder.name,
        "ladder_hash": ladder.hash,
        "protocol": asdict(ladder.protocol),
        "workload": asdict(ladder.workload),
        "toggles": task.rung.toggles,
        "changed": task.rung.changed,
        "expect": task.rung.expect,
        "measurement": measurement(tps, tokens_per_step=task.rung.toggles.tokens_per_step(32)),
        **({"status": "too_slow", "first_tokens_per_second": tps, "measurement": None} if too_slow else {}),
        **({"status": "unsupported", "error": task.refused, "measurement": None} if task.refused else {}),
        **changes,
    }
    return record(task.rung.name, task.rung.index, task.repetition, **facts)


def judged(task: Task, record: Record) -> Record:
    """The record as a run keeps it."""
    return task.judge(record) if task.judge else record

"""Find the results file that an interrupted run left, and make sure that going on with it mixes nothing.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from bench.ladder import Ladder
from bench.record import Environment, Record, read


class ResumeError(Exception):
    """There is nothing to go on with, or what there is does not belong to this run; the message says why."""


def unfinished(out: Path, ladder: Ladder, machine: Environment) -> tuple[Path, list[Record]]:
    """The newest results file of this ladder, on this machine if there is one, and its records.

    Raises ResumeError where there is none, or where ladder, protocol, code or machine differ from its; RecordError
    where it cannot be read.
    """
    found = [(path, read(path)[0]) for path in sorted(out.glob(f"*/{ladder.file_name}-*.jsonl"))]
    found = [(path, records) for path, records in found if records and records[0].ladder == ladder.name]
    here = [(path, records) for path, records in found if path.parent.name == machine.machine]
    if not found:
        raise ResumeError(f"{out}: no results of ladder {ladder.name!r} to go on with; leave out --resume")
    path, records = max(here or found, key=lambda run: run[1][-1].time)
    for what, there, now in _differences(records[0], ladder, machine):
        raise ResumeError(
            f"{path}: cannot go on with it: {what} was {there} and is {now}; leave out --resume to start anew"
        )
    return path, records


def _differences(record: Record, ladder: Ladder, machine: Environment) -> Iterator[tuple[str, str, str]]:
    """What must be equal, and is not: its name, what it was, what it is."""
    was = record.environment
    for name, there, now in (
        ("the chip", was.chip, machine.chip),
        ("the number of devices", was.device_count, machine.device_count),
        ("the machine's memory", was.memory_bytes, machine.memory_bytes),
        ("the device's memory", was.device_memory_bytes, machine.device_memory_bytes),
        ("torch", was.torch, machine.torch),
        ("Python", was.python, machine.python),
        *((name, was.versions.get(name), machine.versions.get(name)) for name in {**was.versions, **machine.versions}),
        ("the set environment", was.variables, machine.variables),
    ):
        if there != now:
            yield name, str(there), str(now)
    if record.ladder_hash != ladder.hash:
        yield "the ladder's workload or toggles (hash)", record.ladder_hash[:12], ladder.hash[:12]
    if was.code_hash != machine.code_hash:
        yield "the code of gpt2/ and bench/ (hash)", was.code_hash[:12], machine.code_hash[:12]
    # More rounds, or more patience, change no figure; how long a window is does.
    free = {"repeats", "until", "timeout_seconds"}
    for key, value in asdict(ladder.protocol).items():
        if key not in free and record.protocol.get(key, value) != value:
            yield f"protocol.{key}", str(record.protocol[key]), str(value)


def repair(path: Path) -> None:
    """Cut off a torn last line, so that the next record begins a line of its own."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        with path.open("r+b") as file:
            file.truncate(whole)

"""Which candidates a sweep tries, and in which order: a Plan of bench.runner. Imports no torch.

A candidate is one rung of a ladder with other values for some toggles.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from bench.axis import DOUBLED, Axis
from bench.ladder import Ladder, LadderError, Rung
from bench.record import Record
from bench.report.text import GIB
from bench.schedule import Task, ceiling_rung, same_step
from gpt2.toggles import HOST, Toggles, describe, resolve

HOPELESS = 0.8
"""Of the fastest candidate's speed: what is slower in the first round runs in no other, where a winner is sought."""

MOST_ACCUMULATED = 256
"""Passes per step of a process that a candidate's losses are held to: of a batch of 1,201 sequences, which only single
ones make up, they would take longer than anything else. Such a candidate cannot be called the fastest."""


def candidate(ladder: Ladder, base: Rung, changes: dict[str, Any], index: int, first: Rung | None) -> Rung:
    """`base` with other values for toggles. Raises ValueError where they make no whole."""
    toggles = resolve(ladder.workload, replace(base.toggles, **changes))
    name = ", ".join(f"{key}={value}" for key, value in changes.items()) or base.name
    return Rung(
        name=name,
        index=index,
        changed=describe(toggles, first.toggles if first else None, ladder.workload),
        expect=None,
        toggles=toggles,
        base=base.name,
        settings=_settings(ladder, base.toggles, toggles),
    )


def _settings(ladder: Ladder, was: Toggles, now: Toggles) -> tuple[str, ...]:
    """By which a worker that reads the ladder gets `now` from `was`."""
    derived = {"grad_accum_steps"} if ladder.workload.tokens_per_step is not None else set()
    before = asdict(was)
    return tuple(
        f"toggles.{key}={value}" for key, value in asdict(now).items() if value != before[key] and key not in derived
    )


def as_ladder(ladder: Ladder, base: Rung, axes: Sequence[Axis], task: Sequence[str] = ()) -> Ladder:
    """The ladder whose rungs are the candidates that are listed; doubling adds others. Raises LadderError.

    task: what the workload's fields are that are swept, too: "seq_len=512".
    """
    over = " and ".join([*(axis.key for axis in axes), *task])
    listed = [dict(zip([axis.key for axis in axes], values, strict=True)) for values in _grid(axes)]
    rungs: list[Rung] = []
    problem = None
    for changes in listed:
        try:
            rungs.append(candidate(ladder, base, changes, len(rungs), rungs[0] if rungs else None))
        except ValueError as error:
            problem = error
    if not rungs:
        raise LadderError(f"{ladder.path}: rung {base.name!r} with other values: {problem}")
    return replace(ladder, name=f"{ladder.name}, {base.name}, over {over}", rungs=tuple(rungs))


def _grid(axes: Sequence[Axis]) -> Iterator[tuple[Any, ...]]:
    return product(*(axis.values for axis in axes))


@dataclass
class Search:
    """The first round tries the candidates, those after it the ones that are left, each with an A/A control."""

    ladder: Ladder
    base: Rung
    axes: Sequence[Axis]
    """Of toggles."""
    end: float
    """Of its time, by time.monotonic(): no process begins that would, by what is known, end later."""
    best_only: bool = False
    """Whether only the fastest candidate matters."""
    _rungs: list[Rung] = field(default_factory=list)
    _ended: dict[tuple[str, int, int], Record] = field(default_factory=dict)
    _took: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def planned_rounds(self) -> int:
        return self.ladder.protocol.repeats

    def resume(self, records: Sequence[Record]) -> None:
        """Take what has been run for done."""
        for record in records:
            self.ended(record)

    def ended(self, record: Record, seconds: float | None = None) -> None:
        """Note an outcome: what is tried next depends on it."""
        if not record.cut_short:
            self._ended[record.key] = record
            self._took |= {record.key[:2]: seconds} if seconds is not None else {}

    def seconds_left(self, repetition: int, rounds: int) -> float | None:
        """Of rounds `repetition` to `rounds`; None in the first, when nobody knows which candidates there will be."""
        if repetition == 1 or not self._took:
            return None
        again = [rung.index for rung in self._rungs if ("sweep", rung.index, repetition) not in self._ended]
        later = [rung.index for rung in self._rungs if self._status(rung) == "ok"]
        return sum(self._took.get(("sweep", index), 0.0) for index in [*again, *later * (rounds - repetition)])

    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]:
        """All processes, in order."""
        for repetition in range(1, self.planned_rounds + 1):
            for task in self._round(repetition, note):
                if task.key in self._ended:
                    continue
                needed = self._took.get(task.key[:2], max(self._took.values(), default=0.0))
                if time.monotonic() + needed > self.end:
                    note(f"the time budget ends in round {repetition} of {self.planned_rounds}; the rest is not run")
                    return
                yield task

    def _round(self, repetition: int, note: Callable[[str], None]) -> Iterator[Task]:
        tried = self._first_round(note) if repetition == 1 else iter(self._left(repetition, note))
        for rung in tried:
            yield Task(kind="sweep", rung=rung, repetition=repetition)
        if repetition == 1:
            yield from self._parity()
        if self.planned_rounds > 1 and self._status(self._rungs[0]) == "ok":
            yield Task(kind="control", rung=self._rungs[0], repetition=repetition)
        if self.ladder.protocol.ceiling_seconds and repetition in (1, self.planned_rounds):
            for place, device in enumerate(dict.fromkeys(rung.toggles.device for rung in self._rungs)):
                yield Task(kind="control", rung=ceiling_rung(device, -1 - place), repetition=repetition)

    # --- the first round ------------------------------------------------------------------------------------------

    def _first_round(self, note: Callable[[str], None]) -> Iterator[Rung]:
        self._rungs = []
        others = [axis for axis in self.axes if axis.key != DOUBLED]
        batches = next((axis for axis in self.axes if axis.key == DOUBLED), None)
        for values in _grid(others):
            changes = dict(zip([axis.key for axis in others], values, strict=True))
            if batches:
                yield from self._batches(batches, changes, note)
            elif rung := self._candidate(changes, note):
                yield rung

    def _candidate(self, changes: dict[str, Any], note: Callable[[str], None]) -> Rung | None:
        """A new one; None where its toggles make no whole."""
        ordered = {axis.key: changes[axis.key] for axis in self.axes}
        try:
            first = self._rungs[0] if self._rungs else None
            rung = candidate(self.ladder, self.base, ordered, len(self._rungs), first)
        except ValueError as error:
            note(f"left out: {', '.join(f'{key}={value}' for key, value in ordered.items())}: {error}")
            return None
        self._rungs.append(rung)
        return rung

    def _batches(self, axis: Axis, changes: dict[str, Any], note: Callable[[str], None]) -> Iterator[Rung]:
        """Larger and larger batches until one does not fit, then the largest that does, by bisection."""
        fits: Rung | None = None
        fails: Rung | None = None
        mine: list[Rung] = []
        for size in axis.all_values():
            if needed := self._too_large(mine, size):
                note(f"{axis.key}={size} is not tried: {needed}")
                break
            rung = self._candidate({**changes, axis.key: size}, note)
            if rung is None and axis.doubling and size not in axis.values:
                break
            if rung is None:
                continue
            mine.append(rung)
            yield rung
            status = self._status(rung)
            if status == "ok":
                fits = rung
                continue
            if status == "out_of_memory":
                fails = rung
            note(f"no larger {axis.key} than {size} is tried: this one ended as {status}")
            break
        if axis.doubling and fits and fails:
            yield from self._between(axis.key, changes, fits, fails, note)

    def _between(
        self, key: str, changes: dict[str, Any], fits: Rung, fails: Rung, note: Callable[[str], None]
    ) -> Iterator[Rung]:
        low, high = fits.toggles.micro_batch_size, fails.toggles.micro_batch_size
        while sizes := [size for size in range(low + 1, high) if self._whole({**changes, key: size})]:
            size = sizes[len(sizes) // 2]
            rung = self._candidate({**changes, key: size}, note)
            assert rung is not None
            yield rung
            if self._status(rung) == "ok":
                low = size
            elif self._status(rung) == "out_of_memory":
                high = size
            else:
                return

    def _whole(self, changes: dict[str, Any]) -> bool:
        try:
            resolve(self.ladder.workload, replace(self.base.toggles, **changes))
        except ValueError:
            return False
        return True

    def _status(self, rung: Rung) -> str:
        record = self._ended.get(("sweep", rung.index, 1))
        return record.status if record else "not known"

    def _too_large(self, tried: Sequence[Rung], size: int) -> str | None:
        """Why a batch would take more memory than a machine has whose processor trains: Linux then ends processes.

        By the line through the two largest batches so far.
        """
        known = [r for rung in tried[-2:] if (r := self._ended.get(("sweep", rung.index, 1)))]
        peaks = [peak for r in known if r.measurement and (peak := r.measurement.peak_memory_bytes)]
        if len(peaks) < 2 or tried[-1].toggles.device != HOST:
            return None
        small, large = (rung.toggles.micro_batch_size for rung in tried[-2:])
        needed = peaks[1] + (peaks[1] - peaks[0]) / (large - small) * (size - large)
        there = known[-1].environment.memory_bytes
        if needed < there:
            return None
        return f"by the sizes before it would take {needed / GIB:.1f} GiB, and this machine has {there / GIB:.1f}"

    # --- what follows from it -------------------------------------------------------------------------------------

    def _parity(self) -> Iterator[Task]:
        """For each other size of a step, the first candidate that ran, accumulating as many tokens."""
        ran = [rung for rung in self._rungs if self._status(rung) == "ok"]
        sizes = {rung.toggles.tokens_per_step(1) for rung in ran[:1]}
        for rung in ran:
            first, size = ran[0], rung.toggles.tokens_per_step(1)
            if size in sizes:
                continue
            sizes.add(size)
            toggles = same_step(first.toggles, rung.toggles)
            if toggles and toggles.grad_accum_steps <= MOST_ACCUMULATED:
                settings = _settings(self.ladder, self.base.toggles, toggles)
                yield Task(kind="parity", rung=replace(rung, toggles=toggles, settings=settings), repetition=1)

    def _left(self, repetition: int, note: Callable[[str], None]) -> list[Rung]:
        """The first, to which all are held, and those that measured something and are not hopeless."""
        speeds = {}
        for rung in self._rungs:
            record = self._ended.get(("sweep", rung.index, 1))
            if record and record.status == "ok" and record.measurement:
                speeds[rung.index] = record.measurement.tokens_per_second or 0.0
        least = HOPELESS * max(speeds.values(), default=0.0) if self.best_only else 0.0
        left = [
            rung for rung in self._rungs if rung.index in speeds and (speeds[rung.index] >= least or not rung.index)
        ]
        dropped = [rung.name for rung in self._rungs if rung.index in speeds and rung not in left]
        if repetition == 2 and dropped:
            note(f"below {HOPELESS:.0%} of the fastest in round 1, so not run again: {'; '.join(dropped)}")
        return left

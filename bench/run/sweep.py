"""The candidates of a sweep, rungs with other values of some toggles, and the order in which they run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from bench.analysis.schedule import Cut, Task, ceiling_rung, same_step
from bench.analysis.scoreboard import scoreboard
from bench.format import GIB, status_word
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.ladder.sweep_axis import DOUBLED, Axis
from bench.records.record import Record
from gpt2.config.toggles import HOST, Toggles, describe, resolve

DROPPED_BELOW = 0.8
"""With --best, candidates below this share of the fastest are dropped after round 1."""

MOST_ACCUMULATED = 256
"""Most passes per step of a process whose losses a candidate's are compared with.

With more, as for a batch of 1,201 sequences, it would take longer than the rest of the sweep. A candidate
that needs more is not compared, and cannot be the winner.
"""

Note = Callable[[str], None]


def candidate(ladder: Ladder, base: Rung, changes: dict[str, Any], index: int, first: Rung | None) -> Rung:
    """Return `base` with other values of toggles. Raises ValueError where they exclude each other."""
    if "grad_accum_steps" in changes and ladder.workload.tokens_per_step is not None:
        raise ValueError(
            "grad_accum_steps follows from workload.tokens_per_step; sweep micro_batch_size instead"
        )
    toggles = resolve(ladder.workload, replace(base.toggles, **changes))
    return Rung(
        name=", ".join(f"{key}={value}" for key, value in changes.items()) or base.name,
        index=index,
        changed=describe(toggles, first.toggles if first else None, ladder.workload),
        expect=None,
        toggles=toggles,
        base=base.name,
        settings=ladder.settings(base.toggles, toggles),
        without=base.without,
    )


def as_ladder(ladder: Ladder, base: Rung, axes: Sequence[Axis], task: Sequence[str] = ()) -> Ladder:
    """Return a ladder whose rungs are the listed candidates; doubling adds others. Raises LadderError.

    task: values of swept workload fields, such as "seq_len=512".
    """
    over = " and ".join([*(axis.key for axis in axes), *task])
    rungs: list[Rung] = []
    problem = None
    for changes in grid(axes):
        try:
            rungs.append(candidate(ladder, base, changes, len(rungs), rungs[0] if rungs else None))
        except ValueError as error:
            problem = error
    if not rungs:
        raise LadderError(f"{ladder.path}: rung {base.name!r} with other values: {problem}")
    # Intervals of dropped candidates never get narrow, and no candidate stands on another.
    protocol = replace(ladder.protocol, until=None, carry="always")
    name = f"{ladder.name}, {base.name}, over {over}"
    return replace(ladder, name=name, rungs=tuple(rungs), protocol=protocol)


def grid(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the listed values; the last axis varies fastest."""
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip([axis.key for axis in axes], values, strict=True))


@dataclass
class Search:
    """A TaskSource: all candidates in the first round, later those that are left, each with a control."""

    ladder: Ladder
    base: Rung
    axes: Sequence[Axis]
    """Axes over toggles."""
    end: float
    """Deadline, by time.monotonic(): no process begins that is expected to end later."""
    best_only: bool = False
    """Whether only the fastest candidate matters."""
    cut: Cut | None = None
    _rungs: list[Rung] = field(default_factory=list)
    _held: set[int] = field(default_factory=set)
    """Tokens per step for which losses are compared already."""
    _ended: dict[tuple[str, int, int], Record] = field(default_factory=dict)
    _index: dict[Toggles, int] = field(default_factory=dict)
    """Index of each candidate, kept because a resumed sweep may have another order."""
    _took: dict[tuple[str, int], float] = field(default_factory=dict)
    _resumed: bool = False
    _new: bool = False
    """Whether a candidate has run since resuming."""

    @property
    def planned_rounds(self) -> int:
        return self.ladder.protocol.repeats

    def resume(self, records: Sequence[Record]) -> None:
        """Take processes of earlier records as done."""
        for record in records:
            self.ended(record, record.process_seconds)
            if record.kind == "sweep":
                self._index[record.toggles.as_toggles] = record.rung_index
        self._resumed, self._new = bool(records), False

    def ended(self, record: Record, seconds: float | None = None) -> None:
        """Note how a process ended, on which later tasks depend."""
        if record.cut_short:
            return
        self._ended[record.key] = record
        if seconds is not None:
            self._took[record.key[:2]] = seconds
            self._new |= record.kind == "sweep"

    def seconds_left(self, repetition: int, rounds: int) -> float | None:
        """Estimate the seconds of rounds `repetition` to `rounds`; None in the first round."""
        if repetition == 1 or not self._took:
            return None
        left = [rung.index for rung in self._left(repetition, lambda _: None)]
        again = [index for index in left if ("sweep", index, repetition) not in self._ended]
        return sum(self._took.get(("sweep", index), 0.0) for index in [*again, *left * (rounds - repetition)])

    def tasks(self, records: list[Record], note: Note) -> Iterator[Task]:
        """Yield all tasks, in order."""
        for repetition in range(1, self.planned_rounds + 1):
            late: list[str] = []
            for task in self._round(repetition, note):
                if task.key in self._ended:
                    continue
                if task.kind in ("sweep", "parity") and self._over(repetition):
                    late += [task.rung.name] if task.kind == "sweep" else []
                    continue
                needed = self._took.get(task.key[:2], max(self._took.values(), default=0.0))
                if time.monotonic() + needed > self.end:
                    self.cut = Cut(task=task, why=self._why(repetition), left=self._unrun(repetition))
                    note(f"{task.title}: not begun: {self.cut.why}")
                    return
                yield task
            if late:
                note(
                    f"round {repetition} is complete, so later processes have no reference in it; not run: "
                    f"{'; '.join(late)}; without --resume a sweep measures all anew"
                )

    def _over(self, repetition: int) -> bool:
        """Whether a round has had its control, which comes after its candidates."""
        return self._first is not None and ("control", self._first.index, repetition) in self._ended

    def _why(self, repetition: int) -> str:
        growing = repetition == 1 and any(axis.doubling for axis in self.axes)
        unknown = f", before the largest {DOUBLED} that fits was found" if growing else ""
        return f"--budget ended the sweep in round {repetition} of {self.planned_rounds}{unknown}"

    def _unrun(self, repetition: int) -> int:
        """Estimate the number of processes left, from this round on, without those for loss parity."""
        listed = self.ladder.rungs if repetition == 1 else self._left(repetition, lambda _: None)
        controls = 1 if self.planned_rounds > 1 else 0
        rounds = self.planned_rounds - repetition + 1
        ceilings = min(rounds, 2 if repetition == 1 else 1)  # in the first and in the last round
        ceilings = ceilings if self.ladder.protocol.ceiling_seconds else 0
        done = sum(key[0] != "parity" and key[2] == repetition for key in self._ended)
        return max(1, rounds * (len(listed) + controls) + ceilings - done)

    def _round(self, repetition: int, note: Note) -> Iterator[Task]:
        self._held = set() if repetition == 1 else self._held
        for rung in self._first_round(note) if repetition == 1 else self._left(repetition, note):
            yield Task(kind="sweep", rung=rung, repetition=repetition)
            if repetition == 1:
                yield from self._parity(rung)
        first = self._first
        # Processes after an interruption have no other reference.
        if first and (self.planned_rounds > 1 or (self._resumed and self._new)):
            yield Task(kind="control", rung=first, repetition=repetition)
        if self.ladder.protocol.ceiling_seconds and repetition in (1, self.planned_rounds):
            for place, device in enumerate(dict.fromkeys(rung.toggles.device for rung in self._rungs)):
                yield Task(kind="ceiling", rung=ceiling_rung(device, place), repetition=repetition)

    @property
    def _first(self) -> Rung | None:
        """The first candidate that ran, the reference of the others."""
        return next((rung for rung in self._rungs if self._status(rung) == "ok"), None)

    def _status(self, rung: Rung) -> str | None:
        """Status in the first round; None if it did not run or was interrupted."""
        record = self._ended.get(("sweep", rung.index, 1))
        return record.status if record else None

    # --- the first round

    def _first_round(self, note: Note) -> Iterator[Rung]:
        self._rungs = []
        batches = next((axis for axis in self.axes if axis.key == DOUBLED), None)
        for changes in grid([axis for axis in self.axes if axis.key != DOUBLED]):
            if batches:
                yield from self._batches(batches, changes, note)
            elif rung := self._candidate(changes, note):
                yield rung

    def _candidate(self, changes: dict[str, Any], note: Note) -> Rung | None:
        """Return a new candidate; None where its toggles exclude each other."""
        ordered = {axis.key: changes[axis.key] for axis in self.axes}
        try:
            rung = candidate(self.ladder, self.base, ordered, 0, self._rungs[0] if self._rungs else None)
        except ValueError as error:
            note(f"left out: {', '.join(f'{key}={value}' for key, value in ordered.items())}: {error}")
            return None
        index = self._index.setdefault(rung.toggles, max(self._index.values(), default=-1) + 1)
        self._rungs.append(replace(rung, index=index))
        return self._rungs[-1]

    def _batches(self, axis: Axis, changes: dict[str, Any], note: Note) -> Iterator[Rung]:
        """Yield larger and larger batches until one does not fit, then bisect for the largest that does."""
        fits: Rung | None = None
        fails: Rung | None = None
        mine: list[Rung] = []
        for size in self._sizes(axis, changes):
            if needed := self._too_large(mine, size):
                note(f"{axis.key}={size} is not run: {needed}")
                break
            rung = self._candidate({**changes, axis.key: size}, note)
            if rung is None:
                continue
            mine.append(rung)
            yield rung
            status = self._status(rung)
            if status == "ok":
                fits = rung
                continue
            if status:
                note(f"no larger {axis.key} than {size} is run: this one is {status_word(status)}")
            fails = rung if status == "out_of_memory" else None
            break
        if axis.doubling and fits and fails:
            yield from self._between(
                fits.toggles.micro_batch_size, fails.toggles.micro_batch_size, changes, note
            )

    def _sizes(self, axis: Axis, changes: dict[str, Any]) -> Iterator[int]:
        """Yield the listed sizes and then, if the axis doubles, each about twice the one before."""
        yield from axis.values
        larger = axis.values[-1]
        while axis.doubling and (larger := self._larger(larger, changes)):
            yield larger

    def _larger(self, size: int, changes: dict[str, Any]) -> int | None:
        """Return twice `size`, or the next size from there (else the largest) that divides a fixed step."""
        tokens = self.ladder.workload.tokens_per_step
        if tokens is None:
            return 2 * size
        whole = self._whole(range(size + 1, tokens // self.ladder.workload.seq_len + 1), changes)
        return next((each for each in whole if each >= 2 * size), whole[-1] if whole else None)

    def _between(self, low: int, high: int, changes: dict[str, Any], note: Note) -> Iterator[Rung]:
        """Bisect between `low`, which fits, and `high`, which does not."""
        while sizes := self._whole(range(low + 1, high), changes):
            size = sizes[len(sizes) // 2]
            rung = self._candidate({**changes, DOUBLED: size}, note)
            assert rung is not None
            yield rung
            if self._status(rung) == "ok":
                low = size
            elif self._status(rung) == "out_of_memory":
                high = size
            else:
                return

    def _whole(self, sizes: Sequence[int], changes: dict[str, Any]) -> list[int]:
        """Return the batch sizes of which optimiser steps can consist."""
        whole = []
        for size in sizes:
            try:
                resolve(self.ladder.workload, replace(self.base.toggles, **{**changes, DOUBLED: size}))
            except ValueError:
                continue
            whole.append(size)
        return whole

    def _too_large(self, tried: Sequence[Rung], size: int) -> str | None:
        """Return why a batch needs more than the machine's memory on a CPU, where Linux would kill processes.

        Extrapolates linearly from the two largest batches so far.
        """
        known = [r for rung in tried[-2:] if (r := self._ended.get(("sweep", rung.index, 1)))]
        peaks = [peak for r in known if r.measurement and (peak := r.measurement.peak_memory_bytes)]
        if len(peaks) < 2 or tried[-1].toggles.device != HOST:
            return None
        small, large = (rung.toggles.micro_batch_size for rung in tried[-2:])
        needed = peaks[1] + (peaks[1] - peaks[0]) / (large - small) * (size - large)
        needed *= tried[-1].toggles.processes
        there = known[-1].environment.memory_bytes
        if needed < there:
            return None
        return f"extrapolated, it needs {needed / GIB:.1f} GiB, and this machine has {there / GIB:.1f}"

    def _parity(self, rung: Rung) -> Iterator[Task]:
        """Yield, for each new size of step, the first candidate accumulating as many tokens, on one rank.

        It follows the first candidate of that size directly, so that a budget cannot cut it off alone.
        """
        first, size = self._first, rung.toggles.tokens_per_step(1)
        if first is None or self._status(rung) != "ok" or size in self._held:
            return
        self._held.add(size)
        like = first.toggles
        if rung is first:
            like = replace(like, world_size=1, sharding="none")
        toggles = same_step(like, rung.toggles)
        if toggles and toggles != rung.toggles and toggles.grad_accum_steps <= MOST_ACCUMULATED:
            own = self.ladder.settings(self.base.toggles, toggles)
            yield Task(kind="parity", rung=replace(rung, toggles=toggles, settings=own), repetition=1)

    # --- later rounds

    def _left(self, repetition: int, note: Note) -> list[Rung]:
        """Return the reference and the candidates that were measured; with --best, those that may win."""
        ran = [rung for rung in self._rungs if self._status(rung) == "ok"]
        if not self.best_only or not ran:
            return ran
        board = scoreboard([record for record in self._ended.values() if record.repetition == 1])
        # Speed-ups, because speeds before and after an interruption do not compare.
        over = {row.index: row.speedup.value if row.speedup else math.inf for row in board.sound}
        least = DROPPED_BELOW * max((value for value in over.values() if value < math.inf), default=0.0)
        left = [rung for rung in ran if rung is ran[0] or over.get(rung.index, 0.0) >= max(least, 1e-9)]
        if repetition == 2 and (dropped := [rung.name for rung in ran if rung not in left]):
            note(
                f"not run again, below {DROPPED_BELOW:.0%} of the fastest in round 1 or with a failed check: "
                f"{'; '.join(dropped)}"
            )
        return left

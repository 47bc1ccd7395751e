"""Which candidates a sweep tries, and in which order: a Plan of bench.run.runner. Imports no torch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.analysis.schedule import Cut, Task, ceiling_rung, same_step
from bench.analysis.scoreboard import scoreboard
from bench.format import GIB
from bench.ladder.ladder import Ladder, Rung
from bench.ladder.sweep_axis import DOUBLED, Axis
from bench.records.record import Record
from bench.run.sweep.candidate import candidate, grid, settings
from gpt2.config.toggles import HOST, Toggles, resolve

HOPELESS = 0.8
"""Of the fastest candidate's speed: what is slower in the first round runs in no other, where a winner is
sought.
"""

MOST_ACCUMULATED = 256
"""Passes per step of a process that a candidate's losses are held to: of a batch of 1,201 sequences, which
only single ones make up, they would take longer than anything else. Such a candidate cannot be called the
fastest.
"""

Note = Callable[[str], None]


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
    cut: Cut | None = None
    _rungs: list[Rung] = field(default_factory=list)
    _held: set[int] = field(default_factory=set)
    """Sizes of steps whose losses are held to something."""
    _ended: dict[tuple[str, int, int], Record] = field(default_factory=dict)
    _index: dict[Toggles, int] = field(default_factory=dict)
    """Of each candidate ever tried: a resumed sweep may meet them in another order."""
    _took: dict[tuple[str, int], float] = field(default_factory=dict)
    _resumed: bool = False
    _new: bool = False
    """Whether a candidate has run since."""

    @property
    def planned_rounds(self) -> int:
        return self.ladder.protocol.repeats

    def resume(self, records: Sequence[Record]) -> None:
        """Take what has been run for done."""
        for record in records:
            self.ended(record)
            if record.kind == "sweep":
                self._index[record.toggles.as_toggles] = record.rung_index
        self._resumed = bool(records)

    def ended(self, record: Record, seconds: float | None = None) -> None:
        """Note an outcome: what is tried next depends on it."""
        if not record.cut_short:
            self._ended[record.key] = record
            self._took |= {record.key[:2]: seconds} if seconds is not None else {}
            self._new |= seconds is not None and record.kind == "sweep"

    def seconds_left(self, repetition: int, rounds: int) -> float | None:
        """Of rounds `repetition` to `rounds`; None in the first, when nobody knows which candidates there
        will be.
        """
        if repetition == 1 or not self._took:
            return None
        again = [rung.index for rung in self._rungs if ("sweep", rung.index, repetition) not in self._ended]
        later = [rung.index for rung in self._rungs if self._status(rung) == "ok"]
        return sum(
            self._took.get(("sweep", index), 0.0) for index in [*again, *later * (rounds - repetition)]
        )

    def tasks(self, records: list[Record], note: Note) -> Iterator[Task]:
        """All processes, in order."""
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
                    f"round {repetition} is over, and what runs now has nothing in it to be held to: not run "
                    f"in it: {'; '.join(late)}; without --resume a sweep measures all anew"
                )

    def _over(self, repetition: int) -> bool:
        """Whether a round has had its control, the last of its candidates."""
        return self._first is not None and ("control", self._first.index, repetition) in self._ended

    def _why(self, repetition: int) -> str:
        growing = repetition == 1 and any(axis.doubling for axis in self.axes)
        unknown = f", before the largest {DOUBLED} that fits was found" if growing else ""
        return f"--budget ended the sweep in round {repetition} of {self.planned_rounds}{unknown}"

    def _unrun(self, repetition: int) -> int:
        """Processes from this round on that have not run, if all candidates run that are listed; parity left
        out.
        """
        listed = self.ladder.rungs if repetition == 1 else self._left(repetition, lambda _: None)
        controls = 1 if self.planned_rounds > 1 else 0
        ceilings = (
            1 if self.ladder.protocol.ceiling_seconds else 0
        )  # of the last round; in a first one, of that too
        rounds = self.planned_rounds - repetition + 1
        done = sum(key[0] != "parity" and key[2] == repetition for key in self._ended)
        return max(
            1, rounds * (len(listed) + controls) + ceilings * min(rounds, 2 if repetition == 1 else 1) - done
        )

    def _round(self, repetition: int, note: Note) -> Iterator[Task]:
        self._held = set() if repetition == 1 else self._held
        for rung in self._first_round(note) if repetition == 1 else self._left(repetition, note):
            yield Task(kind="sweep", rung=rung, repetition=repetition)
            if repetition == 1:
                yield from self._parity(rung)
        first = self._first
        # What runs after an interruption has nothing else to pair with.
        if first and (self.planned_rounds > 1 or (self._resumed and self._new)):
            yield Task(kind="control", rung=first, repetition=repetition)
        if self.ladder.protocol.ceiling_seconds and repetition in (1, self.planned_rounds):
            for place, device in enumerate(dict.fromkeys(rung.toggles.device for rung in self._rungs)):
                yield Task(kind="ceiling", rung=ceiling_rung(device, place), repetition=repetition)

    @property
    def _first(self) -> Rung | None:
        """The first candidate that ran: all others are held to it."""
        return next((rung for rung in self._rungs if self._status(rung) == "ok"), None)

    def _status(self, rung: Rung) -> str | None:
        """How it ended in the first round; None where it was not tried, or the user ended it."""
        record = self._ended.get(("sweep", rung.index, 1))
        return record.status if record else None

    # --- the first round
    # ------------------------------------------------------------------------------------------

    def _first_round(self, note: Note) -> Iterator[Rung]:
        self._rungs = []
        batches = next((axis for axis in self.axes if axis.key == DOUBLED), None)
        for changes in grid([axis for axis in self.axes if axis.key != DOUBLED]):
            if batches:
                yield from self._batches(batches, changes, note)
            elif rung := self._candidate(changes, note):
                yield rung

    def _candidate(self, changes: dict[str, Any], note: Note) -> Rung | None:
        """A new one; None where its toggles make no whole."""
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
        """Larger and larger batches until one does not fit, then the largest that does, by bisection."""
        fits: Rung | None = None
        fails: Rung | None = None
        mine: list[Rung] = []
        for size in self._sizes(axis, changes):
            if needed := self._too_large(mine, size):
                note(f"{axis.key}={size} is not tried: {needed}")
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
                note(f"no larger {axis.key} than {size} is tried: this one ended as {status}")
            fails = rung if status == "out_of_memory" else None
            break
        if axis.doubling and fits and fails:
            yield from self._between(
                fits.toggles.micro_batch_size, fails.toggles.micro_batch_size, changes, note
            )

    def _sizes(self, axis: Axis, changes: dict[str, Any]) -> Iterator[int]:
        """Those that are listed and then, if they go on, each about twice the one before."""
        yield from axis.values
        larger = axis.values[-1]
        while axis.doubling and (larger := self._larger(larger, changes)):
            yield larger

    def _larger(self, size: int, changes: dict[str, Any]) -> int | None:
        """Twice `size`; of those that divide a step of a fixed size, the next above that, or else the
        largest.
        """
        tokens = self.ladder.workload.tokens_per_step
        if tokens is None:
            return 2 * size
        whole = self._whole(range(size + 1, tokens // self.ladder.workload.seq_len + 1), changes)
        return next((each for each in whole if each >= 2 * size), whole[-1] if whole else None)

    def _between(self, low: int, high: int, changes: dict[str, Any], note: Note) -> Iterator[Rung]:
        """`low` fits and `high` does not."""
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
        """Of these batches, those that optimiser steps can be made of."""
        found = []
        for size in sizes:
            try:
                resolve(self.ladder.workload, replace(self.base.toggles, **{**changes, DOUBLED: size}))
            except ValueError:
                continue
            found.append(size)
        return found

    def _too_large(self, tried: Sequence[Rung], size: int) -> str | None:
        """Why a batch would take more memory than a machine has whose processor trains: Linux then ends
        processes.

        By the line through the two largest batches so far.
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
        return f"by the sizes before it would take {needed / GIB:.1f} GiB, and this machine has {there / GIB:.1f}"

    def _parity(self, rung: Rung) -> Iterator[Task]:
        """For each size of a step, the first candidate that ran accumulating as many tokens; if it has ranks,
        on one.

        Directly after the first candidate of that size: a budget that ends later takes no proof away.
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
            own = settings(self.ladder, self.base.toggles, toggles)
            yield Task(kind="parity", rung=replace(rung, toggles=toggles, settings=own), repetition=1)

    # --- the rounds after it
    # --------------------------------------------------------------------------------------

    def _left(self, repetition: int, note: Note) -> list[Rung]:
        """The first, to which all are held, and those that measured something; for a winner, those with a
        chance.
        """
        ran = [rung for rung in self._rungs if self._status(rung) == "ok"]
        if not self.best_only or not ran:
            return ran
        board = scoreboard([record for record in self._ended.values() if record.repetition == 1])
        # Over the first one: where an interruption cut the round in two, speeds of its parts do not compare.
        over = {row.index: row.speedup.value if row.speedup else math.inf for row in board.sound}
        least = HOPELESS * max((value for value in over.values() if value < math.inf), default=0.0)
        left = [rung for rung in ran if rung is ran[0] or over.get(rung.index, 0.0) >= max(least, 1e-9)]
        if repetition == 2 and (dropped := [rung.name for rung in ran if rung not in left]):
            note(
                f"below {HOPELESS:.0%} of the fastest in round 1, or something is held against them, so not "
                f"run again: {'; '.join(dropped)}"
            )
        return left

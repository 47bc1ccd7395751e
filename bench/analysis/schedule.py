"""Which processes a run consists of, in order: rungs, their controls, and ablations."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal, Protocol, TypeVar

from bench.analysis.run_records import varying
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.records.record import ABLATION, RUNGS, Kind, Record
from bench.stats import LEAST_ROUNDS_UNTIL
from gpt2.config.toggles import Toggles, describe, resolve
from gpt2.config.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process to run."""

    kind: Kind
    rung: Rung
    repetition: int
    stop_below: float | None = None
    """Tokens/s below which its first steps end it, as it is being tried only; None for no limit."""
    refused: str | None = None
    """Why there is no such process: its toggles do not fit what was carried."""
    together: tuple[str, ...] = ()
    """Names of rungs that are tried together; empty where one is tried by itself."""
    proofs: Literal["each", "once", "none"] = "each"
    """Whether each process of the rung takes proofs, this one for all of them, or another one."""
    judge: Callable[[Record], Record] | None = None
    """Adds to its record what trying the rung found."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Key of its record, and of the same process of a resumed run."""
        return self.kind, self.rung.index, self.repetition

    @property
    def is_ceiling(self) -> bool:
        """Whether it trains nothing and measures the machine instead."""
        return self.kind == "ceiling"

    @property
    def title(self) -> str:
        """Name of the task for a person who follows the run."""
        if self.is_ceiling:
            return "measured ceiling"
        if self.together:
            return f"{', '.join(self.together)} together"
        names = {"alone": "alone", "left_out": "left out", "control": "again", "parity": "parity"}
        return f"{self.rung.name} ({names[self.kind]})" if self.kind in names else self.rung.name

    @property
    def name(self) -> str:
        """Name of what is trained: the same for a rung and its control."""
        return f"{'cumulative' if self.kind == 'control' else self.kind} {self.rung.name}"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where a run ran out of time."""

    task: Task
    """The first task that was not begun."""
    why: str
    left: int
    """Number of tasks that were not begun, this one included, as far as they are known."""


def variant(ladder: Ladder, rung: Rung, kind: Kind) -> Rung | None:
    """`rung` as a process of this kind trains it; None where there is no such process.

    alone: its changes alone on the first rung. left_out: the last rung without its changes. parity: the rung
    before, accumulating as many tokens per step as this one takes; for a first rung on several ranks the rung
    itself on one. All others: the rung as it is. Raises LadderError where the toggles do not fit together.
    """
    if kind not in (*ABLATION, "parity"):
        return rung
    if rung.external:
        return None
    own_above = [other for other in ladder.own if other.index < rung.index]
    before = own_above[-1].toggles if own_above else None
    if kind == "parity":
        if before is None and rung.toggles.world_size > 1:
            before = replace(rung.toggles, world_size=1, sharding="none")
        toggles = same_step(before, rung.toggles) if before else None
        if toggles == rung.toggles:  # it only accumulates more, so no other process takes such steps
            return None
    else:
        rungs = full_set(ladder.own)
        if before is None or rung not in rungs:
            return None
        try:
            toggles = ablated([other.toggles for other in rungs], len(own_above), kind, ladder.workload)
        except ValueError as error:
            what = f"rung {rung.name!r} {kind.replace('_', ' ')}"
            raise LadderError(f"{ladder.path}: {what}: {error}") from None
        before = (rungs[0] if kind == "alone" else rungs[-1]).toggles
    if toggles is None:
        return None
    return replace(rung, toggles=toggles, changed=describe(toggles, before, ladder.workload), expect=None)


Expecting = TypeVar("Expecting", bound="_Expecting")


class _Expecting(Protocol):
    @property
    def expect(self) -> str | None: ...


def full_set(rungs: Sequence[Expecting]) -> Sequence[Expecting]:
    """The rungs up to the last one that is meant to run: the last rungs may be meant to run out of memory."""
    meant = [place for place, rung in enumerate(rungs) if rung.expect != "out_of_memory"]
    return rungs[: max(meant, default=-1) + 1]


def ablated(rungs: Sequence[Toggles], place: int, kind: Kind, workload: Workload) -> Toggles:
    """The first of `rungs` with the changes of one of them, or the last without them. Raises ValueError."""
    changes = [changes_of(before, after, workload) for before, after in pairwise(rungs)]
    chosen = [changes[place - 1]] if kind == "alone" else [*changes[: place - 1], *changes[place:]]
    toggles = rungs[0]
    for change in chosen:
        toggles = replace(toggles, **change)
    return resolve(workload, toggles)


def changes_of(before: Toggles, after: Toggles, workload: Workload) -> dict[str, Any]:
    """What `after` sets to another value, without what follows from the workload's tokens per step."""
    derived = {"grad_accum_steps"} if workload.tokens_per_step is not None else set()
    return {name: getattr(after, name) for name in varying(before, after) if name not in derived}


def same_step(before: Toggles, after: Toggles) -> Toggles | None:
    """`before` accumulating the tokens per step of `after`; None where its ranks are too many for that."""
    sequences, rest = divmod(after.tokens_per_step(1), before.world_size)
    if rest:
        return None
    micro_batch = math.gcd(before.micro_batch_size, sequences)
    toggles = replace(before, micro_batch_size=micro_batch, grad_accum_steps=sequences // micro_batch)
    if toggles.grad_accum_steps > 1:  # what cannot accumulate takes the value with the same arithmetic
        if toggles.cuda_graphs:
            toggles = replace(toggles, compile="default")
        if toggles.weight_casts == "optimizer":
            toggles = replace(toggles, weight_casts="forward")
        if toggles.weights != "float32":
            toggles = replace(toggles, weights="float32")
    return toggles


def _kind(rung: Rung) -> Kind:
    return "external" if rung.external else "cumulative"


def ceiling_rung(device: str, place: int = 0) -> Rung:
    """The rung of a task that measures a device's ceiling.

    place: of the device among those of the run.
    """
    chosen: dict[str, Any] = {"device": device}
    return Rung(name="ceiling", index=place, changed=[], expect=None, toggles=Toggles(**chosen))


def _ablation(ladder: Ladder) -> Iterator[tuple[Kind, Rung]]:
    """Each rung's changes alone, then each left out, except where some other process is the same."""
    known = [rung.toggles for rung in ladder.own]
    for kind in ABLATION:
        for rung in ladder.own[1:]:
            changed = None
            with contextlib.suppress(LadderError):  # steps of a given size that these toggles cannot take
                changed = variant(ladder, rung, kind)
            if changed and changed.toggles not in known:
                known.append(changed.toggles)
                yield kind, changed


FOUND, FOUND_BUT_TUNES = 0.55, 0.35
"""Shares of its compiling that a process saves which finds the code that another one compiled.

The second is for one that times its matmuls anew. Both are a little less than was ever seen: 0.59 on a CPU
and 0.83 on a GPU, and 0.37.
"""


def seconds_of_next(record: Record, seconds: float, ladder: Ladder, *, finds_code: bool) -> float:
    """How long the next process of a rung takes, if this one took `seconds`: it need not do all again.

    finds_code: whether what this one compiled is still there.
    """
    m = record.measurement
    if m is None:
        return seconds
    seconds -= m.once_seconds or 0.0
    compiled = finds_code and m.compile_cache not in (None, "warm")
    if not compiled or m.first_step_seconds is None or not m.block_steps:
        return seconds
    step = median(m.block_seconds) / m.block_steps
    tunes = record.toggles.as_toggles.products == "tuned" and not ladder.protocol.short_of_time
    return seconds - (FOUND_BUT_TUNES if tunes else FOUND) * max(0.0, m.first_step_seconds - step)


@dataclass
class Schedule:
    """The processes of a run, round by round, so that drift of the machine meets all rungs alike.

    Tell it how each one ended, and it leaves out what is pointless and estimates how long the rest will take.
    """

    ladder: Ladder
    rungs: Sequence[Rung]
    ablate: bool = False
    _seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By kind and rung, what its next process is expected to take."""
    _whole: list[float] = field(default_factory=list)
    """What each process took."""
    _done: set[tuple[str, int, int]] = field(default_factory=set)
    _skipped: set[tuple[str, int]] = field(default_factory=set)
    _broken_off: int | None = None
    """The round that an interruption cut in two, whose rest needs a first rung of its own."""

    def __post_init__(self) -> None:
        self._every_round: list[tuple[Kind, Rung]] = [(_kind(rung), rung) for rung in self.rungs]
        if self.ablate:
            self._every_round += _ablation(self.ladder)
        protocol = self.ladder.protocol
        if protocol.repeats > 1 or protocol.until is not None:
            self._every_round += self._controls[-1:] if protocol.control == "last" else self._controls
        self._first_round: list[tuple[Kind, Rung]] = []
        first = self.rungs[0]
        # The first rung is the reference of steps of its size, unless it trains on several ranks itself.
        sizes = {first.toggles.tokens_per_step(1)} if first.index or first.toggles.world_size == 1 else set()
        for rung in self._own:
            size = rung.toggles.tokens_per_step(1)
            parity = variant(self.ladder, rung, "parity") if size not in sizes else None
            sizes.add(size)
            if parity:
                self._first_round.append(("parity", parity))
        devices = dict.fromkeys(rung.toggles.device for rung in self.rungs if protocol.ceiling_seconds)
        self._ceilings: list[tuple[Kind, Rung]] = [
            ("ceiling", ceiling_rung(device, place)) for place, device in enumerate(devices)
        ]

    @property
    def _own(self) -> list[Rung]:
        return [rung for rung in self.rungs if not rung.external]

    @property
    def _controls(self) -> list[tuple[Kind, Rung]]:
        """The A/A controls: the first rung, and the last one of ours that is meant to run.

        Two, because a first rung at a small batch waits for the host and a last one may not.
        """
        rungs = [self.rungs[0], *full_set(self._own)[-1:]]
        return [("control", rung) for place, rung in enumerate(rungs) if rung not in rungs[:place]]

    @property
    def planned_rounds(self) -> int:
        """Number of rounds, as far as it is known beforehand."""
        protocol = self.ladder.protocol
        return protocol.repeats if protocol.until is None else LEAST_ROUNDS_UNTIL

    @property
    def begun(self) -> int:
        """The last round of which a process has ended; 0 before the first."""
        return max((repetition for _, _, repetition in self._done), default=0)

    def resume(self, records: Sequence[Record]) -> None:
        """Leave out what has been run.

        The rest of a round pairs with nothing before the interruption, so it gets a first rung of its own.
        """
        for record in records:
            self._note(record, record.process_seconds, finds_code=False)
        rest = {task.kind for task in self.round(self.begun)}
        if rest.intersection(RUNGS) and self._controls[0] not in self._every_round:
            self._broken_off = self.begun

    def round(self, repetition: int) -> Iterator[Task]:
        """Tasks of one round that are still to be run."""
        tasks = [*self._every_round]
        if repetition == self._broken_off:
            tasks.insert(0, self._controls[0])
        if repetition == 1:
            tasks += self._first_round + self._ceilings
        yield from self._tasks(tasks, repetition)

    def closing(self, repetition: int) -> Iterator[Task]:
        """Tasks still to be run after the last round: the ceiling once more, unless time is short."""
        if repetition > 1 and self.ladder.protocol.control != "last":
            yield from self._tasks(self._ceilings, repetition)

    def _tasks(self, what: Sequence[tuple[Kind, Rung]], repetition: int) -> Iterator[Task]:
        for kind, rung in what:
            task = Task(kind=kind, rung=rung, repetition=repetition)
            if task.key not in self._done and task.key[:2] not in self._skipped and self._wanted(task):
                yield task

    def _wanted(self, task: Task) -> bool:
        """Whether some rung needs the task: rungs that this machine does not support need none."""
        if task.kind == "control":
            return ("cumulative", task.rung.index) not in self._skipped
        if task.is_ceiling:
            users = [rung for rung in self.rungs if rung.toggles.device == task.rung.toggles.device]
        elif task.kind == "parity":
            size = task.rung.toggles.tokens_per_step(1)
            users = [rung for rung in self._own if rung.toggles.tokens_per_step(1) == size]
        else:
            return True
        return any((_kind(rung), rung.index) not in self._skipped for rung in users)

    def ended(self, record: Record, seconds: float | None = None) -> None:
        """Note an outcome; what this machine does not support is not tried again."""
        self._note(record, seconds, finds_code=True)

    def _note(self, record: Record, took: float | None, *, finds_code: bool) -> None:
        """finds_code: whether the next process of the same rung finds what this one compiled."""
        if record.cut_short:
            return
        self._done.add(record.key)
        if took is not None:
            self._whole.append(took)
            expected = seconds_of_next(record, took, self.ladder, finds_code=finds_code)
            self._seconds.setdefault(record.key[:2], []).append(expected)
        if record.status == "unsupported":
            self._skipped.add(record.key[:2])

    def seconds_left(self, repetition: int, rounds: int) -> float | None:
        """Estimated seconds of rounds `repetition` to `rounds`; None before anything has ended."""
        if not self._whole:
            return None
        left = [task for number in range(repetition, rounds + 1) for task in self.round(number)]
        left += self.closing(rounds)
        total = 0.0
        for task in left:
            times = self._seconds.get(task.key[:2])
            total += times[-1] if times else sum(self._whole) / len(self._whole)
        return total

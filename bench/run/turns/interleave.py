"""Rungs that train in turn, two at a time: a few steps of the one, then of the other, again and again.

All processes are started first, one after another, and stopped; then each round visits every pair. So what
slows the machine for longer than a pair's turns slows both alike, where rungs of `bench run` are minutes
apart. What a process keeps from its start, its pages and its compiled code, no number of rounds takes out:
all are started anew a few times. Imports no torch.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.format import duration
from bench.host.telemetry import cpu_times, memory_available
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.run.turns.paused_process import Sleeper, TurnError, started

WARM_UP = 3
"""Steps of a process before its first turn, at least: compiled code is ready after two."""
LEAST_MEMORY = 1 << 30
"""Bytes that must stay free: a stopped process whose memory was swapped out would be timed reading it back.
"""
CONTROL = " (again)"
"""Behind the name of the rung that a second process runs, for the noise floor."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to run, and for how long."""

    ladder: Ladder
    rungs: Sequence[Rung]
    """Of one process each."""
    first: bool
    """Whether each rung is held to the first of them, and not to the one before it."""
    starts: int
    """How many times all processes are started."""
    rounds: int
    """Turns of each pair after each start."""
    steps: int
    """That are timed in each turn."""
    at_once: int
    """Processes that are kept in memory, that of the control included."""
    data: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(kw_only=True)
class Pair:
    """A rung, the one that it is held to, and how long a step of each took."""

    rung: str
    over: str
    starts: list[list[tuple[float, float]]] = field(default_factory=list)
    """By start, seconds of (over, rung) in each round."""


@dataclass(kw_only=True)
class Group:
    """Rungs whose processes are in memory together."""

    rungs: Sequence[Rung]
    pairs: list[Pair] = field(default_factory=list)
    """Of those that started."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of other trainers."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a rung took no turns, or no more."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Why a rung is not here."""
    stolen_cores: float | None = None
    """That the host took away meanwhile, on average, starts included."""

    @property
    def measured(self) -> bool:
        """Whether any turn was taken."""
        return any(turns for pair in self.pairs for turns in pair.starts)

    def out(self, name: str, error: TurnError) -> None:
        """Note why a rung is left out from here on."""
        (self.unsupported if error.unsupported else self.failed)[name] = str(error)


def groups(rungs: Sequence[Rung], first: bool, at_once: int) -> list[Group]:
    """Rungs as they are in memory together: each with the one that it is held to, and room left for the
    control.

    Raises LadderError where there are no two to compare.
    """
    if len(rungs) < 2:
        raise LadderError("to take turns, two rungs of one process each are needed; name more with --rungs")
    for rung in rungs:
        if rung.name.endswith(CONTROL):
            raise LadderError(
                f"rung {rung.name!r}: a name that ends in{CONTROL} is that of the control; rename it"
            )
    size = at_once - 2
    if first:
        return [Group(rungs=[rungs[0], *rungs[place : place + size]]) for place in range(1, len(rungs), size)]
    return [Group(rungs=rungs[place : place + size + 1]) for place in range(0, len(rungs) - 1, size)]


def open_with_what_runs(part: Group, before: Sequence[Group]) -> None:
    """Where the rung that opens a group is not here or failed in the group before, the one before it opens
    the group.

    Else the group's second rung would be compared with nothing, though `bench run` holds it to the last that
    ran.
    """
    names = {name for group in before for name in (*group.failed, *group.unsupported)}
    ran = [rung for group in before for rung in group.rungs if rung.name not in names]
    if part.rungs[0].name in names and ran:
        part.rungs = [ran[-1], *part.rungs[1:]]


def take_turns(
    asked: Asked, group: Group, scratch: Path, tell: Tell, keep: Callable[[], None], to_come: int
) -> None:
    """Fill in a group's pairs, round by round; `keep` is called after each. to_come: groups after this one.

    Raises TurnError where the first rung, which all are held to, cannot start.
    """
    times = cpu_times()
    for start in range(asked.starts):
        begun = time.monotonic()
        with _Processes(asked, group, scratch, tell) as processes:
            processes.start()
            warm = time.monotonic()
            for number in range(asked.rounds):
                took = processes.round(start * asked.rounds + number)
                group.stolen_cores = cpu_times().stolen_cores_since(times)
                if not took:
                    return  # none is left
                keep()
                each = (time.monotonic() - warm) / (number + 1)
                left = seconds_left(asked, start, number, to_come, warm_up=warm - begun, each=each)
                which = f"start {start + 1} of {asked.starts}, " if asked.starts > 1 else ""
                tell(f"{which}round {number + 1} of {asked.rounds}: {took}; about {duration(left)} left")


def seconds_left(
    asked: Asked, start: int, number: int, to_come: int, *, warm_up: float, each: float
) -> float:
    """After a round, until the last group's last one; every start is taken to be as long as this one.

    start, number: of the round, from 0. to_come: groups after this one. warm_up, each: seconds before this
    start's first round, and of one.
    """
    starts = asked.starts - start - 1 + to_come * asked.starts
    return each * (asked.rounds - number - 1) + starts * (warm_up + each * asked.rounds)


class _Processes(contextlib.ExitStack):
    """Those of one start of a group; all end with it, and each of them at once where it fails."""

    def __init__(self, asked: Asked, group: Group, scratch: Path, tell: Tell) -> None:
        super().__init__()
        self._asked, self._group, self._scratch, self._tell = asked, group, scratch, tell
        self._sleepers: dict[str, Sleeper] = {}
        self._ends: dict[str, contextlib.ExitStack] = {}
        self._pairs: list[Pair] = []

    def start(self) -> None:
        """Each until it is warm, but those that failed in an earlier start; the control last."""
        group, first = self._group, self._asked.first
        for rung in group.rungs:
            self._start(rung.name, rung)
            if first and not self._sleepers:
                why = {**group.failed, **group.unsupported}[rung.name]
                raise TurnError(f"{rung.name}, which the others are held to, took no turn: {why}")
        names = list(self._sleepers)
        if not names:
            return
        held = (
            [(name, names[0]) for name in names[1:]]
            if first
            else [(after, over) for over, after in pairwise(names)]
        )
        reference = names[0] if first else names[-1]
        if held and self._start(
            reference + CONTROL, next(rung for rung in group.rungs if rung.name == reference)
        ):
            held.append((reference + CONTROL, reference))
        known = {(pair.rung, pair.over): pair for pair in group.pairs}
        self._pairs = [known.get((rung, over)) or Pair(rung=rung, over=over) for rung, over in held]
        for pair in self._pairs:
            pair.starts.append([])
        group.pairs += [pair for pair in self._pairs if (pair.rung, pair.over) not in known]

    def _start(self, name: str, rung: Rung) -> bool:
        asked, group = self._asked, self._group
        if name in group.failed or name in group.unsupported:
            return False
        self._tell(f"starting {name}")
        with contextlib.ExitStack() as stack:
            try:
                sleeper = stack.enter_context(
                    started(asked.ladder, rung, name, self._scratch, asked.data, asked.overrides)
                )
                sleeper.steps(max(WARM_UP, asked.ladder.protocol.min_warmup_steps))
                sleeper.sleep()
                self._check_memory(sleeper)
            except TurnError as error:
                group.out(name, error)
                self._tell(f"{name}: {error}")
                return False
            if sleeper.version:
                group.versions[name] = sleeper.version
            self._sleepers[name], self._ends[name] = sleeper, stack.pop_all()
            self.callback(self._ends[name].close)
        return True

    def _check_memory(self, newest: Sleeper) -> None:
        to_come = max(sleeper.memory_to_come() for sleeper in [*self._sleepers.values(), newest])
        if memory_available() - to_come < LEAST_MEMORY:
            raise TurnError(
                f"memory is full with {len(self._sleepers) + 1} processes; have fewer with --at-once or "
                "--rungs"
            )

    def round(self, number: int) -> str:
        """A turn of either of each pair; says how long their steps took.

        Pairs are in an order drawn anew each time, and each is turned round, so that none always follows
        another.
        """
        pairs = [pair for pair in self._pairs if {pair.rung, pair.over} <= self._sleepers.keys()]
        random.Random(number).shuffle(pairs)
        spoken = []
        for pair in pairs:
            took: dict[str, float] = {}
            for name in (pair.over, pair.rung) if number % 2 else (pair.rung, pair.over):
                if (seconds := self._turn(name)) is None:
                    break
                took[name] = seconds
            if len(took) == 2:
                pair.starts[-1].append((took[pair.over], took[pair.rung]))
                spoken.append(f"{pair.rung} {1e3 * took[pair.rung]:,.0f} ms to {1e3 * took[pair.over]:,.0f}")
        return ", ".join(spoken)

    def _turn(self, name: str) -> float | None:
        """Seconds per step; None where it has failed, now or before."""
        if (sleeper := self._sleepers.get(name)) is None:
            return None
        sleeper.wake()
        try:
            seconds = sleeper.steps(self._asked.steps)
            sleeper.sleep()
        except TurnError as error:
            self._group.out(name, error)
            self._tell(f"{name}: {error}")
            del self._sleepers[name]
            self._ends[name].close()
            return None
        return seconds

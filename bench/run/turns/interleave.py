"""Let rungs train in turn, two at a time: a few steps of one, then of the other, again and again.

All processes are started one after another, and stopped; then each round visits every pair. A slowdown of
the machine that lasts longer than a pair's turns affects both, where rungs of `bench run` are minutes apart.
The memory layout and compiled code of a process last for its lifetime, so all processes are started anew a
few times. Imports no torch.
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
from bench.run.turns.paused_process import PausedProcess, TurnError, started

WARM_UP = 3
"""Fewest steps of a process before its first turn; compiled code is ready after two."""
LEAST_MEMORY = 1 << 30
"""Bytes that must stay free, so that no stopped process is swapped out and timed reading its memory back."""
CONTROL = " (again)"
"""Suffix of the second process of a rung, for the noise floor."""
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TurnOptions:
    """What to run, and for how long."""

    ladder: Ladder
    rungs: Sequence[Rung]
    """Each of one process."""
    first: bool
    """Whether the reference of each rung is the first, and not the one before it."""
    starts: int
    """Number of times that all processes are started."""
    rounds: int
    """Number of turns of each pair after each start."""
    steps: int
    """Number of timed steps in each turn."""
    at_once: int
    """Most processes in memory, the control included."""
    data: Path | None = None
    overrides: Sequence[str] = ()


@dataclass(kw_only=True)
class Pair:
    """A rung, its reference, and how long a step of each took."""

    rung: str
    over: str
    starts: list[list[tuple[float, float]]] = field(default_factory=list)
    """By start, seconds per step of (over, rung) in each round."""


@dataclass(kw_only=True)
class Group:
    """Rungs whose processes are in memory together."""

    rungs: Sequence[Rung]
    pairs: list[Pair] = field(default_factory=list)
    """Pairs of rungs that started."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of other trainers, by rung."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why a rung took no turns, or no more, by rung."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Why a rung cannot run on this machine, by rung."""
    stolen_cores: float | None = None
    """Cores that the host took away, mean over all starts."""

    @property
    def measured(self) -> bool:
        """Whether any turn was taken."""
        return any(turns for pair in self.pairs for turns in pair.starts)

    def drop(self, name: str, error: TurnError) -> None:
        """Note why a rung takes no more turns."""
        (self.unsupported if error.unsupported else self.failed)[name] = str(error)


def groups(rungs: Sequence[Rung], first: bool, at_once: int) -> list[Group]:
    """Divide rungs into groups that fit in memory with their references and the control.

    Raises LadderError where there are no two to compare.
    """
    if len(rungs) < 2:
        raise LadderError("to take turns, two rungs of one process each are needed; name more with --rungs")
    for rung in rungs:
        if rung.name.endswith(CONTROL):
            raise LadderError(
                f"rung {rung.name!r}: names that end in{CONTROL} are reserved for the control; rename it"
            )
    size = at_once - 2
    if first:
        return [Group(rungs=[rungs[0], *rungs[place : place + size]]) for place in range(1, len(rungs), size)]
    return [Group(rungs=rungs[place : place + size + 1]) for place in range(0, len(rungs) - 1, size)]


def open_with_last_that_ran(part: Group, before: Sequence[Group]) -> None:
    """Replace the first rung of a group, if it did not run, by the last that ran in the groups before.

    As in `bench run`, this is the reference of the group's second rung.
    """
    names = {name for group in before for name in (*group.failed, *group.unsupported)}
    ran = [rung for group in before for rung in group.rungs if rung.name not in names]
    if part.rungs[0].name in names and ran:
        part.rungs = [ran[-1], *part.rungs[1:]]


def take_turns(
    options: TurnOptions,
    group: Group,
    scratch: Path,
    tell: Tell,
    keep: Callable[[], None],
    to_come: int,
    check_text: Callable[[], None],
) -> None:
    """Fill in a group's pairs, round by round; `keep` is called after each.

    to_come: number of groups after this one. check_text: called once all processes of a start have read their
    text, and raises BenchError where that is another than at the beginning. Raises TurnError where the first
    rung is the reference of all and cannot start.
    """
    times = cpu_times()
    for start in range(options.starts):
        begun = time.monotonic()
        with _Processes(options, group, scratch, tell) as processes:
            processes.start()
            check_text()
            warm = time.monotonic()
            for number in range(options.rounds):
                took = processes.round(start * options.rounds + number)
                group.stolen_cores = cpu_times().stolen_cores_since(times)
                if not took:
                    return  # no pair is left
                keep()
                each = (time.monotonic() - warm) / (number + 1)
                left = seconds_left(options, start, number, to_come, warm_up=warm - begun, each=each)
                which = f"start {start + 1} of {options.starts}, " if options.starts > 1 else ""
                tell(f"{which}round {number + 1} of {options.rounds}: {took}; about {duration(left)} left")


def seconds_left(
    options: TurnOptions, start: int, number: int, to_come: int, *, warm_up: float, each: float
) -> float:
    """Estimate the seconds from the end of a round to the end of the last group.

    start, number: of the round, from 0. to_come: number of groups after this one. warm_up: seconds before
    this start's first round. each: seconds per round.
    """
    starts = options.starts - start - 1 + to_come * options.starts
    return each * (options.rounds - number - 1) + starts * (warm_up + each * options.rounds)


class _Processes(contextlib.ExitStack):
    """The processes of one start of a group; a process that fails is ended at once, the others on exit."""

    def __init__(self, options: TurnOptions, group: Group, scratch: Path, tell: Tell) -> None:
        super().__init__()
        self._options, self._group, self._scratch, self._tell = options, group, scratch, tell
        self._paused: dict[str, PausedProcess] = {}
        self._stacks: dict[str, contextlib.ExitStack] = {}
        """By name, what ends the process."""
        self._pairs: list[Pair] = []

    def start(self) -> None:
        """Start and warm up each rung that has not failed in an earlier start, then the control."""
        group, first = self._group, self._options.first
        for rung in group.rungs:
            self._start(rung.name, rung)
            if first and not self._paused:
                why = {**group.failed, **group.unsupported}[rung.name]
                raise TurnError(f"{rung.name}, the reference of the others, took no turn: {why}")
        names = list(self._paused)
        if not names:
            return
        pairs = [(name, names[0]) for name in names[1:]]
        if not first:
            pairs = [(after, over) for over, after in pairwise(names)]
        repeated = next(rung for rung in group.rungs if rung.name == names[0 if first else -1])
        control = repeated.name + CONTROL
        if pairs and self._start(control, repeated):
            pairs.append((control, repeated.name))
        known = {(pair.rung, pair.over): pair for pair in group.pairs}
        self._pairs = [known.get((rung, over)) or Pair(rung=rung, over=over) for rung, over in pairs]
        for pair in self._pairs:
            pair.starts.append([])
        group.pairs += [pair for pair in self._pairs if (pair.rung, pair.over) not in known]

    def _start(self, name: str, rung: Rung) -> bool:
        options, group = self._options, self._group
        if name in group.failed or name in group.unsupported:
            return False
        self._tell(f"starting {name}")
        with contextlib.ExitStack() as stack:
            try:
                paused = stack.enter_context(
                    started(options.ladder, rung, name, self._scratch, options.data, options.overrides)
                )
                paused.steps(max(WARM_UP, options.ladder.protocol.min_warmup_steps))
                paused.stop()
                self._check_memory(paused)
                self._check_version(rung.name, paused)
            except TurnError as error:
                group.drop(name, error)
                self._tell(f"{name}: {error}")
                return False
            if paused.version:
                group.versions[name] = paused.version
            self._paused[name], self._stacks[name] = paused, stack.pop_all()
            self.callback(self._stacks[name].close)
        return True

    def _check_version(self, rung: str, paused: PausedProcess) -> None:
        before = self._group.versions.get(rung, paused.version)
        if paused.version != before:
            raise TurnError(f"its code changed between starts: it was {before} and is {paused.version}")

    def _check_memory(self, newest: PausedProcess) -> None:
        processes = [*self._paused.values(), newest]
        to_come = max(paused.memory_to_come() for paused in processes)
        if memory_available() - to_come < LEAST_MEMORY:
            raise TurnError(
                f"memory is full with {len(processes)} processes; have fewer with --at-once or --rungs"
            )

    def round(self, number: int) -> str:
        """Let both rungs of each pair take a turn; return the durations of their steps as text.

        The order of the pairs is drawn anew each round, and each pair alternates which of its rungs is first.
        """
        pairs = [pair for pair in self._pairs if {pair.rung, pair.over} <= self._paused.keys()]
        random.Random(number).shuffle(pairs)
        durations = []
        for pair in pairs:
            took: dict[str, float] = {}
            for name in (pair.over, pair.rung) if number % 2 else (pair.rung, pair.over):
                if (seconds := self._turn(name)) is None:
                    break
                took[name] = seconds
            if len(took) == 2:
                pair.starts[-1].append((took[pair.over], took[pair.rung]))
                durations.append(
                    f"{pair.rung} {1e3 * took[pair.rung]:,.0f} ms to {1e3 * took[pair.over]:,.0f}"
                )
        return ", ".join(durations)

    def _turn(self, name: str) -> float | None:
        """Return seconds per step; None if the process fails or has failed."""
        if (paused := self._paused.get(name)) is None:
            return None
        paused.resume()
        try:
            seconds = paused.steps(self._options.steps)
            paused.stop()
        except TurnError as error:
            self._group.drop(name, error)
            self._tell(f"{name}: {error}")
            del self._paused[name]
            self._stacks[name].close()
            return None
        return seconds

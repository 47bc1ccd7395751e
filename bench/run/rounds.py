"""Which processes a run consists of, by how earlier ones ended: rounds, or a climb before them.

With `carry: if_faster` each rung is first tried in short windows. What that finds decides which rungs the
rounds measure, and no speed of theirs comes from it, so that choosing does not flatter what was chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from statistics import mean
from typing import Protocol

from bench.analysis.attribution import ratios
from bench.analysis.run_records import carried_rungs, together
from bench.analysis.schedule import Cut, Schedule, Task, changes_of, seconds_of_next
from bench.analysis.scoreboard import scoreboard
from bench.analysis.scouting import FAR_TOO_SLOW, is_close, is_stale, judge, last_carried, within_noise
from bench.format import duration, listed, plural
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.records.record import Record
from bench.stats import LEAST_ROUNDS, LEAST_ROUNDS_UNTIL, MOST_ROUNDS_UNTIL, narrow_enough


class TaskSource(Protocol):
    """Decides which processes a run consists of, by how earlier ones ended."""

    @property
    def cut(self) -> Cut | None: ...
    @property
    def planned_rounds(self) -> int: ...
    def resume(self, records: Sequence[Record]) -> None: ...
    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]: ...
    def ended(self, record: Record, seconds: float | None = None) -> None: ...
    def seconds_left(self, repetition: int, rounds: int) -> float | None: ...


NARROW = 0.02
"""Half-width of all intervals at which a run that is to fill its time takes no more rounds."""


class TimeLimit:
    """Until when rounds may go on: `seconds` from now on.

    patience: how many times as long the first LEAST_ROUNDS rounds may take, without which nothing is sure.
    fill: whether rounds go on as long as there is time, or until all intervals are NARROW.
    """

    def __init__(self, seconds: float, patience: float = 1.0, *, fill: bool = False) -> None:
        begun = time.monotonic()
        self._ends, self._of_first_rounds = begun + seconds, begun + patience * seconds
        self.fill = fill

    def allows(self, rounds: int) -> float:
        """Return the seconds that one more round may take after so many."""
        return (self._of_first_rounds if rounds < LEAST_ROUNDS else self._ends) - time.monotonic()

    def seconds_to_go(self, planned: float, certain: float) -> float:
        """Return how long the run will last, if the rounds that are planned take so many seconds.

        certain: what is left of the first round, which is run in any case.
        """
        most = min(planned, self.allows(0))
        return max(certain, most, self.allows(LEAST_ROUNDS) if self.fill else 0.0)


class Rounds(Schedule):
    """A ladder's tasks, in rounds until there are enough, or until there is no time for another.

    limit: one round is taken in any case. None: as many as the ladder's protocol has.
    """

    cut: Cut | None = None

    def __init__(
        self, ladder: Ladder, rungs: Sequence[Rung], ablate: bool = False, limit: TimeLimit | None = None
    ) -> None:
        super().__init__(ladder, rungs, ablate)
        self._limit = limit

    @property
    def planned_rounds(self) -> int:
        """Number of rounds, as far as it is known beforehand: the fewest where time and widths decide."""
        return LEAST_ROUNDS if self._limit and self._until is not None else super().planned_rounds

    @property
    def _until(self) -> float | None:
        """Half-width of intervals at which the rounds end; None where their number is given."""
        until = self.ladder.protocol.until
        return NARROW if until is None and self._limit and self._limit.fill else until

    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]:
        """Yield all tasks; the runner appends to `records` meanwhile."""
        for repetition in count(1):
            yield from self.round(repetition)
            if self._is_last(repetition, records, note):
                yield from self.closing(repetition)
                return

    def _is_last(self, repetition: int, records: list[Record], note: Callable[[str], None]) -> bool:
        """Whether no round follows this one. Only widths decide, and time: by values it would be biased."""
        until, limit = self._until, self._limit
        if repetition >= (self.planned_rounds if until is None else MOST_ROUNDS_UNTIL):
            return True
        if until is not None and repetition < self.begun:  # an interrupted round is ended first
            return False
        if until is not None and repetition >= LEAST_ROUNDS_UNTIL:
            known = ratios(scoreboard(records))
            if narrow_enough(known, until):
                return True
            if not limit:
                widest = max((ratio.half_width for ratio in known if ratio.half_width), default=None)
                width = f"the widest interval is ±{widest:.1%}" if widest else "there is no interval yet"
                note(f"{width}, the limit is ±{until:.1%}: another round, of {MOST_ROUNDS_UNTIL} at most")
        if not limit:
            return False
        next_round = self.seconds_left(repetition + 1, repetition + 1) or 0.0
        if next_round <= limit.allows(repetition):
            return False
        planned = max(repetition, self.planned_rounds)  # a run that is resumed may have had more
        plan = f"{repetition} of {plural(planned, 'round')} done"
        note(f"{plan}: no time for another of about {duration(next_round)}")
        return True


class Climb:
    """The tasks of `carry: if_faster`: tries each rung, then measures those that were carried, in rounds.

    If the user named some rungs only, just these are tried, and the ladder's first, which names the device.
    """

    cut: Cut | None = None

    def __init__(
        self, ladder: Ladder, rungs: Sequence[Rung], ablate: bool = False, limit: TimeLimit | None = None
    ) -> None:
        self._ladder, self._ablate, self._limit = ladder, ablate, limit
        self._own = [rung for rung in rungs if not rung.external]
        self._chosen = {rung.name for rung in rungs}
        self._left_out = [r.name for r in ladder.rungs[1:] if r.name not in self._chosen]
        self._tried: list[Record] = []
        self._tried_before = 0
        """How many of them a run that is resumed had made."""
        self._later: list[Record] = []
        """Records of the rounds of a run that is resumed."""
        self._rounds: Rounds | None = None
        self.planned_rounds = Rounds(ladder, self._own, limit=limit).planned_rounds
        """Number of rounds, as far as it is known beforehand."""

    def resume(self, records: Sequence[Record]) -> None:
        """Go on after these records."""
        self._tried = [record for record in records if record.kind == "scout" and not record.cut_short]
        self._tried_before = len(self._tried)
        self._later = [record for record in records if record.kind != "scout"]

    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]:
        """Yield all tasks; the runner appends to `records` meanwhile."""
        yield from self._tries()
        self._rounds = self._rounds_of_carried(note)
        self._rounds.resume(self._later)
        yield from self._rounds.tasks(records, note)

    def _judged(self, record: Record, together_with: Sequence[str] = ()) -> Record:
        """Return the record of a try with what it found."""
        if record.cut_short:
            return record
        return record.model_copy(update={"scout": judge(record, self._tried, together_with)})

    def ended(self, record: Record, seconds: float | None = None) -> None:
        """Note an outcome."""
        if record.kind == "scout":
            self._tried += [record] if not record.cut_short else []
        elif self._rounds:
            self._rounds.ended(record, seconds)

    def seconds_left(self, repetition: int, rounds: int) -> float | None:
        """Estimated seconds of rounds `repetition` to `rounds`, and of the rungs that are still to be tried.

        Before the rounds: as if of those to be tried as large a share were carried as of the others, at first
        a third.
        """
        if self._rounds:
            return self._rounds.seconds_left(repetition, rounds)
        timed = [(r, r.process_seconds) for r in self._tried if r.process_seconds is not None]
        if not timed:
            return None
        of_first = [pair for pair in timed if pair[0].rung_index == self._own[0].index]
        of_others = [pair for pair in timed if pair[0].rung_index != self._own[0].index]
        each = mean(seconds for _, seconds in of_others or of_first)
        finds_code = not self._tried_before
        of_kept = [pair for pair in of_others if pair[0].measurement] or of_first  # like those of the rounds
        first, next_each = (
            mean(seconds_of_next(*pair, self._ladder, finds_code=finds_code) for pair in pairs)
            for pairs in (of_first or of_others, of_kept or of_others)
        )
        known = {record.rung_index for record in self._tried} - {self._own[0].index}
        carried = len(self._carried - {self._own[0].name})
        to_try = sum(not rung.again and rung.index not in known for rung in self._own[1:])
        expected = carried + to_try * (carried + 1) / (len(known) + 3)
        per_rung = len(of_others) / len(known) if known else 1.0  # some are tried twice and more
        windows = [self._longer(record) for record in self._tried if record.measurement]
        longer = mean(windows) if windows else 0.0
        a_round = 2 * (first + longer) + (expected + 1) * (next_each + longer)  # with its two controls
        once = mean((r.measurement and r.measurement.once_seconds) or 0.0 for r, _ in of_kept or of_others)
        first_round = (expected + 1) * once if repetition == 1 else 0.0
        return to_try * per_rung * each + first_round + (rounds - repetition + 1) * a_round

    def _longer(self, tried: Record) -> float:
        """Seconds by which a window of the rounds is longer than that of a try."""
        full, short, m = self._ladder.protocol, self._ladder.protocol.short, tried.measurement
        step = max(m.block_seconds) / m.block_steps if m and m.block_steps and m.block_seconds else 0.0
        whole = min(full.max_window_seconds, full.blocks * max(full.block_seconds, step))
        return max(0.0, whole - short.least_blocks * max(short.block_seconds, step))

    def _has_time(self, *, patiently: bool = False) -> bool:
        """Whether there is time for tries that can be done without: all rounds fit, as far as is known.

        patiently: into the time that the first rounds may take at most.
        """
        left = self.seconds_left(1, self.planned_rounds)
        return (
            self._limit is None
            or left is None
            or left <= self._limit.allows(0 if patiently else LEAST_ROUNDS)
        )

    def _tries(self) -> Iterator[Task]:
        """Yield the tries that are still to be made: the first rung's twice, to know the noise.

        A rung that seems faster within the noise is tried again at once, and the best so far from time to
        time, as the machine may not be what it was: always where a run is resumed.
        """
        if self._later:  # rounds have begun, and with other rungs carried they would be of two ladders
            return
        first = self._own[0]
        for repetition in (1, 2):
            if not any(r.rung_index == first.index and r.repetition == repetition for r in self._tried):
                yield self._try(first, repetition)
            if not last_carried(self._tried):  # it does not run here: there is no noise to be known
                break
        sessions = [record.session for record in self._tried if record.rung_index == first.index]
        if len(sessions) == len(set(sessions)) == 2:  # with a break between the two, they tell no noise
            yield self._try(first, 3)
        for rung in self._own[1:]:
            if rung.again:  # on top of what was carried for being faster together
                yield from self._try_together()
            if not any(record.rung_index == rung.index for record in self._tried):
                if rung.again and (rung.again in self._carried or not self._has_time()):
                    continue
                yield from self._best_again(is_stale(self._tried) and self._has_time())
                yield self._try(rung)
            just_tried = self._tried[-1].rung_index == rung.index  # else others were carried since
            if just_tried and is_close(self._tried, rung.index) and self._has_time():
                yield from self._best_again()
                yield self._try(rung, 2)
        yield from self._try_together()

    def _try_together(self) -> Iterator[Task]:
        """Yield a try of all rungs that are within the noise: together they may be beyond it. Made once.

        Where single tries tell little, this one decides most, so that it may take more time than they may.
        """
        best, names = last_carried(self._tried), self._within_noise()
        done = any(together(record) for record in self._tried)
        if done or len(names) < 2 or best is None or not self._has_time(patiently=True):
            return
        last = [rung.name for rung in self._ladder.own if rung.name in {*names, best.rung}][-1]
        without = [name for name in self._without if name not in names]
        try:
            rung = self._ladder.carrying(without=without, upto=last).rung(last)
        except LadderError:  # they do not fit together
            return
        yield from self._best_again(is_stale(self._tried))
        yield Task(
            kind="scout",
            rung=rung,
            repetition=max((r.repetition for r in self._tried if r.rung == last), default=0) + 1,
            together=tuple(names),
            judge=partial(self._judged, together_with=names),
        )

    def _within_noise(self) -> list[str]:
        """Names of the rungs within the noise that have an effect together, in the ladder's order.

        Of rungs that set the same toggle it is the one that seemed fastest, and none whose toggle a carried
        rung sets after it.
        """
        ladder, seemed = self._ladder, within_noise(self._tried)
        sets = {
            rung.name: set(changes_of(before.toggles, rung.toggles, ladder.workload))
            for before, rung in pairwise(ladder.first_tries)
        }
        carried = [rung for rung in ladder.own if rung.name in self._carried]
        names: list[str] = []
        for rung in sorted(ladder.first_tries[1:], key=lambda r: seemed.get(r.name, 0.0), reverse=True):
            later = [each.again or each.name for each in carried if each.index > rung.index]
            alone = all(sets[rung.name].isdisjoint(sets[other]) for other in (*names, *later))
            if alone and rung.name in seemed:
                names.append(rung.name)
        return [rung.name for rung in ladder.own if rung.name in names]

    def _best_again(self, wanted: bool = False) -> Iterator[Task]:
        """Yield another try of the best so far, if that is wanted or it ran before the run was resumed."""
        best = last_carried(self._tried)
        if best and (wanted or best in self._tried[: self._tried_before]):
            last = max(r.repetition for r in self._tried if r.rung_index == best.rung_index)
            yield self._try(next(r for r in self._own if r.index == best.rung_index), last + 1)

    @property
    def _carried(self) -> set[str]:
        return carried_rungs(self._tried)

    @property
    def _without(self) -> list[str]:
        """Names of the rungs that are not kept: left out, tried and not carried, and second tries so far."""
        kept = self._carried | {self._own[0].name}
        names = [*(record.rung for record in self._tried), *(rung.name for rung in self._own if rung.again)]
        return [*self._left_out, *dict.fromkeys(name for name in names if name not in kept)]

    def _try(self, rung: Rung, repetition: int = 1) -> Task:
        best, refused = last_carried(self._tried), None
        without = [name for name in self._without if name != rung.name]
        try:
            rung = self._ladder.carrying(without=without, upto=rung.name).rung(rung.name)
        except LadderError as error:
            refused = str(error.__cause__ or error)
        m = best.measurement if best and repetition == 1 else None
        limit = FAR_TOO_SLOW * m.tokens_per_second if m and m.tokens_per_second else None
        return Task(
            kind="scout",
            rung=rung,
            repetition=repetition,
            stop_below=limit,
            refused=refused,
            judge=self._judged,
        )

    def _rounds_of_carried(self, note: Callable[[str], None]) -> Rounds:
        """Return the rounds over the rungs that were carried, and the external ones."""
        ladder = self._ladder.carrying(without=self._without)
        rungs = [rung for rung in ladder.rungs if rung.name in self._chosen]
        kept = listed([rung.name for rung in rungs[1:] if not rung.external])
        ran = any(record.measurement for record in self._tried if record.rung_index != rungs[0].index)
        why = "no change makes training faster here" if ran else "no change could be measured here"
        note(f"carried: {kept or f'nothing, for {why}'}")
        return Rounds(ladder, rungs, self._ablate, self._limit)

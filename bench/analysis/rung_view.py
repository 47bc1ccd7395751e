"""A rung of one run, as tables over several runs tell of it: on what it ran, and how fast. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from bench.analysis.compare import GOOD
from bench.analysis.denominators import find_peaks
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import first_by_round, measured, tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, number, percent, plain, with_interval
from bench.records.machine import Environment
from bench.records.measurement import Measurement
from bench.records.record import Record
from bench.stats import LEAST_ROUNDS, Estimate, independent_ratio, paired_ratio

DERIVED = "§"
"""Marks what is held to a peak that is arithmetic, not a datasheet's."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of one board."""

    board: Scoreboard
    row: Row

    @cached_property
    def records(self) -> list[Record]:
        return self.board.records_of(self.row)

    @cached_property
    def found(self) -> Measurement | None:
        return measured(self.records)

    @property
    def environment(self) -> Environment:
        """Its own: rungs of one run may be on several kinds of device."""
        return self.records[-1].environment

    @property
    def task(self) -> tuple[str, int]:
        """Model and tokens per sequence: what speeds must have in common to rank."""
        workload = self.records[0].workload
        return str(workload["model"]), int(workload["seq_len"])

    @property
    def device(self) -> tuple[str, str, str]:
        """Kind of device, the chip's name, and what drives it: XLA on a CPU is not the CPU."""
        return self.row.toggles.device, self.environment.chip, "XLA" if self.environment.xla_on_cpu else ""

    @property
    def machine(self) -> str:
        """For a reader."""
        return f"{self.environment.machine}{', XLA' if self.environment.xla_on_cpu else ''}"

    @property
    def ranks(self) -> bool:
        """Whether it has a speed that means what it says."""
        return self.row.tps is not None and self.row.status in GOOD

    @property
    def peak(self) -> float | None:
        """Dense bfloat16 FLOP/s of one device, the denominator of its MFU."""
        return find_peaks(self.board.records).get((self.row.toggles.device, "bf16"))

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The most of its rounds that it took of a whole GPU; None where that is not known."""
        found = [record.measurement.gpu_memory_bytes for record in self.records if record.measurement]
        return max((each for each in found if each), default=None)

    @property
    def derived(self) -> bool:
        return self.found is not None and self.found.peak_flops_kind == "derived"

    @property
    def lacks(self) -> str:
        """What makes its speed a preliminary one, in words; empty where nothing does."""
        rounds = self.row.tps.rounds if self.row.tps else 0
        few = [f"{rounds} round{'s' if rounds != 1 else ''}"] if rounds < LEAST_ROUNDS else []
        return ", ".join([*(["interrupted"] if self.board.interrupted else []), *few])

    @property
    def tps(self) -> str:
        """A cell."""
        return with_interval(number(self.row.tps.value), self.row.tps) if self.row.tps else DASH

    @property
    def mfu(self) -> str:
        """A cell."""
        marked = self.derived and self.row.mfu is not None
        return f"{percent(self.row.mfu)}{DERIVED if marked else ''}"

    @property
    def status(self) -> str:
        """A cell."""
        return plain(status_of(self.row))


def entries(board: Scoreboard) -> list[Entry]:
    return [Entry(board=board, row=row) for row in board.rows]


def same_run(one: Entry, other: Entry) -> bool:
    """Whether their rounds are the same ones."""
    return one.board.same_run(other.board)


def over(entry: Entry, reference: Entry) -> Estimate | None:
    """How many times as fast as `reference`: paired within rounds of one run, Welch's between two.

    None where one of them has no speed that ranks, or no round has both.
    """
    if not (entry.ranks and reference.ranks):
        return None
    speeds = tps_by_round(entry.records)
    if same_run(entry, reference):
        board, first = reference.board, reference.row is reference.board.rows[0]  # whose controls stand in
        theirs = (
            first_by_round(reference.records, board.records) if first else tps_by_round(reference.records)
        )
        return paired_ratio(speeds, theirs)
    return independent_ratio([*speeds.values()], [*tps_by_round(reference.records).values()])


def memory_over(entry: Entry, reference: Entry) -> float | None:
    """How many times the peak memory; None where it was not found out in the same way."""
    mine, theirs = entry.row, reference.row
    if not mine.peak_memory_bytes or not theirs.peak_memory_bytes:
        return None
    alike = mine.peak_memory_method == theirs.peak_memory_method
    return mine.peak_memory_bytes / theirs.peak_memory_bytes if alike else None


def best(board: Scoreboard) -> Entry | None:
    """The fastest rung; for want of one without a doubt, that with most tokens per second of those that are
    ok.

    Of those that compute the same: another training is no faster one.
    """
    good = [row for row in board.rows if row.tps and row.status == "ok" and not row.other_maths]
    row = board.fastest or max(good, key=lambda row: row.tps.value if row.tps else 0.0, default=None)
    return Entry(board=board, row=row) if row else None


def best_name(entry: Entry) -> str:
    """Of such a rung, with what speaks against it."""
    against = [*(["in doubt"] if entry.row.doubts else []), *([entry.lacks] if entry.lacks else [])]
    return plain(entry.row.rung) + (f" ({', '.join(against)})" if against else "")


def by_speed(shown: Iterable[Entry]) -> list[Entry]:
    """The fastest first, but beneath them those whose runs lack something, and last those in doubt."""
    return sorted(shown, key=lambda each: (*standing(each), -(each.row.tps.value if each.row.tps else 0.0)))


def standing(entry: Entry) -> tuple[bool, bool]:
    """By which entries are sorted before their figures are: those that nothing speaks against first."""
    return bool(entry.row.doubts), bool(entry.lacks)

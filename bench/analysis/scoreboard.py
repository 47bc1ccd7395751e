"""The scoreboard of one results file: a row per rung, computed from the records.

board = scoreboard(records)
board.rows[0].tps.value
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.analysis.row import Peaks, Row, RunCeiling, beaten_peaks, find_ceilings, find_peaks, row_of
from bench.analysis.run_records import RunRecords, carried_rungs, in_order, measured, toggles_of, tps_by_round
from bench.records.machine import Environment
from bench.records.record import ABLATION, Record
from bench.stats import LEAST_ROUNDS_UNTIL, Estimate, noise_floor, paired_ratio, verdict

LOSS_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
"""Steps at which losses are shown: few, so that machines of different speed show the same one."""


@dataclass(frozen=True, kw_only=True)
class Scoreboard:
    """The rows of one run, and what its caption needs."""

    ladder: str
    rows: tuple[Row, ...]
    records: RunRecords
    """All records of the run, those of controls and ablations included."""
    control: Estimate | None
    """The A/A control: the first rung run again, over the first rung."""
    last_control: Estimate | None
    """The same for our last rung; None where that is the first, and in older runs."""
    delta: float | None
    """The noise floor, a relative difference; None without a control."""
    ceilings: dict[str, RunCeiling]
    """Measured ceilings by kind of device."""
    peaks: Peaks
    """What MFU is over."""
    beaten: dict[str, float]
    """FLOP/s measured above a derived peak, which is then not used, by kind of device."""
    loss_step: int | None
    """Step whose loss is shown, counted from 1: the largest of LOSS_STEPS that all measured rungs have."""
    environment: Environment
    rounds: int
    source: Path | None
    """The results file."""

    def records_of(self, row: Row) -> list[Record]:
        """Records of one rung in all rounds."""
        return self.records.rungs[row.index]

    def rung_before(self, row: Row) -> Row | None:
        """The row that the row's gain is over."""
        return next((other for other in self.rows if other.index == row.before), None)

    def over_first(self, row: Row) -> Estimate | None:
        """Speed-up of a row over the first one; None for the first itself."""
        return None if row is self.rows[0] else row.speedup

    @property
    def place(self) -> Path | None:
        """The results file by its path without links."""
        return self.source and self.source.resolve()

    @property
    def workload(self) -> dict[str, Any]:
        """What the run trains, as its first record states it."""
        return self.records[0].workload

    @property
    def task(self) -> tuple[str, int]:
        """Model and tokens per sequence, which must be equal for speeds to compare."""
        return str(self.workload["model"]), int(self.workload["seq_len"])

    @property
    def title(self) -> str:
        """Name of the run in headings."""
        return f"{self.ladder} on {self.environment.machine}"

    @property
    def file_name(self) -> str:
        """Name of ladder and model, fit for a file's name."""
        model = self.workload["model"]
        return re.sub(r"[^\w.-]+", "-", self.ladder if model == "gpt2" else f"{self.ladder}-{model}")

    @property
    def begun(self) -> str:
        """UTC start of the first process."""
        return min(record.time for record in self.records)

    @property
    def fastest(self) -> Row | None:
        """The fastest sound rung."""
        return self.fastest_of(self.rows)

    def fastest_of(self, rows: Collection[Row]) -> Row | None:
        """The fastest sound rung among some of this board's, by speed-up over the first rung.

        Without a first rung it is the one with most tokens per second, which interruptions may distort.
        """
        among = [row for row in self.sound if row in rows]
        if compared := [row for row in among if row.speedup]:
            return max(compared, key=lambda row: row.speedup.value if row.speedup else 0.0)
        return max(among, key=lambda row: row.mean_tps, default=None)

    @property
    def taken(self) -> tuple[Row, ...]:
        """The rows without rungs that were tried and passed over: those of short tables and pictures."""
        return tuple(row for row in self.rows if not row.passed_over)

    @property
    def sound(self) -> tuple[Row, ...]:
        """Rungs that failed no check and have no caveat."""
        return tuple(row for row in self.rows if row.tps and row.status == "ok" and not row.caveats)

    @property
    def ties(self) -> tuple[Row, ...]:
        """Other sound rungs than which the fastest is not `faster`, by the verdict on the ratio of both."""
        best, first = self.fastest, self.rows[0]
        if best is None:
            return ()
        speeds = {row.index: tps_by_round(self.records_of(row)) for row in self.sound}
        if best is not first and first.index in speeds:
            speeds[first.index] = self.records.first_tps_by_round(self.records_of(first))
        leads = {index: paired_ratio(speeds[best.index], tps) for index, tps in speeds.items()}
        others = [row for row in self.sound if row is not best]
        return tuple(
            row for row in others if not (lead := leads[row.index]) or verdict(lead, self.delta) != "faster"
        )

    @property
    def clear_lead(self) -> bool:
        """Whether its fastest rung is clearly ahead of all other sound ones."""
        return self.delta is not None and self.fastest is not None and not self.ties

    @property
    def processes(self) -> int:
        """Number of processes that ended, without those that only tried a rung."""
        return sum(record.status != "interrupted" and record.kind != "scout" for record in self.records)

    @property
    def planned_rounds(self) -> int:
        """Least number of rounds that the run was told to take."""
        told = max(self.records, key=lambda record: record.time).protocol  # by the command that came last
        return LEAST_ROUNDS_UNTIL if told.get("until") is not None else told["repeats"]

    @property
    def swept(self) -> bool:
        """Whether the rows are candidates of a sweep, not rungs of a ladder."""
        return any(record.kind == "sweep" for record in self.records)

    @property
    def climbs(self) -> bool:
        """Whether its rungs stand on one another and two or more were measured, as a picture of it needs."""
        measured = [row for row in self.rows if row.tps]
        return len(measured) > 1 and any(row.external is None for row in measured) and not self.swept

    @property
    def interrupted(self) -> bool:
        """Whether the run ended before its last process: by the user, out of time, or killed."""
        if any(record.cut_short for record in self.records):
            return True
        wanted = max(self.rounds, self.planned_rounds)
        rounds: dict[tuple[str, int], set[int]] = {}
        # What this machine does not support was tried once only.
        refused = {(r.kind, r.rung_index) for r in self.records if r.status == "unsupported"}
        for record in self.records:
            if (process := (record.kind, record.rung_index)) not in refused:
                rounds.setdefault(process, set()).add(record.repetition)
        # Where time is short the ceiling is measured once.
        short_of_time = self.records[-1].protocol.get("control") == "last"
        ceilings = {1} if short_of_time else {1, wanted}
        for (kind, _), done in rounds.items():
            if kind == "ceiling" and not ceilings <= done:
                return True
            if kind in ("cumulative", "external") and len(done) < wanted:
                return True
            if kind in ABLATION and len(done) < max(done):
                return True
        carried = carried_rungs(self.records)
        to_run = {("cumulative", record.rung_index) for record in self.records if record.rung in carried}
        if any(len(rounds.get(process, ())) < wanted for process in to_run - refused):
            return True
        controls = [done for (kind, _), done in sorted(rounds.items()) if kind == "control"]
        if short_of_time:  # the first rung's stands in for it where a round was cut in two
            controls = controls[-1:]
        # A sweep's candidates may be fewer in each round; its control, the last of a round, is not left out.
        due = wanted > 1 and self.swept and all(kind != "control" for kind, _ in refused)
        to_be = controls or (due and any(row.tps for row in self.rows))
        return bool(to_be) and min(map(len, controls), default=0) < wanted

    @property
    def has_gaps(self) -> bool:
        """Whether rungs that the ladder has before its last one were left out, as by --rungs."""
        if any(record.kind == "scout" for record in self.records):  # left out are those that were not carried
            return False
        return len(self.records.rungs) <= max(
            record.rung_index for record in self.records if record.kind != "ceiling"
        )

    def same_run(self, other: Scoreboard) -> bool:
        """Whether both are of one run, so that their rounds are the same."""
        return self is other or (self.place is not None and self.place == other.place)

    def is_copy_of(self, other: Scoreboard) -> bool:
        """Whether another file holds the same records, so that both are one run."""
        return not self.same_run(other) and self.records == other.records

    @property
    def own(self) -> Scoreboard:
        """The scoreboard without the rows of external rungs."""
        return replace(self, rows=tuple(row for row in self.rows if row.external is None))


def scoreboard(
    records: Sequence[Record], source: Path | None = None, elsewhere: Sequence[Record] = ()
) -> Scoreboard:
    """Summarise the records of one run of one ladder; at least one must be cumulative.

    elsewhere: records of this machine's ceiling from `bench roofline`, for a run that measured none.
    """
    records = RunRecords(in_order(_latest(records)))
    rungs = list(records.rungs.values())
    curves = [len(m.losses) for rung in records.own_rungs if (m := measured(rung))]
    loss_step = max((step for step in LOSS_STEPS if step <= min(curves)), default=None) if curves else None
    control_tps = {index: tps_by_round(control) for index, control in records.controls.items()}
    control = paired_ratio(control_tps.pop(rungs[0][0].rung_index, {}), tps_by_round(rungs[0]))
    last_control = None
    if control_tps:
        last = max(control_tps)
        last_control = paired_ratio(control_tps[last], tps_by_round(records.rungs.get(last, ())))
    speeds = [tps_by_round(rung) for rung in records.own_rungs]
    between = [ratio for before, tps in pairwise(speeds) if (ratio := paired_ratio(tps, before))]
    delta = noise_floor([ratio for ratio in (control, last_control) if ratio], between)
    ceilings = find_ceilings([*records, *elsewhere])
    beaten = beaten_peaks(records, ceilings)
    peaks = find_peaks(records, beaten)
    rows: list[Row] = []
    for rung in rungs:
        rows.append(
            row_of(
                rung,
                records,
                above=rows,
                peaks=peaks,
                ceiling=ceilings.get(toggles_of(rung).device),
                delta=delta,
                loss_step=loss_step,
            )
        )
    # Of a ladder of several devices the last one's; a machine whose figures do not count is not the run's.
    counted = [rung[-1] for rung, row in zip(rungs, rows, strict=True) if row.status != "not_comparable"]
    measured_on = counted[-1] if counted else rungs[0][0]
    return Scoreboard(
        ladder=records[0].ladder,
        rows=tuple(rows),
        records=records,
        control=control,
        last_control=last_control,
        delta=delta,
        ceilings=ceilings,
        peaks=peaks,
        beaten=beaten,
        loss_step=loss_step,
        environment=measured_on.environment,
        rounds=max(
            (r.repetition for r in records if r.status != "interrupted" and r.kind != "scout"), default=1
        ),
        source=source,
    )


def _latest(records: Sequence[Record]) -> list[Record]:
    """The last attempt at each process: without those cut short that a resumed run ran again."""
    again = {r.key: r for r in sorted(records, key=lambda r: r.time) if r.cut_short}
    done = {r.key for r in records if not r.cut_short}
    return [r for r in records if not r.cut_short or (r.key not in done and r is again[r.key])]

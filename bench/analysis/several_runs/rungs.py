"""Rungs across runs: what tables over several runs tell of a rung, and rungs chained from one baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from bench.analysis.row import Row, status_of
from bench.analysis.run_records import group_by, measured, measurements, tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_named, run_names
from bench.analysis.several_runs.compare import RANKED
from bench.format import percent, plain, plural, tokens_per_second
from bench.ladder.validation import near
from bench.records.machine import Environment
from bench.records.measurement import Measurement
from bench.records.record import Record, RecordError
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, independent_ratio, paired_ratio

DERIVED = "§"
"""Marks an MFU over a peak that is computed from the clock, not a datasheet's."""


@dataclass(frozen=True, kw_only=True)
class RungView:
    """A rung of one run, as tables over several runs show it."""

    board: Scoreboard
    row: Row

    @cached_property
    def records(self) -> list[Record]:
        return self.board.records_of(self.row)

    @cached_property
    def measurement(self) -> Measurement | None:
        return measured(self.records)

    @property
    def environment(self) -> Environment:
        """The rung's own environment: rungs of one run may be on several kinds of device."""
        return self.records[-1].environment

    @property
    def device(self) -> tuple[str, str, str]:
        """Kind of device, the chip's name, and what drives it: XLA on a CPU is not the CPU."""
        return self.row.toggles.device, self.environment.chip, "XLA" if self.environment.xla_on_cpu else ""

    @property
    def devices(self) -> int:
        """Number of devices, which is the number of ranks."""
        return self.row.toggles.world_size

    @property
    def machine(self) -> str:
        """Name of the machine in tables."""
        return f"{self.environment.machine}{', XLA' if self.environment.xla_on_cpu else ''}"

    @property
    def ranked(self) -> bool:
        """Whether the rung has a speed that may be compared."""
        return self.row.tps is not None and self.row.status in RANKED

    @property
    def peak(self) -> float | None:
        """Dense bfloat16 FLOP/s of one device, the denominator of the rung's MFU."""
        return self.board.peaks.get((self.row.toggles.device, "bfloat16"))

    @property
    def derived_peak(self) -> bool:
        """Whether that peak is computed from the clock, not a datasheet's."""
        return self.measurement is not None and self.measurement.peak_flops_kind == "derived"

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The largest use of a whole GPU's memory in any round; None where it is not known."""
        peaks = [each.gpu_memory_bytes for each in measurements(self.records)]
        return max((peak for peak in peaks if peak), default=None)

    @property
    def incomplete(self) -> str:
        """Why the speed is preliminary, such as "interrupted, 2 rounds"; empty where it is not."""
        rounds = self.row.tps.rounds if self.row.tps else 0
        few = [plural(rounds, "round")] if rounds < LEAST_ROUNDS else []
        return ", ".join([*(["interrupted"] if self.board.interrupted else []), *few])

    @property
    def tps_cell(self) -> str:
        return tokens_per_second(self.row.tps)

    @property
    def mfu_cell(self) -> str:
        marked = self.derived_peak and self.row.mfu is not None
        return f"{percent(self.row.mfu)}{DERIVED if marked else ''}"

    @property
    def status_cell(self) -> str:
        return plain(status_of(self.row))


def of_one_task(boards: Sequence[Scoreboard]) -> list[Scoreboard]:
    """The largest group of runs of one model and sequence length, whose tokens per second compare."""
    measured_runs = [board for board in boards if any(row.tps for row in board.rows)]
    by_task = group_by(measured_runs, lambda board: board.task)
    return max(by_task.values(), key=len, default=[])


def rung_views(board: Scoreboard) -> list[RungView]:
    return [RungView(board=board, row=row) for row in board.rows]


def speed_ratio(rung: RungView, reference: RungView) -> Estimate | None:
    """Speed-up over `reference`: paired within rounds of one run, Welch's interval between two.

    None where one of them has no speed that may be compared, or no round has both.
    """
    if not (rung.ranked and reference.ranked):
        return None
    speeds, board = tps_by_round(rung.records), reference.board
    if not rung.board.same_run(board):
        return independent_ratio([*speeds.values()], [*tps_by_round(reference.records).values()])
    if reference.row is board.rows[0]:
        return paired_ratio(speeds, board.records.first_tps_by_round(reference.records))
    return paired_ratio(speeds, tps_by_round(reference.records))


def fastest_rung(board: Scoreboard) -> RungView | None:
    """The fastest rung of equal maths; where every rung has a caveat, the one with most tokens per second."""
    valid = [row for row in board.rows if row.tps and row.status == "ok" and not row.other_maths]
    row = board.fastest or max(valid, key=lambda row: row.mean_tps, default=None)
    return RungView(board=board, row=row) if row else None


def faster_elsewhere(board: Scoreboard, boards: Iterable[Scoreboard]) -> RungView | None:
    """The rung with most tokens per second of a run's model and device, where another run has it.

    No verdict: the runs may be of other hours, other code and other steps.
    """
    place = rung_views(board)[0]
    found = [rung for each in boards if each.task == board.task and (rung := fastest_rung(each))]
    alike = [rung for rung in found if (rung.machine, rung.device) == (place.machine, place.device)]
    best = max(alike, key=lambda rung: rung.row.mean_tps, default=None)
    highest_here = max(row.mean_tps for row in board.rows)
    return best if best and best.board.fastest and best.row.mean_tps > highest_here else None


def name_with_caveats(rung: RungView) -> str:
    """Rung name with its caveats in brackets."""
    caveats = ["caveat"] if rung.row.caveats else []
    caveats += [rung.incomplete] if rung.incomplete else []
    return plain(rung.row.rung) + (f" ({', '.join(caveats)})" if caveats else "")


def by_speed(rungs: Iterable[RungView]) -> list[RungView]:
    """Sorted with the fastest first, but incomplete rungs below the others, and those with caveats last."""
    return sorted(rungs, key=lambda rung: (*rank_below(rung), -rung.row.mean_tps))


def rank_below(rung: RungView) -> tuple[bool, bool]:
    """Sort key that puts incomplete rungs below the others and those with caveats last."""
    return bool(rung.row.caveats), bool(rung.incomplete)


# --- All rungs of several runs, chained from one baseline

Group = Literal["Hardware", "Software", "Distributed", "External"]


@dataclass(frozen=True, kw_only=True)
class ChainRow:
    """One rung of the chain; None is what does not compare or was not measured."""

    rung: RungView
    group: Group
    over_baseline: Estimate | None
    first: RungView | None
    """The first rung of the same run on this device that may be compared; perhaps the rung itself."""
    over_first: Estimate | None
    over_before: Estimate | None
    """Speed-up over the rung before in the same run."""
    verdict: Verdict | None
    """Verdict on over_before."""

    @property
    def orders_of_magnitude(self) -> float | None:
        """Decimal logarithm of the speed-up over the baseline."""
        return math.log10(self.over_baseline.value) if self.over_baseline else None


@dataclass(frozen=True, kw_only=True)
class Chain:
    baseline: RungView
    runs: tuple[Scoreboard, ...]
    """Runs in the chain's order."""
    baseline_added: bool
    """Whether the baseline's run was not asked for; only the baseline of it is then shown, first of all."""
    rows: tuple[ChainRow, ...]
    unlike: tuple[Scoreboard, ...] = ()
    """Runs that train another task, whose speeds do not compare with these."""
    not_carried: int = 0
    """Rungs that are left out because they were tried and are no faster."""

    def is_baseline(self, row: ChainRow) -> bool:
        return row.rung.board is self.baseline.board and row.rung.row is self.baseline.row


def load_baseline(name: str) -> RungView:
    """Load the rung that FILE:RUNG names. Raises RecordError where its speed cannot be compared."""
    path, boards, rung = load_named(name)
    if len(boards) > 1:
        holds = f"holds {len(boards)} runs, {run_names(boards)}"
        raise RecordError(f"--baseline {name}: {path} {holds}; name one file")
    (board,) = boards
    if rung is None:
        known = [row.rung for row in board.rows]
        raise RecordError(f"--baseline {name}: say which rung, as in {path}:{known[0]}{near('', known)}")
    row = next(row for row in board.rows if row.rung == rung)
    if row.status not in RANKED:
        raise RecordError(
            f"{path}: {rung!r} cannot be the baseline: {status_of(row)}; choose a rung that is ok"
        )
    return RungView(board=board, row=row)


def build_chain(boards: Sequence[Scoreboard], baseline: RungView) -> Chain:
    """Chain all rungs of the runs that train the baseline's task. Raises RecordError where no run does."""
    runs: dict[Path | None, Scoreboard] = {}
    unlike: list[Scoreboard] = []
    for board in boards:
        if board.task == baseline.board.task:
            runs.setdefault(board.place, board)  # the same file twice is one run
        else:
            unlike.append(board)
    if unlike and not runs:
        tasks = (unlike[0].task, baseline.board.task)
        trained, expected = (f"{model} at T = {seq_len}" for model, seq_len in tasks)
        unlike_tasks = f"trains {trained}, but the baseline {expected}: their speeds do not rank"
        raise RecordError(f"{unlike[0].source}: {unlike_tasks}; name files of one model and sequence length")
    added = baseline.board.place not in runs
    every = [rung for board in runs.values() for rung in rung_views(board)]
    rungs = [rung for rung in every if not rung.row.passed_over]
    not_carried = len(every) - len(rungs)
    if added:
        rungs.insert(0, baseline)
    else:  # the board that is shown takes the place of the one that the baseline was read from
        shown = runs[baseline.board.place]
        baseline = next(rung for rung in rung_views(shown) if rung.row.index == baseline.row.index)
    return Chain(
        baseline=baseline,
        runs=(baseline.board, *runs.values()) if added else tuple(runs.values()),
        baseline_added=added,
        rows=tuple(_chain_row(rung, baseline, rungs[:place]) for place, rung in enumerate(rungs)),
        unlike=tuple(unlike),
        not_carried=not_carried,
    )


def _chain_row(rung: RungView, baseline: RungView, above: Sequence[RungView]) -> ChainRow:
    own = rung_views(rung.board)
    first = next((r for r in own if r.device == rung.device and r.ranked and not r.row.external), None)
    before = next((r for r in own if r.row.index == rung.row.before), None)
    both_ranked = rung.ranked and before is not None and before.ranked
    return ChainRow(
        rung=rung,
        group=_group(rung, above),
        over_baseline=speed_ratio(rung, baseline),
        first=first,
        over_first=speed_ratio(rung, first) if first else None,
        over_before=rung.row.gain if both_ranked else None,
        verdict=rung.row.verdict if both_ranked else None,
    )


def _group(rung: RungView, above: Sequence[RungView]) -> Group:
    """What is new in a rung: the hardware, the number of devices, or the software.

    More chips of a kind that the chain has had are not new hardware where the rung trains on several of them.
    """
    if rung.row.external:
        return "External"
    if rung.device not in [other.device for other in above]:
        return "Hardware"
    if rung.devices == 1 and rung.machine not in [other.machine for other in above]:
        return "Hardware"
    return "Distributed" if rung.devices > 1 else "Software"

"""The scoreboard of one results file: a row per rung, computed from the records.

board = scoreboard(records)
board.rows[0].tps.value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.record import Environment, Measurement, Record
from bench.stats import Estimate, geometric_mean, loss_difference, paired_ratio
from gpt2.toggles import LOSS_TOLERANCE, Toggles, describe
from gpt2.workload import Workload

LOSS_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
"""Steps at which losses are shown: few, so that machines of different speed show the same one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rung; None is what was not measured."""

    rung: str
    changed: tuple[str, ...]
    """From the row above, as a reader sees it."""
    tokens_per_step: int | None
    tps: Estimate | None
    speedup: Estimate | None
    """Over the first rung."""
    gain: Estimate | None
    """Over the rung before."""
    mfu: float | None
    """Share of the devices' dense bfloat16 peak."""
    peak_memory_bytes: int | None
    loss: float | None
    """At Scoreboard.loss_step."""
    loss_difference: float | None
    """Largest relative difference of the first losses, or of the first gradient norm, from those of the first rung
    with as many tokens per step; None where there is no other."""
    status: str
    """ok, parity_failed, or how the last failing process ended."""
    error: str | None
    """Why it is not ok."""
    expect: str | None
    """The outcome that the ladder calls the point of this rung."""


@dataclass(frozen=True, kw_only=True)
class Scoreboard:
    """The rows of one run, and what its caption must say."""

    ladder: str
    rows: tuple[Row, ...]
    records: tuple[Record, ...]
    loss_step: int | None
    """The step, counted from 1, whose loss is shown: the largest of LOSS_STEPS that every measured rung has."""
    environment: Environment
    rounds: int
    source: Path | None
    """The results file."""

    @property
    def interrupted(self) -> bool:
        """Whether the run was ended before its last process."""
        return any(record.status == "interrupted" for record in self.records)

    @property
    def has_gaps(self) -> bool:
        """Whether rungs below the last one shown are missing."""
        return len(self.rows) <= max(record.rung_index for record in self.records)

    @property
    def mixed_environments(self) -> bool:
        """Whether software or code changed between records: their figures do not compare."""
        return len({(r.environment.torch, r.environment.code_hash, r.environment.chip) for r in self.records}) > 1


def scoreboard(records: Sequence[Record], source: Path | None = None) -> Scoreboard:
    """Summarise the cumulative records of one run of one ladder; there must be at least one."""
    records = sorted((r for r in records if r.kind == "cumulative"), key=lambda r: (r.rung_index, r.repetition))
    by_rung: dict[int, list[Record]] = {}
    for record in records:
        by_rung.setdefault(record.rung_index, []).append(record)
    rungs = list(by_rung.values())
    curves = [len(measured.losses) for rung in rungs if (measured := _measured(rung))]
    loss_step = max((step for step in LOSS_STEPS if step <= min(curves)), default=None) if curves else None
    rows = [
        _row(rung, rungs, before=rungs[place - 1] if place else None, loss_step=loss_step)
        for place, rung in enumerate(rungs)
    ]
    return Scoreboard(
        ladder=records[0].ladder,
        rows=tuple(rows),
        records=tuple(records),
        loss_step=loss_step,
        environment=records[-1].environment,
        rounds=max(r.repetition for r in records),
        source=source,
    )


def _row(rung: list[Record], rungs: list[list[Record]], *, before: list[Record] | None, loss_step: int | None) -> Row:
    tps = _tps(rung)
    measured = _measured(rung)
    mean = geometric_mean(list(tps.values())) if tps else None
    mfu = None
    if mean and measured and measured.peak_flops_bf16:
        mfu = measured.flops_per_token * mean.value / (measured.peak_flops_bf16 * _toggles(rung).world_size)
    failed = [r for r in rung if r.status != "ok"]
    status, error = (failed[-1].status, failed[-1].error) if failed else ("ok", None)
    reference = _parity_reference(rung, rungs)
    difference = _loss_difference(rung, reference) if reference else None
    if status == "ok" and reference and difference is not None:
        allowed = max(_tolerance(rung), _tolerance(reference))
        if difference > allowed:
            status = "parity_failed"
            error = f"by {difference:.2%} from {reference[0].rung}'s; the number formats explain {allowed:.2%}"
    peaks = [r.measurement.peak_memory_bytes for r in rung if r.measurement and r.measurement.peak_memory_bytes]
    return Row(
        rung=rung[0].rung,
        changed=tuple(describe(_toggles(rung), _toggles(before) if before else None, Workload(**rung[0].workload))),
        tokens_per_step=measured.tokens_per_step if measured else None,
        tps=mean,
        speedup=paired_ratio(tps, _tps(rungs[0])),
        gain=paired_ratio(tps, _tps(before)) if before else None,
        mfu=mfu,
        peak_memory_bytes=max(peaks, default=None),
        loss=measured.losses[loss_step - 1] if measured and loss_step else None,
        loss_difference=difference,
        status=status,
        error=error,
        expect=rung[0].expect,
    )


def _measured(rung: Sequence[Record]) -> Measurement | None:
    """Of the first round that has one: the round with the longest loss curve."""
    return next((r.measurement for r in rung if r.measurement), None)


def _tps(rung: Sequence[Record]) -> dict[int, float]:
    """Tokens per second by round."""
    return {r.repetition: r.measurement.tokens_per_second for r in rung if r.status == "ok" and r.measurement}


def _parity_reference(rung: list[Record], rungs: list[list[Record]]) -> list[Record] | None:
    """The first measured rung whose steps have as many tokens; itself for the first one."""
    mine = _measured(rung)
    for other in rungs:
        theirs = _measured(other)
        if mine and theirs and mine.tokens_per_step == theirs.tokens_per_step:
            return other
    return None


def _loss_difference(rung: list[Record], reference: list[Record]) -> float:
    """The largest over all processes of the rung."""
    expected = next(r.measurement for r in reference if r.measurement)
    return max(
        max(
            loss_difference(r.measurement.losses, expected.losses),
            loss_difference(r.measurement.grad_norms[:1], expected.grad_norms[:1]),
        )
        for r in rung
        if r.measurement
    )


def _tolerance(rung: list[Record]) -> float:
    return LOSS_TOLERANCE[_toggles(rung).precision_class()]


def _toggles(rung: list[Record]) -> Toggles:
    """Of a rung; a toggle that an older record does not know had its default."""
    return Toggles(**rung[0].toggles.all)

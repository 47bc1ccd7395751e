"""The scoreboard of one results file: a row per rung, computed from the records.

board = scoreboard(records)
board.rows[0].tps.value
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.machine import Environment
from bench.record import ABLATION, Record
from bench.report.denominators import Ceiling, Peaks, find_ceilings, find_peaks, share
from bench.report.guards import doubts, judge
from bench.report.rungs import (
    cumulative,
    first_by_round,
    in_order,
    line_of,
    measured,
    on_fewer_ranks,
    parity_reference,
    toggles_of,
    tps_by_round,
)
from bench.stats import (
    LEAST_ROUNDS_UNTIL,
    Estimate,
    Verdict,
    geometric_mean,
    noise_floor,
    paired_ratio,
    verdict,
)
from gpt2.toggles import Toggles, describe
from gpt2.workload import Workload

LOSS_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
"""Steps at which losses are shown: few, so that machines of different speed show the same one."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rung; None is what was not measured."""

    rung: str
    index: int
    """In the ladder."""
    toggles: Toggles
    changed: tuple[str, ...]
    """From the row above, as a reader sees it."""
    tokens_per_step: int | None
    tps: Estimate | None
    speedup: Estimate | None
    """Over the first rung."""
    gain: Estimate | None
    """Over the rung before."""
    verdict: Verdict | None
    """Of the gain; None where something is held against this rung or the one before."""
    efficiency: Estimate | None
    """Of several ranks: tokens per second and device over those of an earlier rung that trains alike, on fewer."""
    efficiency_over: str | None
    """That rung's name."""
    mfu: float | None
    """Share of the devices' dense bfloat16 peak: one denominator for the whole ladder."""
    mfu_own: float | None
    """Share of the dense peak of the number format that this rung multiplies."""
    hfu: float | None
    """As mfu, with what is computed a second time to save memory; None where nothing is."""
    ceiling_share: float | None
    """Share of the matrix-product rate measured on this machine."""
    peak_memory_bytes: int | None
    peak_memory_method: str | None
    loss: float | None
    """At Scoreboard.loss_step."""
    doubts: tuple[str, ...]
    """Why it may not be called the fastest, even if its status is ok."""
    joules_per_token: float | None
    status: str
    """ok, a guard (see bench.report.guards), or how the last failing process ended."""
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
    """All of the run, those of controls and of toggles alone included."""
    control: Estimate | None
    """The A/A control: the first rung run again, over the first rung."""
    delta: float | None
    """The noise floor: relative differences below it are no difference. None without a control."""
    ceilings: dict[str, Ceiling]
    """By kind of device."""
    loss_step: int | None
    """The step, counted from 1, whose loss is shown: the largest of LOSS_STEPS that every measured rung has."""
    environment: Environment
    rounds: int
    source: Path | None
    """The results file."""

    def records_of(self, row: Row) -> list[Record]:
        """Of one rung, in all rounds."""
        return next(rung for rung in cumulative(self.records) if rung[0].rung_index == row.index)

    @property
    def file_name(self) -> str:
        """Of its ladder and model, fit for a file's name."""
        model = self.records[0].workload["model"]
        return re.sub(r"[^\w.-]+", "-", self.ladder if model == "gpt2" else f"{self.ladder}-{model}")

    @property
    def begun(self) -> str:
        """UTC start of its first process."""
        return min(record.time for record in self.records)

    @property
    def fastest(self) -> Row | None:
        """The rung with most tokens per second of those that nothing is held against and that leave no doubt."""
        good = [row for row in self.rows if row.tps and row.status == "ok" and not row.doubts]
        return max(good, key=lambda row: row.tps.value if row.tps else 0.0, default=None)

    @property
    def as_fast(self) -> tuple[Row, ...]:
        """Other rungs that nothing is held against and that this run cannot tell from the fastest."""
        best = self.fastest
        if best is None:
            return ()
        speeds = {rung[0].rung_index: tps_by_round(rung) for rung in cumulative(self.records)}
        found = []
        for row in self.rows:
            ahead = paired_ratio(speeds[best.index], speeds[row.index]) if row is not best else None
            if ahead and ahead.low is not None and ahead.low <= 1 and row.status == "ok":
                found.append(row)
        return tuple(found)

    @property
    def planned_rounds(self) -> int:
        """As many as the run was told to take, at least."""
        until = self.records[-1].protocol.get("until")
        return LEAST_ROUNDS_UNTIL if until is not None else max(r.protocol["repeats"] for r in self.records)

    @property
    def interrupted(self) -> bool:
        """Whether the run ended before its last process, by the user's will or because it was killed."""
        if any(record.cut_short for record in self.records):
            return True
        wanted = max(self.rounds, self.planned_rounds)
        rounds: dict[tuple[str, int], set[int]] = {}
        for record in self.records:
            rounds.setdefault((record.kind, record.rung_index), set()).add(record.repetition)
            if record.status == "unsupported":  # tried once only
                rounds[record.kind, record.rung_index] |= set(range(1, wanted + 1))
        for (kind, index), done in rounds.items():
            if index < 0 and not {1, wanted} <= done:  # a ceiling
                return True
            if kind == "cumulative" and len(done) < wanted:
                return True
            if kind in ABLATION and len(done) < max(done):
                return True
        controls = rounds.get(("control", self.rows[0].index), set())
        return bool(controls) and len(controls) < wanted

    @property
    def has_gaps(self) -> bool:
        """Whether rungs below the last one shown are missing."""
        return len(self.rows) <= max(record.rung_index for record in self.records)


def scoreboard(records: Sequence[Record], source: Path | None = None, elsewhere: Sequence[Record] = ()) -> Scoreboard:
    """Summarise the records of one run of one ladder; at least one must be cumulative.

    elsewhere: records of this machine's ceiling from `bench roofline`, for a run that measured none.
    """
    records = in_order(_latest(records))
    rungs = cumulative(records)
    curves = [len(found.losses) for rung in rungs if (found := measured(rung))]
    loss_step = max((step for step in LOSS_STEPS if step <= min(curves)), default=None) if curves else None
    control = paired_ratio(tps_by_round([r for r in records if r.kind == "control"]), tps_by_round(rungs[0]))
    delta = noise_floor(control)
    ceilings = find_ceilings([*records, *elsewhere])
    peaks = find_peaks(records)
    rows: list[Row] = []
    for rung in rungs:
        rows.append(
            _row(
                rung,
                rungs,
                records,
                above=rows,
                peaks=peaks,
                ceiling=ceilings.get(toggles_of(rung).device),
                delta=delta,
                loss_step=loss_step,
            )
        )
    return Scoreboard(
        ladder=records[0].ladder,
        rows=tuple(rows),
        records=tuple(records),
        control=control,
        delta=delta,
        ceilings=ceilings,
        loss_step=loss_step,
        environment=rungs[-1][-1].environment,
        rounds=max(r.repetition for r in records),
        source=source,
    )


def _latest(records: Sequence[Record]) -> list[Record]:
    """Without processes that were cut short and that a resumed run has run again."""
    again = {r.key: r for r in sorted(records, key=lambda r: r.time) if r.cut_short}
    done = {r.key for r in records if not r.cut_short}
    return [r for r in records if not r.cut_short or (r.key not in done and r is again[r.key])]


def _row(
    rung: list[Record],
    rungs: list[list[Record]],
    records: Sequence[Record],
    *,
    above: Sequence[Row],
    peaks: Peaks,
    ceiling: Ceiling | None,
    delta: float | None,
    loss_step: int | None,
) -> Row:
    toggles, found, tps = toggles_of(rung), measured(rung), tps_by_round(rung)
    before = last = rungs[len(above) - 1] if above else None
    if last and rung[0].kind == "sweep":  # whose candidates differ from the first; a smaller batch alone is a step
        before, last = rungs[0], last if line_of(toggles_of(last)) == line_of(toggles) else None
    mean = geometric_mean(list(tps.values())) if tps else None
    reference = parity_reference(rung, records)
    status, error = judge(rung, rungs[0], before, reference)
    if status == "ok" and reference and (wrong := _broken_reference(rung, reference, above)):
        status, error = "parity_failed", f"its losses are held to {wrong}'s, which differ themselves"
    comparable = status != "not_comparable"
    gain = paired_ratio(tps, _paired(last, rungs, records)) if last and comparable else None
    sound = status == "ok" and above and above[-1].status in ("ok", "inert")
    # Over all devices at work: what one token needs, times tokens per second, over what the devices could do.
    rate = mean.value / (found.peak_devices or toggles.world_size) if mean and found else None
    fewer = on_fewer_ranks(toggles, rungs[: len(above)]) if comparable else None
    scaled = paired_ratio(tps, _paired(fewer, rungs, records)) if fewer else None
    memory = [r.measurement.peak_memory_bytes for r in rung if r.measurement and r.measurement.peak_memory_bytes]
    return Row(
        rung=rung[0].rung,
        index=rung[0].rung_index,
        toggles=toggles,
        changed=tuple(describe(toggles, toggles_of(before) if before else None, Workload(**rung[0].workload))),
        tokens_per_step=found.tokens_per_step if found else None,
        tps=mean,
        speedup=paired_ratio(tps, first_by_round(rungs[0], records)) if comparable else None,
        gain=gain,
        verdict=verdict(gain, delta) if gain and sound else None,
        efficiency=scaled.over(toggles.world_size / toggles_of(fewer).world_size) if fewer and scaled else None,
        efficiency_over=fewer[0].rung if fewer and scaled else None,
        mfu=share(rate, found, peaks.get((toggles.device, "bf16"))),
        mfu_own=share(rate, found, peaks.get((toggles.device, found and found.product_format))),
        hfu=share(rate, found, peaks.get((toggles.device, "bf16")), hardware=True),
        ceiling_share=share(rate, found, ceiling and ceiling.flops_per_second),
        peak_memory_bytes=max(memory, default=None),
        peak_memory_method=found.peak_memory_method if found else None,
        loss=found.losses[loss_step - 1] if found and loss_step else None,
        doubts=(*doubts(rung, before, reference), *_dropped(rung, rungs)),
        joules_per_token=_joules_per_token(rung),
        status=status,
        error=error,
        expect=rung[0].expect,
    )


def _dropped(rung: list[Record], rungs: Sequence[list[Record]]) -> list[str]:
    """Whether a sweep's candidate ran less often than the first, to which all are held."""
    rounds, most = len(tps_by_round(rung)), len(tps_by_round(rungs[0]))
    return [f"it ran in {rounds} of {most} rounds"] if rung[0].kind == "sweep" and 0 < rounds < most else []


def _paired(
    rung: list[Record], rungs: Sequence[list[Record]], records: Sequence[Record]
) -> dict[tuple[int, str], float]:
    """A rung's speeds for another's to be held to: the first rung's are its control's where a round was cut in two."""
    return first_by_round(rung, records) if rung is rungs[0] else tps_by_round(rung)


def _broken_reference(rung: Sequence[Record], reference: Sequence[Record], above: Sequence[Row]) -> str | None:
    """The rung whose losses failed and that a rung's reference trains like, or is; None if all is well."""
    index = reference[0].rung_index - (reference[0].kind == "parity")
    if rung[0].kind == "sweep" and reference[0].kind == "parity":
        index = 0  # the first candidate, whatever the size of its steps
    for row in above:
        if row.index == index and row.status in ("parity_failed", "ranks_differ"):
            return row.rung
    return None


def _joules_per_token(rung: Sequence[Record]) -> float | None:
    """Over all rounds; absent where no counter exists."""
    windows = [r.measurement for r in rung if r.status == "ok" and r.measurement]
    energies = [(m.energy_joules, m.tokens_per_step * (m.block_steps or 0) * len(m.block_seconds)) for m in windows]
    known = [(joules, tokens) for joules, tokens in energies if joules is not None and tokens]
    return sum(joules for joules, _ in known) / sum(tokens for _, tokens in known) if known else None

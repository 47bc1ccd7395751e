"""One row of a scoreboard, computed from the records of its rung, and what its shares are over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bench.analysis.claim_checks import caveats_of, check_claims, inert_rounds
from bench.analysis.run_records import (
    RunRecords,
    group_by,
    is_external,
    measured,
    measurements,
    not_carried,
    scaling_reference,
    toggles_of,
    tps_by_round,
    without_batch,
)
from bench.analysis.schedule import same_step
from bench.format import status_word, times
from bench.ladder.peers import PEERS
from bench.records.machine import Ceiling, Matmul
from bench.records.measurement import External
from bench.records.record import Record
from bench.stats import Estimate, Verdict, geometric_mean, paired_ratio, verdict
from gpt2.config.toggles import Toggles, describe
from gpt2.config.workload import Workload

EQUAL = "equal"
"""Row.maths of a rung that computes what the first rung does."""


# --- What speeds are a share of: peaks of datasheets, and the ceiling measured on the machine


@dataclass(frozen=True, kw_only=True)
class RunCeiling:
    """What this machine sustains, over the processes that measured it."""

    measured: tuple[Ceiling, ...]
    """All that each process measured: matmuls in several formats, and the speed of memory."""
    elsewhere: str | None
    """run_id of the run that measured it, where that was another one."""

    @property
    def best(self) -> list[Matmul]:
        """The fastest matmul of each process."""
        return [ceiling.best for ceiling in self.measured]

    @property
    def rates(self) -> list[float]:
        """FLOP/s of these on one device."""
        return [matmul.flops_per_second for matmul in self.best]

    @property
    def rate(self) -> float:
        """Their mean, which shares are over."""
        return geometric_mean(self.rates).value


def find_ceilings(records: Sequence[Record]) -> dict[str, RunCeiling]:
    """Ceilings by kind of device, measured by the run itself or else by the last other run among records."""
    by_device = group_by((r for r in records if r.ceiling), lambda record: toggles_of([record]).device)
    ceilings = {}
    for device, candidates in by_device.items():
        own = [record for record in candidates if record.ladder == records[0].ladder]
        ceilings[device] = RunCeiling(
            measured=tuple(record.ceiling for record in own or candidates[-1:] if record.ceiling),
            elsewhere=None if own else candidates[-1].run_id,
        )
    return ceilings


Peaks = Mapping[tuple[str, str | None], float]
"""FLOP/s of one device, by kind of device and number format; that of bfloat16 is what MFU is over."""


def find_peaks(records: Sequence[Record], beaten: Collection[str] = ()) -> Peaks:
    """One peak for the whole ladder: one derived from the clock could differ from process to process.

    beaten: kinds of device whose derived peaks a matmul measured here has beaten, so that they are wrong.
    """
    peaks: dict[tuple[str, str | None], float] = {}
    for record in records:
        if m := record.measurement:
            device = toggles_of([record]).device
            if device in beaten and m.peak_flops_kind == "derived":
                continue
            for number_format, peak in (
                ("bfloat16", m.peak_flops_bf16),
                (m.product_format, m.peak_flops_dtype),
            ):
                if peak is not None:
                    peaks.setdefault((device, number_format), peak)
    return peaks


def beaten_peaks(records: Sequence[Record], ceilings: Mapping[str, RunCeiling]) -> dict[str, float]:
    """The highest rate of a matmul measured above its device's derived peak, by kind of device."""
    derived = [r for r in records if r.measurement and r.measurement.peak_flops_kind == "derived"]
    peaks, beaten = find_peaks(derived), {}
    for device, ceiling in ceilings.items():
        for measured_here in ceiling.measured:
            for product in measured_here.matmuls:
                peak = peaks.get((device, product.number_format))
                if peak is not None and product.flops_per_second > peak:
                    beaten[device] = max(product.flops_per_second, beaten.get(device, 0.0))
    return beaten


def _share(flops_per_token: int | None, tps: float | None, peak: float | None) -> float | None:
    """Share of `peak` FLOP/s that a device needs for `tps` tokens per second."""
    return flops_per_token * tps / peak if flops_per_token and tps and peak else None


# --- The row


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rung; None is what was not measured."""

    rung: str
    index: int
    """Place in the ladder, counted from 0."""
    toggles: Toggles
    changed: tuple[str, ...]
    """Changes from the rung before, in words."""
    maths: str | None
    """`equal` to the first rung's but for rounding, or what changes it; None of another trainer."""
    tokens_per_step: int | None = None
    tps: Estimate | None = None
    speedup: Estimate | None = None
    """Ratio over the first rung."""
    gain: Estimate | None = None
    """Ratio over the rung before, or the one before that where that had no effect."""
    before: int | None = None
    """Index of that rung; in a sweep of the next smaller batch of the same toggles, else of the first row."""
    verdict: Verdict | None = None
    """Verdict on the gain; None where this rung or the one before failed a check."""
    efficiency: Estimate | None = None
    """Tokens per second and device over those of an earlier rung that trains alike on fewer devices."""
    efficiency_over: str | None = None
    """Name of that rung."""
    mfu: float | None = None
    """Share of the devices' dense bfloat16 peak: one denominator for the whole ladder."""
    mfu_own: float | None = None
    """Share of the dense peak of the number format that this rung multiplies."""
    hfu: float | None = None
    """MFU including what is computed a second time to save memory; None where nothing is."""
    ceiling_share: float | None = None
    """Share of the matmul rate measured on this machine."""
    peak_memory_bytes: int | None = None
    peak_memory_method: str | None = None
    loss: float | None = None
    """Loss at Scoreboard.loss_step."""
    caveats: tuple[str, ...] = ()
    """Why it may not be called the fastest, even if its status is ok."""
    dropped: bool = False
    """Whether a candidate of a sweep ran in fewer rounds than it could."""
    joules_per_token: float | None = None
    status: str
    """ok, a failed check (see bench.analysis.claim_checks), or how the last failing process ended."""
    error: str | None = None
    """Why it is not ok."""
    inert_rounds: tuple[int, int] | None = None
    """Of an inert rung: rounds in which a toggle had no effect, and rounds in which that was checked."""
    expect: str | None
    """The outcome that the ladder expects of this rung."""
    external: External | None = None
    """The other trainer of an external rung, whose toggles tell its device only."""
    tried: float | None = None
    """Speed over the rung that it stood on, in short windows; only of a rung tried and not carried."""
    left_out: bool = False
    """Whether it was tried and not carried, so that no round measured it."""

    @property
    def passed_over(self) -> bool:
        """Whether it was tried and left out as no faster, or as not supported here."""
        return self.left_out and self.status in (NOT_CARRIED, "unsupported")

    @property
    def why(self) -> str:
        """First line of the reason why it is not ok; empty where there is none."""
        return ((self.error or "").strip().splitlines() or [""])[0]

    @property
    def mean_tps(self) -> float:
        """Tokens per second; 0 where none were measured."""
        return self.tps.value if self.tps else 0.0

    @property
    def trainer(self) -> str | None:
        """Name and version of the other trainer of an external rung."""
        return _trainer(self.external) if self.external else None

    @property
    def other_maths(self) -> bool:
        """Whether it trains otherwise than the first rung, so that it may be called the fastest nowhere."""
        return self.maths not in (None, EQUAL)


def memory_ratio(row: Row, reference: Row) -> float | None:
    """Peak memory over the reference's; None where the two were measured in different ways."""
    peak, over = row.peak_memory_bytes, reference.peak_memory_bytes
    return peak / over if peak and over and row.peak_memory_method == reference.peak_memory_method else None


def row_of(
    rung: list[Record],
    run: RunRecords,
    *,
    above: Sequence[Row],
    peaks: Peaks,
    ceiling: RunCeiling | None,
    delta: float | None,
    loss_step: int | None,
) -> Row:
    """The row of one rung.

    rung: its records. above: the rows before it. delta: the noise floor. loss_step: the step whose loss is
    shown.
    """
    rungs = list(run.rungs.values())
    rungs_above = [other for other in rungs[: len(above)] if not not_carried(other[0])]
    own_above = [other for other in rungs_above if not is_external(other)]
    if not_carried(rung[0]):
        return _row_left_out(rung, own_above[-1] if own_above else None)
    toggles, m, tps, external = toggles_of(rung), measured(rung), tps_by_round(rung), _external(rung)
    idle = {row.index for row in above if row.status == "inert"}
    before = own_above[-1] if own_above and not external else None
    counted = [other for other in own_above if other[0].rung_index not in idle] or own_above
    compared_with = counted[-1] if before else None
    if before and rung[0].kind == "sweep":
        # Candidates differ from the first one; only a larger batch is a step from the candidate before.
        without = without_batch(toggles, rung[0].workload)
        larger_batch = without_batch(toggles_of(before), before[0].workload) == without
        before, compared_with = rungs[0], before if larger_batch else rungs[0]
    reference = None if external else run.parity_reference(rung)
    status, error = check_claims(rung, rungs[0], before, reference)
    if status == "ok" and reference and (wrong := _broken_reference(reference, above)):
        status, error = "parity_failed", f"its losses are compared with {wrong}'s, which differ themselves"

    def over(other: list[Record] | None) -> Estimate | None:
        if other is None or status == "not_comparable":
            return None
        is_first = other is rungs[0]
        return paired_ratio(tps, run.first_tps_by_round(other) if is_first else tps_by_round(other))

    gain = over(compared_with)
    row_before = next((r for r in above if compared_with and r.index == compared_with[0].rung_index), None)
    both_valid = status == "ok" and row_before is not None and row_before.status in ("ok", "inert")
    fewer = scaling_reference(toggles, rungs_above)
    scaled, efficiency = over(fewer), None
    if fewer and scaled:
        efficiency = scaled.divided_by(toggles.world_size / toggles_of(fewer).world_size)
    mean = geometric_mean(list(tps.values())) if tps else None
    tps_per_device = mean.value / (m.peak_devices or toggles.world_size) if mean and m else None
    flops = m.flops_per_token if m else None
    peak = peaks.get((toggles.device, "bfloat16"))
    dropped = _dropped(rung, run)
    maths = [f"{setting} changes the maths: {why}" for setting, why in toggles.maths().items()]
    caveats = () if external else (*caveats_of(rung, before, reference), *maths, *dropped)
    memory = [each.peak_memory_bytes for each in measurements(rung) if each.peak_memory_bytes]
    return Row(
        rung=rung[0].rung,
        index=rung[0].rung_index,
        toggles=toggles,
        changed=tuple(_changed(rung, before)),
        maths=None if external else "; ".join(maths) or EQUAL,
        tokens_per_step=m.tokens_per_step if m else None,
        tps=mean,
        speedup=over(rungs[0]),
        gain=gain,
        before=row_before.index if row_before else None,
        verdict=verdict(gain, delta) if gain and both_valid else None,
        efficiency=efficiency,
        efficiency_over=fewer[0].rung if fewer and efficiency else None,
        mfu=_share(flops, tps_per_device, peak),
        mfu_own=_share(flops, tps_per_device, peaks.get((toggles.device, m and m.product_format))),
        hfu=_share(m and m.hardware_flops_per_token, tps_per_device, peak),
        ceiling_share=_share(flops, tps_per_device, ceiling and ceiling.rate),
        peak_memory_bytes=max(memory, default=None),
        peak_memory_method=m.peak_memory_method if m else None,
        loss=m.losses[loss_step - 1] if m and loss_step and not external else None,
        caveats=caveats,
        dropped=bool(dropped),
        joules_per_token=_joules_per_token(rung),
        status=status,
        error=error,
        inert_rounds=inert_rounds(rung, before) if status == "inert" else None,
        expect=rung[0].expect,
        external=external,
    )


def _row_left_out(rung: Sequence[Record], before: Sequence[Record] | None) -> Row:
    """The row of a rung that was tried and not carried: nothing of it was measured in rounds."""
    toggles, scout = toggles_of(rung), rung[-1].scout
    assert scout
    slow = scout.check == "ok" or rung[-1].status == "too_slow"
    maths = [f"{setting} changes the maths: {why}" for setting, why in toggles.maths().items()]
    return Row(
        rung=rung[0].rung,
        index=rung[0].rung_index,
        toggles=toggles,
        changed=tuple(_changed(rung, before)),
        maths="; ".join(maths) or EQUAL,
        status=NOT_CARRIED if slow else scout.check,
        error=None if slow else scout.reason,
        expect=rung[0].expect,
        tried=scout.ratio,
        left_out=True,
    )


def _changed(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """What a rung changes, in words: toggles, or the trainer."""
    if external := _external(rung):
        return [f"external: {_trainer(external)}"]
    workload = Workload(**rung[0].workload)
    return describe(toggles_of(rung), toggles_of(before) if before else None, workload)


def _external(rung: Sequence[Record]) -> External | None:
    """The other trainer, by the first record that knows its version; None for a rung of ours."""
    return max(rung, key=lambda record: bool(record.external and record.external.version)).external


def _trainer(external: External) -> str:
    title = PEERS[external.peer].title if external.peer in PEERS else external.peer
    return f"{title}{f' at {external.version}' if external.version else ''}"


def _dropped(rung: list[Record], run: RunRecords) -> list[str]:
    """A caveat where a sweep's candidate ran in fewer rounds than its control did, which runs in all."""
    if rung[0].kind != "sweep":
        return []
    first = next(iter(run.rungs))
    whole = {record.repetition for record in run.controls.get(first, ())}
    rounds, most = len(tps_by_round(rung)), max(1, len(whole))
    return [f"it ran in {rounds} of {most} rounds"] if 0 < rounds < most else []


def _broken_reference(reference: Sequence[Record], above: Sequence[Row]) -> str | None:
    """Name of the rung that `reference` is, or repeats with other steps, if that rung failed its own check.

    A comparison with it tells nothing. None if the reference is sound.
    """
    toggles, index = toggles_of(reference), reference[0].rung_index
    for row in above:
        if reference[0].kind == "parity":
            is_it = not (row.external or row.left_out) and same_step(row.toggles, toggles) == toggles
        else:
            is_it = row.index == index
        if is_it and row.status in ("parity_failed", "ranks_differ"):
            return row.rung
    return None


def _joules_per_token(rung: Sequence[Record]) -> float | None:
    """Mean over all rounds that have a counter; None where none has."""
    joules = tokens = 0.0
    for m in (record.measurement for record in rung if record.status == "ok"):
        if m and m.energy_joules is not None and m.block_steps and m.block_seconds:
            joules += m.energy_joules
            tokens += m.tokens_per_step * m.block_steps * len(m.block_seconds)
    return joules / tokens if tokens else None


NOT_CARRIED = "not_carried"
"""Row.status of a rung that was tried, and was not faster than the rung that it stood on."""


def status_of(row: Row) -> str:
    """A rung's status as a reader is told of it, without its reason."""
    if row.status == NOT_CARRIED:
        ratio = f": {times(row.tried)}" if row.tried is not None else ""
        return f"not carried{ratio}{', within noise' if row.tried and row.tried > 1 else ''}"
    if row.expect and row.tps and row.status in ("ok", "external"):
        return f"ran, though expected: {status_word(row.expect)}"
    if row.left_out and row.status == "unsupported":
        return "not supported when it was tried"
    if row.inert_rounds and 0 < row.inert_rounds[0] < row.inert_rounds[1]:
        return "no effect in {} of {} rounds".format(*row.inert_rounds)
    return status_word(row.status)

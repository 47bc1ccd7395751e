"""One row of a scoreboard, computed from the records of its rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.claim_checks import doubts, judge
from bench.analysis.denominators import Ceiling, Peaks, share
from bench.analysis.run_records import (
    first_by_round,
    is_external,
    line_of,
    measured,
    on_fewer_ranks,
    parity_reference,
    toggles_of,
    tps_by_round,
)
from bench.ladder.peers import PEERS
from bench.records.measurement import External
from bench.records.record import Record
from bench.stats import Estimate, Verdict, geometric_mean, paired_ratio, verdict
from gpt2.config.toggles import Toggles, describe
from gpt2.config.workload import Workload

EQUAL = "equal"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One rung; None is what was not measured."""

    rung: str
    index: int
    """In the ladder."""
    toggles: Toggles
    changed: tuple[str, ...]
    """From the row above, as a reader sees it."""
    maths: str | None
    """`equal` to the first rung's but for rounding, or what changes it; None of another trainer."""
    tokens_per_step: int | None
    tps: Estimate | None
    speedup: Estimate | None
    """Over the first rung."""
    gain: Estimate | None
    """Over the rung before."""
    before: int | None
    """The index of that rung: in a sweep not the row above, but the next smaller batch or else the first row.
    """
    verdict: Verdict | None
    """Of the gain; None where something is held against this rung or the one before."""
    efficiency: Estimate | None
    """Of several ranks: tokens per second and device over those of an earlier rung that trains alike, on
    fewer.
    """
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
    dropped: bool
    """Of a sweep's candidate: whether it ran in fewer rounds than it could."""
    joules_per_token: float | None
    status: str
    """ok, a guard (see bench.analysis.claim_checks), or how the last failing process ended."""
    error: str | None
    """Why it is not ok."""
    expect: str | None
    """The outcome that the ladder calls the point of this rung."""
    external: External | None = None
    """The other trainer that it is, whose toggles tell its device alone."""

    @property
    def trainer(self) -> str | None:
        """That other trainer and its version, for a reader."""
        return _trainer(self.external) if self.external else None

    @property
    def other_maths(self) -> bool:
        """Whether it is another training than the first rung's, so that it may be called the fastest nowhere."""
        return self.maths not in (None, EQUAL)


def row_of(
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
    """That of one rung's records, among those of all rungs and of the whole run.

    above: the rows before it. peaks, ceiling, delta: what it is held to. loss_step: whose loss is shown.
    """
    toggles, found, tps = toggles_of(rung), measured(rung), tps_by_round(rung)
    theirs = is_external(rung)
    own = [each for each in rungs[: len(above)] if not is_external(each)]
    before = last = own[-1] if own and not theirs else None
    if (
        last and rung[0].kind == "sweep"
    ):  # whose candidates differ from the first; a smaller batch alone is a step
        alike = line_of(toggles_of(last), last[0].workload) == line_of(toggles, rung[0].workload)
        before, last = rungs[0], last if alike else rungs[0]
    mean = geometric_mean(list(tps.values())) if tps else None
    reference = None if theirs else parity_reference(rung, records)
    status, error = judge(rung, rungs[0], before, reference)
    if status == "ok" and reference and (wrong := _broken_reference(rung, reference, above)):
        status, error = "parity_failed", f"its losses are held to {wrong}'s, which differ themselves"
    comparable = status != "not_comparable"
    gain = paired_ratio(tps, _paired(last, rungs, records)) if last and comparable else None
    other = next((row for row in above if last and row.index == last[0].rung_index), None)
    sound = status == "ok" and other is not None and other.status in ("ok", "inert")
    # Over all devices at work: what one token needs, times tokens per second, over what the devices could do.
    rate = mean.value / (found.peak_devices or toggles.world_size) if mean and found else None
    fewer = on_fewer_ranks(toggles, rungs[: len(above)]) if comparable else None
    scaled = paired_ratio(tps, _paired(fewer, rungs, records)) if fewer else None
    dropped = _dropped(rung, rungs, records)
    changes = [f"{setting} changes the maths: {why}" for setting, why in toggles.maths().items()]
    memory = [
        r.measurement.peak_memory_bytes for r in rung if r.measurement and r.measurement.peak_memory_bytes
    ]
    return Row(
        rung=rung[0].rung,
        index=rung[0].rung_index,
        toggles=toggles,
        changed=tuple(_changed(rung, before)),
        maths=None if theirs else "; ".join(changes) or EQUAL,
        tokens_per_step=found.tokens_per_step if found else None,
        tps=mean,
        speedup=paired_ratio(tps, first_by_round(rungs[0], records)) if comparable else None,
        gain=gain,
        before=other.index if other else None,
        verdict=verdict(gain, delta) if gain and sound else None,
        efficiency=scaled.over(toggles.world_size / toggles_of(fewer).world_size)
        if fewer and scaled
        else None,
        efficiency_over=fewer[0].rung if fewer and scaled else None,
        mfu=share(rate, found, peaks.get((toggles.device, "bf16"))),
        mfu_own=share(rate, found, peaks.get((toggles.device, found and found.product_format))),
        hfu=share(rate, found, peaks.get((toggles.device, "bf16")), hardware=True),
        ceiling_share=share(rate, found, ceiling and ceiling.flops_per_second),
        peak_memory_bytes=max(memory, default=None),
        peak_memory_method=found.peak_memory_method if found else None,
        loss=found.losses[loss_step - 1] if found and loss_step and not theirs else None,
        doubts=()
        if theirs
        else (*doubts(rung, before, reference), *changes, *([dropped] if dropped else [])),
        dropped=dropped is not None,
        joules_per_token=_joules_per_token(rung),
        status=status,
        error=error,
        expect=rung[0].expect,
        external=_external(rung),
    )


def _changed(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """What a reader is told of it: the toggles that are not those of the rung before, or who trains in our
    place.
    """
    if external := _external(rung):
        return [f"external: {_trainer(external)}"]
    workload = Workload(**rung[0].workload)
    return describe(toggles_of(rung), toggles_of(before) if before else None, workload)


def _external(rung: Sequence[Record]) -> External | None:
    """By the first record that knows its version; None of a rung of ours."""
    return max(rung, key=lambda record: bool(record.external and record.external.version)).external


def _trainer(external: External) -> str:
    return f"{peer_title(external)}{f' at {external.version}' if external.version else ''}"


def peer_title(external: External) -> str:
    """As its authors call it; one that this version of bench does not know by its key."""
    return PEERS[external.peer].title if external.peer in PEERS else external.peer


def _dropped(rung: list[Record], rungs: Sequence[list[Record]], records: Sequence[Record]) -> str | None:
    """Says that a sweep's candidate ran less often than it could: in each round that its control, the last,
    ended.
    """
    if rung[0].kind != "sweep":
        return None
    whole = {r.repetition for r in records if r.kind == "control" and r.rung_index == rungs[0][0].rung_index}
    rounds, most = len(tps_by_round(rung)), max(1, len(whole))
    return f"it ran in {rounds} of {most} rounds" if rounds < most else None


def _paired(
    rung: list[Record], rungs: Sequence[list[Record]], records: Sequence[Record]
) -> dict[tuple[int, str], float]:
    """A rung's speeds for another's to be held to: the first rung's are its control's where a round was cut
    in two.
    """
    return first_by_round(rung, records) if rung is rungs[0] else tps_by_round(rung)


def _broken_reference(
    rung: Sequence[Record], reference: Sequence[Record], above: Sequence[Row]
) -> str | None:
    """The rung whose losses failed and that a rung's reference trains like, or is; None if all is well."""
    index = reference[0].rung_index - (reference[0].kind == "parity")
    if rung[0].kind == "sweep" and reference[0].kind == "parity":
        index = next((row.index for row in above if row.tps), index)  # the first that ran
    for row in above:
        if row.index == index and row.status in ("parity_failed", "ranks_differ"):
            return row.rung
    return None


def _joules_per_token(rung: Sequence[Record]) -> float | None:
    """Over all rounds; absent where no counter exists."""
    windows = [r.measurement for r in rung if r.status == "ok" and r.measurement]
    energies = [
        (m.energy_joules, m.tokens_per_step * (m.block_steps or 0) * len(m.block_seconds)) for m in windows
    ]
    known = [(joules, tokens) for joules, tokens in energies if joules is not None and tokens]
    return sum(joules for joules, _ in known) / sum(tokens for _, tokens in known) if known else None


STATUS = {
    "out_of_memory": "OOM",
    "parity_failed": "loss differs",
    "ranks_differ": "ranks differ",
    "not_comparable": "not comparable",
}


def status_of(row: Row) -> str:
    """For a reader."""
    status = STATUS.get(row.status, row.status)
    return f"{status}, not {row.expect}" if row.expect and row.status == "ok" else status

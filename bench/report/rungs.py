"""Records by rung and round, and which rung another is held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.measurement import Measurement
from bench.record import RUNGS, Record
from gpt2.toggles import Toggles


def toggles_of(rung: Sequence[Record]) -> Toggles:
    """Of a rung's records; a toggle that an older record does not know had its default."""
    return rung[0].toggles.as_toggles


def measured(rung: Sequence[Record]) -> Measurement | None:
    """Of the first round that has one: the round with the longest loss curve."""
    return next((r.measurement for r in rung if r.measurement), None)


def cumulative(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each rung, in the ladder's order, or of each candidate of a sweep."""
    by_rung: dict[int, list[Record]] = {}
    for record in records:
        if record.kind in RUNGS:
            by_rung.setdefault(record.rung_index, []).append(record)
    return list(by_rung.values())


def line_of(toggles: Toggles, workload: Mapping[str, Any]) -> Toggles:
    """What those have in common that differ in their batch only.

    workload: a record's; where it fixes the tokens per step, accumulation follows from the batch.
    """
    line = replace(toggles, micro_batch_size=1)
    return line if workload.get("tokens_per_step") is None else replace(line, grad_accum_steps=1)


def in_order(records: Sequence[Record]) -> list[Record]:
    """As a ladder has its rungs; of a sweep, whose batches are tried in any order, the smaller ones first."""
    lines: dict[Toggles, int] = {}

    def place(record: Record) -> tuple[int, ...]:
        if record.kind != "sweep":
            return record.rung_index, 0, record.rung_index, record.repetition
        toggles = toggles_of([record])
        line = lines.setdefault(line_of(toggles, record.workload), record.rung_index)
        return line, toggles.micro_batch_size, record.rung_index, record.repetition

    ordered = sorted(sorted(records, key=lambda r: r.rung_index), key=place)
    candidates = [record for record in ordered if record.kind == "sweep"]
    ran = {record.rung_index for record in candidates if record.status == "ok"}
    if candidates and ran and candidates[0].rung_index not in ran:  # all are held to the first that ran
        ordered.sort(key=lambda record: record.kind == "sweep" and record.rung_index not in ran)
    return ordered


def tps_by_round(rung: Sequence[Record]) -> dict[tuple[int, str], float]:
    """Tokens per second by round and session: what an interruption lies between has no round in common."""
    measured = [(r, r.measurement.tokens_per_second) for r in rung if r.status == "ok" and r.measurement]
    return {(r.repetition, r.session): tps for r, tps in measured if tps is not None}


def first_by_round(first: Sequence[Record], records: Sequence[Record]) -> dict[tuple[int, str], float]:
    """The first rung's; where an interruption cut a round in two, in the later part its control's."""
    controls = tps_by_round([r for r in records if r.kind == "control" and r.rung_index == first[0].rung_index])
    mine = tps_by_round(first)
    begun = {repetition for repetition, _ in mine}
    return {**{key: tps for key, tps in controls.items() if key not in mine and key[0] in begun}, **mine}


def parity_reference(rung: Sequence[Record], records: Sequence[Record]) -> list[Record] | None:
    """Whose losses this rung's are held to: a parity process, else the first rung, whose steps have as many tokens.

    None where that is the rung itself, unless it is the first that was measured: then it is what all are held to.
    """
    mine, rungs = measured(rung), cumulative(records)
    children = [[record] for record in records if record.kind == "parity"]
    first = next((other for other in rungs if measured(other)), None)
    for other in (*children, *rungs):
        theirs = measured(other)
        if mine and theirs and mine.tokens_per_step == theirs.tokens_per_step:
            itself = other[0].kind == rung[0].kind and other[0].rung_index == rung[0].rung_index
            return None if itself and other != first else other
    return None


def on_fewer_ranks(toggles: Toggles, above: Sequence[list[Record]]) -> list[Record] | None:
    """The rung that trains on one rank what these toggles train on several: the same step, or the same for each.

    For want of one, that on the fewest ranks, which share out as much.
    """

    def alike(of: Toggles) -> Toggles:
        return replace(of, world_size=1, grad_accum_steps=1, sharding="none")

    def as_large(of: Toggles) -> bool:
        """Fixed or growing with the ranks: steps of other sizes pay for their optimiser and exchanges differently."""
        return of.grad_accum_steps == toggles.grad_accum_steps or of.tokens_per_step(1) == toggles.tokens_per_step(1)

    def comparable(of: Toggles) -> bool:
        shares = of.world_size == 1 or of.sharding == toggles.sharding
        return of.world_size < toggles.world_size and shares and as_large(of) and alike(of) == alike(toggles)

    fewer = [rung for rung in above if comparable(toggles_of(rung))]
    return min(fewer, key=lambda rung: toggles_of(rung).world_size, default=None)

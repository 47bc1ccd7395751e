"""Records by rung and round, and which rung another is held to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from bench.records.measurement import Measurement
from bench.records.record import RUNGS, Record
from gpt2.config.toggles import Toggles

T = TypeVar("T")


def toggles_of(rung: Sequence[Record]) -> Toggles:
    """Of a rung's records; a toggle that an older record does not know had its default."""
    return rung[0].toggles.as_toggles


def measured(rung: Sequence[Record]) -> Measurement | None:
    """Of the first round that has one: the round with the longest loss curve."""
    return next((r.measurement for r in rung if r.measurement), None)


class Run(tuple[Record, ...]):
    """The records of a run, grouped once for all of its rungs."""

    @classmethod
    def of(cls, records: Sequence[Record]) -> Run:
        return records if isinstance(records, Run) else cls(records)

    @cached_property
    def rungs(self) -> dict[int, list[Record]]:
        """Those of each rung, or of each candidate of a sweep, by its index in the ladder."""
        by_rung: dict[int, list[Record]] = {}
        for record in self:
            if record.kind in RUNGS:
                by_rung.setdefault(record.rung_index, []).append(record)
        return by_rung

    @cached_property
    def controls(self) -> dict[int, list[Record]]:
        """Of the A/A control, by the index of the rung that it runs again."""
        by_rung: dict[int, list[Record]] = {}
        for record in self:
            if record.kind == "control":
                by_rung.setdefault(record.rung_index, []).append(record)
        return by_rung

    @cached_property
    def references(self) -> dict[int, list[Record]]:
        """By tokens per step, the first whose losses others can be held to: a parity process, else a rung."""
        found: dict[int, list[Record]] = {}
        for other in (*([record] for record in self if record.kind == "parity"), *self.own):
            if theirs := measured(other):
                found.setdefault(theirs.tokens_per_step, other)
        return found

    @cached_property
    def first_measured(self) -> list[Record] | None:
        return next((rung for rung in self.own if measured(rung)), None)

    @cached_property
    def own(self) -> list[list[Record]]:
        """Those of each rung but the external ones."""
        return [rung for rung in self.rungs.values() if not is_external(rung)]


def is_external(rung: Sequence[Record]) -> bool:
    """Whether a rung's records are of another trainer."""
    return rung[0].kind == "external"


def cumulative(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each rung, in the ladder's order, or of each candidate of a sweep."""
    return list(Run.of(records).rungs.values())


def line_of(toggles: Toggles, workload: Mapping[str, Any]) -> Toggles:
    """What those have in common that differ in their batch only.

    workload: a record's; where it fixes the tokens per step, accumulation follows from the batch.
    """
    line = replace(toggles, micro_batch_size=1)
    return line if workload.get("tokens_per_step") is None else replace(line, grad_accum_steps=1)


def in_order(records: Sequence[Record]) -> list[Record]:
    """As a ladder has its rungs; of a sweep, whose batches are tried in any order, the smaller ones first.

    Before them all what measured a ceiling.
    """
    lines: dict[Toggles, int] = {}

    def place(record: Record) -> tuple[int, ...]:
        if record.kind == "ceiling":
            return -1, 0, record.rung_index, record.repetition
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


def by_round(rung: Sequence[Record], of: Callable[[Measurement], T | None]) -> dict[tuple[int, str], T]:
    """Of what was measured, by round and session: what an interruption lies between has no round in common."""
    found = [(r, of(r.measurement)) for r in rung if r.status == "ok" and r.measurement]
    return {(r.repetition, r.session): value for r, value in found if value is not None}


def tps_by_round(rung: Sequence[Record]) -> dict[tuple[int, str], float]:
    """Tokens per second, as by_round()."""
    return by_round(rung, lambda measurement: measurement.tokens_per_second)


def first_by_round(first: Sequence[Record], records: Sequence[Record]) -> dict[tuple[int, str], float]:
    """The first rung's; where an interruption cut a round in two, in the later part its control's."""
    controls = tps_by_round(Run.of(records).controls.get(first[0].rung_index, ()))
    mine = tps_by_round(first)
    begun = {repetition for repetition, _ in mine}
    return {**{key: tps for key, tps in controls.items() if key not in mine and key[0] in begun}, **mine}


def parity_reference(rung: Sequence[Record], records: Sequence[Record]) -> list[Record] | None:
    """Whose losses this rung's are held to: a parity process, else the first rung, whose steps have as many
    tokens.

    None where that is the rung itself, unless it is the first that was measured: then it is what all are held
    to.
    """
    mine, run = measured(rung), Run.of(records)
    other = run.references.get(mine.tokens_per_step) if mine else None
    if other is None:
        return None
    itself = other[0].kind == rung[0].kind and other[0].rung_index == rung[0].rung_index
    return None if itself and other is not run.first_measured else other


def on_fewer_ranks(toggles: Toggles, above: Sequence[list[Record]]) -> list[Record] | None:
    """The rung that trains on one rank what these toggles train on several: the same step, or the same for
    each.

    For want of one, that on the fewest ranks, which share out as much.
    """

    if toggles.world_size == 1:
        return None

    def alike(of: Toggles) -> Toggles:
        return replace(of, world_size=1, grad_accum_steps=1, sharding="none")

    def as_large(of: Toggles) -> bool:
        """Fixed or growing with the ranks: steps of other sizes pay for their optimiser and exchanges
        differently.
        """
        return of.grad_accum_steps == toggles.grad_accum_steps or of.tokens_per_step(
            1
        ) == toggles.tokens_per_step(1)

    mine = alike(toggles)

    def comparable(of: Toggles) -> bool:
        shares = of.world_size == 1 or of.sharding == toggles.sharding
        return of.world_size < toggles.world_size and shares and as_large(of) and alike(of) == mine

    fewer = [rung for rung in above if comparable(toggles_of(rung))]
    return min(fewer, key=lambda rung: toggles_of(rung).world_size, default=None)

"""Records by rung and round, and with which rung another is compared."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, TypeVar

from bench.records.measurement import Measurement
from bench.records.record import RUNGS, Kind, Record
from gpt2.config.toggles import Toggles

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The items by key, both in their first order."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def toggles_of(rung: Sequence[Record]) -> Toggles:
    """The toggles of a rung; a toggle that an older record does not know has its default."""
    return rung[0].toggles.as_toggles


def varying(*toggles: Toggles) -> list[str]:
    """Names of the toggles that have not the same value in all of these, in the configuration's order."""
    names = [toggle.name for toggle in fields(Toggles)]
    return [name for name in names if len({getattr(each, name) for each in toggles}) > 1]


def measurements(records: Sequence[Record]) -> list[Measurement]:
    return [record.measurement for record in records if record.measurement]


def measured(rung: Sequence[Record]) -> Measurement | None:
    """The first measurement of a rung: that of the round with the longest loss curve."""
    return next((r.measurement for r in rung if r.measurement), None)


class RunRecords(tuple[Record, ...]):
    """The records of a run, grouped once for all of its rungs."""

    @cached_property
    def rungs(self) -> dict[int, list[Record]]:
        """Records of each rung, or of each candidate of a sweep, by its index in the ladder.

        A rung that was tried and not carried has the records of that alone.
        """
        carried = carried_rungs(self)
        left_out = [r for r in self if not_carried(r) and r.rung not in carried and not together(r)]
        rungs = {**self._by_index(RUNGS), **group_by(left_out, lambda record: record.rung_index)}
        return dict(sorted(rungs.items())) if any(r.kind == "scout" for r in self) else rungs

    @cached_property
    def controls(self) -> dict[int, list[Record]]:
        """Records of the A/A controls, by the index of the rung that they run again."""
        return self._by_index(("control",))

    def _by_index(self, kinds: Sequence[Kind]) -> dict[int, list[Record]]:
        return group_by((r for r in self if r.kind in kinds), lambda record: record.rung_index)

    @cached_property
    def references(self) -> dict[int, list[Record]]:
        """By tokens per step, the first records whose losses can be a reference: parity, then rungs."""
        references: dict[int, list[Record]] = {}
        for rung in (*([record] for record in self if record.kind == "parity"), *self.own_rungs):
            if measurement := measured(rung):
                references.setdefault(measurement.tokens_per_step, rung)
        return references

    @cached_property
    def rungs_of_rounds(self) -> list[list[Record]]:
        """Records of each rung, or of each candidate of a sweep, that was to be measured."""
        return [rung for rung in self.rungs.values() if not not_carried(rung[0])]

    @cached_property
    def own_rungs(self) -> list[list[Record]]:
        """Records of each of these rungs that our own trainer ran."""
        return [rung for rung in self.rungs_of_rounds if not is_external(rung)]

    def first_tps_by_round(self, first: Sequence[Record]) -> dict[tuple[int, str], float]:
        """Tokens per second of the first rung; its control stands in after an interruption within a round."""
        controls = tps_by_round(self.controls.get(first[0].rung_index, ()))
        own = tps_by_round(first)
        begun = {repetition for repetition, _ in own}
        return {**{key: tps for key, tps in controls.items() if key not in own and key[0] in begun}, **own}

    def parity_reference(self, rung: Sequence[Record]) -> list[Record] | None:
        """Records with whose losses a rung's are compared; they take steps of as many tokens.

        That is a parity process, else the first such rung. None where that is the rung itself, unless it is
        the first that was measured: then it is the reference of all.
        """
        measurement = measured(rung)
        reference = self.references.get(measurement.tokens_per_step) if measurement else None
        if reference is None:
            return None
        itself = reference[0].kind == rung[0].kind and reference[0].rung_index == rung[0].rung_index
        first = next((each for each in self.own_rungs if measured(each)), None)
        return None if itself and reference is not first else reference


def is_external(rung: Sequence[Record]) -> bool:
    """Whether a rung's records are of another trainer."""
    return rung[0].kind == "external"


def not_carried(record: Record) -> bool:
    """Whether a record is of a rung that was tried and left out."""
    return record.scout is not None and not record.scout.carried


def together(record: Record) -> list[str]:
    """Names of the rungs that were tried together in this process; empty for others."""
    return record.scout.together if record.scout else []


def carried_rungs(records: Sequence[Record]) -> set[str]:
    """Names of the rungs that are carried, each by a try of its own or of several together."""
    kept = [record for record in records if record.scout and record.scout.carried]
    return {name for record in kept for name in (record.rung, *together(record))}


def without_batch(toggles: Toggles, workload: Mapping[str, Any]) -> Toggles:
    """The toggles with a batch of one, equal for rungs that differ in their batch only.

    workload: a record's; where it fixes the tokens per step, accumulation follows from the batch.
    """
    line = replace(toggles, micro_batch_size=1)
    return line if workload.get("tokens_per_step") is None else replace(line, grad_accum_steps=1)


def in_order(records: Sequence[Record]) -> list[Record]:
    """Sort records as a ladder has its rungs, ceilings first.

    Candidates of a sweep, whose batches are tried in any order, are sorted by batch.
    """
    lines: dict[Toggles, int] = {}

    def place(record: Record) -> tuple[int, ...]:
        if record.kind == "ceiling":
            return -1, 0, record.rung_index, record.repetition
        if record.kind != "sweep":
            return record.rung_index, 0, record.rung_index, record.repetition
        toggles = toggles_of([record])
        line = lines.setdefault(without_batch(toggles, record.workload), record.rung_index)
        return line, toggles.micro_batch_size, record.rung_index, record.repetition

    ordered = sorted(sorted(records, key=lambda r: r.rung_index), key=place)
    candidates = [record for record in ordered if record.kind == "sweep"]
    ran = {record.rung_index for record in candidates if record.status == "ok"}
    if candidates and ran and candidates[0].rung_index not in ran:  # the first that ran is the baseline
        ordered.sort(key=lambda record: record.kind == "sweep" and record.rung_index not in ran)
    return ordered


def by_round(rung: Sequence[Record], figure: Callable[[Measurement], T | None]) -> dict[tuple[int, str], T]:
    """A figure of each measurement, by round and session: an interruption parts two rounds."""
    figures = [(r, figure(r.measurement)) for r in rung if r.status == "ok" and r.measurement]
    return {(r.repetition, r.session): value for r, value in figures if value is not None}


def tps_by_round(rung: Sequence[Record]) -> dict[tuple[int, str], float]:
    """Tokens per second of a rung, by round and session."""
    return by_round(rung, lambda measurement: measurement.tokens_per_second)


def scaling_reference(toggles: Toggles, above: Sequence[list[Record]]) -> list[Record] | None:
    """The rung on fewest ranks that trains like these toggles, which run on several.

    Its step is as large, or as large on each rank. None where there is no such rung.
    """
    if toggles.world_size == 1:
        return None

    def per_rank(toggles: Toggles) -> Toggles:
        return replace(toggles, world_size=1, grad_accum_steps=1, sharding="none")

    def comparable(fewer: Toggles) -> bool:
        # Steps of other sizes pay for their optimiser and exchanges differently.
        same_step = fewer.tokens_per_step(1) == toggles.tokens_per_step(1)
        as_large = fewer.grad_accum_steps == toggles.grad_accum_steps or same_step
        same_sharding = fewer.world_size == 1 or fewer.sharding == toggles.sharding
        same = same_sharding and as_large and per_rank(fewer) == per_rank(toggles)
        return same and fewer.world_size < toggles.world_size

    fewer = [rung for rung in above if comparable(toggles_of(rung))]
    return min(fewer, key=lambda rung: toggles_of(rung).world_size, default=None)

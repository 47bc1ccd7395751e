"""Candidates of a sweep: a ladder's rung with other values of some toggles. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.ladder.sweep_axis import Axis
from gpt2.config.toggles import describe, resolve


def candidate(ladder: Ladder, base: Rung, changes: dict[str, Any], index: int, first: Rung | None) -> Rung:
    """Return `base` with other values of toggles. Raises ValueError where they exclude each other."""
    if "grad_accum_steps" in changes and ladder.workload.tokens_per_step is not None:
        raise ValueError(
            "grad_accum_steps follows from workload.tokens_per_step; sweep micro_batch_size instead"
        )
    toggles = resolve(ladder.workload, replace(base.toggles, **changes))
    return Rung(
        name=", ".join(f"{key}={value}" for key, value in changes.items()) or base.name,
        index=index,
        changed=describe(toggles, first.toggles if first else None, ladder.workload),
        expect=None,
        toggles=toggles,
        base=base.name,
        settings=ladder.settings(base.toggles, toggles),
        without=base.without,
    )


def as_ladder(ladder: Ladder, base: Rung, axes: Sequence[Axis], task: Sequence[str] = ()) -> Ladder:
    """Return a ladder whose rungs are the listed candidates; doubling adds others. Raises LadderError.

    task: values of swept workload fields, such as "seq_len=512".
    """
    over = " and ".join([*(axis.key for axis in axes), *task])
    rungs: list[Rung] = []
    problem = None
    for changes in grid(axes):
        try:
            rungs.append(candidate(ladder, base, changes, len(rungs), rungs[0] if rungs else None))
        except ValueError as error:
            problem = error
    if not rungs:
        raise LadderError(f"{ladder.path}: rung {base.name!r} with other values: {problem}")
    protocol = replace(ladder.protocol, until=None)  # intervals of dropped candidates never get narrow
    name = f"{ladder.name}, {base.name}, over {over}"
    return replace(ladder, name=name, rungs=tuple(rungs), protocol=protocol)


def grid(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the listed values; the last axis varies fastest."""
    for values in product(*(axis.values for axis in axes)):
        yield dict(zip([axis.key for axis in axes], values, strict=True))

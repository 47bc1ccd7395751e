"""Rungs that differ in one thing only: what one line of a picture joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from bench.analysis.row import Row
from bench.analysis.run_records import line_of
from bench.analysis.scoreboard import Scoreboard
from bench.report.plots.style import shortened
from gpt2.config.toggles import Toggles

MOST = 6
"""Lines in one picture; those of most rungs are kept."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Of rows that are alike but for `size`."""

    label: str
    """In what it differs from the others; empty for the only one."""
    rows: tuple[Row, ...]
    """By size, the smallest first."""


def by_batch(board: Scoreboard) -> list[Group]:
    """Rungs alike but for the sequences per device, and for what follows from these where a step is fixed."""
    found: dict[Toggles, list[Row]] = {}
    for row in board.rows:
        found.setdefault(line_of(row.toggles, board.records[0].workload), []).append(row)
    return _groups(found, lambda row: row.toggles.micro_batch_size)


def by_devices(board: Scoreboard) -> list[Group]:
    """Rungs alike but for the number of devices, each sharding beginning with the rung that needs none."""
    found: dict[Toggles, list[Row]] = {}
    for row in board.rows:
        found.setdefault(replace(row.toggles, world_size=1, grad_accum_steps=1), []).append(row)
    alone = {key: [row for row in rows if row.toggles.world_size == 1] for key, rows in found.items()}
    for key, rows in found.items():
        if key.sharding != "none":
            rows += alone.get(replace(key, sharding="none"), [])
    return _groups(found, lambda row: row.toggles.world_size)


def _groups(found: dict[Toggles, list[Row]], size: Callable[[Row], int]) -> list[Group]:
    """Those of several sizes."""
    lines = {key: rows for key, rows in found.items() if len({size(row) for row in rows}) > 1}
    kept = sorted(lines, key=lambda key: -len(lines[key]))[:MOST]
    kept = [key for key in lines if key in kept]
    return [Group(label=_difference(key, kept), rows=tuple(sorted(lines[key], key=size))) for key in kept]


def _difference(key: Toggles, others: Sequence[Toggles]) -> str:
    names = [toggle.name for toggle in fields(key)]
    varied = [name for name in names if len({getattr(other, name) for other in others}) > 1]
    return shortened(", ".join(f"{name}={getattr(key, name)}" for name in varied), 60)

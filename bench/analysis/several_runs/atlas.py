"""What helps on which hardware: the gain of each change over the rung before, by machine.

for line in atlas({"2 cores": boards}): print([str(change) for change in line.changes], line.cells)

A change is a toggle with the values before and after; the names of rungs tell nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from bench.analysis.attribution import Gain, agreement
from bench.analysis.run_records import group_by, varying
from bench.analysis.scoreboard import Scoreboard
from bench.records.published import Published
from gpt2.config.toggles import Toggles

DEFAULT = Toggles()


class Change(NamedTuple):
    """A toggle that a rung sets to another value than the rung before."""

    toggle: str
    before: object
    value: object

    def __str__(self) -> str:
        """Such as adamw=fused, or adamw=fused (from foreach) where it was not at its default before."""
        known = self.before == getattr(DEFAULT, self.toggle)
        return f"{self.toggle}={self.value}{'' if known else f' (from {self.before})'}"


Changes = tuple[Change, ...]


def changes(before: Toggles, after: Toggles) -> Changes:
    """The toggles that differ, in the order of the configuration."""
    return tuple(Change(name, getattr(before, name), getattr(after, name)) for name in varying(before, after))


@dataclass(frozen=True, kw_only=True)
class Cell(Gain):
    """The gain of one change on one machine, and the run that measured it."""

    board: Scoreboard


@dataclass(frozen=True, kw_only=True)
class AtlasRow:
    """One change on every machine where it was measured."""

    changes: Changes
    cells: Mapping[str, Cell]
    """By the machine's title; of several measurements on one, that of most rounds, then the newest."""
    published: Mapping[str, float] = field(default_factory=dict)
    """Gains that others state, by hardware; other code was measured."""

    @property
    def title(self) -> str:
        return ", ".join(map(str, self.changes))

    @property
    def agreement(self) -> str:
        """Whether the machines agree on the direction, see attribution.agreement()."""
        return agreement(list(self.cells.values()))

    @property
    def differs(self) -> bool:
        """Whether it is faster on one machine and slower on another, by its verdicts."""
        return {"faster", "slower"} <= {cell.verdict for cell in self.cells.values()}

    @property
    def _order(self) -> tuple[float, float]:
        ratios = [(cell.ratio.value, cell.verdict) for cell in self.cells.values() if cell.ratio]
        clear = max((value for value, verdict in ratios if verdict == "faster"), default=0.0)
        return -clear, -max(value for value, _ in ratios)


MOST_TOGGLES = 2
"""Toggles that a change may have: of more, none can be told from the others."""


def atlas(machines: Mapping[str, Sequence[Scoreboard]], figures: Sequence[Published] = ()) -> list[AtlasRow]:
    """A line for each change, the largest clear gain first.

    machines: the runs of each machine and task, by the title of its column. Only sound rungs count, over a
    rung before that is sound or had no effect, and changes of MOST_TOGGLES at most. figures: published ones,
    of which only those count whose records tell a change that was measured here too; most tell it by a name
    alone.
    """
    cells: dict[Changes, dict[str, Cell]] = {}
    for title, boards in machines.items():
        for cell, changed in _cells(boards):
            best = cells.setdefault(changed, {}).get(title)
            if best is None or _weight(cell) > _weight(best):
                cells[changed][title] = cell
    theirs = _published(figures)
    lines = [
        AtlasRow(changes=changed, cells=by_machine, published=theirs.get(changed, {}))
        for changed, by_machine in cells.items()
    ]
    return sorted(lines, key=lambda line: line._order)


def _weight(cell: Cell) -> tuple[int, str]:
    return cell.ratio.rounds if cell.ratio else 0, cell.board.begun


def _cells(boards: Sequence[Scoreboard]) -> Iterator[tuple[Cell, Changes]]:
    for board in (board.own for board in boards):
        for row in board.sound:
            before = board.rung_before(row)
            if row.gain is None or row.verdict is None or before is None or before.caveats:
                continue
            idle = [r for r in board.taken if before.index < r.index < row.index and r.status == "inert"]
            stood_on = idle[-1] if idle and not board.swept else before
            if 0 < len(changed := changes(stood_on.toggles, row.toggles)) <= MOST_TOGGLES:
                yield Cell(ratio=row.gain, verdict=row.verdict, board=board), changed


def _published(figures: Sequence[Published]) -> dict[Changes, dict[str, float]]:
    """Gains from one figure of a series to the next, where only stated batch or devices changed."""
    found: dict[Changes, dict[str, float]] = {}
    for series in group_by(figures, lambda figure: (figure.source, figure.series)).values():
        for before, after in pairwise(series):
            same = ("hardware", "model", "seq_len", "number_format")
            alike = all(getattr(before, name) == getattr(after, name) for name in same)
            if not (alike and before.tps and after.tps and after.hardware):
                continue
            stated = (
                Change("micro_batch_size", before.micro_batch_size, after.micro_batch_size),
                Change("world_size", before.devices, after.devices),
            )
            changed = tuple(change for change in stated if change.before != change.value)
            if changed and not any(None in change for change in stated):
                found.setdefault(changed, {}).setdefault(after.hardware, after.tps / before.tps)
    return found

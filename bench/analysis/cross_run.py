"""All rungs of several runs in one chain, each held to one baseline: how far from a laptop to many GPUs. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.analysis.compare import GOOD
from bench.analysis.row import status_of
from bench.analysis.rung_view import Entry, entries, memory_over, over
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_named, names
from bench.ladder.validation import near
from bench.records.record import RecordError
from bench.stats import Estimate, Verdict

Group = Literal["Hardware", "Software", "Distributed", "External"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One rung of the chain; None is what does not rank, or was not measured."""

    entry: Entry
    group: Group
    over_baseline: Estimate | None
    first: Entry | None
    """The first rung of its own run that ranks on this device; perhaps itself."""
    over_first: Estimate | None
    over_before: Estimate | None
    """Over the rung before, of its own run."""
    verdict: Verdict | None
    """Of over_before."""
    memory_over_first: float | None

    @property
    def orders(self) -> float | None:
        """Of magnitude, over the baseline."""
        return math.log10(self.over_baseline.value) if self.over_baseline else None


@dataclass(frozen=True, kw_only=True)
class Chain:
    baseline: Entry
    runs: tuple[Scoreboard, ...]
    """In the chain's order; of the first one only the baseline is shown, if alone is set."""
    alone: bool
    """Whether the baseline's run is not among those asked for."""
    links: tuple[Link, ...]
    unlike: tuple[Entry, ...] = ()
    """The first rung of each run that trains another task, whose speeds rank with none of these."""

    def is_baseline(self, link: Link) -> bool:
        return link.entry.board is self.baseline.board and link.entry.row is self.baseline.row


def baseline(name: str) -> Entry:
    """The rung that FILE:RUNG names. Raises RecordError where there is none, or it has no speed that ranks."""
    path, boards, rung = load_named(name)
    if len(boards) > 1:
        raise RecordError(
            f"--baseline {name}: {path} holds {len(boards)} runs, {names(boards)}; name one file"
        )
    if rung is None:
        known = [row.rung for row in boards[0].rows]
        raise RecordError(f"--baseline {name}: say which rung, as in {path}:{known[0]}{near('', known)}")
    (board,) = boards
    row = next(row for row in board.rows if row.rung == rung)
    if row.status not in GOOD:
        raise RecordError(
            f"{path}: {rung!r} cannot be the baseline: {status_of(row)}; choose a rung that is ok"
        )
    if row.tps is None:
        raise RecordError(
            f"{path}: {rung!r} cannot be the baseline: it has no speed; choose a rung that has one"
        )
    return Entry(board=board, row=row)


def chain(boards: Sequence[Scoreboard], start: Entry) -> Chain:
    """All rungs of the runs that train what `start` does, in their order, held to it.

    Raises RecordError where none of them does.
    """
    runs: dict[Path | None, Scoreboard] = {}
    unlike = [first for board in boards if (first := entries(board)[0]).task != start.task]
    for board in boards:
        if entries(board)[0].task == start.task:
            runs.setdefault(board.place, board)  # the same file twice is one run
    if unlike and not runs:
        (model, length), (wanted, long) = unlike[0].task, start.task
        raise RecordError(
            f"{unlike[0].board.source}: trains {model} at T = {length}, but the baseline {wanted} at T = "
            f"{long}: their speeds do not rank; name files of one model and sequence length"
        )
    alone = start.board.place not in runs
    if not alone:  # the one that is shown, not the one that the baseline was read from
        shown = runs[start.board.place]
        start = Entry(board=shown, row=shown.rows[_row_place(start)])
    ordered = [start.board, *runs.values()] if alone else [*runs.values()]
    asked = [entry for board in runs.values() for entry in entries(board)]
    links: list[Link] = []
    for entry in [start, *asked] if alone else asked:
        links.append(_link(entry, start, [link.entry for link in links]))
    return Chain(baseline=start, runs=tuple(ordered), alone=alone, links=tuple(links), unlike=tuple(unlike))


def _row_place(entry: Entry) -> int:
    return [row.index for row in entry.board.rows].index(entry.row.index)


def _link(entry: Entry, start: Entry, above: Sequence[Entry]) -> Link:
    own = entries(entry.board)
    first = next((e for e in own if e.device == entry.device and e.ranks and not e.row.external), None)
    before = next((each for each in own if each.row.index == entry.row.before), None)
    sound = entry.ranks and before is not None and before.ranks
    return Link(
        entry=entry,
        group=_group(entry, above),
        over_baseline=over(entry, start),
        first=first,
        over_first=over(entry, first) if first else None,
        over_before=entry.row.gain if sound else None,
        verdict=entry.row.verdict if sound else None,
        memory_over_first=memory_over(entry, first) if first and entry.ranks else None,
    )


def _group(entry: Entry, above: Sequence[Entry]) -> Group:
    """What is new: hardware, the number of devices, or the software.

    More chips of a kind that the chain has had are not new hardware where the rung trains on several of them.
    """
    several = entry.row.toggles.world_size > 1
    if entry.row.external:
        return "External"
    if entry.device not in [each.device for each in above]:
        return "Hardware"
    if entry.machine not in [each.machine for each in above] and not several:
        return "Hardware"
    return "Distributed" if several else "Software"

"""What helps on which hardware, as a table: optimisation by machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.atlas import MOST_TOGGLES, AtlasRow, atlas
from bench.format import judged, plural, times
from bench.records.published import Published
from bench.report.table import Column, Table
from bench.report.titles import machine_titles, task_title

TITLE = "What helps on which hardware"
NAMED_CHANGES = 6
"""Changes that are named above the table."""


def machines(boards: Sequence[Scoreboard]) -> dict[str, list[Scoreboard]]:
    """The runs that measured anything, by column: the machine, and the model where it trained several."""
    boards = [board for board in boards if any(row.tps for row in board.rows)]
    titles = list(zip(machine_titles(boards), map(task_title, boards), strict=True))
    tasks = group_by(dict.fromkeys(titles), lambda pair: pair[0])
    columns = [f"{machine}, {task}" if len(tasks[machine]) > 1 else machine for machine, task in titles]
    by_column = group_by(zip(columns, boards, strict=True), lambda pair: pair[0])
    return {column: [board for _, board in pairs] for column, pairs in by_column.items()}


@dataclass(frozen=True)
class Atlas:
    lines: Sequence[AtlasRow]
    machines: Sequence[str]
    """Titles of the columns that have a cell, those with most first."""
    published: Sequence[str]
    """Hardware of which published gains stand beside ours."""


def whole(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> Atlas:
    """All changes on all machines."""
    columns = machines(boards)
    return _of(atlas(columns, figures), columns)


def pictured(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> Atlas | None:
    """What a picture has room for: changes that are faster or slower somewhere, or of several machines.

    None where fewer than two machines have one.
    """
    every = whole(boards, figures)
    found = _of([line for line in every.lines if _has_room(line)], every.machines)
    return found if len(found.machines) > 1 else None


def _of(lines: Sequence[AtlasRow], columns: Iterable[str]) -> Atlas:
    counts = {title: sum(title in line.cells for line in lines) for title in columns}
    machines = sorted((title for title in counts if counts[title]), key=lambda title: -counts[title])
    return Atlas(lines, machines, list(dict.fromkeys(name for line in lines for name in line.published)))


def _has_room(line: AtlasRow) -> bool:
    clear = any(cell.verdict in ("faster", "slower") for cell in line.cells.values())
    return clear or len(line.cells) + len(line.published) > 1


def atlas_table(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> Table | None:
    """The gain of each change over the rung before on each machine; None for a single run."""
    found = whole(boards, figures)
    if len(boards) < 2 or not found.lines:
        return None

    def gain(title: str) -> Column[AtlasRow]:
        """Of several measurements of a change on one machine, that of most rounds, then the newest."""
        return Column(
            title,
            lambda line: line.cells.get(title, ""),
            lambda cell: judged(cell.ratio, cell.verdict),
            words=True,
            drop=1 + len(found.machines) - found.machines.index(title),
        )

    def stated(title: str) -> Column[AtlasRow]:
        return Column(f"{title}, published", lambda line: line.published.get(title, ""), times, drop=1)

    columns: list[Column[AtlasRow]] = [
        Column("Change from the rung before", lambda line: line.title, words=True),
        *map(gain, found.machines),
        *map(stated, found.published),
        Column("Direction", lambda line: line.agreement, words=True),
    ]
    notes = [
        "Tokens per second over the rung before, with the 95 % interval and the verdict; without a verdict "
        "rounds were too few or no control was run. Only rungs that passed all checks and keep the maths, "
        f"over one that did so or had no effect, and changes of {MOST_TOGGLES} toggles at most. What else is "
        "on differs between ladders.",
        "Of several measurements on one machine: that of most rounds, then the newest.",
    ]
    if found.published:
        notes.append(
            "Published: measured by others with other code; only where batch and devices are stated and tell "
            "what changed. What a source tells by a name alone is left out."
        )
    return Table(
        title=TITLE,
        columns=columns,
        rows=found.lines,
        first=list(_faster_and_slower(found.lines)),
        notes=notes,
    )


def _faster_and_slower(lines: Sequence[AtlasRow]) -> Iterator[str]:
    """The changes with the verdict faster, and those with slower, what is so in most columns first."""
    for verdict in ("faster", "slower"):
        found = {
            line.title: (count, len(line.cells))
            for line in lines
            if (count := sum(cell.verdict == verdict for cell in line.cells.values()))
        }
        most = sorted(found, key=lambda title: -found[title][0])[:NAMED_CHANGES]
        named = "; ".join("{}: {} of {}".format(title, *found[title]) for title in most)
        if named:
            more = f" and {len(found) - NAMED_CHANGES} more" if len(found) > NAMED_CHANGES else ""
            yield f"{verdict.capitalize()}, in how many of the columns that have it: {named}{more}."


def parted(table: Table) -> tuple[Table, Table]:
    """The table of atlas_table() in two: what its picture shows, and the other changes."""
    shown = [line for line in table.rows if _has_room(line)]
    others = [line for line in table.rows if not _has_room(line)]
    title = f"{plural(len(others), 'more change')}, of one machine and neither faster nor slower"
    return replace(table, rows=shown), replace(table, title=title, rows=others, first=(), notes=())

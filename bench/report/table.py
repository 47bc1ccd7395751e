"""A table: columns, rows and notes, as Markdown and for a terminal of any width."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import rich.table
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import RenderableType
from rich.text import Text

from bench.format import DASH, markdown, plain

Kind = TypeVar("Kind")
BETWEEN = 2
"""Characters between two columns of a terminal's table."""
WHOLE = re.compile(r"\S+(?: to \S+)*")
"""What is not broken over lines: words, and ranges."""
LONGEST = 32
"""Longest word for which other columns make room, in characters."""
NAME, LEAST_NAME = 24, 8
"""Where no cell is wrapped: columns are dropped until so much of each name fits, and names cut to no less."""
NOTES_TITLE = "Notes to several tables"


@dataclass(frozen=True)
class Column(Generic[Kind]):
    """One column of a table: the value for a row, and its layout. A column of dashes only is left out."""

    title: str
    """Empty for columns of exports only."""
    value: Callable[[Kind], object]
    """Value for a row, unrounded; None is absent."""
    format: Callable[[Any], str] = str
    """Writes a value; text stands as it is, and an absent value is a dash."""
    _: KW_ONLY
    text: Callable[[Kind], str | None] | None = None
    """Overrides the cell's text; `value` is still what exports use."""
    beneath: Callable[[Any], object] = lambda row: None
    """Value for a row beneath the others, which is of another kind."""
    key: str = ""
    """Name in CSV and JSON; empty for columns of tables only."""
    interval: bool = False
    """Whether the value is an Estimate, whose interval is exported too."""
    words: bool = False
    """Whether the column holds words, aligned to the left; numbers are aligned to the right."""
    drop: int | None = None
    """Order in which a narrow terminal drops the column, 1 first; None: it always stays.

    Where a table is an answer (bench.report.brief), a column with an order goes too if it says the same of
    all rows; see Table.differing().
    """
    about: str = ""
    """What its figures are; stands beneath a table that shows the column."""

    def cell(self, row: Kind) -> str:
        return self._written(self.text(row) if self.text else self.value(row))

    def cell_beneath(self, row: object) -> str:
        return self._written(self.beneath(row))

    def _written(self, value: object) -> str:
        return DASH if value is None else plain(value if isinstance(value, str) else self.format(value))


class MethodNote(str):
    """A note on how figures are made, which tables may share; other notes are about the figures."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns, and the objects that their values are taken from, one per row."""

    title: str
    columns: Sequence[Column[Any]]
    """Exports have those with a key, tables those with a title."""
    rows: Sequence[Any]
    beneath: Sequence[Any] = ()
    """Rows of another kind at the end, which no sorting may mix with those above."""
    first: Sequence[str] = ()
    """Lines before the table."""
    notes: Sequence[str] = ()
    names: int = 1
    """How many of the first columns, which always stay, tell what a row is."""
    instead: Callable[[Any], str | None] = lambda row: None
    """Words that stand in place of all of a row's cells but its names, where its figures may not be used."""
    mark: Callable[[Any], str] = lambda row: ""
    """Stands behind a row, such as †, which a note explains."""
    narrow: Table | None = None
    """Printed in its place where there is no room for the column `narrow_for`."""
    narrow_for: str = ""
    """Title of a column."""

    @cached_property
    def titled(self) -> list[Column[Any]]:
        return [column for column in self.columns if column.title]

    @property
    def head(self) -> list[str]:
        return [column.title for column in self.titled]

    @cached_property
    def cells(self) -> list[list[str]]:
        """All rows as text, those beneath included."""
        return [
            *map(self._cells_of, self.rows),
            *([column.cell_beneath(row) for column in self.titled] for row in self.beneath),
        ]

    def _cells_of(self, row: object) -> list[str]:
        words = self.instead(row)
        if words is None:
            return [column.cell(row) for column in self.titled]
        names = [column.cell(row) for column in self.titled[: self.names]]
        return [*names, plain(words), *[""] * (len(self.titled) - self.names - 1)]

    @cached_property
    def shown(self) -> list[int]:
        """Indices of the columns that hold anything."""
        return [
            place
            for place in range(len(self.titled))
            if any(row[place] not in (DASH, "") for row in self.cells)
        ]

    def differing(self) -> Table:
        """Without the columns that may be dropped and that say the same of all rows that have figures.

        Where one row alone has figures, all columns stay.
        """
        rows = [row for row in self.rows if self.instead(row) is None]
        kept = [
            column
            for column in self.columns
            if column.drop is None or len(rows) == 1 or len({column.cell(row) for row in rows}) > 1
        ]
        return replace(self, columns=kept, narrow=self.narrow and self.narrow.differing())

    def to_markdown(self, level: str) -> str:
        """A GitHub table between its heading (`level` is ### or the like) and its notes."""
        lines = [f"{level} {markdown(self.title)}", ""]
        if self.first:
            lines += [*(f"{markdown(line)}  " for line in self.first), ""]
        lines.append(f"| {' | '.join(markdown(self.titled[place].title) for place in self.shown)} |")
        lines.append(f"|{'|'.join('---' if self.titled[place].words else '--:' for place in self.shown)}|")
        for row, mark in zip(self.cells, self._marks, strict=True):
            *cells, last = (row[place] for place in self.shown)
            lines.append(f"| {' | '.join(map(markdown, [*cells, f'{last} {mark}'.strip()]))} |")
        notes = [*self._about(self.shown), *self.notes]
        return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in notes)]).rstrip() + "\n"

    @property
    def _marks(self) -> list[str]:
        return [*map(self.mark, self.rows), *[""] * len(self.beneath)]

    def _about(self, places: Iterable[int]) -> list[str]:
        """What is to be said about the columns at these indices."""
        return [about for place in places if (about := self.titled[place].about)]

    def to_lines(self, width: int) -> tuple[list[Text], list[str]]:
        """Head and rows, no cell wrapped, and what is to be said about the columns that are shown.

        Columns that do not fit are left out, and then names cut. A number stands to the right, and what
        follows it, as in 456 ±3 %, is aligned for itself.
        """
        spanned = [*(self.instead(row) is not None for row in self.rows), *[False] * len(self.beneath)]
        columns = {p: [self.titled[p].title, *self._aligned(p, spanned)] for p in self.shown}
        widths, _ = self._fit(columns, width, names_are_cut=True)
        if self.narrow and self.narrow_for not in [self.titled[place].title for place in widths]:
            return self.narrow.to_lines(width)
        for place, wide in widths.items():
            if place < self.names:
                columns[place] = _told_apart(columns[place], wide)
        lines = []
        for line, mark in enumerate(["", *self._marks]):
            cells = [
                _padded(cut(columns[place][line], wide), wide, self.titled[place].words)
                for place, wide in widths.items()
            ]
            over = line > 0 and spanned[line - 1]
            if over:
                names, words = cells[: self.names], self.cells[line - 1][self.names]
                taken = sum(map(cell_len, [*names, mark])) + BETWEEN * (self.names + 1 + bool(mark))
                cells = [*names, cut(words, width - taken)]
            style = "yellow" if over else "" if line else "dim"
            lines.append(Text("  ".join(["", *cells, mark]).rstrip(), style=style))
        return lines, self._about(widths)

    def _aligned(self, place: int, spanned: Sequence[bool]) -> list[str]:
        """Cells of a column; empty in rows that words span, but for the row's names."""
        column = [
            "" if over and place >= self.names else row[place]
            for row, over in zip(self.cells, spanned, strict=True)
        ]
        if self.titled[place].words:
            return column
        parts = [cell.partition(" ") for cell in column]
        first, rest = (max((cell_len(part[n]) for part in parts), default=0) for n in (0, 2))
        return [
            f"{part[0]:>{first}} {part[2]:<{rest}}" if rest and part[0] else part[0].rjust(first)
            for part in parts
        ]

    def to_terminal(self, width: int) -> list[RenderableType]:
        """The table for rich in `width` columns; columns that do not fit are left out and named."""
        cells = {
            place: [self.titled[place].title, *(row[place] for row in self.cells)] for place in self.shown
        }
        widths, left = self._fit(cells, width)
        table = rich.table.Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, columns in widths.items():
            column = self.titled[place]
            justify = "left" if column.words else "right"
            table.add_column(plain(column.title), justify=justify, overflow="fold", width=columns)
        for row in self.cells:
            table.add_row(*(Text(row[place]) for place in widths))
        notes = [*self._about(widths), *self.notes]
        if left:
            notes.insert(0, f"Too narrow for {', '.join(left)}; a wider terminal shows all.")
        return [
            Text(plain(self.title), style="bold"),
            *(Text(plain(line)) for line in self.first),
            table,
            *(Text(plain(line), style="dim") for line in notes),
            Text(),
        ]

    def _fit(
        self, cells: dict[int, list[str]], width: int, *, names_are_cut: bool = False
    ) -> tuple[dict[int, int], list[str]]:
        """Widths of the columns that fit, by index, and the titles of those that do not.

        cells: title and cells by index. Names that are too long are cut, or a cell breaks
        between words only, unless one is longer than LONGEST or no column can be dropped.
        """
        most = {place: max(map(cell_len, column)) for place, column in cells.items()}
        if names_are_cut:
            least = {p: min(NAME, wide) if self.titled[p].words else wide for p, wide in most.items()}
        else:
            least = {
                place: min(LONGEST, max(cell_len(word) for cell in column for word in WHOLE.findall(cell)))
                for place, column in cells.items()
            }
        left = []

        def spare() -> int:
            marks = max(map(cell_len, self._marks), default=0)
            return width - sum(least.values()) - BETWEEN * len(least) - (marks and BETWEEN + marks)

        for place in sorted(cells, key=lambda place: self.titled[place].drop or 0):
            if self.titled[place].drop is not None and spare() < 0:
                del least[place]
                left.append(self.titled[place].title)
        names = [place for place in least if self.titled[place].words and names_are_cut]
        while spare() < 0 and (wide := [place for place in names if least[place] > LEAST_NAME]):
            least[max(wide, key=lambda place: least[place])] -= 1
        room = spare()
        while room > 0 and (tight := [place for place in least if least[place] < most[place]]):
            for place in tight[:room]:
                least[place] += 1
                room -= 1
        return least, left


def cut(text: str, room: int) -> str:
    """The text, or as much of it as fits with an ellipsis."""
    return text if cell_len(text) <= room else set_cell_size(text, room - 1).rstrip() + "…"


def _told_apart(names: Sequence[str], room: int) -> list[str]:
    """The names, cut in the middle where fewer of them look alike then than if they were cut at the end."""
    ends, middles = [cut(name, room) for name in names], [_cut_within(name, room) for name in names]
    return middles if len(set(middles)) > len(set(ends)) else ends


def _cut_within(text: str, room: int) -> str:
    """The text, or as much of its beginning and of its end as fits around an ellipsis."""
    if cell_len(text) <= room:
        return text
    end = text
    while cell_len(end) > room // 2:
        end = end[1:]
    return cut(text, room - cell_len(end)) + end


def _padded(cell: str, wide: int, left: bool) -> str:
    space = " " * (wide - cell_len(cell))
    return cell + space if left else space + cell


def share_notes(tables: Sequence[Table]) -> tuple[list[Table], list[str]]:
    """Move notes on method that several tables have to a list of their own, to which the tables refer."""
    counts = Counter(
        note for table in tables for note in dict.fromkeys(table.notes) if isinstance(note, MethodNote)
    )
    numbers = {note: n for n, note in enumerate((note for note in counts if counts[note] > 1), start=1)}
    return [_with_references(table, numbers) for table in tables], list(numbers)


def _with_references(table: Table, numbers: dict[MethodNote, int]) -> Table:
    own = [note for note in table.notes if note not in numbers]
    elsewhere = sorted(numbers[note] for note in map(MethodNote, table.notes) if note in numbers)
    if elsewhere:
        numbers_here = ", ".join(map(str, elsewhere))
        own.append(f"{NOTES_TITLE}, at the end: {numbers_here}.")
    return replace(table, notes=own)


def notes_to_markdown(notes: Sequence[str], level: str) -> list[str]:
    """The notes that several tables share, under a heading of their own; empty where there are none."""
    if not notes:
        return []
    numbered = (f"{n}. {markdown(note)}" for n, note in enumerate(notes, start=1))
    return ["\n".join([f"{level} {NOTES_TITLE}", "", *numbered, ""])]

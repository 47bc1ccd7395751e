"""A table: columns, rows and notes, as Markdown and for a terminal of any width. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import rich.table
from rich import box
from rich.cells import cell_len
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
    """The cell, where it is more than the formatted value."""
    beneath: Callable[[Any], object] = lambda row: None
    """Value for a row beneath the others, which is of another kind."""
    key: str = ""
    """Name in CSV and JSON; empty for columns of tables only."""
    interval: bool = False
    """Whether the value is an Estimate, whose interval is exported too."""
    words: bool = False
    """Whether the column holds words, aligned to the left; numbers are aligned to the right."""
    drop: int | None = None
    """Order in which a narrow terminal drops the column, 1 first; None: it always stays."""

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
            *([column.cell(row) for column in self.titled] for row in self.rows),
            *([column.cell_beneath(row) for column in self.titled] for row in self.beneath),
        ]

    @cached_property
    def shown(self) -> list[int]:
        """Indices of the columns that hold anything."""
        return [place for place in range(len(self.titled)) if any(row[place] != DASH for row in self.cells)]

    def to_markdown(self, level: str) -> str:
        """A GitHub table between its heading (`level` is ### or the like) and its notes."""
        lines = [f"{level} {markdown(self.title)}", ""]
        if self.first:
            lines += [*(f"{markdown(line)}  " for line in self.first), ""]
        lines.append(f"| {' | '.join(markdown(self.titled[place].title) for place in self.shown)} |")
        lines.append(f"|{'|'.join('---' if self.titled[place].words else '--:' for place in self.shown)}|")
        lines += [f"| {' | '.join(markdown(row[place]) for place in self.shown)} |" for row in self.cells]
        return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in self.notes)]).rstrip() + "\n"

    def to_terminal(self, width: int) -> list[RenderableType]:
        """The table for rich in `width` columns; columns that do not fit are left out and named."""
        widths, left = self._fit(width)
        table = rich.table.Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, columns in widths.items():
            column = self.titled[place]
            justify = "left" if column.words else "right"
            table.add_column(plain(column.title), justify=justify, overflow="fold", width=columns)
        for row in self.cells:
            table.add_row(*(Text(row[place]) for place in widths))
        notes = list(self.notes)
        if left:
            notes.insert(0, f"Too narrow for {', '.join(left)}; a wider terminal or --markdown shows all.")
        return [
            Text(plain(self.title), style="bold"),
            *(Text(plain(line)) for line in self.first),
            table,
            *(Text(plain(line), style="dim") for line in notes),
            Text(),
        ]

    def _fit(self, width: int) -> tuple[dict[int, int], list[str]]:
        """Widths of the columns that fit, by index, and the titles of those that do not.

        A cell breaks between words only, unless one is longer than LONGEST or no column can be dropped.
        """
        cells = {
            place: [self.titled[place].title, *(row[place] for row in self.cells)] for place in self.shown
        }
        words = {
            place: [word for cell in column for word in WHOLE.findall(cell)]
            for place, column in cells.items()
        }
        least = {place: min(LONGEST, max(map(cell_len, cell_words))) for place, cell_words in words.items()}
        most = {place: max(cell_len(cell) for cell in column) for place, column in cells.items()}
        left = []
        for place in sorted(self.shown, key=lambda place: self.titled[place].drop or 0):
            if self.titled[place].drop is not None and sum(least.values()) + BETWEEN * len(least) > width:
                del least[place]
                left.append(self.titled[place].title)
        spare = width - sum(least.values()) - BETWEEN * len(least)
        while spare > 0 and (tight := [place for place in least if least[place] < most[place]]):
            for place in tight[:spare]:
                least[place] += 1
                spare -= 1
        return least, left


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

"""A table of text and its notes, as Markdown and for a terminal of any width. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bench.format import DASH, markdown, plain

BETWEEN = 2
"""Characters between two columns of a terminal's table."""
WHOLE = re.compile(r"\S+(?: to \S+)*")
"""What is not broken: words, and ranges."""
LONGEST = 32
"""Characters of a word for which other columns make room."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, as text; columns that hold nothing but dashes are left out of it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int]
    """Places of the columns that hold words, not figures."""
    notes: Sequence[str]
    first: Sequence[str] = ()
    """Lines that a reader must see before the table."""
    dispensable: Sequence[str] = ()
    """Beginnings of the titles of columns that a narrow terminal does without, the first one first."""
    beneath: int = 0
    """Rows at the end that no sorting may mix with those above."""

    @property
    def shown(self) -> list[int]:
        return [place for place in range(len(self.head)) if any(row[place] != DASH for row in self.rows)]

    def to_markdown(self, level: str) -> str:
        """A GitHub table between its heading (`level` is ### or the like) and its notes."""
        shown = self.shown
        lines = [f"{level} {markdown(self.title)}", ""]
        if self.first:
            lines += [*(f"{markdown(line)}  " for line in self.first), ""]
        lines.append(f"| {' | '.join(markdown(self.head[place]) for place in shown)} |")
        lines.append(f"|{'|'.join('---' if place in self.words else '--:' for place in shown)}|")
        lines += [f"| {' | '.join(markdown(row[place]) for place in shown)} |" for row in self.rows]
        return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in self.notes)]).rstrip() + "\n"

    def to_terminal(self, width: int) -> list[RenderableType]:
        """The same for rich, in `width` columns: what does not fit is left out, and that is said."""
        widths, left = self._fit(width)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for place, columns in widths.items():
            justify = "left" if place in self.words else "right"
            table.add_column(plain(self.head[place]), justify=justify, overflow="fold", width=columns)
        for row in self.rows:
            table.add_row(*(Text(plain(row[place])) for place in widths))
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
        """Widths of the columns that fit, by place, and the titles of those that do not.

        A cell breaks between words only, unless one is longer than LONGEST or not even the last few columns fit.
        """
        cells = {place: [self.head[place], *(row[place] for row in self.rows)] for place in self.shown}
        words = {place: [word for cell in column for word in WHOLE.findall(cell)] for place, column in cells.items()}
        least = {place: min(LONGEST, max(map(cell_len, each))) for place, each in words.items()}
        most = {place: max(cell_len(cell) for cell in column) for place, column in cells.items()}
        left = []
        for title in self.dispensable:
            place = next((place for place in least if self.head[place].startswith(title)), None)
            if place is not None and sum(least.values()) + BETWEEN * len(least) > width:
                del least[place]
                left.append(self.head[place])
        spare = width - sum(least.values()) - BETWEEN * len(least)
        while spare > 0 and (tight := [place for place in least if least[place] < most[place]]):
            for place in tight[:spare]:
                least[place] += 1
                spare -= 1
        return least, left

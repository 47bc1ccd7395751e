"""What a command prints: the answer, one table, and the notes that matter most.

for line in Brief(answer=["a is the fastest"], table=table).lines(width=100): console.print(line)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from bench.format import plain, plural
from bench.report.table import Table, cut

MOST_COLUMNS, LEAST_COLUMNS = 100, 60
MOST_NOTES = 3


@dataclass(frozen=True, kw_only=True)
class Brief:
    answer: Sequence[str]
    """Lines at the top."""
    table: Table
    """Shown without its title, first lines and notes."""
    whole: Sequence[Table] = ()
    """Tables in place of all that follows the lines at the top, where everything is asked for."""
    about: Sequence[str] = ()
    """What is compared or measured: lines beneath the answer."""
    findings: Sequence[str] = ()
    """Lines beneath the table, which are always printed."""
    warnings: Sequence[str] = ()
    """What can change the figures, the weightiest first; MOST_NOTES of these and the notes are printed."""
    notes: Sequence[str] = ()
    rest: str = "--full"
    """How to see what is not printed."""
    hints: Sequence[str] = ()
    """Last lines: where more is."""

    def lines(self, width: int, *, full: bool = False, every_warning: bool = False) -> list[RenderableType]:
        """Lines for a terminal of `width` columns; a narrower one is taken to have LEAST_COLUMNS.

        full: the tables of `whole`. every_warning: all warnings and notes.
        """
        terminal = width
        width = max(LEAST_COLUMNS, min(width, MOST_COLUMNS))
        lines: list[RenderableType] = [part for line in self.answer for part in wrapped(line, width, "bold")]
        lines += [part for line in self.about for part in wrapped(line, width)]
        lines.append(Text())
        if full:
            return [*lines, *(part for table in self.whole for part in table.to_terminal(terminal))]
        shown, about = self.table.differing().to_lines(width)
        lines += [*shown, Text()]
        lines += [part for line in (*about, *self.findings) for part in wrapped(line, width)]
        said = [(f"! {warning}", "yellow") for warning in self.warnings]
        said += [(note, "dim") for note in self.notes]
        printed = said if every_warning else said[:MOST_NOTES]
        for note, style in printed:
            parts = wrapped(note, width, style, "  ")
            lines += parts if every_warning else self._clipped(parts, width)
        if hidden := len(said) - len(printed):
            more = plural(hidden, "more note" if self.notes else "more warning")
            lines.append(Text(f"  {more}: {self.rest}", style=said[-1][1]))
        if self.hints:
            lines += [Text(), *(part for line in self.hints for part in wrapped(line, width, "dim"))]
        return lines

    def _clipped(self, lines: list[Text], width: int) -> list[Text]:
        """The first two lines; an ellipsis stands for the others."""
        if len(lines) <= 2:
            return lines
        rest = f" ({self.rest})"
        last = cut(f"{lines[1].plain} {lines[2].plain.strip()}", width - len(rest)) + rest
        return [lines[0], Text(last, style=lines[1].style)]


def wrapped(line: str, width: int, style: str = "", indent: str = "") -> list[Text]:
    """The words of a line, as many lines as it takes; a word that is longer than `width` stays whole."""
    lines, now = [], ""
    for word in plain(line).split():
        longer = f"{now} {word}" if now else word
        if now and cell_len(longer) > width:
            lines.append(now)
            now = indent + word
        else:
            now = longer
    return [Text(each, style=style) for each in (*lines, now)]

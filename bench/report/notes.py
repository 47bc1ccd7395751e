"""Notes that several tables of a report have in common, said once after the last of them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bench.report.sheet import Sheet

TITLE = "Notes to several tables"


class Method(str):
    """A note on how figures are made, that may stand elsewhere than beneath its table; others are of these figures."""


def gathered(sheets: Sequence[Sheet]) -> tuple[list[Sheet], list[str]]:
    """The tables without the notes on method that others have too, to which they refer by number, and these notes."""
    counts = Counter(note for sheet in sheets for note in dict.fromkeys(sheet.notes) if isinstance(note, Method))
    numbers = {note: n for n, note in enumerate((note for note in counts if counts[note] > 1), start=1)}
    return [_referring(sheet, numbers) for sheet in sheets], list(numbers)


def _referring(sheet: Sheet, numbers: dict[Method, int]) -> Sheet:
    own = [note for note in sheet.notes if note not in numbers]
    elsewhere = sorted(numbers[note] for note in map(Method, sheet.notes) if note in numbers)
    if elsewhere:
        said = ", ".join(map(str, elsewhere))
        own.append(f"{TITLE}, at the end: {said}.")
    return replace(sheet, notes=own)

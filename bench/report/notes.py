"""Notes that several tables of a report have in common, said once after the last of them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from bench.analysis.rung_view import DERIVED, Entry
from bench.format import plain
from bench.report.table import Sheet
from bench.stats import LEAST_ROUNDS
from gpt2.toggles import HOST

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


def lacks_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.lacks for entry in shown):
        return []
    return [f"Beneath the others: runs that were interrupted, or have fewer than {LEAST_ROUNDS} rounds of that rung."]


def ranks_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.row.toggles.device == HOST and entry.row.toggles.world_size > 1 for entry in shown):
        return []
    return [
        Method("Devices: on a CPU, ranks; those on one machine share its cores and peak, so MFU counts each CPU once.")
    ]


def sources(shown: Sequence[Entry]) -> str:
    """A note."""
    files = dict.fromkeys(entry.board.source.as_posix() for entry in shown if entry.board.source)
    return plain(f"From {', '.join(files) or 'this run'}.")


def derived_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.derived and entry.row.mfu is not None for entry in shown):
        return []
    return [
        Method(f"{DERIVED} Over a derived peak, which is arithmetic and not a datasheet's: such MFU rank nothing.")
    ]

"""What number formats buy, by batch: rungs of a run that differ in nothing else, as a matrix. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from bench.analysis.rung_view import Entry, entries, memory_over, over
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, gib, letter, plain, ratio
from bench.report.table import Sheet
from gpt2.toggles import Toggles

PLAIN = "float32"


@dataclass(frozen=True, kw_only=True)
class Column:
    """Rungs of one run that differ in their number format only."""

    name: str
    """Of the run, as the head calls it."""
    run: Scoreboard
    common: Toggles
    """With the formats at their baseline."""
    by_format: dict[str, Entry]


def format_of(toggles: Toggles) -> str:
    """As the table's lines call it."""
    names = []
    if toggles.matmul_precision != "highest":
        tf32 = replace(toggles, autocast=PLAIN).product_format() == "tf32"  # not on a TPU
        names.append("TF32" if tf32 else f"matmul_precision={toggles.matmul_precision}")
    if toggles.autocast != PLAIN:
        names.append(toggles.autocast)
    return " + ".join(names) or PLAIN


def columns(boards: Sequence[Scoreboard]) -> list[Column]:
    """Those with float32 and another format, a run after another."""
    found = []
    for board in boards:
        groups: dict[Toggles, dict[str, Entry]] = {}
        for entry in entries(board):
            common = replace(entry.row.toggles, autocast=PLAIN, matmul_precision="highest")
            groups.setdefault(common, {}).setdefault(format_of(entry.row.toggles), entry)
        several = {common: each for common, each in groups.items() if PLAIN in each and len(each) > 1}
        name = letter(len({column.name for column in found}))
        found += [Column(name=name, run=board, common=common, by_format=each) for common, each in several.items()]
    return found


def number_formats(boards: Sequence[Scoreboard]) -> Sheet | None:
    """None where it would repeat one step of one scoreboard."""
    shown = columns(boards)
    formats = sorted(dict.fromkeys(name for each in shown for name in each.by_format), key=lambda name: name != PLAIN)
    if len(shown) < 2 and len(formats) < 3:
        return None
    head = ["Figure", "Format", *_titles(shown)]
    rows = []
    for figure, cell in BLOCKS:
        for name in formats:
            if name != PLAIN or not figure.endswith("over float32"):
                rows.append([figure, name, *(cell(each, name) for each in shown)])
    runs = {each.name: each.run for each in shown}
    return Sheet(
        title="Number formats",
        head=head,
        rows=rows,
        words=frozenset({0, 1}),
        notes=[
            *(_legend(run, name if len(runs) > 1 else "") for name, run in runs.items()),
            "The rungs of a column differ in autocast and matmul_precision only. TPS: geometric mean over rounds; "
            "ratios to float32 paired within rounds; ± is the 95 % t interval.",
        ],
        dispensable=tuple(reversed(head[3:])),
    )


def _legend(run: Scoreboard, name: str) -> str:
    of = f"{name}: " if name else ""
    return plain(f"{of}{run.ladder} on {run.environment.machine}, from {run.source}.")


def _titles(shown: Sequence[Column]) -> list[str]:
    """Run, model and batch, and what else tells a column from its neighbours."""
    several = len({each.name for each in shown}) > 1
    titles = []
    for each in shown:
        alike = [o for o in shown if o.name == each.name and o.common.micro_batch_size == each.common.micro_batch_size]
        unlike = [
            f"{toggle.name}={getattr(each.common, toggle.name)}"
            for toggle in fields(Toggles)
            if len({getattr(other.common, toggle.name) for other in alike}) > 1
        ]
        model = each.by_format[PLAIN].task[0]
        name = f"{each.name}: " if several else ""
        titles.append(plain(", ".join([f"{name}{model}", f"batch of {each.common.micro_batch_size}", *unlike])))
    return titles


def _tps(column: Column, name: str) -> str:
    entry = column.by_format.get(name)
    if entry is None:
        return DASH
    status = "" if entry.row.status == "ok" else entry.status
    return ", ".join(filter(None, [entry.tps if entry.row.tps else "", status])) or DASH


def _over(column: Column, name: str) -> str:
    entry = column.by_format.get(name)
    return ratio(over(entry, column.by_format[PLAIN])) if entry else DASH


def _memory(column: Column, name: str) -> str:
    entry = column.by_format.get(name)
    return gib(entry.row.peak_memory_bytes) if entry else DASH


def _memory_over(column: Column, name: str) -> str:
    entry = column.by_format.get(name)
    found = memory_over(entry, column.by_format[PLAIN]) if entry and entry.ranks else None
    return f"{found:.2f}x" if found else DASH


BLOCKS: Sequence[tuple[str, Callable[[Column, str], str]]] = (
    ("TPS", _tps),
    ("TPS over float32", _over),
    ("Peak memory (GiB)", _memory),
    ("Memory over float32", _memory_over),
)

"""Figures of others as tables, and beside our own; always labelled, never in a column that ranks ours. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.analysis.row import Row
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, gib, number, percent, plain, with_interval
from bench.records.published import Published
from bench.report.notes import Method
from bench.report.table import Sheet

NAMES = {"bfloat16": "bf16", "float32": "float32"}


def sheets(figures: Sequence[Published]) -> list[Sheet]:
    """A table for each series of each source, speed-ups and MFU computed anew from what it states.

    Except for ranges of MFU, which stand beside ours (see bench.report.hardware).
    """
    series: dict[tuple[str, str], list[Published]] = {}
    for figure in figures:
        if figure.series == "mfu context":
            continue
        series.setdefault((figure.source, figure.series), []).append(figure)
    return [_sheet(rows) for rows in series.values()]


def _sheet(rows: Sequence[Published]) -> Sheet:
    first = rows[0]
    head = [
        "Setup",
        "Model",
        "Hardware",
        "Devices",
        "Format",
        "TPS",
        "Speed-up",
        "Over first on this hardware",
        "Efficiency",
    ]
    head += ["MFU (bf16)", "MFU (float32)", "Peak memory (GiB)", "Step (ms)", "Minutes", "Dataset"]
    cells = []
    for row in rows:
        alike = [each for each in rows if _task(each) == _task(row)]
        scaled = next((each for each in alike if each.devices == 1 and "scaling" in row.series), None)
        cells.append(
            [
                plain(row.label or row.rung),
                plain(row.model or DASH),
                plain(row.hardware or DASH),
                str(row.devices) if row.devices else DASH,
                plain(row.number_format or DASH),
                number(row.tps) if row.tps else DASH,
                _times(row, first),
                _times(row, next(each for each in alike if each.hardware == row.hardware)),
                percent(row.tps / scaled.tps / (row.devices or 1)) if scaled and scaled.tps and row.tps else DASH,
                percent(row.recomputed_mfu("bfloat16")),
                percent(row.recomputed_mfu("float32")) if row.number_format == "float32" else DASH,
                gib(row.memory_bytes),
                number(1e3 * row.step_seconds) if row.step_seconds else DASH,
                number(row.minutes) if row.minutes else DASH,
                plain(row.dataset or DASH),
            ]
        )
    place = f" ({first.url})" if first.url else ""
    notes = [f"Published by {first.source}{place}; not measured by this code."]
    notes += [f"{plain(row.label or row.rung)}: {row.note}." for row in rows if row.note]
    if any(row.recomputed_mfu(name) for row in rows for name in NAMES):
        said = "Speed-ups and MFU are computed anew from the stated tokens per second, FLOPs per token and peaks."
        notes.append(Method(said))
    return Sheet(
        title=f"Published: {first.source}, {first.series}",
        head=head,
        rows=cells,
        words=frozenset({0, 1, 2, 4, 14}),
        notes=notes,
    )


def _task(figure: Published) -> tuple[str | None, int | None]:
    """Speeds of different ones do not rank."""
    return figure.model, figure.seq_len


def _times(row: Published, first: Published) -> str:
    if row is first or _task(row) != _task(first):
        return DASH
    return f"{row.tps / first.tps:,.2f}x" if row.tps and first.tps else DASH


def _alike(row: Row, figure: Published, board: Scoreboard) -> bool:
    """Whether a figure is of a rung of this name, on as many devices of this kind."""
    named = figure.rung.lower() == row.rung.lower() and figure.devices == row.toggles.world_size
    return named and not board.environment.xla_on_cpu and _kind(figure.hardware or "") == row.toggles.device


def _kind(hardware: str) -> str:
    """Of device, as toggles name it."""
    words = hardware.split()
    return "cpu" if "CPU" in words else "mps" if "MPS" in words else "xla" if "TPU" in words else "cuda"


def beside(board: Scoreboard, figures: Iterable[Published]) -> Sheet | None:
    """Our rungs beside those of others of the same name, model, kind and number of devices; None where none are."""
    model = board.records[0].workload["model"]
    rows = []
    for row in board.own.rows:
        for figure in figures:
            if row.tps and figure.tps and figure.model == model and _alike(row, figure, board):
                rows.append(
                    [
                        plain(row.rung),
                        with_interval(number(row.tps.value), row.tps),
                        number(figure.tps),
                        plain(f"{figure.devices or '?'} x {figure.hardware}") if figure.hardware else DASH,
                        plain(f"{figure.source}, {figure.series}"),
                        f"{number(row.tps.value / figure.tps)}x",
                    ]
                )
    if not rows:
        return None
    return Sheet(
        title=f"Beside published figures: {board.ladder} on {board.environment.machine}",
        head=["Rung", "TPS here", "TPS, published", "Published hardware", "Source", "Here over published"],
        rows=rows,
        words=frozenset({0, 3, 4}),
        notes=[
            "Published figures were measured by others with other code, torch and hardware; rungs are paired by name. "
            "They rank nothing here."
        ],
    )

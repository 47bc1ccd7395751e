"""Tables of published figures, and of ours beside them; labelled, and never ranked with ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.analysis.row import Row
from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.format import gib, number, percent, tokens_per_second
from bench.records.published import Published
from bench.report.table import Column, MethodNote, Table

NAMES = {"bfloat16": "bf16", "float32": "float32"}


def tables(figures: Sequence[Published]) -> list[Table]:
    """A table for each series of each source, speed-ups and MFU computed anew from what it states.

    Ranges of MFU are left out: they stand beside ours (see bench.report.several_runs.tables).
    """
    shown = [figure for figure in figures if figure.series != "mfu context"]
    series = group_by(shown, lambda figure: (figure.source, figure.series))
    return [_table(rows) for rows in series.values()]


def _table(rows: Sequence[Published]) -> Table:
    first = rows[0]

    def first_alike(row: Published) -> Published:
        return next(other for other in rows if (other.hardware, other.task) == (row.hardware, row.task))

    def efficiency(row: Published) -> float | None:
        one = next((other for other in rows if other.task == row.task and other.devices == 1), None)
        scaled = one if "scaling" in row.series else None
        return row.tps / scaled.tps / (row.devices or 1) if scaled and scaled.tps and row.tps else None

    columns: list[Column[Published]] = [
        Column("Setup", _setup, words=True),
        Column("Model", lambda row: row.model or None, words=True),
        Column("Hardware", lambda row: row.hardware or None, words=True),
        Column("Devices", lambda row: row.devices or None),
        Column("Format", lambda row: row.number_format or None, words=True),
        Column("TPS", lambda row: row.tps or None, number),
        Column("Speed-up", lambda row: _over(row, first), "{:,.2f}x".format),
        Column("Over first on this hardware", lambda row: _over(row, first_alike(row)), "{:,.2f}x".format),
        Column("Efficiency", efficiency, percent),
        Column("MFU (bf16)", lambda row: row.recomputed_mfu("bfloat16"), percent),
        Column(
            "MFU (float32)",
            lambda row: row.recomputed_mfu("float32") if row.number_format == "float32" else None,
            percent,
        ),
        Column("Peak memory (GiB)", lambda row: row.memory_bytes, gib),
        Column("Step (ms)", lambda row: 1e3 * row.step_seconds if row.step_seconds else None, number),
        Column("Minutes", lambda row: row.minutes or None, number),
        Column("Cost ($)", lambda row: row.cost_usd or None, number),
        Column("Dataset", lambda row: row.dataset or None, words=True),
    ]
    place = f" ({first.url})" if first.url else ""
    notes = [f"Published by {first.source}{place}; not measured by this code."]
    notes += [f"{_setup(row)}: {row.note}." for row in rows if row.note]
    if any(row.recomputed_mfu(name) for row in rows for name in NAMES):
        stated = "the stated tokens per second, FLOPs per token and peaks"
        notes.append(MethodNote(f"Speed-ups and MFU are computed anew from {stated}."))
    return Table(title=f"Published: {first.source}, {first.series}", columns=columns, rows=rows, notes=notes)


def _setup(row: Published) -> str:
    return row.label or row.rung


def _over(row: Published, first: Published) -> float | None:
    if row is first or row.task != first.task:
        return None
    return row.tps / first.tps if row.tps and first.tps else None


def _alike(row: Row, figure: Published, board: Scoreboard) -> bool:
    """Whether a figure is of a rung of this name, on as many devices of this kind."""
    named = figure.rung.lower() == row.rung.lower() and figure.devices == row.toggles.world_size
    return named and not board.environment.xla_on_cpu and _kind(figure.hardware or "") == row.toggles.device


def _kind(hardware: str) -> str:
    """Kind of device, as toggles name it."""
    words = hardware.split()
    return "cpu" if "CPU" in words else "mps" if "MPS" in words else "xla" if "TPU" in words else "cuda"


def beside(board: Scoreboard, figures: Iterable[Published]) -> Table | None:
    """Our rungs beside published ones of the same name, model and devices; None where there are none."""
    pairs = [
        (row, figure)
        for row in board.own.rows
        for figure in figures
        if row.tps and figure.tps and figure.model == board.workload["model"] and _alike(row, figure, board)
    ]
    if not pairs:
        return None
    columns: list[Column[tuple[Row, Published]]] = [
        Column("Rung", lambda pair: pair[0].rung, words=True),
        Column("TPS here", lambda pair: pair[0].tps, tokens_per_second),
        Column("TPS, published", lambda pair: pair[1].tps, number),
        Column("Published hardware", lambda pair: pair[1].on, words=True),
        Column("Source", lambda pair: f"{pair[1].source}, {pair[1].series}", words=True),
        Column("Here over published", lambda pair: _here_over(*pair)),
    ]
    return Table(
        title=f"Beside published figures: {board.title}",
        columns=columns,
        rows=pairs,
        notes=[
            "Published figures were measured by others with other code, torch and hardware; rungs are paired "
            "by name. They rank nothing here."
        ],
    )


def _here_over(row: Row, figure: Published) -> str | None:
    return f"{number(row.tps.value / figure.tps)}x" if row.tps and figure.tps else None

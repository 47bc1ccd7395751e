"""Scoreboards as one pandas table of raw figures, a line per rung, for CSV, JSON and plots.

Nothing is rounded here, shares are between 0 and 1, and what is absent is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas

from bench.analysis.row import Row
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import Chain
from bench.report.one_run.tables import columns
from bench.report.several_runs.comparison import chain_columns
from bench.report.table import Column
from bench.stats import Estimate


def frame(boards: Sequence[Scoreboard], chain: Chain | None = None) -> pandas.DataFrame:
    """Columns: where the figures are from, what the rung switches on (`toggles.*`), and the figures.

    chain: adds what each rung is over its baseline.
    """
    lines = [_line(board, row) | _chained(board, row, chain) for board in boards for row in board.rows]
    return pandas.DataFrame(lines).convert_dtypes()


def to_csv(boards: Sequence[Scoreboard], chain: Chain | None = None) -> str:
    return frame(boards, chain).to_csv(index=False)


def to_json(boards: Sequence[Scoreboard], chain: Chain | None = None) -> str:
    """A list of objects, null for what is absent."""
    return f"{frame(boards, chain).to_json(orient='records', indent=2, double_precision=15)}\n"


def _line(board: Scoreboard, row: Row) -> dict[str, Any]:
    machine, workload = board.environment, board.workload
    measured = [record for record in board.records_of(row) if record.measurement]
    return {
        "ladder": board.ladder,
        "machine": machine.machine,
        "chip": measured[-1].environment.chip if measured else machine.chip,  # each device has its own
        "nodes": machine.nodes or 1,
        "torch": machine.torch,
        "source": board.source.as_posix() if board.source else None,
        "begun": board.begun,
        "rounds": board.rounds,
        "noise_floor": board.delta,
        **{f"workload.{name}": value for name, value in workload.items()},
        "rung": row.rung,
        "rung_index": row.index,
        **{f"toggles.{name}": value for name, value in asdict(row.toggles).items()},
        "external": row.trainer,
        "maths": row.maths,
        "caveats": "; ".join(row.caveats) or None,
        "status": row.status,
        "tried": row.tried,
        "error": row.why or None,
        "tokens_per_step": row.tokens_per_step,
        **_figures(columns(board), row),
    }


def _chained(board: Scoreboard, row: Row, chain: Chain | None) -> dict[str, Any]:
    if chain is None:
        return {}
    start = chain.baseline
    chain_row = next((each for each in chain.rows if each.rung.board is board and each.rung.row is row), None)
    return {"baseline": f"{start.board.source}:{start.row.rung}", **_figures(chain_columns(chain), chain_row)}


def _figures(columns: Sequence[Column[Any]], row: object) -> dict[str, Any]:
    """The row's values of columns that have a key, estimates with the ends of their 95 % intervals."""
    figures = {}
    for column in columns:
        if column.key:
            value = column.value(row) if row is not None else None
            estimate = value if isinstance(value, Estimate) else None
            figures[column.key] = estimate.value if estimate else value
            if column.interval:
                figures[f"{column.key}_low"] = estimate.low if estimate else None
                figures[f"{column.key}_high"] = estimate.high if estimate else None
    return figures

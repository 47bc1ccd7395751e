"""Scoreboards as one pandas table of raw figures, a line per rung: what CSV, JSON and plots are made from.

Nothing is rounded here, shares are between 0 and 1, and what is absent is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas

from bench.analysis.cross_run import Chain
from bench.analysis.row import Row
from bench.analysis.run_records import measured
from bench.analysis.scoreboard import Scoreboard
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
    machine, workload = board.environment, board.records[0].workload
    found = measured(board.records_of(row))
    return {
        "ladder": board.ladder,
        "machine": machine.machine,
        "chip": machine.chip,
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
        "doubts": "; ".join(row.doubts) or None,
        "status": row.status,
        "error": row.error.strip().splitlines()[0] if row.error else None,
        "tokens_per_step": row.tokens_per_step,
        **_estimate("tps", row.tps),
        **_estimate("speedup", row.speedup),
        **_estimate("over_rung_before", row.gain),
        "verdict": row.verdict,
        **_estimate("efficiency", row.efficiency),
        "mfu_bf16": row.mfu,
        "mfu_own_format": row.mfu_own,
        "hfu_bf16": row.hfu,
        "share_of_measured_ceiling": row.ceiling_share,
        "flops_per_token": found.flops_per_token if found else None,
        "flops_formula": found.flops_formula if found else None,
        "peak_flops_bf16": found.peak_flops_bf16 if found else None,
        "peak_flops_source": found.peak_flops_source if found else None,
        "peak_memory_bytes": row.peak_memory_bytes,
        "peak_memory_method": row.peak_memory_method,
        "loss_step": board.loss_step,
        "loss": row.loss,
        "joules_per_token": row.joules_per_token,
    }


def _chained(board: Scoreboard, row: Row, chain: Chain | None) -> dict[str, Any]:
    if chain is None:
        return {}
    start = chain.baseline
    link = next((link for link in chain.links if link.entry.board is board and link.entry.row is row), None)
    return {
        "baseline": f"{start.board.source}:{start.row.rung}",
        "group": link.group if link else None,
        **_estimate("over_baseline", link.over_baseline if link else None),
        "orders_of_magnitude": link.orders if link else None,
    }


def _estimate(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """With the ends of its 95 % interval."""
    return {
        name: estimate.value if estimate else None,
        f"{name}_low": estimate.low if estimate else None,
        f"{name}_high": estimate.high if estimate else None,
    }

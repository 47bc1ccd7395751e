"""What each rung's changes buy: added in the ladder's order, alone on the first rung, and last, on top of all others.

A ladder tells the first only, and that depends on its order; see `bench run --ablate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.record import Kind, Record
from bench.report.guards import toggles_of
from bench.report.scoreboard import Scoreboard, tps_by_round
from bench.schedule import ablated
from bench.stats import Estimate, Verdict, paired_ratio, verdict
from gpt2.toggles import Toggles
from gpt2.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one change did to the tokens per second."""

    ratio: Estimate | None
    verdict: Verdict | None
    absent: str = ""
    """Why there is no ratio."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The three answers for one rung."""

    rung: str
    in_order: Gain
    alone: Gain
    last: Gain
    """The whole ladder over the whole ladder without this rung's changes."""

    @property
    def agreement(self) -> str:
        """Whether the three agree on the direction, in words for a table."""
        gains = [gain for gain in (self.in_order, self.alone, self.last) if gain.ratio]
        if {"faster", "slower"} <= {gain.verdict for gain in gains}:
            return "sign differs"
        signs = {gain.ratio.value > 1 for gain in gains if gain.ratio}
        return "sign differs, within noise" if len(signs) > 1 else "agree" if len(gains) > 1 else ""


def attribution(board: Scoreboard) -> list[Attribution]:
    """One entry for each rung but the first; empty where the run was not told to find out."""
    records = [record for record in board.records if record.kind in ("cumulative", "alone", "left_out")]
    if board.has_gaps or not any(record.kind in ("alone", "left_out") for record in records):
        return []
    rungs = [row.toggles for row in board.rows]
    workload = Workload(**records[0].workload)
    result = []
    for place, row in enumerate(board.rows):
        if not place:
            continue
        result.append(
            Attribution(
                rung=row.rung,
                in_order=Gain(ratio=row.gain, verdict=row.verdict, absent=row.status),
                alone=_gain(board, records, _ablated(rungs, place, "alone", workload), rungs[0]),
                last=_gain(board, records, rungs[-1], _ablated(rungs, place, "left_out", workload)),
            )
        )
    return result


def _ablated(rungs: Sequence[Toggles], place: int, kind: Kind, workload: Workload) -> Toggles | None:
    """None where steps of the workload's size cannot be taken with these toggles."""
    try:
        return ablated(rungs, place, kind, workload)
    except ValueError:
        return None


def _gain(board: Scoreboard, records: Sequence[Record], toggles: Toggles | None, over: Toggles | None) -> Gain:
    if toggles is None or over is None:
        return Gain(ratio=None, verdict=None, absent="other steps")
    if toggles == over:
        return Gain(ratio=None, verdict=None, absent="set again later")
    these, those = _with(records, toggles), _with(records, over)
    ratio = paired_ratio(tps_by_round(these), tps_by_round(those))
    if ratio:
        return Gain(ratio=ratio, verdict=verdict(ratio, board.delta))
    failed = [record.status for record in (*these, *those) if record.status != "ok"]
    return Gain(ratio=None, verdict=None, absent=failed[-1] if failed else "not measured")


def _with(records: Sequence[Record], toggles: Toggles) -> list[Record]:
    """The processes that ran with exactly these toggles: of one kind, so that rounds count once."""
    found = [record for record in records if toggles_of([record]) == toggles]
    return [record for record in found if record.kind == found[0].kind and record.rung_index == found[0].rung_index]

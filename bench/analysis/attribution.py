"""What each rung's changes buy: added in the ladder's order, alone on the first rung, and last, on top of all
others.

A ladder tells the first only, and that depends on its order; see `bench run --ablate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.claim_checks import judge
from bench.analysis.run_records import cumulative, first_by_round, parity_reference, toggles_of, tps_by_round
from bench.analysis.schedule import ablated, full_set
from bench.analysis.scoreboard import Scoreboard
from bench.records.record import ABLATION, Kind, Record
from bench.stats import Estimate, Verdict, paired_ratio, verdict
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one change did to the tokens per second."""

    ratio: Estimate | None
    verdict: Verdict | None
    absent: str = ""
    """Why there is no ratio."""
    flaw: str = ""
    """What is held against it, such as inert (see bench.analysis.claim_checks)."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The three answers for one rung."""

    rung: str
    in_order: Gain
    alone: Gain
    last: Gain
    """The whole ladder over the whole ladder without this rung's changes."""

    @property
    def gains(self) -> list[Gain]:
        return [gain for gain in (self.in_order, self.alone, self.last) if gain.ratio]

    @property
    def agreement(self) -> str:
        """Whether the three agree on the direction, in words for a table; nothing where too little is known."""
        verdicts = {gain.verdict for gain in self.gains}
        if {"faster", "slower"} <= verdicts:
            return "sign differs"
        if len(self.gains) < 2 or verdicts & {None, "not replicated", "no control"}:
            return ""
        signs = {gain.ratio.value > 1 for gain in self.gains if gain.ratio}
        if "unclear" in verdicts:
            return "sign differs, unclear" if len(signs) > 1 and verdicts & {"faster", "slower"} else ""
        return "sign differs, within noise" if len(signs) > 1 else "agree"


def attribution(board: Scoreboard) -> list[Attribution]:
    """One entry for each rung but the first; empty where the run was not told to find out."""
    records = [record for record in board.records if record.kind in ("cumulative", *ABLATION)]
    rows = full_set(board.own.rows)
    if board.has_gaps or not any(record.ablate or record.kind in ABLATION for record in records):
        return []
    toggles = [row.toggles for row in rows]
    workload = Workload(**records[0].workload)
    result = []
    for place, row in enumerate(rows):
        if not place:
            continue
        result.append(
            Attribution(
                rung=row.rung,
                in_order=Gain(
                    ratio=row.gain,
                    verdict=row.verdict,
                    absent=next(
                        (r.status for r in (row, rows[place - 1]) if r.status != "ok"), "not measured"
                    ),
                    flaw="" if row.status == "ok" else row.status,
                ),
                alone=_gain(board, records, _ablated(toggles, place, "alone", workload), toggles[0]),
                last=_gain(board, records, toggles[-1], _ablated(toggles, place, "left_out", workload)),
            )
        )
    return result


def ratios(board: Scoreboard) -> list[Estimate]:
    """All that the report shows: speed-ups, gains over the rung before, the A/A controls, alone and left out."""
    shown = [row.speedup for row in board.rows[1:]] + [row.gain for row in board.rows[1:]]
    shown += [board.control, board.last_control]
    shown += [gain.ratio for each in attribution(board) for gain in each.gains]
    return [ratio for ratio in shown if ratio]


def _ablated(rungs: Sequence[Toggles], place: int, kind: Kind, workload: Workload) -> Toggles | None:
    """None where steps of the workload's size cannot be taken with these toggles."""
    try:
        return ablated(rungs, place, kind, workload)
    except ValueError:
        return None


def _gain(
    board: Scoreboard, records: Sequence[Record], toggles: Toggles | None, over: Toggles | None
) -> Gain:
    if toggles is None or over is None:
        return Gain(ratio=None, verdict=None, absent="other steps")
    if toggles == over:
        return Gain(ratio=None, verdict=None, absent="set again later")
    these, those = _with(records, toggles), _with(records, over)
    first = cumulative(board.records)[0]
    reference = first_by_round(first, board.records) if over == toggles_of(first) else tps_by_round(those)
    ratio = paired_ratio(tps_by_round(these), reference)
    if ratio:
        flaw, _ = judge(these, first, those, parity_reference(these, board.records))
        if (
            flaw == "ok"
        ):  # what is left out may itself be broken; without effect it cannot be, nothing was added to it
            flaw, _ = judge(those, first, those, parity_reference(those, board.records))
        return Gain(
            ratio=ratio,
            verdict=verdict(ratio, board.delta) if flaw == "ok" else None,
            flaw="" if flaw == "ok" else flaw,
        )
    failed = [record.status for record in (*these, *those) if record.status != "ok"]
    return Gain(ratio=None, verdict=None, absent=failed[-1] if failed else "not measured")


def _with(records: Sequence[Record], toggles: Toggles) -> list[Record]:
    """The processes that ran with exactly these toggles: of one kind, so that rounds count once."""
    found = [record for record in records if toggles_of([record]) == toggles]
    return [
        record
        for record in found
        if record.kind == found[0].kind and record.rung_index == found[0].rung_index
    ]

"""What each rung's changes buy: added in the ladder's order, alone on the first rung, and added last.

A ladder alone tells the first only, and that depends on its order; see `bench run --ablate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.analysis.claim_checks import check_claims
from bench.analysis.row import status_of
from bench.analysis.run_records import toggles_of, tps_by_round
from bench.analysis.schedule import ablated, full_set
from bench.analysis.scoreboard import Scoreboard
from bench.format import status_word
from bench.records.record import ABLATION, Kind, Record
from bench.stats import Estimate, Verdict, paired_ratio, verdict
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Effect of one change on tokens per second."""

    ratio: Estimate | None = None
    verdict: Verdict | None = None
    absent: str = ""
    """Why there is no ratio, in words."""
    failed_check: str = ""
    """The check that one of the two rungs failed (see bench.analysis.claim_checks), in words."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """The three answers for one rung."""

    rung: str
    in_order: Gain
    alone: Gain
    last: Gain
    """Ratio of the whole ladder over the whole ladder without this rung's changes."""

    @property
    def gains(self) -> list[Gain]:
        return [gain for gain in (self.in_order, self.alone, self.last) if gain.ratio]

    @property
    def agreement(self) -> str:
        """Whether the three agree on the direction, see agreement()."""
        return agreement(self.gains)


GAINS = {"in_order": "added in order", "alone": "alone on the first rung", "last": "added last"}
"""The three answers, with their names in charts."""


def agreement(gains: Sequence[Gain]) -> str:
    """Whether gains agree on the direction, in words for a table; empty where too little is known."""
    verdicts = {gain.verdict for gain in gains}
    if {"faster", "slower"} <= verdicts:
        return "direction differs"
    if len(gains) < 2 or verdicts & {None, "not replicated", "no control"}:
        return ""
    signs = {gain.ratio.value > 1 for gain in gains if gain.ratio}
    if "unclear" in verdicts:
        return "direction differs, unclear" if len(signs) > 1 and verdicts & {"faster", "slower"} else ""
    return "direction differs, within noise" if len(signs) > 1 else "same direction"


def attribution(board: Scoreboard) -> list[Attribution]:
    """One entry for each rung but the first; empty where the run did not measure ablations."""
    records = [record for record in board.records if record.kind in ("cumulative", *ABLATION)]
    rows = full_set([row for row in board.own.rows if not row.left_out])
    if board.has_gaps or not any(record.ablate or record.kind in ABLATION for record in records):
        return []
    toggles = [row.toggles for row in rows]
    workload = Workload(**records[0].workload)
    return [
        Attribution(
            rung=row.rung,
            in_order=Gain(
                ratio=row.gain,
                verdict=row.verdict,
                absent=next((status_of(r) for r in (row, before) if r.status != "ok"), "not measured"),
                failed_check="" if row.status == "ok" else status_of(row),
            ),
            alone=_gain(board, records, _ablated(toggles, place, "alone", workload), toggles[0]),
            last=_gain(board, records, toggles[-1], _ablated(toggles, place, "left_out", workload)),
        )
        for place, (before, row) in enumerate(pairwise(rows), start=1)
    ]


def ratios(board: Scoreboard) -> list[Estimate]:
    """All ratios that the report shows: speed-ups, gains, A/A controls, and changes alone and left out."""
    rows = board.rows[1:]
    shown = [*(row.speedup for row in rows), *(row.gain for row in rows), board.control, board.last_control]
    shown += [gain.ratio for rung in attribution(board) for gain in rung.gains]
    return [ratio for ratio in shown if ratio]


def _ablated(rungs: Sequence[Toggles], place: int, kind: Kind, workload: Workload) -> Toggles | None:
    """The toggles of an ablation; None where steps of the workload's size cannot be taken with them."""
    try:
        return ablated(rungs, place, kind, workload)
    except ValueError:
        return None


def _gain(
    board: Scoreboard, records: Sequence[Record], toggles: Toggles | None, over: Toggles | None
) -> Gain:
    if toggles is None or over is None:
        return Gain(absent="other steps")
    if toggles == over:
        return Gain(absent="set again later")
    with_change, without_change = _with(records, toggles), _with(records, over)
    first = board.records.rungs_of_rounds[0]
    is_first = over == toggles_of(first)
    reference = board.records.first_tps_by_round(first) if is_first else tps_by_round(without_change)
    ratio = paired_ratio(tps_by_round(with_change), reference)
    if not ratio:
        failed = [record.status for record in (*with_change, *without_change) if record.status != "ok"]
        return Gain(absent=status_word(failed[-1]) if failed else "not measured")
    # What the change was added to may itself be broken; compared with itself, it is never without effect.
    for rung in (with_change, without_change):
        status, _ = check_claims(rung, first, without_change, board.records.parity_reference(rung))
        if status != "ok":
            return Gain(ratio=ratio, failed_check=status_word(status))
    return Gain(ratio=ratio, verdict=verdict(ratio, board.delta))


def _with(records: Sequence[Record], toggles: Toggles) -> list[Record]:
    """The processes that ran with exactly these toggles, of one kind so that each round counts once."""
    same = [record for record in records if toggles_of([record]) == toggles]
    return [r for r in same if (r.kind, r.rung_index) == (same[0].kind, same[0].rung_index)]

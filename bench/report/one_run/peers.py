"""Our fastest rung beside the other trainers of its ladder, measured in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.row import memory_ratio
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.compare import RANKED
from bench.analysis.several_runs.rungs import RungView, fastest_rung, name_with_caveats, speed_ratio
from bench.format import floor, gib, judged, listed, times
from bench.report.table import Column, Table
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, verdict

NAMED = 6
"""Peers that a sentence names; the table has all of them."""


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """One peer compared with our fastest rung; None is what was not measured or does not compare."""

    peer: RungView
    ratio: Estimate | None
    """Speed-up of ours over the peer, paired within rounds."""
    verdict: Verdict | None
    """Verdict on the ratio; None where our rung has a caveat, too."""
    memory: float | None
    """Peak memory of ours over the peer's."""


def peer_results(board: Scoreboard) -> tuple[RungView | None, list[PeerResult]]:
    """Our fastest rung, and the comparison with each external one."""
    ours = fastest_rung(board)
    results, claimed = [], ours is not None and not ours.row.caveats
    for peer in (RungView(board=board, row=row) for row in board.rows if row.external):
        ratio = speed_ratio(ours, peer) if ours else None
        results.append(
            PeerResult(
                peer=peer,
                ratio=ratio,
                verdict=verdict(ratio, board.delta) if ratio and claimed else None,
                memory=_memory_over(ours, peer) if ours else None,
            )
        )
    return ours, results


def _memory_over(ours: RungView, peer: RungView) -> float | None:
    """Ratio of the whole GPU's memory, which is measured alike, where both are known; else of the peaks."""
    if peer.row.status not in RANKED:
        return None
    if ours.gpu_memory_bytes and peer.gpu_memory_bytes:
        return ours.gpu_memory_bytes / peer.gpu_memory_bytes
    return memory_ratio(ours.row, peer.row)


def peers(board: Scoreboard) -> Table | None:
    """A row for each external rung; None where the ladder has none."""
    ours, results = peer_results(board)
    if not results:
        return None
    columns: list[Column[PeerResult]] = [
        Column("Rung", lambda result: result.peer.row.rung, words=True),
        Column("Peer", lambda result: result.peer.row.trainer, words=True),
        Column("TPS", lambda result: result.peer.tps_cell),
        Column("Tokens per step", lambda result: result.peer.row.tokens_per_step, "{:,}".format, drop=2),
        Column("Ours over it", lambda result: judged(result.ratio, result.verdict)),
        Column("MFU (bf16)", lambda result: result.peer.mfu_cell, drop=1),
        Column("Peak memory (GiB)", lambda result: result.peer.row.peak_memory_bytes, gib),
        Column("Whole GPU (GiB)", lambda result: result.peer.gpu_memory_bytes, gib, drop=4),
        Column("Memory, ours over its", lambda result: result.memory, times),
        Column("Status", lambda result: result.peer.status_cell, words=True, drop=3),
    ]
    return Table(
        title=f"Against peers: {board.title}",
        columns=columns,
        rows=results,
        notes=_notes(ours, results, board),
    )


def _notes(ours: RungView | None, results: Sequence[PeerResult], board: Scoreboard) -> list[str]:
    if ours is None:
        return ["No comparison: no rung of ours is ok and of equal maths."]
    size = ours.row.tokens_per_step
    notes = [
        "External rungs are other trainers (docs/peers.md), timed by the arrival of their progress lines. "
        "They start from other weights and text, so no losses are compared, and no rung is "
        "compared with one as the rung before it.",
        f"Ours: {name_with_caveats(ours)}, {ours.tps_cell} tokens per second, {size or 0:,} tokens per step. "
        "Ratios of tokens per second are paired within rounds, ± is the 95 % t interval; memory only where "
        "it was found out the same way. After its first step ours gave back what only compilation needed; "
        "peers keep that.",
    ]
    if ours.gpu_memory_bytes:
        notes.append(
            f"Whole GPU: what it had in use beyond what it had before, context and unused reserve included; "
            f"ours {gib(ours.gpu_memory_bytes)} GiB. Where it is known, memory is compared by it."
        )
    if any(result.peer.row.tokens_per_step not in (None, size) for result in results):
        notes.append(
            "Tokens per step differ: larger steps pay for their optimiser less often; ratios include that."
        )
    return [*notes, _claim(ours, results, board)]


def _claim(ours: RungView, results: Sequence[PeerResult], board: Scoreboard) -> str:
    """How ours does against the peers that this run measured; of any other peer it says nothing."""
    measured = [result for result in results if result.ratio]
    if not measured:
        return "No peer was measured."
    if ours.row.caveats:
        return "No claim: ours has a caveat, which the scoreboard's warnings state."
    if any(result.verdict == "not replicated" for result in measured):
        return f"Not replicated: whether ours is faster needs {LEAST_ROUNDS} rounds or more."
    if board.delta is None:
        control = f"without an A/A control of {LEAST_ROUNDS} rounds"
        return f"No claim: {control} a lead may be noise."
    groups = {
        "faster than": [result for result in measured if result.verdict == "faster"],
        "not clearly faster than": [r for r in measured if r.verdict not in ("faster", "slower")],
        "slower than": [result for result in measured if result.verdict == "slower"],
    }
    count = f"{f'{len(measured)} peers' if len(measured) > 1 else 'one peer'} measured in this run"
    if all(result.verdict == "faster" for result in measured):
        named = f" ({_named(measured)})" if len(measured) <= NAMED else ""
        claim = f"Ours is faster than {'each of ' * (len(measured) > 1)}the {count}{named}"
    else:
        claim = f"Of the {count}, ours is "
        claim += "; ".join(f"{how} {_named(group)}" for how, group in groups.items() if group)
    claim += f". Faster: the whole interval lies beyond the noise floor of {floor(board.delta)}."
    control = board.rows[0]
    control_format = control.toggles.product_format()
    if not board.last_control and control_format != ours.row.toggles.product_format():
        claim += f" That is the noise of {control.rung}, in {control_format}; other formats may vary more, "
        claim += "which their intervals include."
    if missing := [result for result in results if not result.ratio]:
        claim += f" Not measured, so not compared: {_named(missing)}."
    if board.has_gaps or any(record.chosen for record in board.records):
        claim += " Not all rungs of the ladder were asked for; peers among the others are not compared."
    return claim


def _named(results: Sequence[PeerResult]) -> str:
    return listed([result.peer.row.rung for result in results])

"""Runs side by side, as a table for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.compare import Comparison, Pair, Side, same_run
from bench.analysis.row import Row, status_of
from bench.format import DASH, gib, number, percent, plain, ratio, with_interval
from bench.report.table import Sheet


def sheet(comparisons: Sequence[Comparison]) -> Sheet:
    """One table of all sides, for each rung that the first has a partner for; what differs stands before it."""
    first = comparisons[0].first
    every = [first, *(comparison.other for comparison in comparisons)]
    head = ["Rung", f"{first.letter} TPS", f"{first.letter} MFU", f"{first.letter} memory (GiB)"]
    for side in every[1:]:
        over = f"{side.letter} over {first.letter}"
        head += [f"{side.letter} TPS", f"{side.letter} MFU", over, f"Memory, {over}"]
    rows = []
    for row in first.rows:
        pairs = [next((pair for pair in each.pairs if pair.first is row), None) for each in comparisons]
        if any(pairs):
            names = dict.fromkeys([row.rung, *(pair.other.rung for pair in pairs if pair)])
            cells = [_tps(row), percent(row.mfu), gib(row.peak_memory_bytes)]
            rows.append([" / ".join(map(plain, names)), *cells, *(cell for pair in pairs for cell in _cells(pair))])
    before = [_legend(side) for side in every]
    for each in comparisons:
        none = (
            f"Nothing of machine, software or task is known to differ between {first.letter} and {each.other.letter}."
        )
        before += each.differences or [none]
    title = dict.fromkeys(f"{side.board.ladder} on {side.board.environment.machine}" for side in every)
    return Sheet(
        title=" against ".join(title),
        head=head,
        rows=rows,
        words=frozenset({0}),
        first=before,
        notes=_notes(comparisons),
    )


def _legend(side: Side) -> str:
    board = side.board
    commit = f", commit {board.environment.commit[:12]}" if board.environment.commit else ""
    rounds = f"{board.rounds} round{'s' if board.rounds > 1 else ''}"
    of = f", rung {plain(side.rung)}" if side.rung else ""
    return f"{side.letter}: {board.source}{of}: {board.environment.machine}, {rounds} begun {board.begun[:16]}{commit}"


def _tps(row: Row) -> str:
    return with_interval(number(row.tps.value), row.tps) if row.tps else status_of(row)


def _cells(pair: Pair | None) -> list[str]:
    if pair is None:
        return [DASH, DASH, DASH, DASH]
    over = f"{ratio(pair.tps)}, {pair.verdict}" if pair.tps else f"not ranked: {pair.flaw}" if pair.flaw else DASH
    memory = (
        with_interval(f"{pair.memory.value:.3f}x", pair.memory)
        if pair.memory
        else "not comparable"
        if pair.memory_flaw
        else DASH
    )
    return [_tps(pair.other), percent(pair.other.mfu), over, memory]


def _notes(comparisons: Sequence[Comparison]) -> list[str]:
    sides = [comparisons[0].first, *(each.other for each in comparisons)]
    floors = {
        f"±{side.board.delta:.1%} in {side.letter}" if side.board.delta is not None else f"not known in {side.letter}"
        for side in sides
    }
    lines = ["± is the 95 % t interval."]
    if any(same_run(each.first, each.other) for each in comparisons):
        lines.append("Ratios within one run are paired within rounds.")
    if not all(same_run(each.first, each.other) for each in comparisons):
        lines.append(
            "Ratios between runs are of means over rounds, with Welch's interval. They know how much rounds of one "
            "run vary, not what changed on a machine between two: measure both close together."
        )
    lines.append(f"Noise floor: {', '.join(sorted(floors, key=lambda floor: floor[-1]))}; verdicts take the larger.")
    lines += [line for each in comparisons for line in each.alone]
    for each in comparisons:
        for pair in each.pairs:
            name = plain(pair.first.rung)
            if pair.memory_flaw:
                lines.append(
                    f"{name}: peak memory was found out in two ways, which do not compare: {pair.memory_flaw}."
                )
            if pair.maths_flaw:
                lines.append(f"Warning: {name}: its speeds are of unlike maths: {pair.maths_flaw}.")
            if pair.loss_flaw:
                lines.append(f"Warning: {name}: {each.other.letter} trains otherwise: {pair.loss_flaw}.")
    return lines

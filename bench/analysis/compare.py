"""Runs side by side: rungs paired by what they switch on, how many times as fast, and what else differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from bench.analysis.claim_checks import diverged, other_loss
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import by_round, measured, tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_named, names
from bench.format import DASH, GIB, letter, listed, plain
from bench.records.machine import differences
from bench.records.record import Record, RecordError
from bench.stats import Estimate, Verdict, independent_ratio, paired_ratio, verdict
from gpt2.config.toggles import Toggles

GOOD = ("ok", "inert", "external")
"""Statuses of rungs whose speed means what it says."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run, or one rung of it."""

    letter: str
    """By which tables call it."""
    board: Scoreboard
    rung: str | None = None
    """The only one of interest."""

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.board.rows if self.rung in (None, row.rung)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A rung of the first side, and the one of another that it is held to."""

    first: Row
    other: Row
    tps: Estimate | None
    """How many times as fast the other is."""
    verdict: Verdict | None
    memory: Estimate | None
    """How many times the memory it needs."""
    flaw: str | None
    """Why the two speeds do not rank."""
    memory_flaw: str | None
    loss_flaw: str | None
    """How the other trains otherwise than number formats explain."""
    maths_flaw: str | None
    """Where two rungs are a pair by name: how their maths is unlike, so that more speed is no gain."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One side over the first."""

    first: Side
    other: Side
    differences: tuple[str, ...]
    """Of machine, software and task, torch first."""
    pairs: tuple[Pair, ...]
    alone: tuple[str, ...]
    """Rungs that only one side has: "only in A: ..."."""


def sides(named: Sequence[str], warnings: list[str] | None = None) -> list[list[Side]]:
    """For each ladder that all of `named` have, the sides; a name is FILE, FOLDER or either with :RUNG.

    warnings: takes those about what was left out. Raises RecordError where there is nothing to compare.
    """
    found = [load_named(name, warnings) for name in named]
    if any(rung for _, _, rung in found) or all(len(boards) == 1 for _, boards, _ in found):
        for path, boards, rung in found:
            if len(boards) > 1:
                raise RecordError(
                    f"{path}: holds {len(boards)} runs, {names(boards)}; name one file, for {rung!r}"
                )
        return [[Side(letter=letter(n), board=b[0], rung=r) for n, (_, b, r) in enumerate(found)]]
    tasks: list[dict[tuple[str, str], Scoreboard]] = []
    for path, boards, _ in found:
        by_task: dict[tuple[str, str], Scoreboard] = {}
        for board in boards:
            if by_task.setdefault(_task(board), board) is not board:
                raise RecordError(
                    f"{path}: holds runs of {board.ladder} on several machines; name a file or a folder"
                )
        tasks.append(by_task)
    common = [task for task in tasks[0] if all(task in other for other in tasks)]
    if not common:
        lists = "; ".join(f"{path} has {names(boards)}" for path, boards, _ in found)
        raise RecordError(f"no ladder is in all of them: {lists}; name two files to compare unlike ladders")
    return [[Side(letter=letter(n), board=each[task]) for n, each in enumerate(tasks)] for task in common]


def _task(board: Scoreboard) -> tuple[str, str]:
    return board.ladder, str(board.records[0].workload["model"])


def compare(first: Side, other: Side) -> Comparison:
    """Pair the rungs of two sides; two named rungs are a pair, whatever they switch on."""
    mine, theirs = first.rows, list(other.rows)
    pairs = []
    if first.rung and other.rung:
        pairs.append((mine.pop(), theirs.pop()))
    for row in list(mine):
        alike = [each for each in theirs if _what(each) == _what(row)]
        if alike:
            match = next((each for each in alike if each.rung == row.rung), alike[0])
            pairs.append((row, match))
            mine.remove(row)
            theirs.remove(match)
    alone = [
        f"Only in {side.letter}: {listed([row.rung for row in rows])}."
        for side, rows in ((first, mine), (other, theirs))
        if rows
    ]
    return Comparison(
        first=first,
        other=other,
        differences=tuple(_differences(first, other)),
        pairs=tuple(_pair(first, a, other, b) for a, b in pairs),
        alone=tuple(alone),
    )


def _what(row: Row) -> tuple[object, ...]:
    """By which rungs are paired: what they switch on. That another trainer was edited, only its rung's name
    tells.
    """
    return (
        (row.external.peer, row.external.command, row.toggles, row.rung) if row.external else (row.toggles,)
    )


def _pair(first: Side, a: Row, other: Side, b: Row) -> Pair:
    one, two = first.board.records_of(a), other.board.records_of(b)
    flaw, memory_flaw = _unlike(first, a, other, b), None
    tps = memory = None
    if not flaw:
        tps = _ratio(first, tps_by_round(one), other, tps_by_round(two))
    methods = (a.peak_memory_method, b.peak_memory_method)
    if a.peak_memory_bytes and b.peak_memory_bytes:
        if methods[0] == methods[1]:
            memory = _ratio(first, _memory(one), other, _memory(two))
        else:
            memory_flaw = f"{methods[1]} against {methods[0]}"
    deltas = [board.delta for board in (first.board, other.board)]
    delta = None if None in deltas else max(each for each in deltas if each is not None)
    return Pair(
        first=a,
        other=b,
        tps=tps,
        verdict=verdict(tps, delta) if tps else None,
        memory=memory,
        flaw=flaw,
        memory_flaw=memory_flaw,
        loss_flaw=_loss_flaw(first, one, other, two),
        maths_flaw=None
        if None in (a.maths, b.maths) or a.maths == b.maths
        else f"{b.maths} against {a.maths}",
    )


def same_run(first: Side, other: Side) -> bool:
    """Whether their rounds are the same ones."""
    return first.board.same_run(other.board)


def _ratio(
    first: Side, mine: Mapping[tuple[int, str], float], other: Side, theirs: Mapping[tuple[int, str], float]
) -> Estimate | None:
    """How many times the first side's figures the other's are, both by round: paired within one run."""
    if same_run(first, other):
        return paired_ratio(theirs, mine)
    return independent_ratio([*theirs.values()], [*mine.values()])


def _memory(rung: Sequence[Record]) -> dict[tuple[int, str], float]:
    return by_round(rung, lambda measurement: float(measurement.peak_memory_bytes or 0) or None)


def _unlike(first: Side, a: Row, other: Side, b: Row) -> str | None:
    """Why two speeds do not rank."""
    tasks = first.board.records[0].workload, other.board.records[0].workload
    for key in ("model", "seq_len"):
        if tasks[0][key] != tasks[1][key]:
            return f"another task: {key} {tasks[1][key]} against {tasks[0][key]}"
    for side, row in ((first, a), (other, b)):
        if row.status not in GOOD:
            return f"{status_of(row)} in {side.letter}"
    return None


def _loss_flaw(first: Side, one: Sequence[Record], other: Side, two: Sequence[Record]) -> str | None:
    """Only where both had to compute the same."""
    mine, theirs = measured(one), measured(two)
    alike = ("model", "data", "seq_len", "seed", "lr")
    if one[0].external or two[0].external:
        return None
    if not mine or not theirs or mine.tokens_per_step != theirs.tokens_per_step:
        return None
    if (
        any(one[0].workload[key] != two[0].workload[key] for key in alike)
        or one[0].data_sha256 != two[0].data_sha256
    ):
        return None
    flaw = other_loss(two, one)
    for side, records in ((first, one), (other, two)):
        if flaw and (since := diverged(records)):
            return f"{side.letter} diverged: {since}"
    return f"it differs in {flaw}" if flaw else None


ROUNDS = ("repeats", "until")


def _own(records: Sequence[Record]) -> Record:
    """The last one of ours that read the text: other trainers have texts of their own, and what failed none."""
    ours = [record for record in records if not record.external]
    return next((record for record in reversed(ours) if record.data_sha256), (ours or records)[-1])


def _differences(first: Side, other: Side) -> Iterator[str]:
    """What is not the same on both sides, a line each: torch, the machine, what is measured, and how."""

    def line(what: str, was: object, now: object) -> str:
        return f"{what}: {_shown(was)} in {first.letter}, {_shown(now)} in {other.letter}"

    ours, theirs = first.board.environment, other.board.environment
    same_device = first.rows[-1].toggles.device == other.rows[-1].toggles.device
    found = list(differences(ours, theirs, same_device=same_device))
    for what, was, now in sorted(found, key=lambda difference: difference[0] != "torch"):
        yield line(what, was, now)
    one, two = (_own(side.board.records) for side in (first, other))
    for name, was, now in (
        ("workload", one.workload, two.workload),
        ("protocol", one.protocol, two.protocol),
    ):
        for key in {**was, **now}:
            if was.get(key) != now.get(key) and key not in ROUNDS:
                yield line(f"{name}.{key}", was.get(key), now.get(key))
    if one.data_sha256 and two.data_sha256 and one.data_sha256 != two.data_sha256:
        yield line("the text (sha256)", one.data_sha256[:12], two.data_sha256[:12])
    if first.rung and other.rung:
        a, b = first.rows[0].toggles, other.rows[0].toggles
        for toggle in fields(Toggles):
            if getattr(a, toggle.name) != getattr(b, toggle.name):
                yield line(f"toggles.{toggle.name}", getattr(a, toggle.name), getattr(b, toggle.name))


def _shown(value: object) -> str:
    if isinstance(value, int) and value >= GIB:
        return f"{value / GIB:.1f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in sorted(value.items())) or "nothing"
    return DASH if value is None else plain(str(value))

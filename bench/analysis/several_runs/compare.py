"""Runs side by side: rungs paired by what they switch on, their ratios, what differs, and a gate for CI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.analysis.claim_checks import divergence, losses_differ
from bench.analysis.row import NOT_CARRIED, Row, status_of
from bench.analysis.run_records import by_round, measured, tps_by_round, varying
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_named, run_names
from bench.errors import BenchError
from bench.format import DASH, GIB, letter, listed, plain, times
from bench.records.machine import differences
from bench.records.record import Record, RecordError
from bench.stats import Estimate, Verdict, independent_ratio, paired_ratio, verdict

RANKED = ("ok", "inert", "external")
"""Statuses of rungs whose speed may be compared."""
SAME_TASK = ("model", "data", "seq_len", "seed", "lr")
"""Keys of a workload that must be equal for two rungs' losses to compare."""
ROUNDS = ("repeats", "until")
"""Keys of a protocol that tell how many rounds there are; they may differ."""
CONDITION = re.compile(r"\s*(tps|memory)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One run of a comparison, or one rung of it."""

    letter: str
    """Its name in tables."""
    board: Scoreboard
    rung: str | None = None
    """The only rung to compare; None means all."""

    @property
    def rows(self) -> list[Row]:
        return [row for row in self.board.rows if self.rung in (None, row.rung)]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A rung of the first side and the rung of another side that is compared with it."""

    first: Row
    other: Row
    tps: Estimate | None
    """Tokens per second of the other over the first."""
    verdict: Verdict | None
    memory: Estimate | None
    """Peak memory of the other over the first."""
    not_ranked: str | None
    """Why the two speeds do not compare."""
    memory_not_ranked: str | None
    """Why the two peaks of memory do not compare."""
    loss_differs: str | None
    """How the losses differ by more than number formats explain."""
    maths_differ: str | None
    """How the maths of two rungs paired by name differ, so that more speed is no gain."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One side compared with the first."""

    first: Side
    other: Side
    differences: tuple[str, ...]
    """Lines about machine, software and task, torch first."""
    pairs: tuple[Pair, ...]
    fastest: Pair | None
    """The fastest rung of each side where they differ in what they switch on, and both rank.

    None where a rung is named.
    """
    unpaired: tuple[str, ...]
    """Lines about rungs without a partner: those that both sides name, and those of one side alone."""


def sides(named: Sequence[str], warnings: list[str] | None = None) -> list[list[Side]]:
    """Load the sides to compare, a list for each ladder that all names have.

    named: FILE, FOLDER, or either with :RUNG. warnings: takes those about files that were left out. Raises
    RecordError where there is nothing to compare.
    """
    loaded = [load_named(name, warnings) for name in named]
    if len({(Path(path).resolve(), rung) for path, _, rung in loaded}) < len(loaded):
        raise RecordError(f"{listed(named)} are not all different runs; name each once")
    if any(rung for _, _, rung in loaded) or all(len(boards) == 1 for _, boards, _ in loaded):
        for path, boards, rung in loaded:
            if len(boards) > 1:
                holds = f"holds {len(boards)} runs, {run_names(boards)}"
                raise RecordError(f"{path}: {holds}; name one file{f', for {rung!r}' if rung else ''}")
        return [
            [Side(letter=letter(n), board=boards[0], rung=rung) for n, (_, boards, rung) in enumerate(loaded)]
        ]
    by_task: list[dict[tuple[str, str], Scoreboard]] = []
    for path, boards, _ in loaded:
        tasks: dict[tuple[str, str], Scoreboard] = {}
        for board in boards:
            if tasks.setdefault((board.ladder, board.workload["model"]), board) is not board:
                holds = f"holds several runs of {board.ladder}, each in a folder of its own"
                raise RecordError(f"{path}: {holds}; name a file or a folder")
        by_task.append(tasks)
    common = [task for task in by_task[0] if all(task in tasks for tasks in by_task)]
    if not common:
        lists = "; ".join(f"{path} has {run_names(boards)}" for path, boards, _ in loaded)
        raise RecordError(f"no ladder is in all of them: {lists}; name two files to compare unlike ladders")
    for n, tasks in enumerate(by_task):
        if alone := [f"{ladder} ({model})" for ladder, model in tasks if (ladder, model) not in common]:
            warnings = [] if warnings is None else warnings
            warnings.append(f"only in {letter(n)}, and not compared: {listed(alone)}")
    return [[Side(letter=letter(n), board=tasks[task]) for n, tasks in enumerate(by_task)] for task in common]


def compare(first: Side, other: Side) -> Comparison:
    """Pair the rungs of two sides; two rungs that were named are a pair, whatever they switch on."""
    first_rows, other_rows = first.rows, other.rows
    pairs = []
    if first.rung and other.rung:
        pairs.append((first_rows.pop(), other_rows.pop()))
    for row in list(first_rows):
        if alike := [candidate for candidate in other_rows if _setup(candidate) == _setup(row)]:
            match = next((candidate for candidate in alike if candidate.rung == row.rung), alike[0])
            pairs.append((row, match))
            first_rows.remove(row)
            other_rows.remove(match)
    return Comparison(
        first=first,
        other=other,
        differences=tuple(_differences(first, other)),
        pairs=tuple(_pair(first, a, other, b) for a, b in pairs),
        fastest=_fastest(first, other),
        unpaired=tuple(_unpaired(first, first_rows, other, other_rows)),
    )


def _fastest(first: Side, other: Side) -> Pair | None:
    a, b = first.board.fastest, other.board.fastest
    if first.rung or other.rung or a is None or b is None or _setup(a) == _setup(b):
        return None
    pair = _pair(first, a, other, b)
    return None if pair.not_ranked else pair


def _unpaired(first: Side, a: Sequence[Row], other: Side, b: Sequence[Row]) -> Iterator[str]:
    """What became of the rungs that are no pair; climbs that chose otherwise have many of equal name."""
    if first.rung or other.rung:
        return
    names = [row.rung for row in a], [row.rung for row in b]
    if common := [name for name in names[0] if name in names[1]]:
        both = f"{first.letter} and {other.letter}"
        yield f"Not compared, as their settings differ between {both}: {listed(common)}."
    for side, own in ((first, names[0]), (other, names[1])):
        if alone := [name for name in own if name not in common]:
            yield f"Only in {side.letter}: {listed(alone)}."


def _setup(row: Row) -> tuple[object, ...]:
    """What must be equal for two rungs to be a pair: the toggles, or the same other trainer."""
    if row.external:  # its name too: only that tells that the trainer was edited
        return row.external.peer, row.external.command, row.toggles, row.rung
    return (row.toggles,)


def _pair(first: Side, a: Row, other: Side, b: Row) -> Pair:
    a_records, b_records = first.board.records_of(a), other.board.records_of(b)
    not_ranked = _not_ranked(first, a, other, b)
    tps = memory = memory_not_ranked = None
    if not not_ranked:
        tps = _ratio(first, tps_by_round(a_records), other, tps_by_round(b_records))
    if a.peak_memory_bytes and b.peak_memory_bytes:
        if a.peak_memory_method == b.peak_memory_method:
            memory = _ratio(first, _memory(a_records), other, _memory(b_records))
        else:
            memory_not_ranked = f"{b.peak_memory_method} against {a.peak_memory_method}"
    deltas = first.board.delta, other.board.delta
    delta = None if deltas[0] is None or deltas[1] is None else max(deltas[0], deltas[1])
    unlike_maths = a.maths is not None and b.maths is not None and a.maths != b.maths
    return Pair(
        first=a,
        other=b,
        tps=tps,
        verdict=verdict(tps, delta) if tps else None,
        memory=memory,
        not_ranked=not_ranked,
        memory_not_ranked=memory_not_ranked,
        loss_differs=_loss_differs(first, a_records, other, b_records),
        maths_differ=f"{b.maths} against {a.maths}" if unlike_maths else None,
    )


def _ratio(
    first: Side, a: Mapping[tuple[int, str], float], other: Side, b: Mapping[tuple[int, str], float]
) -> Estimate | None:
    """The other side's figures over the first's, both by round: paired within one run."""
    if first.board.same_run(other.board):
        return paired_ratio(b, a)
    return independent_ratio([*b.values()], [*a.values()])


def _memory(rung: Sequence[Record]) -> dict[tuple[int, str], float]:
    return by_round(rung, lambda measurement: float(measurement.peak_memory_bytes or 0) or None)


def _not_ranked(first: Side, a: Row, other: Side, b: Row) -> str | None:
    """Why two speeds do not compare; None if they do."""
    a_task, b_task = first.board.workload, other.board.workload
    for key in ("model", "seq_len"):
        if a_task[key] != b_task[key]:
            return f"another task: {key} {b_task[key]} against {a_task[key]}"
    for side, row in ((first, a), (other, b)):
        if row.status == NOT_CARRIED:
            ratio = f" ({times(row.tried)})" if row.tried is not None else ""
            return f"in {side.letter} not carried by its short try{ratio}"
        if row.status not in RANKED:
            return f"in {side.letter} {status_of(row)}"
    return None


def _loss_differs(first: Side, a: Sequence[Record], other: Side, b: Sequence[Record]) -> str | None:
    """How the losses of two rungs differ, where both had to compute the same."""
    a_measured, b_measured = measured(a), measured(b)
    if a[0].external or b[0].external or not a_measured or not b_measured:
        return None
    same_task = all(a[0].workload[key] == b[0].workload[key] for key in SAME_TASK)
    same_step = a_measured.tokens_per_step == b_measured.tokens_per_step
    if not same_task or not same_step or a[0].data_sha256 != b[0].data_sha256:
        return None
    difference = losses_differ(b, a)
    for side, records in ((first, a), (other, b)):
        if difference and (since := divergence(records)):
            return f"{side.letter} diverged: {since}"
    return f"it differs in {difference}" if difference else None


def _last_own(records: Sequence[Record]) -> Record:
    """The last record of ours that read the text: other trainers read texts of their own."""
    own = [record for record in records if not record.external]
    return next((record for record in reversed(own) if record.data_sha256), (own or records)[-1])


def _differences(first: Side, other: Side) -> Iterator[str]:
    """A line for each difference: torch, the machine, what is measured, and how."""

    def line(what: str, was: object, now: object) -> str:
        return f"{what}: {_shown(was)} in {first.letter}, {_shown(now)} in {other.letter}"

    same_device = first.rows[-1].toggles.device == other.rows[-1].toggles.device
    of_machine = differences(first.board.environment, other.board.environment, same_device=same_device)
    for what, was, now in sorted(of_machine, key=lambda difference: difference[0] != "torch"):
        yield line(what, was, now)
    a, b = _last_own(first.board.records), _last_own(other.board.records)
    for name, was, now in (("workload", a.workload, b.workload), ("protocol", a.protocol, b.protocol)):
        for key in {**was, **now}:
            if was.get(key) != now.get(key) and key not in ROUNDS:
                yield line(f"{name}.{key}", was.get(key), now.get(key))
    if a.data_sha256 and b.data_sha256 and a.data_sha256 != b.data_sha256:
        yield line("the text (sha256)", a.data_sha256[:12], b.data_sha256[:12])
    if first.rung and other.rung:
        was, now = first.rows[0].toggles, other.rows[0].toggles
        for name in varying(was, now):
            yield line(f"toggles.{name}", getattr(was, name), getattr(now, name))


def _shown(value: object) -> str:
    if isinstance(value, int) and value >= GIB:
        return f"{value / GIB:.1f} GiB"
    if isinstance(value, dict):
        return ", ".join(f"{name}={entry}" for name, entry in sorted(value.items())) or "nothing"
    return DASH if value is None else plain(str(value))


# --- The gate: bench compare --fail-if


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A change of speed or memory that fails a comparison."""

    metric: str
    """tps or memory."""
    below: bool
    """Whether the ratio fails below the bound, not above it."""
    bound: float
    """Ratio of the other side over the first."""
    text: str
    """The condition as the user wrote it."""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read "tps<-5%" or "memory>10%". Raises BenchError."""
        match = CONDITION.fullmatch(text)
        if not match:
            raise BenchError(
                f"--fail-if {text!r}: write tps or memory, < or >, and a change, such as 'tps<-5%'"
            )
        if float(match[3]) <= -100:
            raise BenchError(f"--fail-if {text!r}: nothing can fall by 100 % or more")
        return cls(metric=match[1], below=match[2] == "<", bound=1 + float(match[3]) / 100, text=text.strip())

    def ratio(self, pair: Pair) -> Estimate | None:
        """The ratio of the pair that the condition is about."""
        return pair.tps if self.metric == "tps" else pair.memory

    def absent(self, pair: Pair) -> str:
        """Why there is no such ratio."""
        if self.metric == "memory" and pair.memory_not_ranked:
            return f"two ways of measuring memory, which do not compare: {pair.memory_not_ranked}"
        return "too few rounds" if self.metric == "tps" else "memory was not measured on both sides"

    def met(self, pair: Pair) -> bool | None:
        """Whether the whole interval lies beyond the bound; None where there is no interval."""
        ratio = self.ratio(pair)
        if ratio is None or ratio.half_width is None:
            return None
        return ratio.below(self.bound) if self.below else ratio.above(self.bound)

    def nearest(self, judged: Sequence[tuple[str, Pair]]) -> str:
        """The pair whose interval comes closest to lying beyond the bound, in words; empty without any."""
        ends = []
        for where, pair in judged:
            ratio = self.ratio(pair)
            if ratio and ratio.low is not None and ratio.high is not None:
                short = ratio.high / self.bound if self.below else self.bound / ratio.low
                ends.append((short, f"{where}: {_with_interval(ratio)}"))
        return min(ends)[1] if ends else ""


def _with_interval(ratio: Estimate) -> str:
    """A ratio with the ends of its interval, which the reader compares with a bound."""
    return f"{ratio.value:.3f}x (95 % interval {ratio.low:.3f}x to {ratio.high:.3f}x)"


def judge(comparisons: Sequence[Comparison], conditions: Sequence[Condition]) -> tuple[int, list[str]]:
    """Decide the exit code of bench compare --fail-if, with a line for each finding.

    A condition is confirmed where the whole interval lies beyond its bound: code 3. A pair that cannot be
    compared gives code 6. Raises BenchError where no rungs are paired.
    """
    if not any(comparison.pairs for comparison in comparisons):
        raise BenchError(
            "no rung of A has a partner that switches on the same, so --fail-if has nothing to judge"
        )
    code, lines = 0, []
    judged: list[tuple[str, Pair]] = []
    for comparison in comparisons:
        first, other = comparison.first.letter, comparison.other.letter
        for pair in comparison.pairs:
            where = f"{pair.first.rung}: {other} over {first}"
            if pair.first.external:
                lines.append(f"{where}: another trainer's, which this gate does not judge")
                continue
            if pair.not_ranked:
                status = pair.first.status  # what neither side could run, for the same reason, is no change
                if status == pair.other.status and status in ("out_of_memory", "unsupported"):
                    lines.append(f"{where}: {pair.not_ranked}, and in {first} too: no speed to judge")
                else:
                    lines.append(f"{where}: not ranked: {pair.not_ranked}")
                    code = code or 6
                continue
            if pair.maths_differ:
                lines.append(f"{where}: judged, though of unlike maths: {pair.maths_differ}")
            judged.append((where, pair))
            for condition in conditions:
                ratio = condition.ratio(pair)
                if ratio is None or ratio.half_width is None:
                    why = "too few rounds" if ratio else condition.absent(pair)
                    lines.append(f"{where}: {condition.text} cannot be told: {why}")
                elif condition.met(pair):
                    lines.append(f"{where}: {condition.text} is confirmed: {_with_interval(ratio)}")
                    code = 3
    for condition in conditions if not code else ():
        if nearest := condition.nearest(judged):
            beyond = f"{'below' if condition.below else 'above'} {condition.bound:.4g}x"
            none = f"of no rung does the whole interval lie {beyond}"
            lines.append(f"{condition.text} is not confirmed: {none}; nearest is {nearest}")
        else:
            lines.append(f"{condition.text} is not confirmed: no rung has an interval")
    return code, [plain(line) for line in lines]

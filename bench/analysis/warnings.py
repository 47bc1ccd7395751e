"""Warnings about a scoreboard's figures, a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import filterfalse

from bench.analysis.claim_checks import rounding_explains_gradients
from bench.analysis.row import status_of
from bench.analysis.run_records import group_by, measured, tps_by_round
from bench.analysis.scoreboard import Scoreboard
from bench.format import NUMBER, number
from bench.ladder.shipped import QUICK
from bench.records.record import RUNGS, Outcome, Record
from bench.stats import LOUD

BUSY = 2.0
"""Runnable processes per core before a process starts, above which something else must have been running."""
SCATTER = 1.5
"""Ratio of the fastest to the slowest round of a rung, above which a mean of them says little."""
NAMED_PROCESSES = 3
"""Processes that a warning names."""
GC_SHARE = 0.01
"""Share of the window that Python's garbage collector may take before it is worth a warning."""


def warnings(board: Scoreboard) -> list[str]:
    """Warnings of the processes, and those that only all of them together show."""
    # Of the processes that only tried a rung no figure is shown, but what disturbed them may have misled.
    records = [record for record in board.records if record.begun and record.kind != "scout"]
    fastest = board.records_of(board.fastest) if board.fastest else []
    of_fastest = {NUMBER.sub("#", line) for record in fastest for line in record.warnings}

    def weighs(line: str) -> bool:
        return not fastest or NUMBER.sub("#", line) in of_fastest

    def others(record: Record) -> list[str]:
        return [*filterfalse(weighs, record.warnings)]

    lines = [
        *_grouped(records, lambda record: [*filter(weighs, record.warnings)]),
        *ended_early(board),
        *_of_run(board, records),
        # As of an allocator by which steps pay for page faults.
        *(f"not in the fastest rung: {line}" for line in _grouped(records, others)),
    ]
    told = disturbed(board)
    if any(record.disturbed for record in records):
        return [*told, *lines]
    return [*lines, *(f"in tries alone, which chose the rungs: {line}" for line in told)]


def _of_run(board: Scoreboard, records: Sequence[Record]) -> Iterator[str]:
    """What a run's rungs and its processes show. records: without those of tries."""
    ran = [record for record in records if record.kind != "ceiling" and record.status != "interrupted"]
    if len({(record.repetition, record.session) for record in ran}) > board.rounds:
        yield (
            "the run was resumed within a round: a round that was cut in two is paired within its parts "
            "only, its second part with the control as first rung"
        )
    yield from beyond_peak(board)
    for row in board.rows:
        yield from (f"{row.rung}: {caveat}" for caveat in row.caveats)
    for row in board.rows:
        if row.expect and row.tps and row.status == "ok":
            yield f"{row.rung}: {status_of(row)}"
    for device, ceiling in board.ceilings.items():
        if max(ceiling.rates) > (1 + 2 * LOUD) * min(ceiling.rates):
            yield f"the limit is rough: the measured ceiling of this {device} drifted within the run"
    if board.has_gaps:
        yield "not all rungs of the ladder were run; a row's changes are those from the row above it"
    for rung in board.records.rungs_of_rounds:
        speeds = tps_by_round(rung).values()
        low, high = min(speeds, default=0.0), max(speeds, default=0.0)
        if high > SCATTER * low:
            apart = f"{high / low:.1f}x apart, from {number(low)} to {number(high)} tokens/s"
            yield f"{rung[0].rung}: its rounds lie {apart}: something else ran meanwhile"
    load = max((record.environment.load_average or 0.0 for record in records), default=0.0)
    if load > BUSY * board.environment.cpu_cores:
        yield f"the machine was busy: load average up to {load:.1f} on {board.environment.cpu_cores} cores"
    for record in records:
        yield from _of_process(record)
    if any(record.environment.dirty for record in records):
        yield f"measured on a changed checkout of commit {board.environment.commit}"
    for device, rate in board.beaten.items():
        told = f"a matmul ran at {rate / 1e12:.3g} TFLOP/s, above the peak derived for this {device}"
        yield f"no MFU is shown: {told}, so that this peak is wrong; no speed or limit depends on it"


def _of_process(record: Record) -> Iterator[str]:
    """What the measurement of one process shows."""
    if not (m := record.measurement):
        return
    where = f"{record.rung}, round {record.repetition}"
    if m.gc_seconds and m.gc_seconds > GC_SHARE * sum(m.block_seconds):
        share = m.gc_seconds / sum(m.block_seconds)
        yield f"{where}: Python's garbage collector took {share:.1%} of the window"
    if m.gradient_difference and rounding_explains_gradients(m):
        apart = f"its gradients are up to {m.gradient_difference:.1%} from those of eager code"
        both = f"both are as far from float32's, by a factor of {m.gradient_error_over_eager:.1f} at most"
        yield f"{where}: {apart}, but {both}: rounding explains it"
    if m.skipped_steps:
        skipped = f"{m.skipped_steps} of {len(m.losses)} steps, which changed no weight"
        yield f"{where}: float16 could not hold the gradients of {skipped}"
    if m.alloc_retries:
        yield f"{where}: the allocator ran out and retried {m.alloc_retries} times; use less memory"


def beyond_peak(board: Scoreboard) -> Iterator[str]:
    """The rungs that are faster than their chip's peak allows."""
    for row in board.rows:
        if row.mfu is not None and row.mfu > 1 and (m := measured(board.records_of(row))):
            peak = f"{m.peak_flops_kind} peak" if m.peak_flops_kind else "peak"
            count = "; do its lines count steps?" if row.external else ""
            yield f"{row.rung}: its speed is {row.mfu:.0%} of the {peak}, so one of the two is wrong{count}"


def ended_early(board: Scoreboard) -> list[str]:
    """Where and why a run ended early, and what to do about it."""
    if not board.interrupted:
        return []
    last = max(record.repetition for record in board.records if record.kind != "scout")
    where = f"in round {last} of {max(board.planned_rounds, last)}"
    kind = "sweep" if board.swept else "run"
    why = next((record.not_begun for record in board.records if not record.begun), None)
    go_on = f"bench {kind} with --resume runs what is missing"
    if board.records[0].ladder == QUICK:
        go_on = f"bench {QUICK} measures all anew"
    return [f"{why or f'the {kind} was interrupted {where}'}; {go_on}"]


def disturbances(record: Record | Outcome) -> list[str]:
    """Why the speed of a process may be wrong: standstills, and other programs."""
    lines = []
    if record.measurement and (still := record.measurement.stood_still):
        lines.append(f"stood still: in the window the process did, {still.text}; measure again")
    if (cores := record.other_work_cores) is not None:
        advice = "stop other programs (top shows them) and measure again"
        lines.append(f"other work: others keep {cores:.2f} cores busy; {advice}")
    return lines


def _grouped(records: Sequence[Record], of: Callable[[Record], Sequence[str]]) -> list[str]:
    """One line for warnings that differ in numbers only, which become ranges; of: those of a record."""
    warned = [(warning, place) for place, record in enumerate(records) for warning in of(record)]
    lines = []
    for alike in group_by(warned, lambda pair: NUMBER.sub("#", pair[0])).values():
        those = [records[place] for place in dict.fromkeys(place for _, place in alike)]
        which = _named(those) if len(those) < min(len(records), NAMED_PROCESSES + 1) else ""
        among = f" (in {len(those)} of {len(records)} processes{which})" if len(records) > 1 else ""
        lines.append(f"{_range([warning for warning, _ in alike])}{among}")
    return lines


def _named(records: Sequence[Record]) -> str:
    """Rungs and rounds of processes, in words."""

    def name(record: Record) -> str:
        kind = {"scout": "tried"}.get(record.kind, record.kind.replace("_", " "))
        return record.rung if record.kind in (*RUNGS, "ceiling") else f"{record.rung} ({kind})"

    rungs = []
    for rung, rounds in group_by(records, name).items():
        numbers = ", ".join(str(record.repetition) for record in rounds)
        rungs.append(f"{rung} in round{'s' if len(rounds) > 1 else ''} {numbers}")
    return f": {'; '.join(rungs)}"


def disturbed(board: Scoreboard) -> list[str]:
    """A line for each kind of disturbance of a run's processes."""
    records = [record for record in board.records if record.begun]
    return _grouped(records, disturbances)


def _range(alike: Sequence[str]) -> str:
    """Texts that differ in numbers only, as one text with ranges."""
    figures = zip(*(NUMBER.findall(text) for text in alike), strict=True)
    ends = ((min(numbers, key=float), max(numbers, key=float)) for numbers in figures)
    ranges = (low if low == high else f"{low} to {high}" for low, high in ends)
    return NUMBER.sub(lambda match: next(ranges), alike[0])

"""Tables of runs held to one another: rungs of two or more side by side, and all rungs chained from one
baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.analysis.compare import Comparison, Pair, Side
from bench.analysis.compare import same_run as same_round
from bench.analysis.cross_run import Chain, Link
from bench.analysis.row import Row, status_of
from bench.analysis.run_records import measured
from bench.analysis.rung_view import Entry, same_run
from bench.analysis.scoreboard import Scoreboard
from bench.format import (
    DASH,
    gib,
    judged,
    letter,
    listed,
    percent,
    plain,
    ratio,
    times,
    tokens_per_second,
    training_time,
    with_interval,
)
from bench.report.cross_run import derived_notes, ranks_notes
from bench.report.table import Column, Table

BETWEEN_RUNS = (
    "Ratios between runs are of means over rounds, with Welch's interval. They know how much rounds of one "
    "run vary, not what changed on a machine between two: measure both close together."
)

# --- Side by side
# -------------------------------------------------------------------------------------------------


Line = tuple[Row, list[Pair | None]]
"""A rung of the first side, and its pair in each comparison, where it has one."""


def compared(comparisons: Sequence[Comparison]) -> Table:
    """One table of all sides, for each rung that the first has a partner for; what differs stands before it."""
    first = comparisons[0].first
    every = [first, *(comparison.other for comparison in comparisons)]
    columns: list[Column[Line]] = [
        Column("Rung", _names, words=True),
        Column(f"{first.letter} TPS", lambda line: _tps(line[0])),
        Column(f"{first.letter} MFU", lambda line: line[0].mfu, percent),
        Column(f"{first.letter} memory (GiB)", lambda line: line[0].peak_memory_bytes, gib),
    ]
    for place, side in enumerate(every[1:]):
        columns += _columns_of(place, side.letter, f"{side.letter} over {first.letter}")
    lines = [
        (row, [next((pair for pair in each.pairs if pair.first is row), None) for each in comparisons])
        for row in first.rows
    ]
    before = [_legend(side) for side in every]
    for each in comparisons:
        none = f"Nothing of machine, software or task is known to differ between {first.letter} and {each.other.letter}."
        before += each.differences or [none]
    title = dict.fromkeys(f"{side.board.ladder} on {side.board.environment.machine}" for side in every)
    return Table(
        title=" against ".join(title),
        columns=columns,
        rows=[line for line in lines if any(line[1])],
        first=before,
        notes=_notes(comparisons),
    )


def _names(line: Line) -> str:
    row, pairs = line
    return " / ".join(dict.fromkeys([row.rung, *(pair.other.rung for pair in pairs if pair)]))


def _columns_of(place: int, letter: str, over: str) -> list[Column[Line]]:
    """Of the side in that place among those held to the first."""
    return [
        Column(f"{letter} TPS", lambda line: (pair := line[1][place]) and _tps(pair.other)),
        Column(f"{letter} MFU", lambda line: (pair := line[1][place]) and pair.other.mfu, percent),
        Column(over, lambda line: (pair := line[1][place]) and _over(pair)),
        Column(f"Memory, {over}", lambda line: (pair := line[1][place]) and _memory_over(pair)),
    ]


def _over(pair: Pair) -> str | None:
    if pair.tps:
        return f"{ratio(pair.tps)}, {pair.verdict}"
    return f"not ranked: {pair.flaw}" if pair.flaw else None


def _memory_over(pair: Pair) -> str | None:
    if pair.memory:
        return with_interval(f"{pair.memory.value:.3f}x", pair.memory)
    return "not comparable" if pair.memory_flaw else None


def _legend(side: Side) -> str:
    board = side.board
    commit = f", commit {board.environment.commit[:12]}" if board.environment.commit else ""
    rounds = f"{board.rounds} round{'s' if board.rounds > 1 else ''}"
    of = f", rung {side.rung}" if side.rung else ""
    return f"{side.letter}: {board.source}{of}: {board.environment.machine}, {rounds} begun {board.begun[:16]}{commit}"


def _tps(row: Row) -> str:
    return tokens_per_second(row.tps) if row.tps else status_of(row)


def _notes(comparisons: Sequence[Comparison]) -> list[str]:
    sides = [comparisons[0].first, *(each.other for each in comparisons)]
    floors = {
        f"±{side.board.delta:.1%} in {side.letter}"
        if side.board.delta is not None
        else f"not known in {side.letter}"
        for side in sides
    }
    lines = ["± is the 95 % t interval."]
    if any(same_round(each.first, each.other) for each in comparisons):
        lines.append("Ratios within one run are paired within rounds.")
    if not all(same_round(each.first, each.other) for each in comparisons):
        lines.append(BETWEEN_RUNS)
    lines.append(
        f"Noise floor: {', '.join(sorted(floors, key=lambda floor: floor[-1]))}; verdicts take the larger."
    )
    lines += [line for each in comparisons for line in each.alone]
    for each in comparisons:
        for pair in each.pairs:
            name = pair.first.rung
            if pair.memory_flaw:
                lines.append(
                    f"{name}: peak memory was found out in two ways, which do not compare: "
                    f"{pair.memory_flaw}."
                )
            if pair.maths_flaw:
                lines.append(f"Warning: {name}: its speeds are of unlike maths: {pair.maths_flaw}.")
            if pair.loss_flaw:
                lines.append(f"Warning: {name}: {each.other.letter} trains otherwise: {pair.loss_flaw}.")
    return lines


# --- All rungs of several runs, held to one baseline
# --------------------------------------------------------------


def chained(chain: Chain) -> Table:
    return Table(
        title=f"From one baseline: {len(chain.runs)} run{'s' if len(chain.runs) > 1 else ''} chained",
        columns=chain_columns(chain),
        rows=chain.links,
        first=[_baseline(chain), *_unlike(chain)],
        notes=[plain(line) for line in _chain_notes(chain)],  # none is a Method: all stand beneath it
    )


def chain_columns(chain: Chain) -> list[Column[Link]]:
    """What the chain tells of a rung; exports have of it what no scoreboard has."""
    return [
        Column("Group", lambda link: link.group, key="group", words=True, drop=11),
        Column("Setup", lambda link: link.entry.row.rung, words=True),
        Column("Run", lambda link: _letter(chain, link.entry), words=True, drop=12),
        Column("Machine", lambda link: link.entry.machine, words=True, drop=8),
        Column("Devices", lambda link: link.entry.row.toggles.world_size, drop=2),
        Column("TPS", lambda link: link.entry.tps),
        Column(
            "Over baseline",
            lambda link: link.over_baseline,
            text=lambda link: "baseline" if chain.is_baseline(link) else ratio(link.over_baseline),
            key="over_baseline",
            interval=True,
        ),
        Column(
            "Orders of magnitude",
            lambda link: link.orders,
            text=lambda link: None if chain.is_baseline(link) else _orders(link),
            key="orders_of_magnitude",
            drop=9,
        ),
        Column(
            "Over first on device",
            lambda link: "1.00x" if link.first and link.first.row is link.entry.row else link.over_first,
            ratio,
            drop=3,
        ),
        Column("Over rung before", lambda link: judged(link.over_before, link.verdict), drop=7),
        Column("MFU (bf16)", lambda link: link.entry.mfu, drop=6),
        Column("Peak memory (GiB)", lambda link: link.entry.row.peak_memory_bytes, gib, drop=5),
        Column("Memory over first", lambda link: link.memory_over_first or None, times, drop=1),
        Column("Time for 1M tokens", lambda link: _time(link, 1e6), drop=4),
        Column("Time for 10B tokens", lambda link: _time(link, 1e10), drop=10),
        Column("Status", lambda link: link.entry.status, words=True),
    ]


def _orders(link: Link) -> str | None:
    return f"{link.orders + 0.0:.2f}" if link.orders is not None else None  # never -0.00


def _time(link: Link, tokens: float) -> str | None:
    tps = link.entry.row.tps
    return training_time(tokens, tps.value) if tps and tps.value and link.entry.ranks else None


def _letter(chain: Chain, entry: Entry) -> str:
    return letter([run is entry.board for run in chain.runs].index(True))


def _baseline(chain: Chain) -> str:
    entry = chain.baseline
    elsewhere = ", the only one shown of its run" if chain.alone else ""
    model, length = entry.task
    return (
        f"Baseline: rung {entry.row.rung} of run {_letter(chain, entry)}, {entry.tps} tokens per second"
        f"{elsewhere}. All runs train {model} at T = {length}."
    )


def _unlike(chain: Chain) -> Iterator[str]:
    """What speeds depend on beside hardware and toggles, where it is not the same in all runs."""
    matters: list[tuple[str, Callable[[Scoreboard], object]]] = [
        ("torch", lambda run: run.environment.torch),
        ("the text (sha256)", _text),
    ]
    keys = dict.fromkeys(key for run in chain.runs for key in run.records[0].workload)
    matters += [
        (f"workload.{key}", lambda run, key=key: _set(run.records[0].workload.get(key))) for key in keys
    ]
    for what, of in matters:
        if said := _by_run(chain, of):
            yield f"Warning: not the same in all runs: {what}: {said}."


def _text(run: Scoreboard) -> str:
    known = next((record.data_sha256 for record in run.records if record.data_sha256), None)
    return known[:12] if known else "not known"


def _set(value: object) -> object:
    return "not set" if value is None else value


def _by_run(chain: Chain, of: Callable[[Scoreboard], object]) -> str | None:
    """What each run has, where they differ."""
    values = _where((str(of(run)), letter(place)) for place, run in enumerate(chain.runs))
    return "; ".join(f"{value} in {runs}" for value, runs in values.items()) if len(values) > 1 else None


def _where(found: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Of each value the letters of the runs that have it, as words."""
    letters: dict[str, dict[str, None]] = {}
    for value, run in found:
        letters.setdefault(value, {})[run] = None
    return {value: _and([*runs]) for value, runs in letters.items()}


def _chain_notes(chain: Chain) -> Iterator[str]:
    for place, run in enumerate(chain.runs):
        yield _chain_legend(run, letter(place))
    shown = [link.entry for link in chain.links]
    if chain.unlike:
        others = [f"{first.board.ladder} ({first.task[0]} at T = {first.task[1]})" for first in chain.unlike]
        yield f"Not in this table, for their speeds do not rank with these: {'; '.join(others)}."
    external = "External: other trainers; " if any(entry.row.external for entry in shown) else ""
    yield (
        "Hardware: the first rung on a device or machine that is new to the table (XLA on a CPU is a device "
        f"of its own); Distributed: several devices; {external}Software: all others."
    )
    yield (
        "TPS: geometric mean over rounds. Orders of magnitude: log10 of Over baseline. First on device: the "
        "first rung of the same run that ranks on that device. Ratios within one run are paired within "
        "rounds; ± is the 95 % t interval. A rung whose status is neither ok nor inert has no ratios and no "
        "times."
    )
    if other := [link.entry.row.rung for link in chain.links if link.entry.row.other_maths]:
        yield f"Warning: another training than the first rung's of its run, not a faster one: {listed(other)}."
    if not all(same_run(entry, chain.baseline) for entry in shown):
        yield BETWEEN_RUNS
    yield from ranks_notes(shown)
    yield from _mfu(chain)
    yield from derived_notes(shown)
    yield from _memory(chain)
    sizes = sorted({entry.row.tokens_per_step for entry in shown if entry.row.tokens_per_step})
    if len(sizes) > 1:
        yield f"Tokens per optimiser step: {sizes[0]:,} to {sizes[-1]:,}; what larger steps gain is in these ratios."
    yield "Times are of training alone at that TPS, without evaluation or checkpoints."


def _chain_legend(run: Scoreboard, name: str) -> str:
    rounds = f"{run.rounds} round{'s' if run.rounds > 1 else ''}"
    ended = sum(record.status != "interrupted" for record in run.records)
    processes = f"{ended} process{'es' if ended != 1 else ''}"
    source = run.source.as_posix() if run.source else DASH
    floor = f"noise floor ±{run.delta:.1%}" if run.delta is not None else "no noise floor known"
    machine = run.environment
    return (
        f"{name}: {run.ladder} on {machine.machine} ({machine.chip}), torch {machine.torch}; {processes} in "
        f"{rounds}, {floor}; from {source}."
    )


def _mfu(chain: Chain) -> Iterator[str]:
    """The numerator, and every denominator by the runs that have it."""
    measured_runs = [(measured(run.records), letter(place)) for place, run in enumerate(chain.runs)]
    formulas = _where(
        (f"{found.flops_per_token:,} FLOPs per token ({found.flops_formula})", run)
        for found, run in measured_runs
        if found
    )
    peaks = _where(
        (_peak(link.entry), _letter(chain, link.entry)) for link in chain.links if link.entry.found
    )
    if formulas:
        each = "; ".join(
            formula if len(formulas) == 1 else f"{runs} {formula}" for formula, runs in formulas.items()
        )
        yield f"MFU = {each} x TPS / the dense bfloat16 peak of all devices at work."
    if peaks:
        each = "; ".join(f"{runs} {peak}" for peak, runs in peaks.items())
        yield f"Peak of one device, which is all of a CPU: {each}."


def _peak(entry: Entry) -> str:
    peak = f"{entry.peak / 1e12:.4g} TFLOP/s" if entry.peak else "absent"
    return f"{peak} ({entry.found.peak_flops_source})" if entry.found else peak


def _memory(chain: Chain) -> Iterator[str]:
    methods = _where(
        (str(link.entry.row.peak_memory_method), _letter(chain, link.entry))
        for link in chain.links
        if link.entry.row.peak_memory_bytes is not None
    )
    if methods:
        each = "; ".join(f"{method} ({runs})" for method, runs in methods.items())
        different = "; different methods do not compare" if len(methods) > 1 else ""
        yield f"Peak memory: {each}, of the rank that needed most{different}."


def _and(letters: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(letters[:-1]), letters[-1]]))

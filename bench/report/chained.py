"""The chain of several runs as a table for a reader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from bench.analysis.cross_run import Chain, Link
from bench.analysis.run_records import measured
from bench.analysis.rung_view import Entry, same_run
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, gib, letter, listed, plain, ratio, training_time
from bench.report.notes import derived_notes, ranks_notes
from bench.report.table import Sheet

HEAD = (
    "Group",
    "Setup",
    "Run",
    "Machine",
    "Devices",
    "TPS",
    "Over baseline",
    "Orders of magnitude",
    "Over first on device",
    "Over rung before",
    "MFU (bf16)",
    "Peak memory (GiB)",
    "Memory over first",
    "Time for 1M tokens",
    "Time for 10B tokens",
    "Status",
)
DISPENSABLE = (
    "Memory over",
    "Devices",
    "Over first",
    "Time for 1M",
    "Peak memory",
    "MFU",
    "Over rung",
    "Machine",
    "Orders",
    "Time for 10B",
    "Group",
    "Run",
)
"""Columns that a narrow terminal does without, the first one first."""


def sheet(chain: Chain) -> Sheet:
    return Sheet(
        title=f"From one baseline: {len(chain.runs)} run{'s' if len(chain.runs) > 1 else ''} chained",
        head=HEAD,
        rows=[_cells(link, chain) for link in chain.links],
        words=frozenset({0, 1, 2, 3, 15}),
        first=[plain(line) for line in (_baseline(chain), *_unlike(chain))],
        notes=[plain(line) for line in _notes(chain)],
        dispensable=DISPENSABLE,
    )


def _cells(link: Link, chain: Chain) -> list[str]:
    row, base = link.entry.row, chain.is_baseline(link)
    first = link.first is not None and link.first.row is row
    speed = row.tps.value if row.tps and link.entry.ranks else None
    return [
        link.group,
        plain(row.rung),
        _letter(chain, link.entry),
        plain(link.entry.machine),
        str(row.toggles.world_size),
        link.entry.tps,
        "baseline" if base else ratio(link.over_baseline),
        f"{link.orders + 0.0:.2f}" if link.orders is not None and not base else DASH,
        "1.00x" if first else ratio(link.over_first),
        f"{ratio(link.over_before)}, {link.verdict}" if link.verdict else ratio(link.over_before),
        link.entry.mfu,
        gib(row.peak_memory_bytes),
        f"{link.memory_over_first:.2f}x" if link.memory_over_first else DASH,
        training_time(1e6, speed) if speed else DASH,
        training_time(1e10, speed) if speed else DASH,
        link.entry.status,
    ]


def _letter(chain: Chain, entry: Entry) -> str:
    return letter([run is entry.board for run in chain.runs].index(True))


def _baseline(chain: Chain) -> str:
    entry = chain.baseline
    elsewhere = ", the only one shown of its run" if chain.alone else ""
    model, length = entry.task
    return (
        f"Baseline: rung {plain(entry.row.rung)} of run {_letter(chain, entry)}, {entry.tps} tokens per second"
        f"{elsewhere}. All runs train {model} at T = {length}."
    )


def _unlike(chain: Chain) -> Iterator[str]:
    """What speeds depend on beside hardware and toggles, where it is not the same in all runs."""
    matters: list[tuple[str, Callable[[Scoreboard], object]]] = [
        ("torch", lambda run: run.environment.torch),
        ("the text (sha256)", _text),
    ]
    keys = dict.fromkeys(key for run in chain.runs for key in run.records[0].workload)
    matters += [(f"workload.{key}", lambda run, key=key: _set(run.records[0].workload.get(key))) for key in keys]
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
    values: dict[str, list[str]] = {}
    for place, run in enumerate(chain.runs):
        values.setdefault(str(of(run)), []).append(letter(place))
    each = [f"{value} in {_and(letters)}" for value, letters in values.items()]
    return "; ".join(each) if len(values) > 1 else None


def _notes(chain: Chain) -> Iterator[str]:
    for place, run in enumerate(chain.runs):
        yield _legend(run, letter(place))
    shown = [link.entry for link in chain.links]
    if chain.unlike:
        others = [f"{first.board.ladder} ({first.task[0]} at T = {first.task[1]})" for first in chain.unlike]
        yield f"Not in this table, for their speeds do not rank with these: {'; '.join(others)}."
    external = "External: other trainers; " if any(entry.row.external for entry in shown) else ""
    yield (
        "Hardware: the first rung on a device or machine that is new to the table (XLA on a CPU is a device of its "
        f"own); Distributed: several devices; {external}Software: all others."
    )
    yield (
        "TPS: geometric mean over rounds. Orders of magnitude: log10 of Over baseline. First on device: the first "
        "rung of the same run that ranks on that device. Ratios within one run are paired within rounds; ± is the 95 "
        "% t interval. A rung whose status is neither ok nor inert has no ratios and no times."
    )
    if other := [link.entry.row.rung for link in chain.links if link.entry.row.other_maths]:
        yield f"Warning: another training than the first rung's of its run, not a faster one: {listed(other)}."
    if not all(same_run(entry, chain.baseline) for entry in shown):
        yield (
            "Ratios between runs are of means over rounds, with Welch's interval. They know how much rounds of one "
            "run vary, not what changed on a machine between two: measure both close together."
        )
    yield from ranks_notes(shown)
    yield from _mfu(chain)
    yield from derived_notes(shown)
    yield from _memory(chain)
    sizes = sorted({entry.row.tokens_per_step for entry in shown if entry.row.tokens_per_step})
    if len(sizes) > 1:
        yield f"Tokens per optimiser step: {sizes[0]:,} to {sizes[-1]:,}; what larger steps gain is in these ratios."
    yield "Times are of training alone at that TPS, without evaluation or checkpoints."


def _legend(run: Scoreboard, name: str) -> str:
    rounds = f"{run.rounds} round{'s' if run.rounds > 1 else ''}"
    ended = sum(record.status != "interrupted" for record in run.records)
    processes = f"{ended} process{'es' if ended != 1 else ''}"
    source = run.source.as_posix() if run.source else DASH
    floor = f"noise floor ±{run.delta:.1%}" if run.delta is not None else "no noise floor known"
    machine = run.environment
    return (
        f"{name}: {run.ladder} on {machine.machine} ({machine.chip}), torch {machine.torch}; {processes} in {rounds}, "
        f"{floor}; from {source}."
    )


def _mfu(chain: Chain) -> Iterator[str]:
    """The numerator, and every denominator by the runs that have it."""
    formulas: dict[str, list[str]] = {}
    peaks: dict[str, list[str]] = {}
    for place, run in enumerate(chain.runs):
        found = measured(run.records)
        if found:
            formula = f"{found.flops_per_token:,} FLOPs per token ({found.flops_formula})"
            formulas.setdefault(formula, []).append(letter(place))
    for entry in (link.entry for link in chain.links):
        if entry.found:
            said = f"{entry.peak / 1e12:.4g} TFLOP/s" if entry.peak else "absent"
            peak = f"{said} ({entry.found.peak_flops_source})"
            if _letter(chain, entry) not in peaks.setdefault(peak, []):
                peaks[peak].append(_letter(chain, entry))
    if formulas:
        each = "; ".join(formula if len(formulas) == 1 else f"{_and(w)} {formula}" for formula, w in formulas.items())
        yield f"MFU = {each} x TPS / the dense bfloat16 peak of all devices at work."
    if peaks:
        each = "; ".join(f"{_and(where)} {peak}" for peak, where in peaks.items())
        yield f"Peak of one device, which is all of a CPU: {each}."


def _memory(chain: Chain) -> Iterator[str]:
    methods: dict[str, list[str]] = {}
    for link in chain.links:
        if link.entry.row.peak_memory_bytes is not None:
            where = methods.setdefault(str(link.entry.row.peak_memory_method), [])
            if _letter(chain, link.entry) not in where:
                where.append(_letter(chain, link.entry))
    if methods:
        each = "; ".join(f"{method} ({_and(where)})" for method, where in methods.items())
        different = "; different methods do not compare" if len(methods) > 1 else ""
        yield f"Peak memory: {each}, of the rank that needed most{different}."


def _and(letters: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(letters[:-1]), letters[-1]]))

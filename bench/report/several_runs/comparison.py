"""Tables of runs compared: rungs of two or more side by side, and all rungs chained from one baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from bench.analysis.row import Row, status_of
from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.compare import Comparison, Pair, Side
from bench.analysis.several_runs.rungs import Chain, ChainRow, RungView
from bench.format import (
    DASH,
    bare_ratio,
    gib,
    judged,
    judged_briefly,
    letter,
    listed,
    number,
    percent,
    plain,
    plural,
    ratio,
    speed,
    times,
    tokens_per_second,
    training_time,
    with_interval,
)
from bench.report.brief import Brief
from bench.report.one_run.tables import TOKENS
from bench.report.several_runs.tables import derived_note, ranks_note
from bench.report.table import Column, Table
from bench.report.titles import machine_title

BETWEEN_RUNS = (
    "Ratios between runs are of means over rounds, with Welch's interval. They cover how rounds of one run "
    "vary, not what changed on a machine between runs: measure both close together."
)


# --- Side by side

MatchedRow = tuple[Row, list[Pair | None]]
"""A rung of the first side, and its pair in each comparison, where it has one."""


COUNTED = {"faster": "faster", "slower": "slower", "same": "with no difference", "unclear": "unclear"}
UNJUDGED = "without a verdict"
"""How rungs of a verdict, and all others, are counted in a sentence."""
UNCLEAR = " Unclear: not wholly beyond the noise floor."


def comparison_brief(comparisons: Sequence[Comparison]) -> Brief:
    """How much faster the other sides are, the rungs that have a partner, and what else differs."""
    whole = comparison_table(comparisons)
    first, *others = _sides(comparisons)
    columns: list[Column[MatchedRow]] = [
        Column("rung", _names, words=True),
        Column(f"{first.letter} tokens/s", lambda line: speed(line[0].tps), drop=2),
    ]

    def over(pair: Pair) -> str:
        return "not ranked" if pair.not_ranked else judged_briefly(pair.tps, pair.verdict)

    for place, other in enumerate(others):
        columns += [
            Column(f"{other.letter} tokens/s", _of(place, lambda pair: speed(pair.other.tps), ""), drop=3),
            Column(f"{other.letter} over {first.letter}", _of(place, over, "")),
            Column("memory", _of(place, lambda pair: bare_ratio(pair.memory), ""), drop=1),
        ]
    notes = []
    for comparison in comparisons:
        differ = f"Not alike: {'; '.join(comparison.differences)}."
        notes.append(differ if comparison.differences else _alike(comparison.other, first))
        notes += comparison.unpaired
    unclear = any(pair.verdict == "unclear" for comparison in comparisons for pair in comparison.pairs)
    return Brief(
        answer=[_answer(comparison) for comparison in comparisons],
        about=[_legend(side) for side in (first, *others)],
        table=Table(title=whole.title, columns=columns, rows=whole.rows, instead=_not_ranked),
        whole=[replace(whole, first=[line for c in comparisons for line in c.differences])],
        warnings=[line for c in comparisons for line in _warnings(c)],
        notes=[*notes, *_method(comparisons)],
        hints=[f"±: 95 % interval.{UNCLEAR if unclear else ''}"],
    )


def _sides(comparisons: Sequence[Comparison]) -> list[Side]:
    """The first side, and all that are compared with it."""
    return [comparisons[0].first, *(comparison.other for comparison in comparisons)]


def _alike(one: Side, other: Side) -> str:
    return f"Nothing of machine, software or task is known to differ between {one.letter} and {other.letter}."


def _of(
    place: int, cell: Callable[[Pair], object], absent: str | None = None
) -> Callable[[MatchedRow], object]:
    """The value of a line by its pair at `place`; `absent` where the rung has no partner there."""
    return lambda line: cell(pair) if (pair := line[1][place]) else absent


def _not_ranked(line: MatchedRow) -> str | None:
    """Why none of a rung's speeds compares."""
    pairs = [pair for pair in line[1] if pair]
    if all(pair.not_ranked for pair in pairs):
        return f"not ranked: {'; '.join(dict.fromkeys(pair.not_ranked for pair in pairs if pair.not_ranked))}"
    return None


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One table of the rungs that have a partner; what differs between the sides stands before it."""
    first, *others = sides = _sides(comparisons)
    columns: list[Column[MatchedRow]] = [
        Column("Rung", _names, words=True),
        Column(f"{first.letter} TPS", lambda line: _tps(line[0])),
        Column(f"{first.letter} MFU", lambda line: line[0].mfu, percent),
        Column(f"{first.letter} memory (GiB)", lambda line: line[0].peak_memory_bytes, gib),
    ]
    for place, other in enumerate(others):
        over = f"{other.letter} over {first.letter}"
        columns += [
            Column(f"{other.letter} TPS", _of(place, lambda pair: _tps(pair.other))),
            Column(f"{other.letter} MFU", _of(place, lambda pair: pair.other.mfu), percent),
            Column(over, _of(place, _over)),
            Column(f"Memory, {over}", _of(place, _memory_over)),
        ]
    lines = [
        (row, [next((pair for pair in c.pairs if pair.first is row), None) for c in comparisons])
        for row in first.rows
    ]
    differences = [line for c in comparisons for line in c.differences or [_alike(first, c.other)]]
    return Table(
        title=" against ".join(dict.fromkeys(side.board.title for side in sides)),
        columns=columns,
        rows=[line for line in lines if any(line[1])],
        first=[*map(_answer, comparisons), *map(_legend, sides), *differences],
        notes=[
            "± is the 95 % t interval.",
            *_method(comparisons),
            *(line for c in comparisons for line in c.unpaired),
            *(f"Warning: {line}" for c in comparisons for line in _warnings(c)),
        ],
    )


def _answer(comparison: Comparison) -> str:
    """What the comparison comes to, in a sentence or two."""
    over, compared = f"{comparison.other.letter} over {comparison.first.letter}", _compared(comparison.pairs)
    if not (best := comparison.fastest):
        return f"{over}: {compared}."
    unlike = "settings"
    if best.first.tokens_per_step != best.other.tokens_per_step:
        unlike += " and tokens per step"
    fastest = f"fastest over fastest, of unlike {unlike}, {judged_briefly(best.tps, None)}"
    return f"{over}: {fastest}. Like for like: {compared}."


def _compared(pairs: Sequence[Pair]) -> str:
    """The speed-ups of the rungs of equal settings, in words."""
    if not pairs:
        return "no rung of equal settings"
    ranked = [pair for pair in pairs if pair.tps]
    absent = len(pairs) - len(ranked)
    without = f"; {absent} not ranked" if absent and ranked else ""
    if len(ranked) == 1:
        (pair,) = ranked
        return f"{judged_briefly(pair.tps, pair.verdict)} at rung {_names((pair.first, [pair]))}{without}"
    if not ranked:
        return f"{plural(len(pairs), 'rung')} of equal settings, of which none ranks"
    counts = Counter(COUNTED.get(pair.verdict or "", UNJUDGED) for pair in ranked)
    told = [f"{counts[word]} {word}" for word in (*COUNTED.values(), UNJUDGED) if counts[word]]
    ratios = [pair.tps.value for pair in ranked if pair.tps]
    ends = " to ".join(dict.fromkeys((times(min(ratios)), times(max(ratios)))))
    between = f"speed-ups {'from ' if ' to ' in ends else 'of '}{ends}"
    return f"{', '.join(told)} of {len(ranked)} rungs{without}; {between}"


def _names(line: MatchedRow) -> str:
    row, pairs = line
    return " / ".join(dict.fromkeys([row.rung, *(pair.other.rung for pair in pairs if pair)]))


def _over(pair: Pair) -> str | None:
    if pair.tps:
        return judged(pair.tps, pair.verdict)
    return f"not ranked: {pair.not_ranked}" if pair.not_ranked else None


def _memory_over(pair: Pair) -> str | None:
    if pair.memory:
        return with_interval("{:.3f}x".format, pair.memory)
    return "not comparable" if pair.memory_not_ranked else None


def _legend(side: Side) -> str:
    board = side.board
    commit = f", commit {board.environment.commit[:12]}" if board.environment.commit else ""
    rung = f", rung {side.rung}" if side.rung else ""
    run = f"{plural(board.rounds, 'round')} begun {board.begun[:16]}{commit}"
    best = None if side.rung else board.fastest
    fastest = f"fastest {best.rung}, {number(best.mean_tps)} tokens/s; " if best else ""
    return f"{side.letter}: {machine_title(board)}: {fastest}{run}, from {board.source}{rung}"


def _tps(row: Row) -> str:
    return tokens_per_second(row.tps) if row.tps else status_of(row)


def _method(comparisons: Sequence[Comparison]) -> list[str]:
    """How ratios are made, and the noise floor of each side."""
    floors = [
        f"{'not known' if side.board.delta is None else f'±{side.board.delta:.1%}'} in {side.letter}"
        for side in _sides(comparisons)
    ]
    same_run = [c.first.board.same_run(c.other.board) for c in comparisons]
    known = any(side.board.delta is not None for side in _sides(comparisons))
    notes = [
        f"Noise floor: {', '.join(floors)}; verdicts take the larger."
        if known
        else "No run has a noise floor, so there are no verdicts: that takes three rounds and an A/A control."
    ]
    notes += ["Ratios within one run are paired within rounds."] if any(same_run) else []
    return notes + ([] if all(same_run) else [BETWEEN_RUNS])


def _warnings(comparison: Comparison) -> Iterator[str]:
    """What makes speeds or memory of pairs compare badly."""
    first, other = comparison.first.board, comparison.other.board
    if other.is_copy_of(first):
        yield f"{other.source} is a copy of {first.source}: one run, not two."
    for pair in comparison.pairs:
        name, other = pair.first.rung, comparison.other.letter
        if pair.maths_differ:
            yield f"{name}: its speeds are of unlike maths: {pair.maths_differ}."
        if pair.loss_differs:
            yield f"{name}: {other} trains otherwise: {pair.loss_differs}."
        if pair.memory_not_ranked:
            ways = f"in two ways, which do not compare: {pair.memory_not_ranked}"
            yield f"{name}: peak memory was found out {ways}."


# --- All rungs of several runs, chained from one baseline


def chain_table(chain: Chain) -> Table:
    return Table(
        title=f"From one baseline: {plural(len(chain.runs), 'run')} chained",
        columns=chain_columns(chain),
        rows=chain.rows,
        first=[_baseline(chain), *_differences(chain)],
        notes=[plain(line) for line in _chain_notes(chain)],  # none is a MethodNote: all stand beneath it
    )


def chain_columns(chain: Chain) -> list[Column[ChainRow]]:
    """Columns of the chain; those with a key are exported beside the scoreboard's."""
    return [
        Column("Group", lambda row: row.group, key="group", words=True, drop=11),
        Column("Setup", lambda row: row.rung.row.rung, words=True),
        Column("Run", lambda row: _letter(chain, row.rung), words=True, drop=12),
        Column("Machine", lambda row: row.rung.machine, words=True, drop=8),
        Column("Devices", lambda row: row.rung.devices, drop=2),
        Column("TPS", lambda row: row.rung.tps_cell),
        Column(
            "Over baseline",
            lambda row: row.over_baseline,
            text=lambda row: "baseline" if chain.is_baseline(row) else ratio(row.over_baseline),
            key="over_baseline",
            interval=True,
        ),
        Column(
            "Orders of magnitude",
            lambda row: row.orders_of_magnitude,
            text=lambda row: None if chain.is_baseline(row) else _orders(row),
            key="orders_of_magnitude",
            drop=9,
        ),
        Column(
            "Over first on device",
            lambda row: "1.00x" if row.first and row.first.row is row.rung.row else row.over_first,
            ratio,
            drop=3,
        ),
        Column("Over rung before", lambda row: judged(row.over_before, row.verdict), drop=7),
        Column("MFU (bf16)", lambda row: row.rung.mfu_cell, drop=6),
        Column("Peak memory (GiB)", lambda row: row.rung.row.peak_memory_bytes, gib, drop=5),
        Column("Time for 10B tokens", _time, drop=10),
        Column("Status", lambda row: row.rung.status_cell, words=True),
    ]


def _orders(row: ChainRow) -> str | None:
    orders = row.orders_of_magnitude
    return f"{orders + 0.0:.2f}" if orders is not None else None  # never -0.00


def _time(row: ChainRow) -> str | None:
    tps = row.rung.row.tps
    return training_time(TOKENS, tps.value) if tps and tps.value and row.rung.ranked else None


def _letter(chain: Chain, rung: RungView) -> str:
    return letter([run is rung.board for run in chain.runs].index(True))


def _baseline(chain: Chain) -> str:
    rung, (model, length) = chain.baseline, chain.baseline.board.task
    added = ", the only one shown of its run" if chain.baseline_added else ""
    return (
        f"Baseline: rung {rung.row.rung} of run {_letter(chain, rung)}, {rung.tps_cell} tokens per second"
        f"{added}. All runs train {model} at T = {length}."
    )


def _differences(chain: Chain) -> Iterator[str]:
    """A warning for each condition beside hardware and toggles that is not the same in all runs."""
    conditions = [_conditions(run) for run in chain.runs]
    for name in dict.fromkeys(name for each in conditions for name in each):
        values = _by_value((each.get(name, "not set"), letter(n)) for n, each in enumerate(conditions))
        if len(values) > 1:
            differing = "; ".join(f"{value} in {runs}" for value, runs in values.items())
            yield f"Warning: not the same in all runs: {name}: {differing}."


def _conditions(run: Scoreboard) -> dict[str, str]:
    text = next((record.data_sha256 for record in run.records if record.data_sha256), "not known")
    workload = {key: "not set" if value is None else str(value) for key, value in run.workload.items()}
    return {
        "torch": run.environment.torch,
        "the text (sha256)": text[:12],
        **{f"workload.{key}": value for key, value in workload.items()},
    }


def _by_value(values: Iterable[tuple[str, str]]) -> dict[str, str]:
    """For each value the letters of the runs that have it, in words. values: pairs of value and letter."""
    by_value = group_by(dict.fromkeys(values), lambda pair: pair[0])
    return {value: _and([run for _, run in pairs]) for value, pairs in by_value.items()}


def _chain_notes(chain: Chain) -> Iterator[str]:
    for place, run in enumerate(chain.runs):
        yield _chain_legend(run, letter(place))
    rungs = [row.rung for row in chain.rows]
    if chain.unlike:
        others = [f"{board.ladder} ({board.task[0]} at T = {board.task[1]})" for board in chain.unlike]
        yield f"Not in this table, for their speeds do not rank with these: {'; '.join(others)}."
    if chain.not_carried:
        left_out = plural(chain.not_carried, "rung that was", "rungs that were")
        yield f"Left out: {left_out} tried and not carried: no faster, or not supported here."
    external = "External: other trainers; " if any(rung.row.external for rung in rungs) else ""
    yield (
        "Hardware: the first rung on a device or machine that is new to the table (XLA on a CPU is a device "
        f"of its own); Distributed: several devices; {external}Software: all others."
    )
    yield (
        "TPS: geometric mean over rounds. Orders of magnitude: log10 of Over baseline. First on device: the "
        "first rung of the same run that ranks on that device. Ratios within one run are paired within "
        "rounds; ± is the 95 % t interval. A rung that failed, or is not supported, has no ratios "
        "and no time."
    )
    if other := [f"{rung.row.rung} ({_letter(chain, rung)})" for rung in rungs if rung.row.other_maths]:
        unlike = "another training than the first rung's of its run, not a faster one"
        yield f"Warning: {unlike}: {listed(other)}."
    if not all(rung.board.same_run(chain.baseline.board) for rung in rungs):
        yield BETWEEN_RUNS
    yield from ranks_note(rungs)
    if any(rung.row.mfu is not None for rung in rungs):
        yield "MFU is over the dense bfloat16 peak of all devices at work; each run's report has its formula."
        if len({rung.measurement.flops_formula for rung in rungs if rung.measurement}) > 1:
            yield "Warning: the runs count FLOPs by different formulas, so their MFU do not compare."
    yield from derived_note(rungs)
    sized = [rung.row for rung in rungs if rung.row.peak_memory_bytes is not None]
    if len({row.peak_memory_method for row in sized}) > 1:
        yield "Warning: peak memory was measured by different methods, which do not compare."
    sizes = sorted({rung.row.tokens_per_step for rung in rungs if rung.row.tokens_per_step})
    if len(sizes) > 1:
        included = "what larger steps gain is in these ratios"
        yield f"Tokens per optimiser step: {sizes[0]:,} to {sizes[-1]:,}; {included}."
    yield "The time is of training alone at that TPS, without evaluation or checkpoints."


def _chain_legend(run: Scoreboard, name: str) -> str:
    processes = plural(run.processes, "process", "processes")
    source = run.source.as_posix() if run.source else DASH
    floor = f"noise floor ±{run.delta:.1%}" if run.delta is not None else "no noise floor known"
    machine = run.environment
    return (
        f"{name}: {run.ladder} on {machine.machine} ({machine.chip}), torch {machine.torch}; {processes} in "
        f"{plural(run.rounds, 'round')}, {floor}; from {source}."
    )


def _and(letters: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(letters[:-1]), letters[-1]]))

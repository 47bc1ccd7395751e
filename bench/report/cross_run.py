"""Tables over several runs, each only where it has something to say. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from bench.analysis.rung_view import (
    DERIVED,
    Entry,
    best,
    best_name,
    by_speed,
    entries,
    memory_over,
    over,
    standing,
)
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, floor, gib, letter, number, percent, plain, ratio, times, with_interval
from bench.records.published import Published
from bench.report.table import Column, Method, Table
from bench.stats import LEAST_ROUNDS
from gpt2.config.toggles import HOST, Toggles
from gpt2.config.workload import FLOPS_FORMULA, PRESETS, Workload

REFERENCES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""Whose facts are shown whether they were measured or not."""
PLAIN = "float32"


def tables(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> list[Table]:
    """All but the overview. figures: of others, beneath ours and labelled."""
    boards = [board.own for board in boards]  # what differs by toggles is ours alone
    found = [sizes(boards), mfu_context(boards, figures), number_formats(boards), scaling(boards)]
    return [*hardware(boards, figures), *(table for table in found if table)]


# --- Notes that several tables have
# -------------------------------------------------------------------------------


def lacks_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.lacks for entry in shown):
        return []
    return [
        f"Beneath the others: runs that were interrupted, or have fewer than {LEAST_ROUNDS} rounds of that "
        "rung."
    ]


def ranks_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.row.toggles.device == HOST and entry.row.toggles.world_size > 1 for entry in shown):
        return []
    return [
        Method(
            "Devices: on a CPU, ranks; those on one machine share its cores and peak, so MFU counts each CPU "
            "once."
        )
    ]


def derived_notes(shown: Sequence[Entry]) -> list[str]:
    if not any(entry.derived and entry.row.mfu is not None for entry in shown):
        return []
    return [
        Method(
            f"{DERIVED} Over a derived peak, which is arithmetic and not a datasheet's: such MFU rank "
            "nothing."
        )
    ]


def sources(shown: Sequence[Entry]) -> str:
    files = dict.fromkeys(entry.board.source.as_posix() for entry in shown if entry.board.source)
    return f"From {', '.join(files) or 'this run'}."


# --- The runs, a line each
# ----------------------------------------------------------------------------------------


class Run(NamedTuple):
    board: Scoreboard
    best: Entry | None
    """Its fastest rung, where one may be called so."""

    @property
    def name(self) -> str:
        return f"{self.board.ladder} on {self.board.environment.machine}"


def overview(boards: Sequence[Scoreboard]) -> Table | None:
    """What runs a report shows, before it shows them; None for a single run, which needs none."""
    if len(boards) < 2:
        return None
    columns: list[Column[Run]] = [
        Column("Run", lambda run: run.name, words=True),
        Column(
            "Model",
            lambda run: "{model}, T = {seq_len}".format(**run.board.records[0].workload),
            words=True,
            drop=2,
        ),
        Column("Begun (UTC)", lambda run: run.board.begun[:16], words=True, drop=1),
        Column("Rungs", lambda run: len(run.board.rows), drop=5),
        Column(
            "Rounds",
            lambda run: f"{run.board.rounds}{', interrupted' if run.board.interrupted else ''}",
            drop=6,
        ),
        Column("Noise floor", lambda run: run.board.delta, floor, drop=4),
        Column("First TPS", lambda run: (tps := run.board.rows[0].tps) and tps.value, number, drop=3),
        Column("Fastest rung", lambda run: best_name(run.best) if run.best else "none", words=True),
        Column("TPS", lambda run: run.best and run.best.tps),
        Column(
            "Over first",
            lambda run: run.best.row.speedup if run.best and run.best.row is not run.board.rows[0] else None,
            ratio,
        ),
    ]
    return Table(
        title=f"{len(boards)} runs",
        columns=columns,
        rows=[Run(board, best(board)) for board in boards],
        notes=[
            "In the order of the tables beneath. Fastest rung: by mean tokens per second, of those of equal "
            "maths that nothing is held against; how surely, its scoreboard's notes tell. Runs on unlike "
            "models do not rank."
        ],
    )


# --- Machine beside machine
# ---------------------------------------------------------------------------------------


def hardware(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> list[Table]:
    """The fastest rung of each run, a table for each model and sequence length that several runs have."""
    tasks: dict[tuple[str, int], list[Entry]] = {}
    for board in boards:
        if entry := best(board):
            tasks.setdefault(entry.task, []).append(entry)
    without = [board for board in boards if not best(board)]
    return [_hardware(task, found, without, figures) for task, found in tasks.items() if len(found) > 1]


def _hardware(
    task: tuple[str, int], found: list[Entry], without: Sequence[Scoreboard], figures: Sequence[Published]
) -> Table:
    model, length = task
    ours = by_speed(found)
    theirs = _fastest([each for each in figures if each.model == model and each.seq_len == length])
    notes = [
        "One line for each run: its fastest rung, by mean tokens per second. How surely it is the fastest, "
        "and what else must be known of it, stands beneath the run's scoreboard."
    ]
    notes += [*lacks_notes(ours), *ranks_notes(ours)]
    if any(entry.row.doubts for entry in ours):
        notes.append(
            "In doubt, and beneath the others: the run has no rung that leaves no doubt; this one has most "
            "tokens per second."
        )
    notes += [f"No rung is ok and of equal maths: {b.source}." for b in without if entries(b)[0].task == task]
    notes += derived_notes(ours)
    methods = {entry.row.peak_memory_method for entry in ours if entry.row.peak_memory_bytes is not None}
    if len(methods) > 1:
        notes.append(
            f"Peak memory was found out in ways that do not compare: {'; '.join(sorted(map(str, methods)))}."
        )
    if theirs:
        notes.append(
            "Published: the most tokens per second that each source states for this model and hardware, "
            "measured by others with other code; MFU computed anew where it states FLOPs and peak. They rank "
            "nothing here; tables of their own have their notes."
        )
    notes.append(sources(ours))
    return Table(
        title=f"Hardware: {model} at T = {length}", columns=HARDWARE, rows=ours, beneath=theirs, notes=notes
    )


def _peak_of_one(entry: Entry) -> str | None:
    return f"{entry.peak / 1e12:.4g}{DERIVED if entry.derived else ''}" if entry.peak else None


def _tps_per_device(entry: Entry) -> float | None:
    return entry.row.tps.value / entry.row.toggles.world_size if entry.row.tps else None


def _stated_tps(figure: Published) -> float:
    return figure.tps or 0.0


def _stated_peak(figure: Published) -> str | None:
    peak = figure.peak_flops.get("bfloat16")
    return f"{peak / 1e12:.4g}" if peak else None


def _chip(entry: Entry) -> str:
    return f"XLA on {entry.environment.chip}" if entry.environment.xla_on_cpu else entry.environment.chip


HARDWARE: list[Column[Entry]] = [
    Column("Figures", lambda entry: "measured", beneath=lambda figure: "published", words=True),
    Column("Chip", _chip, beneath=lambda figure: figure.hardware, words=True),
    Column(
        "Devices", lambda entry: entry.row.toggles.world_size, beneath=lambda figure: figure.devices, drop=8
    ),
    Column(
        "Run",
        lambda entry: f"{entry.board.ladder} on {entry.board.environment.machine}",
        beneath=lambda figure: f"{figure.source}, {figure.series}",
        words=True,
        drop=7,
    ),
    Column("Rung", best_name, beneath=lambda figure: figure.rung, words=True, drop=9),
    Column("TPS", lambda entry: entry.tps, number, beneath=_stated_tps),
    Column(
        "TPS per device",
        _tps_per_device,
        number,
        beneath=lambda figure: _stated_tps(figure) / (figure.devices or 1),
        drop=5,
    ),
    Column(
        "MFU (bf16)",
        lambda entry: entry.mfu,
        percent,
        beneath=lambda figure: figure.recomputed_mfu("bfloat16"),
        drop=6,
    ),
    Column("Peak of one device (TFLOP/s)", _peak_of_one, beneath=_stated_peak, drop=1),
    Column("Of measured ceiling", lambda entry: entry.row.ceiling_share, percent, drop=2),
    Column(
        "Peak memory (GiB)",
        lambda entry: entry.row.peak_memory_bytes,
        gib,
        beneath=lambda figure: figure.memory_bytes,
        drop=4,
    ),
    Column("torch", lambda entry: entry.environment.torch, words=True, drop=3),
]


def _fastest(figures: Sequence[Published]) -> list[Published]:
    """Of each source, hardware and number of devices the one with most tokens per second, the fastest first."""
    found: dict[tuple[str, str, int], Published] = {}
    for figure in figures:
        if figure.tps and figure.hardware and figure.devices:
            place = figure.source, figure.hardware, figure.devices
            if figure.tps > (_stated_tps(found[place]) if place in found else 0.0):
                found[place] = figure
    return sorted(found.values(), key=_stated_tps, reverse=True)


# --- MFU among that of others
# -------------------------------------------------------------------------------------


def mfu_context(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> Table | None:
    """The MFU of each run's fastest rung, and beneath the ranges that others have published; None without
    either.
    """
    ranges = [figure for figure in figures if figure.series == "mfu context"]
    ours = [entry for board in boards if (entry := best(board)) and entry.row.mfu is not None]
    if not ranges or not ours:
        return None
    ours.sort(
        key=lambda each: (each.derived, *standing(each), 0.0 if each.derived else -(each.row.mfu or 0.0))
    )
    columns: list[Column[Entry]] = [
        Column("Figures", lambda entry: "measured", beneath=lambda figure: "published", words=True),
        Column(
            "Run or source",
            lambda entry: f"{entry.board.ladder}: {best_name(entry)}",
            beneath=lambda figure: figure.source,
            words=True,
        ),
        Column(
            "Model",
            lambda entry: entry.task[0],
            beneath=lambda figure: figure.model or figure.rung,
            words=True,
        ),
        Column("On", lambda entry: f"{entry.row.toggles.world_size} on {entry.machine}", words=True),
        Column("MFU", lambda entry: entry.mfu, beneath=_range),
    ]
    notes = [
        "MFU of the fastest rung of each run, over the dense bfloat16 peak of all devices at work; the "
        "scoreboards name formula and peak.",
        *derived_notes(ours),
        "Published: of far larger models on many devices, by their sources' own formulas; measured by "
        "others.",
    ]
    notes += [f"{figure.source}: {figure.note}." for figure in ranges if figure.note]
    notes += [f"{figure.source}: {figure.url}" for figure in ranges if figure.url]
    notes.append(sources(ours))
    notes = [plain(note) for note in notes]  # none is a Method: all stand beneath it
    return Table(title="MFU in context", columns=columns, rows=ours, beneath=ranges, notes=notes)


def _range(figure: Published) -> str | None:
    low, high = (percent(each) if each is not None else None for each in (figure.mfu_low, figure.mfu_high))
    return f"{low} to {high}" if low and high else f"up to {high}" if high else low


# --- Model sizes
# --------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    model: str
    length: int
    fastest: Entry | None
    """Among all runs; None where none trains it."""


def sizes(boards: Sequence[Scoreboard]) -> Table | None:
    """The sizes of GPT-2, and how fast each was trained; None for a single run, whose caption has its model's
    facts.

    A line for each model and sequence length.
    """
    if len(boards) < 2:
        return None
    fastest: dict[tuple[str, int], Entry] = {}
    for entry in by_speed(filter(None, map(best, boards))):
        fastest.setdefault(entry.task, entry)
    missing = [name for name in REFERENCES if name not in [model for model, _ in fastest]]
    tasks = [*fastest, *((name, PRESETS[name].n_ctx) for name in missing)]
    tasks.sort(key=lambda task: (PRESETS[task[0]].parameters, task[1]))
    columns: list[Column[Size]] = [
        Column("Model", lambda size: size.model, words=True),
        Column("Parameters", lambda size: PRESETS[size.model].parameters, "{:,}".format),
        Column("Layers", lambda size: PRESETS[size.model].n_layer, drop=6),
        Column("Heads", lambda size: PRESETS[size.model].n_head, drop=4),
        Column("Width", lambda size: PRESETS[size.model].n_embd, drop=5),
        Column("Sequence (T)", lambda size: size.length, drop=1),
        Column(
            "FLOPs per token",
            lambda size: Workload(model=size.model, seq_len=size.length).flops_per_token,
            "{:,}".format,
        ),
        Column("TPS", lambda size: size.fastest and size.fastest.tps),
        Column("MFU (bf16)", lambda size: size.fastest and size.fastest.mfu, drop=7),
        Column("Devices", lambda size: size.fastest and size.fastest.row.toggles.world_size, drop=3),
        Column(
            "Fastest rung",
            lambda size: size.fastest and f"{size.fastest.board.ladder}: {best_name(size.fastest)}",
            words=True,
            drop=8,
        ),
        Column("On", lambda size: size.fastest and size.fastest.machine, words=True, drop=2),
    ]
    return Table(
        title="Model sizes",
        columns=columns,
        rows=[Size(*task, fastest.get(task)) for task in tasks],
        notes=[
            f"Sizes are those of gpt2/config/workload.py; FLOPs per token at T: {FLOPS_FORMULA}.",
            "TPS and MFU: of the fastest rung of that model and T in all runs shown, those that leave a "
            f"doubt, were interrupted or have fewer than {LEAST_ROUNDS} rounds of it only where no other has "
            "any; a dash: it is in none of them.",
            *ranks_notes([*fastest.values()]),
            *derived_notes([*fastest.values()]),
            sources([*fastest.values()]),
        ],
    )


# --- What number formats buy, by batch
# ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Alike:
    """Rungs of one run that differ in their number format only."""

    name: str
    """Of the run, as the head calls it."""
    run: Scoreboard
    common: Toggles
    """With the formats at their baseline."""
    by_format: dict[str, Entry]


def _format_of(toggles: Toggles) -> str:
    """As the table's lines call it."""
    names = []
    if toggles.matmul_precision != "highest":
        tf32 = replace(toggles, autocast=PLAIN).product_format() == "tf32"  # not on a TPU
        names.append("TF32" if tf32 else f"matmul_precision={toggles.matmul_precision}")
    if toggles.autocast != PLAIN:
        names.append(toggles.autocast)
    return " + ".join(names) or PLAIN


def _alike(boards: Sequence[Scoreboard]) -> list[Alike]:
    """Those with float32 and another format, a run after another."""
    found: list[Alike] = []
    for board in boards:
        groups: dict[Toggles, dict[str, Entry]] = {}
        for entry in entries(board):
            common = replace(entry.row.toggles, autocast=PLAIN, matmul_precision="highest")
            groups.setdefault(common, {}).setdefault(_format_of(entry.row.toggles), entry)
        several = {common: each for common, each in groups.items() if PLAIN in each and len(each) > 1}
        name = letter(len({group.name for group in found}))
        found += [
            Alike(name=name, run=board, common=common, by_format=each) for common, each in several.items()
        ]
    return found


def number_formats(boards: Sequence[Scoreboard]) -> Table | None:
    """A matrix of formats and batches; None where it would repeat one step of one scoreboard."""
    groups = _alike(boards)
    formats = sorted(
        dict.fromkeys(name for each in groups for name in each.by_format), key=lambda name: name != PLAIN
    )
    if len(groups) < 2 and len(formats) < 3:
        return None
    columns: list[Column[tuple[str, str]]] = [
        Column("Figure", lambda line: line[0], words=True),
        Column("Format", lambda line: line[1], words=True),
    ]
    for place, (title, group) in enumerate(zip(_titles(groups), groups, strict=True)):
        drop = len(groups) - place if place else None  # the last one first
        columns.append(Column(title, lambda line, group=group: _of_format(group, *line), drop=drop))
    runs = {each.name: each.run for each in groups}
    return Table(
        title="Number formats",
        columns=columns,
        rows=[
            (figure, name)
            for figure in FIGURES
            for name in formats
            if name != PLAIN or not figure.endswith("over float32")
        ],
        notes=[
            *(_run_legend(run, name if len(runs) > 1 else "") for name, run in runs.items()),
            "The rungs of a column differ in autocast and matmul_precision only. TPS: geometric mean over "
            "rounds; ratios to float32 paired within rounds; ± is the 95 % t interval.",
        ],
    )


def _run_legend(run: Scoreboard, name: str) -> str:
    of = f"{name}: " if name else ""
    return f"{of}{run.ladder} on {run.environment.machine}, from {run.source}."


def _titles(shown: Sequence[Alike]) -> list[str]:
    """Run, model and batch, and what else tells a column from its neighbours."""
    several = len({each.name for each in shown}) > 1
    titles = []
    for each in shown:
        alike = [
            o
            for o in shown
            if o.name == each.name and o.common.micro_batch_size == each.common.micro_batch_size
        ]
        unlike = [
            f"{toggle.name}={getattr(each.common, toggle.name)}"
            for toggle in fields(Toggles)
            if len({getattr(other.common, toggle.name) for other in alike}) > 1
        ]
        model = each.by_format[PLAIN].task[0]
        name = f"{each.name}: " if several else ""
        titles.append(", ".join([f"{name}{model}", f"batch of {each.common.micro_batch_size}", *unlike]))
    return titles


def _of_format(group: Alike, figure: str, number_format: str) -> str | None:
    entry = group.by_format.get(number_format)
    return FIGURES[figure](entry, group.by_format[PLAIN]) if entry else None


def _tps_or_status(entry: Entry, reference: Entry) -> str:
    status = "" if entry.row.status == "ok" else entry.status
    return ", ".join(filter(None, [entry.tps if entry.row.tps else "", status])) or DASH


def _memory_over(entry: Entry, reference: Entry) -> str | None:
    found = memory_over(entry, reference) if entry.ranks else None
    return times(found) if found else None


FIGURES: dict[str, Callable[[Entry, Entry], str | None]] = {
    "TPS": _tps_or_status,
    "TPS over float32": lambda entry, reference: ratio(over(entry, reference)),
    "Peak memory (GiB)": lambda entry, reference: gib(entry.row.peak_memory_bytes),
    "Memory over float32": _memory_over,
}
"""Of a rung, and of that in float32 which it is held to."""


# --- What more devices gave
# ---------------------------------------------------------------------------------------


def scaling(boards: Sequence[Scoreboard]) -> Table | None:
    """The rungs on several devices, and above them those that their efficiency is over; None for less than
    three.
    """
    shown = [entry for board in boards for entry in _scaled(board)]
    if len(shown) < 3:  # a scoreboard tells as much of one rung and its reference
        return None
    columns: list[Column[Entry]] = [
        Column("Run", lambda entry: f"{entry.board.ladder} on {entry.machine}", words=True, drop=4),
        Column("Rung", lambda entry: entry.row.rung, words=True),
        Column("Devices", lambda entry: entry.row.toggles.world_size),
        Column("TPS", lambda entry: entry.tps),
        Column("TPS per device", _tps_per_device, number, drop=3),
        Column("Linear would be", _linear, number),
        Column(
            "Efficiency",
            lambda entry: entry.row.efficiency,
            lambda share: with_interval(percent(share.value), share),
        ),
        Column("Over", lambda entry: entry.row.efficiency_over, words=True, drop=6),
        Column("MFU (bf16)", lambda entry: entry.mfu, drop=2),
        Column("Peak memory (GiB)", lambda entry: entry.row.peak_memory_bytes, gib, drop=1),
        Column("Status", lambda entry: entry.status, words=True, drop=5),
    ]
    return Table(
        title="Scaling",
        columns=columns,
        rows=shown,
        notes=[
            "TPS: of all devices together. Linear would be: the TPS of the rung that trains alike on fewer "
            "devices, named under Over, times as many devices. Efficiency: TPS over that, paired within "
            "rounds; ± is the 95 % t interval.",
            *ranks_notes(shown),
            *derived_notes(shown),
            sources(shown),
        ],
    )


def _scaled(board: Scoreboard) -> list[Entry]:
    reference = {row.efficiency_over for row in board.rows if row.efficiency_over}
    several = any(row.toggles.world_size > 1 for row in board.rows)
    return [
        e for e in entries(board) if several and (e.row.toggles.world_size > 1 or e.row.rung in reference)
    ]


def _linear(entry: Entry) -> float | None:
    fewer = next((each for each in entry.board.rows if each.rung == entry.row.efficiency_over), None)
    tps = (
        fewer.tps.value / fewer.toggles.world_size * entry.row.toggles.world_size
        if fewer and fewer.tps
        else None
    )
    return tps or None

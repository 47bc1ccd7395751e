"""Tables over several runs, each only where it has something to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bench.analysis.run_records import group_by
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import (
    DERIVED,
    RungView,
    by_speed,
    fastest_rung,
    name_with_caveats,
    rank_below,
    rung_views,
)
from bench.format import (
    bare_ratio,
    floor,
    gib,
    in_shell,
    number,
    percent,
    plain,
    plural,
    ratio,
    whole_percent,
    with_interval,
)
from bench.records.published import Published
from bench.report.brief import Brief
from bench.report.table import Column, MethodNote, Table
from bench.stats import LEAST_ROUNDS, Estimate
from gpt2.config.toggles import HOST
from gpt2.config.workload import FLOPS_FORMULA, PRESETS, Workload

REFERENCES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""Models whose sizes are shown whether they were measured or not."""


def tables(boards: Sequence[Scoreboard], figures: Sequence[Published] = ()) -> list[Table]:
    """All but the overview and the atlas, of our own rungs; figures: published ones, labelled."""
    boards = [board.own for board in boards]
    machines = hardware(boards, figures)
    others = [sizes(boards), mfu_context(boards, figures), scaling(boards)]
    return [table for table in (*machines, *others) if table]


# --- Notes that several tables have


def incomplete_note(rungs: Sequence[RungView]) -> list[str]:
    if not any(rung.incomplete for rung in rungs):
        return []
    few = f"have fewer than {LEAST_ROUNDS} rounds of that rung"
    return [f"Beneath the others: runs that were interrupted, or {few}."]


def ranks_note(rungs: Sequence[RungView]) -> list[str]:
    if not any(rung.row.toggles.device == HOST and rung.devices > 1 for rung in rungs):
        return []
    shared = "those on one machine share its cores and peak, so MFU counts each CPU once"
    return [MethodNote(f"Devices: on a CPU, ranks; {shared}.")]


def derived_note(rungs: Sequence[RungView]) -> list[str]:
    if not any(rung.derived_peak and rung.row.mfu is not None for rung in rungs):
        return []
    derived = "a derived peak, which is arithmetic and not a datasheet's: such MFU rank nothing"
    return [MethodNote(f"{DERIVED} Over {derived}.")]


def sources(rungs: Sequence[RungView]) -> str:
    files = dict.fromkeys(rung.board.source.as_posix() for rung in rungs if rung.board.source)
    return f"From {', '.join(files) or 'this run'}."


# --- The runs, a line each


class RunSummary(NamedTuple):
    board: Scoreboard
    fastest: RungView | None

    @property
    def over_first(self) -> Estimate | None:
        return self.board.over_first(self.fastest.row) if self.fastest else None


def overview(boards: Sequence[Scoreboard]) -> Table | None:
    """The runs that a report shows; None for a single run."""
    if len(boards) < 2:
        return None

    def model(run: RunSummary) -> str:
        return "{model}, T = {seq_len}".format(**run.board.workload)

    columns: list[Column[RunSummary]] = [
        Column("Run", lambda run: run.board.title, words=True),
        Column("Model", model, words=True, drop=2),
        Column("Begun (UTC)", lambda run: run.board.begun[:16], words=True, drop=1),
        Column("Rungs", lambda run: len(run.board.rows), drop=5),
        Column("Rounds", _rounds, drop=6),
        Column("Noise floor", lambda run: run.board.delta, floor, drop=4),
        Column("First TPS", lambda run: (tps := run.board.rows[0].tps) and tps.value, number, drop=3),
        Column(
            "Fastest rung", lambda run: name_with_caveats(run.fastest) if run.fastest else "none", words=True
        ),
        Column("TPS", lambda run: run.fastest and run.fastest.tps_cell),
        Column("Over first", lambda run: run.over_first, ratio),
    ]
    return Table(
        title=f"{len(boards)} runs",
        columns=columns,
        rows=[RunSummary(board, fastest_rung(board)) for board in boards],
        notes=[
            "Fastest rung: by mean tokens per second, of those of equal maths that failed no check; how sure "
            "that is, each run's own report tells. Runs on unlike models do not rank."
        ],
    )


def overview_brief(boards: Sequence[Scoreboard], passed_over: Sequence[Scoreboard] = ()) -> Brief:
    """The fastest of several runs, and a line for each, which no terminal wraps.

    passed_over: runs in whose place another of the same ladder is shown; those that are faster are named.
    """
    runs = [RunSummary(board, fastest_rung(board)) for board in boards]
    tasks = group_by([run.fastest for run in runs if run.fastest], lambda rung: rung.board.task)
    answer = []
    if tasks:
        (model, length), rungs = max(tasks.items(), key=lambda task: len(task[1]))
        best, most = by_speed(rungs)[0], max(rungs, key=lambda rung: rung.row.mean_tps)
        found = _where(best)
        if most is not best and not any(rank_below(best)):
            found = f"{_where(most)}; of complete runs without a caveat: {found}"
        answer = [f"Fastest of {plural(len(rungs), 'run')} of {model} at T = {length}: {found}."]
    columns: list[Column[RunSummary]] = [
        Column("machine", lambda run: run.board.environment.machine, words=True),
        Column("ladder", _ladder, words=True),
        Column("fastest rung", lambda run: run.fastest.row.rung if run.fastest else "none", words=True),
        Column("tokens/s", lambda run: number(run.fastest.row.mean_tps) if run.fastest else ""),
        Column("over first", lambda run: bare_ratio(run.over_first)),
        Column("rounds", _rounds, drop=2),
        Column("begun (UTC)", lambda run: run.board.begun[:16], words=True, drop=3),
        Column("noise", lambda run: whole_percent(run.board.delta, "±"), drop=1),
    ]
    unclear = "? The lead of its fastest rung over the others of its run is unclear."
    return Brief(
        answer=answer or [f"{plural(len(runs), 'run')}, none with a rung that is ok."],
        table=Table(
            title="", columns=columns, rows=runs, mark=lambda run: "" if run.board.clear_lead else "?"
        ),
        findings=[
            *([] if all(run.board.clear_lead for run in runs) else [unclear]),
            *not_listed(passed_over, [run.fastest for run in runs if run.fastest]),
        ],
        hints=["One run: bench report FILE · all tables: --full"],
    )


def not_listed(passed_over: Sequence[Scoreboard], shown: Iterable[RungView]) -> Iterator[str]:
    """How many runs have no line, and which of them are faster than all that is shown of their machine."""
    if not passed_over:
        return
    yield f"Left out, as another run of the same name is shown: {plural(len(passed_over), 'run')}."
    most: dict[tuple[str, tuple[str, int]], float] = {}
    for rung in shown:
        key = rung.machine, rung.board.task
        most[key] = max(most.get(key, 0.0), rung.row.mean_tps)
    left = group_by(
        filter(None, map(fastest_rung, passed_over)), lambda rung: (rung.machine, rung.board.task)
    )
    for key, rungs in left.items():
        best = max(rungs, key=lambda rung: rung.row.mean_tps)
        if best.row.mean_tps > most.get(key, 0.0) and best.board.source:
            yield f"Faster than what is shown of its machine: {_where(best)}: {in_shell(best.board.source)}"


def _rounds(run: RunSummary) -> str:
    return f"{run.board.rounds}{', interrupted' if run.board.interrupted else ''}"


def _where(rung: RungView) -> str:
    return f"{name_with_caveats(rung)} on {rung.machine}, {number(rung.row.mean_tps)} tokens/s"


def _ladder(run: RunSummary) -> str:
    model = run.board.workload["model"]
    return run.board.ladder if model == "gpt2" else f"{run.board.ladder} ({model})"


# --- Machine beside machine


def hardware(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> list[Table]:
    """The fastest rung of each run, a table for each model and sequence length that several runs have."""
    fastest = [fastest_rung(board) for board in boards]
    tasks = group_by(filter(None, fastest), lambda rung: rung.board.task)
    without = [board for board, rung in zip(boards, fastest, strict=True) if rung is None]
    return [_hardware(task, rungs, without, figures) for task, rungs in tasks.items() if len(rungs) > 1]


def _hardware(
    task: tuple[str, int],
    rungs: Sequence[RungView],
    without: Sequence[Scoreboard],
    figures: Sequence[Published],
) -> Table:
    model, length = task
    ours = by_speed(rungs)
    published = fastest_published(figures, task)
    notes = [
        "One line for each run: its fastest rung, by mean tokens per second. How sure that is, "
        "and what else must be known of it, stands beneath the run's scoreboard.",
        *incomplete_note(ours),
        *ranks_note(ours),
    ]
    if any(rung.row.caveats for rung in ours):
        notes.append(
            "Caveat, and beneath the others: each rung of the run has one, which its own report states among "
            "the warnings; this one has most tokens per second."
        )
    lacking = [board for board in without if board.task == task]
    notes += [f"No rung is ok and of equal maths: {board.source}." for board in lacking]
    notes += derived_note(ours)
    methods = {rung.row.peak_memory_method for rung in ours if rung.row.peak_memory_bytes is not None}
    if len(methods) > 1:
        several = "; ".join(sorted(map(str, methods)))
        notes.append(f"Peak memory was found out in ways that do not compare: {several}.")
    if published:
        notes.append(
            "Published: the most tokens per second that each source states for this model and hardware, "
            "measured by others with other code; MFU computed anew where it states FLOPs and peak. They rank "
            "nothing here; tables of their own have their notes."
        )
    notes.append(sources(ours))
    title = f"Hardware: {model} at T = {length}"
    return Table(title=title, columns=HARDWARE, rows=ours, beneath=published, notes=notes)


def _chip(rung: RungView) -> str:
    return f"XLA on {rung.environment.chip}" if rung.environment.xla_on_cpu else rung.environment.chip


def _peak(rung: RungView) -> str | None:
    return f"{rung.peak / 1e12:.4g}{DERIVED if rung.derived_peak else ''}" if rung.peak else None


def _published_peak(figure: Published) -> str | None:
    peak = figure.peak_flops.get("bfloat16")
    return f"{peak / 1e12:.4g}" if peak else None


def _tps_per_device(rung: RungView) -> float | None:
    return rung.row.tps.value / rung.devices if rung.row.tps else None


def _published_tps(figure: Published) -> float:
    return figure.tps or 0.0


HARDWARE: list[Column[RungView]] = [
    Column("Figures", lambda rung: "measured", beneath=lambda figure: "published", words=True),
    Column("Chip", _chip, beneath=lambda figure: figure.hardware, words=True),
    Column("Devices", lambda rung: rung.devices, beneath=lambda figure: figure.devices, drop=8),
    Column(
        "Run",
        lambda rung: rung.board.title,
        beneath=lambda figure: f"{figure.source}, {figure.series}",
        words=True,
        drop=7,
    ),
    Column("Rung", name_with_caveats, beneath=lambda figure: figure.rung, words=True, drop=9),
    Column("TPS", lambda rung: rung.tps_cell, number, beneath=_published_tps),
    Column(
        "TPS per device",
        _tps_per_device,
        number,
        beneath=lambda figure: _published_tps(figure) / (figure.devices or 1),
        drop=5,
    ),
    Column(
        "MFU (bf16)",
        lambda rung: rung.mfu_cell,
        percent,
        beneath=lambda figure: figure.recomputed_mfu("bfloat16"),
        drop=6,
    ),
    Column("Peak of one device (TFLOP/s)", _peak, beneath=_published_peak, drop=1),
    Column("Of measured ceiling", lambda rung: rung.row.ceiling_share, percent, drop=2),
    Column(
        "Peak memory (GiB)",
        lambda rung: rung.row.peak_memory_bytes,
        gib,
        beneath=lambda figure: figure.memory_bytes,
        drop=4,
    ),
    Column("torch", lambda rung: rung.environment.torch, words=True, drop=3),
]


def fastest_published(figures: Sequence[Published], task: tuple[str, int]) -> list[Published]:
    """The fastest figure of a task of each source, hardware and number of devices, sorted by speed."""
    fastest: dict[tuple[str, str, int], Published] = {}
    for figure in sorted(figures, key=_published_tps, reverse=True):
        if figure.task == task and figure.tps and figure.hardware and figure.devices:
            fastest.setdefault((figure.source, figure.hardware, figure.devices), figure)
    return [*fastest.values()]


# --- MFU beside published ranges


def mfu_context(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> Table | None:
    """MFU of each run's fastest rung, and published ranges beneath; None where one of the two is missing."""
    ranges = [figure for figure in figures if figure.series == "mfu context"]
    ours = [rung for board in boards if (rung := fastest_rung(board)) and rung.row.mfu is not None]
    if not ranges or not ours:
        return None
    ours.sort(key=lambda r: (r.derived_peak, *rank_below(r), 0.0 if r.derived_peak else -(r.row.mfu or 0.0)))
    columns: list[Column[RungView]] = [
        Column("Figures", lambda rung: "measured", beneath=lambda figure: "published", words=True),
        Column(
            "Run or source",
            lambda rung: f"{rung.board.ladder}: {name_with_caveats(rung)}",
            beneath=lambda figure: figure.source,
            words=True,
        ),
        Column("Model", lambda rung: rung.board.task[0], beneath=lambda f: f.model or f.rung, words=True),
        Column("On", lambda rung: f"{rung.devices} on {rung.machine}", words=True),
        Column("MFU", lambda rung: rung.mfu_cell, beneath=_range),
    ]
    notes = [
        "MFU of the fastest rung of each run, over the dense bfloat16 peak of all devices at work; the "
        "scoreboards name formula and peak.",
        *derived_note(ours),
        "Published: of far larger models on many devices, by their sources' own formulas; measured by "
        "others.",
        *(f"{figure.source}: {figure.note}." for figure in ranges if figure.note),
        *(f"{figure.source}: {figure.url}" for figure in ranges if figure.url),
        sources(ours),
    ]
    notes = [plain(note) for note in notes]  # none stays a MethodNote: all stand beneath this table
    return Table(title="MFU in context", columns=columns, rows=ours, beneath=ranges, notes=notes)


def _range(figure: Published) -> str | None:
    low, high = (percent(mfu) if mfu is not None else None for mfu in (figure.mfu_low, figure.mfu_high))
    return f"{low} to {high}" if low and high else f"up to {high}" if high else low


# --- Model sizes


class Size(NamedTuple):
    model: str
    seq_len: int
    fastest: RungView | None
    """Fastest rung among all runs; None where none trains this model."""


def sizes(boards: Sequence[Scoreboard]) -> Table | None:
    """How fast each size of GPT-2 was trained, by model and sequence length; None for a single run."""
    if len(boards) < 2:
        return None
    fastest: dict[tuple[str, int], RungView] = {}
    for rung in by_speed(filter(None, map(fastest_rung, boards))):
        fastest.setdefault(rung.board.task, rung)
    missing = [name for name in REFERENCES if name not in [model for model, _ in fastest]]
    tasks = [*fastest, *((name, PRESETS[name].n_ctx) for name in missing)]
    tasks.sort(key=lambda task: (PRESETS[task[0]].parameters, task[1]))

    def flops_per_token(size: Size) -> int:
        return Workload(model=size.model, seq_len=size.seq_len).flops_per_token

    def name(size: Size) -> str | None:
        return size.fastest and f"{size.fastest.board.ladder}: {name_with_caveats(size.fastest)}"

    columns: list[Column[Size]] = [
        Column("Model", lambda size: size.model, words=True),
        Column("Parameters", lambda size: PRESETS[size.model].parameters, "{:,}".format),
        Column("Layers", lambda size: PRESETS[size.model].n_layer, drop=6),
        Column("Heads", lambda size: PRESETS[size.model].n_head, drop=4),
        Column("Width", lambda size: PRESETS[size.model].n_embd, drop=5),
        Column("Sequence (T)", lambda size: size.seq_len, drop=1),
        Column("FLOPs per token", flops_per_token, "{:,}".format),
        Column("TPS", lambda size: size.fastest and size.fastest.tps_cell),
        Column("MFU (bf16)", lambda size: size.fastest and size.fastest.mfu_cell, drop=7),
        Column("Devices", lambda size: size.fastest and size.fastest.devices, drop=3),
        Column("Fastest rung", name, words=True, drop=8),
        Column("On", lambda size: size.fastest and size.fastest.machine, words=True, drop=2),
    ]
    shown = [*fastest.values()]
    return Table(
        title="Model sizes",
        columns=columns,
        rows=[Size(*task, fastest.get(task)) for task in tasks],
        notes=[
            f"Sizes are those of gpt2/config/workload.py; FLOPs per token at T: {FLOPS_FORMULA}.",
            "TPS and MFU: of the fastest rung of that model and T in all runs shown, those with a caveat, "
            f"interrupted or of fewer than {LEAST_ROUNDS} rounds only where no other has "
            "any; a dash: it is in none of them.",
            *ranks_note(shown),
            *derived_note(shown),
            sources(shown),
        ],
    )


# --- Scaling over devices


def scaling(boards: Sequence[Scoreboard]) -> Table | None:
    """The rungs on several devices and those that their efficiency is over; None for fewer than three."""
    shown = [rung for board in boards for rung in _scaled(board)]
    if len(shown) < 3:  # the scoreboard says as much of one rung and its reference
        return None
    columns: list[Column[RungView]] = [
        Column("Run", lambda rung: f"{rung.board.ladder} on {rung.machine}", words=True, drop=4),
        Column("Rung", lambda rung: rung.row.rung, words=True),
        Column("Devices", lambda rung: rung.devices),
        Column("TPS", lambda rung: rung.tps_cell),
        Column("TPS per device", _tps_per_device, number, drop=3),
        Column("Linear would be", _linear, number),
        Column("Efficiency", lambda rung: rung.row.efficiency, lambda e: with_interval(percent, e)),
        Column("Over", lambda rung: rung.row.efficiency_over, words=True, drop=6),
        Column("MFU (bf16)", lambda rung: rung.mfu_cell, drop=2),
        Column("Peak memory (GiB)", lambda rung: rung.row.peak_memory_bytes, gib, drop=1),
        Column("Status", lambda rung: rung.status_cell, words=True, drop=5),
    ]
    return Table(
        title="Scaling",
        columns=columns,
        rows=shown,
        notes=[
            "TPS: of all devices together. Linear would be: the TPS of the rung that trains alike on fewer "
            "devices, named under Over, times as many devices. Efficiency: TPS over that, paired within "
            "rounds; ± is the 95 % t interval.",
            *ranks_note(shown),
            *derived_note(shown),
            sources(shown),
        ],
    )


def _scaled(board: Scoreboard) -> list[RungView]:
    rungs = rung_views(board)
    references = {row.efficiency_over for row in board.rows}
    several = any(rung.devices > 1 for rung in rungs)
    return [rung for rung in rungs if several and (rung.devices > 1 or rung.row.rung in references)]


def _linear(rung: RungView) -> float | None:
    fewer = next((row for row in rung.board.rows if row.rung == rung.row.efficiency_over), None)
    return fewer.tps.value / fewer.toggles.world_size * rung.devices if fewer and fewer.tps else None

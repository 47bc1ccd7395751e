"""The fastest rung of each run, machine beside machine, and MFU among that of others. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.rung_view import DERIVED, Entry, best, best_name, by_speed, entries, standing
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, gib, number, percent, plain
from bench.records.published import Published
from bench.report.notes import derived_notes, lacks_notes, ranks_notes, sources
from bench.report.table import Sheet

MEASURED, PUBLISHED = "measured", "published"
HEAD = (
    "Figures",
    "Chip",
    "Devices",
    "Run",
    "Rung",
    "TPS",
    "TPS per device",
    "MFU (bf16)",
    "Peak of one device (TFLOP/s)",
    "Of measured ceiling",
    "Peak memory (GiB)",
    "torch",
)
DISPENSABLE = ("Peak of one", "Of measured", "torch", "Peak memory", "TPS per", "MFU", "Run", "Devices", "Rung")


def hardware(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> list[Sheet]:
    """For each model and sequence length that several runs have, a line for each run."""
    tasks: dict[tuple[str, int], list[Entry]] = {}
    for board in boards:
        if entry := best(board):
            tasks.setdefault(entry.task, []).append(entry)
    without = [board for board in boards if not best(board)]
    return [_hardware(task, found, without, figures) for task, found in tasks.items() if len(found) > 1]


def _hardware(
    task: tuple[str, int], found: list[Entry], without: Sequence[Scoreboard], figures: Sequence[Published]
) -> Sheet:
    model, length = task
    ours = by_speed(found)
    theirs = _fastest([each for each in figures if each.model == model and each.seq_len == length])
    notes = [
        "One line for each run: its fastest rung, by mean tokens per second. How surely it is the fastest, and what "
        "else must be known of it, stands beneath the run's scoreboard."
    ]
    notes += [*lacks_notes(ours), *ranks_notes(ours)]
    if any(entry.row.doubts for entry in ours):
        notes.append(
            "In doubt, and beneath the others: the run has no rung that leaves no doubt; this one has most tokens per "
            "second."
        )
    notes += [plain(f"No rung is ok and of equal maths: {b.source}.") for b in without if entries(b)[0].task == task]
    notes += derived_notes(ours)
    methods = {entry.row.peak_memory_method for entry in ours if entry.row.peak_memory_bytes is not None}
    if len(methods) > 1:
        notes.append(f"Peak memory was found out in ways that do not compare: {'; '.join(sorted(map(str, methods)))}.")
    if theirs:
        notes.append(
            "Published: the most tokens per second that each source states for this model and hardware, measured by "
            "others with other code; MFU computed anew where it states FLOPs and peak. They rank nothing here; tables "
            "of their own have their notes."
        )
    notes.append(sources(ours))
    return Sheet(
        title=f"Hardware: {model} at T = {length}",
        head=HEAD,
        rows=[*(_ours(entry) for entry in ours), *(_theirs(figure) for figure in theirs)],
        words=frozenset({0, 1, 3, 4, 11}),
        notes=notes,
        dispensable=DISPENSABLE,
        beneath=len(theirs),
    )


def _ours(entry: Entry) -> list[str]:
    row, devices = entry.row, entry.row.toggles.world_size
    mark = DERIVED if entry.derived else ""
    return [
        MEASURED,
        plain(f"XLA on {entry.environment.chip}" if entry.environment.xla_on_cpu else entry.environment.chip),
        str(devices),
        plain(f"{entry.board.ladder} on {entry.board.environment.machine}"),
        best_name(entry),
        entry.tps,
        number(row.tps.value / devices) if row.tps else DASH,
        entry.mfu,
        f"{entry.peak / 1e12:.4g}{mark}" if entry.peak else DASH,
        percent(row.ceiling_share),
        gib(row.peak_memory_bytes),
        plain(entry.environment.torch),
    ]


def _fastest(figures: Sequence[Published]) -> list[Published]:
    """Of each source, hardware and number of devices the one with most tokens per second, the fastest first."""
    found: dict[tuple[str, str, int], Published] = {}
    for figure in figures:
        if figure.tps and figure.hardware and figure.devices:
            place = figure.source, figure.hardware, figure.devices
            if figure.tps > (found[place].tps or 0.0 if place in found else 0.0):
                found[place] = figure
    return sorted(found.values(), key=lambda figure: figure.tps or 0.0, reverse=True)


def _theirs(figure: Published) -> list[str]:
    peak = figure.peak_flops.get("bfloat16")
    tps = figure.tps or 0.0
    return [
        PUBLISHED,
        plain(figure.hardware or DASH),
        str(figure.devices),
        plain(f"{figure.source}, {figure.series}"),
        plain(figure.rung),
        number(tps),
        number(tps / (figure.devices or 1)),
        percent(figure.recomputed_mfu("bfloat16")),
        f"{peak / 1e12:.4g}" if peak else DASH,
        DASH,
        gib(figure.memory_bytes),
        DASH,
    ]


def mfu_context(boards: Sequence[Scoreboard], figures: Sequence[Published]) -> Sheet | None:
    """The MFU of each run's fastest rung, and beneath the ranges that others have published; None without either."""
    ranges = [figure for figure in figures if figure.series == "mfu context"]
    ours = [entry for board in boards if (entry := best(board)) and entry.row.mfu is not None]
    if not ranges or not ours:
        return None
    ours.sort(key=lambda each: (each.derived, *standing(each), 0.0 if each.derived else -(each.row.mfu or 0.0)))
    notes = [
        "MFU of the fastest rung of each run, over the dense bfloat16 peak of all devices at work; the scoreboards "
        "name formula and peak.",
        *derived_notes(ours),
        "Published: of far larger models on many devices, by their sources' own formulas; measured by others.",
    ]
    notes += [f"{figure.source}: {figure.note}." for figure in ranges if figure.note]
    notes += [f"{figure.source}: {figure.url}" for figure in ranges if figure.url]
    notes.append(sources(ours))
    return Sheet(
        title="MFU in context",
        head=["Figures", "Run or source", "Model", "On", "MFU"],
        rows=[
            *([MEASURED, *_named(entry), entry.mfu] for entry in ours),
            *([PUBLISHED, plain(f.source), plain(f.model or f.rung), DASH, _range(f)] for f in ranges),
        ],
        words=frozenset({0, 1, 2, 3}),
        notes=[plain(note) for note in notes],
        beneath=len(ranges),
    )


def _named(entry: Entry) -> tuple[str, str, str]:
    devices = entry.row.toggles.world_size
    return plain(f"{entry.board.ladder}: {best_name(entry)}"), entry.task[0], plain(f"{devices} on {entry.machine}")


def _range(figure: Published) -> str:
    low, high = (percent(each) if each is not None else None for each in (figure.mfu_low, figure.mfu_high))
    return f"{low} to {high}" if low and high else f"up to {high}" if high else low or DASH

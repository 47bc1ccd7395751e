"""Tables of one run: its scoreboard, what each change buys, where time, energy and money go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.analysis.attribution import Attribution, Gain, attribution
from bench.analysis.bound import limit_tps
from bench.analysis.row import EQUAL, Row, memory_ratio, status_of
from bench.analysis.run_records import by_round, measured, toggles_of
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.timing import Timing, timing
from bench.format import (
    DASH,
    floor,
    gib,
    judged,
    loss,
    number,
    percent,
    ratio,
    times,
    tokens_per_second,
    with_interval,
)
from bench.records.measurement import Measurement
from bench.records.published import Published
from bench.records.record import Record
from bench.report.one_run.caption import caption, derived_peak, other_method, other_step
from bench.report.one_run.peers import peers
from bench.report.published import beside
from bench.report.table import Column, MethodNote, Table
from bench.stats import paired_ratio, verdict
from gpt2.config.toggles import HOST

TOKENS = 10_000_000_000
"""Length of the published runs, for which hours, energy and money are stated."""
WORK = {
    "products": ("Matmuls", None),
    "attention": ("Attention", None),
    "compiled": ("Compiled kernels", None),
    "optimizer": ("AdamW", None),
    "copies": ("Casts and copies", 4),
    "exchange": ("Between ranks", 1),
    "other": ("Other operations", 2),
    "rest": ("Rest", 3),
}
"""Title of each kind of gpt2.proofs.breakdown.KINDS, and the order in which a narrow terminal drops it."""
WORK_NOTES = (
    MethodNote(
        "One step on rank 0 under torch's profiler, which slows it a little; the median of all processes "
        "that took one. Sum: "
        "the step's time, but more where kinds of work overlap, as gloo's threads or NCCL's kernels do with "
        "the others."
    ),
    MethodNote(
        "On a CPU an operation counts without those within it: batched matmuls as attention, others as "
        "matmuls, all of AdamW's step as AdamW. On a GPU kernels count: those that ran in AdamW's step as "
        "AdamW, others by their names, all matmuls as matmuls. Rest: Python, launches and waiting."
    ),
    MethodNote(
        "A ratio beside a time is that to the rung before; it is shown only where its whole interval lies "
        "beyond the noise floor, as one step per round tells little."
    ),
    MethodNote(
        "Rungs with unlike attention do not compare kind by kind: a fused one is attention as a whole, but "
        "what lies between the matmuls of explicit and blocks (softmax, masks, exponentials) is other "
        "operations or compiled."
    ),
)

GPU_NOTE = MethodNote(
    "On a GPU rest is the median step of the window, where no profiler slows the host, less the kernels; "
    "kernels that take longer than that overlap, and leave no rest. Where power holds the clock down, the "
    "profiled step, which follows a pause, is faster than those of the window, and the rest holds that, too."
)


def tables(
    board: Scoreboard, price_per_hour: float | None = None, figures: Sequence[Published] = ()
) -> list[Table]:
    """The scoreboard, then what each change buys, where time goes, and what 10B tokens cost, where known.

    figures: published ones, of which those of rungs of the same name are shown beside.
    """
    more = [
        _attribution(board),
        peers(board),
        _timing(board),
        profile_table(board),
        _cost(board, price_per_hour),
        beside(board, figures),
    ]
    scoreboard = Table(title=board.title, columns=columns(board), rows=board.rows, notes=caption(board))
    return [scoreboard, *(table for table in more if table)]


def loss_curves(board: Scoreboard) -> list[tuple[Row, Measurement]]:
    """Our rungs that have a speed and more than one loss, each with the measurement that has most."""
    found = [(row, measured(board.records_of(row))) for row in board.own.rows if row.tps]
    return [(row, m) for row, m in found if m and len(m.losses) > 1]


def columns(board: Scoreboard) -> list[Column[Row]]:
    """Columns of the scoreboard; those with a key are exported."""
    first = board.rows[0]
    several = any(row.toggles.world_size > 1 for row in board.rows)
    peak = ", derived peak" if derived_peak(board) else ""
    measurements = {row.index: measured(board.records_of(row)) for row in board.rows}
    limit = limit_tps(board, board.fastest) if board.fastest else None
    return [
        Column("Rung", lambda row: row.rung, words=True),
        Column("Changed", lambda row: ", ".join(row.changed) or None, words=True, drop=8),
        Column("Maths", _maths, words=True, drop=3),
        Column("TPS", lambda row: row.tps, tokens_per_second, key="tps", interval=True),
        Column(
            "Speed-up",
            lambda row: row.speedup,
            text=lambda row: "1.00x" if row is first and row.speedup else ratio(row.speedup),
            key="speedup",
            interval=True,
            drop=13,
        ),
        Column(
            "Over rung before",
            lambda row: row.gain,
            text=lambda row: judged(row.gain, row.verdict),
            key="over_rung_before",
            interval=True,
        ),
        Column("", lambda row: row.verdict, key="verdict"),
        Column(
            "TPS per device",
            lambda row: row.tps.value / row.toggles.world_size if row.tps and several else None,
            number,
            drop=7,
        ),
        Column(
            "Efficiency",
            lambda row: row.efficiency,
            lambda share: with_interval(percent, share),
            key="efficiency",
            interval=True,
            drop=11,
        ),
        Column(f"MFU (bf16{peak})", lambda row: row.mfu, percent, key="mfu_bf16", drop=10),
        Column(f"MFU (own format{peak})", lambda row: row.mfu_own, percent, key="mfu_own_format", drop=5),
        Column("HFU", lambda row: row.hfu, percent, key="hfu_bf16", drop=4),
        Column(
            "Of measured ceiling",
            lambda row: row.ceiling_share,
            percent,
            key="share_of_measured_ceiling",
            drop=6,
        ),
        Column(
            "Of limit",
            lambda row: row.mean_tps / limit if row.tps and limit else None,
            percent,
            key="share_of_limit",
            drop=6,
        ),
        Column("", lambda row: (m := measurements[row.index]) and m.flops_per_token, key="flops_per_token"),
        Column("", lambda row: (m := measurements[row.index]) and m.flops_formula, key="flops_formula"),
        Column("", lambda row: board.peaks.get((row.toggles.device, "bfloat16")), key="peak_flops_bf16"),
        Column(
            "", lambda row: (m := measurements[row.index]) and m.peak_flops_source, key="peak_flops_source"
        ),
        Column(
            "Peak memory (GiB)",
            lambda row: row.peak_memory_bytes,
            text=lambda row: f"{gib(row.peak_memory_bytes)}{' ‡' if other_method(row, board) else ''}",
            key="peak_memory_bytes",
            drop=12,
        ),
        Column("", lambda row: row.peak_memory_method, key="peak_memory_method"),
        Column("Memory over rung before", lambda row: _memory_over_before(row, board), times, drop=1),
        Column("", lambda row: board.loss_step, key="loss_step"),
        Column(
            f"Loss at step {board.loss_step}" if board.loss_step else "Loss",
            lambda row: row.loss,
            text=lambda row: f"{loss(row.loss)}{' †' if other_step(row, board) else ''}",
            key="loss",
            drop=9,
        ),
        Column("", lambda row: row.joules_per_token, key="joules_per_token"),
        Column(
            "Hours to 10B tokens",
            lambda row: hours_to_10b(row.tps.value) if row.tps else None,
            number,
            drop=2,
        ),
        Column("Status", status_of, words=True),
    ]


def _maths(row: Row) -> str | None:
    return (EQUAL if row.maths == EQUAL else "changed") if row.maths and row.tps else None


def _memory_over_before(row: Row, board: Scoreboard) -> float | None:
    before = board.rung_before(row)
    return memory_ratio(row, before) if row.gain and before else None


def hours_to_10b(tps: float) -> float:
    """Hours of training alone, without evaluation or checkpoints."""
    return TOKENS / tps / 3600


def _attribution(board: Scoreboard) -> Table | None:
    rows = attribution(board)
    notes: list[str] = [
        MethodNote(
            "Each figure is a ratio of tokens per second. What a change buys depends on what is switched on "
            "already: three answers, not one."
        )
    ]
    if board.delta is not None:
        notes.append(f"Verdicts against the noise floor: {floor(board.delta)}.")
    columns: list[Column[Attribution]] = [
        Column("Rung", lambda rung: rung.rung, words=True),
        Column("Added in order", lambda rung: rung.in_order, gain_text),
        Column("Alone on the first rung", lambda rung: rung.alone, gain_text),
        Column("Added last, to all others", lambda rung: rung.last, gain_text),
        Column("Direction", lambda rung: rung.agreement or None, words=True),
    ]
    title = f"What each change buys: {board.title}"
    return Table(title=title, columns=columns, rows=rows, notes=notes) if rows else None


def gain_text(gain: Gain) -> str:
    if not gain.ratio:
        return gain.absent or DASH
    return f"{judged(gain.ratio, gain.verdict)}{f', {gain.failed_check}' if gain.failed_check else ''}"


def _timing(board: Scoreboard) -> Table | None:
    rows = timing(board)
    notes: list[str] = [
        MethodNote(
            "Medians over rounds. Start-up: imports (torch, and finding the device), opening the data, and "
            "weights. First step: with compilation where there is any; warm: with the compiler cache of an "
            "earlier round. Steps: those of all windows together, by the device's own clock where it has "
            "one; their spread tells how evenly the machine ran, not how certain a mean is. Saved: by the "
            "medians, where both steps have as many tokens; how certain that is, the scoreboard's ratio "
            "tells. Making batches: the host's share of the window; a GPU works meanwhile on what is queued."
        )
    ]
    if any(times.first_step is None and times.first_step_warm is not None for times in rows):
        notes.append("Where the first step is a dash, the rung found code that it or others had compiled.")
    if any(times.external for times in rows):
        notes.append(
            "External rungs: start-up is until the first progress line, first step and compilation included."
        )
    columns: list[Column[Timing]] = [
        Column("Rung", lambda times: times.rung, words=True),
        Column("Start-up (s)", lambda times: times.startup, number),
        Column("Imports (s)", lambda times: times.imports, number),
        Column("Data (s)", lambda times: times.data, number),
        Column("First step (s)", lambda times: times.first_step, number),
        Column("First step, warm cache (s)", lambda times: times.first_step_warm, number),
        Column("Step, median (ms)", lambda times: times.step, _milliseconds),
        Column("Saved over rung before (ms)", lambda times: times.saved, _milliseconds),
        Column("5 to 95 % of steps (ms)", _spread),
        Column("Making batches", lambda times: times.batches, percent),
    ]
    title = f"Where the time goes: {board.title}"
    return Table(title=title, columns=columns, rows=rows, notes=notes) if rows else None


def _milliseconds(seconds: float) -> str:
    return number(1e3 * seconds)


def _spread(times: Timing) -> str | None:
    low, high = times.step_low, times.step_high
    return None if low is None or high is None else f"{_milliseconds(low)} to {_milliseconds(high)}"


def price_of(board: Scoreboard, price_per_hour: float | None) -> float | None:
    """Price of the machine per hour: as given now, or as the newest of the run's processes was told."""
    if price_per_hour is not None:
        return price_per_hour
    priced = [record for record in board.records if record.price_per_hour is not None]
    return max(priced, key=lambda record: record.time).price_per_hour if priced else None


def _cost(board: Scoreboard, price_per_hour: float | None) -> Table | None:
    """Hours, energy and money for 10 billion tokens; None where neither energy nor price is known."""
    price = price_of(board, price_per_hour)
    rows = [(row, hours_to_10b(row.tps.value)) for row in board.rows if row.tps]
    if not any(price is not None or row.joules_per_token is not None for row, _ in rows):
        return None
    if any(row.joules_per_token is not None for row in board.rows):
        energy = "Energy: the GPUs' own counters over the timed window; the rest of the machine is not in it."
    else:
        energy = "Energy is absent: no energy counter was readable (NVIDIA GPUs of Volta and later have one)."
    columns: list[Column[tuple[Row, float]]] = [
        Column("Rung", lambda line: line[0].rung, words=True),
        Column("Hours", lambda line: line[1], number),
        Column("Joules per token", lambda line: line[0].joules_per_token, "{:.3g}".format),
        Column("kWh", lambda line: line[0].joules_per_token, lambda joules: number(TOKENS * joules / 3.6e6)),
        Column(
            f"Cost at {price:g} per hour" if price is not None else "Cost",
            lambda line: line[1] * price if price is not None else None,
            number,
        ),
    ]
    return Table(
        title=f"10 billion tokens: {board.title}",
        columns=columns,
        rows=rows,
        notes=[MethodNote("Hours at the TPS above, without evaluation or checkpoints."), MethodNote(energy)],
    )


def profile_table(board: Scoreboard) -> Table | None:
    """A row for each rung of ours that was profiled, a column for each kind of work; None without any."""
    rows = []
    for row in board.rows:
        before = board.rung_before(row)
        if before and before.tokens_per_step != row.tokens_per_step:  # whose times do not compare
            before = None
        if now := profiled(board.records_of(row)):
            rows.append(StepProfile(row.rung, now, profiled(board.records_of(before)) if before else {}))
    if not rows:
        return None
    columns: list[Column[StepProfile]] = [
        Column("Rung", lambda profile: profile.rung, words=True),
        Column(
            "Sum (ms)",
            lambda profile: median(sum(kinds.values()) for kinds in profile.now.values()),
            _milliseconds,
        ),
    ]
    for kind, (title, drop) in WORK.items():
        columns.append(
            Column(f"{title} (ms)", lambda profile, kind=kind: profile.on(kind, board.delta), drop=drop)
        )
    on_gpu = any(row.toggles.device != HOST for row in board.rows)
    notes = [*WORK_NOTES, GPU_NOTE] if on_gpu else WORK_NOTES
    return Table(title=f"What a step is spent on: {board.title}", columns=columns, rows=rows, notes=notes)


Profiled = dict[tuple[int, str], dict[str, float]]
"""Seconds of one step by kind of work, by round and session."""


def profiled(rung: Sequence[Record]) -> Profiled:
    on_gpu = toggles_of(rung).device != HOST  # MPS tells no step_seconds, and XLA is not profiled

    def kinds(measurement: Measurement) -> dict[str, float] | None:
        profile, steps = measurement.profiled_seconds, measurement.step_seconds
        if not profile or not on_gpu or not steps:
            return profile or None
        kernels = {kind: seconds for kind, seconds in profile.items() if kind != "rest"}
        return {**kernels, "rest": max(0.0, median(steps) - sum(kernels.values()))}

    return by_round(rung, kinds)


def work_of(rung: Sequence[Record]) -> list[tuple[str, float]]:
    """Seconds of a step by kind of work, medians over rounds, the largest first; empty without a profile."""
    found = list(profiled(rung).values())
    each = {kind: median(kinds.get(kind, 0.0) for kinds in found) for kind in WORK} if found else {}
    return sorted(each.items(), key=lambda item: item[1], reverse=True)


@dataclass(frozen=True)
class StepProfile:
    """What the profiled steps of a rung, and of the rung before it, spent their time on."""

    rung: str
    now: Profiled
    before: Profiled

    def on(self, kind: str, delta: float | None) -> str | None:
        """Cell of a kind of work; None where no step had any.

        A ratio to the rung before is added where its whole interval lies beyond the noise floor.
        """
        now, before = (
            {key: each[kind] for key, each in of.items() if each.get(kind)} for of in (self.now, self.before)
        )
        if not now:
            return None
        text = _milliseconds(median(now.get(key, 0.0) for key in self.now))
        changed = paired_ratio(now, before)
        if changed is None or verdict(changed, delta) not in ("faster", "slower"):
            return text
        return f"{text}, {with_interval(lambda ratio: f'{number(ratio)}x', changed)}"

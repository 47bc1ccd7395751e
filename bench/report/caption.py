"""What a reader must be told beside a table: what the figures are of, how they were got, what speaks against them."""

from __future__ import annotations

from bench.report.guards import measured
from bench.report.scoreboard import Row, Scoreboard
from bench.report.text import GIB, number, plain
from bench.stats import LEAST_DELTA, LEAST_ROUNDS
from gpt2.workload import Workload

STATUS = {
    "out_of_memory": "OOM",
    "parity_failed": "loss differs",
    "not_comparable": "not comparable",
}
BUSY = 2.0
"""Runnable processes per core, before a process starts, above which something else must have been running."""
LOUD = 0.05
"""Noise floor from which a verdict of `same` says little."""
GC_SHARE = 0.01
"""Share of the window that Python's garbage collector may take before it is worth a warning."""


def status_of(row: Row) -> str:
    """For a reader."""
    status = STATUS.get(row.status, row.status)
    return f"{status}, not {row.expect}" if row.expect and row.status == "ok" else status


def other_step(row: Row, board: Scoreboard) -> bool:
    """Whether the row's optimiser steps are of another size than the first row's."""
    return row.tokens_per_step is not None and row.tokens_per_step != board.rows[0].tokens_per_step


def derived_peak(board: Scoreboard) -> bool:
    """Whether the peak is arithmetic, not a datasheet's."""
    found = measured(board.records)
    return found is not None and found.peak_flops_source.startswith("derived")


def caption(board: Scoreboard) -> list[str]:
    """Of the scoreboard itself, a line for each matter."""
    machine, workload = board.environment, board.records[0].workload
    found = measured(board.records)
    lines = [f"{_machine(board)}."]
    parameters = f" ({found.parameters:,} parameters)" if found else ""
    steps = sorted({row.tokens_per_step for row in board.rows if row.tokens_per_step})
    size = f", {steps[0]:,} tokens per optimiser step" if len(steps) == 1 else ""
    lines.append(f"{workload['model']}{parameters} on {workload['data']}, T = {workload['seq_len']}{size}.")
    if len(steps) > 1:
        sizes = ", ".join(
            f"{row.tokens_per_step:,} ({plain(row.rung)})" for row in board.rows if other_step(row, board)
        )
        lines.append(f"† Tokens per optimiser step: {board.rows[0].tokens_per_step or 0:,}, but {sizes}.")
    lines += [_counting(board), *_verdicts(board), *_mfu(board), *_ceilings(board)]
    methods = sorted({r.measurement.peak_memory_method for r in board.records if r.measurement and r.kind != "parity"})
    if methods:
        lines.append(f"Peak memory: {'; '.join(methods)}; of the rank that needed most.")
    if machine.variables:
        lines.append("Set: " + ", ".join(f"{name}={value}" for name, value in sorted(machine.variables.items())) + ".")
    for row in board.rows:
        if row.error:
            lines.append(f"{row.rung}: {status_of(row)}: {row.error.strip().splitlines()[0]}")
    lines += [f"Warning: {warning}." for warning in _warnings(board)]
    if board.source:
        lines.append(f"From {board.source.as_posix()}, where each record holds the command that runs its rung again.")
    return [plain(line) for line in lines]


def _counting(board: Scoreboard) -> str:
    processes = f"{len(board.records)} processes" if len(board.records) > 1 else "1 process"
    rounds = f"{board.rounds} rounds" if board.rounds > 1 else "1 round"
    interval = "± is the 95 % t interval" if board.rounds >= LEAST_ROUNDS else "too few rounds for an interval"
    return (
        f"{processes}, each fresh: {rounds} over the rungs. TPS: tokens per second of the timed window, geometric "
        f"mean over rounds; speed-ups paired within rounds; {interval}."
    )


def _verdicts(board: Scoreboard) -> list[str]:
    """How far two figures must lie apart to differ."""
    if board.rounds < LEAST_ROUNDS:
        return [f"Not replicated: verdicts need {LEAST_ROUNDS} rounds or more."] if len(board.rows) > 1 else []
    control = board.control
    if control is None or control.half_width is None or control.low is None or control.high is None:
        why = f"no A/A control was measured, noise floor taken as {LEAST_DELTA:.0%}"
        return [f"Verdict on the rung before: {why}."]
    inside = control.low <= 1 <= control.high
    lines = [
        f"Noise floor: ±{board.delta:.1%}. The first rung again, at the end of each round (A/A control), ran "
        f"{control.value:.3f}x ±{control.half_width:.1%} as fast. Verdict on the rung before: same, if the interval "
        "lies within the noise floor; faster or slower, if it excludes 1; else unclear."
    ]
    if not inside:
        lines.append(
            "Warning: the A/A control's interval excludes 1: the machine drifts within rounds by more than its "
            "intervals allow for; let it settle and run again."
        )
    if board.delta > LOUD:
        lines.append(
            "Warning: the noise floor is high: what is called same may yet differ by that much. Quieten the machine "
            "(bench doctor) or take more rounds (--until 2%)."
        )
    return lines


def _mfu(board: Scoreboard) -> list[str]:
    found = measured(board.records)
    if not found:
        return []
    counted = f"{found.flops_per_token:,} FLOPs per token ({found.flops_formula}"
    others = ", ".join(
        f"{name} {flops:,} (x {flops / found.flops_per_token:.3f})"
        for name, flops in Workload(**board.records[0].workload).other_flops_per_token.items()
    )
    counted += f"; by other conventions: {others}"
    counted += ")"
    if not found.peak_flops_bf16 and not found.peak_flops_dtype:
        return [f"MFU is absent: {found.peak_flops_source}. {counted}."]
    peak = (
        f"the devices' dense bfloat16 peak of {found.peak_flops_bf16 / 1e12:.4g} TFLOP/s each"
        if found.peak_flops_bf16
        else "a bfloat16 peak that the device does not have (absent)"
    )
    lines = [f"MFU = {counted} x TPS / {peak} ({found.peak_flops_source})."]
    own = {
        m.product_format: m.peak_flops_dtype
        for m in (r.measurement for r in board.records)
        if m and m.product_format and m.peak_flops_dtype
    }
    if own:
        peaks = ", ".join(f"{name} {peak / 1e12:.4g}" for name, peak in sorted(own.items()))
        lines.append(f"Own format: over the dense peak of what the rung multiplies, in TFLOP/s: {peaks}.")
    if derived_peak(board):
        lines.append("A derived peak is arithmetic, not a datasheet's: do not rank this MFU against other machines.")
    if any(row.hfu is not None for row in board.rows):
        lines.append("HFU counts what is computed a second time to save memory; MFU does not.")
    return lines


def _ceilings(board: Scoreboard) -> list[str]:
    lines = []
    for device, ceiling in board.ceilings.items():
        rate, best = ceiling.flops_per_second, ceiling.product
        spread = ""
        if rate.low is not None and rate.high is not None:
            spread = f" ({rate.low / 1e12:.3g} to {rate.high / 1e12:.3g})"
        lines.append(
            f"Measured ceiling ({device}): {rate.value / 1e12:.3g} TFLOP/s{spread}, sustained by {best.name} "
            f"{best.m} x {best.k} x {best.n} in {best.number_format}; {rate.rounds} "
            f"process{'es' if rate.rounds > 1 else ''}, in the first and last round."
        )
    return lines


def _warnings(board: Scoreboard) -> list[str]:
    records, machine = board.records, board.environment
    warnings = _grouped([warning for record in records for warning in record.warnings], len(records))
    if board.interrupted:
        planned = f" of {board.planned_rounds}" if board.planned_rounds else ""
        warnings.append(
            f"the run was interrupted in round {board.rounds}{planned}; bench run with --resume runs what is missing"
        )
    if board.has_gaps:
        warnings.append("not all rungs of the ladder were run; a row's changes are those from the row above it")
    load = max((record.environment.load_average or 0.0 for record in records), default=0.0)
    if load > BUSY * machine.cpu_cores:
        warnings.append(f"the machine was busy: load average up to {load:.1f} on {machine.cpu_cores} cores")
    for record in records:
        if not (found := record.measurement):
            continue
        where = f"{record.rung}, round {record.repetition}"
        if found.gc_seconds and found.gc_seconds > GC_SHARE * sum(found.block_seconds):
            share = found.gc_seconds / sum(found.block_seconds)
            warnings.append(f"{where}: Python's garbage collector took {share:.1%} of the window")
        if found.alloc_retries:
            warnings.append(f"{where}: the allocator ran out and retried {found.alloc_retries} times; use less memory")
    if any(record.environment.dirty for record in records):
        warnings.append(f"measured on a changed checkout of commit {machine.commit}")
    return warnings


def _grouped(warnings: list[str], processes: int) -> list[str]:
    """One line for warnings that begin alike, up to the first colon: their figures differ from process to process."""
    kinds: dict[str, list[str]] = {}
    for warning in warnings:
        kinds.setdefault(warning.partition(":")[0], []).append(warning)
    return [
        f"{alike[0]} (in {len(alike)} of {processes} processes)" if len(alike) > 1 else alike[0]
        for alike in kinds.values()
    ]


def _machine(board: Scoreboard) -> str:
    e = board.environment
    flags = f" with {' '.join(e.cpu_flags)}" if e.cpu_flags else ""
    cpu = f"{e.cpu}, {e.cpu_cores} cores{flags}"
    chip = cpu if e.chip == e.cpu else f"{e.chip} ({e.device_count} here; {cpu})"
    versions = "".join(f", {name} {version}" for name, version in sorted(e.versions.items()))
    return f"{chip}, {e.memory_bytes / GIB:.1f} GiB; torch {e.torch}{versions}, Python {e.python}, {e.os}"


def attribution_notes(board: Scoreboard) -> list[str]:
    """Of the table of what each change buys."""
    return [
        "Each figure is a ratio of tokens per second. What a change buys depends on what is switched on already: "
        f"three answers, not one. Verdicts against the noise floor of ±{board.delta:.1%}."
    ]


def cost_notes(board: Scoreboard, price: float | None) -> list[str]:
    """Of the table of hours, energy and money."""
    notes = ["Hours at the TPS above, without evaluation or checkpoints."]
    if all(row.joules_per_token is None for row in board.rows):
        notes.append("Energy is absent: no energy counter was readable (NVIDIA GPUs of Volta and later have one).")
    else:
        notes.append("Energy: the GPUs' own counters over the timed window; the rest of the machine is not in it.")
    if price is None:
        notes.append("--price-per-hour X adds the cost.")
    elif price:
        best = board.fastest
        if best and best.tps:
            notes.append(f"The fastest rung gives {number(best.tps.value * 3600 / price)} tokens per unit of money.")
    return notes

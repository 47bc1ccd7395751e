"""A Scoreboard as a Markdown or a terminal table, with the caption without which its figures mean nothing."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.report.scoreboard import Row, Scoreboard
from bench.report.text import DASH, GIB, markdown, number, plain
from bench.stats import LEAST_ROUNDS, Estimate

STATUS = {"out_of_memory": "OOM", "parity_failed": "loss differs"}
BUSY = 2.0
"""Runnable processes per core, before a process starts, above which something else must have been running."""


def header(board: Scoreboard) -> list[str]:
    """Column titles."""
    loss = f"Loss at step {board.loss_step}" if board.loss_step else "Loss"
    titles = ["Rung", "Changed", "TPS", "Speed-up", "Over rung before", "MFU (bf16)", "Peak memory (GiB)", loss]
    return [*titles, "Status"]


def cells(row: Row, board: Scoreboard) -> list[str]:
    """One row as plain text, a dash for what was not measured."""
    loss = f"{row.loss:.4f}" if row.loss is not None else DASH
    return [
        plain(row.rung),
        plain(", ".join(row.changed)) or DASH,
        _with_interval(number(row.tps.value) if row.tps else "", row.tps),
        "1.00x" if row is board.rows[0] and row.speedup else _ratio(row.speedup),
        _ratio(row.gain),
        f"{row.mfu:.1%}" if row.mfu is not None else DASH,
        f"{row.peak_memory_bytes / GIB:.2f}" if row.peak_memory_bytes is not None else DASH,
        f"{loss} †" if _other_step(row, board) else loss,
        _status(row),
    ]


def _ratio(ratio: Estimate | None) -> str:
    return _with_interval(f"{ratio.value:.2f}x" if ratio else "", ratio)


def _with_interval(text: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return DASH
    return f"{text} ±{estimate.half_width:.1%}" if estimate.half_width is not None else text


def _other_step(row: Row, board: Scoreboard) -> bool:
    """Whether the row's optimiser steps are of another size than the first row's."""
    return row.tokens_per_step is not None and row.tokens_per_step != board.rows[0].tokens_per_step


def _status(row: Row) -> str:
    status = STATUS.get(row.status, row.status)
    return f"{status}, not {row.expect}" if row.expect == "out_of_memory" and row.status == "ok" else status


def caption(board: Scoreboard) -> list[str]:
    """What the figures are of and how they were got, a line for each matter."""
    machine, workload = board.environment, board.records[0].workload
    measured = next((r.measurement for r in board.records if r.measurement), None)
    lines = [f"{_machine(board)}."]
    parameters = f" ({measured.parameters:,} parameters)" if measured else ""
    steps = sorted({row.tokens_per_step for row in board.rows if row.tokens_per_step})
    size = f", {steps[0]:,} tokens per optimiser step" if len(steps) == 1 else ""
    lines.append(f"{workload['model']}{parameters} on {workload['data']}, T = {workload['seq_len']}{size}.")
    if len(steps) > 1:
        sizes = ", ".join(
            f"{row.tokens_per_step:,} ({plain(row.rung)})" for row in board.rows if _other_step(row, board)
        )
        lines.append(f"† Tokens per optimiser step: {board.rows[0].tokens_per_step or 0:,}, but {sizes}.")
    lines.append(_counting(board))
    if measured and measured.peak_flops_bf16:
        lines.append(
            f"MFU = {measured.flops_per_token:,} FLOPs per token ({measured.flops_formula}) x TPS / the devices' "
            f"dense bfloat16 peak of {measured.peak_flops_bf16 / 1e12:g} TFLOP/s each ({measured.peak_flops_source})."
        )
    elif measured:
        lines.append(
            f"MFU is absent: {measured.peak_flops_source}. FLOPs per token: {measured.flops_per_token:,} "
            f"({measured.flops_formula})."
        )
    methods = sorted({r.measurement.peak_memory_method for r in board.records if r.measurement})
    if methods:
        lines.append(f"Peak memory: {'; '.join(methods)}; of the rank that needed most.")
    if machine.variables:
        lines.append("Set: " + ", ".join(f"{name}={value}" for name, value in sorted(machine.variables.items())) + ".")
    for row in board.rows:
        if row.error:
            lines.append(f"{row.rung}: {_status(row)}: {row.error.strip().splitlines()[0]}")
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


def _warnings(board: Scoreboard) -> list[str]:
    records, machine = board.records, board.environment
    warnings = sorted({warning for record in records for warning in record.warnings})
    if board.interrupted:
        planned = records[0].protocol["repeats"]
        warnings.append(f"the run was interrupted in round {board.rounds} of {planned}; what is missing was not run")
    if board.has_gaps:
        warnings.append("not all rungs of the ladder were run; a row's changes are those from the row above it")
    load = max((record.environment.load_average or 0.0 for record in records), default=0.0)
    if load > BUSY * machine.cpu_cores:
        warnings.append(f"the machine was busy: load average up to {load:.1f} on {machine.cpu_cores} cores")
    if board.mixed_environments:
        warnings.append("the records are of different software, code or chips; these figures do not compare")
    if any(record.environment.dirty for record in records):
        warnings.append(f"measured on a changed checkout of commit {machine.commit}")
    return warnings


def _machine(board: Scoreboard) -> str:
    e = board.environment
    flags = f" with {' '.join(e.cpu_flags)}" if e.cpu_flags else ""
    cpu = f"{e.cpu}, {e.cpu_cores} cores{flags}"
    chip = cpu if e.chip == e.cpu else f"{e.chip} ({e.device_count} here; {cpu})"
    versions = "".join(f", {name} {version}" for name, version in sorted(e.versions.items()))
    return f"{chip}, {e.memory_bytes / GIB:.1f} GiB; torch {e.torch}{versions}, Python {e.python}, {e.os}"


def to_markdown(board: Scoreboard) -> str:
    """A GitHub table between its heading and its caption."""
    head = header(board)
    lines = [f"### {markdown(f'{board.ladder} on {board.environment.machine}')}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'|'.join(['---', '---', *['--:'] * 6, '---'])}|"]
    for row in board.rows:
        lines.append(f"| {' | '.join(markdown(cell) for cell in cells(row, board))} |")
    return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in caption(board))]).rstrip() + "\n"


def to_terminal(board: Scoreboard) -> Group:
    """The same for rich, without columns that hold nothing but dashes."""
    rows = [cells(row, board) for row in board.rows]
    title = Text(plain(f"{board.ladder} on {board.environment.machine}"))
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown = [place for place in range(len(header(board))) if any(row[place] != DASH for row in rows)]
    for place in shown:
        # On a narrow terminal words and figures break onto a second line rather than lose their ends.
        table.add_column(header(board)[place], justify="right" if 2 <= place <= 7 else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[place]) for place in shown))
    return Group(table, *(Text(line, style="dim") for line in caption(board)))

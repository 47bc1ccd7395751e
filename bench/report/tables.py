"""A Scoreboard as a Markdown or a terminal table, with the caption without which its figures mean nothing."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.report.scoreboard import Row, Scoreboard
from bench.report.text import DASH, GIB, markdown, number, plain
from bench.stats import Estimate

STATUS = {"out_of_memory": "OOM", "parity_failed": "loss differs"}


def header(board: Scoreboard) -> list[str]:
    """Column titles."""
    loss = f"Loss at step {board.loss_step}" if board.loss_step else "Loss"
    titles = ["Rung", "Changed", "TPS", "Speed-up", "Over rung before", "MFU (bf16)", "Peak memory (GiB)", loss]
    return [*titles, "Status"]


def cells(row: Row, board: Scoreboard) -> list[str]:
    """One row as plain text, a dash for what was not measured."""
    other_step = row.tokens_per_step is not None and row.tokens_per_step != board.rows[0].tokens_per_step
    loss = f"{row.loss:.4f}" if row.loss is not None else DASH
    status = STATUS.get(row.status, row.status)
    if row.error:
        status += f": {row.error.strip().splitlines()[0]}"
    return [
        plain(row.rung),
        plain(", ".join(row.changed)) or DASH,
        _tps(row.tps),
        "1.00x" if row is board.rows[0] and row.speedup else _ratio(row.speedup),
        _ratio(row.gain),
        f"{row.mfu:.1%}" if row.mfu is not None else DASH,
        f"{row.peak_memory_bytes / GIB:.2f}" if row.peak_memory_bytes is not None else DASH,
        loss + (f" ({number(row.tokens_per_step)} tokens a step)" if other_step and row.tokens_per_step else ""),
        plain(status),
    ]


def _tps(tps: Estimate | None) -> str:
    if tps is None:
        return DASH
    if tps.low is None or tps.high is None:
        return number(tps.value)
    return f"{number(tps.value)} ({number(tps.low)} to {number(tps.high)})"


def _ratio(ratio: Estimate | None) -> str:
    if ratio is None:
        return DASH
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x"
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def caption(board: Scoreboard) -> list[str]:
    """What the figures are of and how they were got, a sentence or two per line."""
    machine = board.environment
    lines = [f"{board.ladder} on {_machine(board)}."]
    measured = next((r for r in board.records if r.measurement), None)
    workload = board.records[0].workload
    sizes = sorted({row.tokens_per_step for row in board.rows if row.tokens_per_step})
    parameters = f" ({measured.measurement.parameters:,} parameters)" if measured and measured.measurement else ""
    lines.append(
        f"Workload: {workload['model']}{parameters} on {workload['data']}, T = {workload['seq_len']}"
        + (f", {' or '.join(f'{size:,}' for size in sizes)} tokens per optimiser step." if sizes else ".")
    )
    rounds = f"{board.rounds} rounds" if board.rounds > 1 else "1 round"
    interval = ", in brackets the 95 % t interval" if board.rounds > 1 else "; one round says nothing of the spread"
    processes = f"{len(board.records)} processes" if len(board.records) > 1 else "1 process"
    lines.append(
        f"{processes}: {rounds} over all rungs, a fresh process each. TPS = tokens per second of "
        f"the timed window, geometric mean over rounds; speed-ups are paired within rounds{interval}."
    )
    if measured and measured.measurement:
        m = measured.measurement
        peak = f"{m.peak_flops_bf16 / 1e12:g} TFLOP/s" if m.peak_flops_bf16 else "absent"
        lines.append(
            f"MFU = {m.flops_per_token:,} FLOPs per token ({m.flops_formula}) x TPS / dense bfloat16 peak of the "
            f"devices; the peak: {peak} ({m.peak_flops_source})."
        )
        methods = sorted({r.measurement.peak_memory_method for r in board.records if r.measurement})
        lines.append(f"Peak memory: {'; '.join(methods)}; of the rank that needed most.")
    if board.has_gaps:
        lines.append("Not all rungs of the ladder were run; a row includes the changes of those left out above it.")
    if machine.variables:
        lines.append("Set: " + ", ".join(f"{name}={value}" for name, value in sorted(machine.variables.items())) + ".")
    if board.mixed_environments:
        lines.append("Warning: the records are of different software, code or chips; these figures do not compare.")
    if any(record.environment.dirty for record in board.records):
        lines.append(f"Warning: measured on a changed checkout of commit {machine.commit}.")
    lines += [f"Warning: {warning}." for warning in sorted({w for r in board.records for w in r.warnings})]
    if board.source:
        lines.append(f"From {board.source.as_posix()}, where each record holds the command that runs its rung again.")
    return [plain(line) for line in lines]


def _machine(board: Scoreboard) -> str:
    e = board.environment
    flags = f" with {' '.join(e.cpu_flags)}" if e.cpu_flags else ""
    cpu = f"{e.cpu}, {e.cpu_cores} cores{flags}"
    chip = cpu if e.chip == e.cpu else f"{e.chip} ({e.device_count} here; {cpu})"
    versions = "".join(f", {name} {version}" for name, version in sorted(e.versions.items()))
    return f"{chip}, {e.memory_bytes / GIB:.1f} GiB; torch {e.torch}{versions}, Python {e.python}, {e.os}"


def to_markdown(board: Scoreboard) -> str:
    """A GitHub table, its caption below."""
    head = header(board)
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', '---', *['--:'] * 6, '---'])}|"]
    for row in board.rows:
        lines.append(f"| {' | '.join(markdown(cell) for cell in cells(row, board))} |")
    return "\n".join([*lines, "", *(f"{markdown(line)}  " for line in caption(board))]).rstrip() + "\n"


def to_terminal(board: Scoreboard) -> Group:
    """The same for rich."""
    table = Table(title=Text(plain(board.ladder)), show_lines=False)
    for number_, title in enumerate(header(board)):
        table.add_column(title, justify="right" if 2 <= number_ <= 7 else "left", overflow="fold")
    for row in board.rows:
        table.add_row(*(Text(cell) for cell in cells(row, board)))
    return Group(table, *(Text(line, style="dim") for line in caption(board)))

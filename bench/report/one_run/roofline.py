"""Tables of `bench roofline`: what a machine sustains, and how near to it a ladder's rungs come."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.bound import ASSUMPTIONS, Bound, bound, share
from bench.analysis.scoreboard import Scoreboard
from bench.format import number, percent, whole_percent
from bench.ladder.ladder import Ladder
from bench.records.machine import Attention, Ceiling
from bench.report.brief import Brief
from bench.report.table import Column, Table
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload


def measured_ms(board: Scoreboard, rung: str, workload: Workload, toggles: Toggles) -> float | None:
    """Milliseconds per optimiser step of a rung in older results of the same computation, else None."""
    row = next((row for row in board.rows if row.rung == rung), None)
    if row is None or row.tps is None or row.tokens_per_step is None:
        return None
    same = any(
        (record.rung, Workload(**record.workload), Toggles(**record.toggles.all)) == (rung, workload, toggles)
        for record in board.records
    )
    return 1e3 * row.tokens_per_step / row.tps.value if same else None


BoundRow = tuple[str, Bound, float | None]
"""A rung's name, its limit, and its measured milliseconds per optimiser step."""


def ladder_lines(ladder: Ladder, device: str, ceiling: Ceiling, board: Scoreboard | None) -> list[BoundRow]:
    """A line for each rung.

    device: that of the ceiling. board: results of the ladder, where there are any.
    """
    lines = []
    for rung in ladder.first_tries:
        limit = bound(ladder.workload, rung.toggles, ceiling)
        if rung.toggles.device != device:
            reason = f"it trains on {rung.toggles.device}, the ceiling is that of {device}"
            limit = Bound(number_format=limit.number_format, absent=reason)
        measured = measured_ms(board, rung.name, ladder.workload, rung.toggles) if board else None
        lines.append((rung.name, limit, measured))
    return lines


# --- The answer


def roofline_brief(
    ceiling: Ceiling,
    peak: float | None,
    workload: Workload,
    lines: Sequence[BoundRow] = (),
    title: str = "",
    source: str = "",
) -> Brief:
    """What a machine sustains, what limits a step on it and, of a ladder, how near to that its rungs come.

    peak: FLOP/s of the chip by its datasheet in the number format of the fastest matmul, where known. lines:
    of a ladder, which `title` names; source: where its rungs were measured.
    """
    best = ceiling.best
    rates, bounds = ceiling_table(ceiling), bound_table(title, lines, [source])
    share_of_peak = "no datasheet's peak is known"
    if peak:
        share_of_peak = f"{whole_percent(best.flops_per_second / peak)} of the chip's peak by its datasheet"
    answer = [
        f"{number(best.flops_per_second / 1e12)} TFLOP/s in {best.number_format} ({share_of_peak}); "
        f"memory {number(ceiling.copy_bytes_per_second / 1e9)} GB/s."
    ]
    limits = [(rung, limit, ms) for rung, limit, ms in lines if limit.total_ms]
    if lines and limits:
        reached = [(share(limit, ms) or 0.0, rung) for rung, limit, ms in limits if ms]
        if reached:
            most, rung = max(reached)
            answer.append(f"Nearest to its limit: {rung}, {whole_percent(most)} of it.")
        answer += _bound_by(f"rung {limits[-1][0]}", limits[-1][1])
    elif not lines:
        alike = Toggles(autocast="bfloat16" if best.number_format == "bfloat16" else "float32")
        limit = bound(workload, alike, ceiling)
        answer += _bound_by(f"one sequence of {workload.seq_len:,} tokens by {workload.model}", limit)
    return Brief(
        answer=answer,
        table=bounds if lines else rates,
        whole=[rates, bounds] if lines else [rates],
        warnings=[note for note in bounds.notes if note not in (ASSUMPTIONS, source)] if lines else [],
        notes=[source, ASSUMPTIONS] if lines else rates.notes,
        hints=["All rates, and what a limit is: --full; the record keeps them."],
    )


def _bound_by(what: str, limit: Bound) -> list[str]:
    """Which part takes most of the least time of a step."""
    parts = {"matmuls": limit.products_ms, "attention": limit.attention_ms, "memory": limit.optimizer_ms}
    if limit.total_ms is None:
        return []
    name, most = max(((part, ms or 0.0) for part, ms in parts.items()), key=lambda part: part[1])
    of = whole_percent(most / limit.total_ms)
    return [f"A step of {what} takes {number(limit.total_ms)} ms at least, {of} of that for {name}."]


# --- Tables


def ceiling_table(ceiling: Ceiling) -> Table:
    """TFLOP/s by matmul and number format, those of the gradients where measured, and the speed of memory."""
    forward = [m for m in ceiling.matmuls if m.role in (None, "forward")]
    gradients = [m for m in ceiling.matmuls if m.role not in (None, "forward")]
    rates = {(m.name, m.m, m.k, m.n, m.number_format): m.flops_per_second for m in forward}
    of_gradients = {(m.name, m.role, m.number_format): m.flops_per_second for m in gradients}

    def teraflops(rate: float | None) -> float | None:
        return rate / 1e12 if rate is not None else None

    columns: list[Column[tuple[str, int, int, int]]] = [
        Column("Matmul", lambda row: row[0], words=True),
        Column("m x k x n", lambda row: " x ".join(f"{size:,}" for size in row[1:]), words=True, drop=1),
    ]
    for each in dict.fromkeys(m.number_format for m in forward):
        columns.append(Column(each, lambda row, f=each: teraflops(rates.get((*row, f))), number))
    for role, each in dict.fromkeys((m.role, m.number_format) for m in gradients):
        name = f"{str(role).replace('_', ' ')}, {each}"
        rate_of = lambda row, key=(role, each): teraflops(of_gradients.get((row[0], *key)))  # noqa: E731
        columns.append(Column(name, rate_of, number, drop=2))
    threads = f" on {ceiling.threads} threads" if ceiling.threads is not None else ""
    in_place = ceiling.update_bytes_per_second
    update = f", change in place {number(in_place / 1e9)} GB/s" if in_place is not None else ""
    return Table(
        title="TFLOP/s sustained",
        columns=columns,
        rows=list(dict.fromkeys((m.name, m.m, m.k, m.n) for m in forward)),
        notes=[
            *(f"{each} was not measured: {reason}" for each, reason in ceiling.absent.items()),
            f"{ceiling.chip}{threads}; {ceiling.seconds:.0f} s of measuring. TFLOP/s are of all blocks, not "
            "of the best.",
            f"Memory, read plus written: copy {number(ceiling.copy_bytes_per_second / 1e9)} GB/s{update}.",
            *([_attention(ceiling.attention)] if ceiling.attention else []),
        ],
    )


def _attention(a: Attention) -> str:
    forward = a.flops / 3 / a.forward_seconds
    kernel = f" by {a.kernel}" if a.kernel else ""
    return (
        f"Attention{kernel} in {a.number_format}, {a.B} x {a.n_head} x {a.seq_len:,} x {a.head_dim}, on the "
        f"causal half: {number(a.flops_per_second / 1e12)} TFLOP/s forward and backward "
        f"({number(1e3 * a.training_seconds)} ms a layer), {number(forward / 1e12)} forward."
    )


def bound_table(title: str, lines: Sequence[BoundRow], notes: Sequence[str]) -> Table:
    """The limit of each rung, its parts, and how near to it the rung came; reasons and assumptions below."""
    columns: list[Column[BoundRow]] = [
        Column("Rung", lambda line: line[0], words=True),
        Column("Number format", lambda line: line[1].number_format, words=True, drop=3),
        Column("At own rates", lambda line: _by_own_rate(line[1]) or None, words=True, drop=1),
        Column("Matmuls (ms)", lambda line: line[1].products_ms, number, drop=6),
        Column("Attention (ms)", lambda line: line[1].attention_ms, number, drop=5),
        Column("AdamW (ms)", lambda line: line[1].optimizer_ms, number, drop=4),
        Column("Limit (ms/step)", lambda line: line[1].total_ms, number),
        Column("Measured (ms/step)", lambda line: line[2], number, drop=7),
        Column("Of limit", lambda line: share(line[1], line[2]), percent),
    ]
    reasons = [f"{rung}: {limit.absent}" for rung, limit, _ in lines if limit.absent]
    if any((share(limit, measured) or 0.0) > 1 for _, limit, measured in lines):
        reasons.append(
            "Above 100 % of the limit: this ceiling is of a slower hour than the run, so measure it again "
            "with nothing else running; or, where parts count at own rates, the rung's kernels are faster "
            "than those measured."
        )
    return Table(title=title, columns=columns, rows=lines, notes=[*reasons, ASSUMPTIONS, *notes])


def _by_own_rate(limit: Bound) -> str:
    """Which parts of the limit count at a rate measured for themselves."""
    parts = {"matmuls": limit.products_by_shape, "attention": limit.attention_by_kernel}
    return ", ".join(name for name, own in parts.items() if own)

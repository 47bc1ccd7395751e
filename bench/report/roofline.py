"""Tables of `bench roofline`: what a machine sustains, and how near to it a ladder's rungs come."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.analysis.bound import ASSUMPTIONS, Bound, bound, share
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, number, plain
from bench.ladder.ladder import Ladder
from bench.records.machine import Attention, Ceiling
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


Line = tuple[str, Bound, float | None]
"""A rung's name, its bound, and its measured milliseconds per optimiser step."""


def ladder_lines(ladder: Ladder, device: str, ceiling: Ceiling, board: Scoreboard | None) -> list[Line]:
    """A line for each rung.

    device: that of the ceiling. board: results of the ladder, where there are any.
    """
    lines = []
    for rung in ladder.own:
        limit = bound(ladder.workload, rung.toggles, ceiling)
        if rung.toggles.device != device:
            reason = f"it trains on {rung.toggles.device}, the ceiling is that of {device}"
            limit = Bound(number_format=limit.number_format, absent=reason)
        measured = measured_ms(board, rung.name, ladder.workload, rung.toggles) if board else None
        lines.append((rung.name, limit, measured))
    return lines


# --- Tables


def ceiling_table(ceiling: Ceiling) -> Group:
    """TFLOP/s by matmul and number format, those of the gradients where measured, and the speed of memory."""
    forward = [m for m in ceiling.matmuls if m.role in (None, "forward")]
    gradients = [m for m in ceiling.matmuls if m.role not in (None, "forward")]
    formats = list(dict.fromkeys(m.number_format for m in forward))
    rates = {(m.name, m.m, m.k, m.n, m.number_format): m.flops_per_second for m in forward}
    more = list(dict.fromkeys((m.role, m.number_format) for m in gradients))
    of_gradients = {(m.name, m.role, m.number_format): m.flops_per_second for m in gradients}
    titles = [f"{str(role).replace('_', ' ')}, {number_format}" for role, number_format in more]
    table = _table("TFLOP/s sustained", ["Product", "m x k x n"], [*formats, *titles])
    for name, m, k, n in dict.fromkeys((p.name, p.m, p.k, p.n) for p in forward):
        row_rates = [rates.get((name, m, k, n, number_format)) for number_format in formats]
        row_rates += [of_gradients.get((name, *column)) for column in more]
        shown = [number(rate / 1e12) if rate is not None else DASH for rate in row_rates]
        table.add_row(*map(_text, [name, f"{m:,} x {k:,} x {n:,}", *shown]))
    threads = f" on {ceiling.threads} threads" if ceiling.threads is not None else ""
    in_place = ceiling.update_bytes_per_second
    update = f", change in place {number(in_place / 1e9)} GB/s" if in_place is not None else ""
    notes = [
        f"{ceiling.chip}{threads}; {ceiling.seconds:.0f} s of measuring. Each rate is of all blocks, not of "
        "the best.",
        f"Memory, read plus written: copy {number(ceiling.copy_bytes_per_second / 1e9)} GB/s{update}.",
        *([_attention(ceiling.attention)] if ceiling.attention else []),
        *(f"{number_format} was not measured: {reason}" for number_format, reason in ceiling.absent.items()),
    ]
    return Group(table, *map(_note, notes))


def _attention(a: Attention) -> str:
    forward = a.flops / 3 / a.forward_seconds
    kernel = f" by {a.kernel}" if a.kernel else ""
    return (
        f"Attention{kernel} in {a.number_format}, {a.B} x {a.n_head} x {a.seq_len:,} x {a.head_dim}, on the "
        f"causal half: {number(a.flops_per_second / 1e12)} TFLOP/s forward and backward "
        f"({number(1e3 * a.training_seconds)} ms a layer), {number(forward / 1e12)} forward."
    )


def bound_table(title: str, lines: Sequence[Line], notes: Sequence[str]) -> Group:
    """The bound of each rung, its parts, and how near to it the rung came; reasons and assumptions below."""
    figures = ["Products (ms)", "Attention (ms)", "Optimiser (ms)", "Bound (ms/step)", "Measured (ms/step)"]
    by_own_rates = any(_by_own_rate(limit) for _, limit, _ in lines)
    words = ["Rung", "Number format", *(["At own rates"] if by_own_rates else [])]
    table = _table(title, words, [*figures, "Share of bound"])
    for rung, limit, measured in lines:
        parts = [limit.products_ms, limit.attention_ms, limit.optimizer_ms, limit.total_ms, measured]
        reached = share(limit, measured)
        percent = f"{reached:.1%}" if reached is not None else DASH
        shown = [number(part) if part is not None else DASH for part in parts]
        own = [_by_own_rate(limit) or DASH] if by_own_rates else []
        table.add_row(*map(_text, [rung, limit.number_format, *own, *shown, percent]))
    reasons = [f"{rung}: {limit.absent}" for rung, limit, _ in lines if limit.absent]
    if any((share(limit, measured) or 0.0) > 1 for _, limit, measured in lines):
        reasons.append(
            "A share above 100 %: this ceiling is of a slower hour than the run, so measure it again with "
            "nothing else running; or, where parts count at own rates, the rung's kernels are faster than "
            "those measured."
        )
    return Group(table, *map(_note, [*reasons, ASSUMPTIONS, *notes]))


def _by_own_rate(limit: Bound) -> str:
    """Which parts of the bound count at a rate measured for themselves."""
    parts = {"products": limit.products_by_shape, "attention": limit.attention_by_kernel}
    return ", ".join(name for name, own in parts.items() if own)


def _table(title: str, words: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(title=_text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _text(cell: str) -> Text:
    return Text(plain(cell))


def _note(line: str) -> Text:
    return Text(plain(line), style="dim")

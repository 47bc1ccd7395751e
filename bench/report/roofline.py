"""The fewest milliseconds that a rung's optimiser step can take at this machine's measured ceiling, and its tables.

bound(workload, toggles, ceiling).total_ms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.ladder import Ladder
from bench.machine import Ceiling, Matmul
from bench.report.scoreboard import Scoreboard
from bench.report.text import DASH, number, plain
from bench.shapes import linear_layers
from gpt2.toggles import Toggles
from gpt2.workload import Workload

BYTES_PER_PARAMETER = 28 + 4
"""AdamW in float32 reads weight, gradient and two moments, and writes weight and moments; before it the gradient is
written once. Clipping by the global norm, and gradients added up over micro-batches, would cost more."""

ASSUMPTIONS = (
    "Bound: the three products of each linear layer and of lm_head (logical vocabulary), at the rate measured for its "
    "shape or for the best square, whichever is higher; attention on the causal half of the scores, at the best rate "
    "of all; then, because clipping waits for all gradients, AdamW's traffic of "
    f"{BYTES_PER_PARAMETER} bytes per parameter at the speed of memory (weights that stay in a cache can beat that). "
    "Nothing else: no cross-entropy, no GELU, no LayerNorm, no communication."
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Milliseconds per optimiser step of one device, by part; None where its number format has no measured rate."""

    number_format: str
    products_ms: float | None = None
    """Linear layers and lm_head, forward and backward."""
    attention_ms: float | None = None
    optimizer_ms: float | None = None
    """Memory traffic of the gradients and of AdamW."""
    absent: str | None = None
    """Why there is no bound."""

    @property
    def total_ms(self) -> float | None:
        """The parts follow each other, so they add up."""
        if self.products_ms is None or self.attention_ms is None or self.optimizer_ms is None:
            return None
        return self.products_ms + self.attention_ms + self.optimizer_ms


def bound(workload: Workload, toggles: Toggles, ceiling: Ceiling) -> Bound:
    """The least time of one optimiser step, were its products and its optimiser to run at the ceiling.

    With several ranks each device has its own share of the tokens; ranks on a CPU share it, so it does all their work.
    """
    number_format = toggles.product_format()
    measured = [m for m in ceiling.matmuls if m.number_format == number_format]
    if not measured:
        reason = ceiling.absent.get(number_format, "not measured")
        return Bound(number_format=number_format, absent=f"no ceiling for {number_format}: {reason}")
    shared_by = toggles.world_size if ceiling.threads is not None else 1
    tokens = toggles.tokens_per_step(workload.seq_len) // toggles.world_size * shared_by
    config = workload.config
    products = sum(
        layer.count * product_flops(tokens, layer.k, layer.n) / _rate(measured, layer.name, layer.k, layer.padded_n)
        for layer in linear_layers(config)
    )
    best = max(m.flops_per_second for m in measured)
    traffic = BYTES_PER_PARAMETER * config.parameters * shared_by
    return Bound(
        number_format=number_format,
        products_ms=1e3 * products,
        attention_ms=1e3 * causal_attention_flops(workload, tokens) / best,
        optimizer_ms=1e3 * traffic / max(ceiling.copy_bytes_per_second, ceiling.update_bytes_per_second or 0.0),
    )


def product_flops(tokens: int, k: int, n: int) -> int:
    """Of a linear layer from k to n: its product, and the two for the gradients of its input and of its weight."""
    return 3 * 2 * tokens * k * n


def causal_attention_flops(workload: Workload, tokens: int) -> int:
    """Scores and averages, forward and backward, over the (T + 1) / 2 positions that a token attends to on average.

    gpt2.workload.flops_per_token counts all T; what kernels may skip is no part of a least time.
    """
    config = workload.config
    return 3 * 2 * 2 * config.n_layer * config.n_embd * tokens * (workload.seq_len + 1) // 2


def _rate(measured: Sequence[Matmul], name: str, k: int, n: int) -> float:
    """FLOP/s of a layer's products: of its own shape or of the best square, whichever is higher.

    The gradients' products have other shapes than the forward one, and other rungs have other micro-batches: squares
    stand for what all of these might reach. Where neither was measured, the best product does.
    """
    alike = [m for m in measured if m.name == "square" or (m.name, m.k, m.n) == (name, k, n)]
    return max(m.flops_per_second for m in alike or measured)


def share(bound: Bound, measured_ms: float | None) -> float | None:
    """The bound over what was measured: 1 is as fast as the ceiling allows."""
    if bound.total_ms is None or measured_ms is None:
        return None
    return bound.total_ms / measured_ms


def measured_ms(board: Scoreboard, rung: str, workload: Workload, toggles: Toggles) -> float | None:
    """Milliseconds per optimiser step of a rung in older results, provided that these are of the same computation."""
    same = [r for r in board.records if r.rung == rung and Workload(**r.workload) == workload]
    row = next((row for row in board.rows if row.rung == rung), None)
    if row is None or row.tps is None or row.tokens_per_step is None:
        return None
    if not any(Toggles(**r.toggles.all) == toggles for r in same):
        return None
    return 1e3 * row.tokens_per_step / row.tps.value


Line = tuple[str, Bound, float | None]
"""A rung's name, its bound, and its measured milliseconds per optimiser step."""


def ladder_lines(ladder: Ladder, device: str, ceiling: Ceiling, board: Scoreboard | None) -> list[Line]:
    """A line for each rung. device: that of the ceiling. board: results of the ladder, where there are any."""
    lines = []
    for rung in ladder.rungs:
        least = bound(ladder.workload, rung.toggles, ceiling)
        if rung.toggles.device != device:
            reason = f"it trains on {rung.toggles.device}, the ceiling is that of {device}"
            least = Bound(number_format=least.number_format, absent=reason)
        measured = measured_ms(board, rung.name, ladder.workload, rung.toggles) if board else None
        lines.append((rung.name, least, measured))
    return lines


# --- tables -------------------------------------------------------------------------------------------------------


def ceiling_table(ceiling: Ceiling) -> Group:
    """TFLOP/s by product and number format, and the speed of a copy."""
    formats = list(dict.fromkeys(m.number_format for m in ceiling.matmuls))
    rates = {(m.name, m.m, m.k, m.n, m.number_format): m.flops_per_second for m in ceiling.matmuls}
    table = _table("TFLOP/s sustained", ["Product", "m x k x n"], formats)
    for name, m, k, n in dict.fromkeys((p.name, p.m, p.k, p.n) for p in ceiling.matmuls):
        found = [rates.get((name, m, k, n, number_format)) for number_format in formats]
        shown = [number(rate / 1e12) if rate is not None else DASH for rate in found]
        table.add_row(*map(_text, [name, f"{m:,} x {k:,} x {n:,}", *shown]))
    threads = f" on {ceiling.threads} threads" if ceiling.threads is not None else ""
    in_place = ceiling.update_bytes_per_second
    update = f", change in place {number(in_place / 1e9)} GB/s" if in_place is not None else ""
    notes = [
        f"{ceiling.chip}{threads}; {ceiling.seconds:.0f} s of measuring. Each rate is of all blocks, not of the best.",
        f"Memory, read plus written: copy {number(ceiling.copy_bytes_per_second / 1e9)} GB/s{update}.",
        *(f"{number_format} was not measured: {reason}" for number_format, reason in ceiling.absent.items()),
    ]
    return Group(table, *map(_note, notes))


def bound_table(title: str, lines: Sequence[Line], notes: Sequence[str]) -> Group:
    """The bound of each rung, its parts, and how near to it the rung came; reasons and assumptions below."""
    figures = ["Products (ms)", "Attention (ms)", "Optimiser (ms)", "Bound (ms/step)", "Measured (ms/step)"]
    table = _table(title, ["Rung", "Number format"], [*figures, "Share of bound"])
    for rung, least, measured in lines:
        parts = [least.products_ms, least.attention_ms, least.optimizer_ms, least.total_ms, measured]
        reached = share(least, measured)
        percent = f"{reached:.1%}" if reached is not None else DASH
        shown = [number(part) if part is not None else DASH for part in parts]
        table.add_row(*map(_text, [rung, least.number_format, *shown, percent]))
    reasons = [f"{rung}: {least.absent}" for rung, least, _ in lines if least.absent]
    return Group(table, *map(_note, [*reasons, ASSUMPTIONS, *notes]))


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

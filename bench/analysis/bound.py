"""The fewest milliseconds that a rung's optimiser step can take at what was measured of its machine. Imports
no torch.

bound(workload, toggles, ceiling).total_ms
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import get_args

from bench.analysis.matmul_shapes import Linear, attention_flops, linear_layers
from bench.analysis.row import Row
from bench.analysis.scoreboard import Scoreboard
from bench.records.machine import Ceiling, Matmul, Role
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

BYTES_PER_PARAMETER = 28 + 4
"""AdamW in float32 reads weight, gradient and two moments, and writes weight and moments; before it the
gradient is written once. Clipping by the global norm, and gradients added up over micro-batches, would cost
more; with casts by AdamW it is 31, with weights in bfloat16 24, a hundredth of a step or less.
"""

MEASURED_ATTENTION = ("sdpa", "flash", "efficient", "cudnn")
"""Values of the toggle `attention` that run the kernels of which the ceiling times torch's own choice.
Others, such as brgemm on a CPU, are there to be faster than that.
"""

ASSUMPTIONS = (
    "Bound: the three products of each linear layer and of lm_head (logical vocabulary), at the rate "
    "measured for its shape or for the best square, whichever is higher; attention on the causal half of the "
    "scores, at the best rate of all. Where the ceiling has them in the rung's number format: each product "
    "at the rate of its own shape, the gradients' included (not with products: tuned, which splits them), "
    "and attention at that of torch's own choice of kernel (for torch's kernels only). Then, because "
    f"clipping waits for all gradients, AdamW's traffic of {BYTES_PER_PARAMETER} bytes per parameter, shared "
    "out where ranks share anything, at the speed of memory (weights that stay in a cache can beat that). "
    "Nothing else: no cross-entropy, no GELU, no LayerNorm, no communication."
)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Milliseconds per optimiser step of one device, by part; None where its number format has no measured
    rate.
    """

    number_format: str
    products_ms: float | None = None
    """Linear layers and lm_head, forward and backward."""
    products_by_shape: bool = False
    """Whether each product, the gradients' included, counts at the rate measured for its own shape; a library
    that is better at a shape could beat that.
    """
    attention_ms: float | None = None
    attention_by_kernel: bool = False
    """Whether attention counts at the rate measured for torch's own choice of kernel, not at the best
    matmul's.
    """
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


def bound(workload: Workload, toggles: Toggles, ceiling: Ceiling, nodes: int = 1) -> Bound:
    """The least time of one optimiser step, were its products and its optimiser to run at the ceiling.

    With several ranks each device has its own share of the tokens; ranks on a CPU share it, so it does all
    the work of those on its node.
    """
    number_format = toggles.product_format()
    measured = [m for m in ceiling.matmuls if m.number_format == number_format]
    if not measured:
        reason = ceiling.absent.get(number_format, "not measured")
        return Bound(number_format=number_format, absent=f"no ceiling for {number_format}: {reason}")
    shared_by = toggles.world_size // nodes if ceiling.threads is not None else 1
    tokens = toggles.tokens_per_step(workload.seq_len) // toggles.world_size * shared_by
    config = workload.config
    layers = linear_layers(config)
    own = [rate for layer in layers if (rate := _own_rate(measured, layer)) is not None]
    by_shape = len(own) == len(layers) and not _multiplies_otherwise(toggles)
    rates = own if by_shape else [_rate(measured, layer.name, layer.k, layer.padded_n) for layer in layers]
    products = sum(
        layer.count * product_flops(tokens, layer.k, layer.n) / rate
        for layer, rate in zip(layers, rates, strict=True)
    )
    attention = _attention_rate(workload, toggles, ceiling)
    best = max(m.flops_per_second for m in measured)
    shares = toggles.world_size if toggles.sharding != "none" else 1
    traffic = BYTES_PER_PARAMETER * config.parameters * shared_by / shares
    return Bound(
        number_format=number_format,
        products_ms=1e3 * products,
        products_by_shape=by_shape,
        attention_ms=1e3 * causal_attention_flops(workload, tokens) / (attention or best),
        attention_by_kernel=attention is not None,
        optimizer_ms=1e3
        * traffic
        / max(ceiling.copy_bytes_per_second, ceiling.update_bytes_per_second or 0.0),
    )


def _multiplies_otherwise(toggles: Toggles) -> bool:
    """Whether a rung's matmuls are others than those of torch in its number format, which the ceiling
    measures.
    """
    tuned = (
        toggles.products == "tuned" or "gemm" in toggles.compile or toggles.compile.startswith("max-autotune")
    )
    return tuned or toggles.float8 != "none" or toggles.int8 != "none"


def product_flops(tokens: int, k: int, n: int) -> int:
    """Of a linear layer from k to n: its product, and the two for the gradients of its input and of its
    weight.
    """
    return 3 * 2 * tokens * k * n


def causal_attention_flops(workload: Workload, tokens: int) -> int:
    """Scores and averages, forward and backward, over the (T + 1) / 2 positions that a token attends to on
    average.

    gpt2.config.workload.flops_per_token counts all T; what kernels may skip is no part of a least time.
    """
    return workload.config.n_layer * attention_flops(workload.config.n_embd, tokens, workload.seq_len)


def _rate(measured: Sequence[Matmul], name: str, k: int, n: int) -> float:
    """FLOP/s of a layer's products: of its own shape or of the best square, whichever is higher.

    The gradients' products have other shapes than the forward one, and other rungs have other micro-batches:
    squares stand for what all of these might reach. Where neither was measured, the best product does.
    """
    forward = [m for m in measured if m.role in (None, "forward")]
    alike = [m for m in forward if m.name == "square" or (m.name, m.k, m.n) == (name, k, n)]
    return max(m.flops_per_second for m in alike or measured)


def _own_rate(measured: Sequence[Matmul], layer: Linear) -> float | None:
    """FLOP/s of a layer's three products in turn; None unless each was measured at its own shape."""
    found: dict[Role, float] = {}
    for m in measured:
        tokens = m.k if m.role == "weight_gradient" else m.m
        if m.name == layer.name and m.role is not None and (m.m, m.k, m.n) == layer.shape(m.role, tokens):
            found[m.role] = m.flops_per_second
    return harmonic_mean(found.values()) if len(found) == len(get_args(Role)) else None


def _attention_rate(workload: Workload, toggles: Toggles, ceiling: Ceiling) -> float | None:
    """FLOP/s of a rung's attention, forward and backward; None where nothing like it was measured.

    Longer sequences have higher rates, so that one measured at a longer sequence is a bound of a shorter one.
    """
    config, found = workload.config, ceiling.attention
    if found is None or toggles.attention not in MEASURED_ATTENTION:
        return None
    alike = (
        found.number_format == toggles.product_format() and found.head_dim == config.n_embd // config.n_head
    )
    return found.flops_per_second if alike and found.seq_len >= workload.seq_len else None


def share(bound: Bound, measured_ms: float | None) -> float | None:
    """The bound over what was measured: 1 is as fast as the ceiling allows."""
    if bound.total_ms is None or measured_ms is None:
        return None
    return bound.total_ms / measured_ms


def each_of_row(board: Scoreboard, row: Row) -> list[Bound]:
    """The bound of a rung of a run, at what each of its processes measured; none where no ceiling was
    measured.
    """
    records = board.records_of(row)
    workload = Workload(**records[0].workload)
    nodes = max(record.toggles.nodes for record in records)
    measured = board.ceilings[row.toggles.device].measured if row.toggles.device in board.ceilings else ()
    return [bound(workload, row.toggles, ceiling, nodes) for ceiling in measured]


def of_row(board: Scoreboard, row: Row) -> Bound | None:
    """As each_of_row(), at the most that any process measured.

    A run's processes measure a little more or less: the most of them is what a bound may promise.
    """
    bounds = each_of_row(board, row)
    known = [(each.total_ms, place) for place, each in enumerate(bounds) if each.total_ms is not None]
    return bounds[min(known)[1] if known else 0] if bounds else None


def most_tokens_per_second(least: Bound, tokens_per_step: int) -> float | None:
    """Of all devices together, were each step to take no longer than the bound."""
    return 1e3 * tokens_per_step / least.total_ms if least.total_ms is not None else None

"""The fewest milliseconds an optimiser step can take at the rates measured on its machine.

bound(workload, toggles, ceiling).total_ms
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import harmonic_mean
from typing import get_args

from bench.analysis.row import Row
from bench.analysis.scoreboard import Scoreboard
from bench.records.machine import Ceiling, Matmul, Role
from gpt2.config.toggles import Toggles
from gpt2.config.workload import GPT2Config, Workload

VOCAB_MULTIPLE = 64
"""lm_head is measured at the vocabulary padded to this: 50304, which divides evenly into tiles, not 50257."""

BYTES_PER_PARAMETER = 28 + 4
"""Memory traffic of AdamW in float32.

It reads weight, gradient and two moments and writes weight and moments; before it the gradient is written
once. Clipping by the global norm and gradients added up over micro-batches would cost more; casts by AdamW
make it 31 and weights in bfloat16 24, which changes a step by a hundredth or less.
"""

MEASURED_ATTENTION = ("sdpa", "flash", "efficient", "cudnn")
"""Values of the toggle `attention` that run the kernels of which the ceiling times torch's own choice.

Others, such as brgemm on a CPU, are there to be faster than that.
"""

ASSUMPTIONS = (
    "Limit: the three matmuls of each linear layer and of lm_head (logical vocabulary), at the rate "
    "measured for its shape or for the best square, whichever is higher; attention on the causal half of the "
    "scores, at the best rate of all. Where the ceiling has them in the rung's number format: each matmul "
    "at the rate of its own shape, the gradients' included (not with products: tuned, which splits them), "
    "and attention at that of torch's own choice of kernel (for torch's kernels only). Then, because "
    f"clipping waits for all gradients, AdamW's traffic of {BYTES_PER_PARAMETER} bytes per parameter, shared "
    "out where ranks share anything, at the speed of memory (weights that stay in a cache can beat that). "
    "Nothing else: no cross-entropy, no GELU, no LayerNorm, no communication."
)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer: (tokens, k) by (k, n), `count` times in the model."""

    name: str
    k: int
    n: int
    padded_n: int
    """n as it is measured; it differs for lm_head only."""
    count: int

    def shape(self, role: Role, tokens: int) -> tuple[int, int, int]:
        """(m, k, n) of one of the layer's three matmuls, as it is measured."""
        return {
            "forward": (tokens, self.k, self.padded_n),
            "input_gradient": (tokens, self.padded_n, self.k),
            "weight_gradient": (self.padded_n, tokens, self.k),
        }[role]


def linear_layers(config: GPT2Config) -> list[Linear]:
    """The five shapes of linear layers in the model; n of lm_head is the logical vocabulary."""
    d, layers = config.n_embd, config.n_layer
    padded = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return [
        Linear(name="qkv", k=d, n=3 * d, padded_n=3 * d, count=layers),
        Linear(name="attention projection", k=d, n=d, padded_n=d, count=layers),
        Linear(name="MLP up", k=d, n=4 * d, padded_n=4 * d, count=layers),
        Linear(name="MLP down", k=4 * d, n=d, padded_n=d, count=layers),
        Linear(name="lm_head", k=d, n=config.vocab_size, padded_n=padded, count=1),
    ]


def attention_flops(n_embd: int, tokens: int, seq_len: int) -> int:
    """FLOPs of one layer's attention, forward and backward, on the causal half of the scores.

    Each token attends to (seq_len + 1) / 2 positions on average. gpt2.config.workload.flops_per_token counts
    all of them; work that kernels may skip is no part of a least time.
    """
    return 3 * 2 * n_embd * tokens * (seq_len + 1)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Least milliseconds per optimiser step of one device, by part; None without a measured rate."""

    number_format: str
    products_ms: float | None = None
    """Matmuls of the linear layers and lm_head, forward and backward."""
    products_by_shape: bool = False
    """Whether each matmul counts at the rate measured for its own shape; a better library could beat that."""
    attention_ms: float | None = None
    attention_by_kernel: bool = False
    """Whether attention counts at the rate of torch's own choice of kernel, not at the best matmul's."""
    optimizer_ms: float | None = None
    """Memory traffic of the gradients and of AdamW."""
    absent: str | None = None
    """Why there is no bound."""

    @property
    def total_ms(self) -> float | None:
        """Sum of the parts, which follow each other."""
        if self.products_ms is None or self.attention_ms is None or self.optimizer_ms is None:
            return None
        return self.products_ms + self.attention_ms + self.optimizer_ms


def bound(workload: Workload, toggles: Toggles, ceiling: Ceiling, nodes: int = 1) -> Bound:
    """The least time of one optimiser step, if its matmuls and its optimiser ran at the ceiling.

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
    own_rates = [rate for layer in layers if (rate := _own_rate(measured, layer)) is not None]
    by_shape = len(own_rates) == len(layers) and _runs_torch_matmuls(toggles)
    rates = own_rates if by_shape else [_rate(measured, layer) for layer in layers]
    products = sum(
        layer.count * product_flops(tokens, layer.k, layer.n) / rate
        for layer, rate in zip(layers, rates, strict=True)
    )
    attention_rate = _attention_rate(workload, toggles, ceiling)
    best = max(m.flops_per_second for m in measured)
    shares = toggles.world_size if toggles.sharding != "none" else 1
    traffic = BYTES_PER_PARAMETER * config.parameters * shared_by / shares
    return Bound(
        number_format=number_format,
        products_ms=1e3 * products,
        products_by_shape=by_shape,
        attention_ms=1e3 * causal_attention_flops(workload, tokens) / (attention_rate or best),
        attention_by_kernel=attention_rate is not None,
        optimizer_ms=1e3
        * traffic
        / max(ceiling.copy_bytes_per_second, ceiling.update_bytes_per_second or 0.0),
    )


def _runs_torch_matmuls(toggles: Toggles) -> bool:
    """Whether a rung runs the matmuls that the ceiling measures: torch's own, in the rung's number format."""
    tuned = "gemm" in toggles.compile or toggles.compile.startswith("max-autotune")
    return not tuned and (toggles.products, toggles.float8, toggles.int8) == ("whole", "none", "none")


def product_flops(tokens: int, k: int, n: int) -> int:
    """FLOPs of a linear layer from k to n: the forward matmul and those of the two gradients."""
    return 3 * 2 * tokens * k * n


def causal_attention_flops(workload: Workload, tokens: int) -> int:
    """FLOPs of all layers' attention, see attention_flops()."""
    return workload.config.n_layer * attention_flops(workload.config.n_embd, tokens, workload.seq_len)


def _rate(measured: Sequence[Matmul], layer: Linear) -> float:
    """FLOP/s of a layer's matmuls: the rate of its own shape or of the best square, whichever is higher.

    The gradients' matmuls have other shapes than the forward one, and other rungs have other micro-batches:
    squares stand for what all of these might reach. Where neither was measured, the best matmul does.
    """
    forward = [m for m in measured if m.role in (None, "forward")]
    own = layer.name, layer.k, layer.padded_n
    alike = [m for m in forward if m.name == "square" or (m.name, m.k, m.n) == own]
    return max(m.flops_per_second for m in alike or measured)


def _own_rate(measured: Sequence[Matmul], layer: Linear) -> float | None:
    """FLOP/s of a layer's three matmuls in turn; None unless each was measured at its own shape."""
    rates: dict[Role, float] = {}
    for m in measured:
        tokens = m.k if m.role == "weight_gradient" else m.m
        if m.name == layer.name and m.role is not None and (m.m, m.k, m.n) == layer.shape(m.role, tokens):
            rates[m.role] = m.flops_per_second
    return harmonic_mean(rates.values()) if len(rates) == len(get_args(Role)) else None


def _attention_rate(workload: Workload, toggles: Toggles, ceiling: Ceiling) -> float | None:
    """FLOP/s of a rung's attention, forward and backward; None where nothing like it was measured.

    Longer sequences have higher rates, so that one measured at a longer sequence is a bound of a shorter one.
    """
    config, attention = workload.config, ceiling.attention
    if attention is None or toggles.attention not in MEASURED_ATTENTION:
        return None
    same_format = attention.number_format == toggles.product_format()
    same_width = attention.head_dim == config.n_embd // config.n_head
    long_enough = attention.seq_len >= workload.seq_len
    return attention.flops_per_second if same_format and same_width and long_enough else None


def share(bound: Bound, measured_ms: float | None) -> float | None:
    """The bound over the measured time: 1 is as fast as the ceiling allows."""
    if bound.total_ms is None or measured_ms is None:
        return None
    return bound.total_ms / measured_ms


def bound_of(board: Scoreboard, row: Row) -> Bound | None:
    """The least of a rung's bounds by the processes that measured the ceiling, as only that can be promised.

    None where no ceiling was measured.
    """
    records = board.records_of(row)
    workload = Workload(**records[0].workload)
    nodes = max(record.toggles.nodes for record in records)
    measured = board.ceilings[row.toggles.device].measured if row.toggles.device in board.ceilings else ()
    bounds = [bound(workload, row.toggles, ceiling, nodes) for ceiling in measured]
    return min(bounds, key=lambda b: math.inf if b.total_ms is None else b.total_ms, default=None)


def most_tokens_per_second(bound: Bound, tokens_per_step: int) -> float | None:
    """Tokens per second of all devices together, if each step took no longer than the bound."""
    return 1e3 * tokens_per_step / bound.total_ms if bound.total_ms is not None else None


def limit_tps(board: Scoreboard, row: Row) -> float | None:
    """Tokens per second of a rung whose step were matmuls, causal attention and AdamW's traffic alone."""
    least, tokens = bound_of(board, row), row.tokens_per_step
    return most_tokens_per_second(least, tokens) if least and tokens else None

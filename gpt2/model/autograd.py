"""Autograd functions with a hand-written backward pass, where torch's derived one does more work.

They compute the same functions and gradients by other means; torch.compile fuses their element-wise parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

LIBRARY = torch.library.Library("gpt2", "FRAGMENT")
"""Library of this project's operators."""


def operator(schema: str, shapes: Callable[..., Any], *, tags: Sequence[Any] = (), **kernels: Any) -> None:
    """Define gpt2::NAME(...), opaque to torch.compile.

    shapes: returns the results' shapes and dtypes in empty tensors. kernels: functions by dispatch key: CPU,
    CUDA, or CompositeExplicitAutograd for any device.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tags)
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"gpt2::{name}", shapes, lib=LIBRARY)


A = 2 * math.sqrt(2 / math.pi)
B = 0.044715 * A
"""GELU's tanh approximation is x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), with 2 u = A x + B x^3."""


def product_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a matmul takes a tensor: autocast's where that is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class SigmoidGelu(Function):
    """GELU's tanh approximation with one exponential, which is faster than a tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return GELU of x, in x's shape and dtype."""
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _sigmoid(wide * (A + B * wide * wide))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Return the gradient of x, in its shape and dtype."""
        (gradient,) = grad_outputs
        (x,) = ctx.saved_tensors
        wide = x.float()
        square = wide * wide
        share = _sigmoid(wide * (A + B * square))
        slope = share + wide * share * (1 - share) * (A + 3 * B * square)
        return (gradient.float() * slope).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))  # the compiler vectorises this better than torch.sigmoid


CHUNK = 256
"""Tokens per chunk of logits on a CPU.

torch's own choice, 16 for GPT-2, takes four to five times as long: it adds up the gradient of all weights as
often.
"""


def chunked_cross_entropy(x: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mean cross-entropy of x @ head.T + bias, in chunks: all logits are never in memory at once.

    x: (N, d); head: (V, d); targets: (N,) int64; bias: (V,) or None. Returns nats, a float32 scalar. Uses
    torch.nn.functional.linear_cross_entropy.
    """
    dtype = product_dtype(x)  # autocast does not cover this function
    bias = None if bias is None else bias.to(dtype)
    # In a narrower format torch would also sum the losses of all tokens in that format, which costs a digit
    # or two. reduction="none" avoids that, but then the backward pass computes the logits again.
    reduction = "mean" if dtype == torch.float32 else "none"
    on_cpu = {"batch_chunk_size": CHUNK, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**(on_cpu if x.device.type == "cpu" else {}))
    loss = F.linear_cross_entropy(
        x.to(dtype), head.to(dtype), targets, linear_bias=bias, reduction=reduction, options=options
    )
    return loss.float().mean()


class CrossEntropy(Function):
    """Mean cross-entropy of logits in their own number format, whose backward pass reads them once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, a float32 scalar.

        logits: (N, V), -inf where a class is impossible; targets: (N,) int64.
        """
        log_sum = logits.float().logsumexp(dim=-1)
        ctx.save_for_backward(logits, targets, log_sum)
        return (log_sum - logits.gather(1, targets[:, None]).squeeze(1).float()).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Return softmax minus one-hot targets, scaled by the incoming gradient: (N, V) in the logits' dtype.

        The target's column is written by a scatter, which is cheaper than a comparison in each column.
        """
        (gradient,) = grad_outputs
        logits, targets, log_sum = ctx.saved_tensors
        share, at = gradient / len(targets), targets[:, None]
        chosen = (logits.gather(1, at).float() - log_sum[:, None]).exp()
        softmax = (logits.float() - log_sum[:, None]).exp()
        of_target = ((chosen - 1) * share).to(logits.dtype)
        return (softmax * share).to(logits.dtype).scatter(1, at, of_target), None


class TiedEmbedding(Function):
    """Embedding rows and the lm_head's weights in one function, whose gradients add up in one matrix."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens' embeddings and the lm_head's weights.

        weight: (V, d); copy: the same in another dtype, or None; tokens: (B, T) int64. Returns (B, T, d) in
        weight's dtype, and (V, d): the copy, else the weight in autocast's dtype.
        """
        ctx.save_for_backward(tokens)
        if copy is not None:
            return weight[tokens], copy.view_as(copy)
        dtype = product_dtype(weight)
        return weight[tokens], weight.to(dtype) if dtype != weight.dtype else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        """Return the weight's gradient, (V, d): the lm_head's plus each token's row."""
        rows, head = grad_outputs
        (tokens,) = ctx.saved_tensors
        return torch.ops.gpt2.add_rows(head, rows.flatten(0, 1), tokens.flatten()), None, None


def _add_rows(matrix: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Return matrix, (V, d), in rows' dtype with each of rows, (N, d), added at its index, (N,) int64."""
    return matrix.to(rows.dtype, copy=True).index_add_(0, index, rows)


def _add_rows_shape(matrix: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape, dtype=rows.dtype)


operator(
    "add_rows(Tensor matrix, Tensor rows, Tensor index) -> Tensor",
    _add_rows_shape,
    CompositeExplicitAutograd=_add_rows,
)

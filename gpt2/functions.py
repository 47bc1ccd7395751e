"""Parts of the model whose backward pass is written out, because the one that torch derives does more work.

The same functions and the same gradients, computed otherwise; torch.compile fuses what is elementwise here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

OWN = torch.library.Library("gpt2", "FRAGMENT")
"""Operators of ours, which torch.compile calls as they are."""

A = 2 * math.sqrt(2 / math.pi)
B = 0.044715 * A
"""GELU's tanh approximation is x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), with 2 u = A x + B x^3."""


def product_dtype(tensor: Tensor) -> torch.dtype:
    """What a matrix product takes a tensor as: autocast's format where that is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


class SigmoidGelu(Function):
    """GELU's tanh approximation by one exponential, which is faster than a tanh."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x: any shape. Returns the same shape and dtype."""
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * _sigmoid(wide * (A + B * wide * wide))).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gradient,) = grad_outputs
        (x,) = ctx.saved_tensors
        wide = x.float()
        square = wide * wide
        share = _sigmoid(wide * (A + B * square))
        slope = share + wide * share * (1 - share) * (A + 3 * B * square)
        return (gradient.float() * slope).to(x.dtype)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))  # which the compiler vectorises better than torch.sigmoid


CHUNK = 256
"""Tokens whose logits are there at once on a CPU. torch's own choice there, 16 for GPT-2, adds up the gradient of all
weights so many times that it takes four to five times as long."""


def chunked_cross_entropy(x: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    """Mean cross-entropy of x @ head.T + bias, computed by torch in chunks: all logits are never there at once.

    x: (N, d); head: (V, d); targets: (N,) int64; bias: (V,) or None. Returns nats, a float32 scalar.
    """
    dtype = product_dtype(x)  # autocast passes this function by
    bias = None if bias is None else bias.to(dtype)
    # In a smaller format than float32 torch also adds up the losses of all tokens, which costs a digit or two. Token
    # by token it does not; but then its backward pass computes the logits again.
    reduction = "mean" if dtype == torch.float32 else "none"
    on_cpu = {"batch_chunk_size": CHUNK, "chunking_method": None}
    options = torch.nn.LinearCrossEntropyOptions(**(on_cpu if x.device.type == "cpu" else {}))
    loss = F.linear_cross_entropy(
        x.to(dtype), head.to(dtype), targets, linear_bias=bias, reduction=reduction, options=options
    )
    return loss.float().mean()


class CrossEntropy(Function):
    """Mean cross-entropy of logits in their own number format, with one pass over them in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """logits: (N, V), -inf where a class cannot be; targets: (N,) int64. Returns nats, a float32 scalar."""
        log_sum = logits.float().logsumexp(dim=-1)
        ctx.save_for_backward(logits, targets, log_sum)
        return (log_sum - logits.gather(1, targets[:, None]).squeeze(1).float()).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        """Softmax minus one at the target, which is set apart: a comparison in each column would cost more."""
        (gradient,) = grad_outputs
        logits, targets, log_sum = ctx.saved_tensors
        share, at = gradient / len(targets), targets[:, None]
        chosen = (logits.gather(1, at).float() - log_sum[:, None]).exp()
        softmax = (logits.float() - log_sum[:, None]).exp()
        return (softmax * share).to(logits.dtype).scatter(1, at, ((chosen - 1) * share).to(logits.dtype)), None


class TiedEmbedding(Function):
    """Rows of the embedding, and the whole of it for the lm_head, whose two gradients meet in one matrix."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """weight: (V, d); copy: the same in another dtype, or None; tokens: (B, T) int64.

        Returns (B, T, d) in weight's dtype and (V, d), which is the copy, or else in autocast's.
        """
        ctx.save_for_backward(tokens)
        if copy is not None:
            return weight[tokens], copy.view_as(copy)
        dtype = product_dtype(weight)
        return weight[tokens], weight.to(dtype) if dtype != weight.dtype else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        rows, head = grad_outputs
        (tokens,) = ctx.saved_tensors
        return torch.ops.gpt2.add_rows(head, rows.flatten(0, 1), tokens.flatten()), None, None


OWN.define("add_rows(Tensor matrix, Tensor rows, Tensor index) -> Tensor")


def _add_rows(matrix: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """matrix: (V, d); rows: (N, d); index: (N,) int64. Returns (V, d) in rows' dtype: each row added at its index."""
    return matrix.to(rows.dtype, copy=True).index_add_(0, index, rows)


def _add_rows_shape(matrix: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return matrix.new_empty(matrix.shape, dtype=rows.dtype)


OWN.impl("add_rows", _add_rows, "CompositeExplicitAutograd")
torch.library.register_fake("gpt2::add_rows", _add_rows_shape, lib=OWN)

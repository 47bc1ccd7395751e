"""Gradients of biases, summed by the kernels that write the gradients which they sum.

A layer's bias is added in the matmul, but gets no gradient there. It is also an input of the function that
follows, whose backward pass returns its gradient beside that of the layer's result. The kernels are Triton's
(gpt2.model.triton_kernels); on a CPU the same operators are made of torch's functions, which is for tests and
estimates alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gpt2.model.autograd import operator

COLUMNS = 256
"""Columns that a program of a kernel takes: in bfloat16, 512 adjacent bytes of each row."""
MOST_ROWS, LEAST_ROWS = 256, 16
"""Rows that a program takes; its one row of sums is under 1 % of what MOST_ROWS read and write."""
PROGRAMS = 1056
"""Programs that should be left to share out: eight for each multiprocessor of an H100."""

# Where a padded matmul or attention leaves gaps between rows, torch.compile need not close them first.
_ANY_GAPS = (torch.Tag.needs_fixed_stride_order,)


def rows_per_program(rows: int, columns: int) -> int:
    """Return the rows that each program takes of a matrix: a power of two, fewer where programs are few."""
    taken = MOST_ROWS
    while taken > LEAST_ROWS and rows * columns < PROGRAMS * COLUMNS * taken:
        taken //= 2
    return taken


def _blocks(size: int, block: int) -> int:
    return (size + block - 1) // block


def _sums_shape(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_empty(_blocks(rows, rows_per_program(rows, columns)), columns, dtype=torch.float32)


def _sums(matrix: Tensor) -> Tensor:
    rows = rows_per_program(*matrix.shape)
    return torch.stack([part.sum(0, dtype=torch.float32) for part in matrix.split(rows)])


def _gelu_by_triton(gradient: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate GELU's tanh approximation, and sum the result over blocks of rows before it is rounded.

    gradient: that of GELU of `wide`; both (..., n) and of one dtype. Returns the gradient of `wide`, in its
    shape and dtype, and the sums, (blocks, n) float32, which are to be summed over the blocks.
    """
    from gpt2.model import triton_kernels

    to_wide, sums = _gelu_shape(gradient, wide)
    columns = wide.size(-1)
    flat = [each.reshape(-1, columns) for each in (gradient, wide)]
    rows = len(flat[0])
    kernel: Any = triton_kernels.gelu_backward
    kernel[(_blocks(columns, COLUMNS), len(sums))](
        *(*flat, to_wide, sums, *flat[0].stride(), *flat[1].stride(), rows, columns, COLUMNS),
        ROWS=rows_per_program(rows, columns),
        num_warps=triton_kernels.BIAS_WARPS,
    )
    return to_wide, sums


def _gelu_by_torch(gradient: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Do what _gelu_by_triton() does by torch's functions."""
    exact = torch.ops.aten.gelu_backward(gradient.float(), wide.float(), approximate="tanh")
    to_wide = exact.to(wide.dtype, memory_format=torch.contiguous_format)
    return to_wide, _sums(exact.reshape(-1, exact.size(-1)))


def _gelu_shape(gradient: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    columns = wide.size(-1)
    return wide.new_empty(wide.shape), _sums_shape(wide, wide.numel() // columns, columns)


GELU = "gelu_backward(Tensor gradient, Tensor wide) -> (Tensor, Tensor)"
operator(GELU, _gelu_shape, tags=_ANY_GAPS, CUDA=_gelu_by_triton, CPU=_gelu_by_torch)


class BiasedGelu(Function):
    """GELU's tanh approximation of a linear layer's result; its backward pass sums the bias gradient too."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, bias: Tensor) -> Tensor:
        """Return GELU of `wide`, in its shape and dtype. wide: (..., n), `bias` already added; bias: (n,)."""
        ctx.save_for_backward(wide)
        ctx.of_bias = bias.dtype
        return F.gelu(wide, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `wide` and of the bias, in their shapes and dtypes."""
        (gradient,) = grad_outputs
        (wide,) = ctx.saved_tensors
        to_wide, sums = torch.ops.gpt2.gelu_backward(gradient, wide)
        return to_wide, sums.sum(0).to(ctx.of_bias)


def _join_by_triton(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradients of q, k and v into one tensor, and sum them over blocks of rows.

    q, k, v: (B, T, n_head, head_dim) of one dtype and any strides. Returns (B, T, 3, n_head, head_dim), and
    the sums, (blocks, 3 n_head head_dim) float32, which are to be summed over the blocks.
    """
    from gpt2.model import triton_kernels

    joined, sums = _join_shape(q, k, v)
    B, T, n_head, head_dim = q.shape
    width, rows = n_head * head_dim, B * T
    strides = [stride for each in (q, k, v) for stride in each.stride()]
    kernel: Any = triton_kernels.join_gradients
    kernel[(3 * _blocks(width, COLUMNS), len(sums))](
        *(q, k, v, joined, sums, *strides, rows, T, width, head_dim, COLUMNS),
        ROWS=rows_per_program(rows, 3 * width),
        num_warps=triton_kernels.BIAS_WARPS,
    )
    return joined, sums


def _join_by_torch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Do what _join_by_triton() does by torch's functions."""
    joined = torch.stack([q, k, v], dim=2)
    return joined, _sums(joined.flatten(2).flatten(0, 1))


def _join_shape(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, n_head, head_dim = q.shape
    return q.new_empty(B, T, 3, n_head, head_dim), _sums_shape(q, B * T, 3 * n_head * head_dim)


JOIN = "join_gradients(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)"
operator(JOIN, _join_shape, tags=_ANY_GAPS, CUDA=_join_by_triton, CPU=_join_by_torch)


class BiasedSplit(Function):
    """Split a linear layer's result into q, k and v; the backward pass sums the layer's bias gradient too."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as views of `qkv`.

        qkv: (B, T, 3, n_head, head_dim), `bias` already added; bias: (3 n_head head_dim,). Returns three of
        (B, T, n_head, head_dim).
        """
        ctx.of_bias = bias.dtype
        q, k, v = qkv.unbind(2)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `qkv` and of the bias, in their shapes and dtypes."""
        joined, sums = torch.ops.gpt2.join_gradients(*grad_outputs)
        return joined, sums.sum(0).to(ctx.of_bias)

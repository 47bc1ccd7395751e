"""The Triton kernels of gpt2.model.fused_loss and gpt2.model.bias_gradients; importing this needs Triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from gpt2.model import autograd

LOSS_BLOCK = 8192
"""Columns that a program takes at a time: seven blocks for GPT-2's vocabulary."""
LOSS_WARPS = 16
"""Warps of a program: 16 numbers per thread.

Compiled for an H100 it takes 57 registers of them (85 where rows are not aligned, as of 50,257 columns), so
that each of 132 multiprocessors runs two programs: 26 MB of bfloat16 rows at once, half of the L2 cache,
which is to serve the second pass.
"""


@triton.jit
def cross_entropy(logits, targets, losses, stride, scale, columns: tl.constexpr, BLOCK: tl.constexpr):
    """Write one row's loss, and over its logits their gradient times `scale`; program n takes row n.

    logits: (N, columns) in any floating-point format, rows `stride` elements apart; targets: (N,) int64;
    losses: (N,) float32. Sums are in float32. A target that is no column makes the loss NaN.
    """
    row = tl.program_id(0).to(tl.int64)  # a batch has more than 2**31 logits
    logits += row * stride
    target = tl.load(targets + row)
    there = (target >= 0) & (target < columns)
    of_target = tl.load(logits + target, mask=there, other=float("nan")).to(tl.float32)

    offsets = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)  # added up at the end: a reduction over the warps costs a barrier
    for start in range(0, columns, BLOCK):
        at = start + offsets
        x = tl.load(logits + at, mask=at < columns, other=float("-inf"), eviction_policy="evict_last").to(
            tl.float32
        )
        larger = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # of pads alone: -inf less -inf would be NaN
        sums = sums * tl.exp(largest - base) + tl.exp(x - base)
        largest = larger
    total = tl.sum(sums, 0)
    loss = (largest - of_target) + tl.log(total)  # the large numbers first, so that they cancel
    tl.store(losses + row, loss)

    share = scale / total
    blocks: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    for block in range(blocks):
        # Backwards: what was read last is the likeliest still to be in the cache.
        at = (blocks - 1 - block) * BLOCK + offsets
        x = tl.load(logits + at, mask=at < columns, other=float("-inf"), eviction_policy="evict_first").to(
            tl.float32
        )
        gradient = tl.exp(x - largest) * share - tl.where(at == target, scale, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < columns)


# The kernels of biases go over a matrix in blocks: a program takes COLUMNS columns of ROWS rows, STEP of
# these at a time, and adds its sums up in registers. Programs of adjacent columns follow each other, so that
# whole rows are in flight at once.
BIAS_WARPS = 8
STEP = tl.constexpr(16)
"""Rows that a program takes at a time; with BIAS_WARPS and 256 columns, sixteen numbers per thread."""
A = tl.constexpr(autograd.A)
B = tl.constexpr(autograd.B)


@triton.jit
def gelu_backward(
    gradient, wide, to_wide, sums, gradient_row, gradient_column, wide_row, wide_column, rows,
    columns: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write gradient times GELU's slope at `wide`, and the sums over each program's rows.

    gradient, wide: (rows, columns) in any floating-point format, with the given strides; to_wide: the same
    without gaps; sums: (programs of a column, columns) float32.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROWS
    far = first.to(tl.int64)  # a batch may have more than 2**31 numbers
    gradient += far * gradient_row
    wide += far * wide_row
    to_wide += far * columns
    total = tl.zeros((STEP, COLUMNS), tl.float32)  # added up last: a sum over the warps costs a barrier
    for start in range(0, ROWS, STEP):
        row = start + tl.arange(0, STEP)
        within = (first + row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(wide + row[:, None] * wide_row + column[None, :] * wide_column, mask=within, other=0.0)
        y = tl.load(
            gradient + row[:, None] * gradient_row + column[None, :] * gradient_column, mask=within, other=0.0
        )
        x = x.to(tl.float32)
        square = x * x
        share = 1 / (1 + tl.exp(-x * (A + B * square)))
        result = y.to(tl.float32) * (share + x * share * (1 - share) * (A + 3 * B * square))
        rounded = result.to(to_wide.dtype.element_ty)
        tl.store(to_wide + row[:, None] * columns + column[None, :], rounded, mask=within)
        total += result
    tl.store(sums + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=column < columns)


@triton.jit
def join_gradients(
    q, k, v, joined, sums, q_b, q_t, q_h, q_d, k_b, k_t, k_h, k_d, v_b, v_t, v_h, v_d, rows,
    T: tl.constexpr, width: tl.constexpr, head_dim: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy q, k and v side by side, and write the sums over each program's rows.

    q, k, v: (rows / T, T, width / head_dim, head_dim) with the given strides; joined: (rows, 3, width)
    without gaps; sums: (programs of a column, 3, width) float32.
    """
    blocks: tl.constexpr = (width + COLUMNS - 1) // COLUMNS
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    joined += which * width
    sums += which * width
    if which == 0:
        _copy(q, joined, sums, q_b, q_t, q_h, q_d, block, rows, T, width, head_dim, COLUMNS, ROWS)
    elif which == 1:
        _copy(k, joined, sums, k_b, k_t, k_h, k_d, block, rows, T, width, head_dim, COLUMNS, ROWS)
    else:
        _copy(v, joined, sums, v_b, v_t, v_h, v_d, block, rows, T, width, head_dim, COLUMNS, ROWS)


@triton.jit
def _copy(
    source, joined, sums, of_b, of_t, of_h, of_d, block, rows,
    T: tl.constexpr, width: tl.constexpr, head_dim: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    at_column = column // head_dim * of_h + column % head_dim * of_d
    first = tl.program_id(1) * ROWS
    joined += first.to(tl.int64) * (3 * width)
    total = tl.zeros((STEP, COLUMNS), tl.float32)
    for start in range(0, ROWS, STEP):
        row = start + tl.arange(0, STEP)
        within = (first + row < rows)[:, None] & (column < width)[None, :]
        at_row = ((first + row) // T).to(tl.int64) * of_b + ((first + row) % T).to(tl.int64) * of_t
        x = tl.load(source + at_row[:, None] + at_column[None, :], mask=within, other=0.0)
        tl.store(joined + row[:, None] * (3 * width) + column[None, :], x, mask=within)
        total += x.to(tl.float32)
    tl.store(sums + tl.program_id(1) * (3 * width) + column, tl.sum(total, 0), mask=column < width)

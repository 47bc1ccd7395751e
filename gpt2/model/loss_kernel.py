"""The Triton kernel of gpt2.model.fused_loss; importing this needs Triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 8192
"""Columns that a program takes at a time: seven blocks for GPT-2's vocabulary."""
WARPS = 16
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

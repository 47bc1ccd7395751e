"""Causal attention that scaled_dot_product_attention does not have.

BlockAttention is for CPUs: torch's flash kernel forward, and a backward pass of batched matrix products. torch's own
backward kernel takes one head after the other through small tiles. The same gradients follow from products of blocks
for all heads at once, which the CPU's matrix library does faster, and of the blocks above the diagonal nothing is
computed. Each batch of products is a diagonal of blocks, so that it is one slice of memory: of slices with gaps,
torch.bmm would make copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex_causal(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> Tensor:
    """torch's FlexAttention. q, k, v: (B, n_head, T, head_dim); blocks: causal_blocks() of T or more.

    Returns the shape of q.
    """
    from torch.nn.attention.flex_attention import flex_attention

    T = q.size(-2)
    out = flex_attention(q, k, v, block_mask=blocks if blocks.shape[-1] == T else blocks._adjust(T, T))
    assert isinstance(out, Tensor)
    return out


def causal_blocks(T: int, device: torch.device) -> BlockMask:
    """Which scores count, and which blocks of them FlexAttention leaves out."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=str(device))


BLOCK = 256
"""Rows and columns of a block of scores."""


class BlockAttention(Function):
    """scaled_dot_product_attention(q, k, v, is_causal=True)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v: (B, n_head, T, head_dim). Returns the same shape."""
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """With P the softmax of the scores: dS = P (dP - D), where D is the row's sum of gradient times result.

        P is the exponential of scores less the logarithm of their sum, which the product itself subtracts: large
        scores are small again before they are rounded to the products' number format.
        """
        (gradient,) = grad_outputs
        q, k, v, out, log_sum = ctx.saved_tensors
        scale = q.size(-1) ** -0.5
        rows = (gradient.float() * out.float()).sum(-1, keepdim=True)
        of_out, queries, keys = (_blocks(each) for each in (gradient, q * scale, k))
        rows, values = _blocks(rows), _blocks(v)
        less_log_sum = _blocks(_less(q * scale, log_sum.unsqueeze(-1)))
        keys_and_ones = _blocks(F.pad(k, (0, 2), value=1.0))
        count = len(queries)
        to_q, to_k, to_v = ([[] for _ in range(count)] for _ in range(3))
        for apart in range(count):  # how many blocks a query is behind its keys
            here, there = slice(apart, count), slice(0, count - apart)
            share = (less_log_sum[here] @ keys_and_ones[there].mT).float().exp()
            if not apart:
                at = torch.arange(share.size(-1), device=q.device, dtype=torch.float32)
                share = torch.where(at <= at[:, None], share, 0.0)
            share = share.to(q.dtype)
            of_share = of_out[here] @ values[there].mT
            of_scores = (share.float() * (of_share.float() - rows[here])).to(q.dtype)
            for sums, first, parts in (
                (to_q, apart, of_scores @ keys[there]),
                (to_k, 0, of_scores.mT @ queries[here]),
                (to_v, 0, share.mT @ of_out[here]),
            ):
                for block, part in enumerate(parts, first):
                    sums[block].append(part)
        return _whole(to_q, q, scale), _whole(to_k, k), _whole(to_v, v)


def _less(x: Tensor, subtracted: Tensor) -> Tensor:
    """x: (..., d), with two columns whose product with ones is minus `subtracted`, of (..., 1) in float32.

    Two, because x may have a smaller number format.
    """
    first = subtracted.to(x.dtype)
    rest = (subtracted - first.float()).to(x.dtype)
    return torch.cat([x, -first, -rest], dim=-1)


def _blocks(x: Tensor) -> Tensor:
    """x: (B, n_head, T, d). Returns (blocks, B, n_head, block, d) in one piece, the last one filled up with zeros.

    Those rows come after all others, which therefore do not attend to them; they add nothing to any gradient.
    """
    B, n_head, T, d = x.shape
    block = min(BLOCK, T)
    x = F.pad(x, (0, 0, 0, -T % block))
    return x.view(B, n_head, -1, block, d).permute(2, 0, 1, 3, 4).contiguous()


def _whole(sums: list[list[Tensor]], like: Tensor, scale: float = 1.0) -> Tensor:
    """The sums of the parts of each block, as _blocks had them, in the shape of `like`."""
    blocks = torch.stack([sum((part.float() for part in parts), start=torch.zeros(())) for parts in sums])
    joined = (blocks * scale).to(like.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return joined[:, :, : like.size(2)]

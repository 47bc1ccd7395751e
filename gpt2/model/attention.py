"""Causal attention beyond scaled_dot_product_attention: FlexAttention, and a blocked backward pass for CPUs.

BlockAttention runs torch's flash kernel forward and a backward pass of batched matmuls. torch's own backward
kernel on CPUs goes through one head after the other in small tiles. Matmuls of whole blocks, for all heads at
once, give the same gradients and run faster in the CPU's matrix library; blocks above the diagonal are never
computed. Each batch of matmuls is one diagonal of blocks and therefore one contiguous slice of memory: for
slices with gaps, torch.bmm would make copies.
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
    """Compute causal attention with torch's FlexAttention.

    q, k, v: (B, n_head, T, head_dim); blocks: causal_blocks() for T or more. Returns the shape of q.
    """
    from torch.nn.attention.flex_attention import flex_attention

    T = q.size(-2)
    out = flex_attention(q, k, v, block_mask=blocks if blocks.shape[-1] == T else _shorter(blocks, T))
    assert isinstance(out, Tensor)
    return out


def _shorter(blocks: BlockMask, T: int) -> BlockMask:
    """Return the mask for T tokens, of a mask for more."""
    from torch.nn.attention.flex_attention import BlockMask

    cut = blocks._adjust(T, T)  # which takes it to be for whole blocks
    parts = cut.kv_num_blocks, cut.kv_indices, cut.full_kv_num_blocks, cut.full_kv_indices
    return BlockMask.from_kv_blocks(
        *parts, BLOCK_SIZE=cut.BLOCK_SIZE, mask_mod=cut.mask_mod, seq_lengths=(T, T)
    )


def causal_blocks(T: int, device: torch.device) -> BlockMask:
    """Return the causal mask for FlexAttention, which skips the blocks that lie wholly above the diagonal."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, query, key: query >= key, None, None, T, T, device=str(device))


BLOCK = 256
"""Rows and columns of one block of scores."""


class BlockAttention(Function):
    """Causal scaled_dot_product_attention with a blocked backward pass, for CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend to earlier positions only. q, k, v: (B, n_head, T, head_dim). Returns the same shape."""
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, of their shapes.

        With P the softmax of the scores, dS = P (dP - D), where D is each row's sum of gradient times output.
        P is computed as exp(score - log_sum). The subtraction happens inside the matmul, so that large scores
        are small again before they are rounded to the matmul's number format.
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
        for apart in range(count):  # distance in blocks from the keys to the queries: one diagonal each
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
    """Append two columns to x whose matmul with ones gives minus `subtracted`.

    x: (..., d); subtracted: (..., 1) float32. Returns (..., d + 2). There are two columns because x may have
    a narrower number format, and the second holds the rounding error of the first.
    """
    first = subtracted.to(x.dtype)
    rest = (subtracted - first.float()).to(x.dtype)
    return torch.cat([x, -first, -rest], dim=-1)


def _blocks(x: Tensor) -> Tensor:
    """Cut the sequence into blocks and pad the last one with zeros.

    x: (B, n_head, T, d). Returns a contiguous (blocks, B, n_head, block, d). Padding rows come after all
    others, which therefore do not attend to them, and they add nothing to any gradient.
    """
    B, n_head, T, d = x.shape
    block = min(BLOCK, T)
    x = F.pad(x, (0, 0, 0, -T % block))
    return x.view(B, n_head, -1, block, d).permute(2, 0, 1, 3, 4).contiguous()


def _whole(sums: list[list[Tensor]], like: Tensor, scale: float = 1.0) -> Tensor:
    """Sum the parts of each block and undo _blocks(); returns the shape and dtype of `like`."""
    blocks = torch.stack([sum((part.float() for part in parts), start=torch.zeros(())) for parts in sums])
    joined = (blocks * scale).to(like.dtype).permute(1, 2, 0, 3, 4).flatten(2, 3)
    return joined[:, :, : like.size(2)]

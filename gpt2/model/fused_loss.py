"""The lm_head and the loss in one autograd function, whose forward pass computes the logits' gradient.

The gradient takes the place of the logits, so that the backward pass consists of two matmuls. The kernel is
Triton's (gpt2.model.triton_kernels), or another project's (gpt2.model.kernel_libraries); on a CPU the same
operator is made of torch's functions, which is for tests and estimates alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gpt2.model.autograd import operator, product_dtype

HALF_SCALE = 2.0**13
"""Factor on float16's gradient of the logits, which would be 0 without one.

A probability of 1 in 50,000 over a batch of 65,536 is 3e-10. The trainer's gradient scaler starts with it,
too.
"""


def _by_triton(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Overwrite logits with the gradient of the mean cross-entropy times `scale`, and return each row's loss.

    logits: (N, V), -inf where a class is impossible; targets: (N,) int64. Returns nats, (N,) float32.
    """
    from gpt2.model import triton_kernels

    strides = logits.stride()
    torch._check(strides[1] == 1, lambda: f"cross_entropy: triton: logits have strides {strides}")
    losses = _losses(logits, targets, scale)
    N, V = logits.shape
    kernel: Any = triton_kernels.cross_entropy
    kernel[(N,)](
        *(logits, targets.contiguous(), losses, logits.stride(0), scale / N, V),
        BLOCK=triton_kernels.LOSS_BLOCK,
        num_warps=triton_kernels.LOSS_WARPS,
    )
    return losses


def _by_torch(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    """Do what _by_triton() does by torch's functions."""
    shares, at = logits.float().log_softmax(dim=-1), targets[:, None]
    losses = -shares.gather(1, at).squeeze(1)
    gradient = shares.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
    logits.copy_(gradient.mul_(scale / len(logits)))
    return losses


def _losses(logits: Tensor, targets: Tensor, scale: float) -> Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.float32)


operator(
    "cross_entropy_(Tensor(a!) logits, Tensor targets, float scale) -> Tensor",
    _losses,
    # The logits stay row-major, but rows may have gaps: torch.compile need not copy a padded matmul.
    tags=(torch.Tag.needs_fixed_stride_order,),
    CUDA=_by_triton,
    CPU=_by_torch,
)


class FusedCrossEntropy(Function):
    """Mean cross-entropy of x @ head.T + bias, which keeps the logits' gradient in their place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head: Tensor, bias: Tensor | None, targets: Tensor, kernel: str = "triton"
    ) -> Tensor:
        """Return the mean cross-entropy in nats, a float32 scalar.

        x: (N, d); head: (V, d); bias: (V,) or None, which gets no gradient, -inf where a class is impossible;
        targets: (N,) int64; kernel: triton, or an operator of gpt2.model.kernel_libraries: liger or quack,
        not for float16.
        """
        dtype = product_dtype(x)
        ctx.dtypes = x.dtype, head.dtype
        x, head = x.to(dtype), head.to(dtype)
        logits = F.linear(x, head, None if bias is None else bias.to(dtype))
        if kernel == "triton":
            ctx.scale = HALF_SCALE if dtype == torch.float16 else 1.0
            losses = torch.ops.gpt2.cross_entropy_(logits, targets, ctx.scale)
        else:
            ctx.scale = len(targets)  # it writes the gradient of the sum
            losses = getattr(torch.ops.gpt2, f"{kernel}_cross_entropy_")(logits, targets)
        ctx.save_for_backward(x, head, logits)  # which hold their gradient now
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the gradients of x and head, in their shapes and dtypes.

        The incoming gradient is known only now. It multiplies these, which are far smaller than the logits.
        """
        (gradient,) = grad_outputs
        x, head, to_logits = ctx.saved_tensors
        of_x, of_head = ctx.dtypes
        factor = gradient / ctx.scale
        to_x, to_head = (to_logits @ head).to(of_x), (to_logits.t() @ x).to(of_head)
        return to_x * factor, to_head * factor, None, None, None

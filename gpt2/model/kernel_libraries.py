"""Kernels of other projects, by toggle; no other module imports these packages.

What torch.compile cannot look into is an operator of ours here, so that compiled code stays in one piece
around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpt2.model.autograd import operator, product_dtype


def _by_liger(logits: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops import cross_entropy_forward  # pyright: ignore[reportMissingImports]

    logits = logits.detach().requires_grad_()  # by which it decides whether to write the gradient
    # Positions: weights of classes, the target to ignore, z-loss, smoothing, reduction, soft cap, whether to
    # return the z-loss. Not the mean: its losses would be summed in the logits' format.
    losses, *_ = cross_entropy_forward(logits, targets, None, -100, 0.0, 0.0, "none", None, False)
    return losses.float()


def _by_quack(logits: Tensor, targets: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy_fwd  # pyright: ignore[reportMissingImports]

    losses, _ = cross_entropy_fwd(logits, targets, return_dx=True, inplace_backward=True)
    return losses


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.float32)


# Each overwrites logits, (N, V), -inf where a class is impossible, with the gradient of the sum of losses.
# targets: (N,) int64. It returns each row's loss in nats, (N,) float32.
for _name, _kernel in {"liger": _by_liger, "quack": _by_quack}.items():
    operator(
        f"{_name}_cross_entropy_(Tensor(a!) logits, Tensor targets) -> Tensor",
        _losses,
        # Rows may have gaps, as where torch.compile pads a matmul: the libraries take a stride.
        tags=(torch.Tag.needs_fixed_stride_order,),
        CompositeExplicitAutograd=_kernel,
    )


def cut_cross_entropy() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function that computes the mean cross-entropy of x @ head.T, its logits in registers alone.

    It takes x (N, d), head (V, d) without padding rows, and targets (N,) int64, and returns nats, a float32
    scalar.
    """
    # Its autograd function asks the device for targets to ignore. As the model's last step, it breaks little
    # off. Only here, because this imports torch's compiler, which takes a second that eager code is spared.
    opaque = torch.compiler.disable()(_by_cut)

    def loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        dtype = product_dtype(x)
        return opaque(x.to(dtype), head.to(dtype), targets)

    return loss


def _by_cut(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return linear_cross_entropy(x, head, targets, impl="cce_exact")


def layer_norm(name: str) -> Callable[[Tensor, Tensor, Tensor, float], Tensor]:
    """Return the LayerNorm of liger or quack, whose statistics are in float32 whatever the dtype of x.

    It takes x (..., d), weight (d,), bias (d,), both float32, and eps, and returns x's shape and dtype.
    """
    if name == "quack":
        return QuackLayerNorm.apply
    # torch.compile looks into it, and generates code around its Triton kernels.
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # pyright: ignore[reportMissingImports]

    return LigerLayerNormFunction.apply


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from quack.rmsnorm import layernorm_fwd  # pyright: ignore[reportMissingImports]

    return layernorm_fwd(x.contiguous(), weight, bias, eps, return_rstd=True, return_mean=True)


def _layer_norm_shapes(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    reciprocal, mean = (x.new_empty(x.size(0), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), reciprocal, mean


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from quack.rmsnorm import layernorm_bwd  # pyright: ignore[reportMissingImports]

    return layernorm_bwd(x.contiguous(), weight, gradient.contiguous(), reciprocal, mean)


def _layer_norm_backward_shapes(
    gradient: Tensor, x: Tensor, weight: Tensor, reciprocal: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


operator(
    "quack_layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_shapes,
    CompositeExplicitAutograd=_layer_norm,
)
operator(
    "quack_layer_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor reciprocal, Tensor mean) "
    "-> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_shapes,
    CompositeExplicitAutograd=_layer_norm_backward,
)


class QuackLayerNorm(Function):
    """LayerNorm by QuACK's kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension. x: (..., d); weight, bias: (d,) float32. Returns x's kind."""
        rows = x.flatten(0, -2)
        out, reciprocal, mean = torch.ops.gpt2.quack_layer_norm(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, reciprocal, mean)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of x, weight and bias, in their shapes and dtypes."""
        (gradient,) = grad_outputs
        to_x, *others = torch.ops.gpt2.quack_layer_norm_backward(gradient.flatten(0, -2), *ctx.saved_tensors)
        return to_x.view(gradient.shape), *others, None


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output, (B, T, n_head, head_dim), and each row's log-sum-exp, (B, n_head, T) float32."""
    from flash_attn.cute.interface import _flash_attn_fwd  # pyright: ignore[reportMissingImports]

    out, log_sum, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)
    return out, log_sum


def _attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
) -> Tensor:
    """Return the gradients of q, k and v, (B, T, 3, n_head, head_dim), each written in its place."""
    from flash_attn.cute.interface import _flash_attn_bwd  # pyright: ignore[reportMissingImports]

    to_qkv = _attention_backward_shape(gradient, q, k, v, out, log_sum)
    places = dict(zip(("dq", "dk", "dv"), to_qkv.unbind(2), strict=True))
    _flash_attn_bwd(q, k, v, out, gradient.contiguous(), log_sum, causal=True, **places)
    return to_qkv


def _attention_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, n_head, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(B, n_head, T, dtype=torch.float32)


def _attention_backward_shape(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
) -> Tensor:
    B, T, n_head, head_dim = q.shape
    return q.new_empty(B, T, 3, n_head, head_dim)


operator(
    "flash4_attention(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)",
    _attention_shapes,
    CompositeExplicitAutograd=_attention,
)
operator(
    "flash4_attention_backward(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sum) -> "
    "Tensor",
    _attention_backward_shape,
    CompositeExplicitAutograd=_attention_backward,
)


def flash4_attention(qkv: Tensor | tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Compute causal attention with FlashAttention-4.

    qkv: packed, (B, T, 3, n_head, head_dim), or three of (B, T, n_head, head_dim); bfloat16 or float16.
    Returns (B, T, n_head, head_dim). torch could run it as scaled_dot_product_attention, but unpacks two
    results where the package returns four today; and of packed q, k and v, gradients are packed without
    copying.
    """
    return _Flash4Attention.apply(*((qkv,) if isinstance(qkv, Tensor) else qkv))


class _Flash4Attention(Function):
    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        out, log_sum = torch.ops.gpt2.flash4_attention(*(qkv if len(qkv) == 3 else qkv[0].unbind(2)))
        ctx.save_for_backward(*qkv, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        *qkv, out, log_sum = ctx.saved_tensors
        q, k, v = qkv if len(qkv) == 3 else qkv[0].unbind(2)
        to_qkv = torch.ops.gpt2.flash4_attention_backward(*grad_outputs, q, k, v, out, log_sum)
        return to_qkv if len(qkv) == 1 else to_qkv.unbind(2)


def to_float8(model: nn.Module, scaling: str, *, emulate: bool = False) -> None:
    """Replace the model's linear layers by torchao's, which multiply in float8 forward and backward.

    The weights keep their format, and so does the lm_head, which is not a module. scaling: tensorwise or
    rowwise, the granularity of a scale. emulate: round to float8 and multiply in the wider format, for
    devices without float8 units. Raises ImportError without torchao.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(model, config=config)


def int8_multiplication() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function for linear layers whose three matmuls, forward and backward, are of 8-bit integers.

    It takes x (..., in), weight (out, in), bias (out,) or None, and returns (..., out) in autocast's dtype.
    Each row of the first factor and each column of the second has a scale of its own, found as it is rounded.
    Raises ImportError without torchao.
    """
    from torchao.prototype.quantized_training import int8_mixed_precision

    # The module and the tensor subclass that torchao has for it would change the parameters' types.
    function = int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction
    config = int8_mixed_precision.Int8MixedPrecisionTrainingConfig()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = product_dtype(x)
        return function.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), config)

    return multiply

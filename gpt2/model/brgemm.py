"""Causal attention by this project's C++ kernel for CPUs (attention.cpp), as an operator of torch."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpt2.model.autograd import operator
from gpt2.model.cpp_build import library


def _call(name: str, qkv: Tensor, *others: Tensor) -> None:
    B, T, _, n_head, head_dim = qkv.shape
    torch._check(
        qkv.numel() > 0 and head_dim % 2 == 0 and qkv.dtype in (torch.float32, torch.bfloat16),
        lambda: f"attention: brgemm: no kernel for {qkv.dtype} of {tuple(qkv.shape)}; choose sdpa",
    )
    tensors = [each.contiguous() for each in (qkv, *others)]
    function = getattr(library(), f"{name}_{str(qkv.dtype).removeprefix('torch.')}")
    function.restype = ctypes.c_char_p
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in tensors)
    if problem := function(*pointers, *map(ctypes.c_int64, (B, T, n_head, head_dim))):
        raise RuntimeError(f"attention: brgemm: {problem.decode()}")


def _attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    qkv: (B, T, 3, n_head, head_dim). Returns the output (B, T, n_head, head_dim) and each row's log-sum-exp
    of scores, (B, n_head, T) float32.
    """
    out, log_sum = _attention_shape(qkv)
    _call("attention", qkv, out, log_sum)
    return out, log_sum


def _attention_shape(qkv: Tensor) -> tuple[Tensor, Tensor]:
    B, T, _, n_head, head_dim = qkv.shape
    return qkv.new_empty(B, T, n_head, head_dim), qkv.new_empty(B, n_head, T, dtype=torch.float32)


def _backward(gradient: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    """Run the backward kernel: from the gradient of `out`, return the gradient of qkv, in qkv's shape."""
    to_qkv = _backward_shape(gradient, qkv, out, log_sum)
    _call("attention_backward", qkv, out, log_sum, gradient.to(qkv.dtype), to_qkv)
    return to_qkv


def _backward_shape(gradient: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


operator("attention(Tensor qkv) -> (Tensor, Tensor)", _attention_shape, CPU=_attention)
BACKWARD = "attention_backward(Tensor gradient, Tensor qkv, Tensor out, Tensor log_sum) -> Tensor"
operator(BACKWARD, _backward_shape, CPU=_backward)


class BrgemmAttention(Function):
    """Causal scaled_dot_product_attention of one packed tensor of q, k and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        """Attend to earlier positions only.

        qkv: (B, T, 3, n_head, head_dim), float32 or bfloat16, head_dim even. Returns (B, T, n_head,
        head_dim). Raises RuntimeError where the kernel does not support the shape or dtype.
        """
        out, log_sum = torch.ops.gpt2.attention(qkv)
        ctx.save_for_backward(qkv, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Return the gradient of qkv, in its shape."""
        (gradient,) = grad_outputs
        return torch.ops.gpt2.attention_backward(gradient, *ctx.saved_tensors)

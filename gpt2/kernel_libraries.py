"""Kernels of other projects for GPUs, by toggle; no other module imports these packages, which only a GPU needs.

What torch.compile cannot look into is an operator of ours here, so that compiled code stays in one piece around it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from gpt2.functions import OWN, product_dtype

PACKAGES = {
    ("cross_entropy", "liger"): ("liger_kernel", "pip install liger-kernel", "triton"),
    ("cross_entropy", "quack"): ("quack", 'pip install "quack-kernels[cu13]" (on CUDA 12 without [cu13])', "triton"),
    ("cross_entropy", "cut"): (
        "cut_cross_entropy",
        'pip install "cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy"',
        "linear",
    ),
}
"""By toggle and value: the package to import, how to install it, and another value of the toggle to choose."""


def missing(toggle: str, value: object) -> str | None:
    """Return why a package that this value of a toggle needs cannot be used here, and what to do; None if it can."""
    if (toggle, value) not in PACKAGES:
        return None
    name, install, other = PACKAGES[toggle, str(value)]
    if not (found := find_spec(name)):
        return f"its package {name} is not here; {install}, or choose {other}"
    if value == "cut" and not (Path(found.origin or "").parent / "cce_utils.py").exists():
        # As on PyPI: its gradients are sums of hundreds of parts, rounded to bfloat16 after each.
        return f"this {name} has no exact form; {install}, or choose {other}"
    return None


def _operator(name: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Define gpt2::NAME_cross_entropy_, which overwrites logits with the gradient of the sum of all rows' losses.

    logits: (N, V), -inf where a class is impossible; targets: (N,) int64. It returns each row's loss in nats, (N,)
    float32.
    """

    def define(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        operator = f"{name}_cross_entropy_"
        # Rows may have gaps, as where torch.compile pads a matmul: the libraries take a stride.
        OWN.define(
            f"{operator}(Tensor(a!) logits, Tensor targets) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,)
        )
        OWN.impl(operator, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"gpt2::{operator}", _losses, lib=OWN)
        return function

    return define


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.float32)


@_operator("liger")
def _by_liger(logits: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops import cross_entropy_forward  # pyright: ignore[reportMissingImports]

    logits = logits.detach().requires_grad_()  # by which it decides whether to write the gradient
    # Positions: weights of classes, the target to ignore, z-loss, smoothing, reduction, soft cap, whether to return
    # the z-loss. Not the mean: its losses would be summed in the logits' format.
    losses, *_ = cross_entropy_forward(logits, targets, None, -100, 0.0, 0.0, "none", None, False)
    return losses.float()


@_operator("quack")
def _by_quack(logits: Tensor, targets: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy_fwd  # pyright: ignore[reportMissingImports]

    losses, _ = cross_entropy_fwd(logits, targets, return_dx=True, inplace_backward=True)
    return losses


def cut_cross_entropy(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of x @ head.T, whose logits are only ever in a GPU's registers.

    x: (N, d); head: (V, d), without padding rows; targets: (N,) int64. Returns nats, a float32 scalar.
    """
    dtype = product_dtype(x)
    return _by_cut(x.to(dtype), head.to(dtype), targets)


# Its autograd function asks the device for the targets to ignore. As the model's last step, it breaks little off.
@torch.compiler.disable()
def _by_cut(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy  # pyright: ignore[reportMissingImports]

    return linear_cross_entropy(x, head, targets, impl="cce_exact")

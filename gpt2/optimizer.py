"""AdamW as one compiled function, which may clip gradients and write the weights' casts as it goes.

A step of AdamW computes little and moves much: each pass over weights, gradients or averages that another one can do
on its way is time saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2.parallel import whole


class CompiledAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's arithmetic and state, compiled by torch.compile.

    copies: by weight, its cast to a smaller format. Those that require a gradient stand for their weights in the
    model, and have their gradients; all are written anew in each step.
    """

    grad_scale: Tensor | None = None
    """By which each gradient is divided, as torch's fused AdamW does."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        copies: Mapping[Tensor, Tensor],
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.copies = copies
        self._weights = [weight for group in self.param_groups for weight in group["params"]]
        self._decays = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        for weight in self._weights:
            average = torch.zeros_like(weight, memory_format=torch.preserve_format)
            self.state[weight] = {"step": torch.tensor(0.0), "exp_avg": average, "exp_avg_sq": average.clone()}
        self.leaves = [copies[w] if w in copies and copies[w].requires_grad else w for w in self._weights]
        """What has the gradients: each weight, or the copy that stands for it in the model."""
        self._update = torch.compile(_update, fullgraph=True, dynamic=False)
        self._norm = torch.compile(_norm, fullgraph=True, dynamic=False)

    def norm(self) -> Tensor:
        """Of all gradients together."""
        return self._norm(_gradients(self.leaves))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group, states = self.param_groups[0], [self.state[weight] for weight in self._weights]
        for state in states:
            state["step"] += 1
        number = states[0]["step"].item()
        first, second = group["betas"]
        # As tensors, for a number that changes would be compiled anew each time; on the host, where nothing waits.
        numbers = (group["lr"], 1 - first**number, (1 - second**number) ** 0.5)
        lr, correction, root = (torch.tensor(value, dtype=torch.float32) for value in numbers)
        self._update(
            self._weights,
            _gradients(self.leaves),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [self.copies.get(weight) for weight in self._weights],
            self._decays,
            (lr, correction, root, self.grad_scale),
            (first, second, group["eps"]),
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for copy in self.copies.values():
            copy.grad = None


def leaves(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that have the gradients of an optimiser's weights."""
    if isinstance(optimizer, CompiledAdamW):
        return optimizer.leaves
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def clip_gradients(optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor], largest: float, how: str) -> Tensor:
    """Have all gradients scaled down to norm `largest` together; gives their norm before, the same on every rank.

    how: in_step leaves the scaling to the optimiser's next step, separate does it here.
    """
    if isinstance(optimizer, CompiledAdamW):
        norm = optimizer.norm()
    else:
        norm = whole(torch.nn.utils.get_total_norm(_gradients(leaves)))
    if how == "in_step":
        scaled: Any = optimizer
        scaled.grad_scale = ((norm + 1e-6) / largest).clamp(min=1)  # as torch's clipping has it, the other way up
    else:
        torch.nn.utils.clip_grads_with_norm_(leaves, largest, norm)
    return norm


def _gradients(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _update(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    decays: Sequence[float],
    numbers: tuple[Tensor, Tensor, Tensor, Tensor | None],
    settings: tuple[float, float, float],
) -> None:
    """torch.optim.adamw's single-tensor step, in its order of operations."""
    (lr, correction, root, scale), (first, second, eps) = numbers, settings
    for weight, gradient, average, square, copy, decay in zip(
        weights, gradients, averages, squares, copies, decays, strict=True
    ):
        gradient = gradient.to(weight.dtype)
        if scale is not None:
            gradient = gradient / scale
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        weight.mul_(1 - lr * decay).sub_(lr / correction * average / (square.sqrt() / root + eps))
        if copy is not None:
            copy.copy_(weight)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()

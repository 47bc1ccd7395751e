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
    model, and have their gradients; all are written anew in each step. Weights that are in bfloat16 themselves are
    rounded at random, up or down in proportion to what is nearer, so that small updates are not lost: with averages
    in float32, but no float32 master. (Zamirai et al. 2020, https://arxiv.org/abs/2010.06192)
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
            average = torch.zeros_like(weight, memory_format=torch.preserve_format, dtype=torch.float32)
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
        narrow = any(weight.dtype != torch.float32 for weight in self._weights)
        seed = torch.tensor(int(number), dtype=torch.int32) if narrow else None
        self._update(
            self._weights,
            _gradients(self.leaves),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [self.copies.get(weight) for weight in self._weights],
            self._decays,
            (lr, correction, root, self.grad_scale, seed),
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
    numbers: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    settings: tuple[float, float, float],
) -> None:
    """torch.optim.adamw's single-tensor step, in its order of operations."""
    (lr, correction, root, scale, seed), (first, second, eps) = numbers, settings
    for index, (weight, gradient, average, square, copy, decay) in enumerate(
        zip(weights, gradients, averages, squares, copies, decays, strict=True)
    ):
        gradient = gradient.float()
        if scale is not None:
            gradient = gradient / scale
        average.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        updated = weight.float() * (1 - lr * decay) - lr / correction * average / (square.sqrt() / root + eps)
        if weight.dtype == torch.float32:
            weight.copy_(updated)
        else:
            assert seed is not None
            weight.copy_(rounded_at_random(updated, seed * MIX + index))
        if copy is not None:
            copy.copy_(weight)


MIX = -1640531535
"""2^32 over the golden ratio, as a signed number: multiples of it differ in many bits."""


def rounded_at_random(x: Tensor, seed: Tensor) -> Tensor:
    """x: float32. Returns bfloat16, each number rounded up with the probability that leaves its mean as it is.

    seed: int32, another one for each draw. Chance is a hash of it and of the number's place: it costs less than a
    generator does, and another device draws the same.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    mixed = (place ^ seed) * MIX
    mixed = (mixed ^ (mixed >> 15)) * -2048144789  # multiplier and shifts of MurmurHash3's last step
    mixed = (mixed ^ (mixed >> 13)) * -1028477387
    # What bfloat16 leaves out are the low 16 bits: a random number of so many added to them carries in proportion.
    return ((x.view(torch.int32) + ((mixed >> 16) & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()

"""AdamW as a compiled function, which can also clip gradients and write the weights' casts in the same pass.

AdamW is bound by memory traffic: each pass over weights, gradients or averages that is merged into another one saves
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2.parallel import whole


class CompiledAdamW(torch.optim.Optimizer):
    """AdamW with torch.optim.AdamW's arithmetic and state, compiled by torch.compile.

    copies: each weight's copy in a narrower format. Copies that require a gradient replace their weights in the model
    and receive the gradients; all copies are rewritten in each step. Weights that are themselves bfloat16 are rounded
    stochastically, up or down with probabilities that preserve the mean, so that small updates are not lost; their
    averages are float32, and there is no float32 master (Zamirai et al. 2020, https://arxiv.org/abs/2010.06192).
    """

    grad_scale: Tensor | None = None
    """Divisor of each gradient, as in torch's fused AdamW."""

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
        for weight in self._weights:
            average = torch.zeros_like(weight, memory_format=torch.preserve_format, dtype=torch.float32)
            self.state[weight] = {"step": torch.tensor(0.0), "exp_avg": average, "exp_avg_sq": average.clone()}
        self.leaves = [copies[w] if w in copies and copies[w].requires_grad else w for w in self._weights]
        """The tensors that receive gradients: each weight, or the copy that replaces it in the model."""
        self._leaf = dict(zip(self._weights, self.leaves, strict=True))
        self._parts = list(_parts(self.param_groups))
        self._update = torch.compile(_update, fullgraph=True, dynamic=False)
        self._norm = torch.compile(_norm, fullgraph=True, dynamic=False)

    def norm(self) -> Tensor:
        """Return the norm of all gradients together, a float32 scalar."""
        return self._norm(self._gradients())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights, their averages and their copies; closure is ignored."""
        group = self.param_groups[0]
        for weight in self._weights:
            self.state[weight]["step"] += 1
        number = self.state[self._weights[0]]["step"].item()
        first, second = group["betas"]
        size, root = group["lr"] / (1 - first**number), (1 - second**number) ** -0.5
        parts = [part for part, _ in self._parts]
        averages, squares = (
            [[self.state[weight][name] for weight in part] for part in parts] for name in ("exp_avg", "exp_avg_sq")
        )
        changed = parts, averages, squares
        weights, first_moments, second_moments = joined = [[_joined(part) for part in each] for each in changed]
        self._update(
            weights,
            first_moments,
            second_moments,
            self._gradients(),
            [self.copies[part[0]].detach().view(-1) if part[0] in self.copies else None for part in parts],
            _scalars(*(1 - group["lr"] * decay for _, decay in self._parts)),
            torch.ones(()) if self.grad_scale is None else self.grad_scale.reciprocal(),
            torch.tensor(int(number), dtype=torch.int32),
            _scalars(size, root, 1 - first, second, 1 - second, group["eps"]),
        )
        for of_parts, rows in zip(changed, joined, strict=True):
            for tensors, row in zip(of_parts, rows, strict=True):
                _part_again(row, tensors)

    def _gradients(self) -> list[Tensor]:
        return [_joined(_gradients([self._leaf[weight] for weight in part])) for part, _ in self._parts]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of weights and copies; a copy's is always set to None."""
        super().zero_grad(set_to_none)
        for copy in self.copies.values():
            copy.grad = None


def leaves(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors that hold the gradients of an optimiser's weights."""
    if isinstance(optimizer, CompiledAdamW):
        return optimizer.leaves
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def clip_gradients(optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor], largest: float, how: str) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`, and return the norm before scaling.

    The norm is the same on every rank. how: separate scales here; in_step leaves it to the optimiser's next step.
    """
    if isinstance(optimizer, CompiledAdamW):
        norm = optimizer.norm()
    else:
        norm = whole(torch.nn.utils.get_total_norm(_gradients(leaves)))
    if how == "in_step":
        scaled: Any = optimizer
        scaled.grad_scale = ((norm + 1e-6) / largest).clamp(min=1)  # the reciprocal of torch's factor
    else:
        torch.nn.utils.clip_grads_with_norm_(leaves, largest, norm)
    return norm


def _gradients(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def _scalars(*values: float) -> list[Tensor]:
    """Return values as CPU tensors, because a changing Python number would cause recompilation."""
    return [torch.tensor(value, dtype=torch.float32) for value in values]


def _parts(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[list[Tensor], float]]:
    """Yield the weights that are updated together, with their decay: each matrix alone, a group's vectors at once."""
    for group in groups:
        yield from (([weight], group["weight_decay"]) for weight in group["params"] if weight.dim() > 1)
        if small := [weight for weight in group["params"] if weight.dim() <= 1]:
            yield small, group["weight_decay"]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one row: a view of a single tensor, a copy of several."""
    rows = [tensor.detach().view(-1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _part_again(joined: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row that _joined() made of several tensors back into them."""
    if len(tensors) > 1:
        for tensor, row in zip(tensors, joined.split([each.numel() for each in tensors]), strict=True):
            tensor.detach().view(-1).copy_(row)


def _update(
    weights: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    gradients: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    keeps: Sequence[Tensor],
    scale: Tensor,
    seed: Tensor,
    numbers: Sequence[Tensor],
) -> None:
    """Apply one step of AdamW to flat tensors, in place.

    keeps: factor of each weight after decay. scale: factor of each gradient. numbers: step size, reciprocal root of
    the second moment's bias correction, 1 - beta1, beta2, 1 - beta2, epsilon. A division takes longer than all the
    rest of the arithmetic, so there is only one.
    """
    size, root, less, second, rest, eps = numbers
    for index, (weight, average, square, gradient, copy, keep) in enumerate(
        zip(weights, averages, squares, gradients, copies, keeps, strict=True)
    ):
        gradient = gradient.float() * scale
        average.add_((gradient - average) * less)
        square.mul_(second).add_(gradient * gradient * rest)
        updated = weight.float() * keep - size * average / (square.sqrt() * root + eps)
        narrow = weight.dtype != torch.float32
        weight.copy_(rounded_at_random(updated, (seed * len(weights) + index) * MIX) if narrow else updated)
        if copy is not None:
            copy.copy_(weight)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum().sqrt()


MIX = -1640531535
"""2^32 divided by the golden ratio, as a signed int32; its multiples differ in many bits."""


def rounded_at_random(x: Tensor, seed: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, each number up with the probability that preserves its mean.

    x: float32, any shape. seed: int32, a different one for each call. The random bits are a hash of seed and position,
    which is cheaper than a generator and the same on every device.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    mixed = (place ^ seed) * MIX
    mixed = (mixed ^ (mixed >> 15)) * -2048144789  # multipliers and shifts of MurmurHash3's finaliser
    mixed = (mixed ^ (mixed >> 13)) * -1028477387
    # bfloat16 drops the low 16 bits: adding 16 random bits to them carries with the right probability.
    return ((x.view(torch.int32) + ((mixed >> 16) & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()

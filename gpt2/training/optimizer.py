"""AdamW as a compiled function, which can also clip gradients and write the weights' casts in the same pass.

AdamW is bound by memory traffic: each pass over weights, gradients or averages that is merged into another
one saves time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2.training.distributed import full_tensor


class CompiledAdamW(torch.optim.Optimizer):
    """AdamW with torch.optim.AdamW's arithmetic and state, compiled by torch.compile.

    copies: each weight's copy in a narrower format. Copies that require a gradient replace their weights in
    the model and receive the gradients; all copies are rewritten in each step. Weights that are themselves
    bfloat16 are rounded stochastically, up or down with probabilities that preserve the mean, so that small
    updates are not lost; their averages are float32, and there is no float32 master (Zamirai et al. 2020,
    https://arxiv.org/abs/2010.06192).

    The biases and LayerNorms of a group, which must have one dtype, become views of one buffer, and so do
    their averages. A CUDA graph cannot capture a step, because the host computes with the step number and the
    learning rate.
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
        self.leaves = [copies[w] if w in copies and copies[w].requires_grad else w for w in self._weights]
        """The tensors that receive gradients: each weight, or the copy that replaces it in the model."""
        self._leaf = dict(zip(self._weights, self.leaves, strict=True))
        self._parts = list(_parts(self.param_groups))
        rows = [_views_of_one(part) for part, _ in self._parts]
        averages, squares = ([torch.zeros_like(row, dtype=torch.float32) for row in rows] for _ in range(2))
        self._rows = rows, averages, squares
        firsts = [copies.get(part[0]) for part, _ in self._parts]
        self._copies = [None if copy is None else copy.detach().view(-1) for copy in firsts]
        self._steps = torch.zeros(len(self._weights))
        steps = dict(zip(self._weights, self._steps.unbind(), strict=True))
        for (part, _), average, square in zip(self._parts, averages, squares, strict=True):
            for weight, *views in zip(part, _parted(average, part), _parted(square, part), strict=True):
                self.state[weight] = {"step": steps[weight], "exp_avg": views[0], "exp_avg_sq": views[1]}
        on_cuda = rows[0].is_cuda
        # Unless asked to, Inductor fuses nothing that shares no data: each row's update would be a kernel.
        options: Any = {"combo_kernels": True} if on_cuda else None
        self._update = torch.compile(_update, fullgraph=True, dynamic=False, options=options)
        self._norm = torch.compile(_norm, fullgraph=True, dynamic=False)
        self.norm_is_compiled = not on_cuda
        """Whether norm() is a compiled function: on CUDA that would be two kernels for each gradient."""

    def norm(self) -> Tensor:
        """Return the norm of all gradients together, a float32 scalar."""
        if self.norm_is_compiled:
            return self._norm(self._gradients())
        return _norm_of_lists(_gradients(self.leaves))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights, their averages and their copies; closure is ignored."""
        group = self.param_groups[0]
        number = self._steps.add_(1)[0].item()
        first, second = group["betas"]
        size, root = group["lr"] / (1 - first**number), (1 - second**number) ** -0.5
        keeps = _scalars(*(1 - group["lr"] * each["weight_decay"] for each in self.param_groups))
        self._update(
            *self._rows,
            self._gradients(),
            self._copies,
            [keeps[index] for _, index in self._parts],
            torch.ones(()) if self.grad_scale is None else self.grad_scale.reciprocal(),
            torch.tensor(int(number), dtype=torch.int32),
            _scalars(size, root, 1 - first, second, 1 - second, group["eps"]),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: torch would put tensors in place of views; checkpoint_tensors.restore() fills them."""
        way = "fill them in place, as gpt2.pretrain.checkpoint_tensors.restore() does"
        raise NotImplementedError(f"its averages are views; {way}")

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


def clip_gradients(
    optimizer: torch.optim.Optimizer, leaves: Sequence[Tensor], largest: float, how: str
) -> Tensor:
    """Scale all gradients so that their global norm is at most `largest`, and return the norm before scaling.

    The norm is the same on every rank. how: separate scales here; in_step leaves it to the optimiser's next
    step.
    """
    if isinstance(optimizer, CompiledAdamW):
        norm = optimizer.norm()
    else:
        norm = full_tensor(torch.nn.utils.get_total_norm(_gradients(leaves)))
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


def _parts(groups: Sequence[dict[str, Any]]) -> Iterator[tuple[list[Tensor], int]]:
    """Yield weights updated together and their group: each matrix alone, a group's vectors at once."""
    for index, group in enumerate(groups):
        yield from (([weight], index) for weight in group["params"] if weight.dim() > 1)
        if small := [weight for weight in group["params"] if weight.dim() <= 1]:
            yield small, index


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one row: of a single tensor without a copy where it is contiguous."""
    rows = [tensor.flatten() for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def _parted(row: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a row's consecutive parts, shaped as `tensors`."""
    parts = row.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _views_of_one(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one row, of which the tensors are views from now on."""
    row = _joined([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, _parted(row, tensors), strict=True):
        tensor.data = part
    return row


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

    keeps: factor of each weight after decay. scale: factor of each gradient. numbers: step size, reciprocal
    root of the second moment's bias correction, 1 - beta1, beta2, 1 - beta2, epsilon. A division takes longer
    than all the rest of the arithmetic, so there is only one.
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


def _norm_of_lists(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm by torch's kernel for a list of tensors of one dtype, whose sums are float32."""
    dtypes = dict.fromkeys(each.dtype for each in gradients)  # in order: all ranks must add up alike
    lists = [[each for each in gradients if each.dtype == dtype] for dtype in dtypes]
    norms = [norm for each in lists for norm in torch._foreach_norm(each, 2, torch.float32)]  # type: ignore[attr-defined]
    return torch.linalg.vector_norm(torch.stack(norms))


MIX = -1640531535
"""2^32 divided by the golden ratio, as a signed int32; its multiples differ in many bits."""


def rounded_at_random(x: Tensor, seed: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, each number up with the probability that preserves its mean.

    x: float32, any shape. seed: int32, a different one for each call. The random bits are a hash of seed and
    position, which is cheaper than a generator and the same on every device.
    """
    place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    mixed = (place ^ seed) * MIX
    mixed = (mixed ^ (mixed >> 15)) * -2048144789  # multipliers and shifts of MurmurHash3's finaliser
    mixed = (mixed ^ (mixed >> 13)) * -1028477387
    # bfloat16 drops the low 16 bits: adding 16 random bits to them carries with the right probability.
    return ((x.view(torch.int32) + ((mixed >> 16) & 0xFFFF)) & -0x10000).view(torch.float32).bfloat16()

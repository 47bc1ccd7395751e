"""Compare the gradients of compiled code and this project's kernels with eager torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2.config.tolerances import GRADIENT_TOLERANCE
from gpt2.config.workload import GPT2Config
from gpt2.model.model import GPT2, Linear
from gpt2.training.distributed import full_tensor
from gpt2.training.optimizer import CompiledAdamW
from gpt2.training.train import Training

EAGER_SEQUENCES = 8
"""Most sequences that eager code takes at a time; each needs more memory than in compiled code."""
LARGEST_RATIO = 1e6
"""Bound of error_over_eager(), which JSON can hold."""


def _plain(training: Training) -> GPT2:
    """Return a model that computes with torch's own functions on the trained weights and their copies.

    Sharded modules and torchao's have no such equivalent; then the model itself is returned.
    """
    model = training.model
    if training.toggles.shards_gradients or training.toggles.float8 != "none":
        return model
    other = _sharing_weights(model, model.config.plain)
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, Linear) and isinstance(its, Linear):
            its.copy = mine.copy
    return other


def _sharing_weights(model: GPT2, config: GPT2Config) -> GPT2:
    """Return a model of another config on the very parameters of this one."""
    with torch.device("meta"):
        other = GPT2(config)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    other.future, other.pad_bias = model.future, model.pad_bias
    return other


class GradientCheck:
    """Gradients of one micro-batch as trained and in eager torch, and how far they are apart.

    Memory: two sets of gradients beyond those of an eager step on at most EAGER_SEQUENCES sequences. Weights
    and the optimiser are left unchanged, and so is their .grad, except that sharded gradients are dropped; no
    torch mode stays set.
    """

    def __init__(self, training: Training, x: Tensor, y: Tensor) -> None:
        """Take both sets of gradients.

        x, y: int64 (micro_batch_size, seq_len), with the strides that training uses, such as its last
        micro_batch: other strides would not fit the compiled code.

        Ranks exchange nothing, except where gradients are sharded: then all ranks must call this together,
        each with a micro-batch. Raises RuntimeError if the compiled code would have to be recompiled, as it
        then is not the code that trained.
        """
        self._training = training
        self._batch = x, y = x.to(training.device.torch_device), y.to(training.device.torch_device)
        self._trained = gradients(training, training.model, x, y, "fail_on_recompile", len(x))
        with _exact_sums():
            self._eager = gradients(training, _plain(training), x, y, "force_eager", EAGER_SEQUENCES)
        self._differences = _relative(self._trained, self._eager)

    @property
    def difference(self) -> float:
        """The largest relative difference between a parameter's gradients as trained and in eager torch.

        Per parameter, the difference is ||trained - eager|| / ||eager||, or relative to the norm of all
        gradients where its eager gradient is zero.
        """
        return self._differences.max().item()

    def error_over_eager(self) -> float | None:
        """Return how many times as far from float32's gradients the trained ones are as those of eager torch.

        It is the largest ratio over the parameters that differ by more than GRADIENT_TOLERANCE. Where the
        parts of a gradient's sum cancel, their rounding errors do not, so that a number format can explain
        more than that; then eager code is as far off. 0 where no parameter differs so much; LARGEST_RATIO
        where it is more than that. None where nothing is rounded more than in float32, and where float32 is
        no reference: for 8-bit matmuls, weights in bfloat16, shards. Memory: a third set of gradients, and
        those of a step in float32 on one sequence.
        """
        toggles, precision = self._training.toggles, self._training.toggles.precision_class()
        if toggles.shards_gradients or toggles.weights != "float32" or precision in ("float32", "float8"):
            return None
        beyond = ~(self._differences <= GRADIENT_TOLERANCE[precision])  # NaN, too
        exact = _exact_gradients(self._training, *self._batch)
        ratios = _relative(self._trained, exact) / _relative(self._eager, exact)
        bounded = ratios.nan_to_num(nan=LARGEST_RATIO).clamp(max=LARGEST_RATIO)
        return torch.where(beyond, bounded, 0.0).max().item()


def gradient_difference(training: Training, x: Tensor, y: Tensor) -> float:
    """Return the difference that a GradientCheck finds."""
    return GradientCheck(training, x, y).difference


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return ||found - expected|| / ||expected|| per parameter, as GradientCheck.difference has it."""
    norms = torch.stack([full_tensor(gradient.norm()) for gradient in expected])
    differences = torch.stack([full_tensor((a - b).norm()) for a, b in zip(found, expected, strict=True)])
    return differences / torch.where(norms > 0, norms, norms.norm())


def _exact_gradients(training: Training, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """Return gradients as gradients() does, of the float32 weights, computed in float32 throughout."""
    model, optimizer = training.model, training.optimizer
    exact = _sharing_weights(model, replace(model.config.plain, residual="float32"))
    copies = optimizer.copies if isinstance(optimizer, CompiledAdamW) else {}
    originals = {id(copy): weight for weight, copy in copies.items()}
    autocast, leaves = training.autocast, training.leaves
    precision = torch.get_float32_matmul_precision()
    # Whichever of torch's kernels the process is set to may take no float32.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        training.autocast = contextlib.nullcontext
        training.leaves = [originals.get(id(leaf), leaf) for leaf in leaves]
        torch.set_float32_matmul_precision("highest")
        with sdpa_kernel(kernels):
            return gradients(training, exact, x, y, "force_eager", 1)
    finally:
        training.autocast, training.leaves = autocast, leaves
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _exact_sums() -> Iterator[None]:
    """Context in which CUDA's matmuls add up the parts of a long sum in float32.

    By default cuBLAS may add them in the inputs' format, which would cost digits of the reference.
    """
    matmul: Any = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name in names:
            setattr(matmul, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def gradients(
    training: Training, model: GPT2, x: Tensor, y: Tensor, stance: str, sequences: int
) -> Sequence[Tensor]:
    """Return a gradient for each of training.leaves: of a micro-batch's mean loss times the scaler's scale.

    The `model` takes `sequences` of the micro-batch at a time. stance: that of torch.compiler.set_stance().
    """
    parts = [(x, y)] if sequences >= len(x) else zip(x.split(sequences), y.split(sequences), strict=True)
    found: list[Tensor] = []
    with torch.compiler.set_stance(stance):  # around the backward pass too, which may recompute a block
        for tokens, targets in parts:
            with training.autocast():
                loss = model(tokens, targets)
            loss = training.scaler.scale(loss) * (len(tokens) / len(x))
            if training.toggles.shards_gradients:
                loss.backward()  # only this reduce-scatters; the shards accumulate in .grad
                continue
            more = torch.autograd.grad(loss, training.leaves)
            # Accumulated in float32, so that splitting the batch adds no rounding.
            found = (
                [a.add_(b) for a, b in zip(found, more, strict=True)] if found else [g.float() for g in more]
            )
    if training.toggles.shards_gradients:
        found = [leaf.grad for leaf in training.leaves if leaf.grad is not None]
        training.optimizer.zero_grad(set_to_none=True)
    return found

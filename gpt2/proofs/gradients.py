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
from gpt2.model.model import GPT2, Linear
from gpt2.training.distributed import full_tensor
from gpt2.training.train import Training

EAGER_SEQUENCES = 8
"""Most sequences that eager code takes at a time; each needs more memory than in compiled code."""


def _plain(training: Training) -> GPT2:
    """Return a model that computes with torch's own functions on the trained weights and their copies.

    Sharded modules and torchao's have no such equivalent; then the model itself is returned.
    """
    model = training.model
    if training.toggles.shards_gradients or training.toggles.float8 != "none":
        return model
    with torch.device("meta"):
        other = GPT2(model.config.plain)
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    other.future, other.pad_bias = model.future, model.pad_bias
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, Linear) and isinstance(its, Linear):
            its.copy = mine.copy
    return other


def gradient_difference(training: Training, x: Tensor, y: Tensor) -> float:
    """Return the largest relative difference between a parameter's gradients as trained and in eager torch.

    x, y: one micro-batch, int64 (micro_batch_size, seq_len), with the strides that training uses, such as its
    last micro_batch: other strides would not fit the compiled code. Per parameter, the difference is
    ||trained - eager|| / ||eager||, or relative to the norm of all gradients where its eager gradient is
    zero. Memory: two sets of gradients beyond those of an eager step on at most EAGER_SEQUENCES sequences.
    Weights and the optimiser are left unchanged, and so is their .grad, except that sharded gradients are
    dropped; no torch mode stays set.

    Ranks exchange nothing, except where gradients are sharded: then all ranks must call this together, each
    with a micro-batch. Raises RuntimeError if the compiled code would have to be recompiled, as it then is
    not the code that trained.
    """
    x, y = x.to(training.device.torch_device), y.to(training.device.torch_device)
    trained = gradients(training, training.model, x, y, "fail_on_recompile", len(x))
    with _exact_sums():
        eager = gradients(training, _plain(training), x, y, "force_eager", EAGER_SEQUENCES)
    return _relative(trained, eager).max().item()


def error_over_eager(training: Training, x: Tensor, y: Tensor) -> float | None:
    """Return how many times as far from float32's gradients the trained ones are as those of eager torch.

    It is the largest ratio over the parameters that differ by more than GRADIENT_TOLERANCE. Where the parts
    of a gradient's sum cancel, its rounding errors do not, so that a number format may explain much more than
    that: then eager code is as far off. 0 where no parameter differs so much. None where nothing is rounded
    more than in float32, and where float32 is no reference: for 8-bit matmuls, weights in bfloat16, shards.

    x, y: as for gradient_difference(), which has the conditions, too. Memory: one more set of gradients.
    """
    toggles, precision = training.toggles, training.toggles.precision_class()
    if toggles.shards_gradients or toggles.weights != "float32" or precision in ("float32", "float8"):
        return None
    x, y = x.to(training.device.torch_device), y.to(training.device.torch_device)
    trained = gradients(training, training.model, x, y, "fail_on_recompile", len(x))
    with _exact_sums():
        eager = gradients(training, _plain(training), x, y, "force_eager", EAGER_SEQUENCES)
    exact = _exact_gradients(training, x, y)
    beyond = _relative(trained, eager) > GRADIENT_TOLERANCE[precision]
    errors = _relative(eager, exact).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(beyond, _relative(trained, exact) / errors, 0.0).max().item()


def _relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """Return ||found - expected|| / ||expected|| per parameter; see gradient_difference()."""
    norms = torch.stack([full_tensor(gradient.norm()) for gradient in expected])
    differences = torch.stack([full_tensor((a - b).norm()) for a, b in zip(found, expected, strict=True)])
    return differences / torch.where(norms > 0, norms, norms.norm())


def _exact_gradients(training: Training, x: Tensor, y: Tensor) -> Sequence[Tensor]:
    """Return gradients as gradients() does, computed in float32 throughout."""
    model = training.model
    with torch.device("meta"):
        exact = GPT2(replace(model.config.plain, residual="float32"))
    exact.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    exact.future, exact.pad_bias = model.future, model.pad_bias
    autocast, precision = training.autocast, torch.get_float32_matmul_precision()
    # Whichever of torch's kernels the process is set to may take no float32.
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    try:
        training.autocast = contextlib.nullcontext
        torch.set_float32_matmul_precision("highest")
        with sdpa_kernel(kernels):
            return gradients(training, exact, x, y, "force_eager", EAGER_SEQUENCES)
    finally:
        training.autocast = autocast
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

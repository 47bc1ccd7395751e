"""Compare the gradients of compiled code and this project's kernels with eager torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

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
    norms = torch.stack([full_tensor(gradient.norm()) for gradient in eager])
    differences = torch.stack([full_tensor((a - b).norm()) for a, b in zip(trained, eager, strict=True)])
    return (differences / torch.where(norms > 0, norms, norms.norm())).max().item()


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

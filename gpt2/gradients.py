"""Are the gradients of compiled code, and of our own functions, those of torch's functions in eager code?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.model import GPT2, Linear
from gpt2.parallel import whole
from gpt2.train import Training

EAGER_SEQUENCES = 8
"""Of a micro-batch, that eager code takes at a time: it keeps more of each than compiled code, and has to fit, too."""


def _plain(training: Training) -> GPT2:
    """By torch's own functions, on the very weights that are trained and the copies that stand for them.

    Modules that stand in for ours, such as shards and those of torchao, have no such double: then the model itself.
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
    """Largest relative difference of a parameter's gradient on one micro-batch, as trained against as torch has it.

    That is eager code of torch's own functions, on the same weights.

    x, y: int64 (micro_batch_size, seq_len) as the training takes them, such as its last micro_batch: of other strides
    they would not fit the compiled code. For each parameter ||trained - eager|| / ||eager||; where its eager gradient
    is zero, against the norm of all gradients. Memory: two sets of gradients beside an eager step's own, which is of
    EAGER_SEQUENCES at most. Weights, their .grad and the optimiser stay as they are, and no mode of torch is left
    behind. No rank exchanges anything, except where they share the gradients out: then all ranks must call this
    together, each with a micro-batch.
    Raises RuntimeError if the compiled code would have to be compiled anew: it is not what trained then.
    """
    x, y = x.to(training.device.torch_device), y.to(training.device.torch_device)
    trained = gradients(training, training.model, x, y, "fail_on_recompile", len(x))
    eager = gradients(training, _plain(training), x, y, "force_eager", EAGER_SEQUENCES)
    norms = torch.stack([whole(gradient.norm()) for gradient in eager])
    differences = torch.stack([whole((a - b).norm()) for a, b in zip(trained, eager, strict=True)])
    return (differences / torch.where(norms > 0, norms, norms.norm())).max().item()


def gradients(training: Training, model: GPT2, x: Tensor, y: Tensor, stance: str, sequences: int) -> Sequence[Tensor]:
    """Gradients of a micro-batch's mean loss, as the scaler scales it, by `model` on `sequences` of it at a time.

    stance: torch.compiler's. Returns one for each of training.leaves.
    """
    parts = [(x, y)] if sequences >= len(x) else zip(x.split(sequences), y.split(sequences), strict=True)
    found: list[Tensor] = []
    with torch.compiler.set_stance(stance):  # for the backward pass, too: it may compute a block again
        for tokens, targets in parts:
            with training.autocast():
                loss = model(tokens, targets)
            loss = training.scaler.scale(loss) * (len(tokens) / len(x))
            if training.toggles.shards_gradients:
                loss.backward()  # for only this sends each rank its share; they add up in .grad
                continue
            more = torch.autograd.grad(loss, training.leaves)
            # In float32, so that adding up rounds nothing that the whole batch at once does not.
            found = [a.add_(b) for a, b in zip(found, more, strict=True)] if found else [g.float() for g in more]
    if training.toggles.shards_gradients:
        found = [leaf.grad for leaf in training.leaves if leaf.grad is not None]
        training.optimizer.zero_grad(set_to_none=True)
    return found

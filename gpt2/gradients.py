"""Are the gradients of compiled code those of eager code?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.parallel import whole
from gpt2.train import Training


def gradient_difference(training: Training, x: Tensor, y: Tensor) -> float:
    """Largest relative difference of a parameter's gradient, compiled against eager, on one micro-batch.

    x, y: int64 (micro_batch_size, seq_len) as the training takes them, such as its last micro_batch: of other strides
    they would not fit the compiled code. For each parameter ||compiled - eager|| / ||eager||; where its eager gradient
    is zero, against the norm of all gradients. Memory: two sets of gradients beside a training step's own. Weights,
    their .grad and the optimiser stay as they are, and no mode of torch is left behind. No rank exchanges anything,
    except where they share the gradients out: then all ranks must call this together, each with a micro-batch.
    Raises RuntimeError if the compiled code would have to be compiled anew: it is not what trained then.
    """
    x, y = x.to(training.device.torch_device), y.to(training.device.torch_device)
    parameters = training.leaves

    def gradients(stance: str) -> Sequence[Tensor]:
        with torch.compiler.set_stance(stance):  # for the backward pass, too: it may compute a block again
            with training.autocast():
                loss = training.model(x, y)
            loss = training.scaler.scale(loss)
            if not training.toggles.shards_gradients:
                return torch.autograd.grad(loss, parameters)
            loss.backward()  # for only this sends each rank its share
        found = [parameter.grad for parameter in parameters]
        training.optimizer.zero_grad(set_to_none=True)
        return [gradient for gradient in found if gradient is not None]

    compiled, eager = gradients("fail_on_recompile"), gradients("force_eager")
    norms = torch.stack([whole(gradient.norm()) for gradient in eager])
    differences = torch.stack([whole((a - b).norm()) for a, b in zip(compiled, eager, strict=True)])
    return (differences / torch.where(norms > 0, norms, norms.norm())).max().item()

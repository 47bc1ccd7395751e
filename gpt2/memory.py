"""How much device memory a rung will need, worked out without training: bench plan's estimate.

The forward pass runs on fake tensors, which have shapes and dtypes but no data, and what autograd keeps for the
backward pass is added up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2 import stages
from gpt2.model import GPT2
from gpt2.toggles import Toggles
from gpt2.workload import Workload


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device, at the end of the forward pass; libraries add their own."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """All that autograd keeps for the backward pass, and the logits' gradient, the largest tensor of it."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(workload: Workload, toggles: Toggles) -> MemoryEstimate:
    """Estimate one rank's memory for one micro-batch."""
    config = stages.model_config(toggles, workload.config)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        model = GPT2(config)
        weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
        tokens = torch.zeros(toggles.micro_batch_size, workload.seq_len, dtype=torch.int64)
        dtype = getattr(torch, toggles.autocast)
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            model(tokens, tokens)
    activations = sum(size for storage, size in kept.items() if storage not in weights)
    elements = toggles.micro_batch_size * workload.seq_len * config.padded_vocab_size
    logits = elements * 4
    if toggles.compile != "eager":
        # Eager code keeps log-probabilities in float32. The compiler keeps the logits as the product gave them and
        # works out both these and their gradient within other kernels.
        narrower = 4 - dtype.itemsize
        logits -= 2 * elements * narrower
    total = sum(weights.values())
    return MemoryEstimate(weights=total, gradients=total, optimizer=2 * total, activations=activations + logits)

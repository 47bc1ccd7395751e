"""Estimate the device memory of a rung without training, for bench plan.

The forward pass runs on fake tensors, which have shapes and dtypes but no data, and the sizes of the tensors
that autograd keeps for the backward pass are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.model.model import GPT2
from gpt2.training import stages


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes per device at the end of the forward pass, without what libraries allocate."""

    weights: int
    """Includes the weights gathered by then, where ranks share them out."""
    gradients: int
    optimizer: int
    """State of the optimiser on the rank that keeps most."""
    activations: int
    """All that autograd keeps for the backward pass, and the gradient of the logits, its largest tensor."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations


def estimate(workload: Workload, toggles: Toggles) -> MemoryEstimate:
    """Estimate one rank's memory for one micro-batch, in bytes."""
    config = stages.model_config(toggles, workload.config)
    # Packages may be absent: these keep the same tensors as torch's functions.
    config = replace(config, layer_norm="torch", int8="none")
    if config.attention == "flex":  # FlexAttention takes no fake tensors; it keeps the same tensors as SDPA
        config = replace(config, attention="sdpa")
    if config.cross_entropy == "cut":  # the closest loss here is one whose logits can be taken off
        config = replace(config, cross_entropy="triton")
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with FakeTensorMode():
        model = GPT2(config)
        copies = model.keep_copies(torch.bfloat16) if toggles.weight_casts == "optimizer" else {}
        if toggles.weights != "float32":
            model.narrow(getattr(torch, toggles.weights))
        weights = {each.untyped_storage()._cdata for each in (*model.parameters(), *copies.values())}
        tokens = torch.zeros(toggles.micro_batch_size, workload.seq_len, dtype=torch.int64)
        dtype = getattr(torch, toggles.autocast)
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            model(tokens, tokens)
    activations = sum(size for storage, size in kept.items() if storage not in weights)
    elements = toggles.micro_batch_size * workload.seq_len * config.padded_vocab_size
    # The gradient by one of the GPU kernels takes the place of the logits, which are among the kept.
    wide, narrow = elements * 4, elements * dtype.itemsize
    logits = {"torch": wide, "closed_form": narrow, "cut": -narrow}.get(toggles.cross_entropy, 0)
    if toggles.cross_entropy == "torch" and toggles.compile != "eager" and not toggles.shards_gradients:
        # Eager code keeps log-probabilities in float32. Compiled code keeps the logits and their gradient in
        # the matmul's format. Where gradients are sharded, the lm_head is not compiled.
        logits -= 2 * elements * (4 - dtype.itemsize)
    state = _state(model, toggles)
    for weight, copy in copies.items():
        state["weights"] += copy.nbytes
        state["gradients"] -= weight.nbytes - copy.nbytes if copy.requires_grad else 0
    return MemoryEstimate(**state, activations=activations + logits)


def _state(model: GPT2, toggles: Toggles) -> dict[str, int]:
    """Return the bytes of one rank's weights, gradients and optimiser state."""
    total, ranks = _bytes(model), toggles.world_size
    if toggles.weights != "float32":
        narrow = sum(parameter.nbytes for parameter in model.parameters())
        return {"weights": narrow, "gradients": narrow, "optimizer": 2 * total}
    if toggles.sharding == "zero1":
        return {"weights": total, "gradients": total, "optimizer": 2 * _largest_share(model, ranks)}
    if not toggles.shards_gradients:
        return {"weights": total, "gradients": total, "optimizer": 2 * total}
    share = sum(-(-len(p) // ranks) * p[0].numel() * 4 for p in model.parameters())
    # fsdp2 frees its blocks one by one.
    gathered = total if toggles.sharding == "zero2" else total - _bytes(model.h)
    # Accumulated gradients stay whole until they are exchanged, once per step.
    gradients = total if toggles.grad_accum_steps > 1 else share
    return {"weights": share + gathered, "gradients": gradients, "optimizer": 2 * share}


def _bytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in module.parameters())


def _largest_share(model: GPT2, ranks: int) -> int:
    """Return the most bytes that ZeroRedundancyOptimizer gives a rank: largest tensors first."""
    shares = [0] * ranks
    for matrices in (True, False):
        sizes = [p.numel() * 4 for p in model.parameters() if (p.dim() >= 2) == matrices]
        for size in sorted(sizes, reverse=True):
            shares[shares.index(min(shares))] += size
    return max(shares)

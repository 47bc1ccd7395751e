"""Ranks that train together: how they find each other, what each of them keeps, and what they tell each other."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from gpt2.device import Device
from gpt2.toggles import Toggles

if TYPE_CHECKING:
    from gpt2.model import GPT2

T = TypeVar("T")


def nodes() -> int:
    """Machines that the ranks are spread over, evenly."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


class RanksError(RuntimeError):
    """Other ranks were started than are asked for; the message says how many, and what to do."""


@contextlib.contextmanager
def process_group(toggles: Toggles, device: Device) -> Iterator[int]:
    """Join the ranks that train together; gives this process's rank.

    Raises RanksError where the process was not started once per rank, as torchrun does.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != toggles.processes:
        raise RanksError(
            f"world_size is {toggles.world_size} but {started} process(es) were started (WORLD_SIZE); set "
            f"toggles.world_size={started}, or start it with "
            f"python -m torch.distributed.run --standalone --nproc-per-node {toggles.processes} -m ..."
        )
    if toggles.processes == 1:
        yield 0
        return
    bound = device.torch_device if device.ddp_device_ids else None
    torch.distributed.init_process_group(device.ddp_backend, device_id=bound)
    yield torch.distributed.get_rank()
    # Not after an error, when other ranks may be waiting in a collective. DDP's reference cycles hold on to
    # the group, whose threads are joined only when it is freed; a thread left over aborts the process at its exit.
    gc.collect()
    torch.distributed.destroy_process_group()


def replicate(model: torch.nn.Module, device: Device, *, static_graph: bool) -> torch.nn.Module:
    """One of several replicas, whose gradients are averaged over the ranks while the backward pass goes on."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers to a name that 2.9 to 2.12 do not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=device.ddp_device_ids,
            gradient_as_bucket_view=True,  # see keeps_gradients()
            broadcast_buffers=False,  # masks, the same on every rank
            static_graph=static_graph,
        )


def shard(model: GPT2, device: Device, world_size: int, *, keep_weights: bool) -> torch.nn.Module:
    """Spread every tensor's rows over the ranks, in place; each block's are gathered in one go when they are needed.

    keep_weights: from the forward pass to the backward pass, instead of gathering them a second time.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.torch_device.type, (world_size,))
    for part in (*model.h, model):  # the root last: it takes what no block has
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=not keep_weights)
        # In some versions of torch gloo takes an average for a sum and says nothing (pytorch issue 162338).
        sharded.set_force_sum_reduction_for_comms(device.ddp_backend == "gloo")
    return model


def release(model: Any) -> None:
    """Let go of gathered weights after a forward pass that no backward pass follows."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # as fully_shard makes it
            module.reshard()


def sharded_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """AdamW that keeps the state of this rank's tensors only and then tells the others what became of them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # Weights lie in one buffer per rank, sent as a whole: otherwise each of them would be sent on its own.
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)


def gradient_sync(model: Any, *, last: bool) -> AbstractContextManager[None]:
    """Around the forward and backward pass of a micro-step: only the last one of a step exchanges gradients."""
    if hasattr(model, "set_requires_gradient_sync"):  # as fully_shard makes it
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:  # DistributedDataParallel
        return model.no_sync()
    return contextlib.nullcontext()


def keeps_gradients(model: Any) -> bool:
    """Whether gradients are set to zero after a step where they lie: DistributedDataParallel's, in what it exchanges.

    Let go of, they would come back beside those buffers, a second set, to be copied into them at the end of a step.
    """
    return hasattr(model, "no_sync")


def whole(tensor: Any) -> Tensor:
    """All of a tensor, on every rank; where ranks share it out, all of them must ask for it together."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def is_shard(tensor: Tensor) -> bool:
    """Whether this is a DTensor, of which each rank has a part; asked without loading what only such tensors need."""
    return hasattr(tensor, "full_tensor")


def fill(tensor: Any, rows: Tensor) -> None:
    """Copy the first rows of a tensor that ranks share out from one that each of them has whole; all call it."""
    from torch.distributed.tensor import distribute_tensor

    full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=rows.device)
    full[: rows.size(0)].copy_(rows)
    tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements))


def rank() -> int:
    """Of this process among those that train together."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def mean(values: Tensor, processes: int) -> Tensor:
    """Over all ranks, element by element, on every rank."""
    if processes > 1:
        torch.distributed.all_reduce(values)
    return values / processes


def gather(mine: T, processes: int) -> list[T]:
    """One value from each rank, on every rank."""
    if processes == 1:
        return [mine]
    everyone: list[Any] = [None] * processes
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def ranks_agree(model: torch.nn.Module, processes: int) -> bool:
    """Whether the weights of all ranks are the same bit for bit; only their fingerprints travel."""
    return len(set(gather(fingerprint(model), processes))) == 1


def fingerprint(model: torch.nn.Module) -> str:
    """Of all weights and masks, bit for bit; where ranks share the weights out, all of them must ask together."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        whole_here = whole(tensor.detach()).cpu().contiguous()
        digest.update(whole_here.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

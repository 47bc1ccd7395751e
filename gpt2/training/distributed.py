"""Ranks that train together: process group, replication and sharding, and collectives."""

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

from gpt2.config.toggles import Toggles
from gpt2.device import Device
from gpt2.errors import GPT2Error, limit_met

if TYPE_CHECKING:
    from gpt2.model.model import GPT2

T = TypeVar("T")


def nodes() -> int:
    """Return the number of machines, over which the ranks are spread evenly."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


class RanksError(GPT2Error):
    """The ranks that were asked for cannot meet; the message says why, and what to do."""


def require_group(toggles: Toggles) -> None:
    """Raise RanksError where several processes are to train together and none has joined a group."""
    if toggles.processes > 1 and not torch.distributed.is_initialized():
        joined = f"world_size={toggles.world_size} takes as many processes, joined in a group"
        raise RanksError(f"{joined}; gpt2 train and bench run start them")


@contextlib.contextmanager
def process_group(toggles: Toggles, device: Device) -> Iterator[int]:
    """Join the ranks that train together, and yield this process's rank.

    Raises RanksError where the number of started processes is not the one that the toggles ask for, and where
    a limit on processes keeps them from meeting.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != toggles.processes:
        raise RanksError(
            f"world_size is {toggles.world_size} but {started} process(es) were started (WORLD_SIZE); set "
            f"toggles.world_size={started}, or start it with "
            f"python -m torch.distributed.run --standalone --nproc-per-node {toggles.processes} -m ...; "
            "or unset WORLD_SIZE and RANK, if an earlier job left them"
        )
    if toggles.processes == 1:
        yield 0
        return
    bound = device.torch_device if device.ddp_device_ids else None
    try:
        torch.distributed.init_process_group(device.ddp_backend, device_id=bound)
    except ValueError as error:  # of a launcher's variables, some of which are not set
        raise RanksError(
            f"{started} processes were started by WORLD_SIZE, but they cannot meet ({error}); start them by "
            "python -m torch.distributed.run, or unset WORLD_SIZE, if an earlier job left it"
        ) from None
    except RuntimeError as error:
        if not (limit := limit_met(error)):
            raise
        raise RanksError(f"the ranks cannot meet: {limit}") from None
    yield torch.distributed.get_rank()
    # Not after an error, when other ranks may be waiting in a collective. DDP's reference cycles hold on to
    # the group, whose threads are joined only when it is freed; one left over aborts the process at its exit.
    gc.collect()
    torch.distributed.destroy_process_group()


def replicate(model: torch.nn.Module, device: Device, *, static_graph: bool) -> torch.nn.Module:
    """Wrap the model in DistributedDataParallel, which averages gradients over the ranks."""
    with warnings.catch_warnings():
        # torch 2.13 renames broadcast_buffers to a name that 2.9 to 2.12 do not know.
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        return torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=device.ddp_device_ids,
            gradient_as_bucket_view=True,  # see keeps_gradients()
            broadcast_buffers=False,  # the buffers are masks, equal on every rank
            static_graph=static_graph,
        )


def shard(model: GPT2, device: Device, world_size: int, *, keep_weights: bool) -> torch.nn.Module:
    """Shard every tensor's rows over the ranks in place, with torch's fully_shard, gathering block by block.

    keep_weights: keep gathered weights from the forward to the backward pass instead of gathering them twice.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.torch_device.type, (world_size,))
    for part in (*model.h, model):  # the root last: it takes the parameters outside all blocks
        sharded = fully_shard(part, mesh=mesh, reshard_after_forward=not keep_weights)
        # In some versions of torch, gloo silently sums where it should average (pytorch issue 162338).
        sharded.set_force_sum_reduction_for_comms(device.ddp_backend == "gloo")
    return model


def release(model: Any) -> None:
    """Free gathered weights after a forward pass that no backward pass follows."""
    for module in model.modules():
        if hasattr(module, "reshard"):  # as fully_shard makes it
            module.reshard()


def sharded_adamw(groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """Return an AdamW that keeps the state of this rank's tensors, and broadcasts their weights."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    # One buffer per rank is broadcast as a whole, instead of each weight separately.
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=True, **options)


def gradient_sync(model: Any, *, last: bool) -> AbstractContextManager[None]:
    """Return the context of a micro-step, of which only a step's last one exchanges gradients."""
    if hasattr(model, "set_requires_gradient_sync"):  # as fully_shard makes it
        model.set_requires_gradient_sync(last)
    elif hasattr(model, "no_sync") and not last:  # DistributedDataParallel
        return model.no_sync()
    return contextlib.nullcontext()


def keeps_gradients(model: Any) -> bool:
    """Return whether gradients must be zeroed in place after a step, as under DistributedDataParallel.

    There they are views of the communication buffers. If they were freed, the next backward pass would
    allocate a second set, which would have to be copied into those buffers.
    """
    return hasattr(model, "no_sync")


def full_tensor(tensor: Any) -> Tensor:
    """Return the full tensor on every rank; where it is sharded, all ranks must call this together."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def is_shard(tensor: Tensor) -> bool:
    """Return whether this is a DTensor, sharded over ranks; tested without importing DTensor."""
    return hasattr(tensor, "full_tensor")


def fill(tensor: Any, rows: Tensor) -> None:
    """Copy `rows`, whole on every rank, into a sharded tensor's first rows; all ranks call this."""
    from torch.distributed.tensor import distribute_tensor

    full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=rows.device)
    full[: rows.size(0)].copy_(rows)
    tensor.copy_(distribute_tensor(full, tensor.device_mesh, tensor.placements))


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def mean(values: Tensor, processes: int) -> Tensor:
    """Return the element-wise mean over all ranks, on every rank; overwrites `values` with the sum."""
    if processes > 1:
        torch.distributed.all_reduce(values)
    return values / processes


def gather(mine: T, processes: int) -> list[T]:
    """Return one value from each rank, on every rank; all ranks must call this together."""
    if processes == 1:
        return [mine]
    everyone: list[Any] = [None] * processes
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def ranks_agree(model: torch.nn.Module, processes: int) -> bool:
    """Return whether all ranks have bit-identical weights, by comparing fingerprints."""
    return len(set(gather(fingerprint(model), processes))) == 1


def fingerprint(model: torch.nn.Module) -> str:
    """Return a sha256 of all weights and masks; where weights are sharded, all ranks call this."""
    digest = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        whole_here = full_tensor(tensor.detach()).cpu().contiguous()
        digest.update(whole_here.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

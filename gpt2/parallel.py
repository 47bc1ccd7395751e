"""Ranks that train together: how they find each other, and what they tell each other."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from gpt2.device import Device
from gpt2.toggles import Toggles


def nodes() -> int:
    """Machines that the ranks are spread over, evenly."""
    return int(os.environ.get("GROUP_WORLD_SIZE", 1))


@contextlib.contextmanager
def process_group(toggles: Toggles, device: Device) -> Iterator[int]:
    """Join the ranks that train together; gives this process's rank.

    Raises RuntimeError where the process was not started once per rank, as torchrun does.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started != toggles.world_size:
        raise RuntimeError(
            f"world_size is {toggles.world_size} but {started} process(es) were started; start it with "
            f"python -m torch.distributed.run --standalone --nproc-per-node {toggles.world_size} -m ..."
        )
    if toggles.world_size == 1:
        yield 0
        return
    bound = device.torch_device if device.ddp_device_ids else None
    torch.distributed.init_process_group(device.ddp_backend, device_id=bound)
    yield torch.distributed.get_rank()
    # Not after an error, when other ranks may be waiting in a collective. DDP's reference cycles hold on to
    # the group, whose threads are joined only when it is freed; a thread left over aborts the process at its exit.
    gc.collect()
    torch.distributed.destroy_process_group()

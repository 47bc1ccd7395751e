"""Proofs of toggles that a process has from its start: device, ranks, memory, threads."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import torch

from gpt2.hardware.host import ALLOCATORS, huge_pages, usable_cores
from gpt2.proofs.evidence import Finding, StepEvidence, counted
from gpt2.training.distributed import is_shard
from gpt2.training.stages import threads as wanted_threads


def device(step: StepEvidence) -> Finding:
    parameters = list(step.training.model.parameters())
    there = sum(parameter.device.type == step.toggles.device for parameter in parameters)
    kernels = sum(op.on_device for op in step.ops)
    ran = f"; {kernels:,} kernels ran there" if kernels else ""
    backend = step.training.device.versions().get("xla_backend")
    where = f"there, by XLA's backend for {backend}" if backend else "there"
    evidence = f"{there} of {len(parameters)} tensors of weights lie {where}{ran}"
    return Finding(there == len(parameters), evidence)


def world_size(step: StepEvidence) -> Finding:
    if step.toggles.processes < step.toggles.world_size:
        assert step.training.micro_batch is not None
        devices = step.training.device.spread(step.training.micro_batch[0])
        launched = step.training.device.launches()
        together = launched is not None and 0 < launched.together == launched.programs
        ran = "all programs ran on all of them" if together else "not all programs ran on all of them"
        right = devices == step.toggles.world_size and together
        return Finding(right, f"the rows of a batch lie on {counted(devices, 'device')}; {ran}")
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if together else 1
    name = "reduce-scatter" if step.toggles.shards_gradients else "all-reduce"
    exchanges = step.exchanges("reduce_scatter" if step.toggles.shards_gradients else "allreduce")
    right = ranks == step.toggles.world_size and (ranks > 1) == (exchanges > 0)
    return Finding(right, f"{counted(ranks, 'rank')}, {counted(exchanges, name)} seen in the step")


def sharding(step: StepEvidence) -> Finding:
    parameters = list(step.training.model.parameters())
    kept, elements = step.optimizer_elements, sum(parameter.numel() for parameter in parameters)
    spread = sum(map(is_shard, parameters))
    gathers, scatters = step.exchanges("gather"), step.exchanges("reduce_scatter")
    ran = f"this rank holds {kept / elements:.0%} of the optimiser's state"
    if step.toggles.shards_gradients:
        # One gather per block and one for the rest; fsdp2 gathers again for the backward pass.
        forward = (step.training.model.config.n_layer + 1) * step.toggles.grad_accum_steps
        ran += (
            f" and its rows of {spread} of {len(parameters)} tensors of weights; "
            f"{counted(gathers, 'all-gather')} for {forward} in the forward passes, "
            f"{counted(scatters, 'reduce-scatter')}"
        )
        wanted = forward * (2 if step.toggles.sharding == "fsdp2" else 1)
        right = spread == len(parameters) and gathers == wanted
        return Finding(right and kept < elements and scatters > 0, ran)
    if step.toggles.sharding == "zero1":
        broadcasts = step.exchanges("broadcast")
        ran += f"; {counted(broadcasts, 'broadcast')} of weights"
        return Finding(kept < elements and broadcasts > 0, ran)
    return Finding(kept == elements and not spread, f"{ran} and whole weights")


def loaded_libraries() -> str:
    """Return the memory map of this process as text; empty where the system does not provide it."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text(errors="backslashreplace")
    return ""


def allocator(step: StepEvidence) -> Finding:
    if segments := step.training.device.segments():
        evidence = f"{segments[0]} of {counted(segments[1], 'segment')} of memory can grow"
        return Finding((segments[0] > 0) == (step.toggles.allocator == "expandable"), evidence)
    mapped = loaded_libraries()
    loaded = [name for name, library in ALLOCATORS.items() if f"lib{library}" in mapped]
    before, size = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 2**27
    torch.empty(size, dtype=torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    pages = size // resource.getpagesize()
    evidence = f"{', '.join(loaded) or 'the C library'}; a tensor of {pages} pages took {faults} page faults"
    wanted = step.toggles.allocator
    if wanted == "thp":
        if huge_pages() == "always":
            return Finding(False, "the system gives huge pages to everybody, asked for or not")
        return Finding(not loaded and faults < pages // 8, evidence)
    return Finding(loaded == ([wanted] if wanted in ALLOCATORS else []), evidence)


def affinity(step: StepEvidence) -> Finding:
    places: set[int] = set()  # logical processors that a thread of this process does not leave
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread may have ended
            allowed = os.sched_getaffinity(int(thread.name))
            places |= allowed if len(allowed) == 1 else set()
    count = torch.get_num_threads()
    there = f"{counted(len(places), 'core')} with a thread that stays there"
    evidence = f"{there}, for {counted(count, 'thread')}"
    pinned = len(places) >= count
    return Finding(pinned == (step.toggles.affinity == "pinned") or usable_cores() == 1, evidence)


def threads(step: StepEvidence) -> Finding:
    count = torch.get_num_threads()
    return Finding(count == wanted_threads(step.toggles), f"torch computes with {counted(count, 'thread')}")

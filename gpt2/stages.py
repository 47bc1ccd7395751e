"""The stages that apply the toggles, in the order they wrap:

    environment -> configure_process -> model_config -> wrap_model -> make_optimizer -> precision

Importing this module loads no torch, so that a process can be prepared before it does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpt2.hardware.host import PLACES, allocator_library, one_cpu_per_core, other_folder, usable_cores
from gpt2.toggles import Toggles
from gpt2.workload import GPT2Config, Workload

if TYPE_CHECKING:
    import torch

    from gpt2.device import Device
    from gpt2.model import GPT2


def threads(toggles: Toggles, nodes: int = 1) -> int:
    """CPU threads of one rank; unless given, the usable cores shared by the ranks here.

    nodes: machines that the ranks are spread over, for who starts them; a rank knows from its torchrun.
    """
    if toggles.threads != "default":
        return toggles.threads
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", toggles.processes // nodes))
    return max(1, usable_cores() // ranks_here)


def unheeded_threads(toggles: Toggles, nodes: int = 1) -> str | None:
    """OMP_NUM_THREADS where that asks for other threads than a rank is given; None where it does not."""
    asked = os.environ.get("OMP_NUM_THREADS", "").strip()
    given = toggles.threads != "default" or asked in ("", str(threads(toggles, nodes)))
    return None if given else asked


def environment(toggles: Toggles, nodes: int = 1) -> dict[str, str]:
    """Variables that a training process must have before its interpreter starts. nodes: as for threads()."""
    # Said explicitly because torchrun would otherwise set one thread per rank.
    count = str(threads(toggles, nodes))
    # CUDA would number the GPUs of a mixed machine by speed, and the driver, whose counters are read, by their place.
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    variables |= _allocator(toggles.allocator)
    if toggles.affinity == "pinned":
        variables |= {"OMP_PROC_BIND": "true", PLACES: ",".join(f"{{{cpu}}}" for cpu in one_cpu_per_core())}
    if toggles.compile != "eager" and (folder := other_folder()):
        variables["TMPDIR"] = str(folder)
    if toggles.processes < toggles.world_size:
        variables["CPU_NUM_DEVICES"] = str(toggles.world_size)  # of XLA's CPU backend; others have what they have
    return variables


CUDA_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def _allocator(name: str) -> dict[str, str]:
    if name == "thp":
        return {"THP_MEM_ALLOC_ENABLE": "1"}  # which torch reads, for blocks of 2 MiB and more
    if name == "expandable":
        # torch reads one of the two only; and what this function set before, it must not set once more.
        given = os.environ.get(CUDA_ALLOCATOR) or os.environ.get("PYTORCH_ALLOC_CONF", "")
        others = [each for each in given.split(",") if each and not each.startswith("expandable_segments:")]
        return {CUDA_ALLOCATOR: ",".join([*others, "expandable_segments:True"])}
    if not (library := allocator_library(name)):
        return {}
    others = [each for each in os.environ.get("LD_PRELOAD", "").split(":") if each and each != library]
    variables = {"LD_PRELOAD": ":".join([library, *others])}
    if name == "jemalloc":  # by default it gives memory back within ten seconds, and takes no huge pages
        variables["MALLOC_CONF"] = "thp:always,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
    return variables


def configure_process(toggles: Toggles, device: Device) -> None:
    """Set what torch keeps per process: threads, float32 products, attention kernels."""
    import torch

    torch.set_num_threads(threads(toggles))
    device.set_matmul_precision(toggles.matmul_precision)
    kernels = {
        "flash": torch.backends.cuda.enable_flash_sdp,  # these flags choose the CPU's kernel too
        "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
        "cudnn": torch.backends.cuda.enable_cudnn_sdp,
        "math": torch.backends.cuda.enable_math_sdp,
    }
    kernel = "flash" if toggles.attention == "flash3" else toggles.attention
    for name, enable in kernels.items():
        enable(name == kernel or kernel not in kernels)
    if toggles.attention == "flash3":
        torch.nn.attention.activate_flash_attention_impl("FA3")
    elif getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)():
        torch.nn.attention.restore_flash_attention_impl()


def model_config(toggles: Toggles, config: GPT2Config) -> GPT2Config:
    """The model's shape with the choices that are made inside it."""
    return replace(
        config,
        padded_vocab_size=toggles.padded(config.vocab_size),
        attention=toggles.attention if toggles.attention in ("explicit", "blocks", "brgemm", "flex") else "sdpa",
        recompute=toggles.recompute,
        cross_entropy=toggles.cross_entropy,
        tied_gradient=toggles.tied_gradient,
        gelu=toggles.gelu,
        products=toggles.products,
        residual=toggles.residual,
    )


def compile_options(value: str) -> dict[str, Any]:
    """What torch.compile takes for a value of the toggle `compile`, eager excepted.

    torch's max-autotune modes bring coordinate descent along, which is a lever of its own; and torch takes a mode or
    options, not both.
    """
    if value == "coordinate-descent":
        return {"options": {COORDINATE_DESCENT: True}}
    if not value.startswith("max-autotune"):
        return {"mode": value}
    from torch._inductor import list_mode_options

    return {"options": {**list_mode_options(value), COORDINATE_DESCENT: False}}


COORDINATE_DESCENT = "coordinate_descent_tuning"
"""Inductor's name for tuning each Triton kernel's settings one after another."""


def wrap_model(toggles: Toggles, model: GPT2, device: Device) -> torch.nn.Module:
    """Narrow and compile the model, then make it one of several replicas, or spread it over the ranks."""
    import torch

    from gpt2 import native, parallel
    from gpt2.float8 import to_float8

    if toggles.attention == "brgemm":
        native.library()  # now, so that a compiler's trouble is told before a run writes anything
    if toggles.weights != "float32":
        model.narrow(getattr(torch, toggles.weights))
    if toggles.float8 != "none":
        to_float8(model, toggles.float8)
    if toggles.compile != "eager":
        options = compile_options(toggles.compile)
        # What gathers the shards of a block runs before and after it, never within compiled code.
        by_block = toggles.compile_region == "block" or toggles.shards_gradients
        for part in model.h if by_block else [model]:
            part.compile(**options)  # in place: names stay; blocks share what is compiled for the first
        if by_block and not toggles.shards_gradients:
            for name in ("embed", "loss"):
                setattr(model, name, torch.compile(getattr(model, name), **options))
    if toggles.processes == 1:
        return model
    if toggles.shards_gradients:
        return parallel.shard(model, device, toggles.world_size, keep_weights=toggles.sharding == "zero2")
    # A graph that may not change exchanges gradients in the best order, but cannot leave the exchange out of a step.
    return parallel.replicate(model, device, static_graph=toggles.grad_accum_steps == 1)


def make_optimizer(toggles: Toggles, workload: Workload, model: GPT2) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices and embeddings, not on biases and LayerNorms."""
    import torch

    from gpt2 import parallel
    from gpt2.optimizer import CompiledAdamW

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": workload.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": workload.lr, "betas": (workload.beta1, workload.beta2), "eps": workload.eps}
    if toggles.adamw == "compiled":
        copies = model.keep_copies(getattr(torch, toggles.autocast)) if toggles.weight_casts == "optimizer" else {}
        return CompiledAdamW(groups, **options, copies=copies)
    make = parallel.sharded_adamw if toggles.sharding == "zero1" else torch.optim.AdamW
    return make(groups, **options, foreach=toggles.adamw == "foreach", fused=toggles.adamw == "fused")


def precision(
    toggles: Toggles, device: Device
) -> tuple[Callable[[], AbstractContextManager[Any]], torch.amp.GradScaler]:
    """What to enter around each forward pass, and the gradient scaler, which does nothing except for float16."""
    import torch

    dtype = getattr(torch, toggles.autocast)
    # torch's own first scale, 2**16, may overflow on GPT-2's first gradients, and cost its first step.
    enabled = toggles.autocast == "float16"
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**13, enabled=enabled)
    if dtype == torch.float32:
        return contextlib.nullcontext, scaler
    return lambda: torch.autocast(device.torch_device.type, dtype=dtype), scaler


def resolved(toggles: Toggles, workload: Workload) -> dict[str, int]:
    """What values that depend on the machine or the model come to here."""
    return {
        "threads": threads(toggles),
        "padded_vocab_size": toggles.padded(workload.config.vocab_size),
    }

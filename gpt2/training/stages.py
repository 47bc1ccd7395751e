"""The stages that apply the toggles, in order:

environment -> configure_process -> model_config -> wrap_model -> make_optimizer -> precision -> step_graph

Importing this module loads no torch, so that a process's environment can be set before torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from gpt2.config.toggles import Toggles
from gpt2.config.workload import GPT2Config, Workload
from gpt2.hardware.host import (
    PLACES,
    allocator_library,
    one_cpu_per_core,
    replacement_temp_folder,
    usable_cores,
)

if TYPE_CHECKING:
    import torch

    from gpt2.device import Device
    from gpt2.model.model import GPT2
    from gpt2.training.step_graph import Compute, StepGraph


def threads(toggles: Toggles, nodes: int = 1) -> int:
    """Return a rank's CPU threads: the toggle's, or the usable cores divided by this machine's ranks.

    nodes: machines that the ranks are spread over, for a launcher; a rank reads LOCAL_WORLD_SIZE, which
    torchrun sets.
    """
    if toggles.threads != "default":
        return toggles.threads
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", toggles.processes // nodes))
    return max(1, usable_cores() // ranks_here)


def unheeded_threads(toggles: Toggles, nodes: int = 1) -> str | None:
    """Return the value of OMP_NUM_THREADS where it differs from the number of threads used; else None."""
    asked = os.environ.get("OMP_NUM_THREADS", "").strip()
    given = toggles.threads != "default" or asked in ("", str(threads(toggles, nodes)))
    return None if given else asked


def environment(toggles: Toggles, nodes: int = 1) -> dict[str, str]:
    """Return variables that must be set before a training process starts. nodes: see threads()."""
    # Set explicitly, because torchrun would otherwise set one thread per rank.
    count = str(threads(toggles, nodes))
    # CUDA would number unlike GPUs by speed, but the driver, whose counters are read, numbers them by bus id.
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    variables |= _allocator(toggles.allocator)
    if toggles.affinity == "pinned":
        variables |= {"OMP_PROC_BIND": "true", PLACES: ",".join(f"{{{cpu}}}" for cpu in one_cpu_per_core())}
    if toggles.compile != "eager" and (folder := replacement_temp_folder()):
        variables["TMPDIR"] = str(folder)
    if toggles.processes < toggles.world_size:
        variables["CPU_NUM_DEVICES"] = str(toggles.world_size)  # for XLA's CPU backend only
    return variables


CUDA_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def _allocator(name: str) -> dict[str, str]:
    if name == "thp":
        return {"THP_MEM_ALLOC_ENABLE": "1"}  # read by torch, for blocks of 2 MiB and more
    if name == "expandable":
        # torch reads one of the two variables; a value that this function set before is not added again.
        given = os.environ.get(CUDA_ALLOCATOR) or os.environ.get("PYTORCH_ALLOC_CONF", "")
        others = [each for each in given.split(",") if each and not each.startswith("expandable_segments:")]
        return {CUDA_ALLOCATOR: ",".join([*others, "expandable_segments:True"])}
    if not (library := allocator_library(name)):
        return {}
    others = [each for each in os.environ.get("LD_PRELOAD", "").split(":") if each and each != library]
    variables = {"LD_PRELOAD": ":".join([library, *others])}
    if name == "jemalloc":  # by default it returns memory within ten seconds and uses no huge pages
        variables["MALLOC_CONF"] = "thp:always,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"
    return variables


def configure_process(toggles: Toggles, device: Device) -> None:
    """Set torch's per-process state: threads, precision of float32 matmuls, attention kernels."""
    import torch

    torch.set_num_threads(threads(toggles))
    device.set_matmul_precision(toggles.matmul_precision)
    kernels = {
        "flash": torch.backends.cuda.enable_flash_sdp,  # these flags select the CPU's kernel too
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
    """Return the model's config with the toggles that are applied inside it, its fields of the same names."""
    inside = {each.name for each in fields(config)} & {each.name for each in fields(toggles)}
    values = {name: getattr(toggles, name) for name in inside}
    if toggles.attention not in MODEL_ATTENTION:
        values["attention"] = "sdpa"
    return replace(config, padded_vocab_size=toggles.padded(config.vocab_size), **values)


MODEL_ATTENTION = ("explicit", "blocks", "brgemm", "flash4", "flex")
"""The model's own attentions; others are kernels of scaled_dot_product_attention, set in torch."""


def compile_options(toggles: Toggles) -> dict[str, Any]:
    """Return Inductor's options for the toggles compile, other than eager, and reductions.

    torch's max-autotune modes include coordinate descent, which is a separate value here.
    """
    from torch._inductor import list_mode_options

    value = toggles.compile
    if value.split("+")[0] in TUNED:
        options = {name: setting for part in value.split("+") for name, setting in TUNED[part].items()}
    else:
        options = dict(list_mode_options(value))
    if value.startswith("max-autotune"):
        options[COORDINATE_DESCENT] = False
    if toggles.reductions == "apart":
        options[MIXED_REDUCTIONS] = False
    return options


COORDINATE_DESCENT = "coordinate_descent_tuning"
"""Inductor's option that tunes each Triton kernel's settings one after another."""
MIXED_REDUCTIONS = "triton.mix_order_reduction"
"""Inductor's option, from torch 2.10 on, that sums over rows and over columns in one kernel."""
TUNED: dict[str, dict[str, Any]] = {
    # Matmuls whose sums are at least 8 times as long as their results are wide are tried in parts, too.
    "gemm": {"max_autotune_gemm": True, "triton.decompose_k_threshold": 8},
    "coordinate-descent": {COORDINATE_DESCENT: True},
}
"""Values of `compile` that are options of Inductor and no mode of torch.compile; + joins them."""


def wrap_model(toggles: Toggles, model: GPT2, device: Device) -> torch.nn.Module:
    """Narrow, convert to float8 and compile the model, then replicate it or shard it over the ranks."""
    import torch

    from gpt2.model import brgemm
    from gpt2.model.kernel_libraries import to_float8
    from gpt2.training import distributed

    if toggles.attention == "brgemm":
        brgemm.library()  # now, so that a failure to compile shows before the run writes anything
    if toggles.weights != "float32":
        model.narrow(getattr(torch, toggles.weights))
    if toggles.float8 != "none":
        to_float8(model, toggles.float8)
    if toggles.compile != "eager":
        options = compile_options(toggles)
        _cache_own_functions()
        # Hooks gather and free a block's shards before and after it, outside compiled code.
        by_block = toggles.compile_region == "block" or toggles.shards_gradients
        for part in model.h if by_block else [model]:
            part.compile(options=options)  # in place, so names stay; blocks share the first one's code
        if by_block and not toggles.shards_gradients:
            for name in ("embed", "loss"):
                setattr(model, name, torch.compile(getattr(model, name), options=options))
    if toggles.processes == 1:
        return model
    if toggles.shards_gradients:
        return distributed.shard(model, device, toggles.world_size, keep_weights=toggles.sharding == "zero2")
    # With a static graph DDP orders its buckets best, but cannot skip an exchange, as accumulation needs.
    return distributed.replicate(model, device, static_graph=toggles.grad_accum_steps == 1)


def _cache_own_functions() -> None:
    """Let torch's cache keep graphs that hold our autograd functions, too, which torch does not by default.

    It finds its entries by the traced graph, in which the functions' forward and backward passes are.
    """
    import torch._functorch.config as config

    with contextlib.suppress(AttributeError):  # other versions of torch may not have it
        config.autograd_cache_allow_custom_autograd_functions = True


def make_optimizer(toggles: Toggles, workload: Workload, model: GPT2) -> torch.optim.Optimizer:
    """Make AdamW with weight decay on matrices and embeddings, but not on biases and LayerNorms."""
    import torch

    from gpt2.training import distributed
    from gpt2.training.optimizer import CompiledAdamW

    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": workload.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (workload.beta1, workload.beta2)
    options: dict[str, Any] = {"lr": workload.lr, "betas": betas, "eps": workload.eps}
    if toggles.adamw == "compiled":
        dtype, cast = getattr(torch, toggles.autocast), toggles.weight_casts == "optimizer"
        copies = model.keep_copies(dtype) if cast else {}
        return CompiledAdamW(groups, **options, copies=copies)
    if toggles.launch == "graph":  # a recorded step finds the learning rate in memory
        options |= {"lr": torch.tensor(workload.lr, device=parameters[0].device), "capturable": True}
    make = distributed.sharded_adamw if toggles.sharding == "zero1" else torch.optim.AdamW
    return make(groups, **options, foreach=toggles.adamw == "foreach", fused=toggles.adamw == "fused")


def precision(
    toggles: Toggles, device: Device
) -> tuple[Callable[[], AbstractContextManager[Any]], torch.amp.GradScaler]:
    """Return each forward pass's context, and the gradient scaler, enabled only for float16."""
    import torch

    dtype = getattr(torch, toggles.autocast)
    # torch's initial scale, 2**16, may overflow on GPT-2's first gradients, which would skip the first step.
    enabled = toggles.autocast == "float16"
    scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**13, enabled=enabled)
    if dtype == torch.float32:
        return contextlib.nullcontext, scaler
    return lambda: torch.autocast(device.torch_device.type, dtype=dtype), scaler


def step_graph(toggles: Toggles, device: Device, compute: Compute) -> StepGraph | None:
    """Return what takes steps by a recording of `compute`; None where the host launches each op."""
    if toggles.launch == "ops":
        return None
    from gpt2.training.step_graph import StepGraph

    return StepGraph(compute, device.torch_device)


def resolved(toggles: Toggles, workload: Workload) -> dict[str, int]:
    """Return the values that toggles come to on this machine and model."""
    return {
        "threads": threads(toggles),
        "padded_vocab_size": toggles.padded(workload.config.vocab_size),
    }

"""The stages that apply the toggles, in the order they wrap:

    environment -> configure_process -> model_config -> wrap_model -> make_optimizer -> precision

Importing this module loads no torch, so that a process can be prepared before it does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from gpt2.toggles import Toggles
from gpt2.workload import GPT2Config, Workload

if TYPE_CHECKING:
    import torch

    from gpt2.device import Device
    from gpt2.model import GPT2


def usable_cores() -> int:
    """Physical cores that this process may use."""
    places = os.environ.get(PLACES, "")
    if re.fullmatch(r"\{\d+\}(,\{\d+\})*", places):  # then the system tells only where the first thread stays
        return places.count("{")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


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


PLACES = "OMP_PLACES"
"""Where OpenMP's threads stay: {0},{1} are the first two logical processors, each a place of its own."""


def one_cpu_per_core() -> list[int]:
    """The first logical processor of each physical core that this process may use."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        first.setdefault(core, cpu)
    return list(first.values())


ALLOCATORS = {"tcmalloc": "tcmalloc_minimal", "jemalloc": "jemalloc"}
"""The libraries' names for the linker."""
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
"""That install them on Debian and Ubuntu."""
CUDA_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def missing_allocator(name: str) -> str | None:
    """Why memory cannot come from there here; None where it can."""
    library = ALLOCATORS.get(name)
    if library and sys.platform != "linux":
        return "it is put under torch by LD_PRELOAD, which is Linux's; choose system"
    if library and not find_library(library):
        return f"there is no lib{library} here; apt-get install {PACKAGES[name]}, or choose thp"
    return None


def huge_pages(root: Path = Path("/")) -> str | None:
    """Who is given huge pages: always, madvise (who asks) or never; None where the system does not tell."""
    with contextlib.suppress(OSError):
        told = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return told.partition("[")[2].partition("]")[0] or None
    return None


def plain_folder() -> Path | None:
    """The folder for temporary files; another of the system's where torch.compile cannot compile in that one.

    None where there is no other.
    """
    usual = Path(tempfile.gettempdir())
    if not SPLITS_WORDS.search(str(usual)):
        return usual
    others = [Path("/tmp"), Path("/var/tmp")]
    return next((each for each in others if each.is_dir() and os.access(each, os.W_OK | os.X_OK)), None)


def other_folder() -> Path | None:
    """The folder that plain_folder() has in place of the usual one; None where it has that one, or none."""
    folder = plain_folder()
    return None if folder == Path(tempfile.gettempdir()) else folder


SPLITS_WORDS = re.compile(r"[\s'\"\\]")
"""What torch.compile's command lines cannot hold in a path: it does not quote all of them."""


def missing_cxx() -> str | None:
    """Why nothing can be compiled for this CPU, by $CXX or the system's compiler; None where it can."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name):
        return None
    if os.environ.get("CXX"):
        return f"CXX is {name!r}, and there is no such program; set it to a C++ compiler, without options"
    return f"there is no C++ compiler {name} here; apt-get install g++ (on macOS xcode-select --install), or set CXX"


def missing_compiler() -> str | None:
    """Why torch.compile can make no code for this CPU, which Python's C interface calls; None where it can."""
    if missing := missing_cxx():
        return missing
    if plain_folder() is None:
        where = tempfile.gettempdir()
        return f"torch.compile cannot compile in {where!r}; set TMPDIR to a folder without blanks or quotes"
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin and SPLITS_WORDS.search(torch.origin):
        return f"torch.compile cannot compile with {torch.origin!r}; install into a folder without blanks or quotes"
    headers = Path(sysconfig.get_path("include"))
    framework = Path(sysconfig.get_path("stdlib")).parent.parent / "Headers"  # of macOS's own Pythons
    if not any((folder / "Python.h").exists() for folder in (headers, framework)):
        return f"Python's headers are not in {headers}; apt-get install python3-dev, or take a Python that has them"
    return None


def _allocator(name: str) -> dict[str, str]:
    if name == "thp":
        return {"THP_MEM_ALLOC_ENABLE": "1"}  # which torch reads, for blocks of 2 MiB and more
    if name == "expandable":
        # torch reads one of the two only; and what this function set before, it must not set once more.
        given = os.environ.get(CUDA_ALLOCATOR) or os.environ.get("PYTORCH_ALLOC_CONF", "")
        others = [each for each in given.split(",") if each and not each.startswith("expandable_segments:")]
        return {CUDA_ALLOCATOR: ",".join([*others, "expandable_segments:True"])}
    if name not in ALLOCATORS or not (library := find_library(ALLOCATORS[name])):
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

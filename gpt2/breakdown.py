"""On what kinds of work a training step spends its time, as torch's profiler saw it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpt2.ops import FIRST_FACTOR, Recorded, attention_kernel_kind, is_matmul_kernel, on_accelerator

KINDS: tuple[str, ...] = ("products", "attention", "compiled", "optimizer", "copies", "exchange", "other", "rest")
"""Matrix products; attention; kernels that torch.compile generated; AdamW's step; casts and copies; between ranks; any
other operation; and what no operation was at work in: Python, launches, waiting."""

HOST_KINDS = {
    "attention": r"(aten|gpt2)::.*attention|aten::baddbmm|aten::bmm",
    "compiled": r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction|graph_\d+_",
    "copies": r"aten::(copy_|_to_copy|to|clone|contiguous)$",
    "exchange": r"c10d::|gloo:",
}
"""What an operation's name begins with, if it is no product of a linear layer."""
DEVICE_KINDS = {
    "exchange": r"nccl",
    "optimizer": r"adam",
    "compiled": r"triton_",
    "copies": r"mem(cpy|set)",
}
"""What a kernel's name holds, if it is neither attention nor a product."""


STEP = "Optimizer.step"
"""As what torch announces the step of any optimiser."""


def breakdown(recorded: Recorded) -> dict[str, float]:
    """Seconds by kind of work, adding up to the step's, or to more where some of it ran beside other.

    Kinds that took no time are left out. On an accelerator what counts is its kernels' time, and those that ran in the
    span of the optimiser's step are the optimiser's. On a CPU it is each operation's own time, without that of
    operations within it. Batched products count as attention on a CPU, where nothing else has them; an accelerator's
    product kernels do not tell.
    """
    kernels = list(filter(on_accelerator, recorded.events))
    seconds = _of_kernels(kernels, recorded.annotations) if kernels else _of_operations(recorded.events)
    seconds["rest"] = max(0.0, recorded.seconds - sum(seconds.values()))
    return {kind: seconds[kind] for kind in KINDS if seconds.get(kind)}


def _of_kernels(kernels: Sequence[Any], annotations: Sequence[Any]) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)
    steps = [(span.start_ns(), span.end_ns()) for span in annotations if span.name().startswith(STEP)]
    for event in kernels:
        of_step = any(start <= event.start_ns() < end for start, end in steps)
        seconds["optimizer" if of_step else _kernel_kind(event.name())] += event.duration_ns() / 1e9
    return seconds


def _kernel_kind(name: str) -> str:
    if attention_kernel_kind(name) or "flex_attention" in name:
        return "attention"
    if is_matmul_kernel(name):
        return "products"
    return next((kind for kind, pattern in DEVICE_KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def _of_operations(events: Sequence[Any]) -> dict[str, float]:
    """events: in the order in which they began, the outer one first."""
    seconds = dict.fromkeys(KINDS, 0.0)
    stacks: dict[
        int, list[tuple[Any, str, bool]]
    ] = {}  # per thread: event, its kind, whether what is within it counts
    for event in events:
        stack = stacks.setdefault(event.start_thread_id(), [])
        while stack and stack[-1][0].end_ns() <= event.start_ns():
            stack.pop()
        name, within = event.name(), stack[-1] if stack else None
        if within and not within[2]:
            stack.append((event, within[1], False))
            continue
        optimizer = name.startswith(STEP) or (within is not None and within[1] == "optimizer")
        kind = "optimizer" if optimizer else _operation_kind(name)
        seconds[kind] += event.duration_ns() / 1e9
        if within:
            seconds[within[1]] -= event.duration_ns() / 1e9
        stack.append((event, kind, not name.startswith("gpt2::")))
    return seconds


def _operation_kind(name: str) -> str:
    if name in FIRST_FACTOR and name not in ("aten::bmm", "aten::baddbmm"):
        return "products"
    return next((kind for kind, pattern in HOST_KINDS.items() if re.match(pattern, name)), "other")

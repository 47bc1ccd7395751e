"""Split the time of a training step by kind of work, from a torch profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gpt2.proofs.profiler import (
    FIRST_FACTOR,
    Recorded,
    attention_kernel_kind,
    is_matmul_kernel,
    on_accelerator,
)

KINDS: tuple[str, ...] = (
    "products", "attention", "compiled", "optimizer", "copies", "exchange", "other", "rest",
)  # fmt: skip
"""Kinds of work; compiled: kernels of torch.compile and ours in Triton; rest: no operation ran."""

HOST_KINDS = {
    "attention": r"(aten|gpt2)::.*attention|aten::baddbmm|aten::bmm",
    "compiled": r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction|graph_\d+_",
    "copies": r"aten::(copy_|_to_copy|to|clone|contiguous)$",
    "exchange": r"c10d::|gloo:",
}
"""Patterns for the start of a host operation's name, if it is not a linear layer's matmul."""
DEVICE_KINDS = {
    "exchange": r"nccl",
    "optimizer": r"adam",
    "compiled": r"triton_|^(cross_entropy|gelu_backward|join_gradients)$",
    "copies": r"mem(cpy|set)",
}
"""Patterns searched for in a kernel's name, if it is neither attention nor a matmul."""


STEP = "Optimizer.step"
"""Prefix of the name under which torch records every optimiser's step."""


def breakdown(recorded: Recorded) -> dict[str, float]:
    """Return the seconds of a step by kind of work.

    They add up to the step's seconds, or to more where work overlapped. Kinds that took no time are left out.
    On an accelerator, kernel time counts, and kernels within the span of the optimiser's step belong to the
    optimiser. On a CPU, each operation's own time counts, without that of operations nested in it. Batched
    matmuls count as attention on a CPU, where nothing else uses them; an accelerator's matmul kernels cannot
    be told apart.
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
    kinds = (kind for kind, pattern in DEVICE_KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(kinds, "other")


def _of_operations(events: Sequence[Any]) -> dict[str, float]:
    """Return the self time of host operations by kind, in seconds.

    events: in order of their start, an enclosing one before those within it.
    """
    seconds = dict.fromkeys(KINDS, 0.0)
    # Per thread: event, its kind, whether events nested in it count separately.
    stacks: dict[int, list[tuple[Any, str, bool]]] = {}
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

"""What ran in one training step: its ops under torch's profiler, and how to read matrix products out of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpt2.device import Device


@dataclass(frozen=True)
class Op:
    """One op as the profiler saw it, or with on_device one kernel of an accelerator, which has no dtypes or shapes."""

    name: str
    dtypes: list[str]
    """Of each argument, in the profiler's words: float, c10::BFloat16, long int, Scalar, ..."""
    shapes: list[list[int]]
    """Of each argument; empty where it is no tensor."""
    on_device: bool = False


@dataclass(frozen=True)
class Recorded:
    """What torch's profiler saw of one step."""

    events: list[Any]
    """The profiler's own, in the order in which they began, the outer one first."""
    seconds: float
    """That the step took, under the profiler."""
    annotations: list[Any] = field(default_factory=list)
    """Spans of an accelerator's time that bear the name of a part of the program; they are no kernels."""


def record(step: Callable[[], object], device: Device) -> Recorded:
    """Call `step` once, under the profiler. A lazy device runs what it was asked when it is next asked to run."""
    profiled = torch.profiler.profile(activities=device.profiler_activities, record_shapes=True)
    with device.looked_at(), profiled as profiler:
        start = time.perf_counter()
        step()
        device.synchronize()
        seconds = time.perf_counter() - start
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    return recorded(profiler.profiler.kineto_results.events(), seconds)


def recorded(events: Iterable[Any], seconds: float) -> Recorded:
    """Of the profiler's events in any order."""
    ordered = sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))
    spans = [event for event in ordered if on_accelerator(event) and event.is_user_annotation()]
    ran = [event for event in ordered if not (on_accelerator(event) and event.is_user_annotation())]
    return Recorded(ran, seconds, spans)


def on_accelerator(event: Any) -> bool:
    return event.device_type().name != "CPU"


def profile(step: Callable[[], object], device: Device) -> list[Op]:
    """The ops of one call of `step`: see ops_of."""
    return ops_of(record(step, device))


def ops_of(recorded: Recorded) -> list[Op]:
    """In the order in which they began.

    An op that only passes itself on, as under autocast or autograd, counts once: the innermost is kept.
    """
    events = recorded.events
    within: dict[int, list] = {}  # per thread, the host's events that have not ended yet
    outer: set[int] = set()
    for index, event in enumerate(events):
        if on_accelerator(event):  # it bears the thread that launched it, and goes on without it
            continue
        thread, end = event.start_thread_id(), event.end_ns()
        running = [each for each in within.get(thread, []) if each[0].end_ns() > event.start_ns()]
        enclosing = [each for each in running if each[0].end_ns() >= end]  # an exchange may outlast who asked for it
        outer.update(number for other, number in enclosing if other.name() == event.name())
        if any(other.name().startswith("gpt2::") for other, _ in enclosing):  # an operator of ours counts as one
            outer.add(index)
        within[thread] = [*running, (event, index)]
    return [
        Op(event.name(), list(event.dtypes()), list(event.shapes()), on_accelerator(event))
        for index, event in enumerate(events)
        if index not in outer
    ]


@dataclass(frozen=True)
class Product:
    """One matrix product, (m, k) by (k, n), perhaps of many such pairs at once."""

    m: int
    k: int
    n: int
    number_format: str
    """That of its inputs: float32, bfloat16, float16."""
    batched: bool = False


FIRST_FACTOR = {
    "gpt2::product": 0,
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::_addmm_activation": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
}
"""Which argument of a product is the first factor; an argument before it is added to the product."""
NUMBER_FORMATS = {"float": "float32", "double": "float64", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}


def products(ops: Iterable[Op]) -> list[Product]:
    """All matrix products that the host asked for; what compiled code computes within its kernels is not seen."""
    found = []
    for op in ops:
        if (first := FIRST_FACTOR.get(op.name)) is None:
            continue
        a, b = op.shapes[first], op.shapes[first + 1]
        number_format = NUMBER_FORMATS.get(op.dtypes[first], op.dtypes[first])
        found.append(Product(a[-2], a[-1], b[-1], number_format, batched=len(a) > 2))
    if any(not product.batched for product in found):
        return found
    # Apple's GPU has a kernel for the whole linear layer: (..., k) by (n, k), transposed. Attention is batched there.
    for op in ops:
        if op.name == "aten::linear":
            *rows, k = op.shapes[0]
            number_format = NUMBER_FORMATS.get(op.dtypes[0], op.dtypes[0])
            found.append(Product(torch.Size(rows).numel(), k, op.shapes[1][0], number_format))
    return found


def fused_attention(ops: Iterable[Op]) -> dict[str, str]:
    """Attention kernels that never hold the score matrix: flash, efficient, cudnn or other, and the name seen.

    The host names the kernel it asks for; under CUDA graphs it asks for none, and the kernels' own names must do.
    """
    ops = list(ops)
    return _attention_of(op for op in ops if not op.on_device) or _attention_of(ops)


def _attention_of(ops: Iterable[Op]) -> dict[str, str]:
    found: dict[str, str] = {}
    for op in ops:
        if op.on_device:
            kind = attention_kernel_kind(op.name)
        elif match := re.match(r"aten::_(?:scaled_dot_product_)?(flash|efficient|cudnn)_attention", op.name):
            kind = match.group(1)
        else:
            kind = "other" if op.name in OTHER_ATTENTION else None
        if kind:
            found.setdefault(kind, op.name.removeprefix("aten::"))
    return found


def attention_kernel_kind(name: str) -> str | None:
    """Of an accelerator's kernel by that name; None if it is none of attention."""
    return next((kind for kind, pattern in ATTENTION_KERNELS.items() if re.search(pattern, name)), None)


def attention_kernel(ops: Sequence[Op]) -> str | None:
    """What scaled_dot_product_attention ran, "math" being products like any other, or our own; None where neither was
    seen."""
    names = {op.name for op in ops}
    others = {"math": "aten::_scaled_dot_product_attention_math", "brgemm": "gpt2::attention"}
    return ", ".join(fused_attention(ops) or [kind for kind, name in others.items() if name in names]) or None


ATTENTION_KERNELS = {"cudnn": r"cudnn.*(sdpa|fmha|flash|fusion)", "flash": r"flash", "efficient": r"fmha"}
"""What the names of NVIDIA's kernels hold; the first that fits, for cuDNN's hold the words of the others too.

cuDNN's backward pass has helpers beside its kernel, such as cudnn::fusion::compute_dot_do_o_specialized,
convert_dq_to_16bits and fmha_reduce_head.
"""
OTHER_ATTENTION = {
    "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}

KERNEL_FORMATS = {
    "bfloat16": r"bf16|nvjet_(sm\d+_)?t",
    "float16": r"f16|fp16|h(16816|1688|884)?gemm|nvjet_(sm\d+_)?h",
    "tf32": r"tf32|s1688gemm",
    "float32": r"sgemm|f32f32_f32f32",
}
"""What the names of NVIDIA's matrix kernels say of their inputs; the first that fits."""


def is_matmul_kernel(name: str) -> bool:
    """Whether an accelerator's kernel is a matrix product by a library, or one that the compiler generated."""
    return bool(re.search(r"gemm|nvjet|triton_tem", name)) and not attention_kernel_kind(name)


def kernel_formats(ops: Iterable[Op]) -> list[str]:
    """Number format of each matrix kernel whose name tells it."""
    found = []
    for op in (op for op in ops if op.on_device and is_matmul_kernel(op.name)):
        told = (kind for kind, pattern in KERNEL_FORMATS.items() if re.search(pattern, op.name))
        if kind := next(told, None):
            found.append(kind)
    return found

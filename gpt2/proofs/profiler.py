"""The ops of one training step as torch's profiler records them, with its matmuls and attention."""

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
    """One op of the host as recorded, or an accelerator's kernel, without dtypes and shapes."""

    name: str
    dtypes: list[str]
    """Dtype of each argument, in the profiler's spelling: float, c10::BFloat16, long int, Scalar, ..."""
    shapes: list[list[int]]
    """Shape of each argument; empty where it is not a tensor."""
    on_device: bool = False


@dataclass(frozen=True)
class Recorded:
    """The profile of one step."""

    events: list[Any]
    """The profiler's events in order of their start, an enclosing one before those within it."""
    seconds: float
    """Duration of the step under the profiler."""
    annotations: list[Any] = field(default_factory=list)
    """Named spans of accelerator time, which are not kernels."""


def record(step: Callable[[], object], device: Device) -> Recorded:
    """Profile one call of `step`. On a lazy device, its ops run when the device is next asked to run."""
    profiled = torch.profiler.profile(activities=device.profiler_activities, record_shapes=True)
    with device.recording_only(), profiled as profiler:
        start = time.perf_counter()
        step()
        device.synchronize()
        seconds = time.perf_counter() - start
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    return recorded(profiler.profiler.kineto_results.events(), seconds)


def recorded(events: Iterable[Any], seconds: float) -> Recorded:
    """Build a Recorded from profiler events in any order."""
    ordered = sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))
    spans = [event for event in ordered if on_accelerator(event) and event.is_user_annotation()]
    ran = [event for event in ordered if not (on_accelerator(event) and event.is_user_annotation())]
    return Recorded(ran, seconds, spans)


def on_accelerator(event: Any) -> bool:
    """Return whether a profiler event ran on an accelerator."""
    return event.device_type().name != "CPU"


def profile(step: Callable[[], object], device: Device) -> list[Op]:
    """Return the ops of one call of `step`; see ops_of()."""
    return ops_of(record(step, device))


def ops_of(recorded: Recorded) -> list[Op]:
    """Return the ops in order of their start.

    An op that only dispatches to itself, as under autocast or autograd, counts once: the innermost is kept.
    """
    events = recorded.events
    within: dict[int, list] = {}  # per thread: the host's events that have not ended yet
    outer: set[int] = set()
    for index, event in enumerate(events):
        if on_accelerator(event):  # it carries its launching thread's id, but runs independently
            continue
        thread, end = event.start_thread_id(), event.end_ns()
        running = [each for each in within.get(thread, []) if each[0].end_ns() > event.start_ns()]
        enclosing = [each for each in running if each[0].end_ns() >= end]  # exchanges outlast their callers
        outer.update(number for other, number in enclosing if other.name() == event.name())
        if any(other.name().startswith("gpt2::") for other, _ in enclosing):  # our operators count as a whole
            outer.add(index)
        within[thread] = [*running, (event, index)]
    return [
        Op(event.name(), list(event.dtypes()), list(event.shapes()), on_accelerator(event))
        for index, event in enumerate(events)
        if index not in outer
    ]


@dataclass(frozen=True)
class Matmul:
    """One matmul, (m, k) by (k, n), or a batch of them."""

    m: int
    k: int
    n: int
    number_format: str
    """Number format of the inputs: float32, bfloat16, float16."""
    batched: bool = False


FIRST_FACTOR = {
    **dict.fromkeys(("gpt2::product", "gpt2::onednn_product", "aten::mm", "aten::bmm"), 0),
    **dict.fromkeys(("aten::addmm", "aten::_addmm_activation", "aten::baddbmm"), 1),
}
"""Index of the first factor among a matmul op's arguments; an argument before it is the bias."""
NUMBER_FORMATS = {
    **{"float": "float32", "double": "float64"},
    **{"c10::BFloat16": "bfloat16", "c10::Half": "float16"},
}


def matmuls(ops: Iterable[Op]) -> list[Matmul]:
    """Return all matmuls that the host launched; those inside compiled kernels are not visible."""
    found = []
    for op in ops:
        if (first := FIRST_FACTOR.get(op.name)) is None:
            continue
        a, b = op.shapes[first], op.shapes[first + 1]
        number_format = NUMBER_FORMATS.get(op.dtypes[first], op.dtypes[first])
        found.append(Matmul(a[-2], a[-1], b[-1], number_format, batched=len(a) > 2))
    if any(not product.batched for product in found):
        return found
    # Apple's GPU runs a linear layer as one kernel: (..., k) by (n, k), transposed. Its attention is batched.
    for op in ops:
        if op.name == "aten::linear":
            *rows, k = op.shapes[0]
            number_format = NUMBER_FORMATS.get(op.dtypes[0], op.dtypes[0])
            found.append(Matmul(torch.Size(rows).numel(), k, op.shapes[1][0], number_format))
    return found


def fused_attention(ops: Iterable[Op]) -> dict[str, str]:
    """Return the attention kernels that never hold the score matrix, with the name seen for each.

    The kinds are flash, efficient, cudnn and other. The host's ops name the kernel; under CUDA graphs there
    are none, and the kernels' own names are used.
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
    """Return the kind of an accelerator's attention kernel by its name; None for other kernels."""
    return next((kind for kind, pattern in ATTENTION_KERNELS.items() if re.search(pattern, name)), None)


def attention_kernel(ops: Sequence[Op]) -> str | None:
    """Return the kernels that ran attention, or None where none was seen.

    They are those of fused_attention(), or math for scaled_dot_product_attention by plain matmuls, brgemm for
    ours, or flash4.
    """
    names = {op.name for op in ops}
    others = {"math": "aten::_scaled_dot_product_attention_math", "brgemm": "gpt2::attention"}
    if "gpt2::flash4_attention" in names:
        return "flash4"
    return ", ".join(fused_attention(ops) or [kind for kind, name in others.items() if name in names]) or None


ATTENTION_KERNELS = {"cudnn": r"cudnn.*(sdpa|fmha|flash|fusion)", "flash": r"flash", "efficient": r"fmha"}
"""Patterns of NVIDIA's attention kernels; the first counts, as cuDNN's names have the others' words.

cuDNN's backward pass has helper kernels, such as cudnn::fusion::compute_dot_do_o_specialized,
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
"""Patterns of the input format in names of NVIDIA's matmul kernels; the first match counts."""


def is_matmul_kernel(name: str) -> bool:
    """Return whether an accelerator's kernel is a matmul, from a library or generated by the compiler."""
    return bool(re.search(r"gemm|nvjet|triton_tem|int8_mm|_cce_", name)) and not attention_kernel_kind(name)


def kernel_formats(ops: Iterable[Op]) -> list[str]:
    """Return the number format of each matmul kernel whose name shows it."""
    found = []
    for op in (op for op in ops if op.on_device and is_matmul_kernel(op.name)):
        told = (kind for kind, pattern in KERNEL_FORMATS.items() if re.search(pattern, op.name))
        if kind := next(told, None):
            found.append(kind)
    return found

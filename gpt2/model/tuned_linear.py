"""Matmuls on a CPU, each in the way that was timed as fastest for its shape, or all by oneDNN.

torch passes each matmul whole to a library: bfloat16's to oneDNN, float32's to MKL, which on AMD's processors
does not use all of their width. oneDNN does, and is asked for here in float32. Neither distributes every
shape well over the threads: on two cores, a matmul of 768 columns leaves one of them idle. Split explicitly
by rows or columns of the result, both cores work. No sum is split: each element is the same dot product.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpt2.config.toggles import MATMUL_CHOICES
from gpt2.model.autograd import operator, product_dtype

ROUNDS = 5
"""Timings of each split when a shape is first met; the median counts, because steps see typical times."""
LEAST_ROUNDS = 3
ENOUGH_SECONDS = 0.5
"""Timing budget for one shape after LEAST_ROUNDS rounds; large shapes need fewer timings."""
PLENTY_SECONDS = 5.0
"""Timing budget for one shape after any round; little disturbs a matmul that takes a second."""

WORTH_CUTTING = 0.97
"""A split must take less than this share of the whole matmul's time, as it adds calls."""

Key = tuple[int, torch.Size, torch.Size, bool, bool, torch.dtype, bool]

_chosen: dict[Key, str] = {}


def chosen() -> dict[str, int]:
    """Return the number of shapes so far that use each split."""
    found = list(_chosen.values())
    return {name: found.count(name) for name in sorted(set(found))}


ONEDNN = "by oneDNN"


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in the fastest way for this shape, which is timed when the shape is first met.

    a: (m, k); b: (k, n), either possibly transposed; bias: (n,) or None. Returns (m, n).
    """
    layouts = a.stride(-1) == 1, b.stride(-1) == 1
    key = (torch.get_num_threads(), a.shape, b.shape, *layouts, a.dtype, bias is not None)
    name = _chosen.get(key)
    if name is None:
        name = _chosen[key] = _kept(key, a.dtype) or _keep(key, _fastest(a, b, bias))
    return _arranged(name, a, b, bias)


def _kept(key: Key, dtype: torch.dtype) -> str | None:
    """The way that another process was the first to choose for this shape; None if there is none."""
    file = Path(os.environ.get(MATMUL_CHOICES, ""))
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.removeprefix(f"{key}: ") for line in lines if line.startswith(f"{key}: "))
    return next((name for name in names if name in _ways(dtype)), None)


def _keep(key: Key, name: str) -> str:
    """Return `name`, the way chosen for this shape, once other processes find it."""
    if file := os.environ.get(MATMUL_CHOICES):
        with contextlib.suppress(OSError), Path(file).open("a") as lines:  # the disk may be full
            lines.write(f"{key}: {name}\n")
    return name


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


def _product_shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.size(0), b.size(1))


operator("product(Tensor a, Tensor b, Tensor? bias) -> Tensor", _product_shape, CPU=_product)
operator("onednn_product(Tensor a, Tensor b, Tensor? bias) -> Tensor", _product_shape, CPU=_by_onednn)


def _multiplied(a: Tensor, b: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    if onednn:
        return torch.ops.gpt2.onednn_product(a, b, bias)
    return torch.ops.gpt2.product(a, b, bias)


def _fastest(a: Tensor, b: Tensor, bias: Tensor | None) -> str:
    names = _ways(a.dtype)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    begun = time.perf_counter()
    for number in range(ROUNDS):
        if time.perf_counter() - begun > (ENOUGH_SECONDS if number >= LEAST_ROUNDS else PLENTY_SECONDS):
            break
        for name in names:
            start = time.perf_counter()
            _arranged(name, a, b, bias)
            seconds[name].append(time.perf_counter() - start)
    times = {name: median(each) for name, each in seconds.items()}
    fastest = min(names, key=times.__getitem__)
    return fastest if times[fastest] < WORTH_CUTTING * times["whole"] else "whole"


def _ways(dtype: torch.dtype) -> list[str]:
    """Names of the ways in which a matmul can be done, see _arranged()."""
    threads = torch.get_num_threads()
    parts = [threads, 2 * threads] if threads > 1 else [2, 4]
    names = ["whole", *(f"{side} in {number}" for side in ("rows", "columns") for number in parts)]
    if dtype == torch.float32 and torch.backends.mkldnn.is_available():  # bfloat16's are oneDNN's anyway
        names.append(ONEDNN)
    return names


def _arranged(name: str, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if name == ONEDNN:
        return _by_onednn(a, b, bias)
    out = a.new_empty(a.size(0), b.size(1))
    side, _, parts = name.partition(" in ")
    if side == "whole":
        _multiply(a, b, bias, out)
        return out
    size = out.size(0 if side == "rows" else 1)
    for start, end in _cuts(size, int(parts)):
        if side == "rows":
            _multiply(a[start:end], b, bias, out[start:end])
        else:
            _multiply(a, b[:, start:end], None if bias is None else bias[start:end], out[:, start:end])
    return out


def _cuts(size: int, parts: int) -> Iterator[tuple[int, int]]:
    bounds = [size * part // parts for part in range(parts + 1)]
    return ((start, end) for start, end in pairwise(bounds) if end > start)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


class TunedLinear(Function):
    """A linear layer with matmuls by gpt2::product or by oneDNN, in autocast's number format where on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
        """Return x @ weight.T + bias. x: (..., k); weight: (n, k); bias: (n,) or None. Returns (..., n)."""
        dtype = product_dtype(x)
        x_cast, weight_cast = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x_cast, weight_cast)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.onednn = onednn
        flat = x_cast.reshape(-1, x.size(-1))
        y = _multiplied(flat, weight_cast.t(), None if bias is None else bias.to(dtype), onednn)
        return y.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        """Return the gradients of x, weight and bias, in their shapes and dtypes."""
        (gradient,) = grad_outputs
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.dtypes
        flat = gradient.reshape(-1, gradient.size(-1))
        to_x = _multiplied(flat, weight, None, ctx.onednn).view(x.shape).to(of_x)
        to_weight = _multiplied(flat.t(), x.reshape(-1, x.size(-1)), None, ctx.onednn).to(of_weight)
        to_bias = flat.sum(0).to(of_bias) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias, None


def tuned_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear(x, weight, bias), each matmul in the fastest way for its shape."""
    return TunedLinear.apply(x, weight, bias, False)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear(x, weight, bias), each matmul by oneDNN."""
    return TunedLinear.apply(x, weight, bias, True)

"""Causal attention by this project's C++ kernel for CPUs, attention.cpp, compiled when it is first needed."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpt2.config.toggles import UnsupportedToggle
from gpt2.hardware.host import flags
from gpt2.model.autograd import operator

SOURCE = Path(__file__).with_name("attention.cpp")
FLAGS = (
    *("-shared", "-fPIC", "-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fno-strict-aliasing",  # pairs of bfloat16 are moved as one integer
)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the library of kernels, compiled for this CPU unless it is cached. Raises UnsupportedToggle."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    home = Path(torch.__file__).parent
    command = [
        *(os.environ.get("CXX") or "g++", *FLAGS, f"-I{home / 'include'}", str(SOURCE)),
        *(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    made_of = [*command, torch.__version__, SOURCE.read_text(encoding="utf-8"), *sorted(flags())]
    name = f"{SOURCE.stem}-{hashlib.sha256('/'.join(made_of).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir())  # as for torch.compile
    if not os.path.exists(folder / name):  # False also for a folder without permission
        _compile(command, folder / name)
    try:
        return ctypes.CDLL(str(folder / name))
    except OSError as error:  # built against another container's libraries, or on a noexec file system
        where = "TORCHINDUCTOR_CACHE_DIR, or below TMPDIR"
        mend = f"delete it, or see that programs may run from its folder ({where})"
        raise _unsupported(f"cannot load {folder / name}: {error}; {mend}") from None


def _compile(command: list[str], target: Path) -> None:
    """Compile into `target` atomically, as other ranks may do at once. Raises UnsupportedToggle."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            # In a session of its own: Ctrl-C must not kill the compiler while the training shuts down.
            command = [*command, "-o", str(made)]
            compiled = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
            if compiled.returncode:
                lines = [*compiled.stderr.splitlines(), f"it ended with exit code {compiled.returncode}"]
                said = next((line for line in lines if "error" in line), lines[0])
                raise _unsupported(f"{command[0]} cannot compile {SOURCE.name}: {said}; choose blocks")
            with made.open("rb") as file:
                os.fsync(file.fileno())
            made.replace(target)
    except OSError as error:
        mend = "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written to"
        raise _unsupported(f"cannot compile {SOURCE.name} in {target.parent}: {error}; {mend}") from None


def _unsupported(reason: str) -> UnsupportedToggle:
    return UnsupportedToggle("attention", "brgemm", reason)


def _call(name: str, qkv: Tensor, *others: Tensor) -> None:
    B, T, _, n_head, head_dim = qkv.shape
    torch._check(
        qkv.numel() > 0 and head_dim % 2 == 0 and qkv.dtype in (torch.float32, torch.bfloat16),
        lambda: f"attention: brgemm: no kernel for {qkv.dtype} of {tuple(qkv.shape)}; choose sdpa",
    )
    tensors = [each.contiguous() for each in (qkv, *others)]
    function = getattr(library(), f"{name}_{str(qkv.dtype).removeprefix('torch.')}")
    function.restype = ctypes.c_char_p
    pointers = (ctypes.c_void_p(each.data_ptr()) for each in tensors)
    if problem := function(*pointers, *map(ctypes.c_int64, (B, T, n_head, head_dim))):
        raise RuntimeError(f"attention: brgemm: {problem.decode()}")


def _attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward kernel.

    qkv: (B, T, 3, n_head, head_dim). Returns the output (B, T, n_head, head_dim) and each row's log-sum-exp
    of scores, (B, n_head, T) float32.
    """
    out, log_sum = _attention_shape(qkv)
    _call("attention", qkv, out, log_sum)
    return out, log_sum


def _attention_shape(qkv: Tensor) -> tuple[Tensor, Tensor]:
    B, T, _, n_head, head_dim = qkv.shape
    return qkv.new_empty(B, T, n_head, head_dim), qkv.new_empty(B, n_head, T, dtype=torch.float32)


def _backward(gradient: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    """Run the backward kernel: from the gradient of `out`, return the gradient of qkv, in qkv's shape."""
    to_qkv = _backward_shape(gradient, qkv, out, log_sum)
    _call("attention_backward", qkv, out, log_sum, gradient.to(qkv.dtype), to_qkv)
    return to_qkv


def _backward_shape(gradient: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    return qkv.new_empty(qkv.shape)


operator("attention(Tensor qkv) -> (Tensor, Tensor)", _attention_shape, CPU=_attention)
BACKWARD = "attention_backward(Tensor gradient, Tensor qkv, Tensor out, Tensor log_sum) -> Tensor"
operator(BACKWARD, _backward_shape, CPU=_backward)


class BrgemmAttention(Function):
    """Causal scaled_dot_product_attention of one packed tensor of q, k and v."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        """Attend to earlier positions only.

        qkv: (B, T, 3, n_head, head_dim), float32 or bfloat16, head_dim even. Returns (B, T, n_head,
        head_dim). Raises RuntimeError where the kernel does not support the shape or dtype.
        """
        out, log_sum = torch.ops.gpt2.attention(qkv)
        ctx.save_for_backward(qkv, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        """Return the gradient of qkv, in its shape."""
        (gradient,) = grad_outputs
        return torch.ops.gpt2.attention_backward(gradient, *ctx.saved_tensors)

"""Packages of other projects with kernels for GPUs: which toggle needs which. Imports no torch."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

CUTE = ("cutlass", "tvm_ffi")
"""What kernels in CuTe DSL are compiled and called by; an installation of parts may lack it."""
LIGER = ("liger_kernel", "triton"), "pip install liger-kernel"
QUACK = ("quack", *CUTE), 'pip install "quack-kernels[cu13]" (on CUDA 12 without [cu13])'
FLASH4 = ("flash_attn.cute", *CUTE), 'pip install "flash-attn-4[cu13]>=4.0.0b30" (on CUDA 12 without [cu13])'
CUT = (
    ("cut_cross_entropy", "triton"),
    'pip install "cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy"',
)
PACKAGES = {
    ("attention", "flash4"): (*FLASH4, "cudnn"),
    ("cross_entropy", "liger"): (*LIGER, "triton"),
    ("cross_entropy", "quack"): (*QUACK, "triton"),
    ("cross_entropy", "cut"): (*CUT, "linear"),
    ("layer_norm", "liger"): (*LIGER, "torch"),
    ("layer_norm", "quack"): (*QUACK, "torch"),
}
"""By toggle and value: modules to import, how to install them, and another value of the toggle."""


def missing(toggle: str, value: object) -> str | None:
    """Return why a package that a toggle's value needs cannot be used here, and what to do; or None."""
    if (toggle, value) not in PACKAGES:
        return None
    names, install, other = PACKAGES[toggle, str(value)]
    found = {name: _spec(name) for name in names}
    if absent := [name for name, spec in found.items() if spec is None]:
        return f"its package {absent[0]} is not here; {install}, or choose {other}"
    spec = found[names[0]]
    if value == "cut" and not (spec and spec.origin and Path(spec.origin).with_name("cce_utils.py").exists()):
        # As on PyPI: its gradients are sums of hundreds of parts, rounded to bfloat16 after each.
        return f"this {names[0]} has no exact form; {install}, or choose {other}"
    return None


def _spec(name: str) -> ModuleSpec | None:
    # Looking for a module within a package imports the package, which must be there.
    return find_spec(name) if find_spec(name.split(".")[0]) else None

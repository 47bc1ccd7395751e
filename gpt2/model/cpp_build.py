"""Compile and load the project's C++ kernels for this CPU when they are first needed. Loads no torch."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from gpt2.config.toggles import UnsupportedToggle
from gpt2.hardware.host import cpu_flags

SOURCE = Path(__file__).with_name("attention.cpp")
FLAGS = (
    *("-shared", "-fPIC", "-std=c++20", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fno-strict-aliasing",  # pairs of bfloat16 are moved as one integer
)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """Return the library of kernels, compiling it unless it is cached. Raises UnsupportedToggle."""
    import torch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    home = Path(torch.__file__).parent
    command = [
        *(os.environ.get("CXX") or "g++", *FLAGS, f"-I{home / 'include'}", str(SOURCE)),
        *(f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    made_of = [*command, torch.__version__, SOURCE.read_text(encoding="utf-8"), *sorted(cpu_flags())]
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

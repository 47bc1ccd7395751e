"""Describe the machine and the code that a number comes from.

Run by bench.runner before the first rung; alone too: python -m bench.environment cpu
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from bench.record import Environment
from gpt2.device import DEVICES, Cpu, Device
from gpt2.toggles import UnsupportedToggle

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16", "i8mm")
# Not those that the harness sets itself, nor any that holds a path of the user's but the preloaded libraries.
VARIABLES = (
    "LD_PRELOAD",
    "MALLOC_ARENA_MAX",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "OMP_PROC_BIND",
    "ONEDNN_MAX_CPU_ISA",
    "THP_MEM_ALLOC_ENABLE",
    "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "PYTORCH_MPS_FAST_MATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
)


def describe(device: Device) -> Environment:
    """The environment of a process that trains on `device`."""
    commit, dirty = git_state()
    cpu = Cpu()
    return Environment(
        chip=device.chip(),
        device_count=device.count(),
        device_memory_bytes=device.memory_bytes(),
        cpu=cpu.chip(),
        cpu_cores=cpu.count(),
        cpu_flags=cpu_flags(),
        memory_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        versions=device.versions(),
        variables={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        code_hash=code_hash(),
        commit=commit,
        dirty=dirty,
    )


def cpu_flags() -> list[str]:
    """Those of FLAGS that this CPU has; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^(?:flags|Features)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return [flag for flag in FLAGS if flag in match.group(1).split()]
    return []


def code_hash() -> str:
    """sha256 over names and contents of the Python files of gpt2/ and bench/."""
    digest = hashlib.sha256()
    for path in sorted(p for package in ("bench", "gpt2") for p in (ROOT / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def git_state() -> tuple[str | None, bool | None]:
    """Commit of this checkout, and whether a tracked file that matters to a run differs from it; None outside git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "bench/environment.py")  # else the repository is somebody else's
        matters = ("gpt2", "bench", "ladders", "pyproject.toml")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no", "--", *matters))
    except (OSError, subprocess.SubprocessError):
        return None, None


def main() -> None:
    """Print the environment of the device named on the command line, or of the CPU where it is not here."""
    try:
        device = DEVICES.get(sys.argv[1], Cpu)()
    except UnsupportedToggle:
        device = Cpu()
    print(describe(device).model_dump_json())


if __name__ == "__main__":
    main()

"""Triton kernels run for a test: on the GPU here, or by Triton's interpreter in a process of its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from places import ROOT

Found = TypeVar("Found")


def interpreted(program: str, path: Path, *places: Path) -> Any:
    """What a program saves as its first argument, where Triton's interpreter runs kernels on the CPU.

    Triton reads the variable when it is imported, and then has no compiler in that process.
    """
    folders = [*map(str, (*places, ROOT, ROOT / "tests" / "support")), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def by_kernels(function: Callable[[str], Found], folder: Path) -> Found:
    """What a test module's function finds on the device that it is given."""
    if not find_spec("triton"):
        pytest.skip("Triton is not here: torch's CUDA builds for Linux bring it, or pip install triton")
    if torch.cuda.is_available():
        return function("cuda")
    module, name = Path(inspect.getfile(function)), function.__name__
    program = f"import sys, torch; from {module.stem} import {name}; torch.save({name}('cpu'), sys.argv[1])"
    return interpreted(program, folder / "found.pt", module.parent)

"""What a worker knows of itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import ROOT

from bench.process.worker_side import cause

PRINT_AGE = "from bench.process.worker_side import age; print(age())"


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="only Linux notes a start by the clock since boot"
)
@pytest.mark.parametrize("wrong_by", [-5_000_000.0, 86_400.0])
def test_a_worker_s_age_does_not_depend_on_the_wall_clock(wrong_by: float) -> None:
    wrong = f"import time; true = time.time; time.time = lambda: true() + {wrong_by}; {PRINT_AGE}"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", wrong],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 <= float(done.stdout) <= time.monotonic() - begun + 0.02  # the kernel's ticks


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "C++ compile error\n\nOutput:\nerror writing x.s: No space left on device",
            ": No space left on device",
        ),
        ("C++ compile error\n\nOutput:\nerror: expected ';'", ""),
    ],
)
def test_the_cause_of_a_compiler_s_error_tells_that_the_disk_was_full(message: str, said: str) -> None:
    assert cause(RuntimeError(message)) == f"RuntimeError: C++ compile error{said}"

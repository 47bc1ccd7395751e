"""A stand-in for another trainer: a program that prints nanoGPT's lines, timed, and found while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
from conftest import ROOT

from bench.records.record import Outcome

STEP = "print(f'iter {step}: loss {10 - step / 100:.4f}, time 20.00ms, mfu -100.00%')\n"
SILENT = "import time\nopen('ready', 'w').close()\nprint('loading the data')\ntime.sleep(600)\n"


def program(steps: int = 1000, seconds: float = 0.02) -> str:
    """A trainer that prints a line for each of its steps."""
    return f"import time\nfor step in range({steps}):\n    time.sleep({seconds})\n    {STEP}"


def command(ladder: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "bench.external",
        str(ladder),
        "other",
        "--out",
        str(ladder.with_name("m.json")),
    ]


def timed(ladder: Path, environ: dict[str, str] | None = None) -> tuple[Outcome, str]:
    """The outcome, and what was printed."""
    variables = {**os.environ, **(environ or {})}
    done = subprocess.run(
        command(ladder), cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60
    )
    outcome = Outcome.model_validate_json(ladder.with_name("m.json").read_text())
    assert (done.returncode == 0) == (outcome.status == "ok")
    return outcome, done.stdout


def children_of(folder: Path) -> list[psutil.Process]:
    """Processes that run in a peer's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == folder:
                found.append(process)
        except psutil.Error:
            continue
    return found


def await_peer(folder: Path) -> None:
    """Until the silent one has begun to be silent."""
    deadline = time.monotonic() + 30
    while not (folder / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(folder)


def none_left(folder: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := children_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not left

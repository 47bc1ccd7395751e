"""A stand-in for another trainer: a program that prints nanoGPT's lines, timed, and found while it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
from places import ROOT
from waiting import until

from bench.records.record import Outcome

STEP = "print(f'iter {step}: loss {10 - step / 100:.4f}, time 20.00ms, mfu -100.00%')\n"
SILENT = "import time\nopen('ready', 'w').close()\nprint('loading the data')\ntime.sleep(600)\n"


def program(steps: int = 200, trains_on: bool = True) -> str:
    """A trainer that prints a line for each of its steps, fast, and then trains on in silence."""
    silence = "import time\ntime.sleep(600)\n" if trains_on else ""
    return f"for step in range({steps}):\n    {STEP}{silence}"


def paced() -> str:
    """A trainer whose next step begins when the line of the one before has been heeded, and takes 20 ms.

    So no two lines come together, however busy the machine is. For blocks of one step: see SINGLE_STEPS.
    """
    return (
        "import json, os, time\n"
        "said = os.environ['BENCH_OUT'].split()[0] + '.progress'\n"
        "def heeded(step):\n"
        "    try:\n        return json.load(open(said))['steps'] >= step\n"
        "    except (OSError, ValueError):  # not there yet, or being written\n        return False\n"
        f"for step in range(1000):\n    time.sleep(0.02)\n    {STEP}"
        "    while not heeded(step): time.sleep(0.001)\n"
    )


SINGLE_STEPS = {"block_seconds": 0.001}


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
        command(ladder), cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600
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
    until((folder / "ready").exists)
    assert children_of(folder)


def await_none(folder: Path) -> None:
    """Until no process runs in a peer's folder."""
    until(lambda: not children_of(folder))

"""Long runs of the tiny model, in this process and as the command a user gives."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpt2.device import find
from gpt2.pretrain.config import TrainingRun, build
from gpt2.pretrain.metrics import Event
from gpt2.pretrain.session import Session, SessionOptions

ROOT = Path(__file__).parents[2]
TIMING = ("seconds", "elapsed_seconds", "tps", "mfu", "peak_memory_bytes", "wait_seconds")


def tiny_run(*, steps: int = 12, toggles: dict[str, Any] | None = None, **changes: Any) -> TrainingRun:
    """A run whose steps take some 20 ms each."""
    workload = {"model": "tiny", "seq_len": 32, "tokens_per_step": 128, "lr": 3e-3, "lr_warmup_steps": 3}
    content: dict[str, Any] = {
        "name": "test",
        "steps": steps,
        "workload": {**workload, **changes.pop("workload", {})},
        "toggles": {"micro_batch_size": 2, "adamw": "fused", "threads": 1, **(toggles or {})},
        "evaluation": {"val_every": 4, "val_tokens": 256},
        "checkpoints": {"every": 4, "keep": 2},
        **changes,
    }
    return build(content, "test")


def session(run: TrainingRun, folder: Path, **place: Any) -> Session:
    return Session(run, SessionOptions(folder=folder, **place), find(run.toggles))


def events(run: TrainingRun, folder: Path, **place: Any) -> list[Event]:
    return list(session(run, folder, **place))


def notes(found: list[Event]) -> list[str]:
    return [event.values["text"] for event in found if event.kind == "note"]


def learned(found: list[Event]) -> list[dict[str, Any]]:
    """What a run found of the model, without how long that took; legs left out."""
    return [
        {"kind": event.kind, "step": event.step}
        | {key: value for key, value in event.values.items() if key not in TIMING}
        for event in found
        if event.kind != "leg"
    ]


def broken_off(run: TrainingRun, folder: Path, after: int) -> list[Event]:
    """The events of a leg that is asked to end once `after` steps were taken."""
    it, found = session(run, folder), []
    last = "val" if it.evaluations.due(after - 1) else "step"
    for event in it:
        found.append(event)
        if (event.kind, event.step) == (last, after - 1):  # heeded in the step that comes next
            it.end("asked by the test")
    return found


def settings(*values: str) -> list[str]:
    """`--set` before each of them."""
    return [word for value in values for word in ("--set", value)]


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """`gpt2 ...` as a user gives it."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpt2.cli", *map(str, arguments)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    )


def with_toggles(run: TrainingRun, **toggles: Any) -> TrainingRun:
    return replace(run, toggles=replace(run.toggles, **toggles))

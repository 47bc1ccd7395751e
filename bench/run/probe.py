"""Probe the machine in a process of its own, so that the runner loads no torch.

Run by bench.run.runner; alone too: python -m bench.run.probe cpu ladders/smoke.yaml
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from bench.analysis.schedule import Schedule
from bench.errors import BenchError
from bench.ladder.ladder import Ladder, load
from bench.process.shutdown import interruptible
from bench.process.supervisor import how_it_ended, short_of_threads, tail
from bench.process.worker_side import RUNNER, leave_with_runner
from bench.records.machine import Environment, Plain
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.terminal import surroundings
from gpt2.training.reexec import own_variables, python
from gpt2.training.stages import environment

if TYPE_CHECKING:
    from gpt2.device import Device


ANSWER = "answer: "
"""Begins the line for asked(); others, such as the user's sitecustomize, may print before and after it."""


class ProbeResult(Plain):
    """Facts about the machine and the memory of a ladder's rungs."""

    environment: Environment
    """Environment of a process on the last rung's device or, if that is missing, on the last available."""
    memory_bytes: dict[str, int]
    """By Task.name, estimated memory of all ranks of a rung on a CPU."""
    missing: dict[str, str] = Field(default_factory=dict)
    """By kind of device that this machine lacks, the reason."""


def probe(
    device: str, ladder: Path | None = None, overrides: Sequence[str] = (), *, ablate: bool = False
) -> ProbeResult:
    """Probe in a child process; without a ladder, the machine only. Raises BenchError.

    ablate: whether to include the memory of toggles alone and left out.
    """
    words = [device, *([] if ladder is None else [str(ladder)]), *["--ablate"] * ablate]
    variables = environment(Toggles())  # by which GPUs are numbered as for the processes that train
    printed = asked("bench.run.probe", words, overrides, variables, failed="this machine could not be probed")
    return ProbeResult.model_validate_json(printed)


def asked(
    module: str,
    words: Sequence[str],
    overrides: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    failed: str,
) -> str:
    """Return the line of JSON that a module of ours prints, run in a process of its own, for it loads torch.

    overrides: passed on with --set. variables: for it besides its own. failed: begins the BenchError that is
    raised where it ends badly.
    """
    command = [*python(module), *words, *(part for override in overrides for part in ("--set", override))]
    environ = {**os.environ, **own_variables(), RUNNER: str(os.getpid()), **(variables or {})}
    with interruptible():  # SIGTERM, too, ends it with this process
        done = subprocess.run(
            command, env=environ, capture_output=True, encoding="utf-8", errors="replace", check=False
        )
    if done.returncode:
        said = short_of_threads(done.stderr) or "".join(tail(done.stderr)[-1:])
        raise BenchError(f"{failed}: {said or how_it_ended(done.returncode)}")
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not answers:
        raise BenchError(f"{failed}: {module} gave no answer")
    return answers[-1].removeprefix(ANSWER)


def answer(text: str) -> None:
    """Print a line of JSON for asked(), in the process that it starts."""
    print(f"{ANSWER}{text}")


def main() -> None:
    from bench.host.environment import describe
    from gpt2.device import DeviceError

    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("ladder", type=Path, nargs="?")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--ablate", action="store_true")
    arguments = parser.parse_args()
    ladder = load(arguments.ladder, arguments.set) if arguments.ladder else None
    others = [rung.toggles.device for rung in reversed(ladder.rungs)] if ladder else []
    try:
        # Each kind once: XLA aborts at a second attempt.
        device, missing = _first_here(dict.fromkeys([arguments.device, *others]))
    except DeviceError as error:
        sys.exit(str(error))
    memory = _memory(ladder, arguments.ablate) if ladder else {}
    answer(ProbeResult(environment=describe(device), memory_bytes=memory, missing=missing).as_json())


def _first_here(devices: Iterable[str]) -> tuple[Device, dict[str, str]]:
    """Return the first available of these kinds of device, else the CPU, and why those before it are not.

    Raises DeviceError.
    """
    from gpt2.device import DEVICES, Cpu

    missing: dict[str, str] = {}
    for name in devices:
        try:
            return DEVICES[name](), missing
        except UnsupportedToggle as error:
            missing[name] = str(error)
    return Cpu(), missing


def _memory(ladder: Ladder, ablate: bool) -> dict[str, int]:
    from gpt2.training.memory_estimate import estimate

    known: dict[Toggles, int] = {}
    memory: dict[str, int] = {}
    schedule = Schedule(ladder, ladder.rungs, ablate)
    for task in schedule.round(1):
        toggles = task.rung.toggles
        if task.is_ceiling or task.rung.external or toggles.device != HOST:
            continue
        # Toggles that do not change the memory share an estimate.
        kept = replace(toggles, adamw="for_loop")
        if toggles.sharding == "none":
            kept = replace(kept, grad_accum_steps=1, world_size=1)
        if kept not in known:
            known[kept] = estimate(ladder.workload, kept).total
        memory[task.name] = known[kept] * toggles.world_size
    return memory


if __name__ == "__main__":
    leave_with_runner()
    with surroundings("torch"):
        main()

"""`bench roofline`: measure the ceiling of a machine once, outside any ladder, and keep it. Imports no torch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

from bench.analysis.schedule import Task, ceiling_rung
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_boards
from bench.ladder.ladder import Ladder, Protocol
from bench.process.shutdown import stoppable
from bench.records.record import Record, RecordError, append, reserved
from bench.run.command import Options
from bench.run.executor import Processes, Watcher
from bench.run.probe import probe
from bench.run.runner import RunError, new_results
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.hardware.host import temp_folder

DEVICES: tuple[str, ...] = get_args(get_type_hints(Toggles)["device"])


def measure(
    ladder: Ladder | None, device: str | None, out: Path, seconds: float, watcher: Watcher
) -> tuple[Path, Record]:
    """Measure in a process of its own; gives the results file and its only record.

    ladder: whose shapes are measured; GPT-2 124M at 1,024 tokens by default. device: default, that of its
    last rung, else cpu. Raises ProbeError, RunError or OSError.
    """
    ladder = ladder or Ladder(
        path=Path("roofline"), name="", workload=Workload(), protocol=Protocol(), rungs=()
    )
    device = device or (ladder.rungs[-1].toggles.device if ladder.rungs else "cpu")
    if device not in DEVICES:
        raise RunError(f"--device: {device}: is not one of {', '.join(DEVICES)}; choose one of them")
    ladder = replace(ladder, name="roofline", protocol=replace(ladder.protocol, ceiling_seconds=seconds))
    asked = probe(device)
    path = new_results(ladder, out, asked.environment)
    task = Task(kind="ceiling", rung=ceiling_rung(device), repetition=1)
    with (
        reserved(path),
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
        stoppable() as stop,
    ):
        watcher.started(task, 1, None)
        record = Processes(ladder, Options(out=out), Path(scratch), path.stem, asked, watcher, stop=stop).run(
            task
        )
        if record.status == "unsupported":
            raise RunError(f"--{record.error}")
        append(path, record)
        watcher.finished(record)
    return path, record


def measured(ladder: Ladder, results: Path, machine: str) -> tuple[Scoreboard | None, str]:
    """What earlier runs of a ladder on this machine measured, and a line that says where that is from."""
    try:
        boards, _ = load_boards([results] if results.exists() else [], needed=False)
    except RecordError as error:
        return None, f"Measured: {str(error).splitlines()[0]}."
    here = [board for board in boards if (board.ladder, board.environment.machine) == (ladder.name, machine)]
    board = next((board for board in here if Workload(**board.records[0].workload) == ladder.workload), None)
    if board is None or board.source is None:
        return (
            None,
            f"Measured: nothing of {ladder.name} on this machine in {results.as_posix()}; bench run measures "
            "it.",
        )
    return (
        board,
        f"Measured: {board.source.as_posix()}, where workload and toggles are those of the ladder today.",
    )

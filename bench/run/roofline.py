"""Measure the ceiling of a machine outside a run, for `bench roofline`. Imports no torch."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.analysis.schedule import Task, ceiling_rung
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.select import load_boards
from bench.errors import BenchError
from bench.ladder.ladder import Ladder, Protocol
from bench.process.shutdown import stoppable
from bench.records.record import Record, RecordError, ResultsFile
from bench.run.command import Options
from bench.run.executor import Executor, Watcher
from bench.run.probe import probe
from bench.run.runner import new_results
from gpt2.config.devices import DEVICES
from gpt2.config.workload import Workload
from gpt2.hardware.host import temp_folder


def measure(
    ladder: Ladder | None, device: str | None, out: Path, seconds: float, watcher: Watcher
) -> tuple[Path, Record, str]:
    """Measure in a process of its own; return the results file, its only record, and why that is not kept.

    The last is empty where the record is in the file: what was measured can be shown without.
    ladder: has the shapes to measure; GPT-2 124M at 1,024 tokens by default. device: by default that of its
    last rung, else cpu. seconds: of each matmul. Raises BenchError, or OSError before it has measured.
    """
    ladder = ladder or Ladder(
        path=Path("roofline"), name="", workload=Workload(), protocol=Protocol(), rungs=()
    )
    device = device or (ladder.rungs[-1].toggles.device if ladder.rungs else "cpu")
    if device not in DEVICES:
        raise BenchError(f"--device: {device}: is not one of {', '.join(DEVICES)}; choose one of them")
    ladder = replace(ladder, name="roofline", protocol=replace(ladder.protocol, ceiling_seconds=seconds))
    probed = probe(device)
    path = new_results(ladder, out, probed.environment)
    task = Task(kind="ceiling", rung=ceiling_rung(device), repetition=1)
    with (
        contextlib.closing(ResultsFile(path)) as results,
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
        stoppable() as stop,
    ):
        watcher.started(task, 1, None)
        record = Executor(ladder, Options(out=out), Path(scratch), path.stem, probed, watcher, stop=stop).run(
            task
        )
        if record.status == "unsupported":
            raise BenchError(f"--{record.error}")
        lost = ""
        try:
            results.append(record)
        except OSError as error:
            lost = f"cannot write {path} ({error.strerror}); the record is not kept"
        watcher.finished(record)
    return path, record, lost


def measured(ladder: Ladder, results: Path, machine: str) -> tuple[Scoreboard | None, str]:
    """Return the newest results of a ladder on this machine, or None, and a note on their source."""
    try:
        boards, _ = load_boards([results] if results.exists() else [], needed=False)
    except RecordError as error:
        return None, f"Measured: {str(error).splitlines()[0]}."
    here = [board for board in boards if (board.ladder, board.environment.machine) == (ladder.name, machine)]
    board = next((board for board in here if Workload(**board.records[0].workload) == ladder.workload), None)
    if board is None or board.source is None:
        where = f"{ladder.name} on this machine in {results.as_posix()}"
        return None, f"Measured: nothing of {where}; bench run measures it."
    return board, f"Measured: {board.source.as_posix()}, with the ladder's present workload and toggles."

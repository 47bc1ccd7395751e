"""`bench sweep`: one rung of a ladder under several values of its toggles or its workload."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Corpus, Overrides, PeakTflops, Price, Repeats, ResultsFolder, as_overrides
from bench.cli.terminal import after_measuring, report_end, say
from bench.errors import BenchError
from gpt2.files.atomic import atomic_write
from gpt2.terminal import finite

if TYPE_CHECKING:
    from bench.analysis.schedule import Cut
    from bench.analysis.scoreboard import Scoreboard
    from bench.ladder.ladder import Ladder, Rung
    from bench.ladder.sweep_axis import Axis
    from bench.records.record import RecordError
    from bench.run.command import Options
    from bench.run.runner import RunResult


def sweep(
    ladder: Annotated[
        str,
        typer.Argument(
            metavar="LADDER[:RUNG]",
            help="A ladder, and its rung to vary (default: the last).",
        ),
    ],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="PATH=A,B,...",
            help="Values of toggles.X or workload.X; several --over make a grid. With the dots, "
            "toggles.micro_batch_size=1,2,... doubles until out of memory, then finds the largest that fits.",
        ),
    ],
    data: Corpus = None,
    best: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.yaml", help="Write the ladder to the fastest that fits and trains the same."
        ),
    ] = None,
    budget: Annotated[
        float,
        typer.Option(
            min=0.1, callback=finite, metavar="MINUTES", help="Begin nothing that would end later than this."
        ),
    ] = 60.0,
    repeats: Repeats = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this sweep's newest results.")] = False,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
    peak_tflops: PeakTflops = None,
    price_per_hour: Price = None,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit 0 where it would be 6.")
    ] = False,
) -> None:
    """Measure one rung of a LADDER under several values of toggles or workload fields, and print them.

    The first value is the reference of the others. With --best, candidates far slower than the fastest in
    the first round are dropped. Each value of a workload field is another task, with a results file of its
    own.

    Exit code: as bench run, but out of memory is a result here, not a failure; 4 also if --best finds no
    winner.

    Example: bench sweep ladders/h100.yaml --over toggles.micro_batch_size=8,16,... --best mine.yaml
    """
    from bench.analysis.scoreboard import scoreboard
    from bench.cli.report import show
    from bench.ladder.sweep_axis import parse_all
    from bench.run.command import Options

    options = Options(
        out=out, data=data, resume=resume, peak_tflops=peak_tflops, price_per_hour=price_per_hour
    )
    axes = parse_all(over)
    if data and any(axis.of_workload and axis.key == "data" for axis in axes):
        raise BenchError(
            f"--data {data}: is one corpus, which --over workload.data would measure under several names; "
            "leave it out, and name corpora of GPT2_DATA_DIR"
        )
    _check_best(best, axes)
    tasks = list(_tasks(ladder, axes, as_overrides(set_, repeats)))
    runs = _runs(tasks, options, 60 * budget, bool(best))
    boards = [scoreboard(run.records, source=run.path) for run in runs if run.has_rungs]
    with after_measuring([run.path for run in runs]):
        show(boards)
    for task in tasks[len(runs) :]:
        say(f"{task.candidates.name} was not run; --resume goes on")
    codes = [report_end(run) for run in runs]
    if best and boards:
        codes.append(_keep_best(best, tasks[0], boards[0], runs[0].cut))
    code = next((code for code in codes if code), 0)
    raise typer.Exit(0 if code == 6 and allow_failures else code)


@dataclass(frozen=True)
class _Task:
    """One combination of the workload's values, and the rung to vary."""

    ladder: Ladder
    base: Rung
    axes: Sequence[Axis]
    """Axes over toggles only."""
    overrides: tuple[str, ...]
    """--set values of the command and of this combination."""
    candidates: Ladder


def _check_best(path: Path | None, axes: Sequence[Axis]) -> None:
    """Check --best before anything runs. Raises BenchError."""
    workload = [axis.key for axis in axes if axis.of_workload]
    if path and workload:
        raise BenchError(
            f"--best: each {workload[0]} is another task, so none is better than another; sweep toggles only"
        )
    if path and path.exists():
        raise BenchError(f"--best {path}: is there already; choose another name")
    if path and not path.parent.is_dir():
        raise BenchError(f"--best {path}: there is no folder {path.parent}; make it, or choose another")


def _tasks(text: str, axes: Sequence[Axis], given: Sequence[str]) -> Iterator[_Task]:
    """Yield a task for each combination of the workload's values. Raises LadderError."""
    from bench.ladder.ladder import LadderError, load
    from bench.run.suited import supported
    from bench.run.sweep import as_ladder

    path, rung = (text, "") if Path(text).exists() else text.partition(":")[::2]
    workload = [axis for axis in axes if axis.of_workload]
    toggles = [axis for axis in axes if not axis.of_workload]
    notes: list[str] = []
    for values in product(*(axis.values for axis in workload)):
        what = [axis.written(value) for axis, value in zip(workload, values, strict=True)]
        overrides = (*given, *(f"workload.{each}" for each in what))
        ladder = supported(load(Path(path), overrides), overrides, notes.append, [rung])
        base = ladder.rung(rung) if rung else ladder.top
        if base.external:
            raise LadderError(
                f"{path}: rung {rung!r} is external: bench sweep changes toggles, and it has none"
            )
        if base.best_of:
            raise LadderError(
                f"{path}: rung {base.name!r} starts from the best of {base.best_of}, not from values of its "
                f"own; sweep a rung of that ladder: bench sweep {base.best_of} --over ..."
            )
        yield _Task(ladder, base, toggles, overrides, as_ladder(ladder, base, toggles, what))
    for note in dict.fromkeys(notes):
        say(note)


def _runs(tasks: Sequence[_Task], options: Options, seconds: float, best_only: bool) -> list[RunResult]:
    """Run each task within one budget; the last may be cut short, and later ones not run."""
    from bench.cli.progress import Progress
    from bench.run.resume import runs_of
    from bench.run.runner import check_data, run
    from bench.run.sweep import Search

    unreadable: list[tuple[Path, RecordError]] = []
    begun = [options.resume and bool(runs_of(options.out, task.candidates, unreadable)) for task in tasks]
    if options.resume and unreadable:
        raise BenchError(f"{unreadable[-1][1]}; mend it, or move it away")
    for task in tasks:  # all before the first run
        check_data(task.candidates, task.candidates.rungs, options.data)
    runs: list[RunResult] = []
    end = time.monotonic() + seconds
    with Progress() as progress:
        for task, there in zip(tasks, begun, strict=True):
            if runs and time.monotonic() >= end:
                break
            plan = partial(Search, task.candidates, task.base, task.axes, end, best_only)
            # A task that the interrupted sweep had not reached has nothing to resume.
            own = replace(
                options, overrides=task.overrides, resume=options.resume and (there or not any(begun))
            )
            runs.append(run(task.candidates, own, progress, plan))
            if runs[-1].interrupted or runs[-1].error:
                break
    return runs


def _keep_best(path: Path, task: _Task, board: Scoreboard, cut: Cut | None) -> int:
    """Write the ladder to the fastest candidate; return the exit code."""
    from bench.analysis.warnings import disturbed
    from bench.report.one_run.caption import fastest_claim
    from bench.report.winner_ladder import ladder_to

    if cut and cut.task.repetition == 1:
        say(f"not every candidate was tried, so {path} is not written; --resume goes on")
        return 4
    winner = board.fastest
    if winner is None:
        say(f"no candidate fits and trains the same, so {path} is not written")
        return 4
    with atomic_write(path, BenchError) as file:
        file.write(ladder_to(task.ladder, task.base, winner, board).encode())
    for line in fastest_claim(board, signs=False):
        typer.echo(line, err=True)
    for line in disturbed(board):
        say(f"{path} was chosen from measurements that were disturbed: {line}")
    typer.echo(f"{path} is the ladder to {winner.rung}; bench run {path} measures it anew", err=True)
    return 0

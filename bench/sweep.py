"""`bench sweep`: one rung of a ladder under many values of a toggle or two, and the ladder to the best of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench import complete
from bench.options import Overrides, Price, Repeats
from bench.terminal import fail, report_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.axis import Axis
    from bench.command import Options
    from bench.ladder import Ladder, Rung
    from bench.report.scoreboard import Scoreboard
    from bench.runner import Run


def sweep(
    ladder: Annotated[
        str,
        typer.Argument(
            metavar="LADDER[:RUNG]",
            help="A ladder, and its rung to vary (default: the last).",
            autocompletion=complete.ladders,
        ),
    ],
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="PATH=A,B,...",
            autocompletion=complete.axes,
            help="Values of toggles.X or workload.X; several --over make a grid. toggles.micro_batch_size=1,2,... "
            "(with the dots) doubles until out of memory, then finds the largest that fits.",
        ),
    ],
    data: Annotated[Path | None, typer.Option(help="Where the ladder's corpus lies.")] = None,
    best: Annotated[
        Path | None,
        typer.Option(metavar="OUT.yaml", help="Write the ladder to the fastest that fits and trains the same."),
    ] = None,
    budget: Annotated[
        float, typer.Option(min=0.1, metavar="MINUTES", help="Begin nothing that would end later than this.")
    ] = 60.0,
    repeats: Repeats = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this sweep's newest results.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    set_: Overrides = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Dense bfloat16 peak of one device, for MFU.")
    ] = None,
    price_per_hour: Price = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help="Exit 0 even if one failed.")] = False,
) -> None:
    """Measure one rung of a LADDER under several values of toggles or workload fields, and print a scoreboard.

    The first value is what the others are held to. With --best, what is far slower in the first round runs no more.
    Each value of a workload field is another task, with a results file of its own.

    Exit code: as bench run; to run out of memory is an answer here, not a failure. 4 too if --best finds none.

    Example: bench sweep ladders/h100.yaml --over toggles.micro_batch_size=8,16,... --best mine.yaml --budget 30
    """
    from bench.axis import parse_all
    from bench.command import Options
    from bench.ladder import LadderError
    from bench.place import PlaceError
    from bench.probe import ProbeError
    from bench.record import RecordError
    from bench.report.load import exit_code
    from bench.report.scoreboard import scoreboard
    from bench.resume import ResumeError
    from bench.runner import RunError
    from bench.show import show
    from gpt2.data import DataError

    given = (*(set_ or ()), *((f"protocol.repeats={repeats}",) if repeats else ()))
    options = Options(out=out, data=data, resume=resume, peak_tflops=peak_tflops, price_per_hour=price_per_hour)
    try:
        axes = parse_all(over)
        if best and (tasks := [axis.key for axis in axes if axis.of_workload]):
            raise LadderError(
                f"--best: one {tasks[0]} is no better than another, but another task; sweep toggles only"
            )
        bases = list(_bases(ladder, axes, given))
        runs = _runs(bases, [axis for axis in axes if not axis.of_workload], options, 60 * budget, bool(best))
    except (LadderError, RunError, ProbeError, ResumeError, RecordError, DataError, PlaceError) as error:
        fail(error)
    boards = [scoreboard(run.records, source=run.path) for run in runs if run.has_rungs]
    show(boards)
    for run in runs:
        report_end(run)
    code = next((code for run in runs if run.has_rungs and (code := exit_code(run.records))), 0)
    if best and boards:
        code = code or _keep_best(best, bases[0][0], bases[0][1], boards[0])
    raise typer.Exit(0 if code == 6 and allow_failures else code)


Base = tuple["Ladder", "Rung", tuple[str, ...], list[str]]
"""A ladder, its rung to vary, the overrides that make it the task it is, and what of these is swept."""


def _bases(text: str, axes: Sequence[Axis], given: Sequence[str]) -> Iterator[Base]:
    """For each task of the grid. Raises LadderError."""
    from itertools import product

    from bench.ladder import load
    from bench.schedule import full_set

    path, rung = (text, "") if Path(text).exists() else text.partition(":")[::2]
    tasks = [axis for axis in axes if axis.of_workload]
    for values in product(*(axis.values for axis in tasks)):
        task = [f"{axis.key}={value}" for axis, value in zip(tasks, values, strict=True)]
        overrides = (*given, *(f"workload.{each}" for each in task))
        ladder = load(Path(path), overrides)
        yield ladder, ladder.rung(rung) if rung else full_set(ladder.rungs)[-1], overrides, task


def _runs(bases: Sequence[Base], axes: Sequence[Axis], options: Options, seconds: float, best_only: bool) -> list[Run]:
    """A run for each task, within one budget; the last may be cut short."""
    import time
    from dataclasses import replace
    from functools import partial

    from bench.progress import Progress
    from bench.runner import run
    from bench.search import Search, as_ladder

    runs: list[Run] = []
    end = time.monotonic() + seconds
    with Progress() as progress:
        for ladder, base, overrides, task in bases:
            candidates = as_ladder(ladder, base, axes, task)
            if runs and time.monotonic() >= end:
                progress.note(f"the time budget is spent: nothing is run of {candidates.name}")
                break
            plan = partial(Search, candidates, base, axes, end, best_only)
            runs.append(run(candidates, replace(options, overrides=overrides), progress, plan))
            if runs[-1].interrupted or runs[-1].error:
                break
    return runs


def _keep_best(path: Path, ladder: Ladder, base: Rung, board: Scoreboard) -> int:
    """Write the ladder to the fastest candidate; the exit code."""
    from bench.best import ladder_to

    winner = board.fastest
    if winner is None:
        typer.echo(f"bench: no candidate fits and surely trains the same, so {path} is not written", err=True)
        return 4
    try:
        path.write_text(ladder_to(ladder, base, winner, board), encoding="utf-8")
    except OSError as error:
        fail(OSError(f"cannot write {path}: {error.strerror}"))
    alike = ", ".join(row.rung for row in board.as_fast)
    than = f" (not told from it by this run: {alike})" if alike else ""
    typer.echo(f"{winner.rung} is the fastest that fits and trains the same{than}; {path} leads to it", err=True)
    return 0

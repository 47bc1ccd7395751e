"""The command `bench`: its entry point, `bench run` and `bench plan`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import machine, quick, report, sweep, turns
from bench.cli.options import (
    Ablate,
    Corpus,
    LadderFile,
    Minutes,
    NodeRank,
    Nodes,
    Overrides,
    PeakTflops,
    Price,
    Rendezvous,
    Repeats,
    ResultsFolder,
    RungNames,
    Until,
    load_with_options,
    names,
)
from bench.cli.terminal import after_measuring, exiting_on_errors, print_brief, report_end, say
from bench.errors import BenchError
from gpt2.terminal import Version, paragraphs, surroundings, use_streams

app = typer.Typer(
    name="bench",
    help="How fast does GPT-2 train on this machine, and what does each optimisation buy?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Begin with: bench quick",
)


FOREIGN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Rank variables of a cluster's launcher, dropped because each rung starts ranks of its own."""


@app.callback()
def options(
    version: Version = False,
) -> None:
    """Options of bench itself."""


def main() -> None:
    """Entry point of the console script."""
    use_streams()
    for name in FOREIGN:
        os.environ.pop(name, None)
    with surroundings("bench"):
        app(prog_name="bench")


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command of bench; its docstring is its help."""
    return app.command(help=paragraphs(function.__doc__ or ""))(exiting_on_errors(function))


@command
def run(
    ladder: LadderFile,
    data: Corpus = None,
    rungs: RungNames = None,
    repeats: Repeats = None,
    until: Until = None,
    minutes: Minutes = None,
    ablate: Ablate = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with this ladder's newest results, running what is missing."),
    ] = False,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
    peak_tflops: PeakTflops = None,
    price_per_hour: Price = None,
    compile_cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep compiled code there, and use what an earlier run left."),
    ] = None,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    rdzv: Rendezvous = None,
    allow_failures: Annotated[
        bool, typer.Option("--allow-failures", help="Exit 0 where it would be 6.")
    ] = False,
) -> None:
    """Measure every rung of a LADDER, and print the scoreboard.

    Over several nodes, run the same on each, with its own --node-rank; see docs/nodes.md.

    Exit code: 0 all as asked; 2 wrong ladder or usage; 4 a rung's loss differs, its ranks differ, it
    recompiled, or the outcome that the ladder expects of it did not occur; 6 a rung failed, timed out or ran
    out of memory unexpectedly, or none is supported here; 130 interrupted (the records are kept).

    Example: bench run ladders/cpu.yaml --data input.txt --repeats 5 --ablate
    """
    from bench.analysis.scoreboard import scoreboard
    from bench.cli.progress import Progress
    from bench.run.command import Options
    from bench.run.nodes.agent import take_part
    from bench.run.nodes.topology import place
    from bench.run.runner import run

    loaded, overrides = load_with_options(ladder, set_, repeats, until, ablate, minutes)
    options = Options(
        out=out,
        data=data,
        rungs=names(rungs),
        overrides=tuple(overrides),
        ablate=ablate,
        resume=resume,
        peak_tflops=peak_tflops,
        price_per_hour=price_per_hour,
        compile_cache=compile_cache,
        minutes=minutes,
        place=place(nnodes, node_rank, rdzv),
    )
    with Progress() as progress:
        if options.place and options.place.node:
            node_exit = take_part(loaded, options, options.place, progress)
            say(str(node_exit))
            raise typer.Exit(node_exit.exit_code)
        measured = run(loaded, options, progress)
    with after_measuring([measured.path]):
        if measured.has_rungs:
            report.show([scoreboard(measured.records, source=measured.path)])
    code = report_end(measured)
    raise typer.Exit(0 if code == 6 and allow_failures else code)


@command
def plan(
    ladder: LadderFile,
    rungs: RungNames = None,
    repeats: Repeats = None,
    until: Until = None,
    ablate: Ablate = False,
    set_: Overrides = None,
    data: Annotated[Path | None, typer.Option("--data", help="As for bench run; no corpus is read.")] = None,
    chip: Annotated[
        str | None,
        typer.Option(help='Whether it fits into another chip, such as "H100 SXM".'),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All of each cell, and all notes.")] = False,
) -> None:
    """Say what a LADDER would do here, and run nothing.

    Prints for each rung what it changes, tokens per step, an estimate of the memory per device, and whether
    this machine supports it.

    Example: bench plan ladders/h100.yaml --chip "H100 SXM"
    """
    from bench.cli import dry_run
    from gpt2.hardware.peaks import named

    loaded, _ = load_with_options(ladder, set_, repeats, until, ablate)
    chosen = loaded.chosen(names(rungs))
    try:
        other = named(chip) if chip is not None else None
    except ValueError as error:
        raise BenchError(str(error)) from None
    print_brief(dry_run.plan(loaded, chosen, other, ablate=ablate), full=full)


command(quick.quick)
command(machine.ladders)
command(sweep.sweep)
command(turns.turns)
command(report.report)
command(report.compare)
command(report.trainings)
command(machine.doctor)
command(machine.roofline)

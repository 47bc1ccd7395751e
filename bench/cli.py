"""The command line: `bench run`, `bench plan`, `bench report`, `bench roofline`, `bench doctor`."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bench.options import (
    Ablate,
    LadderFile,
    NodeRank,
    Nodes,
    Overrides,
    Price,
    Rendezvous,
    Repeats,
    RungNames,
    Until,
    load_as_asked,
    names,
)

if TYPE_CHECKING:
    from rich.console import Console

    from bench.record import Record
    from bench.report.scoreboard import Scoreboard

app = typer.Typer(
    name="bench",
    help="How fast does GPT-2 train on this machine, and what does each optimisation buy?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What some clusters set for a program that is one rank of theirs; here each rung has ranks of its own."""


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gpt2-bench {version('gpt2-bench')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of bench itself."""


def main() -> None:
    """Entry point of the console script."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    try:
        app()
    except OSError as error:  # of stdout: what a command itself reads and writes, it answers for
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"bench: cannot write the output: {error.strerror}", err=True)
        os._exit(6)  # without the interpreter's own attempt to write the rest


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"bench: {error}", err=True)
    raise typer.Exit(2) from None


@app.command()
def run(
    ladder: LadderFile,
    data: Annotated[Path | None, typer.Option(help="Where the ladder's corpus lies.")] = None,
    rungs: RungNames = None,
    repeats: Repeats = None,
    until: Until = None,
    ablate: Ablate = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with this ladder's newest results, running what is missing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    set_: Overrides = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Dense bfloat16 peak of one device, for MFU.")
    ] = None,
    price_per_hour: Price = None,
    nnodes: Nodes = None,
    node_rank: NodeRank = None,
    rdzv: Rendezvous = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help="Exit 0 even if a rung failed.")] = False,
) -> None:
    """Measure every rung of a LADDER, and print the scoreboard.

    Over several nodes, run the same on each, with its own --node-rank; see docs/nodes.md.

    Exit code: 0 all as asked; 2 wrong ladder or usage; 4 a rung's loss differs, its ranks do, it recompiled, or the
    outcome that the ladder expects of it did not come; 6 a rung failed, timed out or ran out of memory unexpectedly;
    130 interrupted (what was measured is kept).

    Example: bench run ladders/cpu.yaml --data input.txt --repeats 5 --ablate
    """
    from bench.follower import follow
    from bench.ladder import LadderError
    from bench.place import PlaceError, place
    from bench.probe import ProbeError
    from bench.progress import Progress
    from bench.record import RecordError
    from bench.report.load import claims_refuted, exit_code
    from bench.report.scoreboard import scoreboard
    from bench.resume import ResumeError
    from bench.runner import Options, RunError, run
    from gpt2.data import DataError

    try:
        loaded, overrides = load_as_asked(ladder, set_, repeats, until, ablate)
        options = Options(
            out=out,
            data=data,
            rungs=names(rungs),
            overrides=tuple(overrides),
            ablate=ablate,
            resume=resume,
            peak_tflops=peak_tflops,
            price_per_hour=price_per_hour,
            place=place(nnodes, node_rank, rdzv),
        )
        with Progress() as progress:
            if options.place and options.place.node:
                farewell = follow(loaded, options, options.place, progress)
                typer.echo(f"bench: {farewell}", err=True)
                raise typer.Exit(farewell.exit_code)
            outcome = run(loaded, options, progress)
    except (LadderError, RunError, ProbeError, ResumeError, RecordError, DataError, PlaceError) as error:
        _fail(error)
    if any(record.kind == "cumulative" for record in outcome.records):
        _show(outcome.records, outcome.path)
    ok = sum(record.status == "ok" for record in outcome.records)
    so_far = " before the run ended" if outcome.interrupted or outcome.error else ""
    typer.echo(f"{ok} of {len(outcome.records)} processes{so_far} measured; records in {outcome.path}", err=True)
    if outcome.error:
        typer.echo(f"bench: {outcome.error}", err=True)
        raise typer.Exit(6)
    if outcome.interrupted:
        typer.echo("bench: interrupted; the same command with --resume runs what is missing", err=True)
        raise typer.Exit(130)
    code = exit_code(outcome.records)
    if code == 4:
        for wrong in claims_refuted(scoreboard(outcome.records)):
            typer.echo(f"bench: {wrong}", err=True)
    raise typer.Exit(0 if code == 6 and allow_failures else code)


@app.command()
def plan(
    ladder: LadderFile,
    rungs: RungNames = None,
    repeats: Repeats = None,
    until: Until = None,
    ablate: Ablate = False,
    set_: Overrides = None,
    chip: Annotated[str | None, typer.Option(help='Whether it fits into another chip, such as "H100 SXM".')] = None,
) -> None:
    """Say what a LADDER would do here, and run nothing.

    Prints for each rung what it changes, tokens per step, an estimate of the memory per device, and whether this
    machine supports it.

    Example: bench plan ladders/h100.yaml --chip "H100 SXM"
    """
    from bench.ladder import LadderError
    from bench.plan import table
    from gpt2.peaks import named

    try:
        loaded, _ = load_as_asked(ladder, set_, repeats, until, ablate)
        chosen = loaded.chosen(names(rungs))
        other = named(chip) if chip else None
    except (LadderError, ValueError) as error:
        _fail(error)
    _console().print(table(loaded, chosen, other, ablate=ablate))


@app.command()
def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results files, or folders: the newest full run of each machine, ladder and model."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write scoreboard.md into this folder.")] = None,
    update: Annotated[
        Path | None, typer.Option(help="Rewrite the part of this file between the two scoreboard markers.")
    ] = None,
    price_per_hour: Price = None,
) -> None:
    """Show the scoreboards of RESULTS (default: results/).

    Example: bench report results/ --markdown --out reports/ --update README.md
    """
    from bench.report.tables import to_markdown
    from bench.report.text import rewrite

    boards = _boards(results or [Path("results")])
    if not (markdown or out or update):
        _print(boards, price_per_hour)
        return
    text = "\n".join(to_markdown(board, price_per_hour) for board in boards)
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / "scoreboard.md").write_text(f"# Scoreboard\n\n{text}", encoding="utf-8")
        if update:
            rewrite(update, text)
    except OSError as error:
        _fail(OSError(f"cannot write {error.filename}: {error.strerror}"))
    except ValueError as error:
        _fail(error)
    if markdown and not (out or update):
        typer.echo(text, nl=False)


@app.command()
def doctor(
    ladder: Annotated[
        Path | None, typer.Argument(metavar="[LADDER]", help="Also hold memory to what its rungs need on a CPU.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, where room is looked for.")] = Path("results"),
) -> None:
    """Say what about this machine will spoil a measurement, and what to do about it.

    Takes about three seconds on a quiet machine and changes nothing. Exit code: 0 whatever it finds; it informs.

    Example: bench doctor ladders/cpu.yaml
    """
    from bench.doctor import diagnose, table
    from bench.ladder import LadderError, load
    from bench.probe import ProbeError, probe

    try:
        asked = probe(load(ladder).rungs[-1].toggles.device, ladder) if ladder else None
    except (LadderError, ProbeError) as error:
        _fail(error)
    needed = max(asked.memory_bytes.values(), default=None) if asked else None
    _console().print(table(diagnose(out, needed)))


@app.command()
def roofline(
    ladder: Annotated[
        Path | None, typer.Argument(metavar="[LADDER]", help="Also show how near to the ceiling its rungs come.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, mps or xla; default: that of the LADDER's last rung, else cpu.")
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Where the LADDER was measured: a results file, or a folder of machines.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    seconds: Annotated[float, typer.Option(min=0.001, help="Timing of each product, after as much heating up.")] = 0.3,
) -> None:
    """Measure the matrix products and the memory of this machine: what no rung can beat.

    With a LADDER, the fewest milliseconds per optimiser step that each rung could take here, and the share of that
    which it reached. Exit code: 0 measured; 2 wrong ladder or usage; 6 not measured; 130 interrupted.

    Example: bench roofline ladders/cpu.yaml
    """
    from bench.ladder import LadderError, load
    from bench.probe import ProbeError
    from bench.progress import Progress
    from bench.report.roofline import bound_table, ceiling_table, ladder_lines
    from bench.roofline import measure, measured
    from bench.runner import RunError

    try:
        loaded = load(ladder) if ladder else None
        with Progress() as progress:
            path, record = measure(loaded, device, out, seconds, progress)
    except (LadderError, ProbeError, RunError) as error:
        _fail(error)
    if record.ceiling is None:
        raise typer.Exit(130 if record.status == "interrupted" else 6)
    _console().print(ceiling_table(record.ceiling))
    if loaded:
        machine = record.environment.machine
        board, note = measured(loaded, results, machine)
        lines = ladder_lines(loaded, str(record.toggles.all["device"]), record.ceiling, board)
        _console().print(bound_table(f"{loaded.name} on {machine}", lines, [note]))
    typer.echo(f"record in {path}", err=True)


def _boards(paths: list[Path]) -> list[Scoreboard]:
    from bench.record import RecordError
    from bench.report.load import load_boards

    try:
        boards, warnings = load_boards(paths)
    except RecordError as error:
        _fail(error)
    for warning in warnings:
        typer.echo(f"bench: {warning}", err=True)
    return boards


def _show(records: list[Record], path: Path) -> None:
    """The scoreboard of records in memory: one that a full disk refused is among them."""
    from bench.report.scoreboard import scoreboard

    _print([scoreboard(records, source=path)])


def _print(boards: list[Scoreboard], price_per_hour: float | None = None) -> None:
    from bench.report.tables import to_terminal

    console = _console()
    for board in boards:
        console.print(to_terminal(board, price_per_hour, console.width))


def _console() -> Console:
    """For tables on stdout; wide where nobody looks, so that no cell is folded in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=200)


if __name__ == "__main__":
    main()

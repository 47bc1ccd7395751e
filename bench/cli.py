"""The command line: `bench run`, `bench plan`, `bench report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bench.report.scoreboard import Scoreboard

app = typer.Typer(
    name="bench",
    help="How fast does GPT-2 train on this machine, and what does each optimisation buy?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

LadderFile = Annotated[Path, typer.Argument(metavar="LADDER", help="A ladder, such as ladders/smoke.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override workload.X, protocol.X or toggles.X (every rung)."),
]
RungNames = Annotated[str | None, typer.Option("--rungs", metavar="A,B", help="Only the rungs of these names.")]


def main() -> None:
    """Entry point of the console script."""
    app()


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"bench: {error}", err=True)
    raise typer.Exit(2) from None


@app.command()
def run(
    ladder: LadderFile,
    data: Annotated[Path | None, typer.Option(help="Where the ladder's corpus lies.")] = None,
    rungs: RungNames = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Rounds over all rungs.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    set_: Overrides = None,
    peak_tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Dense bfloat16 peak of one device, for MFU.")
    ] = None,
    allow_failures: Annotated[bool, typer.Option("--allow-failures", help="Exit 0 even if a rung failed.")] = False,
) -> None:
    """Measure every rung of a LADDER, and print the scoreboard.

    Exit code: 0 all as asked; 2 wrong ladder or usage; 4 a rung's loss differs; 6 a rung failed, timed out or ran
    out of memory unexpectedly; 130 interrupted (what was measured is kept).

    Example: bench run ladders/cpu.yaml --data input.txt --repeats 5
    """
    from bench.ladder import LadderError, load
    from bench.progress import Progress
    from bench.report.load import exit_code
    from bench.runner import Options, RunError, run
    from gpt2.data import DataError

    overrides = [*(set_ or []), *([f"protocol.repeats={repeats}"] if repeats else [])]
    try:
        loaded = load(ladder, overrides)
        options = Options(
            out=out,
            data=data,
            rungs=_names(rungs),
            overrides=tuple(overrides),
            peak_tflops=peak_tflops,
        )
        with Progress() as progress:
            outcome = run(loaded, options, progress)
    except (LadderError, RunError, DataError) as error:
        _fail(error)
    if not outcome.records:  # interrupted before the first process
        raise typer.Exit(130)
    _print(_boards([outcome.path]))
    ok = sum(record.status == "ok" for record in outcome.records)
    typer.echo(f"{ok} of {len(outcome.records)} processes measured; records in {outcome.path}", err=True)
    if outcome.interrupted:
        raise typer.Exit(130)
    code = exit_code(outcome.records)
    raise typer.Exit(0 if code == 6 and allow_failures else code)


@app.command()
def plan(ladder: LadderFile, rungs: RungNames = None, set_: Overrides = None) -> None:
    """Say what a LADDER would do here, and run nothing.

    Prints for each rung what it changes, tokens per step, an estimate of the memory per device, and whether this
    machine supports it.

    Example: bench plan ladders/h100.yaml
    """
    from bench.ladder import LadderError, load
    from bench.plan import table

    try:
        loaded = load(ladder, set_ or [])
        chosen = loaded.chosen(_names(rungs))
    except LadderError as error:
        _fail(error)
    _console().print(table(loaded, chosen))


@app.command()
def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Results files, or folders: of these, the newest full run of each machine and ladder."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write scoreboard.md into this folder.")] = None,
    update: Annotated[
        Path | None, typer.Option(help="Rewrite the part of this file between the two scoreboard markers.")
    ] = None,
) -> None:
    """Show the scoreboards of RESULTS (default: results/).

    Example: bench report results/ --markdown --out reports/ --update README.md
    """
    from bench.report.tables import to_markdown

    boards = _boards(results or [Path("results")])
    if not (markdown or out or update):
        _print(boards)
        return
    text = "\n".join(to_markdown(board) for board in boards)
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / "scoreboard.md").write_text(f"# Scoreboard\n\n{text}", encoding="utf-8")
        if update:
            _rewrite(update, text)
    except OSError as error:
        _fail(OSError(f"cannot write {error.filename}: {error.strerror}"))
    if markdown and not (out or update):
        typer.echo(text, nl=False)


MARKERS = ("<!-- scoreboard: bench report --update rewrites what follows -->", "<!-- end of scoreboard -->")


def _rewrite(path: Path, text: str) -> None:
    before, start, rest = path.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (start and end):
        _fail(ValueError(f"{path}: has no lines {MARKERS[0]} and {MARKERS[1]} to write between"))
    path.write_text(f"{before}{start}\n\n{text}\n{end}{after}", encoding="utf-8")


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


def _print(boards: list[Scoreboard]) -> None:
    from bench.report.tables import to_terminal

    for board in boards:
        _console().print(to_terminal(board))


def _console() -> Console:
    """For tables on stdout; wide where nobody looks, so that no cell is folded in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _names(rungs: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in rungs.split(",")) if rungs is not None else ()


if __name__ == "__main__":
    main()

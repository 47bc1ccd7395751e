"""Commands that read results: `bench report`, `bench compare` and `bench trainings`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Markdown, Plots, Price
from bench.cli.terminal import cannot_write, print_brief, print_parts, say
from bench.errors import BenchError
from gpt2.files.atomic import atomic_text

if TYPE_CHECKING:
    from bench.analysis.scoreboard import Scoreboard
    from bench.report.assembly import Report


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results files, or folders: the newest full run of each machine, ladder and model there."
        ),
    ] = None,
    markdown: Markdown = False,
    csv: Annotated[bool, typer.Option("--csv", help="All values unrounded, a line for each rung.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    html: Annotated[bool, typer.Option("--html", help="One page that needs no network, into --out.")] = False,
    plots: Plots = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for scoreboard.md, a page for each run, and what else is asked for."),
    ] = None,
    update: Annotated[
        Path | None, typer.Option(help="Rewrite the part of this file between the two scoreboard markers.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:RUNG",
            help="Also compare the rungs of all RESULTS with this rung, in one table.",
        ),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All tables and columns, with how they are measured.")
    ] = False,
    notes: Annotated[
        bool, typer.Option("--notes", help="All warnings, not only the three that matter most.")
    ] = False,
    price_per_hour: Price = None,
) -> None:
    """Show what RESULTS (default: results/) come to: of one run its screen, of several a line for each.

    --full shows all tables, as --out writes them, those of published results of others (results/published/)
    included. With --baseline, one more table chains the rungs of all runs, in the order in which RESULTS
    names them.

    Example: bench report results/ --plots --out reports/ --update README.md
    """
    from bench.analysis.select import load_boards, load_published
    from bench.analysis.several_runs.rungs import build_chain, load_baseline
    from bench.analysis.turns import load_turns
    from bench.report.assembly import assemble, short, short_markdown, to_markdown, to_terminal
    from bench.report.folder import rewrite

    if sum((markdown, csv, json)) > 1 and not out:
        raise BenchError(
            "--markdown, --csv and --json exclude each other on the terminal; choose one, or give --out"
        )
    if (plots or html) and not out:
        raise BenchError("--plots and --html need a folder to write into; give --out reports/")
    paths = results or [Path("results")]
    published, left_out = load_published(paths)
    passed_over: list[Scoreboard] = []
    boards, warnings = load_boards(paths, needed=not published, passed_over=passed_over)
    chain = build_chain(boards, load_baseline(baseline)) if baseline is not None else None
    turns, unread = load_turns(paths)
    for warning in (*left_out, *warnings, *unread):
        say(warning)
    if notes and (len(boards) != 1 or baseline or full or markdown or csv or json or out or update):
        raise BenchError("--notes adds to the screen of one run: name its file, and no other output")
    assembled = assemble(boards, published, price_per_hour, chain, passed_over, turns)
    if not (markdown or csv or json or out or update):
        return print_parts(
            partial(to_terminal, assembled) if full else partial(short, assembled, notes=notes)
        )
    brief = to_markdown(assembled) if full else short_markdown(assembled)
    tables: dict[str, str] = {}
    if csv or json:
        from bench.report.export import to_csv, to_json

        tables |= {"scoreboard.csv": to_csv(boards, chain)} if csv else {}
        tables |= {"scoreboard.json": to_json(boards, chain)} if json else {}
    try:
        if out:
            _write(assembled, tables, out, html=html, plots=plots)
        if update:
            rewrite(update, brief)
    except OSError as error:
        raise cannot_write(error, out) from None
    if not out and (tables or not update):
        typer.echo(next(iter(tables.values()), brief), nl=False)
    return None


def _write(assembled: Report, tables: dict[str, str], out: Path, *, html: bool, plots: bool) -> None:
    """Write the folder of a report. Raises OSError."""
    from bench.report.folder import files

    def drawn(picture: str) -> bool:
        return plots or (out / f"{picture}.svg").exists()

    for name, text in {**files(assembled, drawn=drawn), **tables}.items():
        atomic_text(out / name, text)
    if html:
        from bench.report.page import page

        atomic_text(out / "index.html", page(assembled))
    if plots:
        from bench.report.plots.pictures import draw

        for file in draw(assembled.boards, out, assembled.figures, assembled.passed_over):
            typer.echo(f"drew {file}", err=True)


def show(boards: Sequence[Scoreboard]) -> None:
    """Print the scoreboards of a run that has just ended."""
    from bench.report.one_run.screen import screen

    for board in boards:
        print_parts(partial(screen, board))


def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Results files or folders; FILE:RUNG is one rung of them.",
        ),
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if", metavar="'tps<-5%'", help="Exit 3 if the whole interval of B's change is beyond."
        ),
    ] = None,
    markdown: Markdown = False,
    full: Annotated[bool, typer.Option("--full", help="All columns and notes.")] = False,
) -> None:
    """Show runs side by side: the speed-up of the others over A, and what differs between them.

    Rungs are paired by their toggles, not by name; A:RUNG and B:RUNG pair whatever they name.

    Exit code: 0 compared; 2 wrong usage, or nothing to compare; 3 a change that --fail-if names is confirmed:
    the whole interval lies beyond the bound; 6 a rung has no valid speed on one side, so --fail-if cannot
    tell. A rung that is out of memory, or not supported, on both sides is ignored.

    Example: bench compare results/before results/after --fail-if 'tps<-5%'
    """
    from bench.analysis.several_runs import compare as side_by_side
    from bench.report.several_runs.comparison import comparison_brief, comparison_table

    if len(results) < 2:
        raise BenchError("bench compare takes two results at least, such as results/before results/after")
    left_out: list[str] = []
    conditions = [side_by_side.Condition.parse(text) for text in dict.fromkeys(fail_if or ())]
    ladders = side_by_side.sides(results, left_out)
    for warning in left_out:
        say(warning)
    by_ladder = [[side_by_side.compare(first, other) for other in others] for first, *others in ladders]
    for comparisons in by_ladder:
        if markdown:
            typer.echo(comparison_table(comparisons).to_markdown("###"))
        else:
            print_brief(comparison_brief(comparisons), full=full)
    if conditions:
        compared = [each for comparisons in by_ladder for each in comparisons]
        code, reasons = side_by_side.judge(compared, conditions)
        for reason in reasons:
            say(reason)
        raise typer.Exit(code)


def trainings(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or that hold such.")],
    markdown: Markdown = False,
    plots: Plots = False,
    out: Annotated[
        Path | None, typer.Option(help="Write trainings.md, and plots if asked, into this folder.")
    ] = None,
) -> None:
    """Show what long RUNS of gpt2 train learnt, in what time, and HellaSwag beside what is published.

    Example: bench trainings runs --plots --out reports/
    """
    from bench.report.several_runs.trainings import load, runs_in, tables

    if plots and not out:
        raise BenchError("--plots needs a folder to draw into; give --out reports/")
    folders = [run for folder in runs for run in runs_in(folder)]
    left_out: list[str] = []
    loaded = load(folders, left_out if len(folders) > 1 else None)
    for line in left_out:
        say(line)
    if not loaded:
        raise BenchError("none of these folders holds a run of gpt2 train")
    shown = tables(loaded)
    text = "\n".join(table.to_markdown("##") for table in shown)
    if out:
        try:
            atomic_text(out / "trainings.md", f"# Long runs\n\n{text}")
            if plots:
                from bench.report.plots.trainings import draw

                for file in draw(loaded, out):
                    typer.echo(f"drew {file}", err=True)
        except OSError as error:
            raise cannot_write(error, out) from None
    elif markdown:
        typer.echo(text, nl=False)
    else:
        for table in shown:
            print_parts(table.to_terminal)

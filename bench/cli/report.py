"""Commands that read results: `bench report` and `bench compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli import completion as complete
from bench.cli.options import Price
from bench.cli.terminal import console, fail, say

if TYPE_CHECKING:
    from bench.analysis.scoreboard import Scoreboard
    from bench.report.assembly import Report


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Results files, or folders: the newest full run of each machine, ladder and model."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="All figures unrounded, a line for each rung.")] = False,
    json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
    html: Annotated[bool, typer.Option("--html", help="One page that needs no network, into --out.")] = False,
    plots: Annotated[
        bool, typer.Option("--plots", help="Draw plots into the folder that --out names.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write scoreboard.md, and what else is asked for, into this folder.")
    ] = None,
    update: Annotated[
        Path | None, typer.Option(help="Rewrite the part of this file between the two scoreboard markers.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:RUNG",
            help="Chain the rungs of all RESULTS in one table, held to this rung.",
            autocompletion=complete.results_and_rungs,
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

    --full shows all tables, as --out writes them. Figures that others have published (results/published/) stand in
    tables of their own. With --baseline, one table more chains the rungs of all runs, in the order in which RESULTS
    names them.

    Example: bench report results/ --markdown --plots --out reports/ --update README.md
    """
    from bench.analysis.cross_run import build_chain, load_baseline
    from bench.analysis.select import load_boards, load_published
    from bench.format import rewrite
    from bench.records.record import RecordError
    from bench.report.assembly import assemble, short_markdown, to_markdown

    if sum((markdown, csv, json)) > 1 and not out:
        fail(
            ValueError(
                "--markdown, --csv and --json exclude each other on the terminal; choose one, or give --out"
            )
        )
    if (plots or html) and not out:
        fail(ValueError("--plots and --html need a folder to write into; give --out reports/"))
    paths = results or [Path("results")]
    try:
        figures, left_out = load_published(paths)
        boards, warnings = load_boards(paths, needed=not figures)
        chain = build_chain(boards, load_baseline(baseline)) if baseline is not None else None
    except RecordError as error:
        fail(error)
    for warning in (*left_out, *warnings):
        say(warning)
    assembled = assemble(boards, figures, price_per_hour, chain)
    if not (markdown or csv or json or out or update):
        return _print(assembled, full=full, notes=notes)
    texts = {"md": to_markdown(assembled)}
    brief = texts["md"] if full else short_markdown(assembled)
    if csv or json:
        from bench.report.export import to_csv, to_json

        texts |= {"csv": to_csv(boards, chain)} if csv else {}
        texts |= {"json": to_json(boards, chain)} if json else {}
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
            for kind, text in texts.items():
                heading = "# Scoreboard\n\n" if kind == "md" else ""
                (out / f"scoreboard.{kind}").write_text(heading + text, encoding="utf-8")
        if out and html:
            from bench.report.page import page

            (out / "index.html").write_text(page(assembled), encoding="utf-8")
        if out and plots:
            from bench.report.plots.pictures import draw

            for file in draw(boards, out):
                typer.echo(f"drew {file}", err=True)
        if update:
            rewrite(update, brief)
    except OSError as error:
        fail(OSError(f"cannot write {error.filename}: {error.strerror}"))
    except ValueError as error:
        fail(error)
    if not (out or update):
        typer.echo(texts["csv"] if csv else texts["json"] if json else brief, nl=False)
    return None


def show(boards: Sequence[Scoreboard]) -> None:
    """Print what was just measured."""
    from bench.report.assembly import assemble

    _print(assemble(boards))


def _print(assembled: Report, *, full: bool = False, notes: bool = False) -> None:
    from bench.report.assembly import short, to_terminal

    terminal = console()
    parts = to_terminal(assembled, terminal.width) if full else short(assembled, terminal.width, notes=notes)
    for part in parts:
        terminal.print(part)


def compare(
    results: Annotated[
        list[str],
        typer.Argument(
            metavar="A B...",
            help="Results files or folders; FILE:RUNG is one rung of them.",
            autocompletion=complete.results_and_rungs,
        ),
    ],
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if", metavar="'tps<-5%'", help="Exit 3 if B's change of tps or memory is surely beyond."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")
    ] = False,
) -> None:
    """Show runs side by side: how many times as fast as A the others are, and what differs between them.

    Rungs are paired by what they switch on, not by name; A:RUNG and B:RUNG pair whatever they name.

    Exit code: 0 compared; 2 wrong usage, or nothing to compare; 3 a change that --fail-if names is confirmed:
    the whole interval lies beyond the bound; 6 a rung has no speed that ranks on one side, so --fail-if
    cannot tell. What was out of memory, or unsupported, on both sides is passed over.

    Example: bench compare results/before results/after --fail-if 'tps<-5%'
    """
    from bench.analysis import compare as side_by_side
    from bench.records.record import RecordError
    from bench.report.comparison import comparison_table

    if len(results) < 2:
        fail(ValueError("bench compare takes two results at least, such as results/before results/after"))
    try:
        conditions = [side_by_side.Condition.parse(text) for text in fail_if or ()]
        left_out: list[str] = []
        ladders = side_by_side.sides(results, left_out)
    except (RecordError, ValueError) as error:
        fail(error)
    for warning in left_out:
        say(warning)
    found = [[side_by_side.compare(first, other) for other in others] for first, *others in ladders]
    terminal = console()
    for comparisons in found:
        table = comparison_table(comparisons)
        if markdown:
            typer.echo(table.to_markdown("###"))
        else:
            for part in table.to_terminal(terminal.width):
                terminal.print(part)
    if conditions:
        try:
            code, said = side_by_side.judge(
                [each for comparisons in found for each in comparisons], conditions
            )
        except ValueError as error:
            fail(error)
        for line in said:
            say(line)
        raise typer.Exit(code)

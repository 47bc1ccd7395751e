"""`bench trainings`: long runs of `gpt2 train` side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.terminal import cannot_write, print_table
from bench.errors import BenchError


def trainings(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, such as runs/mini-shakespeare.")],
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")
    ] = False,
    plots: Annotated[
        bool, typer.Option("--plots", help="Draw plots into the folder that --out names.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write trainings.md, and plots if asked, into this folder.")
    ] = None,
) -> None:
    """Show what long RUNS of gpt2 train learnt, in what time, and HellaSwag beside what is published.

    Example: bench trainings runs/* --plots --out reports/
    """
    from bench.records.record import RecordError
    from bench.report.trainings import load, tables, told_apart

    if plots and not out:
        raise BenchError("--plots needs a folder to draw into; give --out reports/")
    loaded = []
    for folder in runs:
        try:
            loaded += load([folder])
        except RecordError as error:
            if len(runs) == 1:
                raise
            typer.echo(f"bench: {error}; left out", err=True)
    if not loaded:
        raise BenchError("none of these folders holds a run of gpt2 train")
    loaded = told_apart(loaded)
    shown = tables(loaded)
    text = "\n".join(table.to_markdown("##") for table in shown)
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "trainings.md").write_text(f"# Long runs\n\n{text}", encoding="utf-8")
            if plots:
                from bench.report.plots.trainings import draw

                for file in draw(loaded, out):
                    typer.echo(f"drew {file}", err=True)
        except OSError as error:
            raise cannot_write(error) from None
    elif markdown:
        typer.echo(text, nl=False)
    else:
        for table in shown:
            print_table(table)

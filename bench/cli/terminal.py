"""How commands speak to a person. Imports rich only when there is a table to show."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from bench.run.runner import Run


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def fail(error: Exception) -> NoReturn:
    say(str(error))
    raise typer.Exit(2) from None


def say(text: str) -> None:
    """A line to stderr; no name from a file may steer the terminal."""
    typer.echo(f"bench: {CONTROL.sub(' ', text)}", err=True)


def console() -> Console:
    """For tables on stdout; wide where nobody looks, so that no cell is folded in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=200)


@contextlib.contextmanager
def after_measuring(paths: Sequence[Path]) -> Iterator[None]:
    """Show what was measured; if that goes wrong, say how it can be shown again, and end as the measuring
    did.
    """
    try:
        yield
    except BrokenPipeError:  # whoever read the table has seen enough
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        say(
            f"the table could not be shown ({why}); what was measured is kept in "
            f"{' and '.join(map(str, paths))}"
        )


def report_end(run: Run) -> None:
    """Say how a run ended; if early, leave with that exit code."""
    from bench.analysis.select import nothing_supported

    ok = sum(record.status == "ok" for record in run.records)
    so_far = "; the run ended early" if run.interrupted or run.error else ""
    begun = sum(record.begun for record in run.records)
    planned = f"about {begun + run.cut.left}" if run.cut else begun
    typer.echo(f"{ok} of {planned} processes measured{so_far}; records in {run.path}", err=True)
    if nothing_supported(run.records):
        typer.echo("bench: none of these rungs is supported here; the table says why", err=True)
    if run.cut:
        typer.echo(f"bench: {run.cut.why}; the same command with --resume goes on", err=True)
    if run.error:
        typer.echo(f"bench: {run.error}", err=True)
        raise typer.Exit(6)
    if run.interrupted:
        typer.echo("bench: interrupted; the same command with --resume runs what is missing", err=True)
        raise typer.Exit(130)

"""What commands print to a person. Imports rich only where there is a table to show."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import typer

from bench.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from bench.report.brief import Brief
    from bench.run.runner import RunResult

P = ParamSpec("P")
T = TypeVar("T")

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def exiting_on_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Make a command print the message of a BenchError and exit with code 2."""

    @wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except BenchError as error:
            say(str(error))
            raise typer.Exit(2) from None

    return checked


def say(text: str) -> None:
    """Print a line to stderr, without control characters, which a name in a file may contain."""
    typer.echo(f"bench: {CONTROL.sub(' ', text)}", err=True)


def cannot_write(error: OSError, path: Path | None = None) -> BenchError:
    """Return the error of a command whose output could not be written."""
    return BenchError(f"cannot write {error.filename or path or 'the output'}: {error.strerror}")


def console() -> Console:
    """Return a console for tables on stdout; wide where it is no terminal, so that no cell is folded."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=200)


def print_parts(parts: Callable[[int], Iterable[RenderableType]]) -> None:
    """Print on stdout what `parts` makes of the width of the terminal, at once: `| head` may stop reading."""
    from rich.console import Group

    terminal = console()
    terminal.print(Group(*parts(terminal.width)))


def print_brief(brief: Brief, *, full: bool = False) -> None:
    """Print an answer on stdout."""
    print_parts(partial(brief.lines, full=full))


@contextlib.contextmanager
def after_measuring(paths: Sequence[Path]) -> Iterator[None]:
    """Report an error in showing results without failing: the records in `paths` are complete."""
    try:
        yield
    except BrokenPipeError:  # whoever read the table has seen enough
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        files = " and ".join(map(str, paths))
        say(f"the table could not be shown ({reason}); the records are kept in {files}")


def report_end(run: RunResult) -> int:
    """Say how a run ended, and which claims it refutes; return its exit code.

    Raises typer.Exit if it ended early.
    """
    from bench.analysis.scoreboard import scoreboard
    from bench.analysis.select import claims_refuted, exit_code, nothing_supported
    from bench.ladder.shipped import QUICK

    ok = sum(record.status == "ok" for record in run.records)
    ended_early = "; the run ended early" if run.interrupted or run.error else ""
    begun = sum(record.begun for record in run.records)
    planned = f"about {begun + run.cut.left}" if run.cut else begun
    kept = f"; records in {run.path}" if run.records else ""
    typer.echo(f"{ok} of {planned} processes measured{ended_early}{kept}", err=True)
    if nothing_supported(run.records):
        say("none of these rungs is supported here; the table says why")
    if run.cut:
        say(f"{run.cut.why}; the same command with --resume goes on")
    if run.error:
        say(run.error)
        raise typer.Exit(6)
    if run.interrupted:
        again = run.records and run.records[0].ladder == QUICK
        how = "measures all anew" if again else "with --resume runs what is missing"
        say(f"interrupted; the same command {how}")
        raise typer.Exit(130)
    if not run.has_rungs:
        return 0
    for claim in claims_refuted(scoreboard(run.records)):
        say(claim)
    return exit_code(run.records)

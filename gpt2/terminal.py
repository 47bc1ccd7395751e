"""What all commands have in common: their streams, how they end where something is wrong, help. Imports no torch."""

from __future__ import annotations

import io
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDTHS = range(20, 10_000)
"""Columns of a terminal that text can be laid out for."""


def use_streams() -> None:
    """Let stdout and stderr take whatever text comes, and forget a width that no terminal has.

    What a stream's encoding lacks becomes a question mark; a stream that is closed takes everything and shows nothing.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.pop("MPLBACKEND", None)  # of a notebook: here pictures are files only
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or int(columns) not in WIDTHS:
        os.environ.pop("COLUMNS", None)


def stderr_console() -> Console:
    """For progress on stderr; once nobody reads it any more, it says nothing: rich itself would end the program."""
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Lasting(stderr=True, highlight=False)


def finite(value: float | None) -> float | None:
    """For an option that takes a number: refuses infinity and what is no number."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def denied(error: PermissionError) -> str:
    """What to say where the system lets this user not read or write."""
    return f"{error.filename}: {error.strerror}; ask for access, or name another place"


def fail(error: Exception | str, code: int = 2) -> NoReturn:
    typer.echo(f"gpt2: {error}", err=True)
    raise typer.Exit(code) from None


def paragraphs(docstring: str) -> str:
    """Each as one line, for a terminal of any width to break."""
    return "\n\n".join(" ".join(each.split()) for each in docstring.split("\n\n"))


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gpt2-bench {version('gpt2-bench')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
]

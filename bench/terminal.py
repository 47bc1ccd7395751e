"""How commands speak to a person. Imports rich only when there is a table to show."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console


def fail(error: Exception) -> NoReturn:
    typer.echo(f"bench: {error}", err=True)
    raise typer.Exit(2) from None


def console() -> Console:
    """For tables on stdout; wide where nobody looks, so that no cell is folded in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdecimal():
        return console
    return Console(highlight=False, width=200)

"""What all commands have in common: how they end where something is wrong, --version, help. Imports no torch."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer


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

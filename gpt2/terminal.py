"""How commands of gpt2 end where something is wrong. Imports no torch."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(error: Exception | str, code: int = 2) -> NoReturn:
    typer.echo(f"gpt2: {error}", err=True)
    raise typer.Exit(code) from None

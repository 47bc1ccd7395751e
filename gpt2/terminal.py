"""Shared parts of the commands: output streams, exit on errors, help texts. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, NoReturn, Self

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

WIDTHS = range(20, 10_000)
"""Accepted values of COLUMNS, the width of a terminal."""


def use_streams() -> None:
    """Make stdout and stderr accept any text, and ignore an implausible COLUMNS.

    Characters that a stream's encoding lacks become question marks; output to a closed stream is discarded.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.pop("MPLBACKEND", None)  # set by a notebook; pictures here go to files only
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or int(columns) not in WIDTHS:
        os.environ.pop("COLUMNS", None)


def in_a_folder(program: str) -> None:
    """Exit with code 2 where the working directory is gone, which every command needs."""
    try:
        os.getcwd()
    except OSError:
        typer.echo(f"{program}: the working directory is no longer there; go to another one", err=True)
        raise SystemExit(2) from None


def stderr_console() -> Console:
    """Return a console for progress on stderr that goes quiet when its reader is gone."""
    from rich.console import Console

    class Lasting(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return Lasting(stderr=True, highlight=False)


class LiveLine:
    """What is redrawn on stderr on a terminal, and not shown elsewhere; a context manager."""

    def __init__(self, render: Callable[[], RenderableType], console: Console | None = None) -> None:
        from rich.live import Live

        self.console = console or stderr_console()
        self._live = Live(console=self.console, refresh_per_second=2, transient=True, get_renderable=render)

    def __enter__(self) -> Self:
        if self.is_drawn:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    @property
    def is_drawn(self) -> bool:
        """Whether stderr is a terminal."""
        return self.console.is_terminal

    def print(self, line: Text) -> None:
        """Print a line that stays, above the live one."""
        self.console.print(line, soft_wrap=True)


def finite(value: float | None) -> float | None:
    """Validate a number given as an option: refuse infinities and NaN."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def denied(error: PermissionError) -> str:
    """Return what to say where this user may not read or write; raises `error` if it names no file."""
    if error.filename is None:
        raise error
    return f"{error.filename}: {error.strerror}; ask for access, or name another place"


NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
"""Errors of an output that takes no more."""


def output_is_full(error: OSError, program: str) -> NoReturn:
    """Say in one line that stdout takes no more, and exit with code 6; raises `error` if it is another."""
    if error.errno not in NO_ROOM:
        raise error
    with contextlib.suppress(OSError):  # stderr may be as full
        typer.echo(f"{program}: cannot write the output: {error.strerror}", err=True)
    os._exit(6)  # without the interpreter's own attempt to write the rest


def fail(error: Exception | str, code: int = 2) -> NoReturn:
    """Print an error and exit with `code`."""
    typer.echo(f"gpt2: {error}", err=True)
    raise typer.Exit(code) from None


def paragraphs(docstring: str) -> str:
    """Join each paragraph of a docstring into one line, for a terminal of any width to wrap."""
    return "\n\n".join(" ".join(each.split()) for each in docstring.split("\n\n"))


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gpt2-bench {version('gpt2-bench')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
]

"""Shared parts of the commands: output streams, exit on errors, help texts. Imports no torch."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Self

import typer

from gpt2.errors import limit_met

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

WIDTHS = range(20, 10_000)
"""Accepted values of COLUMNS, the width of a terminal."""
PLAIN_SECONDS = 10.0
"""Seconds between lines of progress where the output is not a terminal."""
COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that says where torch keeps compiled code."""
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
"""Errors of an output that takes no more."""


SHORT = "free some, or raise the limit (ulimit -v, a container's)"
"""What to do where memory is short."""


class _Lossy(io.TextIOWrapper):
    """A stream that goes quiet once its file takes no more: a full disk below a log ends no command."""

    def write(self, text: str, /) -> int:
        with _unless_full():
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with _unless_full():
            super().flush()


@contextlib.contextmanager
def _unless_full() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def use_streams() -> None:
    """Make stdout and stderr accept any text, and ignore an implausible COLUMNS.

    Characters that a stream's encoding lacks become question marks; output to a closed stream, and to a
    stderr that takes no more, is discarded.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
            if name == "stderr" and stream is sys.__stderr__:
                encoding, buffer = stream.encoding, stream.detach()
                sys.stderr = _Lossy(buffer, encoding=encoding, errors="replace", line_buffering=True)
    os.environ.pop("MPLBACKEND", None)  # set by a notebook; pictures here go to files only
    columns = os.environ.get("COLUMNS", "")
    if not columns.isdecimal() or int(columns) not in WIDTHS:
        os.environ.pop("COLUMNS", None)


@contextlib.contextmanager
def surroundings(program: str) -> Iterator[None]:
    """Within the block, say in one line what of the surroundings does not work, and exit.

    Code 2: an empty argument, no working directory, no folder for temporary files or for compiled code, no
    permission, a package that does not load, a name that the locale's encoding lacks, a wrong TORCH_LOGS, a
    limit on processes, threads or open files.
    Code 6: stdout takes no more, memory is short, or a file fails that no command expects to fail. Other
    errors pass.
    """
    try:
        os.getcwd()
    except OSError:
        _leave(program, "the working directory is no longer there; go to another one")
    if empty := _empty_argument(sys.argv[1:]):
        _leave(
            program, f"{empty} is empty, as by a shell variable that is not set; give a value or leave it out"
        )
    if cache := os.environ.get(COMPILED):  # torch would make it, whether or not anything is compiled
        folder = Path(cache).absolute()
        nearest = next(each for each in (folder, *folder.parents) if os.path.exists(each))
        if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
            why = f"{COMPILED}={cache} is no folder that can be written"
            _leave(program, f"{why}; set it to one, or leave it unset")
    try:
        yield
    except PermissionError as error:
        _leave(program, denied(error))
    except ImportError as error:
        short = f" ({SHORT})" if "failed to map" in str(error) else ""
        _leave(program, f"a package of this Python does not load{short}: {error}")
    except MemoryError:
        _leave(program, f"out of memory: {SHORT}", 6)
    except UnicodeEncodeError as error:
        ours = codecs.lookup(sys.getfilesystemencoding())
        if codecs.lookup("utf-8") == ours or codecs.lookup(error.encoding) != ours:
            raise  # it is not the locale's fault
        lacks = f"{error.object!r} is no name for a file in this locale, whose encoding is {error.encoding}"
        _leave(program, f"{lacks}; set PYTHONUTF8=1")
    except ValueError as error:
        if not _of_torchs_logs(error):
            raise
        _leave(
            program,
            f"TORCH_LOGS={os.environ['TORCH_LOGS']} names a log that torch has not; correct or unset it",
        )
    except RuntimeError as error:
        if not (limit := limit_met(error)):
            raise
        _leave(program, limit)
    except OSError as error:  # commands handle the errors of their own files
        if limit := limit_met(error):
            _leave(program, limit)
        if error.errno in NO_ROOM:
            with contextlib.suppress(OSError):  # nobody reads stderr either
                what = error.filename or "the output"
                typer.echo(f"{program}: cannot write {what}: {error.strerror}", err=True)
            os._exit(6)  # without the interpreter's own attempt to write the rest
        if not _has_temporary_folder():
            _leave(program, "no folder for temporary files can be written; set TMPDIR to one")
        if error.filename is None:
            raise
        _leave(program, f"{error.filename}: {error.strerror}", 6)  # it was moved, or its disk is gone


def _empty_argument(words: Sequence[str]) -> str | None:
    """Return what was given as nothing, which as a path would be the working directory; a prompt may be."""
    for before, word in pairwise(["", *words]):
        name, equals, value = word.partition("=")
        if not word and before != "--prompt":
            return f"the value after {before}" if before.startswith("-") and before != "--" else "an argument"
        if equals and not value and name.startswith("--") and name != "--prompt":
            return f"the value of {name}"
    return None


def _of_torchs_logs(error: ValueError) -> bool:
    """Whether torch raised this while it was loaded, on reading the variable TORCH_LOGS."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals.get("__name__") for frame in frames}
    return "TORCH_LOGS" in os.environ and "torch._logging._internal" in modules


def _leave(program: str, why: str, code: int = 2) -> NoReturn:
    typer.echo(f"{program}: {why}", err=True)
    raise SystemExit(code) from None


def _has_temporary_folder() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return False
    return True


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

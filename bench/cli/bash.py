"""Tab in bash, which parts words at = and : (its COMP_WORDBREAKS) and inserts an answer as it is. Imports no torch."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Sequence

BREAKS = "=:"
"""Of what bash parts words at, those that stand within a word of ours."""


def asked() -> bool:
    """Whether it is bash that started this process, to complete a line."""
    return os.environ.get("_BENCH_COMPLETE") == "complete_bash"


def answer(app: Callable[[], object]) -> None:
    """Let `app` complete the line as the user typed it, and print what bash is to insert."""
    words, head = rejoined(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
    os.environ |= {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    found = io.StringIO()
    try:
        with contextlib.redirect_stdout(found):
            app()
    finally:
        for line in found.getvalue().splitlines():
            print(inserted(line, words[-1], head))


def rejoined(parts: Sequence[str], place: int) -> tuple[list[str], str]:
    """The words up to the cursor, and how the last one begins where bash has parted it.

    parts: as bash parts the line. place: of the one with the cursor.
    """
    words, head, glued = [""], "", False
    for number, part in enumerate(parts[: place + 1]):
        parting = bool(part) and not part.strip(BREAKS)
        if number and not (glued or parting):
            words.append("")
            head = ""
        head = f"{words[-1]}{part}" if parting else words[-1]
        words[-1] += part
        glued = parting
    return words, head


def inserted(offer: str, word: str, head: str) -> str:
    """What bash is to put in place of the end of `word`, which `head` is not part of, for it to become `offer`."""
    rest = offer[len(re.sub(r"""\\(.)|["']""", r"\1", head)) :]
    return rest if word[:1] in ("'", '"') else re.sub(r"([^\w@%+,./:=~-])", r"\\\1", rest)

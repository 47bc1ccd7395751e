"""Write JSON that conforms to RFC 8259, where NaN becomes null, and read lines of it. Imports no torch."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from typing import Any

NUL = b"\0"
BLANK = b" \t\r\0"
"""Bytes that a blank line may hold; a crash of the machine leaves NULs."""


def json_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each line that is not blank, without a byte order mark."""
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip(BLANK):
            yield number, line


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Serialise as json.dumps() does, in UTF-8; tuples become lists.

    Bytes of a file name that are not UTF-8 become escapes, so that the result can always be written.
    """
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

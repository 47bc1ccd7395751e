"""JSON by RFC 8259, which knows no NaN and no Infinity: a number that is not finite is null. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """As json.dumps(), in UTF-8; tuples are lists.

    Bytes of a file's name that are no UTF-8 become JSON's escapes, so that what is returned can always be written.
    """
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode(errors="backslashreplace").decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Write JSON that conforms to RFC 8259: NaN and infinities become null. Imports no torch."""

from __future__ import annotations

import json
import math
from typing import Any


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

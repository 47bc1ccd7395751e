"""Validate configurations that a person wrote, with one-line errors. Imports no torch."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gpt2.errors import GPT2Error


class ConfigError(GPT2Error):
    """A configuration that cannot be run; the message names file and key, and what to do."""


OTHER_WORDS = {"gpu": "; NVIDIA's and AMD's are cuda, Apple's mps", "tpu": "; TPUs are xla"}
"""Hints for common names of devices; the closest known spelling of gpu would be cpu."""


def validate(kind: type, value: Any, where: str, noun: str = "key") -> Any:
    """Return `value` as a `kind`; raises ConfigError with the first problem.

    where: begins the message. noun: what a key is called in it.
    """
    try:
        # Through JSON, because strict dataclasses accept mappings only there.
        return _reader(kind).validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        # An unknown key may be a misspelt one that is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
        raise ConfigError(f"{where}: {_explain(first, kind, noun)}") from None
    except (ValueError, RecursionError):  # json raises these for circular or too deeply nested data
        raise ConfigError(f"{where}: is nested too deeply or contains itself") from None


@cache
def _reader(kind: type) -> TypeAdapter[Any]:
    """Made once for a kind: it takes longer than all that it reads."""
    return TypeAdapter(kind)


def _explain(error: Any, kind: type, noun: str) -> str:
    key = ".".join(str(part) for part in error["loc"][:1])
    value, problem = error["input"], error["type"]
    if problem == "unexpected_keyword_argument":
        return f"unknown {noun} {key!r}{near(key, [f.name for f in fields(kind)])}"
    if problem in ("missing", "missing_keyword_only_argument"):
        return f"{noun} {key!r} is missing"
    if problem == "value_error":
        return str(error["ctx"]["error"])
    if problem == "literal_error":
        allowed = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        closest = difflib.get_close_matches(str(value), allowed.split(", "), n=1, cutoff=0.5)
        hint = f"; did you mean {closest[0]!r}?" if closest else _yaml(value)
        hint = OTHER_WORDS.get(str(value).lower(), hint)
        return f"{noun} {key!r}: {value!r} is not one of {allowed}{hint}"
    wanted = {
        "int_type": "a whole number",
        "float_type": "a number",
        "finite_number": "a finite number",
        "string_type": "text",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "a mapping of keys to values",
        "dataclass_type": "a mapping of keys to values",
    }.get(problem)
    which = f"{noun} {key!r}: " if key else ""
    if wanted is None:
        return f"{which}{value!r}: {error['msg']}"
    return f"{which}{value!r} should be {wanted}{_yaml(value, wanted)}"


def _yaml(value: object, wanted: str | None = None) -> str:
    """Return a hint about how YAML read a value that looks right to a person."""
    if isinstance(value, bool):
        return "; YAML reads on, off, yes and no as true and false"
    if wanted == "text" and isinstance(value, int | float) and not isinstance(value, bool):
        return f"; put it in quotes: '{value}'"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"; write {int(value)}"
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
            whole = number.is_integer() and abs(number) < 1e15
            if not math.isfinite(number):
                return ""
            plain = repr(number) if "." in repr(number) else repr(number).replace("e", ".0e")
            return f"; YAML reads it as text here, write {int(number) if whole else plain}"
        with contextlib.suppress(ValueError):
            if value.endswith("%"):
                return f"; write {float(value[:-1]) / 100:g}"
    return ""


def near(name: str, known: list[str]) -> str:
    """Return a hint that names the closest known name, or all of them."""
    folded = {each.lower(): each for each in known}
    closest = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[closest[0]]!r}?" if closest else f"; known are {', '.join(known)}"

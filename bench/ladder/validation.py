"""Check what a person wrote in a ladder or an option, with errors of one line. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from bench.errors import BenchError
from bench.ladder.shipped import shipped
from gpt2.config import validation, yaml_files
from gpt2.config.validation import ConfigError, near

__all__ = ["LadderError", "near", "near_file", "validate", "yaml_mapping", "yaml_value"]

P = ParamSpec("P")
T = TypeVar("T")


class LadderError(BenchError):
    """A ladder that cannot be run; the message names file, rung and key, and what to do."""


def _raising_ladder_error(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except ConfigError as error:
            raise LadderError(str(error)) from None

    return checked


validate = _raising_ladder_error(validation.validate)
yaml_mapping = _raising_ladder_error(yaml_files.mapping)
yaml_value = _raising_ladder_error(yaml_files.value)


def near_file(path: Path) -> str:
    """Return a hint at the ladder with the closest name; empty if none is close."""
    files = sorted({*path.parent.glob("*.yaml"), *Path("ladders").glob("*.yaml")})
    stems = {each.stem: each.stem for each in shipped()} | {each.stem: str(each) for each in files}
    closest = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.5)
    return f"; did you mean {stems[closest[0]]}?" if closest else ""

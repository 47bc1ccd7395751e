"""What is wrong with a ladder, said in one line. Imports no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from gpt2.config.validation import ConfigError, near, validate

__all__ = ["LadderError", "near", "near_file", "validate"]

LadderError = ConfigError
"""A ladder that cannot be run; the message names file, rung and key, and what to do."""


def near_file(path: Path) -> str:
    """A hint at the ladder that was meant, if there is one like it."""
    ladders = [str(each) for each in sorted({*path.parent.glob("*.yaml"), *Path("ladders").glob("*.yaml")})]
    stems = {Path(each).stem: each for each in ladders}
    closest = difflib.get_close_matches(path.stem, stems, n=1, cutoff=0.5)
    return f"; did you mean {stems[closest[0]]}?" if closest else ""

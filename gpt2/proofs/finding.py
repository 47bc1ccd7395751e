"""What a proof finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Whether a toggle did what it says, at whatever value it had, and by what that was seen."""

    took_effect: bool
    evidence: str


def counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"

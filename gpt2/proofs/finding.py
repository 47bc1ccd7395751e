"""What a proof finds."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.seen import Seen


@dataclass(frozen=True)
class Finding:
    """Whether a toggle did what it says, at whatever value it had, and by what that was seen."""

    took_effect: bool
    evidence: str


def counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def built_for(seen: Seen, name: str) -> Finding:
    """Whether the model has the choice that the toggle of that name asks for."""
    built = getattr(seen.training.model.config, name)
    return Finding(built == getattr(seen.toggles, name), f"the model is built for {built}")

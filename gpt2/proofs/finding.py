"""The result of a proof."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.seen import Seen


@dataclass(frozen=True)
class Finding:
    """Whether a toggle's value, baseline or not, is in effect, and the evidence for it."""

    took_effect: bool
    evidence: str


def counted(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"


def built_for(seen: Seen, name: str) -> Finding:
    """Return whether the model was built with the toggle's value, for toggles that leave no other trace."""
    built = getattr(seen.training.model.config, name)
    return Finding(built == getattr(seen.toggles, name), f"the model is built for {built}")

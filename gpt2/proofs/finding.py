"""Findings of proofs, and helpers to word them."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.proofs.evidence import StepEvidence


@dataclass(frozen=True)
class Finding:
    """The result of a proof: whether a toggle's value, baseline or not, is in effect, and the evidence."""

    took_effect: bool
    evidence: str


def counted(number: int, what: str, plural: str = "s") -> str:
    """Return a number with its noun in the right form: 1 kernel, 2 kernels."""
    return f"{number:,} {what}{'' if number == 1 else plural}"


def built_for(step: StepEvidence, name: str) -> Finding:
    """Return whether the model was built with the toggle's value, for toggles that leave no other trace."""
    built = getattr(step.training.model.config, name)
    return Finding(built == getattr(step.toggles, name), f"the model is built for {built}")

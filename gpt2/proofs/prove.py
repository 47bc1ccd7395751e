"""Verify that each toggle took effect: from one profiled step, torch's flags and counters, and small probes.

    ops = profile(lambda: next(training), training.device)
    for toggle, finding in prove(training, ops).items(): ...

Each field of Toggles is verified by the function of its name in arithmetic.py, process.py or step.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from gpt2.config.toggles import Toggles
from gpt2.proofs import arithmetic, process, step
from gpt2.proofs.evidence import Finding, StepEvidence
from gpt2.proofs.profiler import Op
from gpt2.training.train import Training

MODULES = (arithmetic, process, step)


def _proof_of(toggle: str) -> Callable[[StepEvidence], Finding]:
    for module in MODULES:
        if toggle in vars(module):
            return vars(module)[toggle]
    raise LookupError(
        f"toggle {toggle} has no proof: add a function of that name to gpt2/proofs/arithmetic.py, process.py "
        "or step.py"
    )


PROOFS: dict[str, Callable[[StepEvidence], Finding]] = {
    toggle.name: _proof_of(toggle.name) for toggle in fields(Toggles)
}
"""By toggle, the function of its name."""


def prove(training: Training, ops: list[Op]) -> dict[str, Finding]:
    """Return a finding for each toggle, baseline values included. `ops`: those of one of its steps."""
    evidence = StepEvidence(training, ops)
    return {name: proof(evidence) for name, proof in PROOFS.items()}

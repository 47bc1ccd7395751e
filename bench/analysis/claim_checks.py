"""What spoils a rung's claim, found on reading its records: other losses, recompilation, toggles without
effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from bench.analysis.run_records import measured, toggles_of
from bench.records.measurement import Measurement
from bench.records.record import Record
from bench.stats import PARITY_STEPS, loss_difference
from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE


def judge(
    rung: Sequence[Record],
    first: Sequence[Record],
    before: Sequence[Record] | None,
    reference: Sequence[Record] | None,
) -> tuple[str, str | None]:
    """A rung's status, the gravest first, and why it is not ok.

    first, before: the records of the first rung and of the one before. reference: those whose losses this
    rung's are held to.
    """
    failed = [record for record in rung if record.status != "ok"]
    if all(record.status in ("ok", "interrupted") for record in rung) and len(failed) < len(rung):
        failed = []  # the round that the user ended is missing, and no more
    if failed:
        return failed[-1].status, failed[-1].error
    if rung[0].external:  # whose speed is all that is known of it
        error = _other_environment(rung, first) or _other_checkout(rung)
        return ("not_comparable", error) if error else ("external", None)
    for status, error in (
        ("not_comparable", _other_environment(rung, first)),
        ("ranks_differ", _ranks_differ(rung)),
        ("parity_failed", other_loss(rung, reference) or _other_gradients(rung)),
        ("recompiled", _recompiled(rung)),
        ("inert", _inert(rung, before)),
    ):
        if error:
            return status, error
    return "ok", None


def _other_environment(rung: Sequence[Record], first: Sequence[Record]) -> str | None:
    same_device = toggles_of(rung).device == toggles_of(first).device
    for record in rung:
        theirs, mine = first[0].environment, record.environment
        differences: list[tuple[str, object, object]] = [
            ("torch", theirs.torch, mine.torch),
            ("code", theirs.code_hash[:12], mine.code_hash[:12]),
            ("text", (first[0].data_sha256 or "")[:12], (record.data_sha256 or "")[:12]),
        ]
        if same_device:  # rungs may be of several devices; of one and the same, the machine is to be the same
            differences.append(("machine", theirs.machine, mine.machine))
            differences.append(("usable cores", theirs.usable_cores, mine.usable_cores))
        for what, there, here in differences:
            if there and here and there != here:
                return f"{what} {here}, but {there} for {first[0].rung}"
    return None


def _other_checkout(rung: Sequence[Record]) -> str | None:
    """A peer that was changed between rounds, of which a mean would be of nothing."""
    versions = dict.fromkeys(each.external.version for each in rung if each.external and each.measurement)
    return (
        f"the peer was changed meanwhile: {' and '.join(map(str, versions))}" if len(versions) > 1 else None
    )


def parity(rung: Sequence[Record], reference: Sequence[Record]) -> dict[str, float]:
    """The largest relative differences, over all processes, by what differs: a field of LossTolerance."""
    expected = next(r.measurement for r in reference if r.measurement)
    found = [r.measurement for r in rung if r.measurement]
    alike = min(_comparable(each, expected) for each in found)
    differences = {"first_loss": max(loss_difference(each.losses[:1], expected.losses) for each in found)}
    if alike > 1:
        norms = (loss_difference(each.grad_norms[:1], expected.grad_norms) for each in found)
        differences["first_grad_norm"] = max(norms)
    differences["losses"] = max(loss_difference(each.losses[:alike], expected.losses) for each in found)
    return differences


def _comparable(*sides: Measurement) -> int:
    """How many of the first losses both have trained alike for: a step that float16's scaler skips sets one
    back.
    """
    skips = [
        n
        for each in sides
        if each.skipped_steps
        for n, x in enumerate(each.grad_norms)
        if not math.isfinite(x)
    ]
    return min(skips, default=PARITY_STEPS - 1) + 1


def other_loss(rung: Sequence[Record], reference: Sequence[Record] | None) -> str | None:
    """How a rung's losses differ from another's by more than number formats explain; None if they do not."""
    if not reference or not measured(rung):
        return None
    classes = [LOSS_TOLERANCE[toggles_of(each).precision_class()] for each in (rung, reference)]
    for what, difference in parity(rung, reference).items():
        allowed = max(getattr(each, what) for each in classes)
        if not difference <= allowed:
            whose = _whose(rung, reference)
            first = "the baseline" if whose == reference[0].rung and not reference[0].rung_index else whose
            for name, records in ((first, reference), ("it", rung)):
                if since := diverged(records):
                    return f"{name} diverged: {since}"
            shares = [f"{100 * share:.2g}%" for share in (difference, allowed)]
            return f"{NAMES[what]} by {shares[0]} from {whose}'s; the number formats explain {shares[1]}"
    return None


NAMES = {"first_loss": "the first loss", "first_grad_norm": "the first gradient norm", "losses": "a loss"}


def _whose(rung: Sequence[Record], reference: Sequence[Record]) -> str:
    """Those that a rung's losses are held to, as a reader knows them."""
    if reference[0].kind != "parity":
        return reference[0].rung
    one = "the rung before" if reference[0].rung_index else "one rank"
    one = "the first candidate" if rung[0].kind == "sweep" else one
    return f"{one}, accumulating as many tokens"


def diverged(rung: Sequence[Record]) -> str | None:
    """Since when a rung computed what is no finite number; None where it did not, among the steps that are
    held.
    """
    for found in (record.measurement for record in rung if record.measurement):
        for what, values in (("loss", found.losses[:PARITY_STEPS]), ("gradient norm", found.grad_norms[:1])):
            step = next((n for n, x in enumerate(values, 1) if not math.isfinite(x)), None)
            if step is not None:
                on = what == "loss" and not any(map(math.isfinite, found.losses[step:]))
                return f"its {what} is not finite {f'from step {step} on' if on else f'at step {step}'}"
    return None


def _other_gradients(rung: Sequence[Record]) -> str | None:
    allowed = GRADIENT_TOLERANCE[toggles_of(rung).precision_class()]
    for record in rung:
        difference = record.measurement.gradient_difference if record.measurement else None
        if record.measurement and record.measurement.gradients_finite is False:
            return "its gradients, or those of eager code, are not finite"
        if difference is not None and not difference <= allowed:
            return f"gradients by {difference:.2%} from those of eager code; the number formats explain {allowed:.2%}"
    return None


def _ranks_differ(rung: Sequence[Record]) -> str | None:
    for record in rung:
        if record.measurement and record.measurement.ranks_agree is False:
            return f"the ranks of round {record.repetition} ended with different weights: they did not train one model"
    return None


def _recompiled(rung: Sequence[Record]) -> str | None:
    for record in rung:
        if record.measurement and (graphs := record.measurement.recompiles):
            return f"compiled or recorded {graphs} more graphs within the window of round {record.repetition}"
    return None


def changed_toggles(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """Names of the toggles that differ from the rung before, or from the baseline."""
    now, was = toggles_of(rung), toggles_of(before) if before else Toggles()
    return [
        toggle.name for toggle in fields(Toggles) if getattr(now, toggle.name) != getattr(was, toggle.name)
    ]


TELLING = {
    "products",
    "tied_gradient",
    "autocast",
    "matmul_precision",
    "attention",
    "adamw",
    "sharding",
    "vocab_multiple",
    "threads",
    "recompute",
    "reductions",
}
"""Toggles whose proofs say what ran: where that is, word for word, what ran before, the change did nothing.
Modes of torch.compile may differ in ways that one step does not show.
"""

BY_TIMING = {"products"}
"""Of those, toggles that time what there is to choose from. Where that falls on what ran before, a rung that
changes nothing else did nothing; one that changes more did what it says.
"""


def _inert(rung: Sequence[Record], before: Sequence[Record] | None) -> str | None:
    """The toggles changed by this rung that had no effect in some process, with what was seen there."""
    now, changed = toggles_of(rung), changed_toggles(rung, before)
    earlier = (
        next((r.measurement.proofs for r in before or () if r.measurement and r.measurement.proofs), None)
        or {}
    )
    measured = [(record.repetition, record.measurement.proofs) for record in rung if record.measurement]
    idle = []
    for repetition, proofs in measured:
        if proofs is None:
            return f"no proof was taken in round {repetition}"
        without = []
        for name in changed:
            proof = proofs.get(name)
            if proof is None:
                continue
            as_before = name in TELLING and name in earlier and earlier[name].evidence == proof.evidence
            as_before = as_before and (name not in BY_TIMING or len(changed) == 1)
            if not proof.took_effect or as_before:
                seen = f"{proof.evidence}, as before" if as_before and proof.took_effect else proof.evidence
                without.append(f"{name}={getattr(now, name)} had no effect: {seen}")
        if without:
            idle.append("; ".join(without))
    if not idle:
        return None
    return idle[0] if len(idle) == len(measured) else f"{idle[0]} (in {len(idle)} of {len(measured)} rounds)"


def doubts(
    rung: Sequence[Record], before: Sequence[Record] | None, reference: Sequence[Record] | None
) -> tuple[str, ...]:
    """Why a rung that nothing is held against may still not be called the fastest."""
    found = [record.measurement for record in rung if record.measurement]
    if not found:
        return ()
    result = _lost(rung, before)
    if not reference:
        result.append("its losses are held to nothing: no other process took steps of that size")
    elif (held := min(_comparable(each) for each in found)) < PARITY_STEPS:
        result.append(
            f"its losses are held to others for {held} steps only: float16's scaler skipped the last of them"
        )
    if toggles_of(rung).compile != "eager" and all(
        each.gradient_difference is None and each.gradients_finite is None for each in found
    ):
        result.append("its gradients were not held to those of eager code")
    return tuple(result)


def _lost(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """Toggles that an earlier rung switched on and that are no longer in effect here, with what was seen."""
    toggles, changed = toggles_of(rung), changed_toggles(rung, before)
    found: dict[str, str] = {}
    for record in rung:
        for name, proof in ((record.measurement.proofs if record.measurement else None) or {}).items():
            value = getattr(toggles, name, None)
            if not proof.took_effect and name not in changed and value != getattr(Toggles(), name, None):
                found.setdefault(name, f"{name}={value} is not in effect: {proof.evidence}")
    return list(found.values())

"""Checks of a rung's claims against its records: losses, gradients, recompilation, toggles without effect."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.analysis.run_records import measured, measurements, toggles_of, varying
from bench.records.measurement import Measurement, Proof
from bench.records.record import Record
from bench.stats import PARITY_STEPS, loss_difference
from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE, MOST_ERROR_OVER_EAGER


def check_claims(
    rung: Sequence[Record],
    first: Sequence[Record],
    before: Sequence[Record] | None,
    reference: Sequence[Record] | None,
) -> tuple[str, str | None]:
    """Status of a rung, the worst failed check first, and why it is not ok.

    first, before: the records of the first rung and of the rung before. reference: records with whose losses
    this rung's are compared.
    """
    failed = [record for record in rung if record.status != "ok"]
    interrupted = all(record.status == "interrupted" for record in failed) and len(failed) < len(rung)
    if failed and not interrupted:  # of an interrupted rung a round is missing, and no more
        return failed[-1].status, failed[-1].error
    if rung[0].external:  # only its speed is known
        error = _environment_differs(rung, first) or _peer_changed(rung)
        return ("not_comparable", error) if error else ("external", None)
    for status, error in (
        ("not_comparable", _environment_differs(rung, first)),
        ("ranks_differ", _ranks_differ(rung)),
        ("parity_failed", losses_differ(rung, reference) or _gradients_differ(rung)),
        ("recompiled", _recompiled(rung)),
        ("inert", _inert(rung, before)),
    ):
        if error:
            return status, error
    return "ok", None


def _environment_differs(rung: Sequence[Record], first: Sequence[Record]) -> str | None:
    same_device = toggles_of(rung).device == toggles_of(first).device
    for record in rung:
        first_environment, environment = first[0].environment, record.environment
        differences: list[tuple[str, object, object]] = [
            ("torch", first_environment.torch, environment.torch),
            ("code", first_environment.code_hash[:12], environment.code_hash[:12]),
            ("text", (first[0].data_sha256 or "")[:12], (record.data_sha256 or "")[:12]),
        ]
        if same_device:  # rungs on another kind of device see another machine
            differences.append(("machine", first_environment.machine, environment.machine))
            differences.append(("usable cores", first_environment.usable_cores, environment.usable_cores))
        for what, there, here in differences:
            if there and here and there != here:
                return f"{what} {here}, but {there} for {first[0].rung}"
    return None


def _peer_changed(rung: Sequence[Record]) -> str | None:
    """Tell that a peer was changed between rounds, so that a mean over rounds has no meaning."""
    versions = dict.fromkeys(r.external.version for r in rung if r.external and r.measurement)
    several = " and ".join(map(str, versions))
    return f"the peer was changed meanwhile: {several}" if len(versions) > 1 else None


def parity(rung: Sequence[Record], reference: Sequence[Record]) -> dict[str, float]:
    """Largest relative differences over all processes, by field of LossTolerance."""
    expected, found = measurements(reference)[0], measurements(rung)
    steps = min(_comparable(m, expected) for m in found)
    differences = {"first_loss": max(loss_difference(m.losses[:1], expected.losses) for m in found)}
    if steps > 1:
        norms = (loss_difference(m.grad_norms[:1], expected.grad_norms) for m in found)
        differences["first_grad_norm"] = max(norms)
    differences["losses"] = max(loss_difference(m.losses[:steps], expected.losses) for m in found)
    return differences


def _comparable(*measurements: Measurement) -> int:
    """How many of the first losses are comparable: those up to the first step that float16's scaler skipped.

    After a skipped step the weights are one step behind, and so are the losses.
    """
    scaled = [m for m in measurements if m.skipped_steps]
    skips = [step for m in scaled for step, norm in enumerate(m.grad_norms) if not math.isfinite(norm)]
    return min(skips, default=PARITY_STEPS - 1) + 1


def losses_differ(rung: Sequence[Record], reference: Sequence[Record] | None) -> str | None:
    """How losses differ by more than number formats explain; None if they do not."""
    if not reference or not measured(rung):
        return None
    tolerances = [LOSS_TOLERANCE[toggles_of(records).precision_class()] for records in (rung, reference)]
    for what, difference in parity(rung, reference).items():
        allowed = max(getattr(tolerance, what) for tolerance in tolerances)
        if not difference <= allowed:
            whose = _reference_name(rung, reference)
            first = "the baseline" if whose == reference[0].rung and not reference[0].rung_index else whose
            for name, records in ((first, reference), ("it", rung)):
                if since := divergence(records):
                    return f"{name} diverged: {since}"
            shares = [f"{100 * share:.2g}%" for share in (difference, allowed)]
            return f"{QUANTITIES[what]} by {shares[0]} from {whose}'s; the number formats explain {shares[1]}"
    return None


QUANTITIES = {
    "first_loss": "the first loss",
    "first_grad_norm": "the first gradient norm",
    "losses": "a loss",
}
"""Names of the fields of LossTolerance in sentences."""


def _reference_name(rung: Sequence[Record], reference: Sequence[Record]) -> str:
    """Name of the records with whose losses a rung's are compared, for a reader."""
    if reference[0].kind != "parity":
        return reference[0].rung
    if rung[0].kind == "sweep":
        return "the first candidate, accumulating as many tokens"
    return f"{'the rung before' if reference[0].rung_index else 'one rank'}, accumulating as many tokens"


def divergence(rung: Sequence[Record]) -> str | None:
    """Which number of the compared steps was not finite first, and at which step; None if all were finite."""
    for m in measurements(rung):
        for what, values in (("loss", m.losses[:PARITY_STEPS]), ("gradient norm", m.grad_norms[:1])):
            step = next((n for n, x in enumerate(values, 1) if not math.isfinite(x)), None)
            if step is not None:
                for_good = what == "loss" and not any(map(math.isfinite, m.losses[step:]))
                return f"its {what} is not finite {f'from step {step} on' if for_good else f'at step {step}'}"
    return None


def rounding_explains_gradients(m: Measurement) -> bool:
    """Whether gradients beyond their tolerance are about as near to float32's as those of eager code."""
    over_eager = m.gradient_error_over_eager
    return over_eager is not None and over_eager <= MOST_ERROR_OVER_EAGER


def _gradients_differ(rung: Sequence[Record]) -> str | None:
    allowed = GRADIENT_TOLERANCE[toggles_of(rung).precision_class()]
    for m in measurements(rung):
        if m.gradients_finite is False:
            return "its gradients, or those of eager code, are not finite"
        difference, over_eager = m.gradient_difference, m.gradient_error_over_eager
        if difference is None or difference <= allowed or rounding_explains_gradients(m):
            continue
        apart = f"gradients by {difference:.2%} from those of eager code"
        if over_eager is None:
            return f"{apart}; the number formats explain {allowed:.2%}"
        return f"{apart}, and {over_eager:.1f} times as far from float32's as those are"
    return None


def _ranks_differ(rung: Sequence[Record]) -> str | None:
    for record in rung:
        if record.measurement and record.measurement.ranks_agree is False:
            ended = "ended with different weights: they did not train one model"
            return f"the ranks of round {record.repetition} {ended}"
    return None


def _recompiled(rung: Sequence[Record]) -> str | None:
    for record in rung:
        if record.measurement and (graphs := record.measurement.recompiles):
            return f"compiled or recorded {graphs} more graphs within the window of round {record.repetition}"
    return None


def changed_toggles(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """Names of the toggles that differ from the rung before, or from the baseline."""
    return varying(toggles_of(rung), toggles_of(before) if before else Toggles())


EVIDENCE_COMPARES = {
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
"""Toggles whose proof can pass for two different values.

If the evidence text equals the previous rung's, the change had no effect. `compile` is not among them: two of
its modes may give the same evidence and yet differ, in ways that one step does not show.
"""

CHOSEN_BY_TIMING = {"products"}
"""Of these, toggles that time several ways and take the fastest, which may be the one that ran before.

A rung that changes nothing else then had no effect. For a rung that changes more it is no failed check.
"""


def _inert(rung: Sequence[Record], before: Sequence[Record] | None) -> str | None:
    """Toggles changed by this rung that had no effect in some process, with the evidence."""
    proofs = proofs_by_round(rung)
    if (unproved := next((n for n, found in proofs if found is None), None)) is not None:
        return f"no proof was taken in round {unproved}"
    said = []
    for toggle, evidence in without_effect(rung, before).items():
        some = f" in {len(evidence)} of {len(proofs)} rounds" if len(evidence) < len(proofs) else ""
        said.append(f"{toggle} had no effect{some}: {evidence[0]}")
    return "; ".join(said) or None


def inert_rounds(rung: Sequence[Record], before: Sequence[Record] | None) -> tuple[int, int] | None:
    """Rounds in which a toggle had no effect, and rounds in which that was checked.

    Of several toggles the one that had none most often. None where every toggle had its effect, or where a
    round has no proof.
    """
    proofs = proofs_by_round(rung)
    idle = without_effect(rung, before).values()
    return (max(map(len, idle)), len(proofs)) if idle and all(found for _, found in proofs) else None


def proofs_by_round(rung: Sequence[Record]) -> list[tuple[int, Mapping[str, Proof] | None]]:
    """The proofs of each round in which any were asked for; None where none was taken."""
    whole = [record for record in rung if not record.cut_short] or rung
    measured = [(record.repetition, record.measurement.proofs) for record in whole if record.measurement]
    return [(repetition, proofs) for repetition, proofs in measured if proofs != {}]


def without_effect(rung: Sequence[Record], before: Sequence[Record] | None) -> dict[str, list[str]]:
    """The evidence of each round in which a toggle changed here had no effect, by toggle and value."""
    toggles, changed = toggles_of(rung), changed_toggles(rung, before)
    proofs_before = next((m.proofs for m in measurements(before or ()) if m.proofs), {})
    idle: dict[str, list[str]] = {}
    for _, proofs in proofs_by_round(rung):
        for name in changed:
            if (proof := (proofs or {}).get(name)) is None:
                continue
            compares = name in EVIDENCE_COMPARES and (name not in CHOSEN_BY_TIMING or len(changed) == 1)
            earlier = proofs_before.get(name) if compares else None
            as_before = earlier is not None and earlier.evidence == proof.evidence
            if not proof.took_effect or as_before:
                evidence = f"{proof.evidence}, as before" if proof.took_effect else proof.evidence
                idle.setdefault(f"{name}={getattr(toggles, name)}", []).append(evidence)
    return idle


def caveats_of(
    rung: Sequence[Record], before: Sequence[Record] | None, reference: Sequence[Record] | None
) -> tuple[str, ...]:
    """Why a rung that failed no check may still not be called the fastest."""
    found = measurements(rung)
    if not found:
        return ()
    caveats = _no_longer_in_effect(rung, before)
    if not reference:
        caveats.append("its losses are compared with no others: no other process took steps of that size")
    elif (steps := min(map(_comparable, found))) < PARITY_STEPS:
        caveats.append(
            f"its losses are compared for {steps} steps only: float16's scaler skipped the last of them"
        )
    checked = any(m.gradient_difference is not None or m.gradients_finite is not None for m in found)
    if toggles_of(rung).compile != "eager" and not checked:
        caveats.append("its gradients were not compared with those of eager code")
    return tuple(caveats)


def _no_longer_in_effect(rung: Sequence[Record], before: Sequence[Record] | None) -> list[str]:
    """Toggles that an earlier rung switched on and that have no effect here, with the evidence."""
    toggles, changed = toggles_of(rung), changed_toggles(rung, before)
    lost: dict[str, str] = {}
    for m in measurements(rung):
        for name, proof in (m.proofs or {}).items():
            value = getattr(toggles, name, None)
            if not proof.took_effect and name not in changed and value != getattr(Toggles(), name, None):
                lost.setdefault(name, f"{name}={value} is not in effect: {proof.evidence}")
    return list(lost.values())

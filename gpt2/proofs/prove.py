"""Verify that each toggle took effect: from one profiled step, torch's flags and counters, and small probes.

    ops = profile(lambda: next(training), training.device)
    for toggle, finding in prove(training, ops).items(): ...

Each field of Toggles is verified by the function in PROOFS that has its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from gpt2.config.toggles import Toggles
from gpt2.proofs.arithmetic import (
    attention,
    autocast,
    float8,
    int8,
    matmul_precision,
    residual,
    weight_casts,
    weights,
)
from gpt2.proofs.evidence import StepEvidence
from gpt2.proofs.finding import Finding
from gpt2.proofs.process import affinity, allocator, device, sharding, threads, world_size
from gpt2.proofs.profiler import Op
from gpt2.proofs.step import (
    adamw,
    bias_gradient,
    clip,
    compile,
    compile_region,
    cross_entropy,
    gelu,
    grad_accum_steps,
    launch,
    layer_norm,
    micro_batch_size,
    products,
    recompute,
    reductions,
    tied_gradient,
    vocab_multiple,
)
from gpt2.training.train import Training

PROOFS: dict[str, Callable[[StepEvidence], Finding]] = {
    proof.__name__: proof
    for proof in (
        device,
        autocast,
        matmul_precision,
        attention,
        compile,
        reductions,
        compile_region,
        launch,
        adamw,
        sharding,
        vocab_multiple,
        recompute,
        micro_batch_size,
        grad_accum_steps,
        world_size,
        cross_entropy,
        tied_gradient,
        gelu,
        layer_norm,
        products,
        bias_gradient,
        clip,
        weight_casts,
        residual,
        weights,
        float8,
        int8,
        allocator,
        affinity,
        threads,
    )
}


def prove(training: Training, ops: list[Op]) -> dict[str, Finding]:
    """Return a finding for each toggle, baseline values included. `ops`: those of one of its steps."""
    step = StepEvidence(training, ops)
    return {toggle.name: PROOFS[toggle.name](step) for toggle in fields(Toggles)}

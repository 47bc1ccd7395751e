"""Kernels for GPUs against torch's functions, with GPT-2's shapes; skipped without GPU or package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from trainings import start

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from gpt2.config.workload import Workload
from gpt2.proofs.gradients import gradient_difference
from gpt2.proofs.profiler import profile
from gpt2.proofs.prove import prove

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("gpu", "process_settings")]

WORKLOAD = Workload(model="gpt2")
COMPILED = {"compile": "default", "compile_region": "block"}
PLAIN = Toggles(
    device="cuda",
    autocast="bfloat16",
    attention="flash",
    adamw="fused",
    vocab_multiple=64,
    micro_batch_size=2,
)


@pytest.mark.parametrize("compiled", [{}, COMPILED], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "change",
    [
        *({"cross_entropy": value} for value in ("triton", "liger", "quack", "cut")),
        *({"layer_norm": value} for value in ("liger", "quack")),
        {"layer_norm": "liger", "residual": "bfloat16"},
        {"layer_norm": "quack", "residual": "bfloat16"},
        {"attention": "flash3"},
        {"attention": "flash4"},
        {"int8": "rowwise"},
    ],
    ids=lambda change: " ".join(change.values()),
)
def test_a_kernel_trains_as_torch_does_and_is_proven(change: Any, compiled: Any) -> None:
    torch.compiler.reset()
    try:
        mine = start(replace(PLAIN, **compiled, **change), WORKLOAD)
    except UnsupportedToggle as refusal:
        pytest.skip(str(refusal))
    torchs = start(replace(PLAIN, residual=change.get("residual", "float32")), WORKLOAD)
    kind = mine.toggles.precision_class()
    for _ in range(3):
        found, expected = next(mine), next(torchs)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=LOSS_TOLERANCE[kind].losses)
    assert mine.micro_batch is not None
    assert gradient_difference(mine, *mine.micro_batch) < GRADIENT_TOLERANCE[kind]
    findings = prove(mine, profile(lambda: next(mine), mine.device))
    for toggle in change:
        assert findings[toggle].took_effect, findings[toggle].evidence

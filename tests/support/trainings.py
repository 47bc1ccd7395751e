"""Trainings of the tiny model, and every toggle value that they can take here."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.tolerances import LOSS_TOLERANCE
from gpt2.config.workload import Workload
from gpt2.data.batches import Batches, open_corpus
from gpt2.device import Cpu, Device, check, find
from gpt2.training.train import Training, micro_batches, train

WORKLOAD = Workload(model="tiny", seq_len=64, lr=3e-3)
FOUR = Toggles(micro_batch_size=4)


FAST = Toggles(
    autocast="bfloat16",
    attention="blocks",
    compile="default",
    compile_region="block",
    adamw="compiled",
    cross_entropy="closed_form",
    tied_gradient="rows",
    gelu="sigmoid",
    products="tuned",
    clip="in_step",
    weight_casts="optimizer",
    micro_batch_size=4,
)
"""The top of cpu.yaml, four sequences at once."""


def start(toggles: Toggles, workload: Workload = WORKLOAD, *, rank: int = 0) -> Training:
    """A training whose batches the device prepares, as it does for a worker."""
    return _start(toggles, workload, find(toggles), rank)


def start_on_a_cpu(toggles: Toggles, workload: Workload = WORKLOAD) -> Training:
    """The same with toggles that no ladder may ask a CPU for: torch imitates their operators there."""
    return _start(toggles, workload, Cpu(toggles), 0)


def _start(toggles: Toggles, workload: Workload, device: Device, rank: int) -> Training:
    corpus = open_corpus("synthetic", vocab_size=509, seed=workload.seed)
    tokens = toggles.tokens_per_step(workload.seq_len)
    batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
    return train(workload, toggles, device, device.feed(micro_batches(batches, toggles, rank=rank)))


def assert_trains_alike(mine: Toggles, torchs: Toggles) -> None:
    """Hold four steps on a CPU to those with other toggles, within what the number format explains."""
    torch.compiler.reset()
    a, b = start_on_a_cpu(mine), start_on_a_cpu(torchs)
    tolerance = LOSS_TOLERANCE[torchs.precision_class()]
    for _ in range(4):
        found, expected = next(a), next(b)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=tolerance.losses)
        assert found.grad_norm.item() == pytest.approx(
            expected.grad_norm.item(), rel=2 * tolerance.first_grad_norm
        )


COMPANIONS: dict[tuple[str, object], dict[str, object]] = {
    ("compile_region", "block"): {"compile": "default"},
    ("clip", "in_step"): {"adamw": "fused"},
    ("weight_casts", "optimizer"): {
        "autocast": "bfloat16",
        "adamw": "compiled",
        "clip": "in_step",
        "tied_gradient": "rows",
    },
    ("residual", "bfloat16"): {"autocast": "bfloat16"},
    ("weights", "bfloat16"): {"autocast": "bfloat16", "adamw": "compiled"},
}
"""What a value of a toggle needs of others."""


FROM_THE_START = {"device", "world_size", "sharding", "allocator", "affinity"}
"""Toggles whose values a process, or a group of ranks, must have from its start."""


def every_value() -> list[dict[str, object]]:
    """For each value of each toggle that one process on a CPU can do, its change and what it needs."""
    changes: list[dict[str, object]] = []
    hints = get_type_hints(Toggles)
    for toggle in fields(Toggles):
        named = [value for value in get_args(hints[toggle.name]) if isinstance(value, str | int)]
        for value in named or [2]:
            change = {toggle.name: value, **COMPANIONS.get((toggle.name, value), {})}
            try:
                check(replace(FOUR, **change), Cpu())
            except UnsupportedToggle:
                continue
            if value != toggle.default:
                changes.append(change)
    assert {name for change in changes for name in change} >= {"autocast", "attention", "compile", "adamw"}
    return [change for change in changes if not change.keys() & FROM_THE_START]

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import FOUR, WORKLOAD, every_value, start

from bench.stats import loss_difference
from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import LOSS_TOLERANCE
from gpt2.config.validation import ConfigError
from gpt2.config.workload import Workload
from gpt2.data.batches import Batches, open_corpus
from gpt2.device import Cpu
from gpt2.model.model import ATTENTION, by_heads
from gpt2.training.distributed import RanksError
from gpt2.training.train import Step, micro_batches, train

STEPS = 8
pytestmark = pytest.mark.usefixtures("process_settings")


def steps(toggles: Toggles, workload: Workload = WORKLOAD, count: int = STEPS) -> list[Step]:
    return list(itertools.islice(start(toggles, workload), count))


def losses(toggles: Toggles, workload: Workload = WORKLOAD, count: int = STEPS) -> list[float]:
    return [step.loss.item() for step in steps(toggles, workload, count)]


@pytest.fixture(scope="module")
def baseline() -> list[float]:
    return losses(FOUR)


@pytest.mark.slow
def test_the_loss_falls_towards_the_entropy_of_the_corpus() -> None:
    found = losses(replace(FOUR, micro_batch_size=16, attention="sdpa", adamw="fused"), count=120)
    assert found[0] == pytest.approx(6.24, abs=0.05)  # ln(509) = 6.23: knows nothing
    assert found[-1] < 4.2  # knows more than the frequencies, 5.51


SHAPES = {"micro_batch_size": {"grad_accum_steps": 2}, "grad_accum_steps": {"micro_batch_size": 2}}
MULTIPLE, GELUS = {"vocab_multiple": 64}, {"gelu": "sigmoid", "recompute": "gelu"}
SAME_LOSS = [
    *({**change, **SHAPES.get(next(iter(change)), {})} for change in every_value()),
    {"micro_batch_size": 1, "grad_accum_steps": 4},
    {"autocast": "float16", "adamw": "fused"},
    {"threads": 1},
    {"autocast": "bfloat16", "attention": "sdpa", "compile": "default", "adamw": "fused", **MULTIPLE},
    {"compile": "default", "compile_region": "block", "attention": "blocks", **GELUS},
]


def marked(changes: dict):
    """Slow where code is compiled."""
    slow = "compile" in changes
    name = ",".join(f"{toggle}={value}" for toggle, value in changes.items())
    return pytest.param(changes, marks=[pytest.mark.slow] if slow else [], id=name)


@pytest.mark.parametrize("changes", [marked(changes) for changes in SAME_LOSS])
def test_a_toggle_keeps_the_losses_of_the_baseline(changes: dict, baseline: list[float]) -> None:
    toggles = replace(FOUR, **changes)
    found, tolerance = losses(toggles), LOSS_TOLERANCE[toggles.precision_class()]
    assert loss_difference(found[:1], baseline) <= tolerance.first_loss
    assert loss_difference(found, baseline) <= tolerance.losses


def test_the_same_toggles_give_the_same_losses_bit_for_bit(baseline: list[float]) -> None:
    assert losses(FOUR) == baseline


def test_a_step_reports_the_tokens_of_all_micro_batches() -> None:
    (step,) = steps(Toggles(micro_batch_size=2, grad_accum_steps=3), count=1)
    assert step.tokens == 2 * 3 * 64


def test_batches_of_another_size_than_the_toggles_take_are_refused() -> None:
    batches = Batches(open_corpus("synthetic", vocab_size=509), seq_len=64, tokens_per_step=4 * 64, seed=0)
    with pytest.raises(ConfigError, match="the batches have 4 sequences per step, and these toggles take 6"):
        micro_batches(batches, Toggles(micro_batch_size=2, grad_accum_steps=3))


def test_several_processes_that_were_not_joined_are_refused_with_what_starts_them() -> None:
    with pytest.raises(RanksError, match=r"world_size=2 takes as many processes.*; gpt2 train and bench run"):
        train(WORKLOAD, replace(FOUR, world_size=2), Cpu(), [])


def test_micro_batches_of_another_shape_than_a_step_s_tokens_are_counted_by_are_refused() -> None:
    shorter = torch.zeros(FOUR.sequences, WORKLOAD.seq_len // 2, dtype=torch.int64)
    training = train(WORKLOAD, FOUR, Cpu(), [(shorter, shorter)])
    with pytest.raises(ConfigError, match=r"a micro-batch is of shape \(4, 32\), and .* make \(4, 64\)"):
        next(training)


def test_a_step_of_another_size_than_the_workload_asks_for_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 1,024, and these toggles take steps of 256"):
        start(FOUR, replace(WORKLOAD, tokens_per_step=1024))
    assert (
        next(start(replace(FOUR, grad_accum_steps=4), replace(WORKLOAD, tokens_per_step=1024))).tokens == 1024
    )


def test_steps_are_those_of_plain_adamw_with_clipping(baseline: list[float]) -> None:
    """The first steps written out with torch's defaults, no toggle, no scaler, no accumulation."""
    from gpt2.model.model import build

    model = build(WORKLOAD.config, WORKLOAD.seed, torch.device("cpu"))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    free = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    corpus = open_corpus("synthetic", vocab_size=509, seed=WORKLOAD.seed)
    batches = Batches(corpus, seq_len=64, tokens_per_step=256, seed=WORKLOAD.seed)
    found, norms = [], []
    for step in range(STEPS):
        x, y = (torch.from_numpy(t) for t in batches.sequences(step, 0, 4))
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= min(1.0, 1.0 / norm.item())
        optimizer.step()
        found.append(loss.item())
        norms.append(norm.item())
    assert found == pytest.approx(baseline, rel=1e-5)
    assert norms == pytest.approx([step.grad_norm.item() for step in steps(FOUR)], rel=1e-4)


def test_a_warm_up_changes_the_learning_rate_of_the_first_steps(baseline: list[float]) -> None:
    warmed = losses(FOUR, replace(WORKLOAD, lr_warmup_steps=100))
    assert warmed[0] == baseline[0]
    assert warmed[-1] > baseline[-1]


class Unread(TorchDispatchMode):
    """Fails where a value of a tensor becomes a Python number, which waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step waited for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", ["float32", "bfloat16", "float16"])
def test_training_reads_no_value_from_the_device(autocast: str) -> None:
    with Unread():
        steps(replace(FOUR, adamw="fused", autocast=autocast), count=2)


def test_the_guard_against_reading_values_works() -> None:
    for reading in (float, bool, int, Tensor.item):
        with Unread(), pytest.raises(AssertionError, match="waited"):
            reading(torch.ones(()))


@pytest.mark.slow
@pytest.mark.parametrize("adamw", ["for_loop", "fused"])
def test_a_step_whose_gradients_float16_cannot_hold_changes_nothing_and_its_norm_tells(adamw: str) -> None:
    training = start(replace(FOUR, autocast="float16", adamw=adamw))
    # Halved until float16 holds all gradients.
    training.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    skipped = []
    for _ in range(12):
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        step = next(training)
        same = all(map(torch.equal, before, training.model.parameters()))
        assert same == (not math.isfinite(step.grad_norm.item()))
        skipped.append(same)
    assert skipped[0]
    assert not skipped[-1]
    assert training.scaler.get_scale() == 2.0 ** (22 - sum(skipped))


def test_a_recorded_loss_shares_no_memory_with_what_the_forward_pass_returned() -> None:
    """A CUDA graph overwrites that when it runs again."""
    for toggles in (Toggles(), replace(FOUR, grad_accum_steps=2)):
        training, returned = start(toggles), []
        training.wrapped.register_forward_hook(
            lambda module, x, loss, returned=returned: returned.append(loss)
        )
        step = next(training)
        assert step.loss.data_ptr() not in {loss.data_ptr() for loss in returned}


def test_attention_that_looks_ahead_is_beyond_the_tolerance_of_the_first_gradient_norm(monkeypatch) -> None:
    sound = steps(FOUR, count=1)[0]
    # Not causal.
    monkeypatch.setitem(ATTENTION, "sdpa", by_heads(torch.nn.functional.scaled_dot_product_attention))
    broken = steps(replace(FOUR, attention="sdpa"), count=1)[0]
    difference = loss_difference([broken.grad_norm.item()], [sound.grad_norm.item()])
    assert difference > 3 * LOSS_TOLERANCE["float32"].first_grad_norm


def test_half_the_learning_rate_is_beyond_the_tolerance_of_bfloat16_losses(baseline: list[float]) -> None:
    slow = losses(replace(FOUR, autocast="bfloat16"), replace(WORKLOAD, lr=WORKLOAD.lr / 2))
    assert loss_difference(slow, baseline) > LOSS_TOLERANCE["bfloat16"].losses


@pytest.mark.slow
def test_compiled_code_with_our_own_functions_is_found_in_the_cache_by_a_later_process(
    tmp_path: Path,
) -> None:
    script = (
        "import json, sys, torch\n"
        "from gpt2.config.toggles import Toggles\n"
        "from gpt2.config.workload import Workload\n"
        "from gpt2.data.batches import Batches, open_corpus\n"
        "from gpt2.device import find\n"
        "from gpt2.training.train import micro_batches, train\n"
        "toggles = Toggles(device='cpu', compile='default', cross_entropy='closed_form')\n"
        "workload, device = Workload(model='tiny', data='synthetic', seq_len=32), find(toggles)\n"
        "corpus = open_corpus('synthetic', vocab_size=workload.config.vocab_size)\n"
        "batches = Batches(corpus, seq_len=32, tokens_per_step=32, seed=1)\n"
        "training = train(workload, toggles, device, device.feed(micro_batches(batches, toggles)))\n"
        "loss = float(next(training).loss)\n"
        "counters = sys.modules['torch._dynamo.utils'].counters['aot_autograd']\n"
        "print(json.dumps([loss, counters['autograd_cache_hit'], counters['autograd_cache_bypass']]))\n"
    )
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    first, later = (
        json.loads(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    )
    assert first[1:] == [0, 0]
    assert later == [first[0], 1, 0]

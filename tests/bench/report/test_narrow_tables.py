"""What changes the maths: a residual stream and weights in bfloat16, the latter rounded at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trainings import FOUR, start

from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import LOSS_TOLERANCE
from gpt2.model.kernel_libraries import to_float8
from gpt2.model.model import LayerNorm
from gpt2.proofs.profiler import profile
from gpt2.proofs.prove import prove
from gpt2.training.optimizer import CompiledAdamW, rounded_at_random

NARROW = replace(FOUR, autocast="bfloat16", adamw="compiled", weights="bfloat16")
RESIDUAL = replace(FOUR, autocast="bfloat16", residual="bfloat16")


def drawn(x: torch.Tensor, seed: int) -> torch.Tensor:
    return rounded_at_random(x, torch.tensor(seed, dtype=torch.int32))


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_is_rounded_up_as_often_as_leaves_its_mean(share: float, sign: int) -> None:
    below, step = 1.0, 2**-7  # bfloat16's neighbours
    found = drawn(torch.full((300, 1000), sign * (below + share * step)), seed=12345)
    up = (found == sign * (below + step)).double().mean().item()
    assert (found == sign * below).double().mean().item() == pytest.approx(1 - up, abs=1e-12)
    assert up == pytest.approx(share, abs=5 * (0.25 / 300_000) ** 0.5)


def test_numbers_that_bfloat16_has_stay_as_they_are() -> None:
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(drawn(exact.float(), seed=7), exact)


def test_draws_of_neighbours_and_of_other_seeds_do_not_go_together() -> None:
    half = torch.full((100_000,), 1 + 2**-8)
    draws = torch.stack([(drawn(half, seed) > 1).double() for seed in (*range(8), -1640531535, 2**31 - 1)])
    pairs = torch.corrcoef(draws) - torch.eye(len(draws))
    assert pairs.abs().max() < 5 / 100_000**0.5
    for lag in (1, 2, 64, 768):
        assert torch.corrcoef(torch.stack([draws[0, lag:], draws[0, :-lag]]))[0, 1].abs() < 5 / 100_000**0.5


def test_updates_too_small_for_bfloat16_add_up_all_the_same() -> None:
    weight = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    adamw = CompiledAdamW(
        [{"params": [weight], "weight_decay": 0.0}], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, copies={}
    )
    for _ in range(50):  # each step moves each weight by 1e-4, a fortieth of bfloat16's step below 1
        weight.grad = torch.ones_like(weight)
        adamw.step()
    assert weight.float().mean().item() == pytest.approx(1 - 50 * 1e-4, abs=1e-4)


def test_matrices_are_narrow_and_what_keeps_their_history_is_not() -> None:
    training = start(NARROW)
    next(training)
    for parameter in training.model.parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() >= 2 else torch.float32)
        assert training.optimizer.state[parameter]["exp_avg"].dtype == torch.float32


COMPILED = pytest.param(replace(NARROW, compile="default", residual="bfloat16"), marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "toggles", [NARROW, COMPILED, RESIDUAL], ids=["weights", "both, compiled", "residual"]
)
def test_narrow_trainings_are_proved_and_learn_nearly_what_the_baseline_learns(toggles: Toggles) -> None:
    torch.compiler.reset()
    narrow, plain = start(toggles), start(FOUR)
    for _ in range(8):
        mine, baseline = next(narrow), next(plain)
        assert mine.loss.item() == pytest.approx(
            baseline.loss.item(), rel=2 * LOSS_TOLERANCE["bfloat16"].losses
        )
    found = prove(narrow, profile(lambda: next(narrow), narrow.device))
    assert {name: each for name, each in found.items() if not each.took_effect} == {}


def test_a_layer_norms_gradients_over_many_tokens_are_added_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator).bfloat16()
    gradient = (torch.randn(4096, 64, generator=generator) + 1).bfloat16()
    wide = torch.nn.LayerNorm(64).double()
    wide(x.double()).backward(gradient.double())
    mine = LayerNorm(64)
    mine(x).backward(gradient.float())
    for a, b in zip(mine.parameters(), wide.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-3)  # of sums of some thousands


def test_what_changes_the_maths_says_so_and_what_only_rounds_does_not() -> None:
    assert Toggles(autocast="bfloat16", compile="default", adamw="compiled", attention="blocks").maths() == {}
    assert replace(NARROW, residual="bfloat16").maths() == {
        "residual=bfloat16": "each layer's sum is rounded to bfloat16",
        "weights=bfloat16": "weights keep 8 of 24 bits, rounded at random",
    }


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_linear_layers_in_float8_learn_nearly_what_the_baseline_learns(scaling: str) -> None:
    pytest.importorskip("torchao")
    plain, narrow = start(FOUR), start(replace(FOUR, autocast="bfloat16"))
    before = [name for name, _ in narrow.model.named_parameters()]
    to_float8(narrow.model, scaling, emulate=True)
    assert [name for name, _ in narrow.model.named_parameters()] == before
    layers = [module for module in narrow.model.modules() if type(module).__name__ == "Float8Linear"]
    assert len(layers) == 4 * narrow.model.config.n_layer
    tolerance = LOSS_TOLERANCE["float8"]
    for number in range(8):
        mine, baseline = next(narrow), next(plain)
        assert mine.loss.item() == pytest.approx(baseline.loss.item(), rel=tolerance.losses)
        assert mine.loss.item() != baseline.loss.item()
        if not number:
            assert mine.loss.item() == pytest.approx(baseline.loss.item(), rel=tolerance.first_loss)
            assert mine.grad_norm.item() == pytest.approx(
                baseline.grad_norm.item(), rel=tolerance.first_grad_norm
            )

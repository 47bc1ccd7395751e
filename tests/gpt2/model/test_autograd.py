"""What autograd, tuned_linear and the optimizer write out, against what torch derives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from trainings import FAST, FOUR, WORKLOAD, start

from gpt2.config.toggles import MATMUL_CHOICES
from gpt2.model import tuned_linear
from gpt2.model.attention import BlockAttention
from gpt2.model.autograd import CrossEntropy, SigmoidGelu, TiedEmbedding, chunked_cross_entropy
from gpt2.training.optimizer import CompiledAdamW, clip_gradients


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Its result, and the gradients of its floating-point inputs for an arbitrary gradient of the result."""
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in inputs]
    result = function(*leaves)
    result.backward(torch.linspace(-1, 2, result.numel()).view(result.shape).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_alike(mine: list[Tensor], torchs: list[Tensor]) -> None:
    for a, b in zip(mine, torchs, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)


def test_gelu_by_an_exponential_is_torchs_tanh_approximation_also_where_it_overflows() -> None:
    x = torch.cat([torch.linspace(-200, 200, 4001), torch.linspace(-8, 8, 4001)])
    assert_alike(
        with_gradients(SigmoidGelu.apply, x), with_gradients(lambda x: F.gelu(x, approximate="tanh"), x)
    )


def test_cross_entropy_in_closed_form_is_torchs_with_masked_classes_too() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 40, generator=generator)
    logits[:, 37:] = float("-inf")
    targets = torch.tensor([0, 36, 5, 5, 9, 1, 2])
    assert_alike(
        with_gradients(CrossEntropy.apply, logits, targets), with_gradients(F.cross_entropy, logits, targets)
    )


def test_the_tied_embeddings_gradient_is_the_sum_of_both_uses_with_tokens_that_repeat() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, tokens = torch.randn(11, 4, generator=generator), torch.tensor([[1, 1, 10], [1, 0, 3]])

    def tied(weight: Tensor) -> Tensor:
        rows, head = TiedEmbedding.apply(weight, None, tokens)
        return rows @ head.t()

    assert_alike(
        with_gradients(tied, weight), with_gradients(lambda w: F.embedding(tokens, w) @ w.t(), weight)
    )


@pytest.mark.parametrize("linear", [tuned_linear.tuned_linear, tuned_linear.onednn_linear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_by_tuned_products_or_by_onednn_is_torchs(
    linear: Callable[..., Tensor], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(*shape, generator=generator) for shape in ((2, 8, 24), (40, 24), (40,)))
    inputs = (x, weight, b) if bias else (x, weight)

    assert_alike(with_gradients(linear, *inputs), with_gradients(F.linear, *inputs))


@pytest.mark.parametrize("T", [1, 31, 256, 300, 1024])
def test_gradients_of_attention_by_blocks_are_torchs_also_where_the_last_block_is_not_full(T: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, T, 16, generator=generator) for _ in range(3))
    torchs = with_gradients(partial(F.scaled_dot_product_attention, is_causal=True), q, k, v)
    torch.testing.assert_close(with_gradients(BlockAttention.apply, q, k, v), torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("largest_score", [5, 40, 80])
def test_in_bfloat16_gradients_of_attention_by_blocks_err_less_than_twice_as_much_as_torchs(
    largest_score: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 512, 64, generator=generator) for _ in range(3))
    inputs = [each.bfloat16() for each in (q * largest_score / 5, k, v)]
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True)
    exact = with_gradients(sdpa, *(each.double() for each in inputs))[1:]

    def error(function: Callable[..., Tensor]) -> float:
        pairs = zip(with_gradients(function, *inputs)[1:], exact, strict=True)
        return max(((found.double() - true).norm() / true.norm()).item() for found, true in pairs)

    assert error(BlockAttention.apply) < 2 * error(sdpa)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_product_shared_out_is_the_whole_product(side: str, parts: int) -> None:
    a, b, bias = torch.randn(13, 5), torch.randn(6, 5).t(), torch.randn(6)
    out = tuned_linear._arranged(f"{side} in {parts}", a, b, bias)
    torch.testing.assert_close(out, torch.addmm(bias, a, b))


def tuned_anew(monkeypatch: pytest.MonkeyPatch, timed: str) -> None:
    """Run a tuned product as a new process would; timed: what it finds fastest if it times the ways."""
    monkeypatch.setattr(tuned_linear, "_chosen", {})
    monkeypatch.setattr(tuned_linear, "_fastest", lambda *operands: timed)
    tuned_linear.tuned_linear(torch.randn(16, 8), torch.randn(24, 8))


def test_what_one_process_chose_for_a_product_the_next_one_takes_without_timing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MATMUL_CHOICES, str(tmp_path / "choices"))
    tuned_anew(monkeypatch, "rows in 4")
    tuned_anew(monkeypatch, "whole")
    assert tuned_linear.chosen() == {"rows in 4": 1}
    monkeypatch.delenv(MATMUL_CHOICES)
    tuned_anew(monkeypatch, "whole")
    assert tuned_linear.chosen() == {"whole": 1}


def test_of_two_ranks_that_chose_differently_the_first_to_say_so_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MATMUL_CHOICES, str(tmp_path / "choices"))
    tuned_anew(monkeypatch, "rows in 4")
    (first,) = (tmp_path / "choices").read_text().splitlines()
    with (tmp_path / "choices").open("a") as file:
        file.write(first.replace("rows in 4", "whole") + "\n")
    tuned_anew(monkeypatch, "columns in 4")
    assert tuned_linear.chosen() == {"rows in 4": 1}


@pytest.mark.parametrize("content", ["", "\0\n: rows in 4\n", "rows in 4"])
def test_a_product_that_the_kept_choices_do_not_name_is_timed(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "choices").write_text(content)
    monkeypatch.setenv(MATMUL_CHOICES, str(tmp_path / "choices"))
    tuned_anew(monkeypatch, "whole")
    assert tuned_linear.chosen() == {"whole": 1}


def test_where_choices_cannot_be_kept_the_product_is_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MATMUL_CHOICES, "/dev/full")
    tuned_anew(monkeypatch, "rows in 4")
    assert tuned_linear.chosen() == {"rows in 4": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow_head", [False, True], ids=["head as it is", "head in that format"])
def test_the_loss_in_chunks_is_that_of_whole_logits_in_the_same_number_format(
    narrow_head: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, head = torch.randn(1000, 64, generator=generator), 0.1 * torch.randn(512, 64, generator=generator)
    targets, bias = torch.randint(0, 509, (1000,), generator=generator), torch.zeros(512)
    bias[509:] = -torch.inf
    head = head.to(dtype) if narrow_head else head

    def whole(x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy(x @ head.t() + bias, targets)

    def chunked(x: Tensor, head: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            return chunked_cross_entropy(x, head, targets, bias)

    found, *gradients = with_gradients(chunked, x, head)
    exact, *expected = with_gradients(whole, x.to(dtype).float(), head.to(dtype).float())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-6 if dtype == torch.float32 else 5e-4)
    for mine, torchs in zip(gradients, expected, strict=True):
        assert (mine.float() - torchs).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * torchs.norm()


@pytest.mark.parametrize("clip", ["separate", "in_step"])
def test_fused_adamw_with_scaled_gradients_is_adamw_with_clipping(clip: str) -> None:
    mine, torchs = (torch.nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4)) for _ in range(2))
    fused, oracle = torch.optim.AdamW([mine], lr=0.01, fused=True), torch.optim.AdamW([torchs], lr=0.01)
    for size in (0.1, 3.0, 0.5):
        torchs.grad = torch.full((6, 4), size)
        mine.grad = torchs.grad.clone()
        expected = torch.nn.utils.clip_grad_norm_([torchs], 1.0)
        torch.testing.assert_close(clip_gradients(fused, [mine], 1.0, clip), expected)
        fused.step()
        oracle.step()
        torch.testing.assert_close(mine, torchs)


@pytest.mark.parametrize("clip", ["separate", "in_step"])
def test_compiled_adamw_is_torchs_adamw_with_its_clipping(clip: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes, decays = [(6, 4), (4,)], (0.1, 0.0)
    first = [torch.randn(shape, generator=generator) for shape in shapes]
    mine, torchs = ([torch.nn.Parameter(each.clone()) for each in first] for _ in range(2))
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
    compiled = CompiledAdamW(
        [{"params": [p], "weight_decay": d} for p, d in zip(mine, decays, strict=True)], **options, copies={}
    )
    oracle = torch.optim.AdamW(
        [{"params": [p], "weight_decay": d} for p, d in zip(torchs, decays, strict=True)], **options
    )
    for size in (0.1, 3.0, 0.5):
        for a, b in zip(mine, torchs, strict=True):
            b.grad = size * torch.randn(a.shape, generator=generator)
            a.grad = b.grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(torchs, 1.0)
        torch.testing.assert_close(clip_gradients(compiled, compiled.leaves, 1.0, clip), expected)
        compiled.step()
        oracle.step()
        torch.testing.assert_close(mine, torchs)
    for a, b in zip(mine, torchs, strict=True):
        assert compiled.state[a].keys() == oracle.state[b].keys()
        torch.testing.assert_close(compiled.state[a]["exp_avg_sq"], oracle.state[b]["exp_avg_sq"])


@pytest.mark.slow
def test_weights_cast_by_the_optimiser_train_as_weights_cast_by_autocast() -> None:
    losses = []
    for casts in ("optimizer", "forward"):
        unclipped = replace(WORKLOAD, grad_clip=1e6)  # a norm is added up in another order for another format
        training = start(
            replace(FAST, compile="eager", compile_region="model", weight_casts=casts), unclipped
        )
        losses.append([next(training).loss.item() for _ in range(4)])
    assert losses[0] == losses[1]  # bit for bit: the same numbers are cast at another time


@pytest.mark.slow
def test_copies_of_weights_are_no_parameters_and_are_written_by_each_step() -> None:
    training = start(FAST)
    names = [name for name, _ in training.model.named_parameters()]
    assert names == [name for name, _ in start(FOUR).model.named_parameters()]
    next(training)
    copies = training.optimizer.copies  # type: ignore[attr-defined]
    assert len(copies) == 4 * training.model.config.n_layer + 1
    assert all(torch.equal(weight.bfloat16(), copy) for weight, copy in copies.items())
    assert all(leaf.grad is None for leaf in training.leaves)


@pytest.mark.slow
def test_all_of_them_together_learn_what_the_baseline_learns() -> None:
    fast, plain = start(FAST), start(FOUR, WORKLOAD)
    for _ in range(8):
        mine, baseline = next(fast), next(plain)
        assert mine.loss.item() == pytest.approx(baseline.loss.item(), rel=5e-3)
        assert mine.grad_norm.item() == pytest.approx(baseline.grad_norm.item(), rel=2e-2)

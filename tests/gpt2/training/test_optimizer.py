"""How CompiledAdamW keeps weights and averages, and its arithmetic against torch.optim.AdamW's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainings import FOUR, start

from gpt2.pretrain import checkpoint_tensors
from gpt2.pretrain.checkpoint import Saved, Shape, read
from gpt2.training.optimizer import CompiledAdamW, clip_gradients

pytestmark = pytest.mark.usefixtures("process_settings")
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = [(6, 4), (4,), (3,), (5, 8), (8,)]
DECAYS = [0.1, 0.0]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Have torch.compile return functions as they are; holds the arguments of its calls."""
    calls: list[dict[str, Any]] = []

    def compile(function: Callable[..., Any], **arguments: Any) -> Callable[..., Any]:
        calls.append(arguments)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    return calls


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [torch.nn.Parameter(each.to(dtype) if each.dim() > 1 else each) for each in drawn]


def groups(weights: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return two groups: a matrix and two vectors, a matrix and one vector."""
    parts = weights[:3], weights[3:]
    return [{"params": list(part), "weight_decay": decay} for part, decay in zip(parts, DECAYS, strict=True)]


def compiled(weights: Sequence[Tensor]) -> CompiledAdamW:
    return CompiledAdamW(groups(weights), **OPTIONS, copies={})


def set_gradients(weights: Sequence[Tensor], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def step(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor], number: int) -> Tensor:
    """Take one step with gradients, a learning rate and a norm after clipping that depend on its number."""
    set_gradients(weights, number)
    for group in optimizer.param_groups:
        group["lr"] = OPTIONS["lr"] / number
    how = "in_step" if isinstance(optimizer, CompiledAdamW) else "separate"
    norm = clip_gradients(optimizer, weights, 1.0 + number, how)
    optimizer.step()
    return norm


def consecutive(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors lie in one buffer, one after the other."""
    first = tensors[0]
    ends = [each.storage_offset() + each.numel() for each in tensors]
    starts = [each.storage_offset() for each in tensors]
    same = {each.untyped_storage().data_ptr() for each in tensors} == {first.untyped_storage().data_ptr()}
    return same and starts[1:] == ends[:-1]


def joined(optimizer: CompiledAdamW) -> list[bool]:
    """Return whether the vectors of the first group, and their averages of each kind, lie in one buffer."""
    small = [weight for weight in optimizer.param_groups[0]["params"] if weight.dim() == 1]
    kinds = [[optimizer.state[weight][kind] for weight in small] for kind in ("exp_avg", "exp_avg_sq")]
    return [consecutive(each) for each in (small, *kinds)]


@pytest.mark.usefixtures("eager")
def test_vectors_of_a_group_and_their_averages_lie_in_one_buffer_with_the_values_they_had() -> None:
    mine, before = weights(), weights()
    assert joined(compiled(mine)) == [True] * 3
    torch.testing.assert_close(mine, before, rtol=0, atol=0)


@pytest.mark.usefixtures("eager")
def test_a_state_is_filled_in_place_and_never_loaded() -> None:
    first, second = compiled(weights()), compiled(weights())
    with pytest.raises(NotImplementedError, match="fill them in place"):
        second.load_state_dict(first.state_dict())


@pytest.mark.usefixtures("eager")
def test_they_lie_there_after_a_checkpoint_was_resumed(tmp_path: Path) -> None:
    first, second = (start(replace(FOUR, adamw="compiled")) for _ in range(2))
    next(first)
    facts = Saved(
        shape=Shape.of(first.model.config), step=1, updates=checkpoint_tensors.updates(first), tokens=256
    )
    checkpoint_tensors.save(tmp_path / "c", first, facts)
    checkpoint_tensors.restore(tmp_path / "c", read(tmp_path / "c"), second)
    small = [parameter for parameter in second.model.parameters() if parameter.dim() == 1]
    states = [second.optimizer.state[parameter] for parameter in small]
    assert all(
        consecutive(each)
        for each in (small, *([s[kind] for s in states] for kind in checkpoint_tensors.AVERAGES))
    )
    assert all(map(torch.equal, second.model.parameters(), first.model.parameters()))


def test_groups_decay_clipping_and_a_changing_learning_rate_give_torchs_weights_and_averages() -> None:
    mine, torchs = weights(), weights()
    optimizer, oracle = compiled(mine), torch.optim.AdamW(groups(torchs), **OPTIONS)
    for number in range(1, 6):
        torch.testing.assert_close(step(optimizer, mine, number), step(oracle, torchs, number))
        torch.testing.assert_close(mine, torchs)
    for a, b in zip(mine, torchs, strict=True):
        torch.testing.assert_close(optimizer.state[a], oracle.state[b])


def test_a_changing_learning_rate_compiles_nothing_again() -> None:
    optimizer = compiled(weights())
    step(optimizer, optimizer.leaves, 1)
    with torch.compiler.set_stance("fail_on_recompile"):
        step(optimizer, optimizer.leaves, 2)


def test_a_step_joins_gradients_once_for_each_group_and_copies_no_weight() -> None:
    optimizer = compiled(weights())
    step(optimizer, optimizer.leaves, 1)
    set_gradients(optimizer.leaves, 2)
    with torch.profiler.profile(record_shapes=True) as profiler:
        optimizer.step()
    events = list(profiler.events() or [])
    calls = [event.name for event in events]
    assert calls.count("aten::cat") == 1  # of the group with several vectors
    assert calls.count("aten::add_") == 1  # of all step numbers
    # Of a number at most.
    assert not any(event.input_shapes[0] for event in events if event.name == "aten::copy_")


def test_on_cuda_unlike_updates_are_combined_and_the_norm_is_torchs_of_lists(
    eager: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are a CPU's, which say that they are on CUDA."""
    mine = weights(torch.bfloat16)
    with monkeypatch.context() as here:
        here.setattr(torch.Tensor, "is_cuda", True, raising=False)
        optimizer = compiled(mine)
    assert eager[0]["options"] == {"combo_kernels": True}
    set_gradients(mine, 1)
    with torch.profiler.profile() as profiler:
        norm = optimizer.norm()
    calls = [event.name for event in profiler.events() or []]
    assert calls.count("aten::_foreach_norm") == 2  # one for each dtype
    expected = torch.cat([weight.grad.float().flatten() for weight in mine if weight.grad is not None]).norm()
    torch.testing.assert_close(norm, expected)


def test_torch_has_the_option_that_combines_unlike_updates() -> None:
    assert "combo_kernels" in torch._inductor.list_options()

from dataclasses import replace

import pytest
import torch
from places import ROOT
from torch.utils.flop_counter import FlopCounterMode

from gpt2.config.workload import PRESETS, GPT2Config, Workload, flops_per_token, hardware_flops_per_token
from gpt2.model.model import build


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_published_number_of_parameters(model: str, parameters: int) -> None:
    assert PRESETS[model].parameters == parameters


@pytest.mark.parametrize(("model", "flops"), [("gpt2", 854_438_400), ("gpt2-xl", 10_273_545_600)])
def test_flops_per_token_are_the_published_ones(model: str, flops: int) -> None:
    assert flops_per_token(PRESETS[model], 1024) == flops


@pytest.mark.parametrize(
    ("config", "T"),
    [
        (PRESETS["tiny"], 128),
        (PRESETS["tiny"], 40),
        (GPT2Config(n_layer=3, n_head=4, n_embd=48, n_ctx=64), 64),
    ],
)
def test_flops_per_token_are_what_torch_counts_for_the_same_model(config: GPT2Config, T: int) -> None:
    model = build(config, 0, torch.device("cpu"))
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == 2 * T * flops_per_token(config, T)


def test_padding_the_vocabulary_leaves_the_flops_of_the_workload_alone() -> None:
    padded = GPT2Config(n_layer=2, n_head=2, n_embd=64, n_ctx=128, vocab_size=509, padded_vocab_size=512)
    assert flops_per_token(padded, 128) == flops_per_token(PRESETS["tiny"], 128)


def test_learning_rate_rises_linearly_and_then_stays() -> None:
    workload = Workload(lr=1.0, lr_warmup_steps=4)
    assert [workload.lr_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_learning_rate_is_constant_without_a_warm_up() -> None:
    assert Workload(lr=0.5).lr_at(0) == 0.5


@pytest.mark.parametrize("recompute", ["none", "gelu", "block"])
def test_hardware_flops_per_token_are_what_torch_counts_for_what_really_runs(recompute: str) -> None:
    config = replace(PRESETS["tiny"], padded_vocab_size=512, recompute=recompute)
    model = build(config, 0, torch.device("cpu"))
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == 2 * 64 * hardware_flops_per_token(config, 64, recompute)


def test_hardware_flops_without_padding_and_recomputation_are_those_of_the_workload() -> None:
    assert hardware_flops_per_token(PRESETS["gpt2"], 1024, "gelu") == flops_per_token(PRESETS["gpt2"], 1024)


def test_the_documented_sizes_are_those_of_the_presets() -> None:
    text = (ROOT / "docs" / "ladders.md").read_text()
    for name, config in PRESETS.items():
        flops, state = flops_per_token(config, config.n_ctx), 16 * config.parameters / 2**30
        row = f"| `{name}` | {config.parameters:,} | {flops:,} | {state:,.1f} |"
        assert name in ("tiny", "mini") or row in text


@pytest.mark.parametrize(
    ("model", "billions", "head"),
    [
        ("gpt3-small", 0.125, 64),
        ("gpt3-medium", 0.350, 64),
        ("gpt3-large", 0.760, 96),
        ("gpt3-xl", 1.3, 128),
        ("gpt3-2.7b", 2.7, 80),
        ("gpt3-6.7b", 6.7, 128),
        ("gpt3-13b", 13.0, 128),
        ("gpt3-175b", 175.0, 128),
    ],
)
def test_gpt3_s_sizes_have_the_published_width_of_heads_and_number_of_parameters(
    model: str, billions: float, head: int
) -> None:
    config = PRESETS[model]
    assert config.n_embd == config.n_head * head
    assert config.n_ctx == 2048
    assert config.parameters / 1e9 == pytest.approx(billions, rel=0.02)

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from models import from_conv1d, random_weights, to_transformers

from gpt2.config.workload import PRESETS, GPT2Config
from gpt2.hardware import host
from gpt2.model.model import GPT2, build

CPU = torch.device("cpu")
NO_BRGEMM = host.missing_brgemm("float32")
ATTENTIONS = [
    *("explicit", "sdpa", "blocks"),
    pytest.param("brgemm", marks=pytest.mark.skipif(bool(NO_BRGEMM), reason=str(NO_BRGEMM))),
]


def small(*, attention: str = "explicit", padded_vocab_size: int = 0) -> GPT2Config:
    return replace(PRESETS["tiny"], attention=attention, padded_vocab_size=padded_vocab_size)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("model", ["tiny", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_logits_and_gradients_equal_those_of_transformers(model: str, attention: str) -> None:
    p = PRESETS[model]
    config = GPT2Config(
        n_layer=p.n_layer, n_head=p.n_head, n_embd=p.n_embd, vocab_size=p.vocab_size, attention=attention
    )
    ours = build(config, 1, CPU)
    random_weights(ours)
    theirs = to_transformers(ours)
    tokens = torch.randint(p.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:]

    logits = ours.logits(x)
    expected = theirs(x).logits
    assert (logits - expected).abs().max() < 1e-4

    ours(x, y).backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), y.flatten()).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected_gradient = gradients[f"transformer.{name}"].grad
        assert parameter.grad is not None
        assert expected_gradient is not None
        assert (parameter.grad - from_conv1d(name, expected_gradient)).abs().max() < 1e-4, name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("T", [128, 96, 5])  # of 128 positions
@torch.no_grad()  # FlexAttention has no backward pass on a CPU
def test_flexattention_attends_as_the_explicit_scores_do_in_shorter_sequences_too(T: int) -> None:
    tokens = torch.randint(509, (2, T), generator=torch.Generator().manual_seed(0))
    flex, explicit = (build(small(attention=kind), 0, CPU).logits(tokens) for kind in ("flex", "explicit"))
    assert (flex - explicit).abs().max() < 1e-5


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_future_tokens_cannot_affect_past_logits(attention: str) -> None:
    model = build(small(attention=attention), 0, CPU)
    tokens = torch.randint(509, (1, 64), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 509
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_has_as_many_parameters_as_its_config_says(name: str) -> None:
    with torch.device("meta"):
        model = GPT2(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].parameters


def test_weights_start_normal_with_residual_projections_scaled_down() -> None:
    model = build(PRESETS["gpt2"], 1337, CPU)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 12) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.01), name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_initial_weights_are_the_same_whatever_the_padding() -> None:
    plain, padded = build(small(), 7, CPU), build(small(padded_vocab_size=640), 7, CPU)
    for (name, a), (_, b) in zip(plain.named_parameters(), padded.named_parameters(), strict=True):
        assert torch.equal(a, b[: len(a)]), name
        assert not b[len(a) :].any(), name


def test_initial_weights_depend_on_the_seed() -> None:
    assert not torch.equal(build(small(), 0, CPU).wpe.weight, build(small(), 1, CPU).wpe.weight)


def test_padding_rows_change_neither_loss_nor_gradients() -> None:
    plain, padded = build(small(), 7, CPU), build(small(padded_vocab_size=640), 7, CPU)
    tokens = torch.randint(509, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, padded)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    assert plain.wte.weight.grad is not None
    assert padded.wte.weight.grad is not None
    torch.testing.assert_close(padded.wte.weight.grad[:509], plain.wte.weight.grad)
    assert not padded.wte.weight.grad[509:].any()


@pytest.mark.parametrize("recompute", ["gelu", "block"])
def test_recomputation_changes_neither_loss_nor_gradients(recompute: str) -> None:
    plain, again = (build(replace(small(), recompute=r), 7, CPU) for r in ("none", recompute))
    tokens = torch.randint(509, (2, 65), generator=torch.Generator().manual_seed(0))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (plain, again)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_an_eager_forward_pass_is_not_delayed_by_loading_torchs_compiler() -> None:
    script = (
        "import sys, torch; from gpt2.config.workload import PRESETS; from gpt2.model.model import build\n"
        "model = build(PRESETS['tiny'], 1, torch.device('cpu'))\n"
        "model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).item()\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from trainings import FOUR, every_value, start

from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS
from gpt2.evals.generate import Reader, generate, probabilities, stream_text
from gpt2.interop.convert import write_huggingface
from gpt2.model.model import GPT2, build
from gpt2.text import encoded, gpt2_encoding

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Which is enough for models this small, and does not wait for others on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decided(*, padded_vocab_size: int = 0, n_ctx: int = 128) -> GPT2:
    """A model whose likeliest token is one by far, so that rounding does not change it."""
    model = build(replace(TINY, n_ctx=n_ctx, padded_vocab_size=padded_vocab_size), 0, CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = TINY.vocab_size if name == "wte.weight" else len(parameter)
            drawn = torch.randn((rows, *parameter.shape[1:]), generator=generator)
            parameter[:rows].add_(drawn, alpha=0.1)
    return model


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def generated(model: GPT2, tokens: Tensor, count: int, **options) -> Tensor:
    """(B, count) int64."""
    return torch.stack(list(generate(model, tokens, max_tokens=count, **{"seed": 0, **options})), dim=1)


@torch.no_grad()
def likeliest(model: GPT2, tokens: Tensor) -> Tensor:
    return model.logits(tokens)[:, -1].argmax(dim=-1)


# --- the cache


ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}
"""Of logits of at most 2: other kernels add up in another order. These are of the format's last digit."""


EAGER = [changes for changes in every_value() if "compile" not in changes]
"""That the rest would have the model without a cache compiled takes half a minute each."""


@pytest.mark.usefixtures("process_settings")
@pytest.mark.parametrize("changes", [{}, *EAGER], ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_logits_are_those_of_the_model_without_a_cache_under_every_toggle(changes: dict) -> None:
    training = start(replace(FOUR, **{"threads": 1, **changes}))
    tokens = text(2, 40)
    with torch.no_grad(), training.autocast():
        expected = training.model.logits(tokens)[:, :, : TINY.vocab_size].float()
    reader = Reader(training.model, room=40, autocast=training.autocast)
    pieces = [tokens[:, :17], *tokens[:, 17:].split(1, dim=1)]
    found = torch.stack([reader.read(piece).float() for piece in pieces], dim=1)
    assert expected.abs().max() > 0.2
    assert (found - expected[:, 16:]).abs().max() < ROUNDING[training.toggles.product_format()]


def test_the_residual_stream_is_rounded_where_the_model_rounds_it() -> None:
    """With exact products, among which nothing else hides it."""
    model, tokens = build(replace(TINY, residual="bfloat16"), 0, CPU), text(2, 20)
    with torch.no_grad():
        expected = model.logits(tokens)[:, -1]
    assert (Reader(model, room=20).read(tokens) - expected).abs().max() < 1e-5


def test_a_cached_step_costs_the_same_however_long_the_text() -> None:
    model = decided()
    reader = Reader(model, room=128)
    reader.read(text(2, 100))
    costs = []
    for _ in range(20):
        with FlopCounterMode(display=False) as counter:
            reader.read(text(2, 1))
        costs.append(counter.get_total_flops())
    products = 2 * 2 * (12 * 2 * 64 * 64 + 509 * 64)  # two FLOPs for each row and weight
    attention = 2 * 2 * 2 * 2 * 64 * 120  # in two layers two products of the width with each token before
    assert products <= costs[0] <= costs[-1] <= products + attention


def test_a_text_is_no_other_because_others_are_written_beside_it() -> None:
    model, tokens = decided(), text(3, 9)
    together = generated(model, tokens, 20, temperature=0)
    for row in range(3):
        assert torch.equal(generated(model, tokens[row : row + 1], 20, temperature=0)[0], together[row])


@pytest.mark.usefixtures("process_settings")
def test_the_kernels_that_training_is_bound_to_do_not_bind_sampling() -> None:
    model, tokens = decided(), text(1, 5)
    expected = generated(model, tokens, 5, temperature=0)
    for enable in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp"):
        getattr(torch.backends.cuda, enable)(False)
    assert torch.equal(generated(model, tokens, 5, temperature=0), expected)
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.math_sdp_enabled()


# --- greedy


def test_greedy_output_is_that_of_transformers_for_the_same_weights(tmp_path: Path) -> None:
    model = decided()
    write_huggingface(tmp_path / "folder", model.config, model.state_dict())
    theirs: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "folder")
    tokens = text(3, 12)
    expected = theirs.generate(tokens, max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert torch.equal(generated(model, tokens, 60, temperature=0), expected[:, 12:])


def test_the_likeliest_of_weights_from_transformers_is_theirs(tmp_path: Path) -> None:
    from gpt2.interop.convert import read

    torch.manual_seed(1)
    sizes: dict[str, Any] = {"vocab_size": 300, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 3}
    theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, initializer_range=0.3)).eval()
    theirs.save_pretrained(tmp_path)
    config, weights = read(tmp_path)
    model = GPT2(config)
    model.fill_masks()
    model.load_state_dict(weights)
    tokens = torch.randint(300, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = theirs.generate(tokens, max_new_tokens=50, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(generated(model, tokens, 50, temperature=0), expected[:, 5:])


@pytest.mark.parametrize("prompt", [3, 16, 20])
def test_beyond_the_context_the_last_half_of_the_text_is_a_new_beginning(prompt: int) -> None:
    model, tokens = decided(n_ctx=16), text(2, prompt)
    window, expected = tokens[:, -16:], []
    for _ in range(40):
        if window.size(1) > 16:
            window = window[:, -8:]
        expected.append(likeliest(model, window))
        window = torch.cat([window, expected[-1][:, None]], dim=1)
    assert torch.equal(generated(model, tokens, 40, temperature=0), torch.stack(expected, dim=1))


def test_a_compiled_model_writes_the_same_and_nothing_more_is_compiled() -> None:
    import torch._dynamo.utils as dynamo

    model, tokens = decided(), text(2, 9)
    expected = generated(model, tokens, 30, temperature=0)
    model.compile(backend="eager")
    for block in model.h:
        block.compile(backend="eager")
    with torch.no_grad():
        model(tokens[:, :-1], tokens[:, 1:])
    before = dynamo.counters["frames"]["total"]
    assert torch.equal(generated(model, tokens, 30, temperature=0), expected)
    assert dynamo.counters["frames"]["total"] == before


@pytest.mark.usefixtures("process_settings")
def test_a_training_that_is_sampled_from_goes_on_bit_for_bit() -> None:
    losses = []
    for sampled in (False, True):
        training = start(Toggles(micro_batch_size=2, attention="sdpa", autocast="bfloat16", threads=1))
        losses.append([])
        for step in itertools.islice(training, 4):
            losses[-1].append(step.loss.item())
            if sampled:
                generated(training.model, text(2, 5), 5, autocast=training.autocast)
    assert losses[0] == losses[1]


# --- chance


def test_a_seed_fixes_the_text() -> None:
    model, tokens = decided(), text(2, 5)
    first, again, other = (generated(model, tokens, 20, temperature=3.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_text_of_a_seed_does_not_depend_on_padding() -> None:
    plain, padded = (decided(padded_vocab_size=size) for size in (0, 640))
    texts = [generated(model, text(2, 5), 30, temperature=3.0) for model in (plain, padded)]
    assert torch.equal(*texts)
    assert texts[0].max() < 509


def test_the_random_numbers_of_others_are_left_alone() -> None:
    before = torch.get_rng_state()
    generated(decided(), text(1, 5), 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_come_as_often_as_they_are_probable() -> None:
    model, rows = decided(), 20_000
    with torch.no_grad():
        expected = probabilities(model.logits(text(1, 1))[0], temperature=4.0, top_k=8, top_p=None)[0]
    (drawn,) = generate(model, text(1, 1).expand(rows, 1), max_tokens=1, temperature=4.0, top_k=8, seed=5)
    found = torch.bincount(drawn, minlength=509) / rows
    deviation = (expected * (1 - expected) / rows).sqrt()
    assert ((found - expected).abs() <= 4 * deviation).all()
    assert (expected > 0).sum() == 8


@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 40, 509, 1000]),
    top_p=st.sampled_from([None, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
@settings(deadline=None, max_examples=60)
def test_the_filters_leave_what_those_of_transformers_leave(
    seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> None:
    # In float64, for sums in another order round otherwise, and a token may lie at the very limit.
    logits = torch.randn(3, 509, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    steps: list = [transformers.TemperatureLogitsWarper(temperature)]
    if top_k is not None:
        steps.append(transformers.TopKLogitsWarper(top_k))
    if top_p is not None:
        steps.append(transformers.TopPLogitsWarper(top_p))
    scores = logits
    for step in steps:
        scores = step(torch.zeros(3, 1, dtype=torch.long), scores)
    found = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert torch.equal(found > 0, scores.softmax(dim=-1) > 0)
    torch.testing.assert_close(found, scores.softmax(dim=-1))


def test_equal_logits_at_the_limit_of_top_k_all_stay() -> None:
    found = probabilities(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), temperature=1.0, top_k=2, top_p=None)
    assert (found > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_the_smaller_the_temperature_the_surer_the_likeliest(temperature: float) -> None:
    logits = torch.tensor([[3.0, 3.5, -1e4]])
    found = probabilities(logits, temperature=temperature, top_k=None, top_p=None)
    assert found.tolist() == [[0.0, 1.0, 0.0]]


# --- rows without a token


def crowded(vocab_size: int, padded_vocab_size: int = 0) -> GPT2:
    """A model of which each row that is no token of GPT-2's is likelier than any that is."""
    rows = {"vocab_size": vocab_size, "padded_vocab_size": padded_vocab_size}
    model = build(replace(TINY, n_layer=1, n_embd=16, n_ctx=16, **rows), 0, CPU)
    with torch.no_grad():
        model.ln_f.bias.fill_(1.0)
        model.wte.weight[50257:vocab_size] = 1.0
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {},
        {"top_k": 3},
        {"top_k": 60_000, "temperature": 5.0},
        {"top_p": 0.1},
        {"top_p": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(50257,), (50258,), (50304,), (50304, 50432), (51200,)], ids=str)
def test_a_row_that_is_no_token_is_never_drawn(
    sizes: tuple[int, ...], options: dict, vocabulary: None
) -> None:
    tokens = generated(crowded(*sizes), torch.tensor([[15496], [50256]]), 20, **options)
    assert tokens.max() < 50257
    "".join(stream_text(iter(tokens[0].tolist())))


def test_rows_that_are_no_token_change_no_token_of_a_seed() -> None:
    texts = [generated(crowded(50304), torch.tensor([[15496]]), 10, seed=2)]
    model = crowded(50257)
    with torch.no_grad():
        for name, parameter in crowded(50304).named_parameters():
            model.get_parameter(name).copy_(parameter[:50257] if name == "wte.weight" else parameter)
    texts.append(generated(model, torch.tensor([[15496]]), 10, seed=2))
    assert torch.equal(*texts)


# --- what is refused


@pytest.mark.parametrize(
    ("tokens", "options", "complaint"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, "no token to continue"),
        (torch.tensor([[509]]), {}, "token 509 is beyond the model's vocabulary of 509"),
        (torch.tensor([[5, -1, 3]]), {}, "token -1 is beyond the model's vocabulary"),
        (torch.tensor([[0]]), {"temperature": -1.0}, "temperature"),
        (torch.tensor([[0]]), {"temperature": float("nan")}, "temperature"),
        (torch.tensor([[0]]), {"top_k": 0}, "top_k must be at least 1"),
        (torch.tensor([[0]]), {"top_p": 0.0}, "top_p above 0"),
        (torch.tensor([[0]]), {"top_p": 1.5}, "top_p above 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(
    tokens: Tensor, options: dict, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        generate(decided(), tokens, max_tokens=1, seed=0, **options)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_that_has_diverged_is_not_drawn_from(temperature: float) -> None:
    model = decided()
    with torch.no_grad():
        model.ln_f.weight[0] = float("nan")
    with pytest.raises(ValueError, match="not finite: it has diverged"):
        generated(model, text(1, 3), 1, temperature=temperature)


# --- text


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("<|endoftext|>", [50256]),
        ("<|endoftext|>Hello", [50256, 15496]),
        ("Hello<|endoftext|><|endoftext|>Hello", [15496, 50256, 50256, 15496]),
        ("", [50256]),
        (" ", [220]),
        ("<|endoftext>", [27, 91, 437, 1659, 5239, 29]),
    ],
)
def test_a_prompt_may_say_where_a_text_begins_and_an_empty_one_begins_there(
    prompt: str, tokens: list[int], vocabulary: None
) -> None:
    assert encoded(prompt) == tokens


def test_text_comes_as_soon_as_its_characters_are_whole(vocabulary: None) -> None:
    encoding = gpt2_encoding()
    written = "Grüße, 漢字 👩‍🚀!"
    tokens = encoding.encode_ordinary(written)
    broken = [token for token in tokens if "�" in encoding.decode([token])]
    pieces = list(stream_text(iter(tokens)))
    assert broken
    assert "".join(pieces) == written
    assert all(pieces)
    assert len(tokens) - len(broken) <= len(pieces) < len(tokens)


@given(tokens=st.lists(st.integers(0, 50255), max_size=40))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_pieces_are_the_text_of_any_tokens(tokens: list[int], vocabulary: None) -> None:
    assert "".join(stream_text(iter(tokens))) == gpt2_encoding().decode(tokens)


def test_text_ends_with_its_last_token_and_asks_for_no_more(vocabulary: None) -> None:
    tokens = iter([*gpt2_encoding().encode_ordinary("The end."), 50256, 15496])
    assert "".join(stream_text(tokens)) == "The end."
    assert list(tokens) == [15496]


def test_a_top_p_that_rounds_to_zero_keeps_the_likeliest_token() -> None:
    shares = probabilities(torch.tensor([[1.0, 3.0, 2.0]]), temperature=1.0, top_k=None, top_p=1e-300)
    assert shares.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-31])
def test_however_cold_it_is_the_likeliest_is_drawn(temperature: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e4, 0.0, 1e4]])
    shares = probabilities(logits, temperature=temperature, top_k=None, top_p=None)
    assert shares.tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]

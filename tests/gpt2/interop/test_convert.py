from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2.config.workload import GPT2Config
from gpt2.data.tokenizer_files import other_vocabulary, tokenizer_files
from gpt2.interop import convert
from gpt2.interop.convert import (
    ConvertError,
    ConvertWarning,
    read,
    write_huggingface,
    write_llmc,
    write_nanogpt,
)
from gpt2.model.model import GPT2, build, shapes
from gpt2.text import gpt2_encoding

SMALL = GPT2Config(n_layer=3, n_head=2, n_embd=32, n_ctx=48, vocab_size=301)
CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::gpt2.interop.convert.ConvertWarning")


def sized(vocab_size: int) -> GPT2Config:
    return replace(SMALL, vocab_size=vocab_size, padded_vocab_size=0)


def drawn(config: GPT2Config = SMALL, seed: int = 0) -> dict[str, Tensor]:
    """Weights no two of which are equal, as they come from a model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(config).items()}


def llmc(path: Path, config: GPT2Config, weights: dict[str, Tensor]) -> None:
    write_llmc(path, config, weights, bfloat16=False)


WRITERS: dict[str, Callable[[Path, GPT2Config, dict[str, Tensor]], None]] = {
    "huggingface": write_huggingface,
    "nanogpt": write_nanogpt,
    "llmc": llmc,
}


def assert_same(
    found: tuple[GPT2Config, dict[str, Tensor]], weights: dict[str, Tensor], config=SMALL
) -> None:
    assert found[0] == config
    assert list(found[1]) == list(weights)
    for name, tensor in weights.items():
        assert found[1][name].dtype == torch.float32
        assert found[1][name].is_contiguous()
        assert torch.equal(found[1][name], tensor), name


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ConvertError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in (path.name, *parts):
        assert part in message


def theirs(config: GPT2Config = SMALL, seed: int = 0) -> transformers.GPT2LMHeadModel:
    """transformers' own model of random weights, biases and LayerNorms too."""
    sizes: dict[str, Any] = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    made = transformers.GPT2Config(**sizes, n_positions=config.n_ctx, vocab_size=config.vocab_size)
    model = transformers.GPT2LMHeadModel(made).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def ours(config: GPT2Config, weights: dict[str, Tensor]) -> GPT2:
    model = build(config, 0, CPU)
    model.load_state_dict(weights)
    return model


def assert_equal_logits(model: GPT2, other: transformers.GPT2LMHeadModel) -> None:
    tokens = torch.randint(model.config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = other(tokens).logits
        assert expected.abs().max() > 0.5
        assert (model.logits(tokens) - expected).abs().max() < 1e-4


# --- round trips


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_written_is_read_again_bit_for_bit(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "made", SMALL, drawn())
    assert_same(read(tmp_path / "made"), drawn())


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_is_known_by_its_content_and_not_by_its_name(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "made", SMALL, drawn())
    if kind == "huggingface":
        (tmp_path / "made" / "model.safetensors").rename(tmp_path / "made" / "pytorch_model.bin")
    else:
        (tmp_path / "made").rename(tmp_path / "model.safetensors")
    assert_same(read(tmp_path / ("made" if kind == "huggingface" else "model.safetensors")), drawn())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", WRITERS)
def test_views_of_padded_and_narrow_weights_are_written_as_what_they_show(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(replace(SMALL, padded_vocab_size=384), 1, CPU)
    model.narrow(dtype)
    weights = {**model.state_dict(), "wte.weight": model.wte.weight.detach()[:301]}
    WRITERS[kind](tmp_path / "made", model.config, weights)
    assert_same(read(tmp_path / "made"), {name: tensor.float() for name, tensor in weights.items()})
    WRITERS[kind](
        tmp_path / "copied", SMALL, {name: tensor.float().clone() for name, tensor in weights.items()}
    )
    whole, copied = (
        path / "model.safetensors" if path.is_dir() else path
        for path in (tmp_path / "made", tmp_path / "copied")
    )
    assert whole.stat().st_size == copied.stat().st_size


def test_bfloat16_numbers_of_llmc_are_rounded_and_no_more(tmp_path: Path) -> None:
    write_llmc(tmp_path / "made.bin", SMALL, drawn(), bfloat16=True)
    assert_same(
        read(tmp_path / "made.bin"), {name: tensor.bfloat16().float() for name, tensor in drawn().items()}
    )


def test_what_was_read_stays_when_its_file_is_overwritten(tmp_path: Path) -> None:
    for kind, write in WRITERS.items():
        write(tmp_path / kind, SMALL, drawn())
        found = read(tmp_path / kind)
        file = tmp_path / kind / "model.safetensors" if kind == "huggingface" else tmp_path / kind
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.write(bytes(size))
        assert_same(found, drawn())


# --- transformers


def test_transformers_loads_the_folder_and_computes_the_same(tmp_path: Path) -> None:
    model = ours(SMALL, {name: tensor * 0.2 for name, tensor in drawn().items()})
    write_huggingface(tmp_path / "made", SMALL, model.state_dict())
    made: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "made", output_loading_info=True)
    loaded, report = made
    assert not any(report.values()), report
    assert_equal_logits(model, loaded)


def as_saved(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    model.save_pretrained(folder)


def in_parts(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def without_a_head(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    model.transformer.save_pretrained(folder)


def by_torch(model: transformers.GPT2LMHeadModel, folder: Path, *, zipped: bool = True) -> None:
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


def by_an_old_torch(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    by_torch(model, folder, zipped=False)


def by_torch_in_parts(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    model.config.save_pretrained(folder)
    state = model.state_dict()
    names = {name: f"pytorch_model-{number % 2}.bin" for number, name in enumerate(state)}
    for part in set(names.values()):
        torch.save({name: state[name] for name in names if names[name] == part}, folder / part)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


def with_masks(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    """As transformers wrote them until 2023."""
    model.config.save_pretrained(folder)
    state = {name.removeprefix("transformer."): tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in range(SMALL.n_layer):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.uint8).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(state, folder / "pytorch_model.bin")


LINEAR = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def as_linear_layers(model: transformers.GPT2LMHeadModel, folder: Path) -> None:
    model.config.save_pretrained(folder)
    state = {
        name: tensor.T if name.endswith(LINEAR) else tensor for name, tensor in model.state_dict().items()
    }
    del state["lm_head.weight"]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")


FORMS = [as_saved, in_parts, without_a_head, by_torch, by_an_old_torch, by_torch_in_parts, with_masks]


@pytest.mark.parametrize("save", [*FORMS, as_linear_layers])
def test_a_model_of_transformers_is_read_in_all_its_forms(save, tmp_path: Path) -> None:
    model = theirs()
    save(model, tmp_path)
    config, weights = read(tmp_path)
    assert config == SMALL
    assert_equal_logits(ours(config, weights), model)


def test_a_file_of_safetensors_is_none_of_torch_whatever_the_length_of_its_header(exported: Path) -> None:
    file = exported / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].ljust(size // 256 * 256 + 256 + 128)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    assert file.read_bytes()[:1] == b"\x80"
    assert_same(read(file), drawn())


def test_a_model_in_half_precision_is_read_as_the_numbers_that_it_has(tmp_path: Path) -> None:
    model = theirs().half()
    model.save_pretrained(tmp_path)
    _, weights = read(tmp_path)
    assert torch.equal(weights["wte.weight"], model.transformer.wte.weight.float())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"n_inner": 100}, "n_inner is 100"),
        ({"n_head": None}, "n_head is None"),
        ({"tie_word_embeddings": False}, "its lm_head is another matrix than its embedding"),
        ({"n_head": 5}, "5 heads cannot share a width of 32"),
        ({"n_layer": 1_000_000_000}, "1000000000"),
        ({"n_positions": 64}, "wpe.weight is (48, 32), not (64, 32)"),
    ],
)
def test_a_configuration_of_another_model_is_refused(change: dict, complaint: str, exported: Path) -> None:
    described = exported / "config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), **change}))
    with pytest.raises(ConvertError) as caught:
        read(exported)
    assert complaint in str(caught.value)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A folder of transformers with config.json and model.safetensors."""
    write_huggingface(tmp_path / "made", SMALL, drawn())
    return tmp_path / "made"


def changed(tmp_path: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """An exported folder, something done to its tensors."""
    write_huggingface(tmp_path / "made", SMALL, drawn())
    file = tmp_path / "made" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file)
    return file


def test_a_tied_head_is_left_out_and_an_own_one_refused(tmp_path: Path) -> None:
    def with_head(place: Path, more: int) -> Path:
        return changed(
            place, lambda all_: all_.update({"lm_head.weight": all_["transformer.wte.weight"] + more})
        )

    assert_same(read(with_head(tmp_path / "a", 0)), drawn())
    refused(with_head(tmp_path / "b", 1), "its lm_head is not its embedding")


BIAS = "transformer.h.1.ln_2.bias"


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        (BIAS, None, "lacks h.1.ln_2.bias"),
        ("score.weight", torch.ones(2), "holds score.weight"),
        (BIAS, torch.ones(31), "ln_2.bias is (31,), not (32,)"),
        (BIAS, torch.ones(32, dtype=torch.int8), "no tensor of floating-point numbers"),
    ],
    ids=["missing", "foreign", "misshapen", "integers"],
)
def test_missing_foreign_and_misshapen_tensors_are_named(
    name: str, tensor: Tensor | None, complaint: str, tmp_path: Path
) -> None:
    file = changed(tmp_path, lambda all_: all_.pop(name) if tensor is None else all_.update({name: tensor}))
    refused(file, complaint)


def test_without_a_configuration_a_file_of_tensors_is_refused(exported: Path) -> None:
    (exported / "config.json").unlink()
    with pytest.raises(ConvertError, match=r"config\.json is missing.*heads"):
        read(exported)


@pytest.mark.parametrize("name", ["elsewhere/part.safetensors", "../part.safetensors", "missing.safetensors"])
def test_an_index_has_files_beside_it_only_read(name: str, exported: Path, tmp_path: Path) -> None:
    (exported / "model.safetensors").rename(tmp_path / "part.safetensors")
    index = exported / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    refused(index, name, "no file beside it")


@pytest.fixture
def indexed(exported: Path) -> Path:
    """A folder of transformers in two files and an index: ln_f in the first, all else in the second."""
    tensors = load_file(exported / "model.safetensors")
    (exported / "model.safetensors").unlink()
    names = {name: f"{2 - ('ln_f' in name)}.safetensors" for name in tensors}
    for file in ("1.safetensors", "2.safetensors"):
        save_file({name: tensors[name] for name in names if names[name] == file}, exported / file)
    (exported / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return exported


def test_a_tensor_is_taken_from_the_file_that_the_index_names(indexed: Path) -> None:
    later = load_file(indexed / "2.safetensors")
    save_file({**later, "transformer.ln_f.weight": torch.zeros(32)}, indexed / "2.safetensors")
    assert_same(read(indexed), drawn())


def test_a_tensor_that_the_index_places_in_a_file_without_it_is_named(indexed: Path) -> None:
    save_file({"transformer.ln_f.weight": torch.zeros(32)}, indexed / "1.safetensors")
    with pytest.raises(ConvertError, match=r"1\.safetensors lacks transformer\.ln_f\.bias"):
        read(indexed)


def test_an_export_leaves_a_folder_with_something_in_it_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConvertError, match="is there already"):
        write_huggingface(tmp_path, SMALL, drawn())
    assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]


def test_an_export_that_is_broken_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_huggingface(tmp_path / "made", SMALL, drawn())
    assert not list(tmp_path.iterdir())


# --- the tokenizer


def write_tokenizer(folder: Path) -> None:
    for name, text in tokenizer_files(n_ctx=1024).items():
        (folder / name).write_text(text, encoding="utf-8")


def test_the_merges_and_the_vocabulary_are_those_that_openai_published(
    tmp_path: Path, vocabulary: None
) -> None:
    write_tokenizer(tmp_path)
    published = [
        each.read_text(encoding="utf-8") for each in Path(os.environ["TIKTOKEN_CACHE_DIR"]).iterdir()
    ]
    (merges,) = (content for content in published if content.startswith("#version"))
    (ids,) = (content for content in published if content.startswith("{"))
    assert (tmp_path / "merges.txt").read_text(encoding="utf-8") == merges
    assert json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8")) == json.loads(ids)


ODD = [
    "",
    " \n\n  \t x\r\n",
    "It's we'll I'VE 'tis",
    "naïve Ελληνικά 漢字 عربى 👩‍🚀 é\u0301",
    "3.14159e-10 ½ ² ⅷ 1234567890123",
    "<|endoftext|>",
    "a\u00a0b\u2003c\u200bd\u3000e",
    "\x00\x01\x1c\x7f\ufffd",
    "def f(x):\n    return {'a': x**2}  # !!!???",
]


def test_transformers_encodes_as_tiktoken_does_by_these_files(tmp_path: Path, shakespeare: Path) -> None:
    config = sized(50257)
    write_huggingface(tmp_path / "made", config, drawn(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "made")
    encoding = gpt2_encoding()
    for text in [*ODD, shakespeare.read_text(encoding="utf-8")[:200_000]]:
        expected = encoding.encode(text, allowed_special="all")
        assert tokenizer(text, verbose=False)["input_ids"] == expected
        assert tokenizer.decode(expected, clean_up_tokenization_spaces=False) == text
    assert tokenizer.eos_token_id == 50256
    assert len(tokenizer) == 50257


def test_without_the_vocabulary_the_export_says_that_it_has_no_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    config = sized(50257)
    with pytest.warns(ConvertWarning, match="made gets no tokenizer"):
        write_huggingface(tmp_path / "made", config, drawn(config))
    assert sorted(each.name for each in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_of_another_vocabulary_gets_no_tokenizer(tmp_path: Path, vocabulary: None) -> None:
    write_huggingface(tmp_path / "made", SMALL, drawn())
    assert sorted(each.name for each in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("vocab_size", [50258, 50304])
def test_a_vocabulary_with_rows_beyond_gpt2s_is_said_to_get_no_tokenizer(
    vocab_size: int, tmp_path: Path
) -> None:
    config = sized(vocab_size)
    with pytest.warns(ConvertWarning, match=f"gets no tokenizer: its vocabulary of {vocab_size}"):
        write_huggingface(tmp_path / "made", config, drawn(config))


def as_tokenizer(vocab: object, added: dict[str, int] | None = None) -> dict[str, Any]:
    """A tokenizer.json, as far as it says which tokens there are."""
    return {
        "added_tokens": [{"content": n, "id": i} for n, i in (added or {}).items()],
        "model": {"vocab": vocab},
    }


@pytest.mark.parametrize("change", ["vocab.json", "tokenizer.json", "added", "added end of text"])
def test_gpt2s_vocabulary_is_known_with_tokens_added_to_it(
    change: str, tmp_path: Path, vocabulary: None
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    tokens = json.loads((tmp_path / "vocab.json").read_text())
    content = {
        "vocab.json": None,
        "tokenizer.json": as_tokenizer(tokens),
        "added": as_tokenizer(tokens, {"[PAD]": 50257}),
        "added end of text": as_tokenizer(
            {token: rank for token, rank in tokens.items() if rank < 50256}, {"<|endoftext|>": 50256}
        ),
    }[change]
    if content:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert other_vocabulary(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", as_tokenizer({f"t{n}": n for n in range(50257)})),
        ("tokenizer.json", as_tokenizer([["a", -1.0]])),
        ("tokenizer.json", []),
        ("vocab.json", {"a": 0, "b": 1}),
        ("vocab.json", {f"t{n}": n for n in range(52000)}),
        ("vocab.txt", "[PAD]"),
        ("spiece.model", ""),
    ],
    ids=["as many tokens", "unigram", "none", "two tokens", "more tokens", "WordPiece", "SentencePiece"],
)
def test_a_folder_with_another_vocabulary_than_gpt2s_is_told(
    name: str, content: object, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert other_vocabulary(tmp_path) is None  # no folder of transformers
    (tmp_path / "config.json").write_text("{}")
    assert other_vocabulary(tmp_path) == tmp_path / name


# --- nanoGPT


ARGUMENTS = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 48, "vocab_size": 301, "bias": True}


def nanogpt(path: Path, model: dict[str, Tensor], **arguments: object) -> Path:
    """A checkpoint as nanoGPT's train.py writes it: with its optimiser's state, and its settings."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    saved = {
        "model": model,
        "optimizer": optimizer.state_dict(),
        "model_args": {**ARGUMENTS, "dropout": 0.0, **arguments},
        "iter_num": 2000,
        "best_val_loss": torch.tensor(3.1),
        "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": True},
    }
    torch.save(saved, path)
    return path


def named_by_nanogpt(weights: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    named = {f"{prefix}transformer.{name}": tensor for name, tensor in weights.items()}
    return {**named, f"{prefix}lm_head.weight": weights["wte.weight"]}


def test_nanogpt_without_biases_has_zeros_for_them(tmp_path: Path) -> None:
    kept = {name: tensor for name, tensor in drawn().items() if not name.endswith("bias")}
    found = read(nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(kept), bias=False))
    assert_same(found, {name: kept.get(name, torch.zeros_like(tensor)) for name, tensor in drawn().items()})


def test_the_padding_of_nanogpt_is_cut_with_a_warning(tmp_path: Path) -> None:
    padded = drawn(sized(50304))
    path = nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(padded), vocab_size=50304)
    with pytest.warns(ConvertWarning, match="47 rows that no token has are cut.*share of its softmax"):
        found = read(path)
    weights = {**padded, "wte.weight": padded["wte.weight"][:50257]}
    assert_same(found, weights, config=sized(50257))


def test_a_vocabulary_of_characters_stays_whole(tmp_path: Path) -> None:
    config = sized(65)
    found = read(nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(drawn(config)), vocab_size=65))
    assert_same(found, drawn(config), config=config)


def test_the_other_gelu_of_nanogpt_is_said_both_ways(tmp_path: Path) -> None:
    with pytest.warns(ConvertWarning, match="nanoGPT computes GELU exactly"):
        write_nanogpt(tmp_path / "ckpt.pt", SMALL, drawn())
    with pytest.warns(ConvertWarning, match="nanoGPT computes GELU exactly"):
        read(tmp_path / "ckpt.pt")


def test_of_a_checkpoint_that_is_not_nanogpts_own_its_gelu_is_not_known(tmp_path: Path) -> None:
    torch.save({"model": named_by_nanogpt(drawn()), "config": GPTConfig()}, tmp_path / "ckpt.pt")
    with pytest.warns(ConvertWarning, match="does not say which GELU"):
        read(tmp_path / "ckpt.pt")


def test_nanogpt_finds_in_the_checkpoint_what_it_looks_for(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "ckpt.pt", SMALL, drawn())
    saved = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert saved["model_args"] == {
        **{"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 48},
        **{"bias": True, "vocab_size": 301, "dropout": 0.0},
    }
    assert saved["model"].keys() == named_by_nanogpt(drawn()).keys()
    assert saved["model"]["lm_head.weight"] is not None
    assert torch.equal(saved["model"]["lm_head.weight"], saved["model"]["transformer.wte.weight"])
    assert "dataset" not in saved["config"]


# --- what a training wraps its model in


WRAPPED = ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."]
WRAPPED += ["module.module._orig_mod.module.", "_fsdp_wrapped_module."]
WRAPPED += ["model.", "model._orig_mod.", "net.gpt.", "_forward_module.module."]


@pytest.mark.parametrize("prefix", WRAPPED)
def test_prefixes_of_a_nanogpts_names_come_off_in_any_order(prefix: str, tmp_path: Path) -> None:
    assert_same(read(nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(drawn(), prefix))), drawn())


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_a_wrapper_around_each_block_comes_off(wrapper: str, tmp_path: Path) -> None:
    named = {
        name.replace(".attn.", f".{wrapper}.attn."): each for name, each in named_by_nanogpt(drawn()).items()
    }
    assert_same(read(nanogpt(tmp_path / "ckpt.pt", named)), drawn())


def test_transformers_names_have_their_prefixes_taken_off_too(tmp_path: Path) -> None:
    def renamed(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[f"module.{name}"] = tensors.pop(name)

    assert_same(read(changed(tmp_path, renamed)), drawn())


def test_of_two_models_in_a_file_none_is_chosen(tmp_path: Path) -> None:
    both = named_by_nanogpt(drawn()) | named_by_nanogpt(drawn(seed=1), "ema.")
    refused(nanogpt(tmp_path / "ckpt.pt", both), "holds wte.weight twice", "ema.transformer.wte.weight")


@dataclass
class GPTConfig:
    """As build-nanogpt's."""

    block_size: int = 48
    vocab_size: int = 301
    n_layer: int = 3
    n_head: int = 2
    n_embd: int = 32


LAYOUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "lightning": lambda model: {
        "state_dict": {f"model.{name}": each for name, each in model.items()},
        "hyper_parameters": {"lr": 6e-4, "config": ARGUMENTS},
    },
    "deepspeed": lambda model: {"module": model, "args": argparse.Namespace(**ARGUMENTS)},
    "a tutorial's": lambda model: {"epoch": 3, "model_state_dict": model, "config": ARGUMENTS},
    "nested": lambda model: {"model": {"state_dict": model}, "hparams": ARGUMENTS},
    "an object's attributes": lambda model: {"model": model, "config": GPTConfig(), "step": 5},
    "numpy's integers": lambda model: {
        "model": model,
        "model_args": {**ARGUMENTS, "vocab_size": np.int64(301), "n_head": np.int32(2)},
    },
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_sizes_are_found_wherever_a_training_put_them(
    layout: str, zipped: bool, tmp_path: Path
) -> None:
    saved = LAYOUTS[layout](named_by_nanogpt(drawn()))
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read(tmp_path / "ckpt.pt"), drawn())


def test_weights_of_transformers_beside_their_configuration_keep_its_layout(tmp_path: Path) -> None:
    model = theirs()
    torch.save({"model": model.state_dict(), "config": model.config}, tmp_path / "ckpt.pt")
    config, weights = read(tmp_path / "ckpt.pt")
    assert config == SMALL
    assert_equal_logits(ours(config, weights), model)


def test_a_head_stands_for_the_embedding_that_safetensors_left_out(tmp_path: Path) -> None:
    def untied(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    assert_same(read(changed(tmp_path, untied)), drawn())


def test_biases_that_no_tensor_and_no_size_tells_of_are_zeros(tmp_path: Path) -> None:
    kept = {name: tensor for name, tensor in drawn().items() if not name.endswith("bias")}
    torch.save({"model": named_by_nanogpt(kept), "config": GPTConfig()}, tmp_path / "ckpt.pt")
    found = read(tmp_path / "ckpt.pt")
    assert_same(found, {name: kept.get(name, torch.zeros_like(tensor)) for name, tensor in drawn().items()})
    refused(
        nanogpt(tmp_path / "said.pt", named_by_nanogpt(kept), bias=True),
        "lacks h.0.attn.c_attn.bias and 18 more",
    )


# --- what lies beside the weights


class Mood(Enum):
    GOOD = 1


class Call:
    """Pickled, it is a call where it is loaded."""

    def __init__(self, function: Callable[..., object], *paths: Path) -> None:
        self.call = function, tuple(map(str, paths))

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return self.call


BESIDE = {
    "float64": np.float64(3.3),
    "float32": np.float32(3.3),
    "bool": np.bool_(True),
    "str": np.str_("best"),
    "big-endian": np.array([3.3], dtype=">f8")[0],
    "array": np.arange(3.0),
    "objects": np.array([None, {}], dtype=object),
    "random state": np.random.get_state(),
    "dataclass": GPTConfig(),
    "Namespace": argparse.Namespace(lr=6e-4),
    "path": pathlib.PosixPath("/tmp/out"),
    "Enum": Mood.GOOD,
    "class": GPTConfig,
    "function": print,
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("kind", BESIDE)
def test_what_lies_beside_the_weights_is_no_obstacle(kind: str, zipped: bool, tmp_path: Path) -> None:
    saved = {"model": named_by_nanogpt(drawn()), "model_args": ARGUMENTS, "beside": BESIDE[kind]}
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read(tmp_path / "ckpt.pt"), drawn())


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
def test_numbers_of_numpy_1_and_2_are_read(module: bytes, tmp_path: Path) -> None:
    saved = {"model": named_by_nanogpt(drawn()), "model_args": {**ARGUMENTS, "n_head": np.int64(2)}}
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=False)
    content = (tmp_path / "ckpt.pt").read_bytes()
    own = next(each for each in (b"numpy.core.multiarray", b"numpy._core.multiarray") if each in content)
    (tmp_path / "ckpt.pt").write_bytes(content.replace(own, module))
    assert_same(read(tmp_path / "ckpt.pt"), drawn())


@pytest.mark.parametrize("zipped", [True, False])
def test_a_call_beside_the_weights_is_passed_over(zipped: bool, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    trap = Call(shutil.copyfile, tmp_path / "there", tmp_path / "sprung")
    saved = {"trap": trap, "model": named_by_nanogpt(drawn()), "model_args": ARGUMENTS}
    torch.save(saved, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    assert_same(read(tmp_path / "ckpt.pt"), drawn())
    assert not (tmp_path / "sprung").exists()


class Settings(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ({"model": torch.nn.Linear(2, 2), "model_args": ARGUMENTS}, "holds an object in place of weights"),
        ({"model": named_by_nanogpt(drawn()), "model_args": Settings(ARGUMENTS)}, "Settings, which is code"),
    ],
    ids=["a model", "a model by name", "a dict of a class"],
)
def test_where_code_is_needed_the_way_to_save_weights_alone_is_told(
    saved: object, complaint: str, tmp_path: Path
) -> None:
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path / "ckpt.pt", complaint, 'torch.save({"model": model.state_dict(), "model_args": {')


@pytest.mark.parametrize(
    ("saved", "complaint"),
    [
        ({}, "but nothing"),
        ({"epoch": 3, "loss": 1.5}, "but epoch, loss;"),
        ({"state_dict": {f"conv{n}.weight": torch.ones(1) for n in range(5)}}, "conv2.weight and 2 more;"),
        ({"model": [1], "model_args": ARGUMENTS}, "but model, model_args;"),
        ({1: torch.ones(1)}, "but 1;"),
    ],
    ids=["nothing", "values", "another model", "a list", "a number's name"],
)
def test_a_file_without_weights_of_gpt2_says_what_it_holds(
    saved: dict, complaint: str, tmp_path: Path
) -> None:
    torch.save(saved, tmp_path / "ckpt.pt")
    refused(tmp_path / "ckpt.pt", "holds no weights of GPT-2", complaint)


def test_a_file_of_safetensors_of_another_model_says_what_it_holds(exported: Path) -> None:
    file = exported / "model.safetensors"
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}, file)
    refused(file, "holds no weights of GPT-2, but model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", WRITERS)
def test_weights_that_are_not_finite_are_refused(kind: str, number: float, tmp_path: Path) -> None:
    weights = drawn()
    weights["h.1.ln_2.bias"][3] = number
    WRITERS[kind](tmp_path / "made", SMALL, weights)
    with pytest.raises(ConvertError, match=r"h\.1\.ln_2\.bias is not finite"):
        read(tmp_path / "made")


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("h.1.mlp.c_fc.weight", torch.ones(5, 5), "h.1.mlp.c_fc.weight is (5, 5), not (128, 32)"),
        ("h.0.attn.c_attn.weight", torch.ones(96, 31), "h.0.attn.c_attn.weight is (96, 31), not (96, 32)"),
        ("wpe.weight", torch.ones(()), "wpe.weight is (), not (48, 32)"),
        ("ln_f.bias", torch.ones(32).to_sparse(), "ln_f.bias is no tensor of floating-point numbers"),
        ("ln_f.bias", torch.ones(32, device="meta"), "ln_f.bias is no tensor of floating-point numbers"),
    ],
    ids=["square", "narrow", "a number", "sparse", "meta"],
)
def test_one_tensor_of_another_shape_or_kind_is_named(
    name: str, tensor: Tensor, complaint: str, tmp_path: Path
) -> None:
    refused(
        nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(drawn()) | {f"transformer.{name}": tensor}), complaint
    )


@pytest.mark.parametrize("name", ["n_layer", "n_embd", "block_size", "vocab_size"])
def test_sizes_too_large_for_any_memory_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    refused(nanogpt(tmp_path / "ckpt.pt", named_by_nanogpt(drawn()), **{name: 2**62}), str(2**62))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_numbers_of_any_precision_are_read_from_nanogpt(dtype: torch.dtype, tmp_path: Path) -> None:
    named = {name: tensor.to(dtype) for name, tensor in named_by_nanogpt(drawn()).items()}
    found = read(nanogpt(tmp_path / "ckpt.pt", named))
    assert_same(found, {name: tensor.to(dtype).float() for name, tensor in drawn().items()})


def test_a_configuration_with_a_byte_order_mark_is_read(exported: Path) -> None:
    described = exported / "config.json"
    described.write_text(described.read_text(), encoding="utf-8-sig")
    assert_same(read(exported), drawn())


# --- llm.c


LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
LLMC_ORDER = [f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias")]
"""Of write_tensors() in llm.c's train_gpt2.py; each for all layers."""


def by_llmc(weights: dict[str, Tensor]) -> bytes:
    """What its write_model() writes, spelled out."""

    def numbers(*names: str) -> bytes:
        return b"".join(weights[name].numpy().tobytes() for name in names)

    header = struct.pack("<8i", 20240326, 3, 48, 301, 3, 2, 32, 384) + bytes(4 * 248)
    layers = [f"h.{layer}.{kind}" for kind in LLMC_ORDER for layer in range(3)]
    embedding = numbers("wte.weight") + bytes(4 * 83 * 32)
    return header + embedding + numbers("wpe.weight", *layers, "ln_f.weight", "ln_f.bias")


def test_a_file_for_llmc_is_byte_for_byte_what_its_own_exporter_writes(tmp_path: Path) -> None:
    llmc(tmp_path / "made.bin", SMALL, drawn())
    assert (tmp_path / "made.bin").read_bytes() == by_llmc(drawn())


def test_llmc_in_bfloat16_has_the_upper_halves_of_rounded_numbers(tmp_path: Path) -> None:
    rounded = {name: tensor.bfloat16().float() for name, tensor in drawn().items()}
    write_llmc(tmp_path / "made.bin", SMALL, rounded, bfloat16=True)
    written = (tmp_path / "made.bin").read_bytes()
    assert struct.unpack("<8i", written[:32]) == (20240326, 5, 48, 301, 3, 2, 32, 384)
    numbers = np.frombuffer(by_llmc(rounded)[1024:], dtype="<u4")
    assert written[1024:] == (numbers >> 16).astype("<u2").tobytes()


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        (1, 1, "version 1"),
        (4, 4, "promises"),
        (5, 0, "n_head is 0"),
        (6, -32, "n_embd is -32"),
        (7, 300, "300 rows"),
    ],
)
def test_a_damaged_header_of_llmc_is_refused(place: int, value: int, complaint: str, tmp_path: Path) -> None:
    content = bytearray(by_llmc(drawn()))
    content[4 * place : 4 * place + 4] = struct.pack("<i", value)
    (tmp_path / "made.bin").write_bytes(content)
    refused(tmp_path / "made.bin", complaint)


# --- files that are none


def made(kind: str, folder: Path) -> Path:
    """One file of each kind."""
    if kind == "old torch":
        by_an_old_torch(theirs(), folder)
        return folder / "pytorch_model.bin"
    WRITERS[kind](folder / "made", SMALL, drawn())
    return folder / "made" / "model.safetensors" if kind == "huggingface" else folder / "made"


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.001, 0.3, 0.9, 0.99999])
@pytest.mark.parametrize("kind", [*WRITERS, "old torch"])
def test_a_file_that_was_cut_off_is_refused_in_a_line(kind: str, share: float, tmp_path: Path) -> None:
    file = made(kind, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(file)


def test_a_file_of_llmc_with_something_after_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "made.bin").write_bytes(by_llmc(drawn()) + bytes(4))
    refused(tmp_path / "made.bin", "its header promises")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b"To be, or not to be", "no file of weights"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no file of weights"),
        (b"GGUF\x03" + bytes(100), "no file of weights"),
        (struct.pack("<3i", 20240520, 1, 100) + bytes(1212), "no file of weights"),
        (b'{"a": 1}', "no index of weights"),
        (b'{"weight_map": ', "no JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git lfs pull"),
        (b"PK\x03\x04" + bytes(100), "damaged or was cut off"),
        (b"\x80\x02}q\x00.", "damaged or was cut off"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_foreign_files_are_refused_in_a_line(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    refused(tmp_path / "file", complaint)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "No such file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no model.safetensors or pytorch_model.bin")
    (tmp_path / "empty" / "adapter_model.safetensors").write_bytes(b"")
    refused(tmp_path / "empty", "holds no", "but adapter_model.safetensors, which may be read if it is named")
    (tmp_path / "empty" / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    refused(tmp_path / "empty", "pytorch_model-00001-of-00002.bin, but no pytorch_model.bin.index.json")


def test_parts_of_weights_without_their_index_are_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"")
    refused(tmp_path, "but no model.safetensors.index.json")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["beside", "model"])
def test_code_in_a_file_is_not_run(place: str, zipped: bool, tmp_path: Path) -> None:
    trap = Call(os.mkdir, tmp_path / "sprung")
    content = {"model": trap, "model_args": {}} if place == "model" else {**drawn(), "more": trap}
    torch.save(content, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    refused(tmp_path / "ckpt.pt", "mkdir, which is code")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("kind", WRITERS)
def test_on_a_full_disk_nothing_is_left(kind: str, small_disk: Path) -> None:
    config = sized(9001)
    with pytest.raises(ConvertError) as caught:
        WRITERS[kind](small_disk / "made", config, drawn(config))
    assert "cannot write" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(small_disk.iterdir())


# --- names


def test_a_folder_called_like_what_is_being_exported_stays(tmp_path: Path) -> None:
    (tmp_path / "made.part").mkdir()
    (tmp_path / "made.part" / "mine").touch()
    write_huggingface(tmp_path / "made", SMALL, drawn())
    assert (tmp_path / "made.part" / "mine").exists()


def latin(folder: Path) -> Path:
    """A name that is not UTF-8."""
    return Path(os.fsdecode(os.fsencode(folder) + b"/r\xe9"))


@pytest.mark.parametrize("kind", ["huggingface", "nanogpt"])
def test_what_could_not_be_read_again_for_its_name_is_not_written(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"r\\xe9 is no UTF-8"):
        WRITERS[kind](latin(tmp_path), SMALL, drawn())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["huggingface", "nanogpt"])
def test_weights_whose_name_is_no_utf_8_are_refused_for_their_name(kind: str, tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "made", SMALL, drawn())
    (tmp_path / "made").rename(latin(tmp_path))
    with pytest.raises(ConvertError, match=r"r\\xe9.* is no UTF-8"):
        read(latin(tmp_path))

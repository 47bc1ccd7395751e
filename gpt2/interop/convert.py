"""Read and write GPT-2 weights in the formats of Hugging Face transformers, nanoGPT and llm.c.

config, weights = read(Path("gpt2_124M.bin"))
write_huggingface(Path("exported"), config, weights)

Weights are a dict of float32 tensors, named and laid out as in gpt2.model.model.GPT2 without padding:
(out, in) for linear layers, wte.weight with the rows of the logical vocabulary only, the tied lm_head left
out. Loading runs no code.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gpt2.config.workload import TEXT_VOCABULARY, GPT2Config
from gpt2.data.tokenizer_files import tokenizer_files
from gpt2.files.atomic import atomic_folder, atomic_write
from gpt2.files.cache import DataError
from gpt2.files.listing import name_problem
from gpt2.interop.llmc import is_llmc, read_llmc, write_llmc
from gpt2.interop.weight_files import (
    MEND,
    SAVE_WEIGHTS,
    SIZES,
    ConvertError,
    StandIn,
    Weights,
    assert_fit,
    config_of,
    content,
    float32,
    read_json,
    reason,
    sizes_of,
)
from gpt2.model.model import shapes

__all__ = [
    "ConvertError", "ConvertWarning", "Weights", "read", "write_huggingface", "write_llmc", "write_nanogpt",
]  # fmt: skip

HUGGINGFACE_FILES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
HUGGINGFACE_MATHS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # both are the tanh approximation
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute", None),
}
"""Keys of config.json that change the arithmetic, with the values taken as GPT-2's, the default first."""

CONTEXTS = ("n_positions", "block_size", "n_ctx")
"""Names under which other formats store the context length."""
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which training checkpoints store the model's weights."""
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
"""Name parts that torch and other libraries insert when a model is compiled, replicated or sharded."""
GPT2_NAME = re.compile(r"(?:^|\.)((?:wte|wpe|ln_f|lm_head|h\.\d+)\..*)")
"""Matches a parameter name of GPT-2, whatever outer module's prefix precedes it."""
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)

NANOGPT_ROWS = 50304
"""Padded vocabulary size of nanoGPT, whose softmax includes the padding rows."""
NANOGPT_GELU = (
    "nanoGPT computes GELU exactly, this trainer by GPT-2's tanh approximation: the same weights give "
    "slightly other logits there"
)
UNSAID_GELU = "it does not say which GELU it was trained with; GPT-2's tanh approximation is taken"


class ConvertWarning(UserWarning):
    """A difference between the contents of a file and the weights converted from it."""


def read(path: Path) -> tuple[GPT2Config, Weights]:
    """Load a model of transformers, nanoGPT or llm.c, which its content shows.

    Weights are float32 on the CPU, whatever the file's dtype. Raises ConvertError; warns with ConvertWarning.
    """
    try:
        file = _within(path) if path.is_dir() else path
        config, weights = read_llmc(file) if is_llmc(file) else _read_named(file, content(file))
    except OSError as error:
        raise ConvertError(f"{path} cannot be read ({reason(error)})") from None
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            why = "the model has diverged, or the file is damaged"
            raise ConvertError(f"{file}: {name} is not finite; {why}")
    return config, weights


def _within(folder: Path) -> Path:
    for name in HUGGINGFACE_FILES:
        if (folder / name).is_file():
            return folder / name
    if parts := sorted([*folder.glob("*-of-*.safetensors"), *folder.glob("*-of-*.bin")]):
        index = f"{parts[0].name.partition('-')[0]}{parts[0].suffix}.index.json"
        raise ConvertError(
            f"{folder} holds parts of weights, such as {parts[0].name}, but no {index}; copy it there"
        )
    wanted = " or ".join(name for name in HUGGINGFACE_FILES if not name.endswith("json"))
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    but = f", but {others[0]}, which may be read if it is named itself" if others else ""
    advice = "give transformers' folder, nanoGPT's ckpt.pt or llm.c's .bin"
    raise ConvertError(f"{folder} holds no {wanted}{but}; {advice}")


def _read_named(path: Path, saved: dict[str, Any]) -> tuple[GPT2Config, Weights]:
    """Convert named tensors, with sizes from the same file, as nanoGPT saves them, or from config.json."""
    tensors = _named(path, saved)
    inside = _sizes_within(saved)
    described = path if inside is not None else path.with_name("config.json")
    given = inside if inside is not None else _described(described)
    for key, values in HUGGINGFACE_MATHS.items():
        if given.get(key, values[0]) not in values:
            only = f"only GPT-2 is taken, which has {values[0]!r}"
            raise ConvertError(f"{described}: {key} is {given[key]!r}; {only}")
    if given.get("tie_word_embeddings") is False and not any("lm_head" in name for name in tensors):
        alone = "so its lm_head is another matrix than its embedding, and the file has none"
        raise ConvertError(f"{described}: tie_word_embeddings is False, {alone}; give the whole model")
    n_ctx = next((name for name in CONTEXTS if name in given), CONTEXTS[0])
    config = config_of(described, given, n_ctx=n_ctx)
    if (inner := given.get("n_inner")) not in (None, 4 * config.n_embd):
        raise ConvertError(f"{described}: n_inner is {inner!r}; only GPT-2 is taken, which has 4 n_embd")
    plain = _plain(path, tensors, config)
    linear = any(plain[name].shape == shape for name, shape in _oblong(config).items() if name in plain)
    if not linear:
        plain = {name: _transposed(name, tensor) for name, tensor in plain.items()}
    if inside is None:
        return config, _weights(path, config, plain)
    if not given.get("bias", any(name.endswith("bias") for name in plain)):
        biases = {name: shape for name, shape in shapes(config).items() if name.endswith("bias")}
        plain = {name: torch.zeros(shape) for name, shape in biases.items()} | plain
    weights = _weights(path, config, plain)
    if linear:
        gelu = NANOGPT_GELU if inside is saved.get("model_args") else UNSAID_GELU
        warnings.warn(f"{path}: {gelu}", ConvertWarning, stacklevel=3)
    if linear and config.vocab_size == NANOGPT_ROWS:
        weights["wte.weight"] = weights["wte.weight"][:TEXT_VOCABULARY].clone()
        config = replace(config, vocab_size=TEXT_VOCABULARY, padded_vocab_size=TEXT_VOCABULARY)
        cut = f"{NANOGPT_ROWS - TEXT_VOCABULARY} rows that no token has are cut"
        share = "they had a small share of its softmax"
        warnings.warn(f"{path}: {cut}; {share}", ConvertWarning, stacklevel=3)
    return config, weights


def _sizes_within(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the dict in a checkpoint that holds the model's sizes, under whatever key, or None."""
    outer = [each for each in saved.values() if isinstance(each, dict)]
    inner = [each for one in outer for each in one.values() if isinstance(each, dict)]
    found = [each for each in (saved, *outer, *inner) if "n_head" in each]
    return max(found, key=lambda each: sum(name in each for name in SIZES), default=None)


def _described(path: Path) -> Mapping[str, Any]:
    """Read transformers' config.json. Raises ConvertError where it is missing."""
    if not path.is_file():
        raise ConvertError(
            f"{path} is missing, and without it the number of heads is unknown; copy it there, or "
            f"{SAVE_WEIGHTS}"
        )
    return read_json(path)


def write_huggingface(
    folder: Path, config: GPT2Config, weights: Mapping[str, Tensor], *, other_vocabulary: bool = False
) -> None:
    """Write a folder that transformers can load, with GPT-2's tokenizer where the vocabulary is GPT-2's.

    other_vocabulary: whether it is known to be another, whatever its size. The folder appears whole or not at
    all. Warns with ConvertWarning where a text vocabulary gets no tokenizer. Raises ConvertError where the
    folder exists and is not empty, or cannot be written.
    """
    assert_fit(config, weights)
    published = config.vocab_size == TEXT_VOCABULARY and not other_vocabulary
    described = {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in HUGGINGFACE_MATHS.items()},
        **sizes_of(config, n_ctx="n_positions"),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), TEXT_VOCABULARY - 1 if published else None),
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "tie_word_embeddings": True,
    }
    files = {"config.json": json.dumps(described, indent=2) + "\n"}
    if published:
        try:
            files |= tokenizer_files(config.n_ctx)
        except DataError as error:
            warnings.warn(f"{folder} gets no tokenizer: {error}", ConvertWarning, stacklevel=2)
    elif other_vocabulary:
        warnings.warn(
            f"{folder} gets no tokenizer: its vocabulary is not GPT-2's", ConvertWarning, stacklevel=2
        )
    elif config.vocab_size > TEXT_VOCABULARY:
        more = f"its vocabulary of {config.vocab_size} is not GPT-2's {TEXT_VOCABULARY}"
        warnings.warn(f"{folder} gets no tokenizer: {more}", ConvertWarning, stacklevel=2)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConvertError(f"{folder} is there already; choose another name, or remove it")
    if problem := name_problem(folder):
        raise ConvertError(problem)
    transposed = {name: _transposed(name, float32(tensor)) for name, tensor in weights.items()}
    named = {f"transformer.{name}": tensor.contiguous() for name, tensor in transposed.items()}
    try:
        with atomic_folder(folder) as part:
            for name, text in files.items():
                (part / name).write_text(text, encoding="utf-8")
            save_file(named, written := part / HUGGINGFACE_FILES[0], metadata={"format": "pt"})
            written.chmod((part / "config.json").stat().st_mode)  # safetensors leaves it to its owner alone
    except (OSError, SafetensorError) as error:
        raise ConvertError(f"cannot write {folder} ({reason(error)}); {MEND}") from None


def write_nanogpt(path: Path, config: GPT2Config, weights: Mapping[str, Tensor]) -> None:
    """Write a ckpt.pt for nanoGPT's sample.py; its train.py would also need the optimiser's state.

    Warns with ConvertWarning about nanoGPT's GELU. Raises ConvertError where it cannot be written.
    """
    assert_fit(config, weights)
    if problem := name_problem(path):
        raise ConvertError(problem)
    warnings.warn(f"{path}: {NANOGPT_GELU}", ConvertWarning, stacklevel=2)
    # Cloned, because torch.save would write a view's whole storage.
    model = {f"transformer.{name}": float32(tensor).clone() for name, tensor in weights.items()}
    model["lm_head.weight"] = model["transformer.wte.weight"]
    arguments = {**sizes_of(config, n_ctx="block_size"), "bias": True, "dropout": 0.0}
    saved = {"model": model, "model_args": arguments, "iter_num": 0, "best_val_loss": 1e9, "config": {}}
    with atomic_write(path, ConvertError, MEND) as file:
        try:
            torch.save(saved, file)
        except RuntimeError as error:  # as torch raises it on a full disk
            raise OSError(reason(error.__context__ or error)) from None


def _named(path: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's tensors under GPT-2's own names, without wrapping dicts and name prefixes.

    Raises ConvertError where a name occurs twice or no weights of GPT-2 are found.
    """
    for _ in range(3):
        saved = next((saved[key] for key in MODEL_KEYS if isinstance(saved.get(key), dict)), saved)
    found: dict[str, Any] = {}
    for name, tensor in saved.items():
        parts = [part for part in str(name).split(".") if part not in WRAPPERS]
        own = GPT2_NAME.search(".".join(parts))
        plain = own[1] if own else str(name)
        if plain in found:
            raise ConvertError(f"{path} holds {plain} twice, the second time as {name}; save one model alone")
        found[plain] = tensor
    if not any(GPT2_NAME.match(name) for name in found):
        if isinstance(saved, StandIn):
            what = f"{path} holds an object in place of weights, whose code is not run"
            raise ConvertError(f"{what}; {SAVE_WEIGHTS}")
        held = ", ".join([*found][:3]) or "nothing"
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        known = "only GPT-2's own names are known, as transformers and nanoGPT have them"
        raise ConvertError(f"{path} holds no weights of GPT-2, but {held}{more}; {known}")
    return found


def _plain(path: Path, tensors: Mapping[str, Any], config: GPT2Config) -> Weights:
    """Return the weights without attention masks and without lm_head.

    Raises ConvertError where lm_head is not tied to the embedding, a tensor is not dense floating point, or
    sizes differ.
    """
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # a mask
            continue
        dense = type(tensor) in PLAIN_TENSORS and tensor.layout == torch.strided and not tensor.is_meta
        if not dense or not tensor.is_floating_point():
            raise ConvertError(f"{path}: {name} is no tensor of floating-point numbers; this is no GPT-2")
        plain[name] = tensor
    head = plain.pop("lm_head.weight", None)
    if head is not None:  # safetensors keep only one of a tied tensor's two names
        embedding = plain.setdefault("wte.weight", head)
        numbers = (each.float().nan_to_num() for each in (head, embedding))
        if head.shape != embedding.shape or not torch.equal(*numbers):
            raise ConvertError(f"{path}: its lm_head is not its embedding; in GPT-2 they are one matrix")
    layers = {match[1] for name in plain if (match := re.match(r"h\.(\d+)\.", name))}
    if len(layers) != config.n_layer:
        said = f"its configuration says {config.n_layer}"
        raise ConvertError(f"{path} has {len(layers)} layers of GPT-2, {said}")
    for name, rows in (("wte.weight", config.vocab_size), ("wpe.weight", config.n_ctx)):
        _assert_shape(path, name, plain, (rows, config.n_embd))
    return plain


def _weights(path: Path, config: GPT2Config, found: Mapping[str, Tensor]) -> Weights:
    """Copy GPT-2's parameters as float32, in the model's order.

    Raises ConvertError for missing, additional or misshapen ones.
    """
    wanted = shapes(config)
    if missing := sorted(wanted.keys() - found.keys()):
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ConvertError(f"{path} lacks {missing[0]}{others}")
    if more := sorted(found.keys() - wanted.keys()):
        raise ConvertError(f"{path} holds {more[0]}, which GPT-2 has not; it is another model")
    for name, shape in wanted.items():
        _assert_shape(path, name, found, shape)
    kept = {"dtype": torch.float32, "copy": True, "memory_format": torch.contiguous_format}
    return {name: found[name].detach().to(**kept) for name in wanted}


def _assert_shape(path: Path, name: str, found: Mapping[str, Tensor], shape: Sequence[int]) -> None:
    if name in found and tuple(found[name].shape) != tuple(shape):
        raise ConvertError(f"{path}: {name} is {tuple(found[name].shape)}, not {tuple(shape)} as configured")


def _oblong(config: GPT2Config) -> dict[str, torch.Size]:
    """Return the shapes of the non-square linear weights, which tell (out, in) from (in, out)."""
    linear = {name: shape for name, shape in shapes(config).items() if _is_linear(name)}
    return {name: shape for name, shape in linear.items() if shape[0] != shape[1]}


def _is_linear(name: str) -> bool:
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """Convert a linear weight from (out, in) to (in, out) of transformers' Conv1D, or back."""
    return tensor.t() if _is_linear(name) and tensor.dim() == 2 else tensor

"""Read and write llm.c's model files, such as gpt2_124M.bin; gpt2.interop.convert offers both functions.

config, weights = read_llmc(Path("gpt2_124M.bin"))

The format is a header of 256 int32 followed by all numbers, as written by write_model() in llm.c's
train_gpt2.py, and by its train_gpt2.cu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2.config.workload import GPT2Config
from gpt2.files.atomic import atomic_write
from gpt2.files.shard_format import HEADER_BYTES, first_bytes, header
from gpt2.interop.weight_files import MEND, ConvertError, Weights, assert_fit, config_of, float32
from gpt2.model.model import shapes

MAGIC = 20240326
DTYPES = {3: torch.float32, 5: torch.bfloat16}
"""Number format by version of the file."""
HEADER = ("n_ctx", "vocab_size", "n_layer", "n_head", "n_embd")
"""Sizes in the order of the header, between the version and the padded vocabulary size."""
MULTIPLE = 128
"""Multiple to which llm.c pads the vocabulary; its softmax leaves the padding out."""


def is_llmc(path: Path) -> bool:
    """Return whether the file begins like llm.c's models."""
    return _header(path)[0] == MAGIC


def read_llmc(path: Path) -> tuple[GPT2Config, Weights]:
    """Return the model's sizes and its weights as float32, without padding.

    Raises ConvertError where the file is of another version, cut off or damaged.
    """
    _, version, *sizes, rows = _header(path)[:8]
    if version not in DTYPES:
        known = "only 3 (float32) and 5 (bfloat16) are read"
        raise ConvertError(f"{path} is of llm.c's version {version}; {known}")
    dtype, config = DTYPES[version], config_of(path, dict(zip(HEADER, sizes, strict=True)), "n_ctx")
    if rows < config.vocab_size:
        raise ConvertError(f"{path}: {config.vocab_size} tokens do not fit in {rows} rows; it is damaged")
    count = config.parameters + (rows - config.vocab_size) * config.n_embd
    promised, size = HEADER_BYTES + count * dtype.itemsize, path.stat().st_size
    if size != promised:
        differs = f"has {size:,} bytes, its header promises {promised:,}"
        raise ConvertError(f"{path} {differs}; it was cut off or damaged")
    number = np.dtype("<f4" if dtype == torch.float32 else "<i2")
    weights, at = {}, HEADER_BYTES
    for name, shape in _order(replace(config, padded_vocab_size=rows)):
        flat = torch.from_numpy(np.fromfile(path, number, shape.numel(), offset=at)).view(dtype)
        weights[name] = flat.to(torch.float32).view(shape)
        at += shape.numel() * number.itemsize
    weights["wte.weight"] = weights["wte.weight"][: config.vocab_size].clone()
    return config, {name: weights[name] for name in shapes(config)}


def _header(path: Path) -> list[int]:
    return np.frombuffer(first_bytes(path).ljust(HEADER_BYTES, b"\0"), "<i4").tolist()


def write_llmc(path: Path, config: GPT2Config, weights: Mapping[str, Tensor], *, bfloat16: bool) -> None:
    """Write a model file that llm.c starts from, like gpt2_124M.bin or, in bfloat16, gpt2_124M_bf16.bin.

    Raises ConvertError where it cannot be written.
    """
    assert_fit(config, weights)
    padded = replace(config, padded_vocab_size=-(-config.vocab_size // MULTIPLE) * MULTIPLE)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    (version,) = (version for version, each in DTYPES.items() if each == dtype)
    sizes = (*(getattr(config, name) for name in HEADER), padded.padded_vocab_size)
    with atomic_write(path, ConvertError, MEND) as file:
        file.write(header(MAGIC, version, *sizes))
        for name, shape in _order(padded):
            numbers = float32(weights[name]).to(dtype).flatten().view(torch.uint8).numpy()
            file.write(numbers.data)
            file.write(bytes(shape.numel() * dtype.itemsize - numbers.size))


def _order(config: GPT2Config) -> Iterator[tuple[str, torch.Size]]:
    """Return names and padded shapes in the file's order: layers grouped by kind of parameter."""
    all_shapes = shapes(config)
    kinds = [name.removeprefix("h.0.") for name in all_shapes if name.startswith("h.0.")]
    layers = [f"h.{number}.{kind}" for kind in kinds for number in range(config.n_layer)]
    names = ("wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias")
    return ((name, all_shapes[name]) for name in names)

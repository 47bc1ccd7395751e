"""Read named tensors from other projects' files of weights.

content(Path("model.safetensors"))["wte.weight"]

A file's first bytes decide its format. No code in a file is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt2.config.workload import GPT2Config
from gpt2.errors import GPT2Error
from gpt2.files.listing import POINTER, name_problem
from gpt2.model.model import shapes

Weights = dict[str, Tensor]
"""Float32 tensors, named and laid out as in gpt2.model.model.GPT2, without padding."""


MEND = "choose another place, or make room"
"""Advice where a file cannot be written."""


class ConvertError(GPT2Error):
    """A weight file that cannot be used or written; the message says which, why and what to do."""


def content(path: Path, *, index: bool = True) -> dict[str, Any]:
    """Return a file's contents by name; index: whether it may name other files that hold the tensors.

    Tensors may be memory-mapped: copy those that you keep. Raises ConvertError, or OSError.
    """
    with path.open("rb") as opened:
        start = opened.read(64)
    if not start:
        raise ConvertError(f"{path} is empty; copy it again")
    if problem := name_problem(path):
        raise ConvertError(problem)
    if start[8:9] == b"{":  # safetensors: a length, whose first bytes may look like torch's, then JSON
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ConvertError(f"{path} is no whole file of safetensors ({error}); copy it again") from None
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return _saved_by_torch(path, zipped=start.startswith(b"PK"))
    if index and start.startswith(b"{"):
        return _indexed(path)
    if start.startswith(POINTER):
        raise ConvertError(f"{path} only points to the weights, which Git LFS keeps; run git lfs pull there")
    others = "of transformers, nanoGPT or llm.c, or its beginning is damaged"
    raise ConvertError(f"{path} is no file of weights {others}")


class StandIn(dict[str, Any]):
    """Replacement for an object of an unknown class: its attributes by name, without its code."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.update(state)


class _NumpyType:
    """Replacement for numpy.dtype in a pickle: a number's type, such as f8, and its byte order."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.name = f"{state[1]}{self.name}"


def _numpy_number(kind: _NumpyType, number: bytes) -> Any:
    return np.frombuffer(number, kind.name)[0].item()  # frombuffer refuses object dtypes


NUMPY = [
    (_NumpyType, "numpy.dtype"),
    (_numpy_number, "numpy.core.multiarray.scalar"),  # numpy 1
    (_numpy_number, "numpy._core.multiarray.scalar"),  # numpy 2
]
"""Replacements for numpy's unpickling functions, which would accept more than numbers."""

SAVE_WEIGHTS = (
    'save its weights alone, where its code is: torch.save({"model": model.state_dict(), '
    '"model_args": {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50257, '
    '"bias": True}}, "weights.pt")'
)
"""Advice for a file that needs code or lacks the model's sizes; those here are the smallest GPT-2's."""


def _saved_by_torch(path: Path, *, zipped: bool) -> dict[str, Any]:
    """Load a file of torch.save(); objects of classes that torch does not know become StandIn.

    Raises ConvertError.
    """
    # Mapped, because most of a training checkpoint is optimiser state, which then is never read. Mapping
    # needs a path, and newer versions of torch decide by a path's suffix.
    mapped = zipped and path.suffix != ".safetensors"
    classes: list[str] = []
    while True:
        # torch's error message omits the module builtins
        names = [f"{module}{name}" for name in classes for module in ("", "builtins.")]
        allowed: list[Any] = [(StandIn, name) for name in names]
        try:
            with torch.serialization.safe_globals([*NUMPY, *allowed]), path.open("rb") as file:
                source = path if mapped else file
                saved = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
            break
        except OSError:
            raise
        except Exception as error:  # a damaged pickle can raise anything
            asked = re.search(r"GLOBAL (\S+)", str(error))
            if asked and asked[1] not in classes:
                classes.append(asked[1])
                continue
            what = "is damaged or was cut off, or torch.save did not write it by its own protocol"
            why = f"{what}; copy it again"
            if classes:
                code = asked[1] if asked else classes[-1]
                why = f"asks for {code}, which is code and is not run; {SAVE_WEIGHTS}"
            raise ConvertError(f"{path} {why}") from None
    if isinstance(saved, StandIn):
        raise ConvertError(f"{path} holds an object of {classes[0]}, whose code is not run; {SAVE_WEIGHTS}")
    if not isinstance(saved, dict):
        raise ConvertError(f"{path} holds no tensors by name, but one {type(saved).__name__}")
    return saved


def _indexed(path: Path) -> dict[str, Any]:
    """Return each tensor from the file that an index names for it; another file may hold an older copy."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConvertError(f"{path} is no index of weights; give the folder, or the file that holds them")
    tensors: dict[str, Any] = {}
    for name in sorted({str(name) for name in files.values()}):
        part = path.with_name(Path(name).name)
        if not part.is_file():
            raise ConvertError(f"{path} names {name}, which is no file beside it; copy it there")
        found = content(part, index=False)
        wanted = [tensor for tensor, file in files.items() if str(file) == name]
        if missing := [tensor for tensor in wanted if tensor not in found]:
            raise ConvertError(f"{part} lacks {missing[0]}, which {path.name} says is there; copy both again")
        tensors |= {tensor: found[tensor] for tensor in wanted}
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConvertError where the file holds none, or OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path} is no JSON ({error}); copy it again") from None
    if not isinstance(found, dict):
        raise ConvertError(f"{path} holds a {type(found).__name__}, not keys and values")
    return found


SIZES = ("n_layer", "n_head", "n_embd", "vocab_size")
"""Model sizes that have the same name in all formats; the context length's name differs."""


def config_of(path: Path, given: Mapping[str, Any], n_ctx: str) -> GPT2Config:
    """Return the GPT2Config of these sizes; n_ctx: the context length's name. Raises ConvertError."""
    for name in (*SIZES, n_ctx):
        if type(given.get(name)) is not int or given[name] < 1:
            wrong = f"{name} is {given.get(name)!r}, no number above 0"
            raise ConvertError(f"{path}: {wrong}; it is damaged or no GPT-2")
    heads, width = given["n_head"], given["n_embd"]
    if width % heads:
        raise ConvertError(f"{path}: {heads} heads cannot share a width of {width}; it is damaged")
    return GPT2Config(n_ctx=given[n_ctx], **{name: given[name] for name in SIZES})


def sizes_of(config: GPT2Config, n_ctx: str) -> dict[str, int]:
    """Return the sizes by which config_of() makes the same model."""
    return {n_ctx: config.n_ctx, **{name: getattr(config, name) for name in SIZES}}


def assert_fit(config: GPT2Config, weights: Mapping[str, Tensor]) -> None:
    """Assert that these are all weights of the model, without padding."""
    logical = replace(config, padded_vocab_size=config.vocab_size)
    assert {name: tensor.shape for name, tensor in weights.items()} == shapes(logical)


def float32(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous float32 on the CPU."""
    return tensor.detach().to("cpu", torch.float32).contiguous()


def reason(error: BaseException) -> str:
    """Return one line on why a file could not be read or written."""
    return (getattr(error, "strerror", None) or str(error)).splitlines()[0]

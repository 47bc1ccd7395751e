"""Check which toggles a kind of device supports, and which toggles require others. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from gpt2.config.devices import HOST
from gpt2.config.toggles import FLOAT8, SCALES_IN_ADAMW, Toggles, UnsupportedToggle

BFLOAT16 = {"autocast": "bfloat16"}
WHOLE = {"products": "whole", "weight_casts": "forward", "weights": "float32", "sharding": "none"}
NEEDS: dict[tuple[str, str], dict[str, str]] = {
    ("products", "onednn"): {"autocast": "float32"},  # which has bfloat16's anyway
    ("residual", "bfloat16"): BFLOAT16,
    **{("float8", scaling): BFLOAT16 | WHOLE for scaling in FLOAT8},
    ("bias_gradient", "triton"): {"gelu": "tanh", "float8": "none"},
    ("int8", "rowwise"): BFLOAT16 | {"float8": "none"},
    ("weights", "bfloat16"): BFLOAT16 | {"adamw": "compiled", "weight_casts": "forward"},
    # A separate scaling pass would round the gradients to bfloat16 once more.
    ("weight_casts", "optimizer"): BFLOAT16
    | {"adamw": "compiled", "clip": "in_step", "tied_gradient": "rows"},
}
"""By toggle and value, the values that it requires of other toggles."""


def check(toggles: Toggles) -> None:
    """Raise UnsupportedToggle where the kind of device, or another toggle, does not allow a value.

    gpt2.device.check also asks the actual device.
    """
    for toggle in fields(toggles):
        value = getattr(toggles, toggle.name)
        only = toggle.metadata["only"].get(value)
        if only and toggles.device not in only.devices:
            raise UnsupportedToggle(toggle.name, value, only.otherwise)
    for name, reason in _problems(toggles):
        raise UnsupportedToggle(name, getattr(toggles, name), reason)


def _problems(toggles: Toggles) -> Iterator[tuple[str, str]]:
    """Yield toggles that do nothing, or the wrong thing, beside the others, and what they require."""
    if toggles.threads != "default" and toggles.device != HOST:
        yield "threads", "sets the threads of a CPU; leave it at default"
    if toggles.adamw == "compiled" and toggles.sharding != "none":
        yield "adamw", "the compiled step knows no shards; choose fused"
    if toggles.autocast == "float16" and toggles.adamw == "fused" and toggles.device not in SCALES_IN_ADAMW:
        # https://github.com/pytorch/pytorch/pull/186360
        yield "adamw", "this device's updates even where float16 overflowed; choose foreach"
    if toggles.clip == "in_step":
        if toggles.adamw not in ("fused", "compiled"):
            yield "clip", "only these scale gradients as they read them: set adamw to fused or compiled"
        if toggles.autocast == "float16" or toggles.sharding != "none":
            yield "clip", "float16's scaler and shards have gradients scaled apart; choose separate"
    needed = {name: others for (name, value), others in NEEDS.items() if getattr(toggles, name) == value}
    for name, others in needed.items():
        for other, value in others.items():
            if getattr(toggles, other) != value:
                yield name, f"needs {other}: {value}"
    for name, otherwise in {"weights": "float32", "weight_casts": "forward"}.items():
        if name in needed and (toggles.grad_accum_steps > 1 or toggles.world_size > 1):
            other = f"choose {otherwise}, or one rank and a larger micro-batch"
            yield name, f"gradients would be added up in bfloat16; {other}"
    if toggles.reductions == "apart" and toggles.compile == "eager":
        yield "reductions", "nothing is compiled; set compile"
    if toggles.compile_region == "block" and toggles.compile == "eager":
        yield "compile_region", "nothing is compiled; set compile"
    if toggles.compile_region == "block" and toggles.world_size > 1:
        yield "compile_region", "several ranks cut the graph where they exchange; choose model"
    if toggles.launch == "graph" and (reason := _why_not_one_graph(toggles)):
        yield "launch", reason
    if reason := _why_not_this_loss(toggles):
        yield "cross_entropy", reason
    if toggles.attention == "flex" and toggles.compile == "eager":
        yield "attention", "uncompiled it materialises the scores; set compile, or choose sdpa"
    if toggles.affinity == "pinned" and toggles.world_size > 1:
        yield "affinity", "all ranks would share the first cores; choose free"
    narrow = toggles.attention in ("flash", "cudnn", "flash3", "flash4") and toggles.device != HOST
    if narrow and toggles.autocast == "float32":
        yield "attention", "this kernel takes bfloat16 and float16 only; choose efficient, or set autocast"
    if toggles.sharding != "none" and toggles.world_size == 1:
        yield "sharding", "one rank has nobody to share with; choose a world_size above 1, or none"
    if toggles.cuda_graphs and toggles.shards_gradients:
        # A graph replays with the addresses that it was recorded with; gathered weights have new ones.
        yield (
            "compile",
            "CUDA graphs need weights that stay in place, and sharding moves them; choose default",
        )
    if toggles.cuda_graphs and toggles.grad_accum_steps > 1:
        # The next replay would overwrite the gradients that are being accumulated (pytorch issue 169545).
        others = "choose max-autotune-no-cudagraphs or a larger micro-batch"
        yield "compile", f"CUDA graphs do not accumulate gradients; {others}"


def _why_not_one_graph(toggles: Toggles) -> str | None:
    """Return why a whole step with these toggles cannot be one CUDA graph; None if it can."""
    if toggles.cuda_graphs:
        return "torch.compile records CUDA graphs of its own in this mode; set compile to default"
    if toggles.adamw != "fused":
        return "a recorded step needs an AdamW that asks nothing of the host: set adamw to fused"
    if toggles.autocast == "float16":
        return "float16's scaler asks the device in each step; set autocast to bfloat16"
    if toggles.world_size > 1:
        return "exchanges between ranks are not recorded; choose ops"
    return None


def _why_not_this_loss(toggles: Toggles) -> str | None:
    """Return why another project's kernel cannot compute the loss with these toggles; None if it can."""
    loss = toggles.cross_entropy
    if loss in ("liger", "quack") and toggles.autocast == "float16":
        why = "it writes the gradient of a sum over the batch, whose products overflow in float16"
        return f"{why}; choose triton"
    if loss == "quack" and toggles.vocab_multiple == 1:
        why = "it loads several numbers of a row at once, and rows of 50257 are not aligned"
        return f"{why}; set vocab_multiple"
    if (loss == "liger" and toggles.cuda_graphs) or (loss in ("liger", "cut") and toggles.launch == "graph"):
        return "it asks the device about the targets, which a CUDA graph cannot record; choose triton"
    return None

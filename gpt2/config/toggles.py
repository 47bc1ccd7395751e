"""The toggles: one field per optimisation, with its values and the devices that support them.

A new optimisation is a field of Toggles, a branch where it is applied (gpt2.training.stages; inside the model
a field of GPT2Config, whose name tells model_config() to pass the value on), a proof in gpt2.proofs, and in
gpt2.config.constraints what it requires of others: docs/architecture.md, "To add". Importing this module
loads no torch, so that ladders can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from gpt2.config.devices import CUDA, DEVICES, HOST, XLA, DeviceName, devices
from gpt2.config.tolerances import LOSS_TOLERANCE
from gpt2.config.workload import STRICT, Workload
from gpt2.errors import GPT2Error

EAGER = devices(lambda kind: kind.eager)
COMPILES_ADAMW = devices(lambda kind: kind.compiles_adamw)
SCALES_IN_ADAMW = devices(lambda kind: kind.scales_in_adamw)
SHARDS = devices(lambda kind: kind.shards)


MATMUL_CHOICES = "GPT2_MATMUL_CHOICES"
"""Environment variable: a file in which processes of one machine keep what products=tuned has chosen."""


class UnsupportedToggle(GPT2Error):
    """A toggle that this device does not support; the message says why and what to choose instead."""

    def __init__(self, toggle: str, value: object, reason: str) -> None:
        super().__init__(f"{toggle}: {value}: {reason}")


@dataclass(frozen=True)
class Only:
    """The kinds of device that support one value of a toggle, and the message for others."""

    devices: Collection[str]
    otherwise: str


def choice(
    default: Any,
    help: str,
    *,
    only: Mapping[Any, Only] | None = None,
    precision: Mapping[Any, str] | None = None,
    maths: Mapping[Any, str] | None = None,
    note: Callable[[Toggles, Workload], str] | None = None,
) -> Any:
    """Make a field of Toggles.

    only: values that not every device supports. precision: values that change the arithmetic, with their
    class (see LOSS_TOLERANCE). maths: values that differ from GPT-2's training by more than rounding, and
    why. note: returns what the scoreboard should say beside the value.
    """
    facts = {"only": only or {}, "precision": precision or {}, "maths": maths or {}, "note": note}
    return field(default=default, metadata={"help": help, **facts})


FLOAT8 = ("tensorwise", "rowwise")
"""Scalings of float8."""
Attention = Literal[
    "explicit", "sdpa", "flash", "efficient", "cudnn", "math", "blocks", "brgemm", "flash3", "flash4", "flex"
]
CompileMode = Literal[
    "eager", "default", "reduce-overhead", "gemm", "coordinate-descent", "gemm+coordinate-descent",
    "max-autotune", "max-autotune-no-cudagraphs",
]  # fmt: skip


@cache
def _listed_values() -> dict[str, tuple[Any, ...]]:
    """Return the values of each toggle that has a list of them; the device is checked where it is found."""
    hints = {name: hint for name, hint in get_type_hints(Toggles).items() if name != "device"}
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


@dataclass(frozen=True, kw_only=True)
class Toggles:
    """All optimisations, off by default. A rung is replace(previous, **changes)."""

    __pydantic_config__: ClassVar = STRICT

    device: DeviceName = choice(
        HOST,
        "Where the model trains; cuda is an NVIDIA or AMD GPU, mps Apple's, xpu Intel's, xla a TPU or XLA's "
        "own CPU backend.",
    )
    autocast: Literal["float32", "bfloat16", "float16"] = choice(
        "float32",
        "Number format of the matrix products; weights stay float32. float16 adds a gradient scaler.",
        only={"float16": Only(EAGER, "TPUs have bfloat16 units; choose bfloat16")},
        precision={"bfloat16": "bfloat16", "float16": "float16"},
        note=lambda toggles, workload: (
            "its scaler waits for the device each step: AdamW is "
            + ("under zero1" if toggles.adamw == "fused" else "not fused")
            if toggles.autocast == "float16" and (toggles.adamw != "fused" or toggles.sharding == "zero1")
            else ""
        ),
    )
    matmul_precision: Literal["highest", "high", "medium"] = choice(
        "highest",
        "How float32 products are computed: exactly, as TF32 (high, CUDA) or as bfloat16 (medium, CPU); "
        "on TPUs as six, three (high) or one (medium) of bfloat16.",
        only={
            "high": Only({CUDA, XLA}, "TF32 exists on CUDA only; on a CPU choose medium"),
            "medium": Only(
                {HOST, XLA},
                "bfloat16 products of float32 exist on CPUs and TPUs only; on CUDA choose high",
            ),
        },
        precision={"high": "tf32", "medium": "bfloat16"},
    )
    attention: Attention = choice(
        "explicit",
        "explicit keeps all scores; sdpa is scaled_dot_product_attention, and flash, efficient, cudnn and "
        "math its kernels; blocks is flash with a blockwise backward pass, brgemm our kernel for CPUs; "
        "flash3, flash4 and flex are FlashAttention-3, -4 and FlexAttention.",
        only={
            "flash4": Only({CUDA}, "FlashAttention-4 is for Hopper GPUs and later; choose sdpa"),
            "flash3": Only({CUDA}, "FlashAttention-3 is for Hopper GPUs; choose sdpa"),
            "flex": Only({CUDA}, "FlexAttention trains on CUDA only; choose sdpa"),
            "blocks": Only({HOST}, "only a CPU's library gains by it; choose flash"),
            "brgemm": Only({HOST}, "it is a kernel for CPUs; choose flash"),
            "flash": Only({HOST, CUDA}, "no such kernel on this device; choose sdpa"),
            "efficient": Only({CUDA}, "this kernel exists on CUDA only; choose sdpa"),
            "cudnn": Only({CUDA}, "cuDNN exists on CUDA only; choose sdpa"),
        },
    )
    compile: CompileMode = choice(
        "eager",
        "Mode of torch.compile for the model's forward and backward pass. gemm chooses the kernel of each "
        "matmul by timing, long sums cut in parts where that is faster; coordinate-descent tunes the "
        "settings of each Triton kernel one after another; max-autotune is torch's, without that.",
        note=lambda toggles, workload: (
            "each block apart; embeddings and lm_head eager"
            if toggles.compile != "eager" and toggles.shards_gradients
            else ""
        ),
        only={
            "default": Only(EAGER, "XLA compiles every step by itself; choose eager"),
            "reduce-overhead": Only({CUDA}, "CUDA graphs exist on CUDA only; choose default"),
            "max-autotune": Only(
                {CUDA}, "CUDA graphs exist on CUDA only; choose max-autotune-no-cudagraphs or default"
            ),
            **dict.fromkeys(
                ("gemm", "coordinate-descent", "gemm+coordinate-descent"),
                Only({CUDA}, "it tunes Triton's kernels, which are CUDA's; choose default"),
            ),
            "max-autotune-no-cudagraphs": Only(
                {HOST, CUDA}, "torch tunes nothing on this device; choose default, or eager on xla"
            ),
        },
    )
    reductions: Literal["mixed", "apart"] = choice(
        "mixed",
        "Sums over rows and over columns of one tensor, as in LayerNorm's backward pass, by one kernel where "
        "torch.compile can (Inductor's mix-order reduction, from torch 2.10 on), or by two.",
        only={"apart": Only({CUDA}, "torch.compile mixes them on CUDA only; choose mixed")},
    )
    compile_region: Literal["model", "block"] = choice(
        "model",
        "What torch.compile takes in one piece: the model, its layers unrolled, or a block, which is "
        "compiled once for all layers.",
        only={"block": Only(EAGER, "XLA compiles every step by itself; choose model")},
    )
    launch: Literal["ops", "graph"] = choice(
        "ops",
        "How the host launches a step: op by op, or the whole step at once, as one CUDA graph recorded "
        "before.",
        only={"graph": Only({CUDA}, "CUDA graphs exist on CUDA only; choose ops")},
    )
    adamw: Literal["for_loop", "foreach", "fused", "compiled"] = choice(
        "for_loop",
        "AdamW one tensor at a time, over lists of tensors (torch's default on CUDA), in one kernel, or "
        "compiled.",
        only={
            "compiled": Only(COMPILES_ADAMW, "torch compiles no optimiser on this device; choose fused"),
            "foreach": Only(EAGER, "XLA compiles the update with the whole step; choose for_loop"),
            "fused": Only(EAGER, "XLA compiles the update with the whole step; choose for_loop"),
        },
    )
    sharding: Literal["none", "zero1", "zero2", "fsdp2"] = choice(
        "none",
        "What ranks split: the optimiser's state (zero1), gradients too (zero2), weights too (fsdp2).",
        only=dict.fromkeys(
            ("zero1", "zero2", "fsdp2"),
            Only(SHARDS, "there is no such sharding on this device; choose none"),
        ),
        note=lambda toggles, workload: {
            "zero1": "optimiser state, each tensor's on one rank",
            "zero2": "optimiser state and gradients",
            "fsdp2": "optimiser state, gradients and weights",
        }.get(toggles.sharding, ""),
    )
    vocab_multiple: Literal[1, 64, 128] = choice(
        1,
        "Pads the vocabulary to a multiple of this; 64 and 128 both make GPT-2's 50257 into 50304.",
        note=lambda toggles, workload: (
            f"{toggles.padded(workload.config.vocab_size)} rows, pad logits masked: same loss"
        ),
    )
    recompute: Literal["none", "gelu", "block"] = choice(
        "none",
        "What the backward pass computes again instead of keeping it: nothing, GELU's results, or each "
        "block.",
        only={
            "gelu": Only(EAGER, "XLA computes once what it is asked twice; choose none"),
            "block": Only(EAGER, "XLA computes once what it is asked twice; choose none"),
        },
    )
    micro_batch_size: int = choice(1, "Sequences per forward pass and rank.")
    grad_accum_steps: int = choice(1, "Forward and backward passes per optimiser step and rank.")
    world_size: int = choice(
        1,
        "Devices that train together, by DistributedDataParallel unless gradients are sharded; on xla by "
        "SPMD.",
        note=lambda toggles, workload: (
            ""
            if toggles.world_size == 1 or toggles.shards_gradients
            else ("DDP" if toggles.processes > 1 else "SPMD, one process")
        ),
    )
    cross_entropy: Literal["torch", "closed_form", "linear", "triton", "liger", "quack", "cut"] = choice(
        "torch",
        "The loss: torch's, of float32 logits; closed_form, in the logits' format, with their gradient by "
        "its formula; linear, with the lm_head in chunks, by torch's linear_cross_entropy; triton, a kernel "
        "of ours that overwrites the logits with their gradient; liger and quack, kernels of Liger Kernel "
        "and QuACK that do the same; or cut, exact Cut Cross-Entropy, which keeps no logits.",
        only={
            **dict.fromkeys(
                ("triton", "liger", "quack", "cut"),
                Only({CUDA}, "it is a kernel for GPUs; choose closed_form"),
            ),
            "closed_form": Only(EAGER, "XLA fuses the loss by itself; choose torch"),
            "linear": Only(EAGER, "XLA fuses the loss by itself; choose torch"),
        },
        note=lambda toggles, workload: (
            "same loss and gradients, summed in another order"
            if toggles.cross_entropy in ("triton", "liger", "quack", "cut")
            else ""
        ),
    )
    tied_gradient: Literal["scatter", "rows"] = choice(
        "scatter",
        "How the embedding's gradient joins the lm_head's: scattered into a tensor of zeros, or row by row "
        "in place.",
        only={"rows": Only(EAGER, "XLA arranges its additions by itself; choose scatter")},
    )
    gelu: Literal["tanh", "sigmoid"] = choice(
        "tanh",
        "GELU's tanh approximation by a tanh, or by the exponential that it equals.",
        only={"sigmoid": Only(EAGER, "XLA chooses its own arithmetic; choose tanh")},
    )
    layer_norm: Literal["torch", "liger", "quack"] = choice(
        "torch",
        "LayerNorm by torch, compiled if the model is, or by the kernels of Liger Kernel or QuACK.",
        only=dict.fromkeys(("liger", "quack"), Only({CUDA}, "it is a kernel for GPUs; choose torch")),
    )
    products: Literal["whole", "tuned", "onednn"] = choice(
        "whole",
        "How a CPU runs matmuls: whole; onednn, in float32 by oneDNN in place of MKL; or tuned, the fastest "
        "for each shape of whole, split by rows or columns, or oneDNN.",
        only=dict.fromkeys(
            ("tuned", "onednn"), Only({HOST}, "only a CPU's library gains by it; choose whole")
        ),
    )
    bias_gradient: Literal["torch", "triton"] = choice(
        "torch",
        "Gradients of biases: summed in passes of their own, or by our Triton kernels that "
        "write the gradients of GELU's input and of q, k and v.",
        only={"triton": Only({CUDA}, "they are kernels for GPUs; choose torch")},
        note=lambda toggles, workload: (
            "same gradients, summed in another order" if toggles.bias_gradient == "triton" else ""
        ),
    )
    clip: Literal["separate", "in_step"] = choice(
        "separate",
        "Gradients clipped in a pass of their own, or by AdamW as it reads them.",
        only={"in_step": Only(SCALES_IN_ADAMW, "this device's AdamW scales no gradients; choose separate")},
    )
    weight_casts: Literal["forward", "optimizer"] = choice(
        "forward",
        "Who casts the weights for the products: autocast in each forward pass, or AdamW as it writes them.",
        only={"optimizer": Only(COMPILES_ADAMW, "AdamW is not compiled on this device; choose forward")},
    )
    residual: Literal["float32", "bfloat16"] = choice(
        "float32",
        "Number format of the residual stream, which all layers add to.",
        maths={"bfloat16": "each layer's sum is rounded to bfloat16"},
    )
    weights: Literal["float32", "bfloat16"] = choice(
        "float32",
        "Number format of the weight matrices; bfloat16 is rounded stochastically by AdamW and has no "
        "float32 master (weight_casts: optimizer has one).",
        maths={"bfloat16": "weights keep 8 of 24 bits, rounded at random"},
        only={"bfloat16": Only(COMPILES_ADAMW, "AdamW is not compiled on this device; choose float32")},
    )
    float8: Literal["none", "tensorwise", "rowwise"] = choice(
        "none",
        "The blocks' linear layers multiply in float8 by torchao, scaled by tensor or by row; the lm_head "
        "does not.",
        maths=dict.fromkeys(FLOAT8, "linear layers keep 3 or 4 bits of what they multiply"),
        precision=dict.fromkeys(FLOAT8, "float8"),
        only=dict.fromkeys(FLOAT8, Only({CUDA}, "only newer GPUs have such units; choose none")),
        note=lambda toggles, workload: "" if toggles.float8 == "none" else "MFU is over bfloat16's peak",
    )
    int8: Literal["none", "rowwise"] = choice(
        "none",
        "The blocks' linear layers multiply 8-bit integers by torchao, scaled by row; the lm_head does not.",
        maths={"rowwise": "linear layers keep 8 bits of what they multiply"},
        precision={"rowwise": "float8"},  # float8's rounding is the coarser one
        only={"rowwise": Only({CUDA}, "torchao's kernel is for GPUs; choose none")},
        note=lambda toggles, workload: "" if toggles.int8 == "none" else "MFU is over bfloat16's peak",
    )
    allocator: Literal["system", "thp", "tcmalloc", "jemalloc", "expandable"] = choice(
        "system",
        "Where memory comes from: on a CPU the C library, the same in huge pages by torch (thp), or another "
        "library; on CUDA torch's cache, or that in segments that grow (expandable).",
        only={
            **dict.fromkeys(
                ("thp", "tcmalloc", "jemalloc"),
                Only({HOST}, "this device has memory of its own; choose system"),
            ),
            "expandable": Only({CUDA}, "only CUDA's memory has segments; choose system"),
        },
    )
    affinity: Literal["free", "pinned"] = choice(
        "free",
        "Threads of a CPU wander between cores as the system likes, or stay on one core each.",
        only={"pinned": Only({HOST}, "the threads of a CPU are meant; choose free")},
    )
    threads: int | Literal["default"] = choice(
        "default",
        "Threads of each rank on a CPU; default: physical cores divided by the ranks on this machine.",
    )

    def __post_init__(self) -> None:
        listed = _listed_values()
        for toggle in fields(self):
            value = getattr(self, toggle.name)
            if isinstance(value, bool):  # a bool is an int in Python
                words = "YAML reads on, off, yes and no as true and false"
                raise ValueError(f"{toggle.name}: {words}; none of them is a value")
            if isinstance(value, float) and toggle.name not in listed:
                raise ValueError(f"{toggle.name} {value}: should be a whole number, without a point")
            if isinstance(value, int) and not 1 <= value < 2**31:
                raise ValueError(f"{toggle.name} {value} is {'less than 1' if value < 1 else 'too large'}")
            if value not in (known := listed.get(toggle.name, (value,))):
                raise ValueError(f"{toggle.name}: {value!r} is not one of {', '.join(map(str, known))}")

    @property
    def processes(self) -> int:
        """Processes that train together: one per device, unless one process feeds all devices."""
        return 1 if DEVICES[self.device].one_process else self.world_size

    @property
    def sequences(self) -> int:
        """Sequences per forward pass of one process."""
        return self.micro_batch_size * self.world_size // self.processes

    def padded(self, vocab_size: int) -> int:
        """Return the embedding's number of rows for a vocabulary."""
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def cuda_graphs(self) -> bool:
        """True if torch.compile records forward and backward pass as CUDA graphs and replays them."""
        return self.compile in ("reduce-overhead", "max-autotune")

    @property
    def shards_gradients(self) -> bool:
        """True if each rank keeps only its shard of every tensor, with torch's fully_shard."""
        return self.sharding in ("zero2", "fsdp2")

    def tokens_per_step(self, seq_len: int) -> int:
        """Return the tokens of one optimiser step over all ranks."""
        return self.micro_batch_size * self.grad_accum_steps * self.world_size * seq_len

    def product_format(self) -> str:
        """Return the number format of the matmuls' inputs."""
        if self.autocast != "float32":
            return self.autocast
        high = DEVICES[self.device].high_precision
        return {"highest": "float32", "high": high, "medium": "bfloat16"}[self.matmul_precision]

    def maths(self) -> dict[str, str]:
        """Return "toggle=value" and why, for toggles that change GPT-2's training by more than rounding."""
        return {
            f"{toggle.name}={value}": why
            for toggle in fields(self)
            if (why := toggle.metadata["maths"].get(value := getattr(self, toggle.name)))
        }

    def precision_class(self) -> str:
        """Return the coarsest arithmetic in use, a key of LOSS_TOLERANCE."""
        classes = {"float32"}
        for toggle in fields(self):
            classes.add(toggle.metadata["precision"].get(getattr(self, toggle.name), "float32"))
        return max(classes, key=list(LOSS_TOLERANCE).index)


BASELINE = Toggles()
"""All toggles at their defaults."""


def resolve(workload: Workload, toggles: Toggles) -> Toggles:
    """Derive grad_accum_steps from the workload's tokens per step, if given.

    Raises ValueError where it cannot.
    """
    if workload.tokens_per_step is None:
        return toggles
    once = replace(toggles, grad_accum_steps=1).tokens_per_step(workload.seq_len)
    steps, rest = divmod(workload.tokens_per_step, once)
    if rest or not steps:
        raise ValueError(
            f"workload.tokens_per_step {workload.tokens_per_step} is not a multiple of {once} = "
            f"micro_batch_size {toggles.micro_batch_size} x world_size {toggles.world_size} x seq_len "
            f"{workload.seq_len}"
        )
    return replace(toggles, grad_accum_steps=steps)


def describe(toggles: Toggles, before: Toggles | None, workload: Workload) -> list[str]:
    """Describe the differences from the previous rung for a reader: "vocab_multiple=64 (50304 rows, ...)".

    Where `before` is None, this is the device and the differences from the baseline.
    """
    described = []
    for toggle in fields(Toggles):
        value = getattr(toggles, toggle.name)
        if value == getattr(before or Toggles(), toggle.name) and (before or toggle.name != "device"):
            continue
        note = toggle.metadata["note"] and toggle.metadata["note"](toggles, workload)
        described.append(f"{toggle.name}={value} ({note})" if note else f"{toggle.name}={value}")
    return described

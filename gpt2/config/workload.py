"""What is computed: the model, its data, its optimiser and the size of a step. Imports no torch.

gpt2.config.toggles defines how it is computed; nothing there changes a number defined here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

STRICT = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""pydantic settings for dataclasses that a user writes: unknown keys, wrong types, infinities are errors."""


MOST_FLOAT32 = 3.4e38
TEXT_VOCABULARY = 50257
"""Size of GPT-2's vocabulary; a smaller one is another's: generated tokens, or characters."""


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    """The sizes of a GPT-2, and the choices that toggles make inside the model."""

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int = 1024
    """Longest sequence in tokens, which is the number of learned positions."""
    vocab_size: int = TEXT_VOCABULARY
    """Logical vocabulary size: the ids that text can contain."""
    padded_vocab_size: int = 0
    """Rows of the embedding, 0 for vocab_size; logits of rows beyond vocab_size are masked."""
    attention: str = "explicit"
    """A key of model.ATTENTION, such as explicit (materialised scores) or sdpa (torch's function)."""
    recompute: str = "none"
    """Activations that the backward pass recomputes instead of keeping: none, gelu or block."""
    # These too have the values of the toggles of their names.
    cross_entropy: str = "torch"
    tied_gradient: str = "scatter"
    gelu: str = "tanh"
    products: str = "whole"
    bias_gradient: str = "torch"
    layer_norm: str = "torch"
    residual: str = "float32"
    int8: str = "none"

    def __post_init__(self) -> None:
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        assert self.n_embd % self.n_head == 0
        assert self.padded_vocab_size >= self.vocab_size

    @property
    def drawable(self) -> int:
        """Number of tokens that may be sampled; rows beyond GPT-2's vocabulary stand for no text."""
        return min(self.vocab_size, TEXT_VOCABULARY)

    @property
    def parameters(self) -> int:
        """Number of logical parameters, without padding rows and with the tied lm_head counted once."""
        d = self.n_embd
        block = 12 * d * d + 13 * d  # qkv 3dd+3d, proj dd+d, fc 4dd+4d, proj 4dd+d, two LayerNorms 4d
        return self.vocab_size * d + self.n_ctx * d + self.n_layer * block + 2 * d

    @property
    def plain(self) -> GPT2Config:
        """The same config with torch's own functions, the reference for ours; the maths stay."""
        choices = {each.name: each.default for each in fields(self) if isinstance(each.default, str)}
        torchs = {name: default for name, default in choices.items() if name not in KEPT}
        attention = "explicit" if self.attention == "explicit" else "sdpa"
        return replace(self, **{**torchs, "attention": attention})


KEPT = ("recompute", "residual", "int8")
"""Choices inside the model that `plain` keeps: how often something is computed, and how it is rounded."""


# Sizes from the GPT-2 paper (Radford et al. 2019, table 2). `tiny` and `mini`, which takes text, are ours.
# `tiny` is for tests and smoke ladders; its vocabulary is prime, so that padding it has an effect.
PRESETS = {
    "tiny": GPT2Config(n_layer=2, n_head=2, n_embd=64, n_ctx=128, vocab_size=509),
    "mini": GPT2Config(n_layer=4, n_head=4, n_embd=128, n_ctx=256),
    "gpt2": GPT2Config(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": GPT2Config(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": GPT2Config(n_layer=48, n_head=25, n_embd=1600),
    # Sizes from the GPT-3 paper (Brown et al. 2020, table 2.1), with dense attention in every layer, where
    # the paper's alternates with banded. Where the paper's number of heads times their width is not the
    # model's width, the heads' width is kept: xl there has 24 heads of 128 for a width of 2048, here 16; 13b
    # there has a width of 5140 for 40 heads of 128, here 5120.
    "gpt3-small": GPT2Config(n_layer=12, n_head=12, n_embd=768, n_ctx=2048),
    "gpt3-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024, n_ctx=2048),
    "gpt3-large": GPT2Config(n_layer=24, n_head=16, n_embd=1536, n_ctx=2048),
    "gpt3-xl": GPT2Config(n_layer=24, n_head=16, n_embd=2048, n_ctx=2048),
    "gpt3-2.7b": GPT2Config(n_layer=32, n_head=32, n_embd=2560, n_ctx=2048),
    "gpt3-6.7b": GPT2Config(n_layer=32, n_head=32, n_embd=4096, n_ctx=2048),
    "gpt3-13b": GPT2Config(n_layer=40, n_head=40, n_embd=5120, n_ctx=2048),
    "gpt3-175b": GPT2Config(n_layer=96, n_head=96, n_embd=12288, n_ctx=2048),
}

FLOPS_FORMULA = (
    "3 x forward matmuls = 6 N + 12 L T d; attention not halved, lm_head at the logical vocabulary"
)


def flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Return the floating-point operations to train on one token: the numerator of MFU, whatever the toggles.

    The forward pass of one token multiplies and adds once per matmul weight (2 N FLOPs) and, in each layer,
    computes scores over and averages T positions of width d (2 T d each). The backward pass has two matmuls
    for each one of the forward pass, hence the factor 3. N counts matmul weights only: qkv, projections, MLP
    and the tied lm_head at the logical vocabulary; embeddings are look-ups. This is the formula of PaLM,
    appendix B (Chowdhery et al. 2022); for gpt2 at 1024 it gives 854,438,400.
    """
    d = config.n_embd
    matmul_weights = config.n_layer * 12 * d * d + config.vocab_size * d
    attention = config.n_layer * 2 * 2 * seq_len * d
    return 3 * (2 * matmul_weights + attention)


def hardware_flops_per_token(config: GPT2Config, seq_len: int, recompute: str) -> int:
    """Return the floating-point operations that actually run for one token: the numerator of HFU.

    To flops_per_token() it adds the padding columns of the lm_head and, where whole blocks are recomputed,
    their forward matmuls except the last: the MLP's output projection, whose result no gradient needs. The
    lm_head is in no block. Recomputation inside a fused attention kernel or the chunked loss is not counted.
    """
    d = config.n_embd
    padding = 3 * 2 * (config.padded_vocab_size - config.vocab_size) * d
    again = config.n_layer * (2 * 8 * d * d + 2 * 2 * seq_len * d) if recompute == "block" else 0
    return flops_per_token(config, seq_len) + padding + again


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The model, data and optimiser that a ladder trains with on every rung."""

    __pydantic_config__: ClassVar = STRICT

    model: str = "gpt2"
    """A key of PRESETS."""
    data: str = "synthetic"
    """synthetic, or the name of a corpus (see gpt2.data.batches.open_corpus)."""
    seq_len: int = 1024
    """Tokens per sequence, T; at most the model's context length."""
    seed: int = 1337
    """Determines the initial weights and the order of the data."""
    tokens_per_step: int | None = None
    """Tokens per optimiser step over all ranks; None: as many as the toggles give."""
    lr: float = 6.0e-4
    lr_warmup_steps: int = 0
    """Steps of linear warm-up to lr; 0 starts at lr."""
    lr_decay_steps: int = 0
    """Step at which a cosine decay from lr reaches lr_final_fraction of it; 0 keeps lr constant."""
    lr_final_fraction: float = 0.1
    """Share of lr that remains after the decay."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1.0e-8
    weight_decay: float = 0.1
    """Applied to matrices and embeddings only, not to biases and LayerNorms."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it."""

    def __post_init__(self) -> None:
        if self.model not in PRESETS:
            raise ValueError(f"model {self.model!r} is not one of {', '.join(PRESETS)}")
        context = PRESETS[self.model].n_ctx
        if not 1 <= self.seq_len <= context:
            raise ValueError(f"seq_len {self.seq_len} is outside 1 to {context}, the context of {self.model}")
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step {self.tokens_per_step} is less than 1")
        if self.seed < 0:
            raise ValueError(f"seed {self.seed} is negative")
        if self.lr_warmup_steps < 0:
            raise ValueError(f"lr_warmup_steps {self.lr_warmup_steps} is negative")
        if self.lr_decay_steps and self.lr_decay_steps <= self.lr_warmup_steps:
            warmup = f"lr_warmup_steps {self.lr_warmup_steps}"
            raise ValueError(f"lr_decay_steps {self.lr_decay_steps} is not beyond {warmup}")
        if not 0 <= self.lr_final_fraction <= 1:
            raise ValueError(f"lr_final_fraction {self.lr_final_fraction} is outside 0 to 1")
        if max(self.lr, self.weight_decay, self.eps) > MOST_FLOAT32:
            raise ValueError("lr, weight_decay and eps must be numbers that float32 can hold")
        if min(self.lr, self.eps, self.grad_clip) <= 0 or self.weight_decay < 0:
            raise ValueError("lr, eps and grad_clip must be above 0 and weight_decay not below it")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError("beta1 and beta2 must be at least 0 and less than 1")

    @property
    def config(self) -> GPT2Config:
        """The model's config before any toggle."""
        return PRESETS[self.model]

    @property
    def flops_per_token(self) -> int:
        """FLOPs to train on one token; see flops_per_token()."""
        return flops_per_token(self.config, self.seq_len)

    @property
    def other_flops_per_token(self) -> dict[str, int]:
        """FLOPs per token by other conventions, by name: their MFU differs by that factor.

        "6 N without embeddings" is that of Kaplan et al. (2020), without attention. llm.c counts every
        parameter, embeddings and padding included, and half of the attention: 6 L T d.
        """
        config, d = self.config, self.config.n_embd
        embeddings = (config.vocab_size + config.n_ctx) * d
        padded = -(-config.vocab_size // 128) * 128 - config.vocab_size
        return {
            "6 N without embeddings": 6 * (config.parameters - embeddings),
            "llm.c": 6 * (config.parameters + padded * d) + 6 * config.n_layer * self.seq_len * d,
        }

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimiser step `step`, counted from 0."""
        if step < self.lr_warmup_steps:
            return self.lr * ((step + 1) / self.lr_warmup_steps)
        if not self.lr_decay_steps:
            return self.lr
        decayed = min(1.0, (step - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps))
        floor = self.lr * self.lr_final_fraction
        return floor + (self.lr - floor) * (1 + math.cos(math.pi * decayed)) / 2

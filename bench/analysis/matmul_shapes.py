"""The matrix products in which GPT-2 spends its time. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from bench.records.machine import Role
from gpt2.config.workload import GPT2Config

VOCAB_MULTIPLE = 64
"""lm_head is measured at the vocabulary padded to this: 50304 of GPT-2's 50257, which divides evenly into
tiles.
"""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A linear layer: (tokens, k) by (k, n), `count` times in the model."""

    name: str
    k: int
    n: int
    padded_n: int
    """As it is measured; n but for lm_head."""
    count: int

    def shape(self, role: Role, tokens: int) -> tuple[int, int, int]:
        """(m, k, n) of one of the layer's three products, as it is measured."""
        return {
            "forward": (tokens, self.k, self.padded_n),
            "input_gradient": (tokens, self.padded_n, self.k),
            "weight_gradient": (self.padded_n, tokens, self.k),
        }[role]


def linear_layers(config: GPT2Config) -> list[Linear]:
    """The five shapes of the model; with lm_head at the logical vocabulary they are what gpt2.config.workload
    counts.
    """
    d, layers = config.n_embd, config.n_layer
    padded = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return [
        Linear(name="qkv", k=d, n=3 * d, padded_n=3 * d, count=layers),
        Linear(name="attention projection", k=d, n=d, padded_n=d, count=layers),
        Linear(name="MLP up", k=d, n=4 * d, padded_n=4 * d, count=layers),
        Linear(name="MLP down", k=4 * d, n=d, padded_n=d, count=layers),
        Linear(name="lm_head", k=d, n=config.vocab_size, padded_n=padded, count=1),
    ]


def attention_flops(n_embd: int, tokens: int, seq_len: int) -> int:
    """Of one layer's scores and averages, forward and backward, on the causal half.

    That is the (seq_len + 1) / 2 positions that a token attends to on average.
    """
    return 3 * 2 * n_embd * tokens * (seq_len + 1)

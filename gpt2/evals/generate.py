"""Generate text from a GPT-2 token by token, with a cache of keys and values.

text = stream_text(int(token) for (token,) in generate(model, prompt, max_tokens=100, seed=42))

The layers' submodules are called eagerly, one by one. A model compiled for training is therefore neither
recompiled for other shapes nor changed, and can be sampled between two of its steps.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpt2.model.model import GPT2, Attention
from gpt2.text import gpt2_encoding

KERNELS = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
"""All attention kernels: the one that training is restricted to may not support a single query."""

COLDEST = 1e-30
"""Smallest temperature that float32 can divide by; only the likeliest token remains at larger ones, too."""


def generate(
    model: GPT2,
    tokens: Tensor,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int,
    autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Iterator[Tensor]:
    """Continue each row of `tokens` by max_tokens tokens; each item holds the next token of every row.

    tokens: (B, T) int64, T at least 1, on any device; beyond n_ctx only the last n_ctx tokens count. Items:
    (B,) int64 on the CPU. temperature: 0 takes the likeliest token. top_k, top_p: see probabilities().
    autocast: entered around each forward pass, as gpt2.training.stages.precision gives it. Random numbers are
    drawn on the CPU, so that a seed gives the same text on every device, up to rounding of the logits.

    Once all n_ctx positions are used, the last half of the text is read again as a new beginning: from then
    on a token depends on the n_ctx / 2 to n_ctx tokens before it.

    Raises ValueError where an argument is invalid, or the model has diverged.
    """
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError("there is no token to continue; begin with <|endoftext|> where there is no prompt")
    for token in (int(tokens.min()), int(tokens.max())):
        if not 0 <= token < model.config.vocab_size:
            raise ValueError(f"token {token} is beyond the model's vocabulary of {model.config.vocab_size}")
    if max_tokens < 0 or not temperature >= 0:
        raise ValueError("max_tokens and temperature must be at least 0")
    if (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError("top_k must be at least 1, and top_p above 0 and at most 1")
    generator = torch.Generator().manual_seed(seed % 2**64)  # generators take 64 bits

    def choose(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(dim=-1)
        shares = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return torch.multinomial(shares, 1, generator=generator).squeeze(1)

    reader = Reader(model, room=tokens.size(1) + max_tokens, autocast=autocast)
    return _continue(reader, tokens[:, -model.config.n_ctx :].cpu(), max_tokens, choose)


def _continue(
    reader: Reader, tokens: Tensor, max_tokens: int, choose: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    n_ctx = reader.model.config.n_ctx
    window = unread = tokens
    for _ in range(max_tokens):
        if reader.length + unread.size(1) > n_ctx:
            reader.length = 0
            unread = window = window[:, -max(1, n_ctx // 2) :]
        logits = reader.read(unread).float().cpu()
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite: it has diverged, and no token can be drawn")
        chosen = choose(logits)
        yield chosen
        unread = chosen[:, None]
        window = torch.cat([window, unread], dim=1)


def probabilities(logits: Tensor, *, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Return the probabilities that tokens are drawn with: the softmax of the filtered logits.

    logits: (B, V). They are divided by the temperature. Then only the top_k largest are kept, with all that
    equal the least of these; then the fewest likeliest tokens whose probabilities sum to at least top_p, at
    least one. Returns (B, V), whose rows sum to 1.
    """
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, COLDEST)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= top_p  # the likelier tokens already reach top_p
        beyond[:, 0] = False  # nor does a top_p that rounds to 0
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), float("-inf"))
    return logits.softmax(dim=-1)


class Reader:
    """A model with a key-value cache, which reads a text incrementally."""

    length = 0
    """Tokens read so far; set it to 0 to begin a new text."""

    def __init__(
        self,
        model: GPT2,
        *,
        room: int,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """Wrap a model; room: the largest number of tokens of one text, at most n_ctx."""
        self.model, self.autocast, self.room = model, autocast, min(room, model.config.n_ctx)
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens and return the logits of the next one, (B, V).

        tokens: (B, T) int64, the first ones of a text, or the single next one. V is GPT2Config.drawable:
        columns that stand for no token are left out.
        """
        assert not self.length or tokens.size(1) == 1
        model, config = self.model, self.model.config
        tokens = tokens.to(model.wte.weight.device)
        with self.autocast(), sdpa_kernel([getattr(SDPBackend, name) for name in KERNELS]):
            positions = torch.arange(self.length, self.length + tokens.size(1), device=tokens.device)
            x = (model.wte(tokens) + model.wpe(positions)).to(getattr(torch, config.residual))
            layers: Any = model.h
            for number, block in enumerate(layers):
                x = x + self._attend(number, block.attn, block.ln_1(x))  # mirrors Block.forward
                x = x + block.mlp(block.ln_2(x))
            self.length += tokens.size(1)
            # The copy holds the rounded weights that autocast would otherwise compute anew for each token.
            copy = model.head_copy if config.tied_gradient == "rows" else None
            logits = model._scores(model.ln_f(x[:, -1:]), model.wte.weight if copy is None else copy)
        return logits[:, 0, : config.drawable]

    def _attend(self, number: int, layer: Attention, x: Tensor) -> Tensor:
        """Do what Attention.forward does, with earlier tokens' keys and values cached: (B, T, d) each."""
        B, T, d = x.shape
        q, k, v = (t.view(B, T, layer.n_head, -1).transpose(1, 2) for t in layer.c_attn(x).split(d, dim=-1))
        if not self.length:
            empty = k.new_empty(2, B, layer.n_head, self.room, d // layer.n_head)
            self._kept[number:] = [(empty[0], empty[1])]
        keys, values = self._kept[number]
        end = self.length + T
        keys[:, :, self.length : end], values[:, :, self.length : end] = k, v
        y = scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=T > 1)
        return layer.c_proj(y.transpose(1, 2).reshape(B, T, d))


def stream_text(tokens: Iterator[int]) -> Iterator[str]:
    """Decode tokens to text, yielding each piece once its characters are complete, until <|endoftext|>.

    Invalid UTF-8 becomes U+FFFD. Raises gpt2.files.cache.DataError where the vocabulary is not available.
    """
    vocabulary = gpt2_encoding()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == vocabulary.eot_token:
            break
        if text := decoder.decode(vocabulary.decode_single_token_bytes(token)):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest

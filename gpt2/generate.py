"""Text from a GPT-2, token by token, with the keys and values of earlier tokens kept.

text = stream_text(int(token) for (token,) in generate(model, prompt, max_tokens=100, seed=42))

Only the layers' own parts are called, eagerly: a model that is compiled for training is neither compiled anew for the
shapes met here nor changed in any way, so it can be sampled from between two of its steps.
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

from gpt2.model import GPT2, Attention
from gpt2.text import gpt2_encoding
from gpt2.tokenizer_files import END_OF_TEXT

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""Of attention: any, for the one that training is bound to may not take a single query."""

COLDEST = 1e-30
"""The least temperature that float32 can divide by; already far below it only the likeliest token is left."""


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
    """Continue each row of `tokens` by max_tokens tokens; each item is the next token of every row.

    tokens: (B, T) int64, T at least 1, on any device; of more than n_ctx the last n_ctx count. Items: (B,) int64, on
    the CPU. temperature: 0 takes the likeliest token. top_k, top_p: see probabilities(). autocast: entered around each
    forward pass, as gpt2.stages.precision gives it. Chance is drawn on the CPU, so that a seed gives the same text on
    every device, as far as their rounding agrees.
    Once all n_ctx positions are taken, the last half of the text is read again as a new beginning: from then on a
    token follows from the n_ctx / 2 to n_ctx tokens before it.
    Raises ValueError where an argument makes no sense, or the model has diverged.
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
    generator = torch.Generator().manual_seed(seed % 2**64)  # more than that no generator takes

    def choose(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(dim=-1)
        shares = probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return torch.multinomial(shares, 1, generator=generator).squeeze(1)

    reader = Reader(model, room=tokens.size(1) + max_tokens, autocast=autocast)
    return _continue(reader, tokens[:, -model.config.n_ctx :].cpu(), max_tokens, choose)


def _continue(reader: Reader, tokens: Tensor, max_tokens: int, choose: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
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
    """What tokens are drawn with: the softmax of what is left of the logits.

    logits: (B, V). They are divided by the temperature; then the top_k largest are left, and all equal to the least
    of these; then the fewest of the likeliest that together have a probability of at least top_p, one at the least.
    Returns (B, V), rows that add up to 1.
    """
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, COLDEST)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(dim=-1)
        beyond = shares.cumsum(dim=-1) - shares >= top_p  # the likelier ones together are enough
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), float("-inf"))
    return logits.softmax(dim=-1)


class Reader:
    """A model that reads a text bit by bit, and keeps each layer's keys and values of what it has read."""

    length = 0
    """Tokens read so far; who sets it back to 0 begins a new text."""

    def __init__(
        self,
        model: GPT2,
        *,
        room: int,
        autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """room: the most tokens that one text will have; n_ctx is enough for any."""
        self.model, self.autocast, self.room = model, autocast, min(room, model.config.n_ctx)
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """tokens: (B, T) int64, a text's first ones or the one that follows. Returns the next one's logits, (B, V).

        V is GPT2Config.drawable: columns of rows that are no token are left out.
        """
        assert not self.length or tokens.size(1) == 1
        model, config = self.model, self.model.config
        tokens = tokens.to(model.wte.weight.device)
        with self.autocast(), sdpa_kernel(KERNELS):
            positions = torch.arange(self.length, self.length + tokens.size(1), device=tokens.device)
            x = (model.wte(tokens) + model.wpe(positions)).to(getattr(torch, config.residual))
            layers: Any = model.h
            for number, block in enumerate(layers):
                x = x + self._attend(number, block.attn, block.ln_1(x))  # as Block.forward has it
                x = x + block.mlp(block.ln_2(x))
            self.length += tokens.size(1)
            # The copy's numbers are those that autocast would round once more for each token.
            copy = model.head_copy if config.tied_gradient == "rows" else None
            logits = model._scores(model.ln_f(x[:, -1:]), model.wte.weight if copy is None else copy)
        return logits[:, 0, : config.drawable]

    def _attend(self, number: int, layer: Attention, x: Tensor) -> Tensor:
        """As Attention.forward, with the keys and values of the tokens before."""
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
    """GPT-2's text of the tokens, each piece as soon as its characters are complete, up to <|endoftext|>.

    What is no UTF-8 comes as U+FFFD. Raises gpt2.cache.DataError where the vocabulary cannot be had.
    """
    vocabulary = gpt2_encoding()
    end = vocabulary.encode_single_token(END_OF_TEXT)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        if token == end:
            break
        if text := decoder.decode(vocabulary.decode_single_token_bytes(token)):
            yield text
    if rest := decoder.decode(b"", final=True):
        yield rest

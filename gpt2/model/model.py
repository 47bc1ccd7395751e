"""GPT-2 as published: pre-norm blocks, learned positions, tanh-GELU, biases, tied lm_head.

Parameters are named as in transformers' GPT2Model; linear weights have torch's (out, in) layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as SDPA
from torch.utils.checkpoint import checkpoint

from gpt2.config.workload import GPT2Config
from gpt2.model.attention import BlockAttention, causal_blocks, flex_causal
from gpt2.model.autograd import CrossEntropy, SigmoidGelu, TiedEmbedding, chunked_cross_entropy
from gpt2.model.bias_gradients import BiasedGelu, BiasedSplit
from gpt2.model.brgemm import BrgemmAttention
from gpt2.model.fused_loss import FusedCrossEntropy
from gpt2.model.kernel_libraries import cut_cross_entropy, flash4_attention, int8_multiplication, layer_norm
from gpt2.model.tuned_linear import onednn_linear, tuned_linear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def causal_attention(q: Tensor, k: Tensor, v: Tensor, future: Tensor) -> Tensor:
    """Attend to earlier positions only, materialising the full score matrix.

    q, k, v: (B, n_head, T, head_dim); future: (n_ctx, n_ctx) bool, True above the diagonal.
    Returns the shape of q. Memory O(B * n_head * T^2).
    """
    T = q.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(future[:T, :T], float("-inf"))
    return scores.softmax(dim=-1) @ v


def recomputed(function: Callable[..., Tensor], *inputs: Tensor | BlockMask | None) -> Tensor:
    """Return function(*inputs), keeping only the inputs; the backward pass recomputes the rest."""
    # Nothing here is random.
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def multiplication(config: GPT2Config) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the function for linear layers: F.linear, or the one that the config asks for."""
    return {"whole": F.linear, "tuned": tuned_linear, "onednn": onednn_linear}[config.products]


class Linear(nn.Linear):
    """A linear layer whose weight can be replaced in the matmul by a copy in another number format."""

    copy: Tensor | None = None
    bias_gradient_elsewhere = False
    """True where the bias gets its gradient from the function that takes the layer's result."""

    def __init__(self, config: GPT2Config, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.multiply = multiplication(config) if config.int8 == "none" else int8_multiplication()

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer. input: (..., in_features). Returns (..., out_features)."""
        bias = self.bias.detach() if self.bias_gradient_elsewhere else self.bias
        return self.multiply(input, self.weight if self.copy is None else self.copy, bias)


class LayerNorm(nn.LayerNorm):
    """A LayerNorm that computes in float32, whatever the dtype of the residual stream.

    Compiled code does so in any case.
    """

    def __init__(self, width: int, kernel: str = "torch") -> None:
        super().__init__(width, eps=1e-5)
        self.kernel = None if kernel == "torch" else layer_norm(kernel)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension.

        input: (..., d), any dtype. Returns the same shape in float32, by another kernel than torch's in
        input's dtype.
        """
        if self.kernel is not None:
            return self.kernel(input, self.weight, self.bias, self.eps)
        # torch's CPU kernel sums the parameters' gradients over all tokens in the input's number format.
        return super().forward(input.float())


def by_heads(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a function of q, k, v, each (B, n_head, T, head_dim), to the signature of ATTENTION."""

    def attend(qkv: Tensor | tuple[Tensor, Tensor, Tensor], *mask: Tensor | BlockMask) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (qkv.unbind(2) if isinstance(qkv, Tensor) else qkv))
        return function(q, k, v, *mask).transpose(1, 2)

    return attend


ATTENTION: dict[str, Callable[..., Tensor]] = {
    "explicit": by_heads(causal_attention),
    "sdpa": by_heads(partial(SDPA, is_causal=True)),
    "blocks": by_heads(BlockAttention.apply),
    "brgemm": BrgemmAttention.apply,
    "flash4": flash4_attention,
    "flex": by_heads(flex_causal),
}
"""Attention functions by name.

They take packed q, k, v (B, T, 3, n_head, head_dim) and a mask where needed, and return (B, T, n_head,
head_dim). Those of by_heads() and flash4 also take a tuple of q, k and v, each (B, T, n_head, head_dim).
"""


class Attention(nn.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = Linear(config, config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config, config.n_embd, config.n_embd)
        self.sums_bias = self.c_attn.bias_gradient_elsewhere = config.bias_gradient == "triton"
        self.attend = ATTENTION[config.attention]

    def forward(self, x: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Attend to earlier positions. x: (B, T, d); mask: what the attention needs, or None."""
        B, T, d = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, -1)
        if self.sums_bias:
            qkv = BiasedSplit.apply(qkv, self.c_attn.bias)
        y = self.attend(qkv) if mask is None else self.attend(qkv, mask)
        return self.c_proj(y.reshape(B, T, d))


class MLP(nn.Module):
    """Two linear layers with the tanh approximation of GELU between them."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Linear(config, config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(config, 4 * config.n_embd, config.n_embd)
        self.sums_bias = self.c_fc.bias_gradient_elsewhere = config.bias_gradient == "triton"
        self.recompute_gelu = config.recompute == "gelu"
        self.gelu = SigmoidGelu.apply if config.gelu == "sigmoid" else partial(F.gelu, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to each position. x: (B, T, d). Returns the same shape."""
        wide = self.c_fc(x)
        # The projection keeps GELU's result for its own gradient, so it is part of the recomputed function;
        # torch stops recomputing once it has the projection's input, before the matmul.
        return recomputed(self.project, wide) if self.recompute_gelu else self.project(wide)

    def project(self, wide: Tensor) -> Tensor:
        """Apply GELU and the output projection. wide: (B, T, 4 d). Returns (B, T, d)."""
        if self.sums_bias:  # asked here, because float8 puts other layers in place of ours
            return self.c_proj(BiasedGelu.apply(wide, self.c_fc.bias))
        return self.c_proj(self.gelu(wide))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm)
        self.attn = Attention(config)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
        """Apply the layer. x: (B, T, d); mask: as for Attention. Returns (B, T, d)."""
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


def _embedding(rows: int, columns: int) -> nn.Embedding:
    """Return an embedding that is not filled: on the meta device, filling imports torch's compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


class GPT2(nn.Module):
    """The language model: forward() returns the loss, logits() the scores. Make one with build()."""

    future: Tensor | None
    blocks: BlockMask | None = None
    """Mask for FlexAttention; None with other attentions."""
    pad_bias: Tensor | None
    head_copy: Tensor | None = None
    """Copy of the embedding in another number format, used by the lm_head."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = _embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = _embedding(config.n_ctx, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm)
        self.cut_loss = cut_cross_entropy() if config.cross_entropy == "cut" else None
        # One mask for all layers, and one bias that masks the padding rows' logits; None where not needed.
        explicit, padded = config.attention == "explicit", config.padded_vocab_size > config.vocab_size
        future = torch.empty(config.n_ctx, config.n_ctx, dtype=torch.bool) if explicit else None
        self.register_buffer("future", future, persistent=False)
        pad_bias = torch.empty(config.padded_vocab_size) if padded else None
        self.register_buffer("pad_bias", pad_bias, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats, a float32 scalar. tokens, targets: (B, T) int64."""
        x, head = self.embed(tokens)
        return self.loss(self.layers(x), head, targets)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits, (B, T, padded_vocab_size), padding columns -inf. tokens: (B, T) int64."""
        x, head = self.embed(tokens)
        return self._scores(self.ln_f(self.layers(x)), head)

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's input, (B, T, d), and the lm_head's weight, (padded_vocab_size, d).

        tokens: (B, T) int64.
        """
        if self.config.tied_gradient == "scatter":
            rows, head = self.wte(tokens), self.wte.weight
        else:
            rows, head = TiedEmbedding.apply(self.wte.weight, self.head_copy, tokens)
        x = rows + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        return x.to(getattr(torch, self.config.residual)), head

    def layers(self, x: Tensor) -> Tensor:
        """Apply all transformer blocks. x: (B, T, d). Returns the same shape."""
        mask = self.future if self.blocks is None else self.blocks
        for block in self.h:
            recompute = self.config.recompute == "block"
            x = recomputed(block, x, mask) if recompute else block(x, mask)
        return x

    def loss(self, x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, as forward() does, from the last layer's output.

        x: (B, T, d); head: (padded_vocab_size, d); targets: (B, T) int64.
        """
        x = self.ln_f(x)
        if self.config.cross_entropy == "linear":
            return chunked_cross_entropy(x.flatten(0, 1), head, targets.flatten(), self.pad_bias)
        if self.cut_loss is not None:
            return self.cut_loss(x.flatten(0, 1), head[: self.config.vocab_size], targets.flatten())
        if self.config.cross_entropy in ("triton", "liger", "quack"):
            kernel = self.config.cross_entropy
            return FusedCrossEntropy.apply(x.flatten(0, 1), head, self.pad_bias, targets.flatten(), kernel)
        logits = self._scores(x, head).flatten(0, 1)
        if self.config.cross_entropy == "closed_form":
            return CrossEntropy.apply(logits, targets.flatten())
        return F.cross_entropy(logits.float(), targets.flatten())

    def _scores(self, x: Tensor, head: Tensor) -> Tensor:
        # As a bias, the padding mask is applied within the matmul. A logit of -inf has probability and
        # gradient 0: loss, gradients and the padding rows, zero from the start, are the unpadded model's.
        return multiplication(self.config)(x, head, self.pad_bias)

    def keep_copies(self, dtype: torch.dtype) -> dict[Tensor, Tensor]:
        """Use copies of the weight matrices in `dtype` for all matmuls from now on; returns them.

        Whoever changes a matrix must update its copy. A copy receives the gradient of its matrix, except the
        embedding's copy, whose gradient goes to the embedding itself.
        """
        copies = {}
        for module in self.modules():
            if isinstance(module, Linear):
                copies[module.weight] = module.copy = module.weight.detach().to(dtype).requires_grad_()
        copies[self.wte.weight] = self.head_copy = self.wte.weight.detach().to(dtype)
        return copies

    def narrow(self, dtype: torch.dtype) -> None:
        """Round the weight matrices to `dtype` in place; biases and LayerNorms keep their dtype."""
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.data = parameter.data.to(dtype)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the weights in place, as GPT-2 initialises them.

        Each parameter is drawn on the CPU in its logical shape by a generator of its own, so that it depends
        on (seed, name) alone: not on device, padding, dtype or the order of construction.
        """
        for name, parameter in self.named_parameters():
            parameter.copy_(self._initial(name, parameter.shape, seed))

    @torch.no_grad()
    def fill_masks(self) -> None:
        """Fill the buffers, which are neither parameters nor part of a checkpoint."""
        if self.future is not None:
            self.future.copy_(torch.ones(self.future.shape, dtype=torch.bool).triu(1))
        if self.config.attention == "flex":
            self.blocks = causal_blocks(self.config.n_ctx, self.wte.weight.device)
        if self.pad_bias is not None:
            self.pad_bias.zero_()[self.config.vocab_size :] = float("-inf")

    def _initial(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        value = torch.zeros(shape)
        if name.endswith("bias"):
            return value
        if "ln_" in name:
            return value.fill_(1.0)
        std = 0.02
        if name.endswith("c_proj.weight"):  # keeps the residual stream's variance independent of depth
            std /= math.sqrt(2 * self.config.n_layer)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        rows = self.config.vocab_size if name == "wte.weight" else shape[0]
        value[:rows].normal_(0.0, std, generator=generator)
        return value


def shapes(config: GPT2Config) -> dict[str, torch.Size]:
    """Return the shapes of all parameters by name, in the model's order; padding rows included."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in GPT2(config).named_parameters()}


def build(config: GPT2Config, seed: int | None, device: torch.device) -> GPT2:
    """Make a GPT-2 on `device` with the weights of `seed`, initialising nothing twice.

    seed None: leave the weights uninitialised, for a caller that overwrites them.
    """
    with torch.device("meta"):
        model = GPT2(config)
    model.to_empty(device=device)
    model.fill_masks()
    if seed is not None:
        model.initialise(seed)
    return model

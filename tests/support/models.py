"""The same weights in this model and in transformers', the oracle."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from gpt2.model.model import GPT2


def random_weights(model: GPT2) -> None:
    """Weights with which every part of the model matters: biases and LayerNorms too."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def to_transformers(model: GPT2) -> transformers.GPT2LMHeadModel:
    """The same weights in transformers' model, whose Conv1D layers keep them as (in, out)."""
    c = model.config
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.n_ctx,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    theirs = transformers.GPT2LMHeadModel(config)
    state = {f"transformer.{name}": from_conv1d(name, p.detach()) for name, p in model.named_parameters()}
    theirs.load_state_dict({**state, "lm_head.weight": model.wte.weight.detach()})
    return theirs


def from_conv1d(name: str, value: Tensor) -> Tensor:
    """Between the two layouts, either way."""
    linear = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return value.T if linear else value

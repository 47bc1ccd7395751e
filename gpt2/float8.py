"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

from dataclasses import replace

from torch import nn


def to_float8(model: nn.Module, scaling: str, *, emulate: bool = False) -> None:
    """Have the linear layers of `model` multiply in float8, forward and backward; their weights stay as they are.

    scaling: tensorwise or rowwise, what shares a scale. The lm_head, which is no module of its own, keeps its format.
    emulate: round to float8 and multiply in the wider format, for devices without such units. Needs torchao.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate))

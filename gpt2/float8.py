"""float8 linear layers by torchao."""

from __future__ import annotations

from dataclasses import replace

from torch import nn


def to_float8(model: nn.Module, scaling: str, *, emulate: bool = False) -> None:
    """Replace the model's linear layers by torchao's, which multiply in float8 forward and backward.

    The weights keep their format, and so does the lm_head, which is not a module. scaling: tensorwise or rowwise, the
    granularity of a scale. emulate: round to float8 and multiply in the wider format, for devices without float8
    units. Raises ImportError without torchao.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate))

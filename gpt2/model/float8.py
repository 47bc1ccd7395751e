"""Linear layers in 8-bit formats by torchao."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from gpt2.model.autograd import product_dtype


def to_float8(model: nn.Module, scaling: str, *, emulate: bool = False) -> None:
    """Replace the model's linear layers by torchao's, which multiply in float8 forward and backward.

    The weights keep their format, and so does the lm_head, which is not a module. scaling: tensorwise or
    rowwise, the granularity of a scale. emulate: round to float8 and multiply in the wider format, for
    devices without float8 units. Raises ImportError without torchao.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=emulate)
    convert_to_float8_training(model, config=config)


def int8_multiplication() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function for linear layers whose three matmuls, forward and backward, are of 8-bit integers.

    It takes x (..., in), weight (out, in), bias (out,) or None, and returns (..., out) in autocast's dtype.
    Each row of the first factor and each column of the second has a scale of its own, found as it is rounded.
    Raises ImportError without torchao.
    """
    from torchao.prototype.quantized_training import int8_mixed_precision

    # The module and the tensor subclass that torchao has for it would change the parameters' types.
    function = int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction
    config = int8_mixed_precision.Int8MixedPrecisionTrainingConfig()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = product_dtype(x)
        return function.apply(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), config)

    return multiply

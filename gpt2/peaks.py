"""Datasheet peaks: the denominator of MFU. Imports no torch.

Dense products only: the figures that datasheets mark "with sparsity" are twice what a dense product can reach.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Peak:
    """Peak bfloat16 matrix-product rate of one chip, dense, accumulating in float32."""

    chip: str
    pattern: str
    """Regular expression searched for in the name that the device gives itself."""
    bfloat16: float
    """FLOP/s."""
    source: str


# Most specific first: the first pattern that matches wins. One line a chip.
PEAKS = (
    Peak(chip="B200", pattern=r"\bB200\b", bfloat16=2250e12, source="NVIDIA HGX B200 datasheet, half of sparse"),
    Peak(chip="GH200", pattern=r"\bGH200\b", bfloat16=989.4e12, source="NVIDIA GH200 datasheet, half of sparse"),
    Peak(chip="H200 NVL", pattern=r"\bH200 NVL\b", bfloat16=835.5e12, source="NVIDIA H200 datasheet, half of sparse"),
    Peak(chip="H200 SXM", pattern=r"\bH200\b", bfloat16=989.4e12, source="NVIDIA H200 datasheet, half of sparse"),
    Peak(chip="H100 NVL", pattern=r"\bH100 NVL\b", bfloat16=835.5e12, source="NVIDIA H100 datasheet, half of sparse"),
    Peak(chip="H100 PCIe", pattern=r"\bH100 PCIe\b", bfloat16=756e12, source="NVIDIA H100 whitepaper"),
    Peak(chip="H100 SXM", pattern=r"\bH100 (SXM|80GB HBM3)", bfloat16=989.4e12, source="NVIDIA H100 whitepaper"),
    Peak(chip="A100", pattern=r"\bA100\b", bfloat16=312e12, source="NVIDIA A100 datasheet, dense"),
    Peak(chip="L40S", pattern=r"\bL40S\b", bfloat16=362.05e12, source="NVIDIA L40S datasheet, dense"),
    Peak(chip="L4", pattern=r"\bL4\b", bfloat16=121e12, source="NVIDIA L4 datasheet, half of sparse"),
    Peak(chip="A10", pattern=r"\bA10\b", bfloat16=125e12, source="NVIDIA A10 datasheet, dense"),
    Peak(chip="RTX 4090", pattern=r"\bRTX 4090\b(?! Laptop| D)", bfloat16=165.2e12, source="NVIDIA Ada whitepaper"),
    Peak(chip="RTX 3090", pattern=r"\bRTX 3090\b(?! Ti)", bfloat16=71e12, source="NVIDIA GA102 whitepaper, dense"),
)  # fmt: skip


def lookup(device_name: str) -> Peak | None:
    """The peak of the chip that calls itself `device_name`, or None: an unknown chip has no MFU."""
    if re.search(r"\bMIG\b", device_name):  # a slice of the chip
        return None
    return next((peak for peak in PEAKS if re.search(peak.pattern, device_name)), None)

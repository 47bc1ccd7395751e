"""Datasheet figures of chips: peak matmul rates and memory size. Imports no torch.

Rates are for dense matmuls; datasheet figures "with sparsity" are twice as high. A figure is for one device
as torch or torch_xla counts devices. A figure that the maker does not publish is None, never a guess.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak FLOP/s of one device by the number format of a matmul's inputs, with float32 accumulation.

    A rate is None where the chip has no units for that format or its maker publishes no figure; `note` says
    which. Where one name covers variants of different speed, rates are those of the fastest, as `source`
    says.
    """

    name: str
    pattern: str
    """Regular expression for the name that the device reports; empty for a chip that no name leads to."""
    bfloat16: float | None
    float16: float | None
    tf32: float | None
    float32: float | None
    memory_bytes: int | None
    """Marketed size with 1 GB = 2**30 bytes; None where one name covers several sizes."""
    source: str
    note: str = ""
    device: str = "cuda"
    """Value of the toggle `device` by which it trains."""
    derived: bool = False
    """Whether the rates are arithmetic and no datasheet's."""

    def peak(self, number_format: str) -> float | None:
        """Return FLOP/s in float32, tf32, bfloat16 or float16, or None. Raises KeyError for others."""
        if number_format not in ("float32", "tf32", "bfloat16", "float16"):
            raise KeyError(number_format)
        return getattr(self, number_format)

    def lacks(self, number_format: str) -> bool:
        """Return whether the chip is known to have no units for this format.

        A chip with a float16 rate is taken to list all the formats that it has units for.
        """
        return self.float16 is not None and self.peak(number_format) is None


def _chip(
    name: str,
    name_ends_in: str,
    bfloat16: float | None,
    float16: float | None,
    tf32: float | None,
    float32: float | None,
    gigabytes: int | None,
    source: str,
    note: str = "",
    device: str = "cuda",
) -> Chip:
    """Build a Chip from a datasheet's units: TFLOP/s and GB.

    The pattern matches up to the end of the device's name, because a suffix makes it another device: a MIG
    slice ("MIG 1g.10gb"), a virtual GPU ("-24C"), "Laptop GPU", "Ti", "D", "SUPER".
    """

    def flops(tera: float | None) -> float | None:
        return None if tera is None else float(round(tera * 1e12))

    return Chip(
        name=name,
        pattern=rf"\b(?:{name_ends_in})$",
        bfloat16=flops(bfloat16),
        float16=flops(float16),
        tf32=flops(tf32),
        float32=flops(float32),
        memory_bytes=None if gigabytes is None else gigabytes * 2**30,
        source=source,
        note=note,
        device=device,
    )


VOLTA = "NVIDIA V100 datasheet"
AMPERE = "NVIDIA A100 80GB datasheet, dense"
AMPERE_40 = "NVIDIA A100 datasheet of 2020, dense"
H100 = "NVIDIA H100 whitepaper, dense; memory: datasheet"
H100_NVL = "NVIDIA H100 NVL datasheet, half of sparse"
H200 = "NVIDIA H200 datasheet, half of sparse"
GH200 = "NVIDIA GH200 datasheet, half of sparse"
B200 = "NVIDIA HGX B200 datasheet, one GPU of eight, half of sparse; memory: DGX B200 datasheet"
GA102 = "NVIDIA GA102 whitepaper, dense, FP32 accumulation"
ADA = "NVIDIA Ada whitepaper, dense, FP32 accumulation"
RTX_50 = "NVIDIA RTX Blackwell whitepaper, dense, FP32 accumulation"
MI250X = "AMD Instinct MI250X datasheet, half of the module"
MI300X = "AMD Instinct MI300X datasheet, dense"
TPU = "Google Cloud TPU documentation"
TPU_HALF = f"{TPU}, half of the chip"
TURING = "NVIDIA T4 datasheet; memory: Turing whitepaper"
APPLE = "Apple's announcement of"
M1_2020, M1_2021 = f"{APPLE} November 2020", f"{APPLE} October 2021"
TENSOR_16 = "no bfloat16 or TF32 units"
TPU_ONLY = "its matrix units take bfloat16 only"
TPU_CORE = f"{TPU_ONLY}; torch_xla counts each of the chip's two cores as a device"
SPX = "of the undivided GPU: a partition (DPX, CPX) goes by the same name and reaches a fraction"
METAL = "Apple publishes no rate of matrix products; the chip's CPU goes by the same name as its GPU"
SHADERS = f"{METAL}; float32: teraflops of the GPU, whose format Apple leaves unsaid"
LATER = (
    *("M1 Ultra", "M2", "M2 Pro", "M2 Max", "M2 Ultra"),
    *("M3", "M3 Pro", "M3 Max", "M3 Ultra", "M4", "M4 Pro", "M4 Max"),
)
"""Apple's chips of which no rate is published."""

CHIPS = (
    # name, end of the reported name, TFLOP/s in bfloat16, float16, TF32, float32, GB, source, note
    _chip("V100 SXM2 16 GB", "V100-SXM2-16GB", None, 125, None, 15.7, 16, VOLTA, TENSOR_16),
    _chip("V100 SXM2 32 GB", "V100-SXM2-32GB", None, 125, None, 15.7, 32, VOLTA, TENSOR_16),
    _chip("V100 PCIe 16 GB", "V100-PCIE-16GB", None, 112, None, 14, 16, VOLTA, TENSOR_16),
    _chip("V100 PCIe 32 GB", "V100-PCIE-32GB", None, 112, None, 14, 32, VOLTA, TENSOR_16),
    _chip("V100S PCIe", "V100S-PCIE-32GB", None, 130, None, 16.4, 32, VOLTA, TENSOR_16),
    _chip("T4", "T4", None, 65, None, 8.1, 16, TURING, TENSOR_16),
    _chip("A10", "A10", 125, 125, 62.5, 31.2, 24, "NVIDIA A10 datasheet, dense"),
    _chip("A100 SXM 40 GB", "A100-SXM4?-40GB", 312, 312, 156, 19.5, 40, AMPERE_40),
    _chip("A100 SXM 80 GB", "A100-SXM4?-80GB", 312, 312, 156, 19.5, 80, AMPERE),
    _chip("A100 PCIe 40 GB", "A100-PCIE-40GB", 312, 312, 156, 19.5, 40, AMPERE_40),
    _chip("A100 PCIe 80 GB", "A100 80GB PCIe|A100-PCIE-80GB", 312, 312, 156, 19.5, 80, AMPERE),
    _chip("L4", "L4", 121, 121, 60, 30.3, 24, "NVIDIA L4 datasheet, half of sparse"),
    _chip("L40S", "L40S", 362.05, 362.05, 183, 91.6, 48, "NVIDIA L40S datasheet, dense"),
    _chip("H100 SXM", "H100 80GB HBM3", 989.4, 989.4, 494.7, 66.9, 80, H100),
    _chip("H100 PCIe", "H100 PCIe", 756, 756, 378, 51.2, 80, H100),
    _chip("H100 NVL", "H100 NVL", 835.5, 835.5, 417.5, 60, 94, H100_NVL),
    _chip("H200 SXM", "H200", 989.5, 989.5, 494.5, 67, 141, H200),
    _chip("H200 NVL", "H200 NVL", 835.5, 835.5, 417.5, 60, 141, H200),
    # The 120 or 480 GB in these names is the CPU's memory.
    _chip("GH200 96 GB", "GH200 (120|480)GB", 989.5, 989.5, 494.5, 67, 96, GH200),
    _chip("GH200 144 GB", "GH200 144G HBM3e", 989.5, 989.5, 494.5, 67, 144, GH200),
    _chip("B200", "B200", 2250, 2250, 1125, 75, 180, B200),
    # Consumer cards halve the float16 rate with float32 accumulation, which training uses.
    _chip("RTX 3090", "RTX 3090", 71, 71, 35.6, 35.6, 24, GA102),
    _chip("RTX 4090", "RTX 4090", 165.2, 165.2, 82.6, 82.6, 24, ADA),
    _chip("RTX 5090", "RTX 5090", 209.5, 209.5, 104.8, 104.8, 32, RTX_50),
    _chip("MI250X, one of two dies", "MI250X", 191.5, 191.5, None, 47.85, 64, MI250X,
          "no TF32 units; torch counts each of the module's two dies as a device"),
    _chip("MI300X", "MI300X( OAM| VF)?", 1307.4, 1307.4, 653.7, 163.4, 192, MI300X, SPX),
    _chip("TPU v2, one of two cores", "TPU v2", 22.5, None, None, None, 8, TPU_HALF, TPU_CORE, "xla"),
    _chip("TPU v3, one of two cores", "TPU v3", 61.5, None, None, None, 16, TPU_HALF, TPU_CORE, "xla"),
    _chip("TPU v4", "TPU v4", 275, None, None, None, 32, TPU, TPU_ONLY, "xla"),
    _chip("TPU v5e", "TPU v5( lite|e)", 197, None, None, None, 16, TPU, TPU_ONLY, "xla"),
    _chip("TPU v5p", "TPU v5p?", 459, None, None, None, 95, TPU, TPU_ONLY, "xla"),
    _chip("TPU v6e", "TPU v6( lite|e)", 918, None, None, None, 32, TPU, TPU_ONLY, "xla"),
    _chip("M1", "Apple M1", None, None, None, 2.6, None, f"{M1_2020}: 8 GPU cores", SHADERS, "mps"),
    _chip("M1 Pro", "Apple M1 Pro", None, None, None, 5.2, None, f"{M1_2021}: 16 GPU cores", SHADERS, "mps"),
    _chip("M1 Max", "Apple M1 Max", None, None, None, 10.4, None, f"{M1_2021}: 32 GPU cores", SHADERS, "mps"),
    *(
        _chip(n, f"Apple {n}", None, None, None, None, None, "Apple's announcements", METAL, "mps")
        for n in LATER
    ),
)  # fmt: skip


def lookup(device_name: str) -> Chip | None:
    """Return the chip that reports itself as `device_name`; None for an unknown one, never a similar chip."""
    return next((chip for chip in CHIPS if re.search(chip.pattern, device_name)), None)


def named(name: str) -> Chip:
    """Return the chip of this name, whatever its case and hyphens. Raises ValueError with suggestions."""
    words = re.sub(r"[\s_-]+", " ", name.lower()).strip()
    for chip in CHIPS:
        if chip.name.lower() in (words, name.lower()):
            return chip
    alike = [chip.name for chip in CHIPS if words and words in chip.name.lower()]
    if not alike:
        folded = {chip.name.lower(): chip.name for chip in CHIPS}
        alike = [folded[near] for near in difflib.get_close_matches(words, folded, cutoff=0.7)]
    known = "; ".join(alike or [chip.name for chip in CHIPS])
    raise ValueError(f"no chip is called {name!r}; {'did you mean' if alike else 'known are'}: {known}")


HALVES = {
    ("AuthenticAMD", 23): (range(0x00, 0x30), range(0x50, 0x60)),
    ("AuthenticAMD", 25): (range(0x10, 0x20), range(0x60, 0xB0)),
    ("AuthenticAMD", 26): (range(0x20, 0x30), range(0x60, 0x70)),
    ("GenuineIntel", 6): (range(0x66, 0x67), range(0x7D, 0x7F), range(0x8C, 0x8E), range(0xA7, 0xA8)),
}
"""Cores that take their widest instructions in halves, or on one unit of two: vendor, family and models.

Zen and Zen+ (AVX2 on 128 bits), Zen 4 and Zen 5 in laptops (AVX-512 on 256 bits), and Cannon, Ice, Tiger and
Rocket Lake in clients (AVX-512 on one unit). Models by Linux's arch/x86/kernel/cpu/amd.c and
asm/intel-family.h; widths by AMD's Software Optimization Guides for families 17h, 19h and 1Ah, and by Intel's
Optimization Reference Manual.
"""
GENERATIONS = {
    23: {"Zen": (range(0x00, 0x30), range(0x50, 0x60)), "Zen 2": (range(0x30, 0x50), range(0x60, 0xB0))},
    25: {"Zen 4": (range(0x10, 0x20), range(0x60, 0xB0)), "Zen 3": (range(0x00, 0x10), range(0x20, 0x60))},
    26: {"Zen 5": (range(0x00, 0x30), range(0x40, 0x50), range(0x60, 0x80))},
}
"""AMD's generations of cores by family and models, by Linux's arch/x86/kernel/cpu/amd.c."""


def generation(family: int, model: int) -> str | None:
    """Return what AMD calls the cores of this family and model; None where that is not known."""
    known = GENERATIONS.get(family, {}).items()
    return next((name for name, models in known if any(model in each for each in models)), None)


FULL_BFLOAT16 = {("AuthenticAMD", 25), ("AuthenticAMD", 26)}
"""Cores whose AVX-512 BF16 multiplies as often as float32 does: with two products a lane, at twice its rate.

Of Zen 4 measured on a core of family 25, model 17: VDPBF16PS and VFMADD231PS both run 3.2 times a nanosecond
at 256 bits and 1.6 at 512. Of Zen 5 by AMD's guide, not measured.
"""


SKYLAKE_SERVER = "GenuineIntel", 6, 0x55
ONE_UNIT = re.compile(r"\b(Bronze|Silver|Gold 5[12](?!22\b)\d\d)")
"""Names of Xeons of Skylake and Cascade Lake with one unit of AVX-512, where their siblings have two.

By "# of AVX-512 FMA units" in Intel's specification of each processor: all Bronze and Silver, and of Gold
5100 and 5200 all but 5122 and 5222. Cooper Lake (of the same model; 5300 and up) and later ones have two.
"""


def _kind(identity: Mapping[str, str]) -> tuple[tuple[str, int], bool]:
    """Return vendor and family of a core, and whether it takes its widest instructions in halves."""
    kind = identity.get("vendor", ""), int(identity.get("family", -1))
    model = int(identity.get("model", -1))
    one_unit = (*kind, model) == SKYLAKE_SERVER and bool(ONE_UNIT.search(identity.get("name", "")))
    return kind, one_unit or any(model in models for models in HALVES.get(kind, ()))


def derived_cpu(
    cores: int, mhz: float | None, flags: Collection[str], identity: Mapping[str, str] | None = None
) -> Chip | None:
    """Derive a CPU's peaks as cores x clock x FLOP per cycle and core; None where these are not known.

    `cores` are physical, `mhz` is in MHz, `flags` and `identity` (and in it the CPU's name) are as Linux
    reports them. The units per core are assumed to be a server core's where these do not tell, and the clock
    is assumed to hold under load. The result is therefore shown as derived and never ranked.
    """
    if mhz is None or mhz <= 0 or cores < 1:
        return None
    # A multiply-add on each of 16 or 8 lanes counts as 2 FLOP. asimd and sve give no rate: Arm cores have one
    # to four such units, of a width that the flag does not show.
    kind, halves = _kind(identity or {})
    if "avx512f" in flags and not halves:
        float32, vectors = 2 * 2 * 16, "AVX-512 with two multiply-add units"
    elif "avx512f" in flags and kind[0] == "GenuineIntel":
        float32, vectors = 2 * 16, "AVX-512 with one multiply-add unit"
    elif "avx512f" in flags:
        float32, vectors = 2 * 16, "AVX-512 on two multiply-add units of 256 bits"
    elif "avx2" in flags and halves and kind == ("AuthenticAMD", 23):
        float32, vectors = 2 * 2 * 4, "AVX2 on two multiply-add units of 128 bits"
    elif "avx2" in flags:
        float32, vectors = 2 * 2 * 8, "AVX2 with two multiply-add units"
    else:
        return None
    bfloat16, tiles, lacking = None, "", ""
    if "amx_tile" in flags and "amx_bf16" in flags:
        bfloat16, tiles = 2 * 16 * 16 * 32 // 16, "AMX"  # a matmul of 16 x 32 and 32 x 16 every 16 cycles
    elif kind in FULL_BFLOAT16 and "avx512_bf16" in flags:
        bfloat16, tiles = 2 * float32, "AVX-512 BF16 on the same units"
    elif "avx512_bf16" in flags:  # two multiply-adds per lane, yet half as fast as float32 on an Intel CPU
        lacking = "bfloat16: not derived, no flag tells how fast AVX-512 BF16 is; "
    else:
        lacking = "no bfloat16 units; "
    speed = f"{cores} cores x {mhz / 1e3:.3g} GHz"
    cycles = cores * mhz * 1e6
    formats = f"{bfloat16} FLOP/cycle in bfloat16 ({tiles}), " if bfloat16 else ""
    unknown = "float16: not derived, its vector units sum in float16; memory: not told by flags"
    return Chip(
        name=f"CPU, {speed}",
        pattern="",
        bfloat16=cycles * bfloat16 if bfloat16 else None,
        float16=None,
        tf32=None,
        float32=cycles * float32,
        memory_bytes=None,
        device="cpu",
        derived=True,
        source=f"derived: {speed} x {formats}{float32} FLOP/cycle in float32 ({vectors})",
        note=f"{lacking}no TF32 units; {unknown}",
    )

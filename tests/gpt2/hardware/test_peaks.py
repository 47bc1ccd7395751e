import re

import pytest

from gpt2.hardware import peaks

RATES = ("bfloat16", "float16", "tf32", "float32")
NAMES = {  # as torch.cuda.get_device_name, torch_xla's xla_device_kind and sysctl give them
    "Tesla V100-SXM2-16GB": "V100 SXM2 16 GB",
    "Tesla V100-SXM2-32GB": "V100 SXM2 32 GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe 16 GB",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32 GB",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
    "Tesla T4": "T4",
    "NVIDIA A10": "A10",
    "NVIDIA A100-SXM4-40GB": "A100 SXM 40 GB",
    "A100-SXM4-40GB": "A100 SXM 40 GB",
    "NVIDIA A100-SXM4-80GB": "A100 SXM 80 GB",
    "A100-SXM-80GB": "A100 SXM 80 GB",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40 GB",
    "NVIDIA A100 80GB PCIe": "A100 PCIe 80 GB",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 120GB": "GH200 96 GB",
    "NVIDIA GH200 480GB": "GH200 96 GB",
    "NVIDIA GH200 144G HBM3e": "GH200 144 GB",
    "NVIDIA B200": "B200",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "AMD Instinct MI250X": "MI250X, one of two dies",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300X OAM": "MI300X",
    "AMD Instinct MI300X VF": "MI300X",
    "TPU v2": "TPU v2, one of two cores",
    "TPU v3": "TPU v3, one of two cores",
    "TPU v4": "TPU v4",
    "TPU v5 lite": "TPU v5e",
    "TPU v5e": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v5p": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU v6e": "TPU v6e",
    **{f"Apple {chip}": chip for chip in ("M1", "M1 Pro", "M1 Max", "M1 Ultra", "M2", "M2 Pro", "M2 Max")},
    **{f"Apple {chip}": chip for chip in ("M2 Ultra", "M3", "M3 Pro", "M3 Max", "M3 Ultra", "M4")},
    **{f"Apple {chip}": chip for chip in ("M4 Pro", "M4 Max")},
}
by_name = pytest.mark.parametrize("chip", peaks.CHIPS, ids=lambda chip: chip.name)


def found(name: str) -> peaks.Chip:
    chip = peaks.lookup(name)
    assert chip is not None
    return chip


@pytest.mark.parametrize("name", NAMES)
def test_a_chip_is_found_by_the_name_it_gives_itself(name: str) -> None:
    assert found(name).name == NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_to_two_chips(name: str) -> None:
    assert sum(bool(re.search(chip.pattern, name)) for chip in peaks.CHIPS) == 1


def test_every_chip_is_found_by_some_real_name() -> None:
    assert {chip.name for chip in peaks.CHIPS} == set(NAMES.values())


NVIDIA = ["A10G", "A10-24Q", "A100-SXM4-40GB MIG 1g.5gb", "A100 MIG 1g.5gb", "A100-SXM-64GB", "A100X"]
NVIDIA += ["A800-SXM4-80GB", "B300 SXM6 AC", "GB200", "GeForce RTX 3090 Ti", "GeForce RTX 4080 SUPER"]
NVIDIA += ["GeForce RTX 4090 D", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 5090 D", "GeForce RTX 5090 D v2"]
NVIDIA += ["GeForce RTX 5090 Laptop GPU", "H100", "H100 80GB HBM2e", "H100 80GB HBM3 MIG 1g.10gb"]
NVIDIA += ["H100L-94C", "H20", "H200 MIG 1g.18gb", "H800", "L4-24C", "L40", "T4G"]
OTHERS = ["GRID T4-16Q", "Tesla V100-FHHL-16GB", "Tesla V100-SXM3-32GB", "AMD Instinct MI250"]
OTHERS += ["AMD Instinct MI300A", "AMD Instinct MI300X HF", "AMD Instinct MI325X", "Apple M1 (Virtual)"]
OTHERS += ["Apple M5", "TPU v4 lite", "TPU v5 lite pod", "TPU v6", "TPU7x", "Intel", ""]


@pytest.mark.parametrize("name", [*(f"NVIDIA {name}" for name in NVIDIA), *OTHERS])
def test_an_unknown_chip_has_no_peak_rather_than_another_chip_s(name: str) -> None:
    assert peaks.lookup(name) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
        ("AMD Instinct MI300X", 1307.4),
        ("TPU v5 lite", 197),
    ],
)
def test_rates_are_those_without_sparsity(name: str, tflops: float) -> None:
    assert found(name).bfloat16 == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(("name", "tflops"), [("RTX 3090", 71), ("RTX 4090", 165.2), ("RTX 5090", 209.5)])
def test_rates_of_consumer_cards_are_those_with_sums_in_float32(name: str, tflops: float) -> None:
    assert found(f"NVIDIA GeForce {name}").float16 == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(("name", "tflops"), [("AMD Instinct MI250X", 383), ("TPU v2", 45), ("TPU v3", 123)])
def test_what_torch_counts_as_two_devices_has_half_the_peak_each(name: str, tflops: float) -> None:
    chip = found(name)
    assert chip.bfloat16 == pytest.approx(tflops * 1e12 / 2)
    assert "two" in chip.name
    assert "half" in chip.source


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "Tesla T4"])
def test_a_chip_older_than_ampere_has_a_float16_peak_but_none_in_bfloat16_or_tf32(name: str) -> None:
    chip = found(name)
    assert chip.float16
    assert chip.bfloat16 is None
    assert chip.tf32 is None


def test_memory_in_a_grace_hopper_s_name_is_not_taken_for_the_gpu_s() -> None:
    assert found("NVIDIA GH200 480GB").memory_bytes == 96 * 2**30


def test_a_peak_is_told_by_the_name_of_its_number_format() -> None:
    chip = found("NVIDIA A100-SXM4-40GB")
    assert [chip.peak(rate) for rate in RATES] == [312e12, 312e12, 156e12, 19.5e12]


def test_a_number_format_that_does_not_exist_is_no_absent_peak() -> None:
    with pytest.raises(KeyError):
        found("NVIDIA L4").peak("float8")


@by_name
def test_every_chip_has_a_source(chip: peaks.Chip) -> None:
    assert chip.source


@by_name
def test_every_chip_with_an_absent_rate_says_why(chip: peaks.Chip) -> None:
    assert chip.note or None not in [chip.peak(rate) for rate in RATES]


@by_name
def test_narrower_formats_are_no_slower(chip: peaks.Chip) -> None:
    known = [rate for rate in (chip.bfloat16, chip.tf32, chip.float32) if rate is not None]
    assert known == sorted(known, reverse=True)


@by_name
def test_bfloat16_and_float16_share_their_units_where_a_chip_has_both(chip: peaks.Chip) -> None:
    assert chip.bfloat16 == chip.float16 or None in (chip.bfloat16, chip.float16)


@by_name
def test_bfloat16_is_at_most_about_twice_tf32(chip: peaks.Chip) -> None:
    if chip.bfloat16 and chip.tf32:
        assert chip.bfloat16 / chip.tf32 == pytest.approx(2, rel=0.02)


@by_name
def test_figures_are_of_the_magnitude_of_their_units(chip: peaks.Chip) -> None:
    rates = [rate for rate in map(chip.peak, RATES) if rate is not None]
    assert all(1e12 < rate < 1e16 for rate in rates)
    assert chip.memory_bytes is None or 2**33 <= chip.memory_bytes < 2**38


def test_a_cpu_s_peak_is_cores_times_clock_times_flop_per_cycle() -> None:
    cpu = peaks.derived_cpu(
        2, 2600.0, ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"]
    )
    assert cpu is not None
    assert cpu.bfloat16 == pytest.approx(2 * 2.6e9 * 1024)
    assert cpu.float32 == pytest.approx(2 * 2.6e9 * 64)


@pytest.mark.parametrize(
    ("flags", "bfloat16", "float32"),
    [
        (["avx2"], None, 32),
        (["avx2", "avx512f"], None, 64),
        (["avx2", "avx512f", "avx512_bf16"], None, 64),
        (["avx2", "avx512f", "amx_tile"], None, 64),
        (["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"], 1024, 64),
    ],
)
def test_a_cpu_s_flop_per_cycle_are_those_of_its_widest_units(
    flags: list[str], bfloat16: int | None, float32: int
) -> None:
    cpu = peaks.derived_cpu(1, 1000.0, flags)
    assert cpu is not None
    assert cpu.bfloat16 == (bfloat16 and bfloat16 * 1e9)
    assert cpu.float32 == float32 * 1e9


@pytest.mark.parametrize(
    ("cores", "mhz", "flags"),
    [
        (8, None, ["avx2"]),
        (8, 0.0, ["avx2"]),
        (0, 3000.0, ["avx2"]),
        (8, 3000.0, []),
        (8, 3000.0, ["asimd", "sve", "bf16", "i8mm"]),
    ],
)
def test_a_cpu_of_unknown_clock_or_units_has_no_peak(cores: int, mhz: float | None, flags: list[str]) -> None:
    assert peaks.derived_cpu(cores, mhz, flags) is None


AVX2 = ["avx2"]
AVX512 = ["avx2", "avx512f", "avx512_bf16"]


def amd(family: int, model: int, vendor: str = "AuthenticAMD") -> dict[str, str]:
    return {"vendor": vendor, "family": str(family), "model": str(model), "stepping": "1"}


@pytest.mark.parametrize(
    ("identity", "flags", "bfloat16", "float32"),
    [
        (amd(23, 0x01), AVX2, None, 16),  # Naples
        (amd(23, 0x08), AVX2, None, 16),  # Zen+
        (amd(23, 0x18), AVX2, None, 16),
        (amd(23, 0x2F), AVX2, None, 16),
        (amd(23, 0x30), AVX2, None, 32),  # Zen 2: Rome
        (amd(23, 0x71), AVX2, None, 32),
        (amd(25, 0x01), AVX2, None, 32),  # Zen 3: Milan
        (amd(25, 0x50), AVX2, None, 32),
        (amd(25, 0x11), AVX512, 64, 32),  # Zen 4: Genoa
        (amd(25, 0x61), AVX512, 64, 32),
        (amd(25, 0x75), AVX512, 64, 32),
        (amd(25, 0xA0), AVX512, 64, 32),  # Bergamo
        (amd(25, 0x11), ["avx2", "avx512f"], None, 32),  # as a virtual machine may hide it
        (amd(25, 0x11), AVX2, None, 32),
        (amd(26, 0x02), AVX512, 128, 64),  # Zen 5: Turin
        (amd(26, 0x44), AVX512, 128, 64),  # on the desk
        (amd(26, 0x24), AVX512, 64, 32),  # in a laptop
        (amd(6, 0x7E, "GenuineIntel"), AVX512, None, 32),  # Ice Lake in a laptop
        (amd(6, 0xA7, "GenuineIntel"), AVX512, None, 32),  # Rocket Lake
        (amd(6, 0x8F, "GenuineIntel"), AVX512, None, 64),
        (amd(25, 0x11, "GenuineIntel"), AVX512, None, 64),
        ({"vendor": "AuthenticAMD"}, AVX512, None, 64),
        ({}, AVX2, None, 32),
    ],
)
def test_a_cpu_whose_units_are_half_as_wide_as_its_instructions_has_half_the_flop_per_cycle(
    identity: dict[str, str], flags: list[str], bfloat16: int | None, float32: int
) -> None:
    cpu = peaks.derived_cpu(2, 1000.0, flags, identity)
    assert cpu is not None
    assert (cpu.bfloat16, cpu.float32) == (bfloat16 and bfloat16 * 2e9, float32 * 2e9)
    assert f"{float32} FLOP/cycle in float32" in cpu.source
    assert ("bfloat16" in cpu.note) == (bfloat16 is None)


@pytest.mark.parametrize(
    ("model", "name", "float32"),
    [
        (0x55, "Intel(R) Xeon(R) Silver 4114 CPU @ 2.20GHz", 32),
        (0x55, "Intel(R) Xeon(R) Bronze 3206R CPU @ 1.90GHz", 32),
        (0x55, "Intel(R) Xeon(R) Gold 5218 CPU @ 2.30GHz", 32),
        (0x55, "Intel(R) Xeon(R) Gold 5220R CPU @ 2.20GHz", 32),
        (0x55, "Intel(R) Xeon(R) Gold 5222 CPU @ 3.80GHz", 64),
        (0x55, "Intel(R) Xeon(R) Gold 5318H CPU @ 2.50GHz", 64),
        (0x55, "Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", 64),
        (0x55, "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", 64),
        (0x6A, "Intel(R) Xeon(R) Silver 4310 CPU @ 2.10GHz", 64),
    ],
)
def test_xeons_with_one_unit_of_avx_512_are_known_by_their_names(model: int, name: str, float32: int) -> None:
    identity = {**amd(6, model, "GenuineIntel"), "name": name}
    cpu = peaks.derived_cpu(1, 1000.0, ["avx2", "avx512f"], identity)
    assert cpu is not None
    assert cpu.float32 == float32 * 1e9


def test_a_derived_peak_of_zen_4_says_on_what_units() -> None:
    cpu = peaks.derived_cpu(2, 2596.0, AVX512, amd(25, 17))
    assert cpu is not None
    assert cpu.source == (
        "derived: 2 cores x 2.6 GHz x 64 FLOP/cycle in bfloat16 (AVX-512 BF16 on the same units), "
        "32 FLOP/cycle in float32 (AVX-512 on two multiply-add units of 256 bits)"
    )


def test_a_derived_peak_states_what_it_assumes() -> None:
    cpu = peaks.derived_cpu(2, 2599.998, ["avx2", "avx512f", "amx_tile", "amx_bf16"])
    assert cpu is not None
    assert cpu.source == (
        "derived: 2 cores x 2.6 GHz x 1024 FLOP/cycle in bfloat16 (AMX), "
        "64 FLOP/cycle in float32 (AVX-512 with two multiply-add units)"
    )


def test_a_derived_peak_says_why_a_rate_is_absent() -> None:
    cpu = peaks.derived_cpu(4, 3000.0, ["avx2"])
    assert cpu is not None
    for rate in ("no bfloat16 units", "TF32", "float16"):
        assert rate in cpu.note
    slow = peaks.derived_cpu(4, 3000.0, ["avx2", "avx512f", "avx512_bf16"])
    assert slow is not None
    assert "bfloat16: not derived, no flag tells how fast AVX-512 BF16 is" in slow.note

import pytest

from gpt2 import peaks


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362.05),
    ],
)
def test_a_chip_is_found_by_the_name_it_gives_itself(name: str, tflops: float) -> None:
    peak = peaks.lookup(name)
    assert peak is not None
    assert peak.bfloat16 == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "Tesla T4",
        "Intel",
        "",
    ],
)
def test_an_unknown_chip_has_no_peak_rather_than_another_chip_s(name: str) -> None:
    assert peaks.lookup(name) is None


def test_every_peak_has_a_source() -> None:
    assert all(peak.source for peak in peaks.PEAKS)

"""The measured clock of a core, held to chains of another instruction."""

import platform
import sys

import pytest

from gpt2.hardware import clock
from gpt2.hardware.clock import ADD, MULTIPLY, measured_mhz


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the chains are x86 code for Linux"
)
def test_two_instructions_of_unlike_latency_tell_one_clock() -> None:
    by_add, by_multiply = measured_mhz(ADD), measured_mhz(MULTIPLY)
    assert by_add is not None
    assert by_add == pytest.approx(by_multiply, rel=0.1)
    assert 500 < by_add < 8000


def test_on_another_processor_no_clock_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.platform, "machine", lambda: "aarch64")
    assert measured_mhz() is None


def test_where_data_may_not_be_run_no_clock_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(clock.mmap, "mmap", refuse)
    assert measured_mhz() is None

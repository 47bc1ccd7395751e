"""Intel's GPUs, of which there is none here: torch.xpu is a fake with the interface that torch documents."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device import Xpu, find


@pytest.fixture
def fake_xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two of them, as far as torch can tell; what it says of memory a test may set."""
    told = SimpleNamespace(allocated=700, reserved=2000, waits=0)
    about = SimpleNamespace(total_memory=16 << 30, driver_version="1.6.0")

    def wait(device: object) -> None:
        told.waits += 1

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": lambda index: None,
        "synchronize": wait,
        "max_memory_allocated": lambda device: told.allocated,
        "max_memory_reserved": lambda device: told.reserved,
        "reset_peak_memory_stats": lambda device: setattr(told, "allocated", 0),
        "get_device_name": lambda device: "Intel(R) Arc(TM) A770 Graphics",
        "get_device_properties": lambda device: about,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.xpu, name, fake)
    return told


def test_without_an_intel_gpu_the_device_is_unsupported_and_says_what_to_do() -> None:
    with pytest.raises(
        UnsupportedToggle, match=r"device: xpu: torch finds no Intel GPU here; choose cpu, or"
    ):
        find(Toggles(device="xpu"))


def test_its_peak_memory_is_that_of_the_window_and_of_the_run(fake_xpu: SimpleNamespace) -> None:
    device = Xpu()
    device.reset_peak_memory()
    fake_xpu.allocated = 500
    peak = device.peak_memory()
    assert (peak.bytes, peak.run_bytes, peak.reserved_bytes) == (500, 700, 2000)
    assert peak.method == "allocated, window (torch.xpu)"


def test_it_is_waited_for_by_its_own_call(fake_xpu: SimpleNamespace) -> None:
    Xpu().synchronize()
    assert fake_xpu.waits == 1


def test_it_is_known_by_its_name_memory_number_and_driver(fake_xpu: SimpleNamespace) -> None:
    device = Xpu()
    assert (device.chip(), device.memory_bytes(), device.count()) == (
        "Intel(R) Arc(TM) A770 Graphics",
        16 << 30,
        2,
    )
    assert device.versions() == {"driver": "1.6.0"}
    assert device.peaks() is None  # none is published in a form that is known here


def test_more_ranks_than_gpus_are_refused(fake_xpu: SimpleNamespace) -> None:
    with pytest.raises(UnsupportedToggle, match=r"world_size: 3: more ranks than the 2 Intel GPU\(s\) here"):
        find(Toggles(device="xpu", world_size=3))


def test_ranks_on_other_machines_need_no_gpu_here(
    fake_xpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find(Toggles(device="xpu", world_size=4)).refuses("world_size", Toggles(world_size=4)) is None


@pytest.mark.parametrize(
    "changes", [{"attention": "flash"}, {"launch": "graph"}, {"allocator": "jemalloc"}, {"float8": "rowwise"}]
)
def test_what_is_written_for_other_devices_is_refused(changes: dict, fake_xpu: SimpleNamespace) -> None:
    with pytest.raises(UnsupportedToggle):
        find(Toggles(device="xpu", **changes))


def test_the_driver_s_words_for_no_memory_are_known(fake_xpu: SimpleNamespace) -> None:
    assert Xpu().is_out_of_memory(
        RuntimeError("level_zero backend failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY")
    )
    assert not Xpu().is_out_of_memory(RuntimeError("something else"))

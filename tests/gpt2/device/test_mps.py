"""Apple's GPUs, of which there is none here: torch.mps is a fake that counts what it is asked."""

from dataclasses import replace

import pytest
import torch

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.workload import Workload
from gpt2.device import Cpu, Mps


@pytest.fixture
def fake_mps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Mac as far as torch can tell; the list is what its memory counter will say, in order."""
    allocated: list[int] = []
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.current_allocated_memory", lambda: allocated.pop(0))
    monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: 2000)
    return allocated


def test_memory_of_an_apple_gpu_is_the_largest_seen_after_a_forward_pass_and_says_so(
    fake_mps: list[int],
) -> None:
    device = Mps()
    fake_mps[:] = [900, 300, 500, 400]
    device.sample_memory()
    device.reset_peak_memory()
    for _ in range(3):
        device.sample_memory()
    peak = device.peak_memory()
    assert (peak.bytes, peak.run_bytes, peak.reserved_bytes) == (500, 900, 2000)
    assert "sampled" in peak.method


def test_an_apple_gpu_s_out_of_memory_is_known_by_its_text(fake_mps: list[int]) -> None:
    device = Mps()
    assert device.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17.89 GB)"))
    assert not device.is_out_of_memory(RuntimeError("MPS backend said something else"))


def test_an_apple_gpu_s_queue_has_no_moments(fake_mps: list[int]) -> None:
    assert Mps().mark() is None


def test_several_ranks_on_an_apple_gpu_are_refused(fake_mps: list[int]) -> None:
    from gpt2.device import find

    with pytest.raises(UnsupportedToggle, match="world_size: 2: a Mac has one GPU"):
        find(Toggles(device="mps", world_size=2))


def test_an_apple_gpu_that_refuses_one_huge_tensor_is_out_of_memory_too(fake_mps: list[int]) -> None:
    assert Mps().is_out_of_memory(RuntimeError("Invalid buffer size: 24.00 GiB"))


def test_an_apple_gpu_is_waited_for_by_its_own_call(
    fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[None] = []
    monkeypatch.setattr("torch.mps.synchronize", lambda: waits.append(None))
    device = Mps()
    assert waits == []
    device.synchronize()
    assert len(waits) == 1


@pytest.mark.usefixtures("process_settings")
def test_a_training_step_looks_at_an_apple_gpu_s_memory_once_a_micro_batch(fake_mps: list[int]) -> None:
    from gpt2.data.batches import Batches, open_corpus
    from gpt2.training.train import micro_batches, train

    toggles = Toggles(grad_accum_steps=3)
    device = Mps()
    device.torch_device = torch.device("cpu")  # all else is that of an Apple GPU
    batches = Batches(open_corpus("synthetic", vocab_size=509), seq_len=8, tokens_per_step=24, seed=0)
    training = train(Workload(model="tiny", seq_len=8), toggles, device, micro_batches(batches, toggles))
    fake_mps[:] = [100, 700, 300, 200, 400, 600]
    next(training)
    assert fake_mps == [200, 400, 600]
    device.reset_peak_memory()
    next(training)
    assert (device.peak_memory().bytes, device.peak_memory().run_bytes) == (600, 700)


@pytest.mark.parametrize("autocast", ["float16", "bfloat16"])
def test_autocast_on_an_apple_gpu_is_its_own_and_only_float16_is_scaled(
    autocast: str, fake_mps: list[int]
) -> None:
    from gpt2.training.stages import precision

    enter, scaler = precision(replace(Toggles(device="mps"), autocast=autocast), Mps())
    with enter():
        assert torch.is_autocast_enabled("mps")
        assert torch.get_autocast_dtype("mps") == getattr(torch, autocast)
    assert scaler.is_enabled() == (autocast == "float16")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"autocast": "bfloat16"}, "needs macOS 14 or later; choose float16"),
        ({"matmul_precision": "high"}, "TF32 exists on CUDA only"),
        ({"attention": "flash"}, "no such kernel on this device; choose sdpa"),
        ({"compile": "reduce-overhead"}, "CUDA graphs exist on CUDA only; choose default"),
        ({"compile": "max-autotune-no-cudagraphs"}, "torch tunes nothing on this device; choose default"),
        ({"sharding": "fsdp2"}, "no such sharding on this device; choose none"),
        ({"threads": 2}, "leave it at default"),
        ({"autocast": "float16", "adamw": "fused"}, "updates even where float16 overflowed; choose foreach"),
        ({"clip": "in_step", "adamw": "fused"}, "this device's AdamW scales no gradients; choose separate"),
    ],
)
def test_an_apple_gpu_refuses_what_it_cannot_do(
    changes: dict, remedy: str, fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    monkeypatch.setattr(
        "torch.backends.mps.is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3)
    )
    with pytest.raises(UnsupportedToggle, match=remedy):
        find(Toggles(device="mps", **changes))


def test_an_apple_gpu_takes_every_optimisation_of_one_device(
    fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: True)
    toggles = Toggles(device="mps", attention="sdpa", compile="default", vocab_multiple=64, recompute="block")
    for autocast, adamw in (("float16", "foreach"), ("bfloat16", "foreach"), ("bfloat16", "fused")):
        changes = {"autocast": autocast, "adamw": adamw, "grad_accum_steps": 2}
        assert find(replace(toggles, **changes)).kind == "mps"


def test_other_devices_take_their_batches_as_they_come(fake_mps: list[int]) -> None:
    batches = [(torch.tensor([1]), torch.tensor([2]))]
    for device in (Cpu(), Mps()):
        assert next(device.feed(batches)) is batches[0]

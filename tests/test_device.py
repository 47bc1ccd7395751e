import mmap
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gpt2.device import DEVICES, Cpu, Cuda, Mps, Xla
from gpt2.parallel import process_group
from gpt2.stages import environment
from gpt2.toggles import Toggles, UnsupportedToggle
from gpt2.workload import Workload

MIB = 2**20


def test_peak_memory_of_a_cpu_is_that_of_the_window_not_of_what_came_before() -> None:
    device = Cpu()
    before = mmap.mmap(-1, 300 * MIB)
    before.write(bytes(300 * MIB))
    before.close()
    device.reset_peak_memory()
    start = device.peak_memory().bytes
    window = mmap.mmap(-1, 100 * MIB)
    window.write(bytes(100 * MIB))
    window.close()
    peak = device.peak_memory()
    if "window" not in peak.method:
        pytest.skip("this system does not let a process reset its peak")
    assert start is not None
    assert peak.bytes is not None
    assert peak.run_bytes is not None
    assert 95 * MIB <= peak.bytes - start < 250 * MIB
    assert peak.run_bytes >= peak.bytes


def test_a_cpu_that_cannot_allocate_says_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert Cpu().is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("shapes differ")])
def test_another_error_is_not_out_of_memory(error: Exception) -> None:
    assert not Cpu().is_out_of_memory(error)


@pytest.mark.parametrize("kind", DEVICES)
def test_every_device_has_all_the_seam_s_methods(kind: str) -> None:
    assert not DEVICES[kind].__abstractmethods__
    assert DEVICES[kind].kind == kind


@pytest.fixture
def fake_mps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A Mac as far as torch can tell; the list is what its memory counter will say, in order."""
    allocated: list[int] = []
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.current_allocated_memory", lambda: allocated.pop(0))
    monkeypatch.setattr("torch.mps.driver_allocated_memory", lambda: 2000)
    return allocated


def test_memory_of_an_apple_gpu_is_the_largest_seen_after_a_forward_pass_and_says_so(fake_mps: list[int]) -> None:
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


def test_several_ranks_on_an_apple_gpu_are_refused(fake_mps: list[int]) -> None:
    from gpt2.device import find

    with pytest.raises(UnsupportedToggle, match="world_size: 2: a Mac has one GPU"):
        find(Toggles(device="mps", world_size=2))


def test_an_apple_gpu_that_refuses_one_huge_tensor_is_out_of_memory_too(fake_mps: list[int]) -> None:
    assert Mps().is_out_of_memory(RuntimeError("Invalid buffer size: 24.00 GiB"))


def test_an_apple_gpu_is_waited_for_by_its_own_call(fake_mps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr("torch.mps.synchronize", lambda: waits.append(None))
    device = Mps()
    assert waits == []
    device.synchronize()
    assert len(waits) == 1


@pytest.mark.usefixtures("process_settings")
def test_a_training_step_looks_at_an_apple_gpu_s_memory_once_a_micro_batch(fake_mps: list[int]) -> None:
    from gpt2.data import Batches, open_corpus
    from gpt2.train import micro_batches, train

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
def test_autocast_on_an_apple_gpu_is_its_own_and_only_float16_is_scaled(autocast: str, fake_mps: list[int]) -> None:
    from gpt2.stages import precision

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
    ],
)
def test_an_apple_gpu_refuses_what_it_cannot_do(
    changes: dict, remedy: str, fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    with pytest.raises(UnsupportedToggle, match=remedy):
        find(Toggles(device="mps", **changes))


def test_an_apple_gpu_takes_every_optimisation_of_one_device(
    fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    monkeypatch.setattr("torch.backends.mps.is_macos_or_newer", lambda major, minor: True)
    for autocast in ("float16", "bfloat16"):
        for adamw in ("foreach", "fused"):
            toggles = Toggles(device="mps", autocast=autocast, attention="sdpa", compile="default", adamw=adamw)
            assert find(replace(toggles, vocab_multiple=64, recompute="block", grad_accum_steps=2)).kind == "mps"


class Counters:
    """torch.cuda's memory counters, as after a run."""

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 300)
        monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 700)
        monkeypatch.setattr("torch.cuda.memory_stats", lambda device: {"num_alloc_retries": 2})
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda device: None)


@pytest.mark.parametrize(("cuda_graphs", "peak"), [(False, 300), (True, 700)])
def test_memory_that_cuda_graphs_hide_is_counted_as_reserved_and_said_so(
    cuda_graphs: bool, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Turing.install(monkeypatch)
    Counters.install(monkeypatch)
    device = Cuda(Toggles(compile="reduce-overhead" if cuda_graphs else "eager"))
    device.reset_peak_memory()
    found = device.peak_memory()
    assert (found.bytes, found.reserved_bytes, found.alloc_retries) == (peak, 700, 0)
    assert found.method.startswith("reserved" if cuda_graphs else "allocated")


def test_a_gpu_s_moments_are_events_of_its_queue_and_an_apple_gpu_has_none(
    fake_mps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None: ...

        def elapsed_time(self, later: object) -> float:
            return 250.0

    Turing.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.Event", Event)
    device = Cuda()
    assert device.seconds_between(device.mark(), device.mark()) == 0.25
    assert Mps().mark() is None


@pytest.mark.parametrize(
    "text",
    ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"],
)
def test_a_gpu_s_out_of_memory_is_known_in_the_driver_s_words_too(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Turing.install(monkeypatch)
    assert Cuda().is_out_of_memory(RuntimeError(text))
    assert not Cuda().is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_gpu_s_batches_are_pinned_ahead_by_a_thread_that_works_on_this_rank_s_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import threading

    Turing.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    device = Cuda(local_rank=1)
    on: dict[int, object] = {}
    pinned_by: list[int] = []

    def pin_memory(tokens: torch.Tensor) -> torch.Tensor:
        assert on[threading.get_ident()] == torch.device("cuda", 1)
        pinned_by.append(threading.get_ident())
        return tokens.clone()

    monkeypatch.setattr("torch.cuda.set_device", lambda index: on.__setitem__(threading.get_ident(), index))
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    batches = [(torch.tensor([n]), torch.tensor([n + 1])) for n in range(3)]
    found = [(x.item(), y.item()) for x, y in device.feed(batches)]
    assert found == [(0, 1), (1, 2), (2, 3)]
    assert len(pinned_by) == 6
    assert threading.get_ident() not in pinned_by


def test_ranks_on_gpus_join_by_nccl_each_bound_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Turing.install(monkeypatch)
    joined: list[tuple] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *given, **named: joined.append((given, named)))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    device = Cuda(local_rank=1)
    with process_group(Toggles(device="cuda", world_size=2), device) as rank:
        assert rank == 1
    assert joined == [(("nccl",), {"device_id": torch.device("cuda", 1)})]
    assert device.ddp_device_ids == [1]


def test_other_devices_take_their_batches_as_they_come(fake_mps: list[int]) -> None:
    batches = [(torch.tensor([1]), torch.tensor([2]))]
    for device in (Cpu(), Mps()):
        assert next(device.feed(batches)) is batches[0]


class Turing:
    """torch.cuda of a T4."""

    @staticmethod
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"autocast": "bfloat16"}, "Tesla T4 has no bfloat16 units .* choose float16"),
        ({"matmul_precision": "high"}, "Tesla T4 has no TF32 units .* choose highest"),
        ({"attention": "flash"}, "choose efficient"),
        ({"world_size": 2}, "more ranks than the 1 CUDA device.* choose at most 1"),
    ],
)
def test_a_t4_refuses_what_it_has_no_units_for(changes: dict, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt2.device import find

    Turing.install(monkeypatch)
    with pytest.raises(UnsupportedToggle, match=remedy):
        find(Toggles(device="cuda", **changes))


def test_ranks_on_other_nodes_take_no_device_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt2.device import find

    Turing.install(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find(Toggles(device="cuda", world_size=2)).count() == 1


def test_ranks_that_were_not_started_are_missed_with_the_command_that_starts_them() -> None:
    with (
        pytest.raises(RuntimeError, match=r"world_size is 2 but 1 process.*--nproc-per-node 2"),
        process_group(Toggles(world_size=2), Cpu()),
    ):
        pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """NVML's energy counters in mJ by UUID; torch sees the second device only, as its first."""
    import pynvml

    Turing.install(monkeypatch)
    counters = {"GPU-aaaa": 1_000_000, "GPU-bbbb": 2_500}
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid="bbbb"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)

    def consumption(handle: str) -> int:
        if handle not in counters:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return counters[handle]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", consumption)
    return counters


def test_energy_is_that_of_the_device_that_torch_uses_in_joules(nvml: dict[str, int]) -> None:
    assert Cuda().energy_joules() == 2.5


def test_energy_of_a_gpu_that_does_not_count_it_is_unknown(nvml: dict[str, int]) -> None:
    del nvml["GPU-bbbb"]
    assert Cuda().energy_joules() is None


def test_energy_of_a_cpu_is_unknown() -> None:
    assert Cpu().energy_joules() is None


def test_a_function_that_torch_gives_up_compiling_counts_as_compilations_that_come_to_an_end() -> None:
    torch.compiler.reset()
    before = Cpu().compilations()
    counts = []

    @torch.compile(backend="eager", dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(1, 8):
            double(torch.ones(size))
            counts.append(Cpu().compilations() - before)
    assert counts[:3] == [1, 2, 3]
    assert counts[3:] == [3, 3, 3, 3]


def test_a_graph_break_compiles_no_more_once_warmed_up() -> None:
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    broken(torch.ones(3))
    warm = Cpu().compilations()
    for _ in range(3):
        broken(torch.ones(3))
    assert Cpu().compilations() == warm


def test_ranks_on_one_cpu_do_not_divide_its_derived_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["avx2", "avx512f"]
    alone = Cpu().peaks(flags)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Cpu().peaks(flags) == alone


def test_xla_says_how_to_install_it_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)  # importing it fails then, wherever the tests run
    with pytest.raises(UnsupportedToggle, match=r"torch_xla does not load .*pip install -e '.\[tpu\]'"):
        Xla()


def test_on_xla_one_process_takes_the_sequences_of_all_devices() -> None:
    toggles = Toggles(device="xla", world_size=8, micro_batch_size=4, grad_accum_steps=2)
    assert (toggles.processes, toggles.sequences) == (1, 32)
    assert toggles.tokens_per_step(1) == 64
    on_gpus = Toggles(device="cuda", world_size=8, micro_batch_size=4)
    assert (on_gpus.processes, on_gpus.sequences) == (8, 4)


def test_xlas_cpu_backend_is_told_how_many_devices_to_be() -> None:
    assert environment(Toggles(device="xla", world_size=4))["CPU_NUM_DEVICES"] == "4"
    assert "CPU_NUM_DEVICES" not in environment(Toggles(world_size=4))


def fake_tpu(monkeypatch: pytest.MonkeyPatch, usage: object) -> None:
    """tpu-info as on a host with one TPU v5e chip; `usage` answers for its counters."""
    chip = SimpleNamespace(value=SimpleNamespace(name="v5e"))
    device = SimpleNamespace(get_local_chips=lambda: (chip, 1))
    metrics = SimpleNamespace(get_chip_usage=usage)
    monkeypatch.setitem(sys.modules, "tpu_info", SimpleNamespace(device=device, metrics=metrics))


def test_a_tpus_counters_are_those_of_tpu_info(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SimpleNamespace(device_id=0, memory_usage=3 * MIB, total_memory=16 * MIB, duty_cycle_pct=98.5)
    fake_tpu(monkeypatch, lambda chip: [read])
    found = Xla.use(object.__new__(Xla))
    assert found
    (use,) = found
    assert (use.memory_bytes, use.memory_total_bytes, use.duty_cycle_percent) == (3 * MIB, 16 * MIB, 98.5)


def test_a_tpu_whose_counters_do_not_answer_is_measured_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(chip: object) -> None:
        raise RuntimeError("UNAVAILABLE: failed to connect")

    fake_tpu(monkeypatch, usage)
    assert Xla.use(object.__new__(Xla)) is None


def test_a_tpu_is_found_in_the_table_of_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tpu(monkeypatch, None)
    device = object.__new__(Xla)
    device._on_cpu = False
    assert device.chip() == "TPU v5e"
    chip = device.peaks(())
    assert chip
    assert chip.bfloat16 == 197e12


@pytest.mark.parametrize("value", [2, 4, 16])
def test_a_board_of_tpus_trains_on_one_device_or_on_all(value: int) -> None:
    device = object.__new__(Xla)
    device._on_cpu, device._found = False, 8
    assert device.refuses("world_size", value) == ("a batch is spread over all of the 8 device(s) here; choose 1 or 8")
    assert device.refuses("world_size", 8) is None
    assert device.refuses("world_size", 1) is None


def test_what_a_gpu_is_given_lies_pinned_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps between rows, as inputs and targets cut from one array have, the copy would not be queued."""
    Turing.install(monkeypatch)
    pinned: list[bool] = []
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tokens: pinned.append(tokens.is_contiguous()) or tokens)
    rows = torch.arange(20).view(2, 10)
    (batch,) = Cuda().feed([(rows[:, :-1], rows[:, 1:])])
    assert pinned == [True, True]
    assert batch[1].tolist() == rows[:, 1:].tolist()


def test_a_tpu_that_something_else_holds_is_unsupported_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def device() -> None:
        raise RuntimeError("Unable to initialize backend: /dev/accel0 is in use\nmore")

    def module(**contents: object) -> SimpleNamespace:
        return SimpleNamespace(__path__=[], **contents)

    monkeypatch.setitem(sys.modules, "torch_xla", module(device=device))
    for name in ("_internal", "_internal.tpu", "backends", "core", "core.xla_model", "debug", "debug.metrics"):
        monkeypatch.setitem(sys.modules, f"torch_xla.{name}", module())
    for name in ("distributed", "distributed.spmd"):
        monkeypatch.setitem(sys.modules, f"torch_xla.{name}", module())
    with pytest.raises(UnsupportedToggle, match=r"in use\); end what else holds it"):
        Xla()

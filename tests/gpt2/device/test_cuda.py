"""What a GPU is asked and refuses, where there is none: torch.cuda and NVML are fakes."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainings import FOUR, start

from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device import Cuda
from gpt2.training.distributed import process_group


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


def test_a_cuda_graph_that_is_recorded_again_counts_as_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cudagraph_trees as trees

    Turing.install(monkeypatch)
    device = Cuda()
    before = device.compilations()  # no graph yet, and so no manager
    manager = SimpleNamespace(debug_fail_counter=1)
    monkeypatch.setattr(
        trees, "get_manager", lambda index, create_if_none_exists: manager if index == 0 else None
    )
    first = device.compilations()
    manager.debug_fail_counter += 2
    assert (first - before, device.compilations() - before) == (1, 3)


def test_torch_still_counts_its_cuda_graph_recordings_by_that_name() -> None:
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    assert "debug_fail_counter" in CUDAGraphTreeManager._run.__code__.co_names


def test_a_gpu_gives_back_what_its_allocator_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    Turing.install(monkeypatch)
    given: list[str] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: given.append("all"))
    Cuda().release_memory()
    assert given == ["all"]


@pytest.mark.parametrize(("compile", "times"), [("eager", 0), ("default", 1)])
def test_a_gpu_gives_back_once_after_the_first_step_and_only_what_was_compiled(
    compile: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the loop asks for it; the steps themselves are a CPU's."""
    with monkeypatch.context() as here:
        Turing.install(here)
        device = Cuda()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    given: list[int] = []
    training = start(replace(FOUR, compile=compile))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: given.append(training.number))
    monkeypatch.setattr(training.device, "release_memory", device.release_memory)
    for _ in range(3):
        next(training)
    assert given == [0] * times


def test_a_gpu_s_moments_are_events_of_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    "text",
    ["CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"],
)
def test_a_gpu_s_out_of_memory_is_known_in_the_driver_s_words_too(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("rows", "ahead"), [(1, 64), (1024, 2)])
def test_a_gpu_s_small_micro_batches_are_many_ahead(
    rows: int, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    Turing.install(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tokens: tokens)
    made = threading.Semaphore(0)

    def endless() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = torch.zeros(rows, 1024, dtype=torch.int64)
        while True:
            yield tokens, tokens
            made.release()

    batches = Cuda().feed(endless())
    assert all(made.acquire(timeout=20) for _ in range(ahead))
    assert not made.acquire(timeout=0.2)
    next(batches)


def test_ranks_on_gpus_join_by_nccl_each_bound_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Turing.install(monkeypatch)
    joined: list[tuple] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.distributed.init_process_group", lambda *given, **named: joined.append((given, named))
    )
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.destroy_process_group", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    device = Cuda(local_rank=1)
    with process_group(Toggles(device="cuda", world_size=2), device) as rank:
        assert rank == 1
    assert joined == [(("nccl",), {"device_id": torch.device("cuda", 1)})]
    assert device.ddp_device_ids == [1]


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
        (
            {"attention": "flash4", "autocast": "float16"},
            "older than this kernel .Hopper and later.; choose cudnn",
        ),
        ({"cross_entropy": "cut"}, "older than this kernel .Ampere and later.; choose triton"),
        ({"layer_norm": "quack"}, "older than this kernel .Ampere and later.; choose torch"),
        ({"world_size": 2}, "more ranks than the 1 CUDA device.* choose at most 1"),
    ],
)
def test_a_t4_refuses_what_it_has_no_units_for(
    changes: dict, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    Turing.install(monkeypatch)
    with pytest.raises(UnsupportedToggle, match=remedy):
        find(Toggles(device="cuda", **changes))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [({"cross_entropy": "triton"}, "closed_form"), ({"bias_gradient": "triton"}, "torch")],
)
def test_the_loss_and_biases_by_triton_are_refused_without_triton(
    changes: dict, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpt2.device import find

    Turing.install(monkeypatch)
    monkeypatch.setattr("gpt2.device.cuda.find_spec", lambda name: None)
    with pytest.raises(
        UnsupportedToggle, match=rf"Triton is not here; pip install triton .*, or choose {remedy}"
    ):
        find(Toggles(device="cuda", **changes))


def test_ranks_on_other_nodes_take_no_device_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpt2.device import find

    Turing.install(monkeypatch)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find(Toggles(device="cuda", world_size=2)).count() == 1


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


def test_what_a_gpu_is_given_lies_pinned_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gaps between rows, as inputs and targets cut from one array have, the copy would not be queued."""
    Turing.install(monkeypatch)
    pinned: list[bool] = []
    monkeypatch.setattr("torch.cuda.set_device", lambda index: None)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tokens: pinned.append(tokens.is_contiguous()) or tokens
    )
    rows = torch.arange(20).view(2, 10)
    (batch,) = Cuda().feed([(rows[:, :-1], rows[:, 1:])])
    assert pinned == [True, True]
    assert batch[1].tolist() == rows[:, 1:].tolist()

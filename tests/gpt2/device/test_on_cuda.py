"""What a GPU does, on a GPU: every toggle, CUDA graphs, events, memory, counters, a rung that is too big.

`make test-cuda` runs these tests. Without a GPU they are skipped, or fail where REQUIRE_CUDA=1 is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import pytest
import torch
from _pytest.mark import ParameterSet
from places import ROOT
from trainings import COMPANIONS, FOUR, WORKLOAD, start

from bench.host.environment import describe
from bench.host.telemetry import state
from bench.records.record import Outcome
from gpt2.config import constraints
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE
from gpt2.device import Device
from gpt2.model.model import GPT2
from gpt2.proofs.breakdown import breakdown
from gpt2.proofs.evidence import Finding, StepEvidence
from gpt2.proofs.gradients import gradient_difference
from gpt2.proofs.profiler import profile, record
from gpt2.proofs.prove import prove
from gpt2.training.stages import environment
from gpt2.training.step_graph import EAGER_STEPS
from gpt2.training.train import Training

KIND: Literal["cpu", "cuda"] = "cuda"
"""What is tested; with cpu, many tests run on any machine, to find plain mistakes in them."""
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("process_settings", "own_compile_cache", *(["gpu"] if KIND == "cuda" else [])),
]
NEEDS = COMPANIONS | {
    ("attention", "flex"): {"compile": "default"},
    ("reductions", "apart"): {"compile": "default"},
    ("launch", "graph"): {"compile": "default", "adamw": "fused"},
    **{("attention", kernel): {"autocast": "bfloat16"} for kernel in ("flash", "cudnn", "flash3", "flash4")},
    ("int8", "rowwise"): {"autocast": "bfloat16"},
    ("cross_entropy", "quack"): {"vocab_multiple": 64},
    **{("float8", scaling): {"autocast": "bfloat16"} for scaling in ("tensorwise", "rowwise")},
}
"""What a value of a toggle needs of others on CUDA."""
NO_LEVERS = {"device", "threads", "affinity", "allocator"}
"""Toggles the same in all cases, a CPU's, or set before a process starts; the last has its own test."""


def here(**changes: object) -> Toggles:
    return replace(FOUR, device=KIND, **changes)


def started(toggles: Toggles) -> Training:
    torch.compiler.reset()
    try:
        return start(toggles)
    except UnsupportedToggle as missing:
        pytest.skip(str(missing))


def device() -> Device:
    return started(here()).device


# --- every toggle


def cases() -> Iterator[ParameterSet]:
    """Each value that CUDA supports, with what it needs; its tests share a process and its compilations."""
    hints = get_type_hints(Toggles)
    yield pytest.param(here(), id="baseline", marks=pytest.mark.xdist_group("baseline"))
    for toggle in fields(Toggles):
        named = [value for value in get_args(hints[toggle.name]) if isinstance(value, str | int)]
        for value in named or [2]:
            only = toggle.metadata["only"].get(value)
            if value == toggle.default or toggle.name in NO_LEVERS or (only and KIND not in only.devices):
                continue
            toggles = here(**{toggle.name: value, **NEEDS.get((toggle.name, value), {})})
            marks = [pytest.mark.xdist_group(f"{toggle.name}={value}")]
            if toggle.name in ("world_size", "sharding"):
                marks.append(pytest.mark.skip(reason="several ranks take a process and a GPU each"))
            else:
                # Raises where NEEDS lacks something: only what is missing here may be skipped.
                constraints.check(toggles)
            yield pytest.param(toggles, id=f"{toggle.name}={value}", marks=marks)


every_value = pytest.mark.parametrize("toggles", list(cases()))


@dataclass(frozen=True)
class Trained:
    """Four steps, and what a fifth shows."""

    losses: list[float]
    first_grad_norm: float
    findings: dict[str, Finding]
    graph_launches: int


@cache
def trained(toggles: Toggles, pinned_beside: bool = False) -> Trained:
    training = started(toggles)
    steps = [next(training)]  # compiles; CUDA graphs are recorded from the second step on
    with pinning(training.device) if pinned_beside else nullcontext():
        steps += [next(training) for _ in range(EAGER_STEPS + 2)]
        training.device.synchronize()
    training.replay = False
    ops = profile(lambda: next(training), training.device)
    losses, norm = [step.loss.item() for step in steps], steps[0].grad_norm.item()
    return Trained(losses, norm, prove(training, ops), StepEvidence(training, ops).graph_launches)


@contextmanager
def pinning(device: Device) -> Iterator[None]:
    """Other batches are pinned without a pause by the device's feed, and kept: each takes new memory."""
    ended = threading.Event()

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while not ended.is_set():
            yield torch.zeros(4, 64, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int64)

    with ThreadPoolExecutor(1) as pool:
        pinned = pool.submit(lambda: len(list(device.feed(batches()))))
        try:
            yield
        finally:
            ended.set()
        assert pinned.result() > 0


@every_value
def test_a_value_has_the_losses_of_the_baseline_on_a_cpu(toggles: Toggles) -> None:
    found = trained(toggles)
    expected = trained(replace(FOUR, micro_batch_size=toggles.micro_batch_size * toggles.grad_accum_steps))
    tolerance = LOSS_TOLERANCE[toggles.precision_class()]
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=tolerance.first_loss)
    assert found.losses == pytest.approx(expected.losses, rel=tolerance.losses)
    assert found.first_grad_norm == pytest.approx(expected.first_grad_norm, rel=tolerance.first_grad_norm)


@every_value
def test_a_value_is_proved_to_take_effect_and_the_baseline_of_all_others_too(toggles: Toggles) -> None:
    if toggles.reductions == "apart":
        pytest.skip("torch.compile mixes the sums of large tensors only: this model has none to keep apart")
    assert {name: found for name, found in trained(toggles).findings.items() if not found.took_effect} == {}


# --- CUDA graphs

graphs = pytest.mark.xdist_group("compile=default")  # what graphs are compared with is compiled there anyway


@graphs
def test_cuda_graphs_are_recorded_while_a_thread_pins_batches() -> None:
    found = trained(here(compile="reduce-overhead"), pinned_beside=True)
    assert found.graph_launches >= 2  # of the forward and the backward pass


@graphs
def test_cuda_graphs_that_were_recorded_while_a_thread_pins_batches_have_the_losses_without_graphs() -> None:
    expected = trained(here(compile="default")).losses
    found = trained(here(compile="reduce-overhead"), pinned_beside=True).losses
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE["float32"].losses)


@pytest.mark.parametrize(
    "changes",
    [{}, {"compile": "eager"}, {"grad_accum_steps": 2}, {"clip": "in_step"}],
    ids=lambda each: str(each),
)
def test_a_recorded_step_trains_as_op_by_op_while_the_learning_rate_changes(
    changes: dict[str, object],
) -> None:
    workload = replace(WORKLOAD, lr_warmup_steps=8)
    losses = []
    for launch in ("graph", "ops"):
        torch.compiler.reset()
        training = start(here(**{"compile": "default", "adamw": "fused", **changes}, launch=launch), workload)
        losses.append([next(training).loss.item() for _ in range(8)])
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_TOLERANCE["float32"].losses)


# --- events


def test_marks_around_a_sleeping_kernel_are_apart_and_no_farther_than_the_clock_says() -> None:
    gpu = device()
    gpu.synchronize()
    begun = time.perf_counter()
    first = gpu.mark()
    torch.cuda._sleep(10_000_000)
    second = gpu.mark()
    gpu.synchronize()
    assert 0 < gpu.seconds_between(first, second) <= time.perf_counter() - begun


def test_marks_are_in_the_order_in_which_they_were_made() -> None:
    gpu = device()
    marks = [gpu.mark()]
    for _ in range(3):
        torch.cuda._sleep(1_000_000)
        marks.append(gpu.mark())
    gpu.synchronize()
    since = [gpu.seconds_between(marks[0], mark) for mark in marks]
    assert since == sorted(set(since))


# --- memory


@pytest.mark.parametrize(("allocator", "share"), [("expandable", 1), ("system", 0)])
def test_all_segments_can_grow_where_the_allocator_is_expandable_and_else_none(
    allocator: str, share: int
) -> None:
    program = (
        "import torch; from gpt2.device import Cuda; device = Cuda();"
        "kept = [torch.ones(2**22, device='cuda') for _ in range(4)]; print(*device.segments())"
    )
    # In a process that has it from its start.
    environ = {**os.environ, **environment(here(allocator=allocator))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    can_grow, segments = map(int, done.stdout.split())
    assert segments > 0
    assert can_grow == share * segments


@pytest.mark.parametrize("compile", ["eager", "reduce-overhead"])
def test_the_peak_memory_of_a_step_is_more_than_the_weights_take(compile: str) -> None:
    training = started(here(compile=compile))
    next(training)
    training.device.reset_peak_memory()
    next(training)
    training.device.synchronize()
    peak = training.device.peak_memory().bytes
    assert peak is not None
    assert peak > sum(weight.nbytes for weight in training.model.parameters())


def test_memory_that_nothing_uses_any_more_is_given_back() -> None:
    gpu = device()
    torch.empty(2**28, dtype=torch.uint8, device=gpu.torch_device)  # freed at once
    before = torch.cuda.memory_reserved()
    gpu.release_memory()
    assert torch.cuda.memory_reserved() <= before - 2**28


# --- counters of the driver

nvidia = pytest.mark.skipif(torch.version.hip is not None, reason="NVML is NVIDIA's")


@nvidia
def test_the_energy_used_grows_while_the_gpu_works() -> None:
    gpu = device()
    before = gpu.energy_joules()
    assert before is not None
    tries = iter(range(100))  # the driver counts several times a second
    while (now := gpu.energy_joules()) == before and next(tries, None) is not None:
        torch.cuda._sleep(100_000_000)
        gpu.synchronize()
    assert now is not None
    assert now > before


@nvidia
def test_the_versions_name_the_driver() -> None:
    assert device().versions()["driver"].split(".")[0].isdigit()


@nvidia
def test_each_gpu_tells_its_clocks_power_and_temperature() -> None:
    gpus = state().gpus
    assert len(gpus) == torch.cuda.device_count()
    for each in gpus:
        assert all((each.sm_clock_mhz, each.memory_clock_mhz, each.power_watts, each.temperature_celsius)), (
            each
        )


def test_the_environment_names_the_gpu_and_its_memory() -> None:
    found = describe(device())
    assert (found.chip, found.device_count) == (torch.cuda.get_device_name(), torch.cuda.device_count())
    assert found.device_memory_bytes == torch.cuda.mem_get_info()[1]


# --- gradients, the profiler


def of_gradients(autocast: str) -> float:
    training = started(here(compile="default", micro_batch_size=16, autocast=autocast))
    next(training)
    assert training.micro_batch
    return gradient_difference(training, *training.micro_batch)


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_gradients_of_compiled_code_are_those_of_eager_code(autocast: str) -> None:
    assert 0 < of_gradients(autocast) < GRADIENT_TOLERANCE[autocast]


def test_eager_code_takes_a_batch_of_sixteen_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    forward = GPT2.__call__
    monkeypatch.setattr(GPT2, "__call__", lambda model, x, y: pieces.append(len(x)) or forward(model, x, y))
    of_gradients("float32")
    assert pieces == [16, 16, 8, 8]  # the step, and the gradients as trained and in eager code


def test_a_recorded_step_has_ops_of_the_host_and_kernels_of_the_gpu() -> None:
    training = started(here())
    next(training)
    ops = profile(lambda: next(training), training.device)
    assert "aten::addmm" in {op.name for op in ops if not op.on_device}
    assert any(op.on_device for op in ops)


def test_the_time_of_a_step_is_told_by_its_kernels() -> None:
    training = started(here())
    next(training)
    assert {"products", "optimizer"} <= breakdown(record(lambda: next(training), training.device)).keys()


# --- whole rungs


def measured(ladder: Path, rung: str) -> tuple[int, Outcome]:
    """Exit code and outcome of a worker."""
    out = ladder.with_name("m.json")
    command = [sys.executable, "-m", "bench.worker", str(ladder), rung, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert out.exists(), done.stderr
    return done.returncode, Outcome.model_validate_json(out.read_text(encoding="utf-8"))


def test_a_rung_that_cannot_fit_is_out_of_memory_and_not_a_crash(write_ladder) -> None:
    """Its float32 logits alone are 211 GB; all before them are 30 GB."""
    rungs = f"[{{name: huge, set: {{device: {KIND}, micro_batch_size: 16384}}}}]"
    exit_code, outcome = measured(
        write_ladder(rungs, workload="model: mini, data: synthetic, seq_len: 64"), "huge"
    )
    assert (exit_code, outcome.status) == (1, "out_of_memory")


@pytest.mark.parametrize("compile", ["eager", "default"])
def test_a_rung_is_measured_and_all_its_proofs_hold(compile: str, write_ladder) -> None:
    rungs = f"[{{name: small, set: {{device: {KIND}, compile: {compile}, micro_batch_size: 4}}}}]"
    exit_code, outcome = measured(write_ladder(rungs), "small")
    assert (exit_code, outcome.status) == (0, "ok"), outcome.error
    assert outcome.measurement
    assert outcome.measurement.proofs
    assert [name for name, proof in outcome.measurement.proofs.items() if not proof.took_effect] == []

"""The measured ceiling: rates of what is really done and waited for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT
from runs import Silent

from bench.errors import BenchError
from bench.ladder.ladder import load
from bench.records.machine import Ceiling
from bench.records.record import read
from bench.run import ceiling
from bench.run.ceiling import Timing, measure_ceiling, sustained
from bench.run.command import MOST_TOKENS, ceiling_command
from bench.run.roofline import measure
from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS, GPT2Config
from gpt2.device import Cpu, Device, PeakMemory

SMALL = GPT2Config(n_layer=1, n_head=1, n_embd=16, n_ctx=8, vocab_size=61)


class FakeDevice(Device):
    """Work is queued at once and takes its time when it is waited for, as on a GPU."""

    kind = "cpu"

    def __init__(self, refused: dict[object, str] | None = None) -> None:
        super().__init__()
        self.now = 0.0
        self.refused = refused or {}
        self.queue: list[float] = []
        self.blocks: list[int] = []

    def refuses(self, toggle: str, toggles: Toggles) -> str | None:
        return self.refused.get(getattr(toggles, toggle))

    def synchronize(self) -> None:
        self.now += sum(self.queue)
        self.blocks.append(len(self.queue))
        self.queue = []

    def chip(self) -> str:
        return "fake"

    def reset_peak_memory(self) -> None: ...

    def peak_memory(self) -> PeakMemory:
        return PeakMemory(bytes=None, method="none")


def timed(device: FakeDevice, call_seconds: Iterator[float], seconds: float = 1.0) -> float:
    return sustained(
        lambda: device.queue.append(next(call_seconds)), Timing(device, seconds, lambda: device.now)
    )


def always(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def small(device: Device, **options) -> Ceiling:
    options = {"seconds": 1e-3, "copy_bytes": 2**18, **options}
    return measure_ceiling(device, 8, SMALL, **options)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "PROBE", 64)
    monkeypatch.setattr(ceiling, "SQUARES", (32, 64))


def stand_in(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, **call_seconds: float) -> list[torch.dtype]:
    """Let matmuls take the given time for their dtype, else 1 ms; return the list of dtypes as they come."""
    seen: list[torch.dtype] = []

    def mm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(x.dtype)
        device.queue.append(call_seconds.get(str(x.dtype).removeprefix("torch."), 1e-3))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(ceiling, "_attention", lambda *_: "not timed here")
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: device.queue.append(1e-3))
    monkeypatch.setattr(torch.Tensor, "mul_", lambda *_: device.queue.append(1e-3))
    return seen


def among(monkeypatch: pytest.MonkeyPatch, **call_seconds: float) -> Ceiling:
    """The ceiling where products take the given time for their dtype; see stand_in()."""
    device = FakeDevice()
    stand_in(monkeypatch, device, **call_seconds)
    return small(device, clock=lambda: device.now, seconds=0.1)


def test_queued_work_is_waited_for_before_the_clock_is_read() -> None:
    assert timed(FakeDevice(), always(0.01)) == pytest.approx(0.01)


def test_nobody_waits_within_a_block() -> None:
    device = FakeDevice()
    timed(device, always(0.01))
    assert device.blocks[0] == 1
    assert device.blocks[-1] * 0.01 >= 1.0 / ceiling.BLOCKS


def test_a_rate_is_that_of_all_blocks_and_not_of_the_best() -> None:
    device = FakeDevice()
    heating = [0.25] * 5
    assert timed(device, iter([*heating, 0.25, 0.75, 1.0])) == pytest.approx(0.5)


def test_what_comes_before_the_clocks_settle_is_not_counted() -> None:
    device = FakeDevice()
    first_call, heating = [9.0], [0.5, 0.5]
    assert timed(device, iter([*first_call, *heating, *[0.25] * 4])) == pytest.approx(0.25)


def test_every_format_measured_on_this_cpu_has_positive_finite_rates(quick: None) -> None:
    found = small(Cpu())
    rates = {(m.number_format, m.flops_per_second) for m in found.matmuls}
    assert {"float32", "bfloat16"} <= {number_format for number_format, _ in rates}
    assert all(0 < rate < math.inf for _, rate in rates)
    assert 0 < found.copy_bytes_per_second < math.inf
    assert found.update_bytes_per_second is not None
    assert 0 < found.update_bytes_per_second < math.inf


def test_the_shapes_are_those_of_the_model_with_its_vocabulary_padded(quick: None) -> None:
    shapes = {m.name: (m.m, m.k, m.n) for m in small(Cpu()).matmuls if m.role == "forward"}
    assert shapes == {
        "qkv": (8, 16, 48),
        "attention projection": (8, 16, 16),
        "MLP up": (8, 16, 64),
        "MLP down": (8, 64, 16),
        "lm_head": (8, 16, 64),
    }


@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
def test_the_gradients_products_are_measured_in_the_format_to_train_in_only(
    number_format: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice()
    stand_in(monkeypatch, device, bfloat16=2e-3 if number_format == "float32" else 0.5e-3)
    found = small(device, clock=lambda: device.now, seconds=0.1)
    gradients = [m for m in found.matmuls if m.role not in (None, "forward")]
    assert {m.number_format for m in gradients} == {number_format}
    assert {(m.m, m.k, m.n) for m in gradients if m.name == "qkv"} == {(8, 48, 16), (48, 8, 16)}
    assert len(gradients) == 2 * 5


def test_the_gradients_products_are_those_of_autograd_in_its_layout() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(48, 16, requires_grad=True)
    out = torch.nn.functional.linear(x, w)
    wanted = torch.autograd.grad(out, (x, w), out.detach())
    for role, expected in zip(("input_gradient", "weight_gradient"), wanted, strict=True):
        a, b = ceiling._factors(role, x.detach(), w.detach())
        torch.testing.assert_close(a @ b, expected)
        assert (a @ b).stride() == expected.stride()


def test_attention_is_measured_forward_and_backward_on_the_causal_half(quick: None) -> None:
    found = measure_ceiling(Cpu(), 20, SMALL, seconds=1e-3, copy_bytes=2**18).attention
    assert found is not None
    assert (found.B, found.n_head, found.seq_len, found.head_dim) == (2, 1, 8, 16)
    assert found.flops == 3 * 4 * 16 * 2 * sum(range(1, 8 + 1))
    assert found.flops_per_second == pytest.approx(found.flops / found.training_seconds)
    assert found.kernel == "flash"


def test_attention_that_fails_is_absent_with_its_reason(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    found = small(Cpu())
    assert found.attention is None
    assert found.absent["attention"] == "RuntimeError: no kernel for this device"


def test_attentions_result_is_held_until_a_lazy_device_has_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    held: list[bool] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def attend(*qkv: torch.Tensor, is_causal: bool) -> torch.Tensor:
        q, k, v = qkv
        out = real(q, k, v, is_causal=is_causal)
        made.append(weakref.ref(out))
        return out

    def run(work: Callable[[], object], *_: object) -> float:
        work()
        held.append(made[-1]() is not None)
        return 1.0

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(ceiling, "sustained", run)
    ceiling._attention(8, SMALL, "float32", math.inf, Timing(Cpu(), 1.0, Steady()))
    assert held[0]


def test_a_product_is_the_linear_layers_own(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[bool] = []
    real = torch.mm

    def mm(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        place = out.data_ptr()
        real(x, w, out=out)
        expected.append(out.data_ptr() == place and torch.equal(out, torch.nn.functional.linear(x, w.t())))
        return out

    monkeypatch.setattr(torch, "mm", mm)
    small(Cpu())
    assert expected
    assert all(expected)


def test_a_format_that_the_device_refuses_is_absent_with_its_reason(quick: None) -> None:
    found = small(FakeDevice({"bfloat16": "no such units; choose float16"}), clock=Steady())
    assert "bfloat16" not in {m.number_format for m in found.matmuls}
    assert "no such units" in found.absent["bfloat16"]


def test_tf32_is_absent_where_it_does_not_exist(quick: None) -> None:
    assert "exists on CUDA only" in small(Cpu()).absent["tf32"]


def test_float16_is_left_out_where_it_is_much_slower(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "4 times slower" in among(monkeypatch, float16=5e-3).absent["float16"]


def test_bfloat16_is_measured_even_where_it_is_slow(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "bfloat16" in {m.number_format for m in among(monkeypatch, bfloat16=5e-3).matmuls}


def test_a_product_that_would_take_far_too_long_is_left_out(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = among(monkeypatch, bfloat16=100.0)
    assert {m.name for m in found.matmuls if m.number_format == "bfloat16"} == {"attention projection"}


def test_a_format_without_any_product_quick_enough_is_absent(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert among(monkeypatch, bfloat16=1e6).absent["bfloat16"].endswith("too long here")


def test_squares_grow_with_the_devices_speed_and_with_seconds() -> None:
    def squares(rate: float, seconds: float) -> list[int]:
        shapes = ceiling._shapes(1024, PRESETS["gpt2"], rate, seconds)
        return [m for name, m, _, _ in shapes if name == "square"]

    assert squares(0.33e12, 0.3) == [2048, 4096]
    assert squares(0.33e12, 0.05) == [1024, 2048]
    assert squares(30e12, 0.3) == [8192, 16384]
    assert squares(1.0, 0.3) == [512]


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_the_precision_setting_is_restored(quick: None, before: str) -> None:
    kept = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(before)
        small(Cpu())
        assert torch.get_float32_matmul_precision() == before
    finally:
        torch.set_float32_matmul_precision(kept)


def test_float32_is_measured_exactly_and_tf32_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    look = torch.get_float32_matmul_precision
    monkeypatch.setattr(ceiling, "sustained", lambda *_: seen.append(look()) or 1.0)
    x = torch.ones(2, 2)
    with ceiling._precision_restored(Cpu()):
        for number_format in ("float32", "tf32", "bfloat16"):
            ceiling._rate(x, x, number_format, Timing(Cpu(), 1.0, Steady()))
    assert seen == ["highest", "high", "highest"]


class Steady:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.slow
def test_a_process_of_its_own_leaves_a_record_of_the_ceiling(write_ladder, tmp_path: Path) -> None:
    watcher = Silent()
    path, record, lost = measure(load(write_ladder("[{name: a}]")), None, tmp_path, 0.002, watcher)
    assert not lost
    assert record.status == "ok", record.error
    found = (record.kind, record.ladder, record.rung, record.rung_index)
    assert found == ("ceiling", "roofline", "ceiling", 0)
    assert record.measurement is None
    assert record.ceiling is not None
    assert record.ceiling.threads == record.toggles.resolved["threads"]
    assert set(watcher.phases) <= {"ceiling"}
    assert read(path)[0] == [record]


@pytest.mark.usefixtures("asks_here")
def test_a_device_that_is_not_here_is_refused_and_no_record_kept(write_ladder, tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--device: mps: torch finds no Apple GPU here"):
        measure(load(write_ladder("[{name: a}]")), "mps", tmp_path, 0.002, Silent())
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_tokens_measured_are_those_of_the_largest_micro_batch_of_the_device_within_reason(
    write_ladder,
) -> None:
    def tokens(device: str, *sizes: int) -> str:
        rungs = ", ".join(f"{{name: r{size}, set: {{micro_batch_size: {size}}}}}" for size in sizes)
        ladder = load(write_ladder(f"[{rungs}]", workload="model: gpt2, data: synthetic, seq_len: 1024"))
        command = ceiling_command(ladder, device)
        return command[command.index("--tokens") + 1]

    assert tokens("cpu", 1, 4) == "4096"
    assert tokens("cpu", 1, 64) == str(MOST_TOKENS)
    assert tokens("cuda", 64) == "1024"


def test_the_process_tells_how_far_it_is(quick: None, tmp_path: Path) -> None:
    from bench.process.worker_side import ProgressFile
    from bench.records.record import progress_path

    small(Cpu(), progress=ProgressFile(tmp_path / "m.json"))
    assert '"phase": "ceiling"' in progress_path(tmp_path / "m.json").read_text()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("bench.worker", ["ladders/smoke.yaml", "baseline"]),
        ("bench.external", ["ladders/smoke.yaml", "baseline"]),
        pytest.param(
            "bench.ceiling", ["--device", "cpu", "--tokens", "64", "--model", "tiny"], marks=pytest.mark.slow
        ),
    ],
)
def test_what_takes_no_outcome_is_refused_before_anything_is_measured(
    module: str, words: list[str], tmp_path: Path
) -> None:
    fifo, none = tmp_path / "fifo", tmp_path / "none"
    os.mkfifo(fifo)
    refused = {
        tmp_path: f"{tmp_path} is no file",
        fifo: f"{fifo} is no file",
        none / "m.json": f"{none} is no folder",
    }
    for out, complaint in refused.items():
        command = [sys.executable, "-m", module, *words, "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"argument --out: {complaint}" in done.stderr
    assert fifo.is_fifo()

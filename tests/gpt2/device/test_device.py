import errno
import mmap
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from gpt2.config import devices
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.device import DEVICES, Cpu, DeviceError, Xla
from gpt2.hardware.host import named_by, usable_cores
from gpt2.training.distributed import RanksError, process_group
from gpt2.training.stages import environment

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


def test_each_kind_of_the_table_has_a_class() -> None:
    assert tuple(DEVICES) == tuple(devices.DEVICES) == get_args(devices.DeviceName)


def test_ranks_are_refused_where_they_cannot_meet() -> None:
    alone = ["unshare", "--net"]  # a network of its own, whose loopback is down
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("a network of its own needs Linux and root")
    imports = "from gpt2.device import find; from gpt2.config.toggles import Toggles"
    command = [*alone, sys.executable, "-c", f"{imports}; find(Toggles(world_size=2))"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert "world_size: 2: has processes that meet at 127.0.0.1, which does not answer" in done.stderr


def test_ranks_that_were_not_started_are_missed_with_the_command_that_starts_them() -> None:
    with (
        pytest.raises(RanksError, match=r"world_size is 2 but 1 process.*--nproc-per-node 2"),
        process_group(Toggles(world_size=2), Cpu()),
    ):
        pass


def test_ranks_that_a_limit_on_threads_keeps_from_meeting_are_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(os.strerror(errno.EAGAIN))  # as torch's store does

    monkeypatch.setattr("torch.distributed.init_process_group", refuse)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(RanksError, match="the ranks cannot meet: no process or thread could be started"),
        process_group(Toggles(world_size=2), Cpu()),
    ):
        pass


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC 9R45\nstepping\t: 1\n", "AMD EPYC 9R45"),
        (
            "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n\nmodel\t: 3\n",
            "AMD EPYC (family 26 model 2 stepping 1)",
        ),
        (
            "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R) Processor @ "
            "2.60GHz\nstepping\t: 8\n",
            "Intel(R) Xeon(R) Processor (family 6 model 143 stepping 8) @ 2.60GHz",
        ),
        (
            "BogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n",
            "{arch} (implementer 0x41 part 0xd40)",
        ),
        (
            "cpu family\t: 23\nmodel\t\t: 49\nmodel name\t: AMD EPYC 64-Core Processor\nstepping\t: 0\n",
            "AMD EPYC 64-Core Processor (family 23 model 49 stepping 0)",
        ),
        (
            "\nmodel name\t: ARMv8 Processor rev 0 (v8l)\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n",
            "ARMv8 Processor rev 0 (v8l) (implementer 0x41 part 0xd0c)",
        ),
        ("model name\t: unknown\n", "unknown"),
        ("flags\t\t:\n", None),
    ],
    ids=[
        "by its number",
        "AMD's without",
        "Intel's without",
        "ARM's",
        "cores",
        "ARM's with a name",
        "nothing but a name",
        "nothing",
    ],
)
def test_a_cpu_whose_name_hides_its_model_is_told_by_its_numbers(cpuinfo: str, name: str | None) -> None:
    assert named_by(cpuinfo) == (name and name.format(arch=platform.machine()))


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
    cores = usable_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert usable_cores() == cores


@pytest.mark.parametrize(("toggle", "value"), [("compile", "default"), ("adamw", "compiled")])
def test_without_a_c_compiler_what_torch_compiles_is_refused_and_the_rest_is_not(
    toggle: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "there is no C++ compiler" in str(Cpu().refuses(toggle, replace(Toggles(), **{toggle: value})))
    assert Cpu().refuses("compile", Toggles(compile="eager")) is None
    assert Cpu().refuses("adamw", Toggles(adamw="fused")) is None


def test_without_python_s_headers_what_torch_compiles_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "a" / "b" / name))
    assert "apt-get install python3-dev" in str(Cpu().refuses("compile", Toggles(compile="default")))
    folder = tmp_path / "a" / "b" / "include"
    folder.mkdir(parents=True)
    (folder / "Python.h").touch()
    assert Cpu().refuses("compile", Toggles(compile="default")) is None


def test_a_compiler_named_by_cxx_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setenv("PATH", "/nowhere")
    assert Cpu().refuses("compile", Toggles(compile="default")) is None


def test_where_libraries_are_not_preloaded_other_allocators_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "LD_PRELOAD" in str(Cpu().refuses("allocator", Toggles(allocator="jemalloc")))
    assert Cpu().refuses("allocator", Toggles(allocator="system")) is None


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
    chip = device.peaks()
    assert chip
    assert chip.bfloat16 == 197e12


@pytest.mark.parametrize("value", [2, 4, 16])
def test_a_board_of_tpus_trains_on_one_device_or_on_all(value: int) -> None:
    device = object.__new__(Xla)
    device._on_cpu, device._found = False, 8
    reason = "a batch is spread over all of the 8 device(s) here; choose 1 or 8"
    assert device.refuses("world_size", Toggles(world_size=value)) == reason
    assert device.refuses("world_size", Toggles(world_size=8)) is None
    assert device.refuses("world_size", Toggles(world_size=1)) is None


@pytest.mark.parametrize(
    ("chips", "error", "says"),
    [(4, DeviceError, r"in use\); end what else holds it"), (0, UnsupportedToggle, r"in use\); pip install")],
)
def test_a_tpu_that_something_else_holds_is_an_error_and_one_that_is_not_here_unsupported(
    chips: int, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def device() -> None:
        raise RuntimeError("Unable to initialize backend: /dev/accel0 is in use\nmore")

    def module(**contents: object) -> SimpleNamespace:
        return SimpleNamespace(__path__=[], **contents)

    tpu = module(num_available_chips=lambda: chips)
    monkeypatch.setitem(sys.modules, "torch_xla", module(device=device, _internal=module(tpu=tpu)))
    monkeypatch.setitem(sys.modules, "torch_xla._internal.tpu", tpu)
    for name in ("_internal", "backends", "core", "core.xla_model", "debug", "debug.metrics"):
        monkeypatch.setitem(sys.modules, f"torch_xla.{name}", module())
    for name in ("distributed", "distributed.spmd"):
        monkeypatch.setitem(sys.modules, f"torch_xla.{name}", module())
    with pytest.raises(error, match=says):
        Xla()

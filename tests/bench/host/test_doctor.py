"""What the doctor reads of a machine, and when it warns."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from samples import record
from shown import in_full

from bench.analysis.warnings import disturbances
from bench.cli.machine import doctor_brief
from bench.host import checks, doctor
from bench.host import telemetry as machine
from bench.host.checks import Diagnosis
from bench.records.machine import GpuState, State
from gpt2.hardware import host

GIB = 2**30
QUIET = State(load_average=9.0, cpu_mhz=None, swap_used_bytes=0, memory_available_bytes=8 * GIB)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system without /proc and /sys, on a machine of 4 cores and 16 GiB without any variable set."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * GIB, available=8 * GIB))
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    for name in machine.variables():
        monkeypatch.delenv(name)
    return tmp_path


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def control_groups(root: Path, groups: str, limits: dict[str, str]) -> None:
    """The groups that this process is in, and files of theirs."""
    files(root, {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{n}": text for n, text in limits.items()})


def warn(root: Path, before: State = QUIET, after: State | None = None, **facts: Any) -> list[str]:
    return doctor.warnings(before, after, **{"device": "cpu", "threads": 4, "root": root, **facts})


def gpu_state(**changes: Any) -> GpuState:
    facts = {
        "index": 0,
        "temperature_celsius": 50,
        "sm_clock_mhz": 1900,
        "sm_clock_max_mhz": 1980,
        "power_watts": 600,
        "power_limit_watts": 700,
        "power_limit_default_watts": 700,
        "other_processes": 0,
    }
    return GpuState(**{**facts, **changes})


def with_gpus(*gpus: GpuState) -> State:
    return QUIET.model_copy(update={"gpus": list(gpus)})


# --- reading ------------------------------------------------------------------------------------------------


def test_this_machine_has_a_state() -> None:
    state = machine.state()
    assert state.memory_available_bytes > 0
    assert state.swap_used_bytes is not None
    assert state.swap_used_bytes >= 0


def test_a_system_that_tells_nothing_gives_none_and_no_exception(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no such sensor")

    monkeypatch.setattr(psutil, "cpu_freq", refuse, raising=False)
    monkeypatch.setattr(psutil, "sensors_battery", refuse, raising=False)
    assert machine.state(root=root).cpu_mhz is None
    assert machine.governors(root) == set()
    assert machine.cpu_quota(root) is None
    assert machine.memory_limit(root) == 16 * GIB
    assert machine.cpu_times(root).stolen is None
    assert machine.cpu_times(root).stolen_cores_since(machine.cpu_times(root)) is None
    assert warn(root) == []


def test_the_clock_is_the_mean_over_cores(root: Path) -> None:
    files(root, {"proc/cpuinfo": "processor: 0\ncpu MHz\t\t: 2000.0\n\nprocessor: 1\ncpu MHz\t\t: 3000.0\n"})
    assert machine.cpu_mhz(root) == 2500


@pytest.mark.parametrize(
    ("groups", "limits", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "50000 100000", "a/cpu.max": "200000 100000"}, 0.5),
        ("0::/docker/of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("0::/../elsewhere", {"cpu.max": "300000 100000"}, 3),
        ("5:cpuacct,cpu:/a", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, 2.5),
        ("5:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("5:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("1:name=systemd:/a\n0::/a", {"unified/a/cpu.max": "100000 100000"}, 1),
    ],
)
def test_the_tightest_cpu_quota_of_all_groups_above_holds(
    groups: str, limits: dict[str, str], quota: float | None, root: Path
) -> None:
    control_groups(root, groups, limits)
    assert machine.cpu_quota(root) == quota


@pytest.mark.parametrize(
    ("groups", "limits", "limit"),
    [
        ("0::/a", {"a/memory.max": f"{2 * GIB}\n"}, 2),
        ("0::/a", {"a/memory.max": "max", "memory.max": f"{3 * GIB}"}, 3),
        ("0::/a", {"a/memory.max": f"{99 * GIB}"}, 16),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": f"{4 * GIB}"}, 4),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 16),
        ("4:memory:/gone", {"memory/memory.limit_in_bytes": f"{5 * GIB}"}, 5),
    ],
)
def test_the_memory_limit_is_the_least_of_groups_and_machine(
    groups: str, limits: dict[str, str], limit: int, root: Path
) -> None:
    control_groups(root, groups, limits)
    assert machine.memory_limit(root) == limit * GIB


def test_a_file_cache_counts_as_available_within_a_group(root: Path) -> None:
    used = {"memory.current": f"{3 * GIB}", "memory.stat": f"anon 1\ninactive_file {GIB}"}
    control_groups(root, "0::/", {"memory.max": f"{4 * GIB}", **used})
    assert machine.memory_available(root) == 2 * GIB


def test_own_work_is_no_work_of_others() -> None:
    before = machine.CpuTimes(clock=10, busy=100, own=50, stolen=1)
    after = machine.CpuTimes(clock=12, busy=105, own=52, stolen=1.5)
    assert after.other_cores_since(before) == 1.5
    assert after.stolen_cores_since(before) == 0.25


def test_cpu_times_are_those_of_the_allowed_cpus(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {0, 2})
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 100)
    lines = [f"cpu{n} 100 10 50 999 99 5 5 {20 * n} 7 7" for n in range(3)]
    files(root, {"proc/stat": "cpu  1 1 1 1 1 1 1 1 1 1\n" + "\n".join(lines) + "\nintr 5\n"})
    times = machine.cpu_times(root)
    assert times.busy == pytest.approx(3.4)
    assert times.stolen == pytest.approx(0.4)


# --- NVIDIA GPUs --------------------------------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVML with two GPUs, of which the second tells nothing about itself."""
    fake: Any = ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def only_the_first(answer: object) -> Any:
        def ask(handle: str, *_: object) -> object:
            if handle != "handle 0":
                raise NVMLError("not supported")
            return answer

        return ask

    fake.NVMLError, fake.NVML_CLOCK_SM, fake.NVML_CLOCK_MEM, fake.NVML_TEMPERATURE_GPU = NVMLError, 1, 2, 0
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetHandleByIndex = lambda index: f"handle {index}"
    fake.nvmlDeviceGetUUID = lambda handle: "GPU-aa11" if handle == "handle 0" else "GPU-bb22"
    fake.nvmlDeviceGetTemperature = only_the_first(61)  # without the later name of this call
    fake.nvmlDeviceGetClockInfo = lambda handle, kind: only_the_first({1: 1755, 2: 2619}[kind])(handle)
    fake.nvmlDeviceGetMaxClockInfo = only_the_first(1980)
    fake.nvmlDeviceGetPowerUsage = only_the_first(123_400)
    fake.nvmlDeviceGetPowerManagementLimit = only_the_first(600_000)
    fake.nvmlDeviceGetPowerManagementDefaultLimit = only_the_first(700_000)
    fake.nvmlDeviceGetCurrentClocksEventReasons = only_the_first(0x1 | 0x4 | 0x40)
    fake.nvmlDeviceGetEccMode = only_the_first([1, 1])
    others = [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
    fake.nvmlDeviceGetComputeRunningProcesses = only_the_first(others)
    fake.nvmlDeviceGetPersistenceMode = only_the_first(0)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_gpu_is_described_and_one_that_tells_nothing_is_null(nvml: Any) -> None:
    told: dict[str, Any] = {"temperature_celsius": 61, "ecc": True, "other_processes": 2}
    told |= {"sm_clock_mhz": 1755, "sm_clock_max_mhz": 1980, "memory_clock_mhz": 2619}
    told |= {"power_watts": 123.4, "power_limit_watts": 600, "power_limit_default_watts": 700}
    told |= {"throttle_reasons": ["power cap", "thermal (hardware)"]}
    assert machine.gpus() == [GpuState(index=0, **told), GpuState(index=1)]


def test_an_idle_gpu_is_not_held_down(nvml: Any) -> None:
    nvml.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x1
    assert machine.gpus()[0].throttle_reasons == []


def test_an_older_driver_is_asked_by_the_older_name(nvml: Any) -> None:
    del nvml.nvmlDeviceGetCurrentClocksEventReasons
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x100
    assert machine.gpus()[0].throttle_reasons == ["display clocks"]


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [("1,0", [1, 0]), ("GPU-bb", [1]), ("", []), ("-1", []), ("0,5,1", [0]), ("MIG-1234", [0, 1])],
)
def test_gpus_are_those_that_cuda_would_show(
    chosen: str, indices: list[int], nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.index for gpu in machine.gpus()] == indices


def test_memory_taken_of_a_gpu_is_what_it_has_in_use_beyond_what_it_had_before(nvml: Any) -> None:
    used = {"handle 0": 7, "handle 1": 1000}
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=used[handle])
    second = machine.GpuMemory(1)
    assert second.taken() is None
    used["handle 1"] = 3500
    assert second.taken() == 2500


def test_a_machine_without_nvidia_driver_has_no_gpus(nvml: Any) -> None:
    def absent() -> None:
        raise nvml.NVMLError("library not found")

    nvml.nvmlInit = absent
    assert machine.gpus() == []
    assert machine.persistence_modes() == {}


@pytest.mark.parametrize(
    ("changes", "complaint", "advice"),
    [
        ({"other_processes": 2}, "other processes that compute on it: 2", "CUDA_VISIBLE_DEVICES"),
        ({"throttle_reasons": ["power cap"]}, "reduced: power cap", "same power limit"),
        ({"throttle_reasons": ["thermal (hardware)"]}, "reduced: thermal (hardware)", "cool it"),
        ({"throttle_reasons": ["application clocks"]}, "reduced: application clocks", "nvidia-smi -rgc"),
        ({"temperature_celsius": 84}, "84 C", "cool it"),
        ({"power_limit_watts": 500}, "power limit 500 W, by default 700 W", "-pl 700"),
        ({"sm_clock_mhz": 1000}, "1000 of 1980 MHz under load", "nvidia-smi -i 0 -rgc"),
    ],
)
def test_a_gpu_in_a_bad_state_is_named_with_what_to_do(
    changes: dict[str, Any], complaint: str, advice: str, root: Path
) -> None:
    bad, good = gpu_state(**changes), gpu_state()
    (line,) = warn(root, with_gpus(good), with_gpus(bad), device="cuda")
    assert line.startswith("GPU 0: ")
    assert complaint in line
    assert advice in line
    assert warn(root, with_gpus(good), with_gpus(good), device="cuda") == []
    assert warn(root, with_gpus(bad), with_gpus(bad), device="cpu") == []


def test_what_was_wrong_on_a_gpu_before_the_process_counts_too(root: Path) -> None:
    (line,) = warn(root, with_gpus(gpu_state(other_processes=1)), with_gpus(gpu_state()), device="cuda")
    assert "other processes" in line


@pytest.mark.parametrize("idle", [gpu_state(sm_clock_mhz=210, power_watts=70), GpuState(index=0)])
def test_a_gpu_that_is_idle_at_a_low_clock_or_tells_nothing_is_no_reason_to_warn(
    idle: GpuState, root: Path
) -> None:
    assert warn(root, with_gpus(idle), with_gpus(idle), device="cuda") == []


def test_only_the_gpus_of_the_ranks_count(root: Path) -> None:
    state = with_gpus(gpu_state(), gpu_state(index=1, temperature_celsius=90))
    assert warn(root, state, state, device="cuda") == []
    assert len(warn(root, state, state, device="cuda", ranks=2)) == 1


# --- warnings -----------------------------------------------------------------------------------------------


def test_the_load_that_earlier_processes_left_behind_is_no_warning(root: Path) -> None:
    assert QUIET.load_average == 9.0
    assert warn(root, QUIET, QUIET, stolen_cores=0.0, memory_bytes=GIB) == []


@pytest.mark.parametrize(
    ("names", "warned"),
    [(["performance"] * 4, False), (["performance", "powersave"], True), (["ondemand"], True)],
)
def test_a_governor_other_than_performance_is_a_warning(names: list[str], warned: bool, root: Path) -> None:
    for number, name in enumerate(names):
        files(root, {f"sys/devices/system/cpu/cpu{number}/cpufreq/scaling_governor": f"{name}\n"})
    lines = warn(root)
    assert len(lines) == warned
    assert all(f"CPU governor: {' and '.join(sorted(set(names)))}" in x and "cpupower" in x for x in lines)


@pytest.mark.parametrize(
    ("cores", "beside", "counts"),
    [
        (0.5, {}, True),
        (0.5, {"threads": 3}, False),
        (0.2, {}, False),
        (2.9, {"device": "cuda"}, False),
        (2.9, {"device": "cuda", "ranks": 4}, True),
    ],
)
def test_work_of_others_counts_where_no_core_is_left_for_it(
    cores: float, beside: dict[str, Any], counts: bool, root: Path
) -> None:
    found = doctor.other_work_cores(cores, **{"device": "cpu", "threads": 4, **beside})
    assert found == (cores if counts else None)


def test_a_report_words_the_work_of_others_as_the_doctor_does(root: Path) -> None:
    assert disturbances(record(other_work_cores=9.0)) == [str(checks.other_work(9.0, 4))]


@pytest.mark.parametrize(
    ("speed", "flags", "ratio", "units", "advised"),
    [
        (7.81, "flags\t: avx512_bf16 amx_bf16", "7.8x", "avx512_bf16, amx_bf16", False),
        (1.9, "Features\t: asimd bf16", "1.9x", "bf16", False),
        (0.55, "flags\t\t: fpu avx512_bf16", "0.55x", "avx512_bf16", True),
        (0.011, "flags\t\t: fpu avx2", "0.011x", "none known", True),
        (0.96, "", "0.96x", "none known", True),
    ],
)
def test_a_cpu_whose_products_are_slower_in_bfloat16_is_advised_to_train_in_float32(
    speed: float, flags: str, ratio: str, units: str, advised: bool, root: Path
) -> None:
    files(root, {"proc/cpuinfo": flags})
    found = checks.bfloat16(speed, root)
    slower = ": leave autocast off" if advised else ""
    assert (found.value, found.ok) == (f"matmuls {ratio} as fast as in float32{slower}; units: {units}", None)
    assert found.advice == ("bench run cpu leaves it off by itself" if advised else "")


def test_time_that_the_host_took_is_a_warning_by_its_share_of_the_threads(root: Path) -> None:
    (line,) = warn(root, stolen_cores=0.1)
    assert line.startswith("steal time: 2.5% of the CPU time; the host shares these CPUs")
    assert warn(root, stolen_cores=0.03) == []


@pytest.mark.parametrize(
    ("threads", "ranks", "advice"), [(5, 1, "threads=4"), (3, 2, "threads=2"), (1, 5, "size=4")]
)
def test_more_threads_than_cores_are_a_warning(threads: int, ranks: int, advice: str, root: Path) -> None:
    (line,) = warn(root, threads=threads, ranks=ranks)
    assert line.startswith(f"threads: {threads * ranks} on 4 physical cores")
    assert advice in line
    assert warn(root, threads=2, ranks=2) == []


def test_more_threads_than_the_quota_or_the_affinity_allow_are_a_warning(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"})
    (line,) = warn(root, threads=3)
    assert "2.5 CPUs of the control group's quota" in line
    assert "set toggles.threads=2" in line
    assert warn(root, threads=2) == []
    monkeypatch.setattr(machine, "allowed_cpus", lambda: {1})
    (line,) = warn(root, threads=2)
    assert "1 CPUs allowed by affinity" in line


def test_less_than_one_cpu_is_a_warning_that_asks_for_more(root: Path) -> None:
    files(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    (line,) = warn(root, threads=1)
    assert "raise the quota" in line


def test_threads_of_a_cpu_do_not_matter_on_another_device(root: Path) -> None:
    assert warn(root, threads=64, device="mps") == []


def test_where_the_system_does_not_tell_its_swap_the_check_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr("bench.host.telemetry.psutil.swap_memory", unreadable)
    told = machine.state(root)
    assert told.swap_used_bytes is None
    assert (checks.swap(told, QUIET).value, checks.swap(QUIET, told).ok) == ("unknown", None)


def test_swap_that_grows_is_a_warning_and_swap_in_use_is_none(root: Path) -> None:
    full = QUIET.model_copy(update={"swap_used_bytes": 2 * GIB})
    (line,) = warn(root, QUIET, full)
    assert line.startswith("swap: grew by 2.00 GiB; memory ran short")
    assert warn(root, full, full) == []
    assert warn(root, full, QUIET) == []


@pytest.mark.parametrize(
    ("needed", "advice"), [(9, "close other programs"), (20, "micro_batch_size"), (7, None), (None, None)]
)
def test_memory_that_is_not_there_is_a_warning(needed: int | None, advice: str | None, root: Path) -> None:
    lines = warn(root, memory_bytes=None if needed is None else needed * GIB)
    said = f"{needed}.0 GiB needed, 8.0 of 16.0 GiB available"
    assert len(lines) == (advice is not None)
    assert all(said in line and (advice or "") in line for line in lines)


@pytest.mark.parametrize(("plugged", "warned"), [(False, True), (True, False), (None, False)])
def test_running_on_battery_is_a_warning(
    plugged: bool | None, warned: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    battery = SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    lines = warn(root)
    assert len(lines) == warned
    assert all(line.startswith("power: battery; plug it in") for line in lines)


@pytest.mark.parametrize(
    ("name", "slows", "harmless"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("ATEN_CPU_CAPABILITY", "default", None),
        ("MKL_CBWR", "COMPATIBLE", None),
        ("OMP_THREAD_LIMIT", "1", None),
        ("OMP_DYNAMIC", "true", "FALSE"),
        ("GOMP_CPU_AFFINITY", "0", None),
    ],
)
def test_a_variable_left_over_is_a_warning(
    name: str, slows: str, harmless: str | None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, slows)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    assert warn(root) == [f"environment: {name}={slows}; unset {name} unless you mean it"]
    if harmless:
        monkeypatch.setenv(name, harmless)
        assert warn(root) == []


# --- bench doctor -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed."""
    monkeypatch.setattr(doctor, "_timed_blocks", lambda: [0.02, 0.02])
    monkeypatch.setattr(doctor, "_fault_seconds", lambda advice=None: 0.2e-6)
    monkeypatch.setattr(machine, "other_cores", lambda: 0.0)
    monkeypatch.setattr(doctor, "matrix_library", lambda: Diagnosis(name="matrix library", value="unknown"))


def by_name(diagnoses: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {diagnosis.name: diagnosis for diagnosis in diagnoses}


def test_whatever_is_bad_has_advice_and_every_verdict_is_shown(quick: None, nvml: Any, root: Path) -> None:
    files(root, {"sys/devices/system/cpu/smt/active": "1\n", "proc/self/cgroup": ""})
    found = doctor.diagnose(root / "results", root=root)
    assert all(diagnosis.advice for diagnosis in found if diagnosis.ok is False)
    text = in_full(doctor_brief(found))
    gpu = "61 C, 1755 of 1980 MHz, 123 of 600 W, ECC on, persistence off"
    for part in (gpu, "power cap", "beware", "good"):
        assert part in text
    bad = sum(diagnosis.ok is False for diagnosis in found)
    assert f"{bad} of these can spoil a measurement: " in text


def test_a_machine_that_tells_nothing_can_be_looked_at(quick: None, root: Path) -> None:
    found = by_name(doctor.diagnose(root / "results", root=root))
    for name in ("CPU governor", "SMT", "steal time", "huge pages"):
        assert found[name].value == "unknown"
        assert found[name].ok is None


def test_uneven_times_of_equal_work_are_noise() -> None:
    assert doctor._noise([0.02, 0.02, 0.0201]).ok
    noisy = doctor._noise([0.02, 0.03, 0.02])
    assert noisy.ok is False
    assert "--repeats" in noisy.advice


def test_equal_blocks_are_timed_one_by_one() -> None:
    times = doctor._timed_blocks(blocks=3, block_seconds=0.001)
    assert len(times) == 3
    assert all(seconds > 0 for seconds in times)


def test_page_faults_cost_time_on_this_machine() -> None:
    assert (doctor._fault_seconds() or 0) > 0


def test_a_kernel_without_huge_pages_is_no_failure() -> None:
    assert doctor._fault_seconds(advice=10_000) is None  # advice that no kernel knows
    assert doctor._judge_faults(None, None).value == "unknown"


def test_costly_page_faults_come_with_their_remedies(root: Path) -> None:
    diagnosis = doctor._judge_faults(1.3e-6, 0.5e-6)
    assert diagnosis.ok is False
    assert diagnosis.value == "1.30 us per 4 KiB: 65 ms for each new 206 MB tensor, 25 ms in huge pages"
    assert "toggles.allocator to jemalloc or tcmalloc" in diagnosis.advice
    assert "or to thp" in diagnosis.advice
    assert doctor._judge_faults(0.3e-6, 0.1e-6).ok


def test_huge_pages_that_do_not_help_are_not_advised(root: Path) -> None:
    assert "THP" not in doctor._judge_faults(1.3e-6, 1.2e-6).advice
    assert "THP" not in doctor._judge_faults(1.3e-6, None).advice


def test_a_remedy_that_is_in_force_is_no_longer_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    assert doctor._judge_faults(1.3e-6, 0.4e-6).ok
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc_minimal.so.4")
    assert doctor._judge_faults(1.3e-6, 0.4e-6).ok is None


def test_page_faults_are_not_measured_where_that_could_kill_the_process() -> None:
    assert "not measured" in doctor._page_faults(GIB // 2).value


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("always madvise [never]", "never: "),
        ("[always] madvise", "always"),
        ("always [madvise] never", "madvise: "),
        ("", "unknown"),
    ],
)
def test_the_setting_of_huge_pages_is_read(setting: str, part: str, root: Path) -> None:
    files(root, {"sys/kernel/mm/transparent_hugepage/enabled": setting})
    assert doctor._huge_pages(root).value.startswith(part)


@pytest.mark.parametrize(("source", "ok"), [("tsc", True), ("hpet", False), ("arch_sys_counter", True)])
def test_a_clock_that_linux_fell_back_to_is_named(source: str, ok: bool, root: Path) -> None:
    files(root, {"sys/devices/system/clocksource/clocksource0/current_clocksource": source})
    diagnosis = doctor._clock(root)
    assert source in diagnosis.value
    assert diagnosis.ok is ok


def test_room_is_looked_for_where_a_folder_will_be_made(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=1)
    )
    diagnosis = doctor._disk("disk", root / "not" / "yet")
    assert asked == [root]
    assert diagnosis.ok is False
    assert "free some space" in diagnosis.advice


@pytest.mark.parametrize(
    ("state", "ok", "part"),
    [
        (("abcdef0123456789", False), True, "abcdef0123"),
        (("abc", True), False, "changed"),
        ((None, None), None, "no git"),
    ],
)
def test_code_that_differs_from_its_commit_is_named(
    state: tuple[str | None, bool | None], ok: bool | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "git_state", lambda: state)
    diagnosis = doctor._git()
    assert diagnosis.ok is ok
    assert part in diagnosis.value


def test_nvml_is_loaded_only_where_gpus_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name == "pynvml":
            raise AssertionError
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert (machine.cpu_times().busy or 0.0) > 0
    with pytest.raises(AssertionError):
        machine.gpus()


@pytest.mark.parametrize("error", [PermissionError(), FileNotFoundError(), ValueError("not enough values")])
def test_where_the_system_tells_no_cpu_times_other_work_is_unknown_and_not_none(
    error: Exception, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(psutil, "cpu_times", refuse)
    times = machine.cpu_times(root)
    assert (times.busy, times.stolen) == (None, None)
    assert times.other_cores_since(times) is None
    assert checks.other_work(None, 2).value == "unknown"


def test_memory_is_known_where_meminfo_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    known = host.total_memory()

    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    assert host.total_memory() == pytest.approx(known, rel=0.01)
    assert 0 < host.free_memory() < known


MKL = "MKL_VERBOSE oneMKL 2024.0 Product build 20240605 for Intel(R) 64 architecture {}, Lnx 2.60GHz lp64"
BY_LIBRARY = """format float32
{mkl}
MKL_VERBOSE SGEMM(N,N,256,256,256,0x7f,0x55,256,0x55,256,0x7f,0x55,256) 16.04ms CNR:OFF Dyn:1 FastMM:1 TID:0
format bfloat16
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and bfloat16 support
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16::blocked:ab::f0,,256,6.47
"""


@pytest.mark.parametrize(
    ("processors", "advised"),
    [
        ("Intel(R) Architecture processors", True),
        ("Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) enabled processors", False),
    ],
)
def test_the_library_and_the_kernel_of_each_format_are_those_that_they_name(
    processors: str, advised: bool
) -> None:
    found = doctor.library_told(BY_LIBRARY.format(mkl=MKL.format(processors)))
    path = processors.removesuffix(" processors")
    kernel = "bfloat16 by oneDNN (brg_matmul:avx512_core_bf16)"
    assert found.value == f"float32 by MKL (for {path}); {kernel}"
    assert ("products: onednn" in found.advice) == advised


def test_a_library_that_says_nothing_is_unknown() -> None:
    for output in ("format float32\nformat bfloat16\n", ""):
        assert doctor.library_told(output).value == "unknown"


@pytest.mark.slow
def test_some_library_is_named_on_this_machine() -> None:
    assert "float32 by" in doctor.matrix_library().value

"""Read the present state of this machine. Imports no torch and opens no device.

What a system does not tell is None, never an exception: /proc, /sys and control groups exist on Linux only.
Functions that read them take `root`, so that a test can imitate another machine.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from bench.records.machine import GpuState, State
from gpt2.hardware.host import clocks_mhz, flags, free_memory, total_memory

SYSTEM = Path("/")
PRELOAD = "LD_PRELOAD"
VARIABLES = (
    *(PRELOAD, "MALLOC_ARENA_MAX", "MALLOC_CONF", "THP_MEM_ALLOC_ENABLE"),
    *("KMP_AFFINITY", "KMP_BLOCKTIME", "KMP_HW_SUBSET", "KMP_LIBRARY", "GOMP_CPU_AFFINITY", "GOMP_SPINCOUNT"),
    *("OMP_PROC_BIND", "OMP_PLACES", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_WAIT_POLICY", "MKL_DYNAMIC"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),
    *("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_*", "TRITON_*"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "ENABLE_PERSISTENT_TMA_MATMUL"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "CUBLAS*_WORKSPACE*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE"),
    *("NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"),
    *("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_ENABLE_MPS_FALLBACK", "PYTORCH_MPS_FAST_MATH"),
    *("PJRT_DEVICE", "XLA_FLAGS", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_PYTHON_CLIENT_*"),
    *("LIBTPU_INIT_ARGS", "TPU_VISIBLE_CHIPS"),
)
"""Names, and patterns of names, of environment variables that can change the speed."""
PLACES = re.compile(r"(_DIRS?|PATHS?|_FILES?|_HOME|_OUTPUT|_HOST|_URL|_PORT)$")
"""Matches names of variables that hold a place, such as the compiler cache of a rung."""
PATH = re.compile(r"^~|^(?!MIG-).*(/|\b[A-Za-z]:\\)", re.DOTALL)
"""Matches values that are a path of the user's; names of GPU slices contain slashes, too."""
# Reasons for a reduced clock of a GPU, by the bits of nvml.h. Bit 0, idle, is not one.
THROTTLE_REASONS = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "slowdown (hardware)",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake (hardware)",
    0x100: "display clocks",
    0x200: "board limit",
    0x400: "reliability",
}


def state(root: Path = SYSTEM) -> State:
    """Return the state of the machine; takes milliseconds, but the first call may wake the NVIDIA driver."""
    mhz = cpu_mhz(root)
    return State(
        load_average=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        cpu_mhz=round(mhz) if mhz else None,
        swap_used_bytes=_swap_used(),
        memory_available_bytes=memory_available(root),
        gpus=gpus(),
    )


def _swap_used() -> int | None:
    try:
        return psutil.swap_memory().used
    except (OSError, RuntimeError, ValueError):  # /proc/meminfo is missing, forbidden or odd
        return None


def variables(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return those of VARIABLES that are set, without paths. given: variables set by the harness."""
    given = given or {}
    named = {name: "" for pattern in VARIABLES for name in sorted(fnmatch.filter(os.environ, pattern))}
    for name in named:
        value = os.environ[name]
        if name == PRELOAD:
            named[name] = _libraries(value, given.get(name, ""))
        elif value != given.get(name) and not PLACES.search(name):
            named[name] = without_places(value)
    return {name: value for name, value in named.items() if value}


def _libraries(value: str, given: str) -> str:
    """Return the names of preloaded libraries, without the allocator, the first of the harness's `given`."""
    others = [path for path in re.split(r"[:\s]+", value) if path not in ("", given.split(":")[0])]
    return ":".join(path.rpartition("/")[2] for path in others)


def without_places(value: str) -> str:
    """Return a variable's value; of options those without a path; empty if it is or holds a path."""
    if value.startswith("-"):
        return " ".join(word for word in value.split() if word.startswith("-") and not PATH.search(word))
    return "" if PATH.search(value) else value


def read(path: Path) -> str:
    """Return the content of a small system file; empty if it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""


# --- processor


def cpu_mhz(root: Path = SYSTEM) -> float | None:
    """Return the mean clock over cores; None if unknown."""
    if clocks := clocks_mhz(root):
        return sum(clocks) / len(clocks)
    with contextlib.suppress(Exception):  # psutil raises several kinds on Apple chips and in virtual machines
        return psutil.cpu_freq().current or None
    return None


FLAGS = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"),
    *("asimd", "sve", "bf16", "i8mm"),
)


def cpu_flags(root: Path = SYSTEM) -> list[str]:
    """Return those of FLAGS that this CPU has; empty if unknown."""
    has = flags(root)
    return [flag for flag in FLAGS if flag in has]


def governors(root: Path = SYSTEM) -> set[str]:
    """Return the clock governors of all cores; empty if unknown, as in most virtual machines."""
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    return {read(file) for file in files} - {""}


def allowed_cpus() -> set[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds of CPU time so far, on the CPUs that this process may use."""

    clock: float
    busy: float | None
    """None where the system does not tell."""
    own: float
    """Time of this process, and of children that it has waited for."""
    stolen: float | None
    """Time in which a virtual CPU was ready to run and its host ran something else; None if unknown."""

    def other_cores_since(self, earlier: CpuTimes) -> float | None:
        """Return the mean number of cores kept busy by other processes; None if unknown."""
        if self.busy is None or earlier.busy is None:
            return None
        busy = (self.busy - earlier.busy) - (self.own - earlier.own)
        return max(0.0, busy / (self.clock - earlier.clock))

    def stolen_cores_since(self, earlier: CpuTimes) -> float | None:
        """Return the mean number of cores that the host took away; None if unknown."""
        if self.stolen is None or earlier.stolen is None:
            return None
        return max(0.0, (self.stolen - earlier.stolen) / (self.clock - earlier.clock))


def cpu_times(root: Path = SYSTEM) -> CpuTimes:
    """Return the CPU time so far, for differences."""
    clock, own, stolen = time.monotonic(), sum(os.times()[:4]), None
    allowed = allowed_cpus()
    lines = re.findall(r"^cpu(\d+) (.+)$", read(root / "proc/stat"), re.MULTILINE)
    if counts := [list(map(int, rest.split())) for cpu, rest in lines if int(cpu) in allowed]:
        tick = os.sysconf("SC_CLK_TCK")
        # user nice system idle iowait irq softirq steal; guests are counted in user already
        busy = sum(sum(c[:3]) + sum(c[5:7]) for c in counts) / tick
        stolen = sum(sum(c[7:8]) for c in counts) / tick
    else:
        busy = _busy_seconds()
    return CpuTimes(clock=clock, busy=busy, own=own, stolen=stolen)


def _busy_seconds() -> float | None:
    """Return the busy time of all CPUs; None where the system does not tell."""
    try:
        times = psutil.cpu_times()
    except (OSError, ValueError, IndexError):  # /proc/stat is missing, forbidden or empty
        return None
    return times.user + times.system + getattr(times, "nice", 0.0)


def other_cores(seconds: float = 0.25) -> float | None:
    """Return the cores that other processes keep busy, sampled while this process sleeps; None if unknown.

    The load average still includes a run's own previous process for minutes after its end.
    """
    before = cpu_times()
    time.sleep(seconds)
    return cpu_times().other_cores_since(before)


# --- control groups and memory


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents, of versions 1 and 2.

    In a container the path can be the host's, which does not exist there; the mount is then its own group.
    """
    base = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        place = PurePosixPath("/" if ".." in path.split("/") else path)
        for mount in [base / controller] if controllers else [base, base / "unified"]:
            yield from (mount / str(part).lstrip("/") for part in (place, *place.parents))


def cpu_quota(root: Path = SYSTEM) -> float | None:
    """Return the CPU quota of control groups, in CPUs; None for no limit."""
    quotas = []
    for group in _groups("cpu", root):
        version_1 = f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
        limit = read(group / "cpu.max") or version_1  # "max" and -1 mean none
        if match := re.fullmatch(r"(\d+) ([1-9]\d*)", limit):
            quotas.append(int(match[1]) / int(match[2]))
    return min(quotas, default=None)


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each control group with a limit; reclaimable cache is not use."""
    for group in _groups("memory", root):
        limit = read(group / "memory.max") or read(group / "memory.limit_in_bytes")
        if limit.isdigit():
            used = read(group / "memory.current") or read(group / "memory.usage_in_bytes") or "0"
            cache = re.search(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
            yield int(limit), int(used) - (int(cache[1]) if cache else 0)


def memory_limit(root: Path = SYSTEM) -> int:
    """Return the most bytes that this process may have, by the machine and its control groups."""
    return min([total_memory(), *(limit for limit, _ in _memory_groups(root))])


def memory_available(root: Path = SYSTEM) -> int:
    """Return the bytes available now without swapping, by the machine and its control groups."""
    left = [max(0, limit - used) for limit, used in _memory_groups(root)]
    return min([free_memory(), *left])


# --- NVIDIA GPUs


def gpus() -> list[GpuState]:
    """Return the state of each NVIDIA GPU that CUDA would show to a child, in its order.

    Uses NVML, which opens no CUDA context and takes no memory on the GPU.
    """
    states = []
    for nvml, index, handle in nvml_handles():
        ask, sensor = partial(_ask, nvml, handle), getattr(nvml, "NVML_TEMPERATURE_GPU", 0)
        bits = ask("nvmlDeviceGetCurrentClocksEventReasons nvmlDeviceGetCurrentClocksThrottleReasons")
        processes, ecc = ask("nvmlDeviceGetComputeRunningProcesses"), ask("nvmlDeviceGetEccMode")
        states.append(
            GpuState(
                index=index,
                temperature_celsius=ask("nvmlDeviceGetTemperatureV nvmlDeviceGetTemperature", sensor),
                sm_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                sm_clock_max_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
                memory_clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
                power_watts=_watts(ask("nvmlDeviceGetPowerUsage")),
                power_limit_watts=_watts(ask("nvmlDeviceGetPowerManagementLimit")),
                power_limit_default_watts=_watts(ask("nvmlDeviceGetPowerManagementDefaultLimit")),
                throttle_reasons=[name for bit, name in THROTTLE_REASONS.items() if bits and bits & bit],
                ecc=None if ecc is None else bool(ecc[0]),
                other_processes=None if processes is None else len(processes),
            )
        )
    return states


def persistence_modes() -> dict[int, bool | None]:
    """Return, by index, whether the driver stays awake while the GPU is unused; None if unknown."""
    modes = {
        index: _ask(nvml, handle, "nvmlDeviceGetPersistenceMode") for nvml, index, handle in nvml_handles()
    }
    return {index: None if mode is None else bool(mode) for index, mode in modes.items()}


class GpuMemory:
    """Memory of a whole NVIDIA GPU in use since this was made, by any process.

    In a container the driver's process numbers are not ours, so the memory of one process is unknown.
    """

    def __init__(self, place: int = 0) -> None:
        """place: index among the GPUs that CUDA would show to a child."""
        self._place = place
        self._before = gpu_memory_used(place)

    def taken(self) -> int | None:
        """Return the bytes; None if unknown, or if other processes have freed more."""
        now, before = gpu_memory_used(self._place), self._before
        return now - before if now is not None and before is not None and now > before else None


def gpu_memory_used(place: int = 0) -> int | None:
    """Return the bytes that a whole GPU has in use; None if unknown."""
    for nvml, _, handle in islice(nvml_handles(), place, place + 1):
        with contextlib.suppress(nvml.NVMLError):
            return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
    return None


def nvml_handles() -> Iterator[tuple[Any, int, Any]]:
    """Yield NVML, number and handle of each GPU that CUDA_VISIBLE_DEVICES leaves."""
    import pynvml as nvml  # here because importing it is slow and most machines have no such GPU

    try:
        nvml.nvmlInit()  # not shut down, so that the driver stays awake during a run
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError:  # no driver
        return
    handles = [_ask(nvml, index, "nvmlDeviceGetHandleByIndex") for index in range(count)]
    uuids = ["" if handle is None else str(_ask(nvml, handle, "nvmlDeviceGetUUID")) for handle in handles]
    for index in _visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES")):
        if handles[index] is not None:  # None for a GPU that has failed
            yield nvml, index, handles[index]


def _visible(uuids: list[str], chosen: str | None) -> list[int]:
    """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES names, by number or start of a UUID."""
    if chosen is None or "MIG-" in chosen:  # a slice of an unknown GPU
        return list(range(len(uuids)))
    visible = []
    for word in (part.strip() for part in chosen.split(",")):
        by_uuid = word.startswith("GPU-")
        fits = [n for n, uuid in enumerate(uuids) if word == str(n) or (by_uuid and uuid.startswith(word))]
        if len(fits) != 1:  # as CUDA, which stops at the first word that names none
            break
        visible += fits
    return visible


def _ask(nvml: Any, gpu: Any, names: str, *arguments: object) -> Any:
    """Call the first of these functions of NVML that driver and GPU support; None if there is none.

    gpu: its handle, or its number.
    """
    for name in names.split():
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, name)(gpu, *arguments)
    return None


def _watts(milliwatts: float | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000

"""Quick checks of what can spoil a measurement; each returns a Diagnosis. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.format import GIB
from bench.host import telemetry as machine
from bench.records.machine import GpuState, State
from gpt2.hardware.host import (
    missing_allocator,
    missing_compiler,
    replacement_temp_folder,
    total_memory,
    usable_cores,
)

OTHER_CORES = 0.25
"""Cores kept busy by other processes above which they do harm.

A step is as slow as its slowest thread, which takes up to a third longer if it shares its core with this
much. The error of a sample and a desktop's daemons stay below.
"""
STOLEN = 0.01
"""Share of the threads' time: the smallest difference that a scoreboard calls faster or slower."""
SWAP_GROWTH_BYTES = 16 * 2**20
"""Growth that is normal, because the kernel swaps out unused memory."""
HOT_CELSIUS = 83.0
LOW_CLOCK = 0.7
"""Share of a GPU's highest clock that is low if it draws over half its power limit without a reason given."""
SLOWING = (
    *("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"),
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA"),
    *("OMP_THREAD_LIMIT", "OMP_DYNAMIC", "GOMP_CPU_AFFINITY"),
)
"""Variables that are usually left over: from debugging, from reproducible sums, from another program."""
SWITCHES = ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "OMP_DYNAMIC")
"""Those of them that a value of OFF switches off."""
OFF = ("0", "false")


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of one check; `ok` is None for information."""

    name: str
    value: str
    ok: bool | None = None
    advice: str = ""
    """What to do if it is not ok."""

    def __str__(self) -> str:
        return f"{self.name}: {self.value}; {self.advice}"


# --- processor


def governor(root: Path) -> Diagnosis:
    governors = machine.governors(root)
    slow = governors - {"performance"}
    return Diagnosis(
        name="CPU governor",
        value=" and ".join(sorted(governors)) or "unknown",
        ok=not slow if governors else None,
        advice="sudo cpupower frequency-set -g performance, or clocks will vary" if slow else "",
    )


def installed() -> list[Diagnosis]:
    """Check for software without which some rungs on a CPU are not supported; for information."""
    moved = replacement_temp_folder()
    where = f"has blanks or quotes, or is mounted with noexec; compiled code goes to {moved}"
    return [Diagnosis(name="TMPDIR", value=where)] * bool(moved) + [
        Diagnosis(name=name, value="missing" if missing else "present", advice=missing or "")
        for name, missing in (
            ("C++ compiler and Python.h, for torch.compile", missing_compiler()),
            ("jemalloc", missing_allocator("jemalloc")),
            ("tcmalloc", missing_allocator("tcmalloc")),
        )
    ]


def bfloat16(speed: float, root: Path) -> Diagnosis:
    """Report the speed of bfloat16 on this CPU; for information.

    speed: of matmuls over those in float32. A CPU's units for it can be slower than those for float32, such
    as AVX-512's without AMX in a virtual machine.
    """
    units = [flag for flag in machine.cpu_flags(root) if flag in ("amx_bf16", "avx512_bf16", "bf16")]
    slower = "" if speed > 1 else ": leave autocast off"
    value = f"matmuls {speed:.2g}x as fast as in float32{slower}; units: {', '.join(units) or 'none known'}"
    advice = "bench run cpu leaves it off by itself" if slower else ""
    return Diagnosis(name="bfloat16", value=value, advice=advice)


def smt(root: Path) -> Diagnosis:
    value = {"0": "off", "1": "on; threads default to one per physical core"}
    return Diagnosis(
        name="SMT", value=value.get(machine.read(root / "sys/devices/system/cpu/smt/active"), "unknown")
    )


def threads(threads: int, ranks: int, root: Path) -> Diagnosis:
    total = threads * ranks
    limits: dict[str, float | None] = {
        "physical cores": psutil.cpu_count(logical=False),
        "CPUs allowed by affinity": len(machine.allowed_cpus()),
        "CPUs of the control group's quota": machine.cpu_quota(root),
    }
    known = {name: limit for name, limit in limits.items() if limit is not None}
    value = f"{total} on " + ", ".join(f"{limit:g} {name}" for name, limit in known.items())
    most = int(min(known.values()))
    if total <= min(known.values()):
        return Diagnosis(name="threads", value=value, ok=True)
    if most >= ranks:
        advice = f"set toggles.threads={most // ranks}"
    else:
        advice = f"set toggles.world_size={most}" if most else "raise the quota to a whole CPU"
    advice += ": threads that share a core wait for each other"
    return Diagnosis(name="threads", value=value, ok=False, advice=advice)


def unheeded(omp_num_threads: str | None, threads: int) -> list[Diagnosis]:
    """Warn of an OMP_NUM_THREADS, from gpt2.training.stages.unheeded_threads(), that a rank does not use."""
    if omp_num_threads is None:
        return []
    value = f"OMP_NUM_THREADS={omp_num_threads} is ignored, each rank has {threads}"
    return [
        Diagnosis(name="threads", value=value, ok=False, advice="set toggles.threads to choose, or unset it")
    ]


def battery() -> Diagnosis:
    try:
        sensor = psutil.sensors_battery()
    except Exception:  # absent on some systems; psutil raises several kinds on others
        sensor = None
    if sensor is None or sensor.power_plugged is None:
        return Diagnosis(name="power", value="unknown" if sensor else "no battery")
    if sensor.power_plugged:
        return Diagnosis(name="power", value="mains", ok=True)
    return Diagnosis(
        name="power", value="battery", ok=False, advice="plug it in: clocks are lower on battery"
    )


def does_harm(cores: float, busy: int) -> bool:
    """Whether other processes keep `cores` busy, of which too few are free beside the run's `busy` ones."""
    return cores > OTHER_CORES + max(0, usable_cores() - busy)


def other_work(cores: float | None, busy: int) -> Diagnosis:
    """Check `cores` kept busy by other processes, beside `busy` that the run needs."""
    if cores is None:
        return Diagnosis(name="other work", value="unknown")
    ok = not does_harm(cores, busy)
    advice = "" if ok else "stop other programs (top shows them) and measure again"
    return Diagnosis(name="other work", value=f"others keep {cores:.2f} cores busy", ok=ok, advice=advice)


def steal(cores: float | None, busy: int) -> Diagnosis:
    if cores is None:
        return Diagnosis(name="steal time", value="unknown")
    share = cores / busy
    ok = share <= STOLEN
    advice = "" if ok else "the host shares these CPUs: choose one with dedicated cores, or more rounds"
    return Diagnosis(name="steal time", value=f"{share:.1%} of the CPU time", ok=ok, advice=advice)


# --- memory


def memory(available: int, needed: int | None, root: Path) -> Diagnosis:
    limit = machine.memory_limit(root)
    value = f"{available / GIB:.1f} of {limit / GIB:.1f} GiB available"
    if limit < total_memory():
        value += " (a control group's limit)"
    if needed is None:
        return Diagnosis(name="memory", value=value)
    value = f"{needed / GIB:.1f} GiB needed, {value}"
    if needed <= min(available, limit):
        return Diagnosis(name="memory", value=value, ok=True)
    smaller, free = "a smaller toggles.micro_batch_size needs less", "close other programs: it may swap"
    return Diagnosis(name="memory", value=value, ok=False, advice=smaller if needed > limit else free)


def swap(before: State, after: State | None) -> Diagnosis:
    """Check for growth of swap, which shows that memory is short now, not only once before."""
    if before.swap_used_bytes is None:
        return Diagnosis(name="swap", value="unknown")
    later = None if after is None else after.swap_used_bytes
    growth = 0 if later is None else later - before.swap_used_bytes
    if growth <= SWAP_GROWTH_BYTES:
        return Diagnosis(name="swap", value=f"{before.swap_used_bytes / GIB:.1f} GiB in use")
    advice = "memory ran short: close other programs or lower toggles.micro_batch_size"
    return Diagnosis(name="swap", value=f"grew by {growth / GIB:.2f} GiB", ok=False, advice=advice)


# --- environment


def variables() -> list[Diagnosis]:
    """Report each environment variable that can change the speed."""
    return [
        Diagnosis(
            name="environment",
            value=f"{name}={value}",
            ok=False if name in SLOWING else None,
            advice=f"unset {name} unless you mean it" if name in SLOWING else "",
        )
        for name, value in machine.variables().items()
        if name not in SWITCHES or value.lower() not in OFF
    ]


# --- NVIDIA GPUs


def worst(before: State, after: State | None) -> list[GpuState]:
    """Return each GPU after the process, with other processes and throttling from before it."""
    later = {gpu.index: gpu for gpu in after.gpus} if after else {}
    result = []
    for gpu in before.gpus:
        last = later.get(gpu.index, gpu)
        others = [n for n in (gpu.other_processes, last.other_processes) if n is not None]
        known = {
            "other_processes": max(others, default=None),
            "throttle_reasons": list(dict.fromkeys(gpu.throttle_reasons + last.throttle_reasons)),
        }
        result.append(last.model_copy(update=known))
    return result


def gpu_problems(gpu: GpuState) -> list[Diagnosis]:
    """Return what spoils a measurement in a GPU's state."""
    problems = []

    def wrong(value: str, advice: str) -> None:
        problems.append(Diagnosis(name=f"GPU {gpu.index}", value=value, ok=False, advice=advice))

    if gpu.other_processes:
        what = "end what nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
        wrong(f"other processes that compute on it: {gpu.other_processes}", what)
    if gpu.throttle_reasons:
        wrong(f"its clock is reduced: {', '.join(gpu.throttle_reasons)}", _unthrottle(gpu.throttle_reasons))
    if (gpu.temperature_celsius or 0) > HOT_CELSIUS:
        wrong(f"{gpu.temperature_celsius:.0f} C", f"cool it: above {HOT_CELSIUS:.0f} C clocks fall")
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default:
        what = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}"
        wrong(f"power limit {limit:.0f} W, by default {default:.0f} W", what)
    clock, highest = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    loaded = gpu.power_watts and limit and gpu.power_watts > limit / 2  # an idle GPU lowers its clock
    if loaded and clock and highest and clock < LOW_CLOCK * highest and not gpu.throttle_reasons:
        what = f"reset a locked clock: sudo nvidia-smi -i {gpu.index} -rgc"
        wrong(f"{clock:.0f} of {highest:.0f} MHz under load", what)
    return problems


def _unthrottle(reasons: list[str]) -> str:
    if any("thermal" in reason for reason in reasons):
        return "cool it, or pause between rounds"
    if any("clocks" in reason for reason in reasons):
        return "reset a clock that somebody set: sudo nvidia-smi -rgc, then sudo nvidia-smi -rac"
    if "power cap" in reasons:
        return "compare only with results under the same power limit"
    return "see nvidia-smi -q -d PERFORMANCE, and check its power supply"


def gpu_now(gpu: GpuState, persistent: bool | None) -> Diagnosis:
    """Report a GPU's state; for information."""

    def of(value: float | None, limit: float | None, unit: str) -> str:
        here, most = ("?" if number is None else f"{number:.0f}" for number in (value, limit))
        return f"{here} of {most} {unit}"

    words = {None: "unknown", True: "on", False: "off"}
    celsius = "?" if gpu.temperature_celsius is None else f"{gpu.temperature_celsius:.0f}"
    value = (
        f"{celsius} C, {of(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, 'MHz')}, "
        f"{of(gpu.power_watts, gpu.power_limit_watts, 'W')}, ECC {words[gpu.ecc]}, persistence "
        f"{words[persistent]}"
    )
    keep_awake = f"sudo nvidia-smi -i {gpu.index} -pm 1 keeps the driver awake between runs"
    advice = keep_awake if persistent is False else ""
    return Diagnosis(name=f"GPU {gpu.index}", value=value, advice=advice)

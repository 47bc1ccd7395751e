"""Checks that cost nothing: each looks at one thing that can spoil a measurement and gives a Finding. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.format import GIB
from bench.host import telemetry as machine
from bench.records.machine import GpuState, State
from gpt2.hardware.host import missing_allocator, missing_compiler, replacement_temp_folder, usable_cores

OTHER_CORES = 0.25
"""Work of others that is too much. A step is as slow as its slowest thread, and one that shares its core with
this much takes up to a third longer, however many cores there are. A sample's error and a desktop's daemons
stay below.
"""
STOLEN = 0.01
"""Share of the threads' time: the least difference that a scoreboard calls faster or slower."""
SWAP_GROWTH_BYTES = 16 * 2**20
"""The kernel moves out this much of what nobody uses without being short of memory."""
HOT_CELSIUS = 83.0
LOW_CLOCK = 0.7
"""Share of a GPU's highest clock that is low when it draws over half its power limit and no reason is given.
"""
SLOWING = ("CUDA_LAUNCH_BLOCKING", "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "ONEDNN_MAX_CPU_ISA")
"""Variables that are left over from debugging, as a rule."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at; `ok` is None where there is nothing to judge."""

    name: str
    value: str
    ok: bool | None = None
    advice: str = ""
    """What to do about it, where it is not ok."""

    def __str__(self) -> str:
        return f"{self.name}: {self.value}; {self.advice}"


# --- processor
# -------------------------------------------------------------------------------------------------------


def governor(root: Path) -> Finding:
    found = machine.governors(root)
    return Finding(
        name="CPU governor",
        value=" and ".join(sorted(found)) or "unknown",
        ok=found == {"performance"} if found else None,
        advice=""
        if found <= {"performance"}
        else "sudo cpupower frequency-set -g performance, or clocks will wander",
    )


def installed() -> list[Finding]:
    """What rungs on a CPU need of the system; without it they are `unsupported`, which spoils nothing else."""
    moved = replacement_temp_folder()
    found = (
        [Finding(name="TMPDIR", value=f"has blanks or quotes; what is compiled lies in {moved}")]
        if moved
        else []
    )
    return found + [
        Finding(name=name, value="is not here" if missing else "is here", advice=missing or "")
        for name, missing in (
            ("C++ compiler and Python.h, for torch.compile", missing_compiler()),
            ("jemalloc", missing_allocator("jemalloc")),
            ("tcmalloc", missing_allocator("tcmalloc")),
        )
    ]


def bfloat16(speed: float, root: Path) -> Finding:
    """What it buys on this CPU; where it is slower, ladders take float32, which spoils nothing.

    speed: of products, over those in float32, as measured: a CPU may have units for it (AVX-512's without
    AMX, as a virtual machine of Intel's may show them) that are slower than those for float32.
    """
    units = [flag for flag in machine.cpu_flags(root) if flag in ("amx_bf16", "avx512_bf16", "bf16")]
    value = f"products {speed:.2g}x as fast as in float32; units: {', '.join(units) or 'none known'}"
    value += "; ladders/cpu.yaml suits it" if speed > 1 else ""
    advice = "" if speed > 1 else "take ladders/cpu-float32.yaml in place of cpu.yaml"
    return Finding(name="bfloat16", value=value, advice=advice)


def smt(root: Path) -> Finding:
    value = {"0": "off", "1": "on; threads default to one per physical core"}
    return Finding(
        name="SMT", value=value.get(machine.read(root / "sys/devices/system/cpu/smt/active"), "unknown")
    )


def threads(threads: int, ranks: int, root: Path) -> Finding:
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
        return Finding(name="threads", value=value, ok=True)
    if most >= ranks:
        advice = f"set toggles.threads={most // ranks}"
    else:
        advice = f"set toggles.world_size={most}" if most else "raise the quota to a whole CPU"
    advice += ": threads that take turns wait for each other"
    return Finding(name="threads", value=value, ok=False, advice=advice)


def unheeded(asked: str | None, threads: int) -> list[Finding]:
    """OMP_NUM_THREADS where it asks for other threads than a rank is given; see
    gpt2.training.stages.unheeded_threads().
    """
    if asked is None:
        return []
    value = f"OMP_NUM_THREADS={asked} is not heeded, each rank has {threads}"
    return [
        Finding(name="threads", value=value, ok=False, advice="set toggles.threads to choose, or unset it")
    ]


def battery() -> Finding:
    try:
        sensor = psutil.sensors_battery()
    except Exception:  # absent on some systems; psutil raises several kinds on others
        sensor = None
    if sensor is None or sensor.power_plugged is None:
        return Finding(name="power", value="unknown" if sensor else "no battery")
    if sensor.power_plugged:
        return Finding(name="power", value="mains", ok=True)
    return Finding(
        name="power", value="battery", ok=False, advice="plug it in: on battery, clocks are held down"
    )


def does_harm(cores: float, busy: int) -> bool:
    """Whether `cores` kept busy by others are too many beside `busy` that the run needs: free ones do not
    count.
    """
    return cores > OTHER_CORES + max(0, usable_cores() - busy)


def other_work(cores: float | None, busy: int) -> Finding:
    """`cores` kept busy by others, beside `busy` that the run needs."""
    if cores is None:
        return Finding(name="other work", value="unknown")
    ok = not does_harm(cores, busy)
    advice = "" if ok else "stop other programs (top shows them) and measure again"
    return Finding(name="other work", value=f"others keep {cores:.2f} cores busy", ok=ok, advice=advice)


def steal(cores: float | None, busy: int) -> Finding:
    if cores is None:
        return Finding(name="steal time", value="unknown")
    share = cores / busy
    advice = (
        ""
        if share <= STOLEN
        else "the host shares these CPUs: choose one with cores of its own, or more rounds"
    )
    return Finding(name="steal time", value=f"{share:.1%} of the CPU time", ok=share <= STOLEN, advice=advice)


# --- memory
# ----------------------------------------------------------------------------------------------------------


def memory(available: int, needed: int | None, root: Path) -> Finding:
    limit = machine.memory_limit(root)
    value = f"{available / GIB:.1f} of {limit / GIB:.1f} GiB available"
    if limit < psutil.virtual_memory().total:
        value += " (a control group's limit)"
    if needed is None:
        return Finding(name="memory", value=value)
    value = f"{needed / GIB:.1f} GiB needed, {value}"
    if needed <= min(available, limit):
        return Finding(name="memory", value=value, ok=True)
    advice = (
        "a smaller toggles.micro_batch_size needs less"
        if needed > limit
        else "close other programs: it may swap"
    )
    return Finding(name="memory", value=value, ok=False, advice=advice)


def swap(before: State, after: State | None) -> Finding:
    """What is in swap only says that memory was short once; growth says that it is short now."""
    growth = 0 if after is None else after.swap_used_bytes - before.swap_used_bytes
    if growth <= SWAP_GROWTH_BYTES:
        return Finding(name="swap", value=f"{before.swap_used_bytes / GIB:.1f} GiB in use")
    advice = "memory ran short: close other programs or lower toggles.micro_batch_size"
    return Finding(name="swap", value=f"grew by {growth / GIB:.2f} GiB", ok=False, advice=advice)


# --- environment
# -----------------------------------------------------------------------------------------------------


def variables() -> list[Finding]:
    """Each variable in force that can change the speed; records keep them all."""
    return [
        Finding(
            name="environment",
            value=f"{name}={value}",
            ok=False if name in SLOWING else None,
            advice=f"unset {name} unless you mean it" if name in SLOWING else "",
        )
        for name, value in machine.variables().items()
        if name not in SLOWING or value != "0"
    ]


# --- NVIDIA GPUs
# -----------------------------------------------------------------------------------------------------


def worst(before: State, after: State | None) -> list[GpuState]:
    """Each GPU as it was after the process, with what was already wrong before it."""
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


def gpu_problems(gpu: GpuState) -> list[Finding]:
    """What of a GPU's state spoils a measurement; empty if nothing does."""
    found = []

    def wrong(value: str, advice: str) -> None:
        found.append(Finding(name=f"GPU {gpu.index}", value=value, ok=False, advice=advice))

    if gpu.other_processes:
        what = "end what nvidia-smi lists, or choose another GPU with CUDA_VISIBLE_DEVICES"
        wrong(f"other processes that compute on it: {gpu.other_processes}", what)
    if gpu.throttle_reasons:
        wrong(f"its clock is held down: {', '.join(gpu.throttle_reasons)}", _unthrottle(gpu.throttle_reasons))
    if (gpu.temperature_celsius or 0) > HOT_CELSIUS:
        wrong(f"{gpu.temperature_celsius:.0f} C", f"cool it: above {HOT_CELSIUS:.0f} C clocks fall")
    limit, default = gpu.power_limit_watts, gpu.power_limit_default_watts
    if limit and default and limit < default:
        what = f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}"
        wrong(f"power limit {limit:.0f} W, by default {default:.0f} W", what)
    clock, highest = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    loaded = (
        gpu.power_watts and limit and gpu.power_watts > limit / 2
    )  # an idle GPU's clock is low as it should be
    if loaded and clock and highest and clock < LOW_CLOCK * highest and not gpu.throttle_reasons:
        what = f"free a locked clock: sudo nvidia-smi -i {gpu.index} -rgc"
        wrong(f"{clock:.0f} of {highest:.0f} MHz under load", what)
    return found


def _unthrottle(reasons: list[str]) -> str:
    if any("thermal" in reason for reason in reasons):
        return "cool it, or pause between rounds"
    if any("clocks" in reason for reason in reasons):
        return "free a clock that somebody set: sudo nvidia-smi -rgc, then sudo nvidia-smi -rac"
    if "power cap" in reasons:
        return "compare only with figures under the same power limit"
    return "nvidia-smi -q -d PERFORMANCE tells more; check its power supply"


def gpu_now(gpu: GpuState, persistent: bool | None) -> Finding:
    """A GPU's state, for information."""

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
    advice = (
        f"sudo nvidia-smi -i {gpu.index} -pm 1 keeps the driver awake between runs"
        if persistent is False
        else ""
    )
    return Finding(name=f"GPU {gpu.index}", value=value, advice=advice)

"""Find what about this machine spoils measurements, and what to do about it. Imports no torch.

warnings() checks one process, by the State before and after it; diagnose() also measures, for seconds.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from bench.format import GIB
from bench.host import checks
from bench.host import telemetry as machine
from bench.host.checks import Diagnosis
from bench.host.telemetry import SYSTEM
from bench.records.machine import State
from gpt2.config.toggles import HOST, Toggles
from gpt2.hardware import host
from gpt2.provenance import git_state
from gpt2.training import stages

NOISE = 0.05
"""Largest spread of blocks of 20 ms; averaged over a second it is below 1 %."""
PAGE_FAULT_SECONDS = 0.5e-6
"""Limit per 4 KiB: bare metal takes about half of this, some virtual machines three times as much."""
TENSOR_BYTES = 1024 * 50257 * 4
"""Logits of 1,024 tokens in float32, the largest tensor of GPT-2 at a batch of 1."""
CLOCK_SECONDS = 100e-6
"""Largest step of the clock, 0.01 % of a block of a second."""
FREE_DISK_BYTES = GIB


def warnings(
    before: State,
    after: State | None,
    *,
    device: str,
    threads: int,
    unheeded: str | None = None,
    ranks: int = 1,
    stolen_cores: float | None = None,
    memory_bytes: int | None = None,
    root: Path = SYSTEM,
) -> list[str]:
    """Return what may have spoilt one process's measurement, a line each, with what to do about it.

    threads: of each rank. unheeded: from unheeded_threads(). stolen_cores: from cpu_times() before and after
    the process. memory_bytes: needed by all ranks together, not on a GPU. Other processes are a field of the
    record instead: see other_work_cores().
    """
    on_cpu = device == HOST
    diagnoses = [checks.governor(root), checks.battery(), *checks.variables()]
    if on_cpu:
        diagnoses.append(checks.threads(threads, ranks, root))
        diagnoses += checks.unheeded(unheeded, threads)
    else:
        diagnoses += [
            problem for gpu in checks.worst(before, after)[:ranks] for problem in checks.gpu_problems(gpu)
        ]
    diagnoses.append(checks.steal(stolen_cores, _busy(device, threads, ranks)))
    diagnoses.append(checks.swap(before, after))
    diagnoses.append(checks.memory(before.memory_available_bytes, memory_bytes, root))
    return [str(diagnosis) for diagnosis in diagnoses if diagnosis.ok is False]


def other_work_cores(cores: float | None, *, device: str, threads: int, ranks: int = 1) -> float | None:
    """Return `cores`, kept busy by other processes, if they took some from the ranks; else None."""
    return cores if cores is not None and checks.does_harm(cores, _busy(device, threads, ranks)) else None


def _busy(device: str, threads: int, ranks: int) -> int:
    """Return the cores that all ranks need; with an accelerator, one per rank to feed it."""
    return ranks * (threads if device == HOST else 1)


def costly_page_faults() -> tuple[str, ...]:
    """Return a warning for runs on a CPU if page faults are expensive here; takes a second."""
    diagnosis = _page_faults(machine.memory_available())
    return (str(diagnosis),) if diagnosis.ok is False else ()


def diagnose(
    results: Path = Path("results"), memory_bytes: int | None = None, root: Path = SYSTEM
) -> list[Diagnosis]:
    """Run all checks of warnings(), and those that measure; takes about six seconds.

    memory_bytes: what a run would need.
    """
    from bench.host.feasibility import product_rate  # loads torch

    state = machine.state(root=root)
    start = machine.cpu_times(root)
    blocks = _timed_blocks()
    stolen = machine.cpu_times(root).stolen_cores_since(start)
    awake = machine.persistence_modes()
    return [
        checks.governor(root),
        checks.smt(root),
        checks.bfloat16(product_rate("bfloat16") / product_rate("float32"), root),
        matrix_library(),
        checks.threads(stages.threads(Toggles()), 1, root),
        *checks.unheeded(stages.unheeded_threads(Toggles()), stages.threads(Toggles())),
        checks.battery(),
        checks.other_work(machine.other_cores(), host.usable_cores()),
        _noise(blocks),
        checks.steal(stolen, 1),
        checks.memory(state.memory_available_bytes, memory_bytes, root),
        checks.swap(state, None),
        _page_faults(state.memory_available_bytes),
        _huge_pages(root),
        *(
            f
            for gpu in state.gpus
            for f in (checks.gpu_now(gpu, awake.get(gpu.index)), *checks.gpu_problems(gpu))
        ),
        *(
            checks.variables()
            or [Diagnosis(name="environment", value="no variable that changes the speed is set")]
        ),
        *checks.installed(),
        _clock(root),
        _disk("disk for results", results),
        _disk("disk for compiler caches", host.temp_folder() or Path(tempfile.gettempdir())),
        _git(),
    ]


# --- what multiplies matrices

TWO_PRODUCTS = """
import torch
for dtype in (torch.float32, torch.bfloat16):
    x = torch.ones(256, 256, dtype=dtype)
    print(f"format {str(dtype).removeprefix('torch.')}", flush=True)
    torch.mm(x, x)
"""
LIBRARY_SECONDS = 60.0
"""Limit for TWO_PRODUCTS."""


def matrix_library() -> Diagnosis:
    """Report the library and the kernel of a matmul in float32 and in bfloat16; for information."""
    verbose = {**os.environ, "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"}
    command = [sys.executable, "-P", "-c", TWO_PRODUCTS]
    try:
        done = subprocess.run(
            command,
            env=verbose,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIBRARY_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Diagnosis(name="matrix library", value="unknown")
    return library_told(done.stdout)


def library_told(output: str) -> Diagnosis:
    """Read what MKL (MKL_VERBOSE) and oneDNN (ONEDNN_VERBOSE) printed, beneath each number format."""
    processors = re.search(r"^MKL_VERBOSE .*64 architecture (.+?) processors", output, re.MULTILINE)
    found = []
    for number_format, lines in re.findall(r"^format (\w+)\n((?:(?!format ).*\n?)*)", output, re.MULTILINE):
        if kernel := re.search(r"^onednn_verbose,.*,exec,cpu,matmul,([^,]+),", lines, re.MULTILINE):
            found.append(f"{number_format} by oneDNN ({kernel[1]})")
        elif re.search(r"^MKL_VERBOSE \w*GEMM", lines, re.MULTILINE):
            found.append(f"{number_format} by MKL" + (f" (for {processors[1]})" if processors else ""))
    advice = ""
    if processors and "AVX" not in processors[1].upper() and "Advanced Vector" not in processors[1]:
        advice = "MKL takes a plain path on this maker's CPUs; in float32 products: onednn may be faster"
    return Diagnosis(name="matrix library", value="; ".join(found) or "unknown", advice=advice)


# --- what takes a second


def _timed_blocks(blocks: int = 50, block_seconds: float = 0.02) -> list[float]:
    """Time equal blocks of computation on one core; return the seconds of each."""

    def block(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            pass
        return time.perf_counter() - start

    fastest = min(block(100_000) for _ in range(5))  # the first one wakes the core
    count = int(100_000 * block_seconds / fastest) + 1
    return [block(count) for _ in range(blocks)]


def _noise(blocks: list[float]) -> Diagnosis:
    """Check the spread of the durations of equal work."""
    spread = statistics.stdev(blocks) / statistics.mean(blocks)
    value = f"{spread:.1%} spread of equal blocks of {1000 * statistics.mean(blocks):.0f} ms"
    advice = "" if spread <= NOISE else "stop other programs, or take more rounds: bench run --repeats 5"
    return Diagnosis(name="noise", value=value, ok=spread <= NOISE, advice=advice)


def _fault_seconds(advice: int | None = None) -> float | None:
    """Time page faults: seconds per 4 KiB of new memory with this madvise(); None if the kernel refuses.

    Takes the best of three, because the first may also wait for a virtual machine's host.
    """
    size = 256 * 2**20
    best = float("inf")
    touch = bytes(size // mmap.PAGESIZE)
    try:
        for _ in range(3):
            with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
                if advice is not None:
                    memory.madvise(advice)
                start = time.perf_counter()
                memory[:: mmap.PAGESIZE] = touch
                best = min(best, time.perf_counter() - start)
    except OSError:
        return None
    return best / (size / 4096)


def _page_faults(available: int) -> Diagnosis:
    if available < GIB:
        return Diagnosis(name="page faults", value="not measured: less than 1 GiB of memory is available")
    huge = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    return _judge_faults(_fault_seconds(), None if huge is None else _fault_seconds(huge))


def _judge_faults(small: float | None, huge: float | None) -> Diagnosis:
    """Judge page faults. small, huge: seconds per 4 KiB by default, and with huge pages."""
    if small is None:
        return Diagnosis(name="page faults", value="unknown")
    in_force = huge if huge is not None and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else small
    kept = "malloc" in os.environ.get("LD_PRELOAD", "")
    tensor_ms = 1e3 * small * TENSOR_BYTES / 4096
    value = f"{1e6 * small:.2f} us per 4 KiB: {tensor_ms:.0f} ms for each new 206 MB tensor"
    if huge is not None:
        value += f", {1e3 * huge * TENSOR_BYTES / 4096:.0f} ms in huge pages"
    if kept:
        value += "; but a preloaded allocator can keep memory"
    ok = True if in_force <= PAGE_FAULT_SECONDS else None if kept else False
    remedies = "set toggles.allocator to jemalloc or tcmalloc, which keep freed memory"
    if huge is not None and huge < 0.7 * in_force:
        remedies += ", or to thp"
    advice = f"on a CPU, every step pays this: {remedies}" if ok is False else ""
    return Diagnosis(name="page faults", value=value, ok=ok, advice=advice)


def _huge_pages(root: Path) -> Diagnosis:
    given = host.huge_pages(root)
    set_now = ", as it is" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else ""
    meaning = {
        "always": "always",
        "madvise": f"madvise: torch asks for them where THP_MEM_ALLOC_ENABLE=1 is set{set_now}",
        "never": "never: THP_MEM_ALLOC_ENABLE=1 does nothing until root writes madvise to /sys/kernel/mm/"
        "transparent_hugepage/enabled",
    }
    return Diagnosis(name="huge pages", value=meaning.get(given, given) if given else "unknown")


# --- timing, disk, code


def _clock(root: Path) -> Diagnosis:
    """Check the clock that times blocks."""
    reads = [time.perf_counter() for _ in range(1000)]
    step = min((b - a for a, b in pairwise(reads) if b > a), default=float("inf"))
    source = machine.read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    value = f"perf_counter steps by {1e9 * step:.0f} ns" + (f", from {source}" if source else "")
    if source in ("hpet", "acpi_pm", "jiffies"):
        advice = "Linux does not use this CPU's own counter (see dmesg), so times may jump; try another host"
        return Diagnosis(name="clock", value=value, ok=False, advice=advice)
    advice = "" if step <= CLOCK_SECONDS else "use longer blocks: --set protocol.block_seconds=10"
    return Diagnosis(name="clock", value=value, ok=step <= CLOCK_SECONDS, advice=advice)


def _disk(name: str, folder: Path) -> Diagnosis:
    """Check the free space of a folder, or of its first parent that exists."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(there).free
    except OSError:
        return Diagnosis(name=name, value="unknown")
    value = f"{free / GIB:.1f} GiB free in {folder}"
    if not os.access(there, os.W_OK | os.X_OK):
        advice = "choose a folder that you may write into: bench run --out FOLDER"
        return Diagnosis(name=name, value=f"no permission to write to {there}", ok=False, advice=advice)
    ok = free >= FREE_DISK_BYTES
    advice = "" if ok else "free some space: a full disk ends a run half-way"
    return Diagnosis(name=name, value=value, ok=ok, advice=advice)


def _git() -> Diagnosis:
    commit, dirty = git_state()
    if commit is None or dirty is None:
        return Diagnosis(name="code", value="no git checkout; records carry a hash of the code")
    value = f"commit {commit[:10]}" + (", changed since" if dirty else "")
    return Diagnosis(
        name="code", value=value, ok=not dirty, advice="commit first: records say 'dirty'" if dirty else ""
    )

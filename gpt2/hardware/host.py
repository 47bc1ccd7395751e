"""Facts about this host: its cores, allocators, compilers, packages, and CPU. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
from ctypes.util import find_library
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil


def usable_cores() -> int:
    """Return the number of physical cores that this process may use."""
    places = os.environ.get(PLACES, "")
    if re.fullmatch(r"\{\d+\}(,\{\d+\})*", places):  # pinned: this thread's own affinity is one core
        return places.count("{")
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(one_cpu_per_core())
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


PLACES = "OMP_PLACES"
"""OpenMP's variable for thread placement: {0},{1} are the first two logical processors, one thread each."""


def one_cpu_per_core() -> list[int]:
    """Return the first logical processor of each physical core that this process may use."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        first.setdefault(core, cpu)
    return list(first.values())


ALLOCATORS = {"tcmalloc": "tcmalloc_minimal", "jemalloc": "jemalloc"}
"""Library names of the allocators, as the linker knows them."""
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
"""Packages that install them on Debian and Ubuntu."""


def allocator_library(name: str) -> str | None:
    """Return the file name of an allocator's shared library; None where it is not installed."""
    return find_library(ALLOCATORS[name]) if name in ALLOCATORS else None


def missing_allocator(name: str) -> str | None:
    """Return why this allocator cannot be used here, with an alternative; None if it can."""
    library = ALLOCATORS.get(name)
    if library and sys.platform != "linux":
        return "it is put under torch by LD_PRELOAD, which is Linux's; choose system"
    if library and not allocator_library(name):
        return f"there is no lib{library} here; apt-get install {PACKAGES[name]}, or choose thp"
    return None


def huge_pages(root: Path = Path("/")) -> str | None:
    """Return the system's setting of huge pages: always, madvise or never; None where not known."""
    with contextlib.suppress(OSError):
        told = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return told.partition("[")[2].partition("]")[0] or None
    return None


def temp_folder() -> Path | None:
    """Return the folder for temporary files, or another one where torch.compile cannot work in that one.

    None where there is no other.
    """
    usual = Path(tempfile.gettempdir())
    if not SPLITS_WORDS.search(str(usual)) and runs_programs(usual):
        return usual
    others = [each for each in (Path("/tmp"), Path("/var/tmp")) if each.is_dir() and runs_programs(each)]
    return next((each for each in others if os.access(each, os.W_OK | os.X_OK)), None)


def runs_programs(folder: Path) -> bool:
    """Whether a library in the folder can be loaded: not where its disk is mounted with noexec."""
    return not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)


def replacement_temp_folder() -> Path | None:
    """Return temp_folder() where it differs from the usual folder for temporary files; else None."""
    folder = temp_folder()
    return None if folder == Path(tempfile.gettempdir()) else folder


SPLITS_WORDS = re.compile(r"[\s'\"\\]")
"""Characters that no path may have in torch.compile's command lines, which do not quote all paths."""


def missing_cxx() -> str | None:
    """Return why $CXX or the system's C++ compiler cannot be used; None if it can."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name):
        return None
    if os.environ.get("CXX"):
        return f"CXX is {name!r}, and there is no such program; set it to a C++ compiler, without options"
    install = "apt-get install g++ (on macOS xcode-select --install)"
    return f"there is no C++ compiler {name} here; {install}, or set CXX"


def missing_compiler() -> str | None:
    """Return why torch.compile cannot make CPU code here (compiler, folders, Python's headers), or None."""
    if missing := missing_cxx():
        return missing
    plain = "a folder without blanks or quotes, on a disk that is not mounted with noexec"
    if temp_folder() is None:
        return f"torch.compile cannot compile in {tempfile.gettempdir()!r}; set TMPDIR to {plain}"
    torch = find_spec("torch")
    if torch and torch.origin and SPLITS_WORDS.search(torch.origin):
        return f"torch.compile cannot compile with {torch.origin!r}; install into {plain}"
    headers = Path(sysconfig.get_path("include"))
    framework = Path(sysconfig.get_path("stdlib")).parent.parent / "Headers"  # of Python on macOS
    if not any((folder / "Python.h").exists() for folder in (headers, framework)):
        install = "apt-get install python3-dev, or take a Python that has them"
        return f"Python's headers are not in {headers}; {install}"
    return None


IDENTITY = {  # keys of /proc/cpuinfo, for x86 CPUs and then for Arm's
    "vendor": "vendor_id",
    "family": "cpu family",
    "model": "model",
    "stepping": "stepping",
    "implementer": "CPU implementer",
    "part": "CPU part",
}


NO_MODEL = r"\d+-Core|version \S+|rev \d+|ARMv\d+|\(v\d\w*\)|\(TM\)\d"
"""Numbers in a CPU's name that are not a model number."""


def named_by(cpuinfo: str) -> str | None:
    """Return a name for the CPU that this /proc/cpuinfo describes; None where it has nothing to identify it.

    Many virtual machines remove the model number from the name, so that generations of different speed are
    all called "AMD EPYC", and Arm CPUs have no name there. Such a CPU is named by its family, model and
    stepping, or Arm's numbers.
    """
    said = _first_processor(cpuinfo)
    name, at, clock = said.get("model name", "").partition("@")
    if re.search(r"\d", re.sub(NO_MODEL, "", name)):
        return said["model name"]
    numbers = " ".join(f"{kind} {value}" for kind, value in identity(cpuinfo).items() if kind != "vendor")
    if not numbers:
        return said.get("model name")
    return f"{name.strip() or platform.machine()} ({numbers})" + (f" {at}{clock}" if at else "")


def identity(cpuinfo: str) -> dict[str, str]:
    """Return vendor, family, model and stepping of the first processor in /proc/cpuinfo, or Arm's numbers."""
    said = _first_processor(cpuinfo)
    return {kind: said[key] for kind, key in IDENTITY.items() if key in said}


def cpuinfo(root: Path = Path("/")) -> str:
    """What Linux says of the processors; empty where the system does not tell."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (root / "proc/cpuinfo").read_text()
    return ""


def clocks_mhz(root: Path = Path("/")) -> list[float]:
    """The clock of each logical processor now; empty where the system does not tell."""
    return [float(each) for each in re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo(root), re.MULTILINE)]


def flags(root: Path = Path("/")) -> frozenset[str]:
    """What the first processor can do, as Linux names it; empty where the system does not tell."""
    said = _first_processor(cpuinfo(root))
    return frozenset(said.get("flags", said.get("Features", "")).split())  # of x86 CPUs, or of ARM's


def _first_processor(cpuinfo: str) -> dict[str, str]:
    first, _, _ = cpuinfo.strip().partition("\n\n")
    return dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*\S)", first, re.MULTILINE))


def total_memory() -> int:
    """Return the bytes of this machine's memory, also where /proc/meminfo cannot be read."""
    try:
        return psutil.virtual_memory().total
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Return the bytes that are available without swapping; without /proc/meminfo those that are unused."""
    try:
        return psutil.virtual_memory().available
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_peak(pid: int | Literal["self"] = "self") -> int | None:
    """Return the most bytes that a process has held (VmHWM); None where the system does not tell."""
    return _memory("VmHWM", pid)


def memory_held(pid: int | Literal["self"] = "self") -> int | None:
    """Return the bytes that a process holds now (VmRSS); None where the system does not tell."""
    return _memory("VmRSS", pid)


def _memory(name: str, pid: int | Literal["self"]) -> int | None:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if found := re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE):
            return int(found[1]) * 1024
    return None


def free_port() -> int:
    """Return a port that nothing listens on now, at any of this machine's addresses."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def loopback_answers() -> bool:
    """Return whether processes of this machine can meet at 127.0.0.1, as its ranks do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError:
        return False
    return True


UNITS = {"float32": ("avx2",), "bfloat16": ("avx512_bf16", "amx_bf16")}
"""Instruction sets of which oneDNN's small matmuls need one, by number format."""


def missing_brgemm(number_format: str) -> str | None:
    """Return why the attention kernel `brgemm` cannot run here in that number format; None if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "torch has small products for x86 CPUs under Linux only; choose blocks"
    if number_format not in UNITS:
        other = "choose sdpa, or set autocast to bfloat16 or float32"
        return f"there is no such kernel for {number_format}; {other}"
    if not flags().intersection(UNITS[number_format]):
        units = " or ".join(UNITS[number_format])
        return f"this CPU has no {units}, which its {number_format} needs; choose blocks"
    return missing_cxx()


CUTE = ("cutlass", "tvm_ffi")
"""What kernels in CuTe DSL are compiled and called by; an installation of parts may lack it."""
LIGER = ("liger_kernel", "triton"), "pip install liger-kernel"
QUACK = ("quack", *CUTE), 'pip install "quack-kernels[cu13]" (on CUDA 12 without [cu13])'
FLASH4 = ("flash_attn.cute", *CUTE), 'pip install "flash-attn-4[cu13]>=4.0.0b30" (on CUDA 12 without [cu13])'
CUT = (
    ("cut_cross_entropy", "triton"),
    'pip install "cut-cross-entropy @ git+https://github.com/apple/ml-cross-entropy"',
)
KERNEL_PACKAGES = {
    ("attention", "flash4"): (*FLASH4, "cudnn"),
    ("cross_entropy", "liger"): (*LIGER, "triton"),
    ("cross_entropy", "quack"): (*QUACK, "triton"),
    ("cross_entropy", "cut"): (*CUT, "linear"),
    ("layer_norm", "liger"): (*LIGER, "torch"),
    ("layer_norm", "quack"): (*QUACK, "torch"),
}
"""Packages of kernels for GPUs by toggle and value: modules to import, how to install, another value."""


def missing_package(toggle: str, value: object) -> str | None:
    """Return why a package that a toggle's value needs cannot be used here, and what to do; or None."""
    if (toggle, value) not in KERNEL_PACKAGES:
        return None
    names, install, other = KERNEL_PACKAGES[toggle, str(value)]
    found = {name: _spec(name) for name in names}
    if absent := [name for name, spec in found.items() if spec is None]:
        return f"its package {absent[0]} is not here; {install}, or choose {other}"
    spec = found[names[0]]
    if value == "cut" and not (spec and spec.origin and Path(spec.origin).with_name("cce_utils.py").exists()):
        # As on PyPI: its gradients are sums of hundreds of parts, rounded to bfloat16 after each.
        return f"this {names[0]} has no exact form; {install}, or choose {other}"
    return None


def _spec(name: str) -> ModuleSpec | None:
    # Looking for a module within a package imports the package, which must be there.
    return find_spec(name) if find_spec(name.split(".")[0]) else None

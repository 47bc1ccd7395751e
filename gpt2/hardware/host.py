"""What this host has that a training may ask for: cores, allocators, compilers, what its CPU calls itself.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
from ctypes.util import find_library
from functools import lru_cache
from pathlib import Path
from typing import Literal

import psutil


def usable_cores() -> int:
    """Physical cores that this process may use."""
    places = os.environ.get(PLACES, "")
    if re.fullmatch(r"\{\d+\}(,\{\d+\})*", places):  # then the system tells only where the first thread stays
        return places.count("{")
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


PLACES = "OMP_PLACES"
"""Where OpenMP's threads stay: {0},{1} are the first two logical processors, each a place of its own."""


def one_cpu_per_core() -> list[int]:
    """The first logical processor of each physical core that this process may use."""
    first: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        first.setdefault(core, cpu)
    return list(first.values())


ALLOCATORS = {"tcmalloc": "tcmalloc_minimal", "jemalloc": "jemalloc"}
"""The libraries' names for the linker."""
PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
"""That install them on Debian and Ubuntu."""


def allocator_library(name: str) -> str | None:
    """File name of an allocator's shared library; None for one without, or where it is not installed."""
    return find_library(ALLOCATORS[name]) if name in ALLOCATORS else None


def missing_allocator(name: str) -> str | None:
    """Why memory cannot come from there here; None where it can."""
    library = ALLOCATORS.get(name)
    if library and sys.platform != "linux":
        return "it is put under torch by LD_PRELOAD, which is Linux's; choose system"
    if library and not allocator_library(name):
        return f"there is no lib{library} here; apt-get install {PACKAGES[name]}, or choose thp"
    return None


def huge_pages(root: Path = Path("/")) -> str | None:
    """Who is given huge pages: always, madvise (who asks) or never; None where the system does not tell."""
    with contextlib.suppress(OSError):
        told = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return told.partition("[")[2].partition("]")[0] or None
    return None


def plain_folder() -> Path | None:
    """The folder for temporary files; another of the system's where torch.compile cannot compile in that one.

    None where there is no other.
    """
    usual = Path(tempfile.gettempdir())
    if not SPLITS_WORDS.search(str(usual)):
        return usual
    others = [Path("/tmp"), Path("/var/tmp")]
    return next((each for each in others if each.is_dir() and os.access(each, os.W_OK | os.X_OK)), None)


def other_folder() -> Path | None:
    """The folder that plain_folder() has in place of the usual one; None where it has that one, or none."""
    folder = plain_folder()
    return None if folder == Path(tempfile.gettempdir()) else folder


SPLITS_WORDS = re.compile(r"[\s'\"\\]")
"""What torch.compile's command lines cannot hold in a path: it does not quote all of them."""


def missing_cxx() -> str | None:
    """Why nothing can be compiled for this CPU, by $CXX or the system's compiler; None where it can."""
    name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name):
        return None
    if os.environ.get("CXX"):
        return f"CXX is {name!r}, and there is no such program; set it to a C++ compiler, without options"
    return f"there is no C++ compiler {name} here; apt-get install g++ (on macOS xcode-select --install), or set CXX"


def missing_compiler() -> str | None:
    """Why torch.compile can make no code for this CPU, which Python's C interface calls; None where it can."""
    if missing := missing_cxx():
        return missing
    if plain_folder() is None:
        where = tempfile.gettempdir()
        return f"torch.compile cannot compile in {where!r}; set TMPDIR to a folder without blanks or quotes"
    torch = importlib.util.find_spec("torch")
    if torch and torch.origin and SPLITS_WORDS.search(torch.origin):
        return f"torch.compile cannot compile with {torch.origin!r}; install into a folder without blanks or quotes"
    headers = Path(sysconfig.get_path("include"))
    framework = Path(sysconfig.get_path("stdlib")).parent.parent / "Headers"  # of macOS's own Pythons
    if not any((folder / "Python.h").exists() for folder in (headers, framework)):
        return f"Python's headers are not in {headers}; apt-get install python3-dev, or take a Python that has them"
    return None


IDENTITY = {  # of x86 CPUs, then of ARM's, by their names in /proc/cpuinfo
    "vendor": "vendor_id",
    "family": "cpu family",
    "model": "model",
    "stepping": "stepping",
    "implementer": "CPU implementer",
    "part": "CPU part",
}


NO_MODEL = r"\d+-Core|version \S+|rev \d+|ARMv\d+|\(v\d\w*\)|\(TM\)\d"
"""Numbers in a CPU's name that are not its model's."""


def named_by(cpuinfo: str) -> str | None:
    """What to call the CPU that Linux describes so in /proc/cpuinfo; None where that holds nothing to tell it by.

    Many virtual machines hide the model's number from the name, so that two generations of unlike speed are both
    called "AMD EPYC", and ARM's CPUs have no name there. Such a one is told by the numbers that it gives itself.
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
    """Vendor, family, model and stepping of the first processor in /proc/cpuinfo, or ARM's numbers, as far as told."""
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
    return dict(re.findall(r"^([^\t:]+?)\s*:[ \t]*(.*\S)", cpuinfo.strip().partition("\n\n")[0], re.MULTILINE))


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """As flags(), of this machine, where they do not change."""
    return flags()


def memory_peak(pid: int | Literal["self"] = "self") -> int | None:
    """Bytes that a process has held at most (VmHWM); None where the system does not tell."""
    return _memory("VmHWM", pid)


def memory_held(pid: int | Literal["self"] = "self") -> int | None:
    """Bytes that a process holds now (VmRSS); None where the system does not tell."""
    return _memory("VmRSS", pid)


def _memory(name: str, pid: int | Literal["self"]) -> int | None:
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def free_port() -> int:
    """A port that nothing listens on now, at any of this machine's addresses."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


UNITS = {"float32": ("avx2",), "bfloat16": ("avx512_bf16", "amx_bf16")}
"""Instruction sets of which oneDNN's small matmuls need one, by number format."""


def missing_brgemm(number_format: str) -> str | None:
    """Why the attention kernel `brgemm` cannot run here in that number format; None where it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "torch has small products for x86 CPUs under Linux only; choose blocks"
    if number_format not in UNITS:
        return f"there is no such kernel for {number_format}; choose sdpa, or set autocast to bfloat16 or float32"
    if not cpu_flags().intersection(UNITS[number_format]):
        return f"this CPU has no {' or '.join(UNITS[number_format])}, which its {number_format} needs; choose blocks"
    return missing_cxx()

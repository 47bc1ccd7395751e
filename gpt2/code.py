"""Which code a number comes from. Imports no torch."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OWN = Path(__file__).resolve().relative_to(ROOT).as_posix()
"""A file that the repository of this project has, and others have not."""


def code_hash() -> str:
    """sha256 over names and contents of the source files of gpt2/ and bench/, in Python and in C++."""
    digest = hashlib.sha256()
    sources = (p for package in ("bench", "gpt2") for p in (ROOT / package).rglob("*") if p.suffix in {".py", ".cpp"})
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def git(folder: Path, *words: str) -> bytes:
    """What git says of the checkout that a folder is in. Raises OSError or subprocess.SubprocessError.

    It may be another user's, as on a shared machine, which git refuses by itself: whoever runs the code that is there
    may well ask what it is.
    """
    trusted = [
        "-c",
        "safe.directory=*",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.hooksPath=/dev/null",
    ]  # runs nothing
    command = ["git", *trusted, "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, timeout=30, check=True).stdout


def git_state() -> tuple[str | None, bool | None]:
    """Commit of this checkout, and whether a tracked file that matters to a run differs from it; None outside git."""
    matters = ("gpt2", "bench", "ladders", "pyproject.toml")
    try:
        git(ROOT, "ls-files", "--error-unmatch", OWN)  # else the repository is somebody else's
        commit = git(ROOT, "rev-parse", "HEAD").decode().strip()
        return commit, bool(git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", *matters).strip())
    except (OSError, subprocess.SubprocessError):
        return None, None

"""Identify the code that a number was measured with. Imports no torch."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THIS_FILE = Path(__file__).resolve().relative_to(ROOT).as_posix()
"""A file of this project's repository only, which tells it from one that merely contains us."""


def code_hash() -> str:
    """Return the sha256 over names and contents of the Python and C++ sources of gpt2/ and bench/."""
    digest = hashlib.sha256()
    files = (path for package in ("bench", "gpt2") for path in (ROOT / package).rglob("*"))
    sources = (path for path in files if path.suffix in {".py", ".cpp"} and not path.name.startswith("."))
    for path in sorted(sources):  # without an editor's hidden links
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def git(folder: Path, *words: str) -> bytes:
    """Run git on the checkout that contains `folder` and return its output.

    Raises OSError or subprocess.SubprocessError. The checkout may belong to another user, as on a shared
    machine, which git refuses by default; reading from it is safe because the options below keep git from
    running anything.
    """
    # The last two keep git from running programs that the checkout configures.
    settings = ("safe.directory=*", "core.fsmonitor=false", "core.hooksPath=/dev/null")
    trusted = [word for setting in settings for word in ("-c", setting)]
    command = ["git", *trusted, "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, timeout=30, check=True).stdout


def git_state() -> tuple[str | None, bool | None]:
    """Return this checkout's commit, and whether files that affect a run are modified; Nones outside git."""
    matters = ("gpt2", "bench", "ladders", "pyproject.toml")
    try:
        git(ROOT, "ls-files", "--error-unmatch", THIS_FILE)  # fails where we are merely contained
        commit = git(ROOT, "rev-parse", "HEAD").decode().strip()
        changed = git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", *matters)
        return commit, bool(changed.strip())
    except (OSError, subprocess.SubprocessError):
        return None, None

"""Which code a number comes from. Imports no torch."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def code_hash() -> str:
    """sha256 over names and contents of the source files of gpt2/ and bench/, in Python and in C++."""
    digest = hashlib.sha256()
    sources = (p for package in ("bench", "gpt2") for p in (ROOT / package).rglob("*") if p.suffix in {".py", ".cpp"})
    for path in sorted(sources):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def git_state() -> tuple[str | None, bool | None]:
    """Commit of this checkout, and whether a tracked file that matters to a run differs from it; None outside git."""

    def git(*arguments: str) -> str:
        # The checkout may be another user's, as on a shared machine: whoever runs its code may well ask what it is.
        command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "bench/environment.py")  # else the repository is somebody else's
        matters = ("gpt2", "bench", "ladders", "pyproject.toml")
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no", "--", *matters))
    except (OSError, subprocess.SubprocessError):
        return None, None

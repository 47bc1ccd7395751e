"""The ladders that come with gpt2-bench, found by their names: `bench run cpu`. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
QUICK = "quick"
"""The ladder of `bench quick`, which is made anew for the machine each time, and so is never resumed."""
FOLDERS = (HERE.parents[1] / "ladders", HERE / "files")
"""Where they lie: in a checkout, or in an installed package, into which setup.py copies them."""


def shipped() -> list[Path]:
    """Return the ladders' files, sorted by name."""
    folder = next((folder for folder in FOLDERS if (folder / "smoke.yaml").exists()), None)
    return sorted(folder.glob("*.yaml")) if folder else []


def published() -> Path | None:
    """Return the folder of figures that others have published; None where it did not come along."""
    folders = (HERE.parents[1] / "results" / "published", HERE / "files" / "published")
    return next((folder for folder in folders if folder.is_dir()), None)


def find(ladder: Path) -> Path:
    """Return the file that is meant: the path as given, or a shipped ladder of that name."""
    if ladder.is_file() or len(ladder.parts) != 1:
        # A process that is given a path that begins with a dash would take it for an option.
        return ladder.absolute() if str(ladder).startswith("-") else ladder
    return next((path for path in shipped() if ladder.name in (path.stem, path.name)), ladder)


def shows(path: Path) -> str:
    """Return what a ladder shows, by the first clause of its comment; empty where it has none."""
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.removeprefix("#").split()
    return re.split(r"[:;.](?: |$)", " ".join(words).removeprefix("Shows "))[0]

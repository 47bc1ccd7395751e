"""Find the data files below a folder, and recognise other kinds of file by their first bytes.

for path in files_below(Path("corpus")): ...
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gpt2.files.cache import DataError

POINTER = b"version https://git-lfs"
"""First bytes of a git LFS pointer, a small text that stands for another file."""
KINDS = {
    b"\x93NUMPY": "a .npy file of numpy",
    b"PK\x03\x04": "a .zip, .npz or torch file",
    b"\x1f\x8b\x08": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"PAR1": "a Parquet file",
    b"\x80\x04\x95": "a pickle",
    b"MMIDIDX": "an index of Megatron",
    POINTER: "a pointer of git LFS in place of the file itself (git lfs pull)",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Kinds of file that are neither plain text nor tokens, by their first bytes; the first that fits counts."""


def kind_of(head: bytes) -> str | None:
    """Return the kind of a file that begins with `head`, or None where it may be text or tokens."""
    return next((kind for begins, kind in KINDS.items() if head.startswith(begins)), None)


def printable(name: str) -> str:
    """Return a file name as valid UTF-8, with other bytes as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def name_problem(path: Path) -> str | None:
    """Return what is wrong where a path is not UTF-8, which safetensors and torch cannot open; else None."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        pass
    else:
        return None
    name = printable(str(path))
    try:
        os.fsencode(path).decode()
    except UnicodeDecodeError:
        return f"the name of {name} is no UTF-8; rename it, or choose another"
    encoding = sys.getfilesystemencoding()
    return f"{name} was read as {encoding}, the encoding of this locale; set PYTHONUTF8=1"


def listed(names: Sequence[str]) -> str:
    """Return a short list of names: all of up to three, else the first, the last and their number."""
    names = [printable(name) for name in names]
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} files)"


def hidden(name: str) -> bool:
    """Return whether a file or folder of this name is never data.

    These names begin with a dot, as the files of editors, notebooks, version control and macOS do, or are
    __MACOSX.
    """
    return name.startswith(".") or name == "__MACOSX"


def files_below(folder: Path) -> list[Path]:
    """Return all files in a folder and its subfolders, sorted by path, without hidden ones.

    Links are followed; a file or folder that can be reached in several ways, hard links included, is listed
    once, under its first path. Raises DataError where a folder cannot be read, or a link is dangling.
    """
    found: list[Path] = []
    seen = set[tuple[int, int]]()
    _first(folder, seen)
    for at, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = [name for name in sorted(folders) if not hidden(name) and _first(Path(at, name), seen)]
        found += [Path(at, name) for name in files if not hidden(name)]
    return [path for path in sorted(found) if is_file(path) and _first(path, seen)]


def files_in(folder: Path) -> list[Path]:
    """Return the files of the folder itself, without subfolders, by the rules of files_below()."""
    seen = set[tuple[int, int]]()
    found = [path for path in sorted(folder.iterdir()) if not hidden(path.name) and is_file(path)]
    files_first = sorted(found, key=Path.is_symlink)  # a file before a link to it
    return sorted(path for path in files_first if _first(path, seen))


def _first(path: Path, seen: set[tuple[int, int]]) -> bool:
    """Whether no path to the same file or folder, by device and inode, was met before."""
    try:
        about = path.stat()
    except OSError as error:
        _refuse(error)
    before = len(seen)
    seen.add((about.st_dev, about.st_ino))
    return len(seen) > before


def is_file(path: Path) -> bool:
    """Return whether a path is a file or a link to one. Raises DataError where a link is dangling."""
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a link to what is not there; remove it, or mend it")
    return path.is_file()


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"cannot read folder {error.filename} ({error.strerror})")

"""What an external rung runs, found and checked, and what its program is given. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.ladder.peers import PEERS, Peer, PeerRung, program_place
from gpt2.config.constraints import check
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.hardware.host import missing_allocator, one_cpu_per_core
from gpt2.provenance import git
from gpt2.training.stages import environment, threads

SHA_DIGITS = 7
"""Digits of a hash in a version; those of an abbreviated commit."""


class MissingPeer(BenchError):
    """A peer that is not here, or not as its rung needs it; the message says how to get it."""


def locate(rung: PeerRung, ladder: Path) -> tuple[Path, list[str]]:
    """Return a peer's folder and the words of its command. Raises MissingPeer. ladder: its file."""
    peer = PEERS[rung.peer]
    text = os.path.expanduser(_expanded(rung.folder, peer, "the folder of its checkout"))
    folder = (ladder.parent / text).resolve()
    if not folder.is_dir():
        variable = next(iter(_variables(rung.folder)), None)
        place = f"set {variable} to its folder" if variable else f"put it into {rung.folder}"
        raise MissingPeer(f"{peer.title} is not in {rung.folder}: {peer.get}, and {place}")
    written = shlex.split(rung.command)
    words = [_expanded(word, peer, "what its command needs") for word in written]
    place = program_place(words)
    program = words[place]
    if program == "python":
        words[place] = sys.executable
        if missing := [name for name in peer.modules if not importlib.util.find_spec(name)]:
            raise MissingPeer(f"{peer.title}: {' and '.join(missing)} not installed: {peer.get}")
    elif not shutil.which(folder / program if "/" in program else program):
        build = "see docs/peers.md on how to build it, or correct the rung's command"
        remedy = peer.get if _variables(written[place]) else build
        raise MissingPeer(f"{peer.title}: {written[place]} is no program on this machine: {remedy}")
    return folder, words


def _expanded(text: str, peer: Peer, what: str) -> str:
    expanded = os.path.expandvars(text)
    for name in _variables(text):
        if not os.environ.get(name):
            raise MissingPeer(f"{peer.title}: set {name} to {what} (docs/peers.md); to get it: {peer.get}")
    return expanded


def _variables(text: str) -> list[str]:
    """Return the names of the environment variables in a text."""
    return re.findall(r"\$\{?([A-Za-z_]\w*)", text)


def locate_and_check(rung: PeerRung, toggles: Toggles, ladder: Path) -> tuple[Path, list[str]]:
    """Do as locate(), and check that the checkout is what the rung needs. Raises MissingPeer."""
    folder, words = locate(rung, ladder)
    try:
        check(toggles)
        if missing := missing_allocator(toggles.allocator):
            raise UnsupportedToggle("allocator", toggles.allocator, missing)
    except UnsupportedToggle as error:
        raise MissingPeer(str(error)) from None
    for name, texts in rung.must_contain.items():
        path, title = folder / name, PEERS[rung.peer].title
        if not path.is_file():
            needed = "this rung needs the checkout that docs/peers.md describes"
            raise MissingPeer(f"{title}: {rung.folder} has no {name}: {needed}")
        content = path.read_text(encoding="utf-8", errors="replace") if texts else ""
        if lacking := next((text for text in texts if text not in content), None):
            what = f"{name} in {rung.folder} lacks {lacking!r}"
            raise MissingPeer(f"{title}: {what}: this rung needs a checkout with the edit of docs/peers.md")
    return folder, words


def why_missing(rung: PeerRung, toggles: Toggles, ladder: Path) -> str | None:
    """Return why a peer's rung is unsupported here; None if it can run."""
    try:
        locate_and_check(rung, toggles, ladder)
    except MissingPeer as error:
        return str(error)
    return None


def origin(peer: Peer, folder: Path, words: Sequence[str]) -> str | None:
    """Return the commit of a peer's checkout, or a hash of its script; None if there is neither."""
    if peer.version is None:
        return commit(folder)
    sha = script(folder, words)
    return f"script {sha}" if sha else None


def commit(folder: Path) -> str | None:
    """Return a checkout's commit, and a hash of edits to tracked files; None if git fails."""
    try:
        number = git(folder, "log", "-1", "--format=%h", f"--abbrev={SHA_DIGITS}").decode().strip()
        plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary")
        edit = git(folder, "diff", *plain, "HEAD", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{number} (edited {_sha(edit)})" if edit else number


def script(folder: Path, words: Sequence[str]) -> str | None:
    """Return a hash of the folder's files that a command names; None if it names none."""
    named = [folder / word for word in words if not os.path.isabs(word) and (folder / word).is_file()]
    return _sha(b"".join(path.read_bytes() for path in named)) if named else None


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SHA_DIGITS]


# --- what its program is given


def peer_variables(toggles: Toggles, peer: Peer, cache: str | None) -> dict[str, str]:
    """Return the variables a peer gets besides the user's. cache: its compiler's folder, or None."""
    plain = {"PYTHONUNBUFFERED": "1", "TERM": "dumb", "NO_COLOR": "1", **peer.variables}
    if peer.cache_variable:
        plain[peer.cache_variable] = cache or ""  # not the user's, which may be warm
    if toggles.device != HOST:  # one GPU; a trainer may take all that it sees
        plain["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**environment(toggles), **plain}


def processors(toggles: Toggles, peer: Peer) -> list[int] | None:
    """Return logical CPUs, one per thread of the rung, for a peer that ignores OMP_NUM_THREADS; else None."""
    if peer.heeds_threads or toggles.device != HOST or not hasattr(os, "sched_getaffinity"):
        return None
    usable, count = os.sched_getaffinity(0), threads(toggles)
    first = one_cpu_per_core()
    return [*first, *sorted(usable.difference(first))][:count] if count < len(usable) else None

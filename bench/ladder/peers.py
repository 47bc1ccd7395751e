"""Other GPT-2 trainers that a ladder can hold its rungs to: how to come by each, and what its log says.

None of their code is here; each is a checkout of the user's, or a script of ours around a library. Imports no
torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from bench.ladder.validation import near
from gpt2.config.workload import STRICT

CANNOT_RUN = 69
"""Exit code by which a peer says that it cannot run here (EX_UNAVAILABLE); its last line says why."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One progress line of a peer's log."""

    at: float
    """When it arrived, by our clock."""
    step: int
    """As the peer numbers them: only differences count."""
    loss: float
    grad_norm: float | None = None
    claimed_seconds: float | None = None
    """Of one step, by the peer's own account."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One trainer, and how its log is read."""

    title: str
    get: str
    """How to come by it."""
    lines: tuple[str, ...]
    """Regular expressions of its progress lines: step and loss, and where it prints them norm and ms."""
    tokens: str | None = None
    """Of the line by which it tells how many tokens a step is of."""
    version: str | None = None
    """Of the line by which it tells its version; None: its checkout's commit."""
    modules: tuple[str, ...] = ()
    """Of Python that it needs beside our own."""
    heeds_threads: bool = True
    """Whether it has as many threads as OMP_NUM_THREADS says; else one for each processor that it may use."""
    memory: str | None = None
    """Of the line by which it tells the most bytes that its allocator has had in use."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, that it is given."""
    cache_variable: str | None = None
    """Of the environment, that names the folder in which its compiler keeps what it has compiled."""
    times_last_step_only: bool = False
    """Whether its own time is of the one step before a line, with no wait for a GPU: where lines are several
    steps apart it tells nothing.
    """

    def read(self, text: str, at: float) -> Line | None:
        """What a line of its log says; None where that is no progress line."""
        for pattern in self.lines:
            if match := re.search(pattern, text):
                found = match.groupdict()
                norm, ms = found.get("norm"), found.get("ms")
                return Line(
                    at=at,
                    step=int(found["step"]),
                    loss=float(found["loss"]),
                    grad_norm=float(norm) if norm else None,
                    claimed_seconds=float(ms) / 1e3 if ms else None,
                )
        return None

    def tokens_of(self, text: str) -> int | None:
        """Per step, where a line of its log says so."""
        match = re.search(self.tokens, text) if self.tokens else None
        return int(match.group(1).replace(",", "")) if match else None

    def version_of(self, text: str) -> str | None:
        """Where a line of its log says so."""
        match = re.search(self.version, text) if self.version else None
        return match.group(1) if match else None

    def memory_of(self, text: str) -> int | None:
        """The most that its allocator has had in use, in bytes, where a line of its log says so."""
        match = re.search(self.memory, text) if self.memory else None
        return int(match.group(1)) if match else None


NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf)"


def _pattern(text: str) -> str:
    """With a number of its name for each (STEP), (LOSS), (NORM) and (MS), and one without a name for each #."""
    text = text.replace("(STEP)", r"(?P<step>\d+)").replace("#", NUMBER)
    for name in ("loss", "norm", "ms"):
        text = text.replace(f"({name.upper()})", f"(?P<{name}>{NUMBER})")
    return f"^{text}"


def _plain(title: str, get: str, **others: Any) -> Peer:
    """One that prints as the scripts in ladders/peers do, and as any trainer may."""
    return Peer(
        title=title,
        get=get,
        lines=(_pattern(r"step (STEP): loss (LOSS)"),),
        tokens=r"^tokens per step (\d+)$",
        version=r"^version (.+)$",
        memory=r"^peak bytes (\d+)$",
        **others,
    )


DESIRED = r"^total desired batch size: (\d+)"

PEERS: dict[str, Peer] = {
    "nanogpt": Peer(
        title="nanoGPT",
        get="git clone https://github.com/karpathy/nanoGPT",
        lines=(_pattern(r"iter (STEP): loss (LOSS), time (MS)ms"),),
        tokens=r"^tokens per iteration will be: ([\d,]+)",
        times_last_step_only=True,
    ),
    "llmc": Peer(
        title="llm.c",
        get="git clone https://github.com/karpathy/llm.c",
        lines=(
            _pattern(r"step (STEP): train loss (LOSS) \(took (MS) ms\)"),  # train_gpt2.c
            _pattern(r"step +(STEP)/\d+ \| loss +(LOSS) .*\| norm +(NORM) .*\| (MS) ms \|"),  # train_gpt2.cu
        ),
        tokens=r"^\| total batch size +\| (\d+)",
    ),
    "build-nanogpt": Peer(
        title="build-nanogpt",
        get="git clone https://github.com/karpathy/build-nanogpt",
        lines=(_pattern(r"step +(STEP) \| loss: (LOSS) \|.* norm: (NORM) \| dt: (MS)ms \|"),),
        tokens=DESIRED,
    ),
    "gollem": Peer(
        title="gollem",
        get="git clone https://github.com/Jjschwartz/gollem",
        lines=(_pattern(r"Step (STEP): train_loss: (LOSS), norm: (NORM), .*time_per_step: (MS)$"),),
        tokens=DESIRED,
    ),
    "transformers": _plain(
        "transformers.Trainer", "pip install transformers accelerate", modules=("transformers", "accelerate")
    ),
    "own": _plain("own trainer", "only you can tell"),
    "jax": _plain(
        "JAX",
        "python -m venv VENV, VENV/bin/pip install jax, and set JAX_PYTHON to VENV/bin/python",
        heeds_threads=False,
        variables={
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
        },  # else it takes three quarters of a GPU at its start
        cache_variable="JAX_COMPILATION_CACHE_DIR",
    ),
}


@dataclass(frozen=True, kw_only=True)
class PeerRung:
    """What a ladder says of an external rung."""

    __pydantic_config__: ClassVar = STRICT

    peer: str
    """A key of PEERS."""
    command: str
    """Started in the folder, by no shell; `python` is the interpreter that bench runs on."""
    tokens_per_step: int
    """Tokens per optimiser step that the command makes it take: the author of the ladder vouches for it."""
    model: str
    """Whose shape the command trains: the ladder's, or the ladder is refused."""
    seq_len: int
    """Tokens per sequence that it trains: likewise."""
    folder: str
    """The user's checkout, by a variable such as $NANOGPT; or a folder beside the ladder."""
    allocator: Literal["system", "tcmalloc", "jemalloc"] = "system"
    """On a CPU, where its memory comes from: by the environment variables of our toggle."""
    must_contain: dict[str, list[str]] = field(default_factory=dict)
    """By file of the folder, which must be there: texts without which the command would train something else.
    """

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise ValueError(f"peer {self.peer!r} is not known{near(self.peer, list(PEERS))}")
        if self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step {self.tokens_per_step} is less than 1")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command {self.command!r} cannot be split into words: {error}") from None
        if program_place(words) >= len(words):
            raise ValueError(f"command {self.command!r} names no program")


def program_place(words: list[str]) -> int:
    """Where in a command the program stands: behind `env` and its assignments."""
    place = 0
    if words[:1] == ["env"]:
        place = 1
        while place < len(words) and "=" in words[place]:
            place += 1
    return place

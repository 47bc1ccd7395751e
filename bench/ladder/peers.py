"""Other GPT-2 trainers with which a ladder can compare its rungs, and the formats of their logs.

Their code is not here: each is a checkout of the user's, or a script of ours around a library.
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
"""Exit code of a peer that cannot run on this machine (EX_UNAVAILABLE); its last line says why."""


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One progress line of a peer's log."""

    at: float
    """Time of arrival, by time.perf_counter()."""
    step: int
    """Number of the step by the peer; only differences count."""
    loss: float
    grad_norm: float | None = None
    claimed_seconds: float | None = None
    """Duration of one step by the peer's own account."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One trainer, and the format of its log."""

    title: str
    get: str
    """How to get it, as the end of a message."""
    lines: tuple[str, ...]
    """Regular expressions of its progress lines, with groups step, loss and, where printed, norm and ms."""
    tokens: str | None = None
    """Regular expression of the line that gives tokens per step."""
    version: str | None = None
    """Regular expression of the line that gives its version; None to take its checkout's commit."""
    modules: tuple[str, ...] = ()
    """Python modules that it needs besides ours."""
    heeds_threads: bool = True
    """Whether it uses OMP_NUM_THREADS; else it starts a thread for each processor that it may use."""
    memory: str | None = None
    """Regular expression of the line that gives the peak bytes of its allocator."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it is given."""
    cache_variable: str | None = None
    """Environment variable that names the folder of its compiled code."""
    times_last_step_only: bool = False
    """Whether its own time covers only the last step before a line, without waiting for a GPU."""

    def read(self, text: str, at: float) -> LogLine | None:
        """Parse a line of its log; None if it is no progress line."""
        for pattern in self.lines:
            if match := re.search(pattern, text):
                groups = match.groupdict()
                norm, ms = groups.get("norm"), groups.get("ms")
                return LogLine(
                    at=at,
                    step=int(groups["step"]),
                    loss=float(groups["loss"]),
                    grad_norm=float(norm) if norm else None,
                    claimed_seconds=float(ms) / 1e3 if ms else None,
                )
        return None

    def tokens_of(self, text: str) -> int | None:
        """Return the tokens per step that a line of its log gives; else None."""
        tokens = _first_group(self.tokens, text)
        return int(tokens.replace(",", "")) if tokens else None

    def version_of(self, text: str) -> str | None:
        """Return the version that a line of its log gives; else None."""
        return _first_group(self.version, text)

    def memory_of(self, text: str) -> int | None:
        """Return the peak bytes of its allocator that a line of its log gives; else None."""
        peak = _first_group(self.memory, text)
        return int(peak) if peak else None


def _first_group(pattern: str | None, text: str) -> str | None:
    match = re.search(pattern, text) if pattern else None
    return match.group(1) if match else None


NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf)(?!\d|\.\d|,\d)(?<!\.)"
"""A number, without the full stop of a sentence; 3,0 and 1.2.3 are none, of which a part would be taken."""


def _pattern(text: str) -> str:
    """Make a regular expression: (STEP), (LOSS), (NORM) and (MS) are named numbers, # an unnamed one."""
    text = text.replace("(STEP)", r"(?P<step>\d{1,12})(?!\d)").replace("#", NUMBER)
    for name in ("loss", "norm", "ms"):
        text = text.replace(f"({name.upper()})", f"(?P<{name}>{NUMBER})")
    return f"^{text}"


def _plain(title: str, get: str, **others: Any) -> Peer:
    """Return a peer with the log format of the scripts in ladders/peers."""
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
    "own": _plain("own trainer", "see its own documentation"),
    "jax": _plain(
        "JAX",
        "python -m venv VENV, VENV/bin/pip install jax, and set JAX_PYTHON to VENV/bin/python",
        heeds_threads=False,
        variables={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},  # by default it takes most of a GPU at once
        cache_variable="JAX_COMPILATION_CACHE_DIR",
    ),
}


@dataclass(frozen=True, kw_only=True)
class PeerRung:
    """The `external` key of a ladder's rung."""

    __pydantic_config__: ClassVar = STRICT

    peer: str
    """A key of PEERS."""
    command: str
    """Command, started in the folder without a shell; `python` is the interpreter of bench."""
    tokens_per_step: int
    """Tokens per optimiser step of the command, as the ladder's author declares."""
    model: str
    """Model that the command trains; it must be the workload's."""
    seq_len: int
    """Tokens per sequence that the command trains; they must be the workload's."""
    folder: str
    """Folder of the checkout: a variable such as $NANOGPT, or a path relative to the ladder."""
    allocator: Literal["system", "tcmalloc", "jemalloc"] = "system"
    """Memory allocator on a CPU, set by the same environment variables as our toggle."""
    must_contain: dict[str, list[str]] = field(default_factory=dict)
    """By file that must be in the folder, texts that it must contain for the command to train as declared."""

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise ValueError(f"peer {self.peer!r} is not known{near(self.peer, list(PEERS))}")
        if self.tokens_per_step < 1:
            raise ValueError(f"tokens_per_step {self.tokens_per_step} is less than 1")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"command {self.command!r} cannot be split into words: {error}") from None
        place = program_place(words)
        if place >= len(words) or not words[place]:
            raise ValueError(f"command {self.command!r} names no program")


def program_place(words: list[str]) -> int:
    """Return the index of the program in a command, after `env` and its assignments."""
    place = 0
    if words[:1] == ["env"]:
        place = 1
        while place < len(words) and "=" in words[place]:
            place += 1
    return place

"""Commands of a run's processes, which a reader of a record can paste. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder, Rung, load
from bench.records.record import RUNGS
from bench.run.nodes.topology import Part, Place
from gpt2.config.toggles import Toggles
from gpt2.training.stages import model_config


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `bench run` besides the ladder."""

    out: Path = Path("results")
    data: Path | None = None
    rungs: tuple[str, ...] = ()
    """Names of the rungs to run; empty for all."""
    overrides: tuple[str, ...] = ()
    """Values of --set, which workers need again."""
    ablate: bool = False
    """Whether to also measure each rung's changes alone and left out."""
    resume: bool = False
    """Whether to go on with the newest results file of this ladder."""
    peak_tflops: float | None = None
    price_per_hour: float | None = None
    compile_cache: Path | None = None
    """Folder that keeps compiled code after the run; None to drop it."""
    minutes: float | None = None
    """Time for the run, into which its rounds are fitted; None for as many as the ladder asks for."""
    patience: float = 1.25
    """The first LEAST_ROUNDS rounds, which an interval needs, may take so many times `minutes`."""
    however_long: bool = False
    """Whether one round is run even where it takes far longer than `minutes`."""
    place: Place | None = None
    """Place among several nodes; None if there is one."""

    @property
    def rounds_given(self) -> bool:
        """Whether the user has said how many rounds there are to be, or how narrow their intervals."""
        return any(each.startswith(("protocol.repeats=", "protocol.until=")) for each in self.overrides)


def worker_command(ladder: Ladder, task: Task, options: Options, part: Part | None = None) -> list[str]:
    """Return the interpreter's arguments for measuring a rung, without --out. part: over several nodes."""
    toggles = task.rung.toggles
    command = ["-m", "bench.worker", str(ladder.path), task.rung.base or task.rung.name]
    kind = "sweep" if task.rung.base else task.kind
    if kind not in ("cumulative", "control"):
        command += ["--kind", kind]
    if kind == "sweep" and task.kind == "parity":
        command.append("--losses")
    if toggles.processes > 1:
        alone = ["--standalone", "--nproc-per-node", str(toggles.processes)]
        ranks = part.arguments(toggles.processes) if part else alone
        command = ["-m", "torch.distributed.run", *ranks, *command]
    if options.data:
        command += ["--data", path_word(options.data)]
    overrides = list(options.overrides)
    if task.repetition == 1 and task.kind != "control" and _has_other_gradients(ladder, toggles):
        command.append("--gradients")
    if (task.repetition > 1 or task.kind not in RUNGS) and ladder.protocol.loss_steps:
        overrides.append("protocol.loss_steps=0")  # the losses are the same in every round
    command += ladder_words(ladder, task.rung, overrides)
    if task.stop_below is not None:
        command += ["--stop-below", f"{task.stop_below:.6g}"]
    if options.peak_tflops is not None:
        command += ["--peak-tflops", str(options.peak_tflops)]
    return [*command, "--proofs", task.proofs]


def path_word(path: Path) -> str:
    """Return a path as a word that no parser takes for an option, though pathlib has dropped its ./"""
    return f"./{path}" if str(path).startswith("-") else str(path)


def ladder_words(ladder: Ladder, rung: Rung, overrides: Iterable[str]) -> list[str]:
    """Arguments for loaded() that make of a ladder's file what it is here for one of its rungs."""
    words = [word for override in overrides for word in ("--set", override)]
    words += [word for setting in rung.settings for word in ("--own", setting)]
    for other in ladder.rungs:  # those above it, whose changes it may keep, and for --kind the whole ladder's
        if not other.base and other.name != rung.name:
            words += [word for setting in other.settings for word in ("--for", other.name, setting)]
    return words + [word for name in rung.without for word in ("--without", name)]


def add_outcome_argument(parser: argparse.ArgumentParser) -> None:
    """Have a process take the file that its outcome is written to."""

    def file(text: str) -> Path:
        path = Path(text)
        if path.exists() and not path.is_file():  # a device would be replaced by the file
            raise argparse.ArgumentTypeError(f"{text} is no file; name one")
        if not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{path.absolute().parent} is no folder; name a file in one")
        return path

    parser.add_argument("--out", type=file, required=True, help="file to write the outcome to")


def add_ladder_arguments(parser: argparse.ArgumentParser) -> None:
    """Have a process take a ladder, one of its rungs, and what ladder_words() returns."""
    changes = {"action": "append", "default": []}
    parser.add_argument("ladder", type=Path)
    parser.add_argument("rung", help="its name")
    parser.add_argument("--copy", type=Path, metavar="FILE", help="read the ladder from this copy of it")
    parser.add_argument("--set", metavar="PATH=VALUE", help="as for bench run", **changes)
    parser.add_argument("--own", metavar="PATH=VALUE", help="--set for this rung alone", **changes)
    parser.add_argument(
        "--for", nargs=2, metavar=("RUNG", "PATH=VALUE"), help="--set for that rung", **changes
    )
    parser.add_argument(
        "--without", metavar="RUNG", help="a rung above, whose changes are not kept", **changes
    )


def loaded(arguments: argparse.Namespace, *, upto: str | None = None) -> Ladder:
    """Load the ladder of add_ladder_arguments(). upto: name of its last rung. Raises LadderError."""
    own: dict[str, list[str]] = {arguments.rung: arguments.own}
    for other, setting in vars(arguments)["for"]:
        own.setdefault(other, []).append(setting)
    ladder = load(arguments.ladder, arguments.set, own, copy=arguments.copy)
    return ladder.carrying(without=arguments.without, upto=upto) if arguments.without or upto else ladder


def _has_other_gradients(ladder: Ladder, toggles: Toggles) -> bool:
    """Whether a rung has code whose gradients could differ from those of torch's eager code."""
    config = model_config(toggles, ladder.workload.config)
    return toggles.compile != "eager" or config != config.plain


def external_command(ladder: Ladder, task: Task, options: Options) -> list[str]:
    """Return the interpreter's arguments for timing an external rung, without --out."""
    words = ladder_words(ladder, task.rung, options.overrides)
    return ["-m", "bench.external", str(ladder.path), task.rung.name, *words]


MOST_TOKENS = 16384
"""Most rows of a matmul: more are no faster, and lm_head's output takes 3.3 GB of float32 at these."""


def ceiling_command(ladder: Ladder, device: str) -> list[str]:
    """Return the interpreter's arguments for measuring a device's ceiling, without --out."""
    T = ladder.workload.seq_len
    sizes = [rung.toggles.micro_batch_size for rung in ladder.rungs if rung.toggles.device == device]
    tokens = min(max(sizes, default=1) * T, max(MOST_TOKENS, T))
    return [
        *("-m", "bench.ceiling", "--device", device, "--model", ladder.workload.model),
        *("--tokens", str(tokens), "--seconds", f"{ladder.protocol.ceiling_seconds:g}"),
    ]


TORCHRUNS_HOST = re.compile(r"^(\s*host\s*: ).*$", re.MULTILINE)
"""Host in torchrun's report of a failure."""


def anonymous(text: str, *, command: bool = False) -> str:
    """Replace this host's name and the user's folders, because results are shared.

    command: whether it is a command, which names no host, and of which no word may be taken for one.
    """
    text = TORCHRUNS_HOST.sub(r"\1HOST", text)
    host = socket.gethostname()
    if host not in ("", "localhost") and not command:
        text = re.sub(rf"\b{re.escape(host)}\b", "HOST", text)
    for folder, name in ((str(Path.cwd()), "."), (os.path.expanduser("~"), "~")):
        text = text.replace(folder, name) if len(folder) > 1 else text
    return text

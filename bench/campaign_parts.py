"""Parts of a campaign by kind of device, the most valuable first. Imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.hardware.host import SPLITS_WORDS

ROOT = Path(__file__).resolve().parent.parent
"""Folder of the project, in which the commands run."""
BENCH = (sys.executable, "-m", "bench.cli")
TRAIN = (sys.executable, "-m", "gpt2.cli", "train")
CUDA_TESTS = "tests/gpt2/device/test_on_cuda.py"
COMPILED = "compiled"
"""Subfolder of a campaign for compiled code, so that resuming does not compile again."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command and its time limits."""

    name: str
    """Name, also of its log and of its folder."""
    command: Sequence[str]
    minutes: float
    """Time limit, at most what is left of the campaign's."""
    least: float = 0.0
    """Fewest minutes for which it is started."""
    result: str | None = None
    """Pattern of its results in the campaign's folder; without them it is not done."""
    go_on: Sequence[str] = ()
    """Added to the command if there are results already."""
    killed_at: str | None = None
    """Pattern of a file at which it is killed on purpose, as by a machine that goes away."""
    missing: str | None = None
    """Why it cannot run on this machine; None if it can."""
    is_ladder: bool = False
    """Whether its results are records of rungs."""


def cuda(out: Path, data: str | None) -> list[Part]:
    """Return the parts for one GPU of 80 GB."""
    plain = not SPLITS_WORDS.search(str(out))  # else torch.compile could not compile there
    options = (*_corpus(data), *(("--compile-cache", str(out / COMPILED)) if plain else ()))
    sizes = {"medium": 32, "large": 16, "xl": 8}  # sequences that fit
    settings = (
        *("workload.data=synthetic", "workload.tokens_per_step=65536", "steps=300"),
        *("workload.lr_warmup_steps=30", "workload.lr_decay_steps=300", "toggles.compile_region=block"),
        *("checkpoints.every=100", "checkpoints.keep=1"),
        *("evaluation.val_every=100", "evaluation.val_tokens=1048576"),
        *("evaluation.hellaswag_every=0", "evaluation.sample_every=0"),
    )
    train = ("gpt2-tinystories-gpu", *_sets(*settings))
    return [
        _doctor(out),
        _cuda_tests("env", "REQUIRE_CUDA=1"),
        _ladder("65k", "gpu-65k", 16.0, 3.0, out, *options),
        _roofline("gpu-65k", out, "--device", "cuda"),
        _ladder("batch-1", "gpu-batch-1", 5.0, 2.0, out, *options),
        *(
            _ladder(
                *(size, "gpu-sizes", 3.0, 1.5, out, *options, "--set", f"workload.model=gpt2-{size}"),
                *("--set", f"toggles.micro_batch_size={sequences}"),
            )
            for size, sequences in sizes.items()
        ),
        *_training(3.0, 1.5, out, *train),
    ]


def cpu(out: Path, data: str | None) -> list[Part]:
    """Return the same parts with tiny models, to rehearse them on a CPU in minutes."""
    short = (*_sets("protocol.max_window_seconds=1", "protocol.blocks=5"), *_corpus(data))
    tiny = ("workload.model=tiny", "workload.seq_len=128", "workload.data=synthetic")
    sets = _sets(*tiny, "toggles.device=cpu", "toggles.attention=sdpa")
    return [
        _doctor(out),
        _cuda_tests(),
        _ladder("65k", "smoke", 4.0, 0.5, out, "--rungs", "baseline,SDPA", "--repeats", "2", *short),
        _roofline("smoke", out, "--seconds", "0.03"),
        _ladder("batch-1", "smoke", 3.0, 0.2, out, "--rungs", "baseline,bfloat16", "--repeats", "1", *short),
        _ladder("medium", "gpu-sizes", 3.0, 0.2, out, *sets, *short),
        *_training(4.0, 0.2, out, "tiny"),
    ]


KINDS: dict[str, Callable[[Path, str | None], list[Part]]] = {"cuda": cuda, "cpu": cpu}
"""By device, a function of folder and corpus (None for each ladder's own) that returns the parts."""


def report(out: Path) -> Part:
    """Return the part that makes tables, page and plots of all results so far."""
    written = ("--html", "--plots", "--out", str(out / "report"))
    missing = None if any(out.glob("results/*/*/*.jsonl")) else "no part has left results"
    command = [*BENCH, "report", str(out / "results"), *written]
    return Part(name="report", command=command, minutes=3.0, missing=missing)


def _sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def _corpus(data: str | None) -> tuple[str, ...]:
    if data is None:
        return ()
    if data == "synthetic":
        return ("--set", "workload.data=synthetic")
    return ("--data", str(Path(data).resolve()))


def _doctor(out: Path) -> Part:
    return Part(name="doctor", command=[*BENCH, "doctor", "--out", str(out)], minutes=2.0)


def _cuda_tests(*before: str) -> Part:
    """Return the part that runs the CUDA tests. before: prefix of the command."""
    missing = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    if not (ROOT / CUDA_TESTS).is_file():
        missing = f"there is no {CUDA_TESTS}"
    # Without the options of pyproject.toml, whose plugins may be missing.
    options = ["-o", "addopts=--import-mode importlib", "-q", "-rfEs", "-p", "no:cacheprovider", "-m", "cuda"]
    if importlib.util.find_spec("xdist"):  # most of their time is compilation
        options += ["--numprocesses", "4", "--dist", "loadgroup"]
    command = [*before, sys.executable, "-m", "pytest", *options, CUDA_TESTS]
    return Part(name="tests", command=command, minutes=4.0, least=0.5, missing=missing)


def _ladder(name: str, ladder: str, minutes: float, least: float, out: Path, *options: str) -> Part:
    """Return the part that runs a ladder, in a folder of its own, because --resume ignores the model."""
    results = f"results/{name}"
    return Part(
        name=name,
        command=[*BENCH, "run", f"ladders/{ladder}.yaml", "--out", str(out / results), *options],
        minutes=minutes,
        least=least,
        result=f"{results}/*/*.jsonl",
        go_on=("--resume",),
        is_ladder=True,
    )


def _roofline(ladder: str, out: Path, *options: str) -> Part:
    """Return the part that measures the ceiling and compares it with the rungs of part `65k`."""
    results = ("--results", str(out / "results" / "65k"), "--out", str(out / "results" / "roofline"))
    command = [*BENCH, "roofline", f"ladders/{ladder}.yaml", *results, *options]
    return Part(name="roofline", command=command, minutes=2.0, least=0.5, result="results/roofline/*/*.jsonl")


def _training(minutes: float, least: float, out: Path, *options: str) -> list[Part]:
    """Return a training run that is killed at its first checkpoint, and one that resumes it."""
    # --resume starts anew where there is no checkpoint.
    command = [*TRAIN, *options, "--out", str(out / "training"), "--resume"]
    pattern = "training/checkpoints/step-*/checkpoint.json"
    killed, resumed = (
        Part(name=name, command=command, minutes=minutes, least=least, result=pattern)
        for name in ("training-killed", "training-resumed")
    )
    return [replace(killed, killed_at=pattern), resumed]

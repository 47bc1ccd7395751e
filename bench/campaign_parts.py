"""The parts of a campaign on each kind of device, ordered by what they are worth. Imports no torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpt2.hardware.host import SPLITS_WORDS

ROOT = Path(__file__).resolve().parent.parent
"""Of the project: where the commands are run."""
BENCH = (sys.executable, "-m", "bench.cli")
TRAIN = (sys.executable, "-m", "gpt2.cli", "train")
CUDA_TESTS = "tests/test_on_cuda.py"
COMPILED = "compiled"
"""Folder of a campaign that keeps compiled code, so that a ladder which goes on need not compile again."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command, and how long it may take."""

    name: str
    """That of its log and of its folder, too."""
    command: Sequence[str]
    minutes: float
    """Limit; less where less is left of all minutes."""
    least: float = 0.0
    """Minutes below which it is not worth beginning."""
    result: str | None = None
    """What it leaves, as a pattern below the campaign's folder: without that it is not done."""
    go_on: Sequence[str] = ()
    """Added to the command where there is such a result already."""
    killed_at: str | None = None
    """Killed without warning, as by a machine that goes away, once such a file is there; that is its aim."""
    missing: str | None = None
    """Why it cannot be run here."""
    is_ladder: bool = False
    """Whether its results are records of rungs."""


def cuda(out: Path, data: str | None) -> list[Part]:
    """For one GPU of 80 GB."""
    plain = not SPLITS_WORDS.search(str(out))  # else torch.compile could not compile there
    options = (*_corpus(data), *(("--compile-cache", str(out / COMPILED)) if plain else ()))
    sizes = {"medium": 32, "large": 16, "xl": 8}  # sequences that fit
    train = (
        *(
            "gpt2-tinystories-gpu",
            "--set",
            "workload.data=synthetic",
            "--set",
            "workload.tokens_per_step=65536",
        ),
        *(
            "--set",
            "steps=300",
            "--set",
            "workload.lr_warmup_steps=30",
            "--set",
            "workload.lr_decay_steps=300",
        ),
        *(
            "--set",
            "toggles.compile_region=block",
            "--set",
            "checkpoints.every=100",
            "--set",
            "checkpoints.keep=1",
        ),
        *("--set", "evaluation.val_every=100", "--set", "evaluation.val_tokens=1048576"),
        *("--set", "evaluation.hellaswag_every=0", "--set", "evaluation.sample_every=0"),
    )
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
    """A rehearsal of the same by tiny models: whether everything works, in some minutes."""
    short = ("--set", "protocol.max_window_seconds=1", "--set", "protocol.blocks=5", *_corpus(data))
    size = ("workload.model=tiny", "workload.seq_len=128", "workload.data=synthetic", "toggles.device=cpu")
    sets = [part for each in (*size, "toggles.attention=sdpa") for part in ("--set", each)]
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
"""By device, the parts for a campaign into a folder on a corpus, None for that of each ladder."""


def report(out: Path) -> Part:
    """Tables, page and pictures of all results so far."""
    written = ("--html", "--plots", "--out", str(out / "report"))
    missing = None if any(out.glob("results/*/*/*.jsonl")) else "no part has left results"
    command = [*BENCH, "report", str(out / "results"), *written]
    return Part(name="report", command=command, minutes=3.0, missing=missing)


def _corpus(data: str | None) -> tuple[str, ...]:
    if data is None:
        return ()
    return (
        ("--set", "workload.data=synthetic") if data == "synthetic" else ("--data", str(Path(data).resolve()))
    )


def _doctor(out: Path) -> Part:
    return Part(name="doctor", command=[*BENCH, "doctor", "--out", str(out)], minutes=2.0)


def _cuda_tests(*before: str) -> Part:
    """before: what stands before the command."""
    missing = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    if not (ROOT / CUDA_TESTS).is_file():
        missing = f"there is no {CUDA_TESTS}"
    # Without the options of pyproject.toml, which are those of plugins that need not be here.
    options = ["-o", "addopts=", "-q", "-rfEs", "-p", "no:cacheprovider", "-m", "cuda"]
    if importlib.util.find_spec("xdist"):  # most of their time is compilation
        options += ["--numprocesses", "4", "--dist", "loadgroup"]
    command = [*before, sys.executable, "-m", "pytest", *options, CUDA_TESTS]
    return Part(name="tests", command=command, minutes=4.0, least=0.5, missing=missing)


def _ladder(name: str, ladder: str, minutes: float, least: float, out: Path, *options: str) -> Part:
    """One of ladders/, into a folder of its own: --resume takes the newest results of a ladder, whatever its
    model.
    """
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
    """What no rung can beat, and how near to it those of the part `65k` came."""
    results = ("--results", str(out / "results" / "65k"), "--out", str(out / "results" / "roofline"))
    command = [*BENCH, "roofline", f"ladders/{ladder}.yaml", *results, *options]
    return Part(name="roofline", command=command, minutes=2.0, least=0.5, result="results/roofline/*/*.jsonl")


def _training(minutes: float, least: float, out: Path, *options: str) -> list[Part]:
    """A training run that is killed at its first checkpoint, and what becomes of it after that."""
    # --resume begins anew where there is no checkpoint to go on with.
    command = [*TRAIN, *options, "--out", str(out / "training"), "--resume"]
    pattern = "training/checkpoints/step-*/checkpoint.json"
    killed, resumed = (
        Part(name=name, command=command, minutes=minutes, least=least, result=pattern)
        for name in ("training-killed", "training-resumed")
    )
    return [replace(killed, killed_at=pattern), resumed]

"""Measure one rung in this process and write the Outcome to a file.

Run by bench.runner in a fresh process per repetition; alone too, under torchrun where the rung has several ranks:
    python -m bench.worker ladders/smoke.yaml baseline --out m.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench.ladder import Ladder, LadderError, Rung, load
from bench.record import Outcome
from gpt2 import peaks
from gpt2.data import Batches, DataError, open_corpus
from gpt2.toggles import Toggles, UnsupportedToggle, environment, resolved
from gpt2.workload import FLOPS_FORMULA

if TYPE_CHECKING:  # torch is loaded only once the environment is right
    from bench.measure import Window
    from gpt2.device import Device


def main() -> int:
    """Returns 0 when the rung was measured, 1 when it could not be, 2 when the ladder is wrong."""
    arguments = _arguments()
    try:
        ladder = load(arguments.ladder, arguments.set)
        rung = ladder.rung(arguments.rung)
    except LadderError as error:
        print(error, file=sys.stderr)
        return 2
    _enter_environment(rung.toggles)
    if os.environ.get("RANK", "0") == "0":
        arguments.out.unlink(missing_ok=True)  # of an earlier run
    outcome = _run(ladder, rung, arguments)
    if outcome:
        if outcome.error:
            print(outcome.error, file=sys.stderr)
        _write_first(arguments.out, outcome)
    return 0 if outcome is None or outcome.status == "ok" else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.worker", description="Measure one rung of a ladder.")
    parser.add_argument("ladder", type=Path)
    parser.add_argument("rung", help="its name")
    parser.add_argument("--out", type=Path, required=True, help="file to write the outcome to")
    parser.add_argument("--data", type=Path, help="where the ladder's corpus lies")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="as for bench run")
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of one device, if not known")
    return parser.parse_args()


def _enter_environment(toggles: Toggles) -> None:
    """Start this interpreter anew where variables that must come before it are missing."""
    wanted = environment(toggles)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", "bench.worker", *sys.argv[1:]], {**os.environ, **wanted})


def _write_first(out: Path, outcome: Outcome) -> None:
    """Write the file whole, unless another rank has already said how it ended: the first failure is the cause."""
    with tempfile.NamedTemporaryFile("w", dir=out.parent, suffix=".part", encoding="utf-8") as file:
        file.write(outcome.model_dump_json())
        file.flush()
        if not out.exists():
            os.link(file.name, out)


def _run(ladder: Ladder, rung: Rung, arguments: argparse.Namespace) -> Outcome | None:
    """Measure; None on the ranks that leave the telling to rank 0."""
    from gpt2.device import find, process_group

    try:
        device = find(rung.toggles)
    except UnsupportedToggle as error:
        return Outcome(status="unsupported", error=str(error))
    try:
        with process_group(rung.toggles, device) as rank:
            return _measure(ladder, rung, device, rank, arguments)
    except DataError as error:
        return Outcome(status="failed", error=str(error))
    except Exception as error:
        if device.is_out_of_memory(error):
            return Outcome(status="out_of_memory", error=str(error).strip().splitlines()[0])
        traceback.print_exc()
        return Outcome(status="failed", error=f"{type(error).__name__}: {error}".strip())


def _measure(ladder: Ladder, rung: Rung, device: Device, rank: int, arguments: argparse.Namespace) -> Outcome | None:
    from bench.environment import describe
    from bench.measure import Waiting, combine, measure
    from gpt2.train import micro_batches, train

    workload, toggles = ladder.workload, rung.toggles
    machine = describe(device)
    corpus = open_corpus(workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=arguments.data)
    tokens_per_step = toggles.tokens_per_step(workload.seq_len)
    batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens_per_step, seed=workload.seed)
    data = Waiting(micro_batches(batches, toggles, rank=rank))
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    compile_cache = "warm" if cache and Path(cache).is_dir() and any(Path(cache).iterdir()) else "cold"
    steps = train(workload, toggles, device, data)
    startup_seconds = time.time() - psutil.Process().create_time()
    progress = _Progress(arguments.out) if rank == 0 else None
    window = measure(
        steps, device, ladder.protocol, data, agree=_agreement(toggles.world_size, device), progress=progress
    )
    windows = _gather(window, toggles.world_size)
    if rank != 0:
        return None
    peak, source = _peak_flops(machine.chip, arguments.peak_tflops)
    measurement = combine(
        windows,
        tokens_per_step=tokens_per_step,
        startup_seconds=startup_seconds,
        compile_cache=compile_cache if device.compilations() else None,
        parameters=workload.config.parameters,
        flops_per_token=workload.flops_per_token,
        flops_formula=FLOPS_FORMULA,
        peak_flops_bf16=peak,
        peak_flops_source=source,
    )
    return Outcome(
        status="ok",
        environment=machine,
        measurement=measurement,
        data_sha256=corpus.sha256,
        resolved=resolved(toggles, workload),
        warnings=list(batches.warnings),
    )


def _agreement(world_size: int, device: Device) -> Callable[[float], float]:
    """The largest of the ranks' values, on every rank."""
    if world_size == 1:
        return lambda value: value
    import torch

    def largest(value: float) -> float:
        shared = torch.tensor(value, device=device.torch_device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        return shared.item()

    return largest


def _gather(window: Window, world_size: int) -> list[Window]:
    if world_size == 1:
        return [window]
    import torch

    windows: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(windows, window)
    return windows


def _peak_flops(chip: str, given_tflops: float | None) -> tuple[float | None, str]:
    if given_tflops is not None:
        return given_tflops * 1e12, "given with --peak-tflops"
    if peak := peaks.lookup(chip):
        return peak.bfloat16, f"{peak.chip}: {peak.source}"
    return None, f"no published bfloat16 peak is known for {chip}; --peak-tflops gives one"


class _Progress:
    """Tells the runner how far this process is: one JSON object, written anew each time."""

    def __init__(self, out: Path) -> None:
        self._path = progress_path(out)

    def __call__(self, phase: str, steps: int, tps: float | None) -> None:
        self._path.write_text(json.dumps({"phase": phase, "steps": steps, "tps": tps}))


def progress_path(out: Path) -> Path:
    """Where a worker with `--out OUT` leaves its progress."""
    return out.with_name(out.name + ".progress")


if __name__ == "__main__":
    sys.exit(main())

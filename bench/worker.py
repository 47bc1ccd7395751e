"""Measure one rung in this process and write the Outcome to a file.

Run by bench.runner in a fresh process per repetition; alone too, under torchrun where the rung has several ranks:
    python -m bench.worker ladders/smoke.yaml baseline --out m.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

from bench.ladder import Ladder, LadderError, Rung, load
from bench.record import Outcome, progress_path
from gpt2 import peaks
from gpt2.data import Batches, DataError, open_corpus
from gpt2.toggles import Toggles, UnsupportedToggle, environment, resolved
from gpt2.workload import FLOPS_FORMULA

if TYPE_CHECKING:  # torch is loaded only once the environment is right
    from gpt2.device import Device

T = TypeVar("T")


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
    with contextlib.suppress(OSError):  # where memory runs out, Linux shall end this process and not the user's others
        Path("/proc/self/oom_score_adj").write_text("500")
    _leave_with_runner()
    outcome = _run(ladder, rung, arguments)
    if outcome.error:
        print(outcome.error, file=sys.stderr)
    return 0 if outcome.status == "ok" else 1


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


def _leave_with_runner() -> None:
    """End this process when the runner that started it is gone: nobody would read what it measures."""
    runner = int(os.environ.get("BENCH_RUNNER_PID", 0))

    def watch() -> None:
        while psutil.pid_exists(runner):
            time.sleep(2.0)
        os._exit(1)

    if runner:
        threading.Thread(target=watch, daemon=True).start()


def _write(out: Path, outcome: Outcome) -> None:
    """Replace the file as a whole."""
    part = out.with_name(f"{out.name}.{os.getpid()}")
    part.write_text(outcome.model_dump_json(), encoding="utf-8")
    part.replace(out)


def _run(ladder: Ladder, rung: Rung, arguments: argparse.Namespace) -> Outcome:
    """Measure, and write how that went; of several ranks, rank 0 tells of success and the first to fail of failure."""
    from gpt2.device import find, process_group

    device: Device | None = None
    try:
        device = find(rung.toggles)
        with process_group(rung.toggles, device) as rank:
            return _measure(ladder, rung, device, rank, arguments)
    except UnsupportedToggle as error:
        outcome = Outcome(status="unsupported", error=str(error))
    except DataError as error:
        outcome = Outcome(status="failed", error=str(error))
    except Exception as error:
        traceback.print_exc()
        cause = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        out_of_memory = device is not None and device.is_out_of_memory(error)
        outcome = Outcome(status="out_of_memory" if out_of_memory else "failed", error=cause)
    if not arguments.out.exists():  # the first failure is the cause of the others
        _write(arguments.out, outcome)
    return outcome


def _measure(ladder: Ladder, rung: Rung, device: Device, rank: int, arguments: argparse.Namespace) -> Outcome:
    from bench.environment import describe
    from bench.measure import Waiting, combine, measure, more_losses, read
    from gpt2.train import micro_batches, train

    workload, toggles = ladder.workload, rung.toggles
    machine = describe(device)
    corpus = open_corpus(workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=arguments.data)
    tokens_per_step = toggles.tokens_per_step(workload.seq_len)
    batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens_per_step, seed=workload.seed)
    data = Waiting(micro_batches(batches, toggles, rank=rank))
    compile_cache = _compile_cache()
    steps = train(workload, toggles, device, data)
    startup_seconds = time.time() - psutil.Process().create_time()
    progress = _Progress(arguments.out) if rank == 0 else None
    agree = _agreement(toggles.world_size, device)
    window = measure(steps, device, ladder.protocol, data, agree=agree, progress=progress)
    windows = _gather(replace(window, history=[]), toggles.world_size)
    peak, source = _peak_flops(machine.chip, arguments.peak_tflops)

    def tell() -> Outcome:
        """Say, on rank 0, what is known by now."""
        measurement = combine(
            windows,
            _gather(read(step.loss for step in window.history), toggles.world_size),
            read(step.grad_norm for step in window.history),
            tokens_per_step=tokens_per_step,
            startup_seconds=startup_seconds,
            compile_cache=compile_cache if device.compilations() else None,
            parameters=workload.config.parameters,
            flops_per_token=workload.flops_per_token,
            flops_formula=FLOPS_FORMULA,
            peak_flops_bf16=peak,
            peak_flops_source=source,
        )
        outcome = Outcome(
            status="ok",
            environment=machine,
            measurement=measurement,
            data_sha256=corpus.sha256,
            resolved=resolved(toggles, workload),
            warnings=list(batches.warnings),
        )
        if rank == 0:
            _write(arguments.out, outcome)
        return outcome

    outcome = tell()  # before more losses, so that a time limit which ends those does not take the window with it
    if len(window.history) < ladder.protocol.loss_steps:
        more_losses(window, steps, device, ladder.protocol.loss_steps, progress)
        outcome = tell()
    return outcome


def _compile_cache() -> Literal["cold", "warm"] | None:
    """State of the compiler's cache that the runner gave this rung; None where nobody gave one."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if cache is None:
        return None
    return "warm" if Path(cache).is_dir() and any(Path(cache).iterdir()) else "cold"


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


def _gather(mine: T, world_size: int) -> list[T]:
    """One value from each rank, on every rank."""
    if world_size == 1:
        return [mine]
    import torch

    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


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


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Taking the interpreter down in order could only fail: gloo's threads now and then abort it.
    os._exit(exit_code)

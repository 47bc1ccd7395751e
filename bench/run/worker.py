"""Measure one rung in this process and write an Outcome.

Run by bench.run.runner in a fresh process per repetition; alone too, with torchrun for several ranks:
    python -m bench.worker ladders/smoke.yaml baseline --out m.json
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from bench.analysis.schedule import variant
from bench.errors import BenchError
from bench.host.standstill import pulse_beside, uneven
from bench.host.telemetry import GpuMemory
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.process.worker_side import (
    ProgressFile,
    TooSlow,
    age,
    cause,
    compile_cache,
    exit_code,
    failure,
    give_way,
    leave_with_runner,
    mark_compile_cache,
    write,
)
from bench.records.measurement import CacheState, Proof
from bench.records.record import Kind, Outcome
from bench.run.command import add_ladder_arguments, add_outcome_argument, loaded
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.config.tolerances import GRADIENT_TOLERANCE
from gpt2.config.validation import ConfigError
from gpt2.config.workload import FLOPS_FORMULA, hardware_flops_per_token
from gpt2.data.batches import Batches, DataError, open_corpus
from gpt2.training.reexec import check_rank_variables, enter_environment
from gpt2.training.stages import environment as process_environment
from gpt2.training.stages import model_config, resolved

if TYPE_CHECKING:  # torch is loaded only once the environment is right
    from bench.records.machine import Environment
    from bench.run.measure import Progress, Window
    from gpt2.device import Device
    from gpt2.training.train import Step, Training

T = TypeVar("T")


def main() -> int:
    """Return 0 if the rung was measured, 1 if it could not be, 2 if the ladder is wrong."""
    arguments = _arguments()
    try:
        check_rank_variables()
        ladder = loaded(arguments, upto=arguments.rung if arguments.kind == "scout" else None)
        rung = variant(ladder, ladder.rung(arguments.rung), arguments.kind)
        if rung is None or rung.external:
            raise LadderError(f"{ladder.path}: rung {arguments.rung!r} has no {arguments.kind} process")
    except (BenchError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    enter_environment(rung.toggles, "bench.worker")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        arguments.out.unlink(missing_ok=True)  # of an earlier run
    give_way()
    leave_with_runner()
    outcome = _run(ladder, rung, arguments)
    return exit_code(outcome)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.worker", description="Measure one rung of a ladder."
    )
    add_ladder_arguments(parser)
    parser.add_argument(
        "--kind", choices=get_args(Kind), default="cumulative", help="see bench.analysis.schedule.variant"
    )
    parser.add_argument("--losses", action="store_true", help="take the first losses only, and time nothing")
    parser.add_argument(
        "--proofs",
        choices=("each", "once", "none"),
        default="each",
        help="that toggles took effect: as each process of the rung, as only this one, or not",
    )
    parser.add_argument(
        "--gradients", action="store_true", help="compare gradients with those of torch's eager code"
    )
    add_outcome_argument(parser)
    parser.add_argument("--data", type=Path, help="where the ladder's corpus lies")
    parser.add_argument(
        "--stop-below", type=float, metavar="TPS", help="end at a warm-up step of fewer tokens per second"
    )
    parser.add_argument("--peak-tflops", type=float, help="dense bfloat16 peak of one device, if not known")
    return parser.parse_args()


def _run(ladder: Ladder, rung: Rung, arguments: argparse.Namespace) -> Outcome:
    """Measure, and write the outcome: on success rank 0, on failure the rank that fails first."""
    from gpt2.device import find
    from gpt2.training.distributed import process_group

    device: Device | None = None
    # Made before the device is opened, which takes memory.
    gpu = GpuMemory(int(os.environ.get("LOCAL_RANK", "0"))) if rung.toggles.device != HOST else None
    try:
        device = find(rung.toggles)
        with process_group(rung.toggles, device) as rank:
            return _measure(ladder, rung, device, rank, arguments, gpu)
    except UnsupportedToggle as error:
        outcome = Outcome(status="unsupported", error=str(error))
    except DataError as error:
        outcome = Outcome(status="failed", error=str(error))
    except TooSlow as error:
        outcome = Outcome(
            status="too_slow", error=str(error), first_tokens_per_second=error.tokens_per_second
        )
    except Exception as error:
        outcome = failure(error, out_of_memory=device is not None and device.is_out_of_memory(error))
    if not arguments.out.exists():  # the first failure causes the others
        write(arguments.out, outcome)
    return outcome


PARITY_LOSSES = 5
"""Steps of a process that is run for its losses only."""


def _measure(
    ladder: Ladder,
    rung: Rung,
    device: Device,
    rank: int,
    arguments: argparse.Namespace,
    gpu: GpuMemory | None,
) -> Outcome:
    from bench.host.environment import describe
    from bench.host.feasibility import check_time
    from bench.run.aggregate import combine
    from bench.run.measure import Waiting, first_losses, measure, read
    from gpt2.training.distributed import gather, nodes
    from gpt2.training.train import micro_batches, train

    import_seconds = age()
    workload, toggles = ladder.workload, rung.toggles
    check_time(ladder, toggles)
    machine = describe(device, process_environment(toggles))
    opening = time.perf_counter()
    corpus = open_corpus(
        workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=arguments.data
    )
    tokens_per_step = toggles.tokens_per_step(workload.seq_len)
    batches = Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens_per_step, seed=workload.seed)
    data_seconds = time.perf_counter() - opening
    data = Waiting(device.feed(micro_batches(batches, toggles, rank=rank)))
    agree = _agreement(toggles.processes, device)
    cache = compile_cache()
    steps = train(workload, toggles, device, data)
    if cache:  # all ranks wait for the one that compiles most
        states = get_args(CacheState)
        cache = states[int(agree(float(states.index(cache))))]
    startup_seconds = age()
    progress = ProgressFile(arguments.out) if os.environ.get("LOCAL_RANK", "0") == "0" else None
    hardware_flops = hardware_flops_per_token(
        model_config(toggles, workload.config), workload.seq_len, toggles.recompute
    )
    facts: dict[str, Any] = {
        "tokens_per_step": tokens_per_step,
        "startup_seconds": startup_seconds,
        "import_seconds": import_seconds,
        "data_seconds": data_seconds,
        "parameters": workload.config.parameters,
        "flops_per_token": workload.flops_per_token,
        "flops_formula": FLOPS_FORMULA,
        "hardware_flops_per_token": hardware_flops if toggles.recompute != "none" else None,
        "product_format": toggles.product_format(),
        **_peak_flops(machine, toggles, device, arguments.peak_tflops),
    }
    warnings: list[str] = []

    def tell(window: Window) -> Outcome:
        """Write, on rank 0, what is known so far."""
        filled = mark_compile_cache()  # never on XLA, which keeps its programs elsewhere
        facts["compile_cache"] = cache if filled and device.compilations() else None
        windows = gather(replace(window, history=[]), toggles.processes)
        losses = gather(read(step.loss for step in window.history), toggles.processes)
        grad_norms = read(step.grad_norm for step in window.history)
        if steps.scaler.is_enabled():
            facts["skipped_steps"] = sum(not isfinite(norm) for norm in grad_norms)
        outcome = Outcome(
            status="ok",
            environment=machine,
            measurement=combine(windows, losses, grad_norms, nodes=nodes(), **facts),
            data_sha256=corpus.sha256,
            resolved={**resolved(toggles, workload), **({"nodes": nodes()} if nodes() > 1 else {})},
            warnings=[*batches.warnings, *_interruptions(window), *_unevenness(windows), *warnings],
        )
        if rank == 0:
            write(arguments.out, outcome)
        return outcome

    if arguments.losses or arguments.kind == "parity":
        return tell(first_losses(steps, device, PARITY_LOSSES))
    protocol = ladder.protocol.short if arguments.kind == "scout" else ladder.protocol
    limit = protocol.timeout_seconds
    with pulse_beside(device) as pulse:
        window = measure(
            steps,
            device,
            protocol,
            data,
            agree=agree,
            progress=progress,
            has_time=lambda seconds: age() + 2 * seconds < limit,
            keep=tell,
            pulse=pulse,
            gpu_memory=gpu.taken if gpu else lambda: None,
            stop_below=arguments.stop_below,
        )
    outcome = tell(window)
    # Each stage is told as it ends, so that it is kept if the time limit ends what follows.
    for found in _after_window(steps, window, protocol.loss_steps, progress, arguments, warnings):
        facts |= found
        outcome = tell(window)
    return outcome


def _after_window(
    steps: Training,
    window: Window,
    loss_steps: int,
    progress: Progress | None,
    arguments: argparse.Namespace,
    warnings: list[str],
) -> Iterator[dict[str, Any]]:
    """Take what is not timed: proofs, gradients and further losses; yield the fields found after each stage.

    What cannot be taken becomes a warning.
    """
    from bench.run.measure import more_losses
    from gpt2.training.distributed import ranks_agree

    device, toggles = steps.device, steps.toggles
    if device.lazy:  # proofs trace a step without running it, so that no step can follow them
        more_losses(window, steps, device, loss_steps, progress)
    if progress:
        progress("proofs", len(window.history), None)
    found: dict[str, Any] = {}
    if toggles.processes > 1 and not toggles.shards_gradients:  # shards have no copy to compare with
        what = "the ranks' weights could not be compared"
        found["ranks_agree"] = _optional(lambda: ranks_agree(steps.model, toggles.processes), what, warnings)
    begun = time.perf_counter()

    def once() -> dict[str, float]:
        return {"once_seconds": time.perf_counter() - begun}

    if arguments.proofs == "none":
        found["proofs"] = {}
    else:
        found |= _optional(lambda: _proofs(steps, window), "no proof could be taken", warnings) or {}
    if arguments.proofs == "once":
        found |= once()
    else:
        begun = time.perf_counter()
    yield found
    if arguments.gradients and not device.lazy:
        what = "gradients could not be compared with those of torch's own functions in eager code"
        yield {**(_optional(lambda: _gradients(steps, warnings), what, warnings) or {}), **once()}
    if len(window.history) < loss_steps:
        more_losses(window, steps, device, loss_steps, progress)
        yield once()


def _unevenness(windows: list[Window]) -> list[str]:
    """Return warnings about a repeated window, and about long blocks in which no rank stood still."""
    from bench.run.aggregate import stood_still

    warnings = []
    if first := stood_still([window.set_aside for window in windows]):
        warnings.append(f"taken once more: within the first window the process stood still, {first.text}")
    if not stood_still([window.blocks for window in windows]):
        slowest = max((window.block_seconds for window in windows), key=sum)
        warnings += uneven(slowest, "it ran meanwhile, and waited for data, the device, memory or the disk")
    return warnings


def _interruptions(window: Window) -> list[str]:
    """Return warnings about a device that compiles whole steps, but ran one as several or waited."""
    warnings = []
    if window.programs_per_step not in (None, 1):
        warnings.append(
            f"each step ran as {window.programs_per_step:.3g} programs instead of 1: something cuts its graph"
        )
    if window.host_reads:
        warnings.append(
            f"the host read {window.host_reads} values from the device within the window and waited for each"
        )
    return warnings


def _proofs(steps: Training, window: Window) -> dict[str, Any]:
    """Take one more step under the profiler, and find the effect of each toggle in it."""
    from gpt2.proofs.breakdown import breakdown
    from gpt2.proofs.profiler import attention_kernel, ops_of, profile, record
    from gpt2.proofs.prove import prove

    seen: list[Step] = []
    recorded = record(lambda: seen.append(next(steps)), steps.device)
    ops = ops_of(recorded)
    if steps.graph:  # a replay shows kernels, not ops
        steps.replay = False
        try:
            ops = profile(lambda: seen.append(next(steps)), steps.device)
        finally:
            steps.replay = True
    if not steps.device.lazy:
        window.history.extend(seen)
    proofs = {
        toggle: Proof(took_effect=finding.took_effect, evidence=finding.evidence)
        for toggle, finding in prove(steps, ops).items()
    }
    return {
        "proofs": proofs,
        "attention_kernel": attention_kernel(ops),
        "profiled_seconds": None if steps.device.lazy else breakdown(recorded),
    }


def _gradients(steps: Training, warnings: list[str]) -> dict[str, float | None]:
    """Compare the gradients; where they are far apart, find out whether the number format explains it."""
    from gpt2.proofs.gradients import GradientCheck

    assert steps.micro_batch is not None
    check = GradientCheck(steps, *steps.micro_batch)
    found: dict[str, float | None] = {"gradient_difference": check.difference}
    if isfinite(check.difference) and check.difference > GRADIENT_TOLERANCE[steps.toggles.precision_class()]:
        what = "gradients could not be compared with those in float32"
        found["gradient_error_over_eager"] = _optional(check.error_over_eager, what, warnings)
    return found


def _optional(check: Callable[[], T], without: str, warnings: list[str]) -> T | None:
    """Return the result of a check after the window; if it fails, None, with a warning."""
    try:
        return check()
    except Exception as error:
        traceback.print_exc()
        warnings.append(f"{without}: {cause(error)}")
        return None


def _agreement(processes: int, device: Device) -> Callable[[float], float]:
    """Return a function that gives every rank the largest of the ranks' values."""
    if processes == 1:
        return lambda value: value
    import torch

    def largest(value: float) -> float:
        shared = torch.tensor(value, device=device.torch_device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        return shared.item()

    return largest


def _peak_flops(
    machine: Environment, toggles: Toggles, device: Device, given_tflops: float | None
) -> dict[str, float | int | str | None]:
    """Return the fields of Measurement about peaks: of one device, their source, and number of devices."""
    from gpt2.hardware.host import usable_cores
    from gpt2.hardware.peaks import derived_cpu
    from gpt2.training.distributed import nodes

    number_format = toggles.product_format()
    chip = device.peaks()
    if device.shared_by_ranks:  # the machine's CPU
        mhz = machine.measured_cpu_mhz or machine.cpu_mhz
        identity = {**machine.cpu_identity, "name": machine.cpu}
        chip = derived_cpu(usable_cores(), mhz, machine.cpu_flags, identity)
    bfloat16, own, kind = None, None, None
    source = f"no published peak is known for {machine.chip}; bench run --peak-tflops gives one"
    if given_tflops is not None:
        bfloat16, kind, source = given_tflops * 1e12, "given", "given with --peak-tflops"
        own = bfloat16 if number_format == "bfloat16" else None
    elif chip is not None:
        bfloat16, own = chip.bfloat16, chip.peak(number_format)
        kind = "derived" if chip.derived else "datasheet"
        source = chip.source if chip.derived else f"{chip.name}: {chip.source}"
        if chip.peak("bfloat16") is None or own is None:
            source += f" ({chip.note})"
    return {
        "peak_flops_bf16": bfloat16,
        "peak_flops_dtype": own,
        "peak_flops_source": source,
        "peak_flops_kind": kind,
        "peak_devices": nodes() if device.shared_by_ranks else toggles.world_size,
    }

"""Measure the ceiling: what a machine's matrix units and memory sustain without other work.

Run by bench.run.runner and `bench roofline` as a process of its own; alone too:
    python -m bench.ceiling --device cpu --tokens 1024 --model gpt2 --out m.json
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from bench.analysis.bound import attention_flops, linear_layers
from bench.host.feasibility import TIMES_SLOWER_IF_EMULATED
from bench.host.standstill import Instant, pulse_beside, standstills
from bench.process.worker_side import (
    ProgressFile,
    cause,
    exit_code,
    failure,
    give_way,
    leave_with_runner,
    write,
)
from bench.records.machine import Attention, Ceiling, Matmul, Role
from bench.records.record import Outcome
from bench.run.command import add_outcome_argument
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.config.workload import PRESETS, GPT2Config
from gpt2.device import Device, check, find
from gpt2.proofs.profiler import attention_kernel, profile
from gpt2.training import stages
from gpt2.training.reexec import enter_environment

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "tf32": {"matmul_precision": "high"},
    "bfloat16": {"autocast": "bfloat16"},
    "float16": {"autocast": "float16"},
}
"""Number formats of matmuls, and the toggles that choose them."""

PROBE = 1024
"""Side of the square matmul that is timed first, to estimate the others."""
SQUARES = (512, 1024, 2048, 4096, 8192, 16384)
SQUARE_SECONDS = 4.0
"""The two largest of SQUARES are measured that take at most this many times `seconds` in float32."""
LONGEST_SECONDS = 20.0
"""Matmuls that would take more than this many times `seconds`, such as emulated ones, are left out."""
BLOCKS = 5
"""Approximate number of blocks in `seconds`."""
LONGEST_SEQUENCE = 1024
"""Tokens of a sequence in the measured attention; fewer if the micro-batch or the model has fewer."""
COPY_BYTES = 2**30
"""Size of the copied tensor, at most a sixteenth of memory; larger than caches."""

Tell = Callable[[str, int, float | None], None]


@dataclass(frozen=True)
class Timing:
    """Device, duration and clock of each measurement."""

    device: Device
    seconds: float
    clock: Callable[[], float] = time.perf_counter


def measure_ceiling(
    device: Device,
    tokens: int,
    config: GPT2Config,
    *,
    seconds: float = 0.3,
    threads: int | None = None,
    copy_bytes: int | None = None,
    progress: Tell = lambda phase, steps, tps: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Ceiling:
    """Measure sustained rates of GPT-2's matmuls and attention, of large squares and of memory.

    Each is heated up and timed for `seconds`. Forward matmuls and squares are measured in each number format;
    the gradients' matmuls and attention only in the one to train in, to save time on a CPU.

    tokens: of one micro-batch, the matmuls' m. threads: only noted. copy_bytes: of one tensor. The squares
    depend on `seconds` and the device's speed (see SQUARE_SECONDS): 2048 and 4096 on a CPU with 0.12 to 0.9
    TFLOP/s at 0.3 s, up to 16384 on a GPU.
    """
    start = time.perf_counter()
    timing = Timing(device, seconds, clock)
    with _precision_restored(device):
        rates, absent = _probe(timing)
        trained_in = _training_format(rates)
        matmuls: list[Matmul] = []
        for name, m, k, n in _shapes(tokens, config, rates["float32"], seconds):
            # The weight has the layout of torch.nn.Linear, (n, k). Values are normal, because zeros draw less
            # power, so that a GPU clocks higher than in training.
            x = torch.randn(m, k, device=device.torch_device)
            w = torch.randn(n, k, device=device.torch_device)
            for number_format, rate in rates.items():
                if 2 * m * k * n > rate * LONGEST_SECONDS * seconds:
                    continue
                for role in _roles(name, gradients=number_format == trained_in):
                    progress("ceiling", len(matmuls), None)
                    matmuls.append(_matmul(name, role, x, w, number_format, timing))
        longest = rates[trained_in] * LONGEST_SECONDS * seconds
        attention = _attention(tokens, config, trained_in, longest, timing)
    for number_format in rates.keys() - {product.number_format for product in matmuls}:
        absent[number_format] = "each matmul would take too long here"
    progress("ceiling", len(matmuls), None)
    size = copy_bytes or min(COPY_BYTES, (device.memory_bytes() or 16 * 2**30) // 16)
    copy, update = _memory_rates(size, timing)
    if isinstance(attention, str):
        absent["attention"] = attention
    return Ceiling(
        chip=device.chip(),
        threads=threads,
        matmuls=matmuls,
        attention=None if isinstance(attention, str) else attention,
        absent=absent,
        copy_bytes_per_second=copy,
        update_bytes_per_second=update,
        seconds=time.perf_counter() - start,
    )


def sustained(work: Callable[[], object], timing: Timing) -> float:
    """Return the seconds per call of `work`, timed in blocks that are synchronised at their ends.

    Before that it runs untimed for as long, so that clocks and caches are those of steady work.
    """
    device, seconds, clock = timing.device, timing.seconds, timing.clock

    def block(calls: int) -> Instant:
        start = Instant.now(pulse, clock)
        for _ in range(calls):
            work()
            device.end_step()
        device.synchronize()
        return Instant.now(pulse, clock) - start

    def blocks(calls: int) -> list[Instant]:
        taken: list[Instant] = []
        while sum(block.seconds for block in taken) < seconds:
            taken.append(block(calls))
        return taken

    with pulse_beside(device) as pulse:
        block(1)  # libraries load, and choose or generate their kernel
        calls, heated = 1, 0.0
        while heated < seconds:
            took = block(calls).seconds
            heated += took
            if took < seconds / BLOCKS:
                calls *= 2
        timed = blocks(calls)
        if standstills(timed):  # the process was stopped, or the machine slept
            timed = blocks(calls)
    return sum(block.seconds for block in timed) / (calls * len(timed))


def _training_format(rates: Mapping[str, float]) -> str:
    """Return the number format to train in: bfloat16 where the device has units for it, else float32."""
    return "bfloat16" if rates.get("bfloat16", 0.0) > rates["float32"] else "float32"


def _roles(name: str, *, gradients: bool) -> tuple[Role | None, ...]:
    """Return the roles in which a shape is measured."""
    if name == "square":
        return (None,)
    return ("forward", "input_gradient", "weight_gradient") if gradients else ("forward",)


def _matmul(
    name: str,
    role: Role | None,
    x: torch.Tensor,
    w: torch.Tensor,
    number_format: str,
    timing: Timing,
) -> Matmul:
    """Measure a linear layer's matmul. x: (tokens, k), its input; w: (n, k), its weight."""
    a, b = _factors(role, x.to(_dtype(number_format)), w.to(_dtype(number_format)))
    rate = _rate(a, b, number_format, timing)
    m, k, n = *a.shape, b.shape[1]
    return Matmul(name=name, role=role, number_format=number_format, m=m, k=k, n=n, flops_per_second=rate)


def _factors(role: Role | None, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a linear layer's matmul in autograd's layout, where a transpose is a view."""
    if role in (None, "forward"):
        return x, w.t()
    gradient = F.linear(x, w)  # that of the layer's output, (tokens, n), has its shape and layout
    return (gradient, w) if role == "input_gradient" else (gradient.t(), x)


def _dtype(number_format: str) -> torch.dtype:
    return torch.float32 if number_format == "tf32" else getattr(torch, number_format)


def _rate(a: torch.Tensor, b: torch.Tensor, number_format: str, timing: Timing) -> float:
    """Return the FLOP/s of a (m, k) by b (k, n) in a number format."""
    timing.device.set_matmul_precision("high" if number_format == "tf32" else "highest")
    a, b = a.to(_dtype(number_format)), b.to(_dtype(number_format))
    # Reused by each matmul, because new memory costs page faults.
    out = torch.empty(len(a), b.size(1), dtype=a.dtype, device=a.device)
    return 2 * len(a) * b.numel() / sustained(lambda: torch.mm(a, b, out=out), timing)


def _attention(
    tokens: int, config: GPT2Config, number_format: str, longest_flops: float, timing: Timing
) -> Attention | str:
    """Measure one layer's causal attention with torch's default kernel; return the reason if it fails.

    q, k and v are views of one tensor, as in the model.
    """
    device, T = timing.device, min(LONGEST_SEQUENCE, tokens, config.n_ctx)
    B, head_dim = tokens // T, config.n_embd // config.n_head
    flops = attention_flops(config.n_embd, B * T, T)
    if flops > longest_flops:
        return "it would take too long here"
    held: list[object] = []  # a lazy device computes only what somebody still holds
    try:
        device.set_matmul_precision("highest")
        shape = (B, T, 3, config.n_head, head_dim)
        qkv = torch.randn(shape, dtype=_dtype(number_format), device=device.torch_device)
        q, k, v = (each.transpose(1, 2).detach().requires_grad_() for each in qkv.unbind(2))

        def forward() -> torch.Tensor:
            held[:] = [out := F.scaled_dot_product_attention(q, k, v, is_causal=True)]
            return out

        gradient = torch.randn_like(forward())

        def training() -> None:
            held[:] = torch.autograd.grad(forward(), (q, k, v), gradient)

        forward_seconds = sustained(forward, timing)
        training_seconds = sustained(training, timing)
        kernel = attention_kernel(profile(training, device))
    except RuntimeError as error:  # such as out of memory; the matmuls' rates are kept
        return cause(error)
    return Attention(
        number_format=number_format,
        B=B,
        n_head=config.n_head,
        seq_len=T,
        head_dim=head_dim,
        forward_seconds=forward_seconds,
        training_seconds=training_seconds,
        flops=flops,
        flops_per_second=flops / training_seconds,
        kernel=kernel,
    )


@contextlib.contextmanager
def _precision_restored(device: Device) -> Iterator[None]:
    before = device.matmul_precision()
    try:
        yield
    finally:
        device.set_matmul_precision(before)


def _probe(timing: Timing) -> tuple[dict[str, float], dict[str, str]]:
    """Return rough FLOP/s of each number format to measure, float32 first, and reasons against the others.

    bfloat16 is measured even where it is slow, to show that.
    """
    device = timing.device
    x = torch.randn(PROBE, PROBE, device=device.torch_device)
    rates: dict[str, float] = {}
    absent: dict[str, str] = {}
    for number_format, chosen_by in FORMATS.items():
        toggles = replace(Toggles(), **{"device": device.kind, **chosen_by})
        if toggles.product_format() != number_format:
            absent[number_format] = "no such format on this device"
            continue
        try:
            check(toggles, device)
        except UnsupportedToggle as error:
            absent[number_format] = str(error)
            continue
        rate = _rate(x, x, number_format, replace(timing, seconds=timing.seconds / 10))
        if number_format == "float16" and rate * TIMES_SLOWER_IF_EMULATED < rates["float32"]:
            absent[number_format] = f"more than {TIMES_SLOWER_IF_EMULATED:g} times slower than float32 here"
        else:
            rates[number_format] = rate
    return rates, absent


def _shapes(
    tokens: int, config: GPT2Config, float32_rate: float, seconds: float
) -> list[tuple[str, int, int, int]]:
    """Return (name, m, k, n) of the matmuls to measure."""
    layers = [(layer.name, tokens, layer.k, layer.padded_n) for layer in linear_layers(config)]
    quick = [size for size in SQUARES if 2 * size**3 <= float32_rate * SQUARE_SECONDS * seconds]
    return layers + [("square", size, size, size) for size in quick[-2:] or SQUARES[:1]]


def _memory_rates(size: int, timing: Timing) -> tuple[float, float]:
    """Return bytes per second, read plus written, of copying `size` bytes and of updating them in place."""
    device = timing.device
    # Written with differing values: the pages of torch.zeros would be one physical page.
    piece = torch.randn(2**16, device=device.torch_device)
    source = piece.repeat(max(1, size // piece.nbytes))
    target = torch.empty_like(source)
    if device.lazy:  # a compiler of whole programs removes a copy and a product by 1
        copying, updating = (lambda: torch.add(source, 1.0, out=target)), (lambda: target.add_(1.0))
    else:
        copying, updating = (lambda: target.copy_(source)), (lambda: target.mul_(1.0))
    copy = sustained(copying, timing)
    update = sustained(updating, timing)
    return 2 * source.nbytes / copy, 2 * source.nbytes / update


# --- as a process


def main() -> int:
    """Return 0 if the ceiling was measured, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.ceiling", description="Measure what this machine sustains."
    )
    parser.add_argument("--device", required=True, help="cpu, cuda, mps or xla")
    parser.add_argument("--tokens", type=int, required=True, help="of one micro-batch")
    parser.add_argument("--model", required=True, choices=list(PRESETS), help="whose shapes to measure")
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="of timing per matmul, after as much heating up"
    )
    add_outcome_argument(parser)
    arguments = parser.parse_args()
    toggles = Toggles(device=arguments.device)
    enter_environment(toggles, "bench.ceiling")
    arguments.out.unlink(missing_ok=True)  # of an earlier run
    give_way()
    leave_with_runner()
    outcome = _outcome(toggles, arguments)
    write(arguments.out, outcome)
    return exit_code(outcome)


def _outcome(toggles: Toggles, arguments: argparse.Namespace) -> Outcome:
    from bench.host.environment import describe

    device: Device | None = None
    try:
        device = find(toggles)
        stages.configure_process(toggles, device)
        machine = describe(device)  # before measuring, which raises the load average
        count = stages.threads(toggles) if device.shared_by_ranks else None
        ceiling = measure_ceiling(
            device,
            arguments.tokens,
            PRESETS[arguments.model],
            seconds=arguments.seconds,
            threads=count,
            progress=ProgressFile(arguments.out),
        )
        return Outcome(status="ok", environment=machine, resolved={"threads": count}, ceiling=ceiling)
    except UnsupportedToggle as error:
        return Outcome(status="unsupported", error=str(error))
    except Exception as error:
        return failure(error, out_of_memory=device is not None and device.is_out_of_memory(error))

"""What one process measured: times, losses, memory, and what it saw its toggles do. Imports no torch.

What was not measured is null, never 0. In losses and grad_norms null is a value that was no finite number.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from bench.records.machine import Amount, AtLeastOne, ChipState, Count, Plain, Rate

Computed = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, return_type=float | None),
]
"""What training came to at a step: null in a file, which is JSON by RFC 8259, where that was no finite
number. Older files have NaN or Infinity there.
"""


class Proof(Plain):
    """Whether a toggle did in the process what it says, by what was seen there."""

    took_effect: bool
    evidence: str


class Rank(Plain):
    """What one rank saw of the window."""

    block_seconds: list[Rate]
    peak_memory_bytes: AtLeastOne | None


class StoodStill(Plain):
    """That a process did not run throughout its window; of several ranks, the one that lost most time."""

    seconds: Amount
    """That it lost, in all."""
    blocks: AtLeastOne
    """In which it lost them."""
    of_blocks: AtLeastOne
    """Of the window."""
    rank: Count | None = None
    """Which of several ranks."""
    asleep: bool
    """Whether most of the time the machine slept; else the process was stopped, or had no processor."""

    @property
    def text(self) -> str:
        """For a reader: how long, and why."""
        why = (
            "the machine slept, and its clocks and caches were cold"
            if self.asleep
            else "stopped, without a processor, or swapped out"
        )
        of = f" of rank {self.rank}" if self.rank is not None else ""
        return f"for about {self.seconds:.1f} s in {self.blocks} of {self.of_blocks} blocks{of}: {why}"


class External(Plain):
    """The other trainer that a rung measured."""

    peer: str
    """A key of bench.ladder.peers.PEERS."""
    version: str | None
    """Commit of its checkout, with a hash of what that was edited to, or what it printed and a hash of the
    script; null where neither tells.
    """
    command: str
    """As the ladder has it."""


class Measurement(Plain):
    """What one process, or one group of ranks, measured."""

    tokens_per_step: AtLeastOne
    """Of all ranks together."""
    block_steps: AtLeastOne | None
    """Optimiser steps per block; null where nothing was timed."""
    block_seconds: list[Rate]
    """Duration of each block of the timed window, on the slowest rank: the raw samples. Empty: nothing was
    timed.
    """
    block_lost_seconds: list[Amount] | None = None
    """For how long a rank did not run within each block, stopped or without a processor, or its machine slept
    (see bench.host.standstill); of the rank that lost most. Null in older records, and of external rungs.
    """
    stood_still: StoodStill | None = None
    """Null where no block lost any time."""
    set_aside_block_seconds: list[Rate] | None = None
    """Of a window before, that does not count because the process stood still in it; null where there was
    none.
    """
    step_seconds: list[Rate] | None = None
    """Duration of each step of the window, on that rank, by the device's own clock where it has one. It tells
    how evenly one process runs; it is no measure of certainty. Null in older records and where nothing was
    timed.
    """
    claimed_step_seconds: list[Rate] | None = None
    """Of an external rung: durations of steps of the window by its own account, where it printed them."""
    startup_seconds: Amount
    """From the start of the process to the first step: imports, data, weights. Of an external rung to its
    first progress line, first step and compilation included.
    """
    import_seconds: Amount | None = None
    """Of it, until the interpreter had loaded torch and found the device."""
    data_seconds: Amount | None = None
    """Of it, to open the corpus."""
    first_step_seconds: Amount | None
    """The first optimiser step, compilation included; null for an external rung, as all that only we look for
    is.
    """
    compile_cache: Literal["cold", "warm"] | None
    """State of the compiler's cache at the start; null where nothing was compiled."""
    warmup_steps: Count
    """Untimed steps before the window, the first one included."""
    losses: list[Computed] = Field(min_length=1)
    """Of every step from step 0, mean over ranks; of an external rung those that it printed, one per progress
    line. Null at its step is a loss that was taken and was no finite number: training diverged, or float16
    overflowed.
    """
    grad_norms: list[Computed]
    """Likewise; empty where an external rung prints none."""
    peak_memory_bytes: AtLeastOne | None
    """Of the window, on the rank that needed most."""
    peak_memory_method: str
    gpu_memory_bytes: AtLeastOne | None = None
    """That the whole NVIDIA GPU had in use beyond what it had before the process opened it, CUDA's context
    and what an allocator keeps unused included: of an external rung the most after a block, of ours at the
    end of the window. Of the rank that needed most; null in older records and where the driver does not tell.
    """
    reserved_memory_bytes: Count | None
    run_peak_memory_bytes: Count | None
    """Of the whole process, initialisation and compilation included."""
    alloc_retries: Count | None
    recompiles: Count | None
    """Compilations during the window, and CUDA graphs recorded in it; those are not in older records."""
    gc_collections: Count | None = None
    """Of Python's garbage collector during the window, on the rank where they took longest."""
    gc_seconds: Amount | None = None
    """What they took."""
    data_wait_seconds: Amount | None
    """Time of the window spent waiting for batches, on the rank that waited most."""
    ranks: list[Rank]
    parameters: AtLeastOne
    flops_per_token: AtLeastOne
    flops_formula: str
    peak_flops_bf16: Rate | None
    """Of one device, dense."""
    peak_flops_dtype: Rate | None = None
    """The same for the number format of this rung's products."""
    peak_flops_source: str
    """Where these figures are from, or why there is none."""
    peak_flops_kind: Literal["datasheet", "derived", "given"] | None = None
    """Published, or reckoned from cores, clock and vector units, or given by the user; null where there is
    none.
    """
    peak_devices: AtLeastOne | None = None
    """Devices whose peaks add up; null in older records, where it is the world size."""
    product_format: str | None = None
    """Number format of the matrix products' inputs."""
    hardware_flops_per_token: AtLeastOne | None = None
    """With what is computed a second time to save memory; null where nothing is."""
    gradient_difference: float | None = None
    """As trained against eager code of torch's own functions (of the same functions in older records), on the
    same weights and batch: the largest relative difference of a parameter's gradient. Null where it was not
    taken, and where gradients_finite is false.
    """
    gradients_finite: bool | None = None
    """Whether that difference was a finite number; null where it was not taken, and in older records."""
    ranks_agree: bool | None = None
    """Whether after the window all ranks held the same weights, bit for bit; null for one rank, or where not
    known.
    """
    skipped_steps: Count | None = None
    """Steps, of all whose losses are kept, whose gradients float16 could not hold; null where nothing scales
    them.
    """
    attention_kernel: str | None = None
    """That was seen in the profiled step: flash, efficient, cudnn, math or other; null where none was seen.
    """
    profiled_seconds: dict[str, Amount] | None = None
    """Of the profiled step on rank 0, by kind of work (gpt2.proofs.breakdown.KINDS); null where that is not told."""
    energy_joules: Amount | None = None
    """Of all devices during the window; null where there is no counter, 0 where it did not move."""
    other_cores: Amount | None = None
    """Cores that other processes kept busy during the window, on average."""
    programs_per_step: Amount | None = None
    """Compiled programs that each step of the window ran, where the device compiles whole steps: 1 is right.
    """
    host_reads: Count | None = None
    """Values fetched from such a device during the window, each of which waits for it: 0 is right."""
    chips_before: list[ChipState] | None = None
    """Just before the window, where the device has such counters: TPUs, with tpu-info installed."""
    chips_after: list[ChipState] | None = None
    """Just after it."""
    proofs: dict[str, Proof] | None = None
    """By toggle, from one profiled step after the window; null where none was taken."""

    @model_validator(mode="before")
    @classmethod
    def _told_apart(cls, values: Any) -> Any:
        """A difference that is no finite number becomes null, and gradients_finite says that it was taken."""
        if not isinstance(values, dict) or values.get("gradient_difference") is None:
            return values
        try:
            finite = math.isfinite(float(values["gradient_difference"]))  # "NaN" in older records
        except (TypeError, ValueError, OverflowError):  # which its own field complains of
            return values
        return {**values, "gradients_finite": finite} | ({} if finite else {"gradient_difference": None})

    @property
    def lacks(self) -> str | None:
        """What our own rungs measure and this does not tell; None where that is nothing."""
        known = {
            "first_step_seconds": self.first_step_seconds is not None,
            "recompiles": self.recompiles is not None,
            "data_wait_seconds": self.data_wait_seconds is not None,
            "grad_norms": bool(self.grad_norms),
        }
        return next((name for name, there in known.items() if not there), None)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over all ranks in the window, divided by the slowest rank's seconds."""
        if not self.block_seconds or self.block_steps is None:
            return None
        return self.tokens_per_step * self.block_steps * len(self.block_seconds) / sum(self.block_seconds)

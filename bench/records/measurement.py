"""What one process measured: times, losses, memory, and proofs of its toggles. Imports no torch.

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
"""A number that training computed; null in a file where it was not finite, NaN or Infinity in older files."""


class Proof(Plain):
    """Whether a toggle took effect in the process, and the evidence."""

    took_effect: bool
    evidence: str


class Rank(Plain):
    """What one rank saw of the window."""

    block_seconds: list[Rate]
    peak_memory_bytes: AtLeastOne | None


class StoodStill(Plain):
    """That a process did not run throughout its window; of several ranks, the one that lost most time."""

    seconds: Amount
    """Time lost in all."""
    blocks: AtLeastOne
    """Number of blocks in which it was lost."""
    of_blocks: AtLeastOne
    """Number of blocks in the window."""
    rank: Count | None = None
    """Rank that lost it, where there are several."""
    asleep: bool
    """Whether most of the time the machine slept; else the process was stopped, or had no processor."""

    @property
    def text(self) -> str:
        """How long it stood still, and why, for a reader."""
        why = "stopped, without a processor, or swapped out"
        if self.asleep:
            why = "the machine slept, and its clocks and caches were cold"
        of = f" of rank {self.rank}" if self.rank is not None else ""
        return f"for about {self.seconds:.1f} s in {self.blocks} of {self.of_blocks} blocks{of}: {why}"


class External(Plain):
    """The other trainer that a rung measured."""

    peer: str
    """A key of bench.ladder.peers.PEERS."""
    version: str | None
    """Commit of its checkout with a hash of its edits, or what it printed with a hash of the script.

    Null where neither is known.
    """
    command: str
    """Command as the ladder has it."""


CacheState = Literal["warm", "shared", "cold"]
"""State of a compiler's cache, from the least to be compiled to the most."""


class Measurement(Plain):
    """What one process, or one group of ranks, measured."""

    tokens_per_step: AtLeastOne
    """Tokens per optimiser step of all ranks together."""
    block_steps: AtLeastOne | None
    """Optimiser steps per block; null where nothing was timed."""
    block_seconds: list[Rate]
    """Duration of each block of the timed window, on the slowest rank: the raw samples.

    Empty where nothing was timed.
    """
    block_lost_seconds: list[Amount] | None = None
    """Time that a rank did not run within each block, see bench.host.standstill; of the rank that lost most.

    It was stopped or without a processor, or its machine slept. Null in older records, and of external rungs.
    """
    stood_still: StoodStill | None = None
    """Null where no block lost any time."""
    set_aside_block_seconds: list[Rate] | None = None
    """Blocks of an earlier window that does not count because the process stood still; null: none."""
    step_seconds: list[Rate] | None = None
    """Duration of each step of the window on that rank, by the device's own clock where it has one.

    It tells how evenly one process runs; it is no measure of certainty. Null in older records and where
    nothing was timed.
    """
    claimed_step_seconds: list[Rate] | None = None
    """Step durations of the window that an external rung printed."""
    startup_seconds: Amount
    """From the start of the process to the first step: imports, data, weights.

    For an external rung to its first progress line, first step and compilation included.
    """
    import_seconds: Amount | None = None
    """Part of startup_seconds until the interpreter had loaded torch and found the device."""
    data_seconds: Amount | None = None
    """Part of startup_seconds that opened the corpus."""
    first_step_seconds: Amount | None
    """Duration of the first optimiser step, compilation included; null for external rungs."""
    once_seconds: Amount | None = None
    """Time after the window for what the rung's next process need not do: gradients, further losses, and
    proofs where time is short. Null in older records and where none of it was done."""
    compile_cache: CacheState | None
    """State of the compiler's cache at the start; null where nothing was compiled. shared: it held other
    rungs' code, of which parts may have served."""
    warmup_steps: Count
    """Untimed steps before the window, the first one included."""
    losses: list[Computed] = Field(min_length=1)
    """Loss of every step from step 0, mean over ranks; of an external rung one per progress line.

    Null is a loss that was no finite number: training diverged, or float16 overflowed.
    """
    grad_norms: list[Computed]
    """Gradient norms, likewise; empty where an external rung prints none."""
    peak_memory_bytes: AtLeastOne | None
    """Peak of the window, on the rank that needed most."""
    peak_memory_method: str
    gpu_memory_bytes: AtLeastOne | None = None
    """Memory of the whole NVIDIA GPU in use beyond what was in use before the process opened it.

    CUDA's context and the allocator's unused memory are included. For an external rung it is the most after
    any block, for ours at the end of the window, on the rank that needed most. Null in older records and
    where the driver does not tell.
    """
    reserved_memory_bytes: Count | None
    run_peak_memory_bytes: Count | None
    """Peak of the whole process, initialisation and compilation included."""
    alloc_retries: Count | None
    recompiles: Count | None
    """Compilations and recorded CUDA graphs in the window; older records lack the graphs."""
    gc_collections: Count | None = None
    """Runs of Python's garbage collector in the window, on the rank where they took longest."""
    gc_seconds: Amount | None = None
    """Time that they took."""
    data_wait_seconds: Amount | None
    """Time of the window spent waiting for batches, on the rank that waited most."""
    ranks: list[Rank]
    parameters: AtLeastOne
    flops_per_token: AtLeastOne
    flops_formula: str
    peak_flops_bf16: Rate | None
    """Dense peak of one device."""
    peak_flops_dtype: Rate | None = None
    """The same for the number format of this rung's matmuls."""
    peak_flops_source: str
    """Where the peaks are from, or why there is none."""
    peak_flops_kind: Literal["datasheet", "derived", "given"] | None = None
    """Published, derived from cores, clock and vector units, or given by the user; null: no peak."""
    peak_devices: AtLeastOne | None = None
    """Devices whose peaks add up; null in older records, where it is the world size."""
    product_format: str | None = None
    """Number format of the matmuls' inputs."""
    hardware_flops_per_token: AtLeastOne | None = None
    """FLOPs per token including what is computed a second time to save memory; null where nothing is."""
    gradient_difference: float | None = None
    """Largest relative difference of a parameter's gradient, as trained against eager code of torch.

    Taken on the same weights and batch; older records compare with eager code of the same functions. Null
    where it was not taken, and where gradients_finite is false.
    """
    gradient_error_over_eager: Amount | None = None
    """Where that is too large: the distance of the gradients from float32's, over that of eager code's.

    The largest ratio over the parameters that exceed the tolerance; null where it was not taken, and in older
    records.
    """
    gradients_finite: bool | None = None
    """Whether that difference was a finite number; null where it was not taken, and in older records."""
    ranks_agree: bool | None = None
    """Whether all ranks held the same weights after the window, bit for bit; null for one rank or unknown."""
    skipped_steps: Count | None = None
    """Steps whose gradients float16 could not hold, of all whose losses are kept; null without scaling."""
    attention_kernel: str | None = None
    """Kernel seen in the profiled step: flash, efficient, cudnn, math or other; null where none was seen."""
    profiled_seconds: dict[str, Amount] | None = None
    """Seconds of the profiled step on rank 0 by kind of work, see gpt2.proofs.breakdown.KINDS."""
    energy_joules: Amount | None = None
    """Energy of all devices in the window; null where there is no counter, 0 where it did not move."""
    other_cores: Amount | None = None
    """Cores that other processes kept busy during the window, on average."""
    programs_per_step: Amount | None = None
    """Compiled programs per step of the window, where the device compiles whole steps: 1 is right."""
    host_reads: Count | None = None
    """Values fetched from such a device during the window, each of which waits for it: 0 is right."""
    chips_before: list[ChipState] | None = None
    """Counters just before the window, where the device has such: TPUs, with tpu-info installed."""
    chips_after: list[ChipState] | None = None
    """Counters just after the window."""
    proofs: dict[str, Proof] | None = None
    """Proofs by toggle, from one profiled step after the window; null where none could be taken.

    Empty where none was asked for, because an earlier process of the rung had taken them.
    """

    @model_validator(mode="before")
    @classmethod
    def _split_non_finite(cls, values: Any) -> Any:
        """A difference that is no finite number becomes null, and gradients_finite says that it was taken."""
        if not isinstance(values, dict) or values.get("gradient_difference") is None:
            return values
        try:
            finite = math.isfinite(float(values["gradient_difference"]))  # "NaN" in older records
        except (TypeError, ValueError, OverflowError):  # the field's own check complains
            return values
        return {**values, "gradients_finite": finite} | ({} if finite else {"gradient_difference": None})

    @property
    def lacks(self) -> str | None:
        """The first field that our own rungs measure and this one lacks; None where that is nothing."""
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

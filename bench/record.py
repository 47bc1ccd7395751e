"""What a run leaves behind: one JSON object per process, appended to a .jsonl file. Imports no torch.

Everything a report shows is computed from these records. What was not measured is null, never 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA = 1
CEILING = "ceiling"
"""What the records of a machine's measured ceiling have for a rung."""

Kind = Literal["cumulative", "alone", "left_out", "control", "sweep", "parity", "external", "published"]
ABLATION: tuple[Kind, ...] = ("alone", "left_out")
"""What `bench run --ablate` adds."""
Status = Literal["ok", "out_of_memory", "unsupported", "failed", "timeout", "interrupted"]


class _Plain(BaseModel):
    # A field that comes later needs a default of None or empty, so that older files stay readable.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", populate_by_name=True)


class Environment(_Plain):
    """The machine and the software: part of the number."""

    chip: str
    """Name of one device, as it calls itself."""
    device_count: int
    """Devices of this kind here; physical cores for a CPU."""
    device_memory_bytes: int | None
    cpu: str
    cpu_cores: int
    """Physical."""
    cpu_flags: list[str]
    """Instruction sets that matter to matrix products."""
    memory_bytes: int
    """Of the machine."""
    os: str
    python: str
    torch: str
    versions: dict[str, str]
    """Driver, CUDA, cuDNN and the like, where the device has them."""
    variables: dict[str, str] = {}
    """Environment variables that can change the speed, where they are set."""
    load_average: float | None
    """Runnable processes over the last minute, just before the run."""
    code_hash: str
    """sha256 of the files of gpt2/ and bench/."""
    commit: str | None
    dirty: bool | None
    """Whether tracked files that matter to a run differ from the commit."""

    @property
    def machine(self) -> str:
        """Chip and count, fit for a folder's name."""
        noise = {"r", "tm", "c", "cpu", "gpu", "processor", "nvidia", "geforce", "with", "graphics"}
        words = "".join(c if c.isalnum() else " " for c in self.chip.lower().split("@")[0]).split()
        return "-".join([word for word in words if word not in noise] or ["unknown"]) + f"-x{self.device_count}"


class GpuState(_Plain):
    """One NVIDIA GPU at one moment; null is what its driver does not tell."""

    index: int
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_limit_default_watts: float | None = None
    throttle_reasons: list[str] = []
    """Why its clock is below what it could be; empty when it is not."""
    ecc: bool | None = None
    other_processes: int | None = None
    """Processes that compute on it and do not belong to the run."""


class State(_Plain):
    """What the machine was doing just before or just after a process."""

    load_average: float | None
    """Runnable processes over the last minute."""
    cpu_mhz: float | None
    swap_used_bytes: int
    memory_available_bytes: int
    gpus: list[GpuState] = []


class Matmul(_Plain):
    """The sustained rate of one matrix product, (m, k) by (k, n)."""

    name: str
    """square, or the GPT-2 layer whose shape it has: qkv, attention projection, MLP up, MLP down, lm_head."""
    number_format: str
    """float32, tf32, bfloat16 or float16: that of the inputs; products are summed in float32."""
    m: int
    k: int
    n: int
    flops_per_second: float


class Ceiling(_Plain):
    """What this machine's matrix units and memory reach when nothing else is asked of them."""

    chip: str
    threads: int | None
    """On a CPU."""
    matmuls: list[Matmul]
    absent: dict[str, str] = {}
    """Number formats that were not measured, with the reason."""
    copy_bytes_per_second: float
    """Read plus written, copying a tensor larger than any cache."""
    update_bytes_per_second: float | None = None
    """The same, changing one in place: more on CPUs, which read memory before they write to it."""
    seconds: float
    """The whole measurement, heat-up included."""

    @property
    def best(self) -> Matmul:
        """The fastest product of all: the denominator of the share of the measured ceiling."""
        return max(self.matmuls, key=lambda matmul: matmul.flops_per_second)


class Proof(_Plain):
    """Whether a toggle did in the process what it says, by what was seen there."""

    took_effect: bool
    evidence: str


class Rank(_Plain):
    """What one rank saw of the window."""

    block_seconds: list[float]
    peak_memory_bytes: int | None


class Measurement(_Plain):
    """What one process, or one group of ranks, measured."""

    tokens_per_step: int
    """Of all ranks together."""
    block_steps: int | None
    """Optimiser steps per block; null where nothing was timed."""
    block_seconds: list[float]
    """Duration of each block of the timed window, on the slowest rank: the raw samples. Empty: nothing was timed."""
    startup_seconds: float
    """From the start of the process to the first step: imports, data, weights."""
    first_step_seconds: float
    """The first optimiser step, compilation included."""
    compile_cache: Literal["cold", "warm"] | None
    """State of the compiler's cache at the start; null where nothing was compiled."""
    warmup_steps: int
    """Untimed steps before the window, the first one included."""
    losses: list[float]
    """Of every step from step 0, mean over ranks."""
    grad_norms: list[float]
    peak_memory_bytes: int | None
    """Of the window, on the rank that needed most."""
    peak_memory_method: str
    reserved_memory_bytes: int | None
    run_peak_memory_bytes: int | None
    """Of the whole process, initialisation and compilation included."""
    alloc_retries: int | None
    recompiles: int
    """Compilations during the window."""
    gc_collections: int | None = None
    """Of Python's garbage collector during the window, on the rank where they took longest."""
    gc_seconds: float | None = None
    """What they took."""
    data_wait_seconds: float
    """Time of the window spent waiting for batches, on the rank that waited most."""
    ranks: list[Rank]
    parameters: int
    flops_per_token: int
    flops_formula: str
    peak_flops_bf16: float | None
    """Of one device, dense."""
    peak_flops_dtype: float | None = None
    """The same for the number format of this rung's products."""
    peak_flops_source: str
    """Where these figures are from, or why there is none."""
    peak_devices: int | None = None
    """Devices whose peaks add up; null in older records, where it is the world size."""
    product_format: str | None = None
    """Number format of the matrix products' inputs."""
    hardware_flops_per_token: int | None = None
    """With what is computed a second time to save memory; null where nothing is."""
    gradient_difference: float | None = None
    """Compiled against eager, same weights and batch: the largest relative difference of a parameter's gradient."""
    energy_joules: float | None = None
    """Of all devices during the window; null where there is no counter."""
    other_cores: float | None = None
    """Cores that other processes kept busy during the window, on average."""
    proofs: dict[str, Proof] | None = None
    """By toggle, from one profiled step after the window; null where none was taken."""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over all ranks in the window, divided by the slowest rank's seconds."""
        if not self.block_seconds or self.block_steps is None:
            return None
        return self.tokens_per_step * self.block_steps * len(self.block_seconds) / sum(self.block_seconds)


class Outcome(_Plain):
    """What a worker tells the runner."""

    status: Status
    error: str | None = None
    environment: Environment | None = None
    measurement: Measurement | None = None
    data_sha256: str | None = None
    resolved: dict[str, Any] = {}
    """What toggles became in this process: threads, rows of the embedding."""
    warnings: list[str] = []
    ceiling: Ceiling | None = None
    """From a process that measures it and nothing else."""


def progress_path(out: Path) -> Path:
    """Where a worker that will write its Outcome to `out` leaves word of how far it is."""
    return out.with_name(out.name + ".progress")


class ToggleValues(_Plain):
    """A rung's toggles; one that is absent from an older record had its default."""

    all: dict[str, Any]
    resolved: dict[str, Any]


class Record(_Plain):
    """One process run of one rung, however it ended."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    run_id: str
    """Shared by all records of one `bench run`, resumed or not."""
    session: str = ""
    """UTC start of the `bench run` that ran this process: resuming begins another."""
    chosen: list[str] | None = None
    """Names of the rungs that the run was told to take; null means all."""
    time: str
    """UTC start of the process, ISO 8601."""
    kind: Kind
    ladder: str
    ladder_hash: str
    protocol: dict[str, Any]
    rung: str
    rung_index: int
    repetition: int
    """Round, counted from 1."""
    status: Status
    expect: Literal["inert", "out_of_memory"] | None = None
    error: str | None
    """Where it did not end well: first a line that says how, then the last lines of its output."""
    exit_code: int | None
    """As the shell would show it; minus the signal's number where a signal ended it."""
    command: str
    """Runs this rung again, alone; DATA stands for the path of the corpus."""
    warnings: list[str]
    changed: list[str]
    """What differs from the ladder's rung before, as shown to a reader."""
    workload: dict[str, Any]
    data_sha256: str | None
    toggles: ToggleValues
    environment: Environment
    measurement: Measurement | None
    ceiling: Ceiling | None = None
    before: State | None = None
    during: State | None = None
    """At the beginning of the window."""
    after: State | None = None
    price_per_hour: float | None = None
    """Of the whole machine, in the user's currency."""


class RecordError(Exception):
    """A results file that cannot be read; the message names file and line."""


def append(path: Path, record: Record) -> None:
    """Add one record to a results file; on return it is on the disk.

    Raises OSError, of a full disk for one, and then leaves the file as it was.
    """
    line = memoryview((record.model_dump_json(by_alias=True) + "\n").encode())
    created = not path.exists()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while line:
                line = line[file.write(line) :]  # a disk that is nearly full takes a part
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    if created and os.name == "posix":  # a new file's name is on the disk only once its folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a results file, and warnings about what was left out.

    A last line without its newline is what a killed run leaves and is left out with a warning. Anything else
    that is no record raises RecordError.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}") from None
    torn = lines.pop()
    warnings = [f"{path}: the last line is cut off and was left out"] if torn else []
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            what = f"{where}: {first['msg']}" if where else first["msg"]
            raise RecordError(f"{path}:{number}: no record of schema {SCHEMA}: {what}") from None
    return records, warnings

"""What a record says of a machine: environment, telemetry and measured ceiling. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
AtLeastOne = Annotated[int, Field(ge=1, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-12, le=1e24)]
"""A number to divide by or take the logarithm of; beyond these bounds intervals overflow."""


class Plain(BaseModel):
    """A part of a record, or the whole: read-only, and without fields that are not declared."""

    # A field that comes later needs a default of None or empty, so that older files stay readable.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null", populate_by_name=True)

    def as_json(self) -> str:
        """Return it as JSON on one line; bytes of a name that are no UTF-8 become U+FFFD."""
        try:
            return self.model_dump_json(by_alias=True)
        except ValueError:  # pydantic's, of a text with half a character
            plain = _in_utf8(self.model_dump(by_alias=True))
            return type(self).model_validate(plain).model_dump_json(by_alias=True)


def _in_utf8(value: Any) -> Any:
    """Replace, in all texts, what stands for a byte that is no UTF-8, as Python reads names and variables."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if isinstance(value, dict):
        return {_in_utf8(key): _in_utf8(each) for key, each in value.items()}
    return [_in_utf8(each) for each in value] if isinstance(value, list) else value


class Environment(Plain):
    """The machine and the software: part of the number."""

    chip: str
    """Name of one device, as it calls itself."""
    device_count: AtLeastOne
    """Devices of this kind here; physical cores for a CPU."""
    device_memory_bytes: AtLeastOne | None
    cpu: str
    cpu_cores: AtLeastOne
    """Physical cores."""
    usable_cores: AtLeastOne | None = None
    """Cores that the process may use; null in older records."""
    cpu_flags: list[str]
    """Instruction sets that matter to matrix products."""
    cpu_mhz: Amount | None = None
    """Highest clock, or the one that a virtual machine reports; null where the system does not tell."""
    measured_cpu_mhz: Amount | None = None
    """In a virtual machine, the clock of all cores at work, by chains of dependent additions; else null."""
    cpu_identity: dict[str, str] = {}
    """Vendor, family, model and stepping, or ARM's implementer and part; empty in older records."""
    memory_bytes: AtLeastOne
    """Memory of the machine."""
    os: str
    python: str
    torch: str
    versions: dict[str, str]
    """Versions of driver, CUDA, cuDNN and the like, where the device has them."""
    variables: dict[str, str] = {}
    """Environment variables that can change the speed, where they are set."""
    nodes: AtLeastOne | None = None
    """Number of machines of the run, alike in all the above; null: one."""
    load_average: Amount | None
    """Runnable processes over the last minute, just before the run."""
    code_hash: str
    """sha256 of the files of gpt2/ and bench/."""
    commit: str | None
    dirty: bool | None
    """Whether tracked files that matter to a run differ from the commit."""

    @property
    def xla_on_cpu(self) -> bool:
        """Whether its device is XLA's backend for the machine's own processor."""
        return self.versions.get("xla_backend") == "CPU"

    @property
    def machine(self) -> str:
        """Name of the machine from chip, count and number of nodes, fit for a folder's name.

        Of a CPU of which the process may use some cores only, those count: it is as good as another machine.
        """
        noise = {"r", "tm", "c", "cpu", "gpu", "processor", "nvidia", "geforce", "with", "graphics"}
        noise |= {"family", "model", "stepping", "implementer", "part"}  # of a CPU that has numbers, no name
        words = "".join(c if c.isalnum() else " " for c in self.chip.lower().split("@")[0]).split()
        name = "-".join([word for word in words if word not in noise] or ["unknown"])
        usable = self.usable_cores if self.chip == self.cpu else None
        count = min(self.device_count, usable or self.device_count)
        return f"{name}-x{count}{f'-{self.nodes}nodes' if self.nodes else ''}"


Difference = tuple[str, object, object]
"""What must be equal and is not, its old and its new value."""

TOLERANCE = 0.01
"""Relative tolerance of amounts: a new kernel keeps more memory for itself and measures the clock anew."""


def differences(was: Environment, now: Environment, *, same_device: bool = True) -> Iterator[Difference]:
    """Yield how two environments differ in what matters to a measurement.

    same_device: whether both are of processes on the same kind of device; others see other chips and drivers.
    """
    versions = {**was.versions, **now.versions} if same_device else {}
    chips = [("the chip", was.chip, now.chip), ("the number of devices", was.device_count, now.device_count)]
    cpus = [("the CPU", was.cpu, now.cpu)]
    if same_device and (was.chip, now.chip) == (was.cpu, now.cpu):
        cpus = []  # the CPU is the chip
    for name, before, after in (
        *(chips if same_device else []),
        ("the number of nodes", was.nodes or 1, now.nodes or 1),
        *cpus,
        ("the number of usable cores", was.usable_cores, now.usable_cores),
        ("torch", was.torch, now.torch),
        ("Python", was.python, now.python),
        *((name, was.versions.get(name), now.versions.get(name)) for name in versions),
        ("the set environment", was.variables, now.variables),
        ("the code of gpt2/ and bench/ (hash)", was.code_hash[:12], now.code_hash[:12]),
    ):
        if before != after:
            yield name, before, after
    device_memory = ("the device's memory", was.device_memory_bytes or 0, now.device_memory_bytes or 0)
    for name, before, after in (
        ("the machine's memory", was.memory_bytes, now.memory_bytes),
        ("the CPU's clock (MHz)", was.cpu_mhz, now.cpu_mhz),
        *([device_memory] if same_device else []),
    ):
        if before is not None and after is not None and abs(after - before) > TOLERANCE * before:
            yield name, before, after


class GpuState(Plain):
    """One NVIDIA GPU at one moment; null is what its driver does not tell."""

    index: int
    temperature_celsius: Amount | None = None
    sm_clock_mhz: Amount | None = None
    sm_clock_max_mhz: Amount | None = None
    memory_clock_mhz: Amount | None = None
    power_watts: Amount | None = None
    power_limit_watts: Amount | None = None
    power_limit_default_watts: Amount | None = None
    throttle_reasons: list[str] = []
    """Why its clock is below what it could be; empty when it is not."""
    ecc: bool | None = None
    other_processes: Count | None = None
    """Processes that compute on it and do not belong to the run."""


class ChipState(Plain):
    """One TPU core's memory and its chip's occupation, as the process that trains can read them."""

    index: int
    memory_bytes: Count
    memory_total_bytes: Count
    duty_cycle_percent: Amount


class State(Plain):
    """What the machine was doing before, during or after a process."""

    load_average: Amount | None
    """Runnable processes over the last minute."""
    cpu_mhz: Amount | None
    swap_used_bytes: Count | None
    """Null where the system does not tell."""
    memory_available_bytes: Count
    gpus: list[GpuState] = []


Role = Literal["forward", "input_gradient", "weight_gradient"]
"""Which of a linear layer's three matrix products in a training step."""


class Matmul(Plain):
    """The sustained rate of one matrix product, (m, k) by (k, n)."""

    name: str
    """square, or the GPT-2 layer whose shape it has: qkv, attention projection, MLP up, MLP down, lm_head."""
    role: Role | None = None
    """The layer's matmul; null for squares, and in older records, whose matmuls are all forward."""
    number_format: str
    """float32, tf32, bfloat16 or float16: format of the inputs; products are summed in float32."""
    m: AtLeastOne
    k: AtLeastOne
    n: AtLeastOne
    flops_per_second: Rate

    @property
    def title(self) -> str:
        """Name for a reader: qkv, input gradient of qkv."""
        if self.role in (None, "forward"):
            return self.name
        return f"{self.role.replace('_', ' ')} of {self.name}"


class Attention(Plain):
    """The sustained rate of one layer's causal attention by torch's own choice of kernel.

    q, k, v: (B, n_head, seq_len, head_dim).
    """

    number_format: str
    """bfloat16 or float32: format of q, k and v."""
    B: AtLeastOne
    """Number of sequences."""
    n_head: AtLeastOne
    seq_len: AtLeastOne
    head_dim: AtLeastOne
    forward_seconds: Rate
    """Duration of the forward pass."""
    training_seconds: Rate
    """Duration of the forward and backward pass."""
    flops: AtLeastOne
    """FLOPs of forward and backward pass on the causal half of the scores; a third is the forward pass's."""
    flops_per_second: Rate
    """flops over training_seconds."""
    kernel: str | None = None
    """flash, efficient, cudnn, math or other; null where none was recognised."""


class Ceiling(Plain):
    """What this machine's matrix units and memory reach when nothing else is asked of them."""

    chip: str
    threads: int | None
    """Number of threads on a CPU."""
    matmuls: list[Matmul] = Field(min_length=1)
    attention: Attention | None = None
    """Null in older records, too."""
    absent: dict[str, str] = {}
    """Why number formats, or attention, were not measured."""
    copy_bytes_per_second: Rate
    """Read plus written, copying a tensor larger than any cache."""
    update_bytes_per_second: Rate | None = None
    """The same, changing one in place: more on CPUs, which read memory before they write to it."""
    seconds: Amount
    """Duration of the whole measurement, heat-up included."""

    @property
    def best(self) -> Matmul:
        """The fastest matmul of all: the denominator of the share of the measured ceiling."""
        return max(self.matmuls, key=lambda matmul: matmul.flops_per_second)

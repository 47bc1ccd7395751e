"""What a record says of a machine: what it is, what it was doing, and what it can reach. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**63)]
AtLeastOne = Annotated[int, Field(ge=1, lt=2**63)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-12, le=1e24)]
"""What divides, or has a logarithm taken of it; beyond these bounds intervals overflow, and nothing was
measured.
"""


class Plain(BaseModel):
    """A part of a record, or the whole: read-only, and with no field that is not declared."""

    # A field that comes later needs a default of None or empty, so that older files stay readable.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null", populate_by_name=True)


class Environment(Plain):
    """The machine and the software: part of the number."""

    chip: str
    """Name of one device, as it calls itself."""
    device_count: AtLeastOne
    """Devices of this kind here; physical cores for a CPU."""
    device_memory_bytes: AtLeastOne | None
    cpu: str
    cpu_cores: AtLeastOne
    """Physical."""
    usable_cores: AtLeastOne | None = None
    """Of these, those that the process may use; null in older records."""
    cpu_flags: list[str]
    """Instruction sets that matter to matrix products."""
    cpu_mhz: Amount | None = None
    """Its highest clock, or the one that a virtual machine says it has; null where the system does not tell.
    """
    cpu_identity: dict[str, str] = {}
    """What the CPU says it is, where the system tells: vendor, family, model and stepping, or ARM's
    implementer and part; empty in older records.
    """
    memory_bytes: AtLeastOne
    """Of the machine."""
    os: str
    python: str
    torch: str
    versions: dict[str, str]
    """Driver, CUDA, cuDNN and the like, where the device has them."""
    variables: dict[str, str] = {}
    """Environment variables that can change the speed, where they are set."""
    nodes: AtLeastOne | None = None
    """Machines, alike in all the above, that the run is over; null: one."""
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
        """Chip and count, and of how many nodes, fit for a folder's name."""
        noise = {"r", "tm", "c", "cpu", "gpu", "processor", "nvidia", "geforce", "with", "graphics"}
        noise |= {
            "family",
            "model",
            "stepping",
            "implementer",
            "part",
        }  # between the numbers of a CPU without a name
        words = "".join(c if c.isalnum() else " " for c in self.chip.lower().split("@")[0]).split()
        name = (
            "-".join([word for word in words if word not in noise] or ["unknown"]) + f"-x{self.device_count}"
        )
        return f"{name}-{self.nodes}nodes" if self.nodes else name


Difference = tuple[str, object, object]
"""What must be equal and is not, what it was and what it is."""

TOLERANCE = 0.01
"""Of amounts: a new kernel keeps a little more or less of the memory for itself, and measures the clock anew.
"""


def differences(was: Environment, now: Environment, *, same_device: bool = True) -> Iterator[Difference]:
    """In what two machines, or one at two times, are not the same to a measurement.

    same_device: whether both are as processes on the same kind of device see them; those on others see other
    chips and drivers.
    """
    versions = {**was.versions, **now.versions} if same_device else {}
    seen = [("the chip", was.chip, now.chip), ("the number of devices", was.device_count, now.device_count)]
    for name, there, here in (
        *(seen if same_device else []),
        ("the number of nodes", was.nodes or 1, now.nodes or 1),
        ("the CPU", was.cpu, now.cpu),
        ("the number of usable cores", was.usable_cores, now.usable_cores),
        ("torch", was.torch, now.torch),
        ("Python", was.python, now.python),
        *((name, was.versions.get(name), now.versions.get(name)) for name in versions),
        ("the set environment", was.variables, now.variables),
        ("the code of gpt2/ and bench/ (hash)", was.code_hash[:12], now.code_hash[:12]),
    ):
        if there != here:
            yield name, there, here
    for name, before, after in (
        ("the machine's memory", was.memory_bytes, now.memory_bytes),
        ("the CPU's clock (MHz)", was.cpu_mhz, now.cpu_mhz),
        *(
            [("the device's memory", was.device_memory_bytes or 0, now.device_memory_bytes or 0)]
            if same_device
            else []
        ),
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
    """What the machine was doing just before or just after a process."""

    load_average: Amount | None
    """Runnable processes over the last minute."""
    cpu_mhz: Amount | None
    swap_used_bytes: Count
    memory_available_bytes: Count
    gpus: list[GpuState] = []


Role = Literal["forward", "input_gradient", "weight_gradient"]
"""Which of a linear layer's three matrix products in a training step."""


class Matmul(Plain):
    """The sustained rate of one matrix product, (m, k) by (k, n)."""

    name: str
    """square, or the GPT-2 layer whose shape it has: qkv, attention projection, MLP up, MLP down, lm_head."""
    role: Role | None = None
    """Of a layer's product; null for squares, and in older records, whose layers' products are all forward.
    """
    number_format: str
    """float32, tf32, bfloat16 or float16: that of the inputs; products are summed in float32."""
    m: AtLeastOne
    k: AtLeastOne
    n: AtLeastOne
    flops_per_second: Rate

    @property
    def title(self) -> str:
        """Its name as people read it: qkv, input gradient of qkv."""
        if self.role in (None, "forward"):
            return self.name
        return f"{self.role.replace('_', ' ')} of {self.name}"


class Attention(Plain):
    """The sustained rate of one layer's causal attention by torch's own choice of kernel.

    q, k, v: (B, n_head, seq_len, head_dim).
    """

    number_format: str
    """bfloat16 or float32: that of q, k and v."""
    B: AtLeastOne
    """Sequences."""
    n_head: AtLeastOne
    seq_len: AtLeastOne
    head_dim: AtLeastOne
    forward_seconds: Rate
    """Of the forward pass."""
    training_seconds: Rate
    """Of the forward and backward pass."""
    flops: AtLeastOne
    """Of the forward and backward pass, on the causal half of the scores; a third of them is the forward
    pass's.
    """
    flops_per_second: Rate
    """Over training_seconds."""
    kernel: str | None = None
    """flash, efficient, cudnn, math or other; null where none was recognised."""


class Ceiling(Plain):
    """What this machine's matrix units and memory reach when nothing else is asked of them."""

    chip: str
    threads: int | None
    """On a CPU."""
    matmuls: list[Matmul] = Field(min_length=1)
    attention: Attention | None = None
    """Null in older records, too."""
    absent: dict[str, str] = {}
    """Number formats that were not measured, with the reason; attention likewise."""
    copy_bytes_per_second: Rate
    """Read plus written, copying a tensor larger than any cache."""
    update_bytes_per_second: Rate | None = None
    """The same, changing one in place: more on CPUs, which read memory before they write to it."""
    seconds: Amount
    """The whole measurement, heat-up included."""

    @property
    def best(self) -> Matmul:
        """The fastest product of all: the denominator of the share of the measured ceiling."""
        return max(self.matmuls, key=lambda matmul: matmul.flops_per_second)

"""Published figures of others, a JSON object a line in results/published/. Imports no torch.

Other code measured them, so no table ranks them with ours without the label "published".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.records.machine import Amount, AtLeastOne, Plain, Rate
from bench.records.record import SCHEMA, read_lines

MARK = b'"kind":"published"'
"""Mark in the first line of a file of published figures."""

Series = Literal[
    "ladder", "apart", "batch sweep", "scaling", "accumulated scaling", "full run", "mfu context"
]


class Published(Plain):
    """One row of somebody's table; null is what the source does not say."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    kind: Literal["published"] = "published"
    source: str
    """Short name of the publisher."""
    url: str | None = None
    series: Series
    """Figures of one series follow from one another; those of different series do not."""
    rung: str
    label: str | None = None
    """The source's own name for it."""
    hardware: str | None = None
    devices: AtLeastOne | None = None
    """Number of devices over which all figures are summed."""
    model: str | None = None
    seq_len: AtLeastOne | None = None
    number_format: str | None = None
    tps: Rate | None = None
    speedup: Rate | None = None
    """Speed-up over the series' first row, as stated."""
    memory_bytes: AtLeastOne | None = None
    """Peak of allocated memory of one device."""
    mfu: dict[str, Rate] = Field(default_factory=dict)
    """MFU as stated, a share, by the number format of its peak."""
    mfu_low: Rate | None = None
    """Lowest MFU among the runs of the source; only in series "mfu context"."""
    mfu_high: Rate | None = None
    """Highest MFU, likewise."""
    flops_per_token: AtLeastOne | None = None
    peak_flops: dict[str, Rate] = Field(default_factory=dict)
    """Peak of one device by number format, as the source takes it."""
    step_seconds: Rate | None = None
    micro_batch_size: AtLeastOne | None = None
    tokens_per_step: AtLeastOne | None = None
    tokens: Rate | None = None
    """Tokens of a full run."""
    minutes: Rate | None = None
    """Duration of a full run."""
    dataset: str | None = None
    cost_usd: Amount | None = None
    note: str | None = None

    @property
    def task(self) -> tuple[str | None, int | None]:
        """Model and sequence length; speeds of different ones do not compare."""
        return self.model, self.seq_len

    @property
    def on(self) -> str | None:
        """The hardware, with how many of it where there are several; None where the source does not say."""
        several = self.devices is not None and self.devices > 1
        return f"{self.devices} x {self.hardware}" if self.hardware and several else self.hardware

    def recomputed_mfu(self, number_format: str) -> float | None:
        """MFU from stated tokens per second, FLOPs per token and peak; None where one is not stated."""
        peak = self.peak_flops.get(number_format)
        if self.tps is None or self.flops_per_token is None or peak is None or self.devices is None:
            return None
        return self.tps * self.flops_per_token / (peak * self.devices)


def is_published(path: Path) -> bool:
    """Whether a results file holds published figures; False where it cannot be read, as read() says why."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
            return MARK in first.replace(b" ", b"")
    except OSError:
        return False


def read_published(path: Path, warnings: list[str] | None = None) -> list[Published]:
    """All figures of a file. Raises RecordError.

    warnings: takes the one about a last line that is cut off, which is left out.
    """
    figures, left_out = read_lines(path, Published, "published figure")
    if warnings is not None:
        warnings += left_out
    return figures

"""Figures that others have published, kept as data: a JSON object for each in results/published/. Imports no
torch.

They were measured by other code than this, so no table ranks them with ours without the label "published".
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from bench.records.machine import Amount, AtLeastOne, Plain, Rate
from bench.records.record import SCHEMA, read_lines

MARK = b'"kind":"published"'
"""In the first line of a file of such figures."""

Series = Literal[
    "ladder", "apart", "batch sweep", "scaling", "accumulated scaling", "full run", "mfu context"
]


class Published(Plain):
    """One row of somebody's table; null is what they do not say."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    kind: Literal["published"] = "published"
    source: str
    """Short name of who published it."""
    url: str | None = None
    series: Series
    """Figures of one series follow from one another; those of different series do not."""
    rung: str
    label: str | None = None
    """The source's own name for it."""
    hardware: str | None = None
    devices: AtLeastOne | None = None
    """Over which all figures are summed."""
    model: str | None = None
    seq_len: AtLeastOne | None = None
    number_format: str | None = None
    tps: Rate | None = None
    speedup: Rate | None = None
    """As stated, over the series' first row."""
    memory_bytes: AtLeastOne | None = None
    """Peak, allocated, of one device."""
    mfu: dict[str, Rate] = Field(default_factory=dict)
    """As stated, a share, by the number format of its peak."""
    mfu_low: Rate | None = None
    """Of a series "mfu context": the lowest share among the runs that the source tells of."""
    mfu_high: Rate | None = None
    """The highest."""
    flops_per_token: AtLeastOne | None = None
    peak_flops: dict[str, Rate] = Field(default_factory=dict)
    """Of one device, by number format, as the source takes them."""
    step_seconds: Rate | None = None
    micro_batch_size: AtLeastOne | None = None
    tokens_per_step: AtLeastOne | None = None
    tokens: Rate | None = None
    """Of a full run."""
    minutes: Rate | None = None
    """It took."""
    dataset: str | None = None
    cost_usd: Amount | None = None
    note: str | None = None

    def recomputed_mfu(self, number_format: str) -> float | None:
        """Its tokens per second times FLOPs per token over the devices' peak; None where one of them is not
        said.
        """
        peak = self.peak_flops.get(number_format)
        if self.tps is None or self.flops_per_token is None or peak is None or self.devices is None:
            return None
        return self.tps * self.flops_per_token / (peak * self.devices)


def is_published(path: Path) -> bool:
    """Whether a results file holds figures of others; of one that cannot be read, read() will tell why."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
            return MARK in first.replace(b" ", b"")
    except OSError:
        return False


def read_published(path: Path, warnings: list[str] | None = None) -> list[Published]:
    """All figures of a file.

    warnings: takes that about a last line that is cut off, which is left out. Raises RecordError.
    """
    found, left_out = read_lines(path, Published, "published figure")
    if warnings is not None:
        warnings += left_out
    return found

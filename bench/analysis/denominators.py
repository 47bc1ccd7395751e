"""What speeds are held to: peaks of datasheets, and the ceiling that was measured on the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.analysis.run_records import toggles_of
from bench.records.machine import Ceiling as Measured
from bench.records.machine import Matmul
from bench.records.measurement import Measurement
from bench.records.record import Record
from bench.stats import geometric_mean


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The fastest matrix product measured on this machine, over the processes that measured it."""

    flops_per_second: float
    """Of one device: the geometric mean over the processes."""
    rates: tuple[float, ...]
    """Each process's."""
    product: Matmul
    """The one that was fastest in the first process."""
    elsewhere: str | None
    """The run that measured it, where it was not this one."""
    measured: tuple[Measured, ...]
    """All that each process measured: other products and formats, and the speed of memory."""


def find_ceilings(records: Sequence[Record]) -> dict[str, Ceiling]:
    """By kind of device, of the run itself or, for want of that, from elsewhere."""
    by_device: dict[str, list[Record]] = {}
    for record in records:
        if record.ceiling:
            by_device.setdefault(toggles_of([record]).device, []).append(record)
    result = {}
    for device, found in by_device.items():
        own = [record for record in found if record.ladder == records[0].ladder]
        measured = tuple(record.ceiling for record in own or found[-1:] if record.ceiling)
        best = [each.best for each in measured]
        rates = [each.flops_per_second for each in best]
        result[device] = Ceiling(
            flops_per_second=geometric_mean(rates).value,
            rates=tuple(rates),
            product=best[0],
            elsewhere=None if own else found[-1].run_id,
            measured=measured,
        )
    return result


Peaks = Mapping[tuple[str, str | None], float]
"""FLOP/s of one device, by its kind and the number format; by "bf16" the denominator of MFU."""


def find_peaks(records: Sequence[Record]) -> Peaks:
    """One for the whole ladder: a peak that is derived from the clock could differ from process to process."""
    found: dict[tuple[str, str | None], float] = {}
    for record in records:
        if m := record.measurement:
            device = toggles_of([record]).device
            for key, peak in (("bf16", m.peak_flops_bf16), (m.product_format, m.peak_flops_dtype)):
                if peak is not None:
                    found.setdefault((device, key), peak)
    return found


def share(
    rate: float | None, found: Measurement | None, peak: float | None, *, hardware: bool = False
) -> float | None:
    """Of `peak` FLOP/s, what `rate` tokens per second and device need."""
    flops = (found.hardware_flops_per_token if hardware else found.flops_per_token) if found else None
    return flops * rate / peak if flops and rate and peak else None

"""Combine the windows of all ranks into one Measurement."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from statistics import mean
from typing import Any

from bench.host.standstill import Instant, standstills
from bench.records.machine import ChipState
from bench.records.measurement import Measurement, Rank, StoodStill
from bench.run.measure import CpuUse, Window


def combine(
    windows: list[Window], losses: list[list[float]], grad_norms: list[float], *, nodes: int = 1, **facts: Any
) -> Measurement:
    """Return one Measurement from the windows and losses of all ranks, rank 0 first.

    nodes: machines, with equally many ranks each, in order. facts: fields that no rank measures.
    """
    slowest = max(windows, key=lambda window: sum(window.block_seconds))
    first = windows[0]
    return Measurement(
        block_steps=first.block_steps,
        block_seconds=slowest.block_seconds,
        block_lost_seconds=[round(max(each), 6) for each in zip(*map(_lost_seconds, windows), strict=True)]
        or None,
        stood_still=stood_still([window.blocks for window in windows]),
        set_aside_block_seconds=[
            max(block.seconds for block in of_ranks)
            for of_ranks in zip(*(window.set_aside for window in windows), strict=True)
        ]
        or None,
        step_seconds=[round(seconds, 7) for seconds in slowest.step_seconds] or None,
        first_step_seconds=max(window.first_step_seconds for window in windows),
        warmup_steps=first.warmup_steps,
        losses=[mean(values) for values in zip(*losses, strict=True)],
        grad_norms=grad_norms,
        peak_memory_bytes=_highest(window.memory.bytes for window in windows),
        peak_memory_method=first.memory.method,
        gpu_memory_bytes=_highest(window.gpu_memory_bytes for window in windows),
        reserved_memory_bytes=_highest(window.memory.reserved_bytes for window in windows),
        run_peak_memory_bytes=_highest(window.memory.run_bytes for window in windows),
        alloc_retries=_highest(window.memory.alloc_retries for window in windows),
        recompiles=max(window.recompiles for window in windows),
        gc_collections=max(windows, key=lambda window: window.gc_seconds).gc_collections,
        gc_seconds=max(window.gc_seconds for window in windows),
        energy_joules=_sum(window.energy_joules for window in windows),
        programs_per_step=first.programs_per_step,
        host_reads=first.host_reads,
        chips_before=_used(first, 0),
        chips_after=_used(first, 1),
        other_cores=_other_cores([window.cpu for window in windows if window.cpu], nodes),
        data_wait_seconds=max(window.data_wait_seconds for window in windows),
        ranks=[
            Rank(block_seconds=window.block_seconds, peak_memory_bytes=window.memory.bytes)
            for window in windows
        ],
        **facts,
    )


def stood_still(ranks: list[list[Instant]]) -> StoodStill | None:
    """Return the standstill of the rank that lost most time; None if none stood still.

    ranks: the blocks of each rank.
    """
    lost = [standstills(blocks) for blocks in ranks]
    rank = max(range(len(ranks)), key=lambda rank: sum(lost[rank].values()))
    if not lost[rank]:
        return None
    seconds = sum(lost[rank].values())
    return StoodStill(
        seconds=round(seconds, 6),
        blocks=len(lost[rank]),
        of_blocks=len(ranks[rank]),
        rank=rank if len(ranks) > 1 else None,
        asleep=sum(block.asleep_seconds or 0.0 for block in ranks[rank]) > seconds / 2,
    )


def _lost_seconds(window: Window) -> list[float]:
    """Return lost seconds by block; empty if they are not known."""
    if any(block.lost_seconds is None and block.asleep_seconds is None for block in window.blocks):
        return []
    lost = standstills(window.blocks)
    return [lost.get(number, 0.0) for number in range(len(window.blocks))]


def _used(window: Window, when: int) -> list[ChipState] | None:
    return [ChipState(**asdict(use)) for use in window.chips[when]] if window.chips else None


def _other_cores(ranks: list[CpuUse], nodes: int) -> float | None:
    """Return the mean cores kept busy by other processes than these ranks, on the busiest node."""
    if not ranks:
        return None
    here = len(ranks) // nodes
    cores = [0.0]
    for first in range(0, len(ranks), here):
        others = ranks[first].busy_seconds - sum(rank.own_seconds for rank in ranks[first : first + here])
        cores.append(others / ranks[first].seconds)
    return max(cores)


def _sum(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if any value is."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)

"""What a ladder would do on this machine, as a table; nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.ladder import LEAST_BLOCKS, Ladder, Rung
from bench.report.text import GIB, plain
from bench.schedule import Schedule
from bench.stats import LEAST_ROUNDS_UNTIL, MOST_ROUNDS_UNTIL
from gpt2.device import find
from gpt2.memory import estimate
from gpt2.peaks import Chip
from gpt2.toggles import HOST, UnsupportedToggle, check, describe
from gpt2.workload import FLOPS_FORMULA


def table(ladder: Ladder, rungs: Sequence[Rung], chip: Chip | None = None, *, ablate: bool = False) -> Group:
    """For each rung: what it changes, its tokens per step, memory per device, and whether it can run here.

    chip: instead, whether it fits into the memory of this one. ablate: counts those processes, too.
    """
    workload = ladder.workload
    result = Table(title=Text(plain(f"{ladder.path}: {ladder.name}")))
    result.add_column("Rung", overflow="fold")
    result.add_column("Changed", overflow="fold")
    result.add_column("Tokens per step", justify="right")
    result.add_column("Memory per device (GiB)", justify="right")
    result.add_column(f"On {chip.name}" if chip else "Here", overflow="fold")
    before = None
    for rung in rungs:
        memory = estimate(workload, rung.toggles).total
        changed = describe(rung.toggles, before, workload)
        before = rung.toggles
        result.add_row(
            Text(plain(rung.name)),
            Text(plain(", ".join(changed)) or "nothing"),
            f"{rung.toggles.tokens_per_step(workload.seq_len):,}",
            f"{memory / GIB:.2f}",
            Text(plain(_fits(rung, memory, chip) if chip else _support(rung, memory))),
        )
    p = ladder.protocol
    fewer = f"{LEAST_BLOCKS} where these take longer than {p.max_window_seconds:g} s"
    notes = [
        f"{workload.model}: {workload.config.parameters:,} parameters; {workload.flops_per_token:,} FLOPs per token "
        f"at T = {workload.seq_len} ({FLOPS_FORMULA}); data: {workload.data}.",
        "Memory: estimate of weights, gradients, AdamW's state and uncompiled activations; libraries add their own.",
        f"{_processes(ladder, rungs, ablate)}; each with a window of up to {p.blocks} blocks of about "
        f"{p.block_seconds:g} s ({fewer}) and a limit of {p.timeout_seconds:g} s.",
    ]
    return Group(result, *(Text(plain(note), style="dim") for note in notes))


def _processes(ladder: Ladder, rungs: Sequence[Rung], ablate: bool) -> str:
    schedule = Schedule(ladder, rungs, ablate)
    rounds = schedule.planned_rounds
    first, each = list(schedule.round(1)), list(schedule.round(2))
    controlled = any(task.kind == "control" for task in each)
    parity = sum(task.kind == "parity" for task in first)
    ceilings = sum(task.is_ceiling for task in first) + len(list(schedule.closing(rounds)))
    more = [f"{parity} for loss parity"] if parity else []
    more += [f"{ceilings} for the measured ceiling"] if ceilings else []
    control = "the A/A control included" if controlled else "without an A/A control"
    return f"{_rounds(ladder)} of {len(each)} processes, {control}{''.join(f', and {part}' for part in more)}"


def _rounds(ladder: Ladder) -> str:
    until, repeats = ladder.protocol.until, ladder.protocol.repeats
    if until is not None:
        return f"{LEAST_ROUNDS_UNTIL} to {MOST_ROUNDS_UNTIL} rounds"
    return f"{repeats} rounds" if repeats > 1 else "1 round"


def _support(rung: Rung, memory: int) -> str:
    try:
        here = find(rung.toggles).memory_bytes()
    except UnsupportedToggle as error:
        return f"unsupported: {error}"
    return f"will not fit into {here / GIB:.1f} GiB" if here is not None and memory > here else "yes"


def _fits(rung: Rung, memory: int, chip: Chip) -> str:
    """On a chip that need not be here, as far as its kind of device and its datasheet tell."""
    if rung.toggles.device == HOST:
        return "trains on a CPU"
    try:
        check(rung.toggles)
    except UnsupportedToggle as error:
        return f"unsupported: {error}"
    if chip.memory_bytes is None:
        return "unknown: its name covers several sizes of memory"
    return f"{'will not fit' if memory > chip.memory_bytes else 'fits'} into {chip.memory_bytes / GIB:.0f} GiB"

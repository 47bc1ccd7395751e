"""`bench plan`: what a ladder would do on this machine, as a table."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bench.analysis.schedule import Schedule
from bench.format import GIB
from bench.host.feasibility import TIGHT, check_time, devices_here
from bench.ladder.ladder import Ladder, LadderError, Rung
from bench.ladder.peers import PeerRung
from bench.report.brief import Brief
from bench.report.table import Column, Table
from bench.run.peers.checkout import why_missing
from bench.stats import LEAST_ROUNDS_UNTIL, MOST_ROUNDS_UNTIL
from gpt2.config.constraints import check
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle, describe
from gpt2.config.workload import FLOPS_FORMULA, Workload
from gpt2.device import Device, DeviceError, find
from gpt2.hardware.peaks import Chip
from gpt2.training.memory_estimate import MemoryEstimate, estimate


@dataclass(frozen=True)
class Answer:
    """Whether a rung can run."""

    text: str
    """With the reason, and what to do, where it cannot."""
    refusal: str = ""
    """Why it cannot, in a word or two; empty where it can."""


def _unsupported(reason: object) -> Answer:
    return Answer(f"not supported: {reason}", refusal="not supported")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A rung, and what it would take here."""

    rung: str
    changed: str
    tokens_per_step: int
    memory_bytes: int | None
    """Estimate per device; None of another trainer."""
    answer: Answer | None
    """None where it is not known whether it can run."""

    @property
    def refused(self) -> bool:
        return self.answer is not None and self.answer.refusal != ""


def plan(ladder: Ladder, rungs: Sequence[Rung], chip: Chip | None = None, *, ablate: bool = False) -> Brief:
    """How many rungs can run here, and each rung's changes, tokens per step and memory per device.

    chip: check against this chip instead; by default the ladder's if this machine has no device of the rungs.
    ablate: count the processes of --ablate, too. Raises LadderError where no rung would use the given chip.
    """
    if chip and all(rung.toggles.device == HOST for rung in rungs):
        raise LadderError(f"{ladder.path}: all rungs train on a CPU; --chip is for those of a GPU or TPU")
    workload = ladder.workload
    devices, missing = devices_here(rung.toggles.device for rung in rungs)
    other_chip = chip or (None if devices else ladder.chip)
    rows: list[Planned] = []
    before = None
    tries = ladder.protocol.carry == "if_faster"
    rungs = [rung for rung in rungs if not rung.again]
    unsupported: list[str] = []
    for rung in rungs:
        refused, memory = None, None
        if tries and not rung.external:  # what cannot run is not carried
            try:
                rung = ladder.carrying(without=unsupported, upto=rung.name).rung(rung.name)
            except LadderError as error:
                refused = _unsupported(error.__cause__ or error)
        changed = rung.changed
        if refused:
            here = refused
        elif rung.external:
            here = None if other_chip else _peer_here(ladder, rung, rung.external, missing)
        else:
            needed = estimate(workload, rung.toggles)
            memory, changed = needed.total, describe(rung.toggles, before, workload)
            here = _on_chip(workload, rung, needed, other_chip) if other_chip else _fits(ladder, rung, needed)
        row = Planned(
            rung=rung.name,
            changed=", ".join(changed) or "nothing",
            tokens_per_step=rung.tokens_per_step(workload.seq_len),
            memory_bytes=memory,
            answer=here,
        )
        first_can = bool(rows) and not rows[0].refused
        rows.append(row)
        if rung.external:
            continue
        if refused or (tries and first_can and row.refused):
            unsupported.append(rung.name)
        else:
            before = rung.toggles
    where = f"On {other_chip.name}" if other_chip else "Here"
    ours = [row for row, rung in zip(rows, rungs, strict=True) if not rung.external]
    able = sum(not row.refused for row in ours)
    columns: list[Column[Planned]] = [
        Column("Rung", lambda row: row.rung, words=True),
        Column("Changed", lambda row: row.changed, words=True),
        Column("Tokens per step", lambda row: row.tokens_per_step, "{:,}".format, drop=1),
        Column("GiB per device", lambda row: row.memory_bytes, lambda size: f"{size / GIB:,.2f}"),
    ]
    brief = Column[Planned](
        where, lambda row: row.answer and (row.answer.refusal or row.answer.text), words=True
    )
    table = Table(title=f"{ladder.path}: {ladder.name}", columns=[*columns, brief], rows=rows)
    p = ladder.protocol
    fewer = f"{p.least_blocks} where these take longer than {p.max_window_seconds:g} s"
    notes = [
        *_why_not(rows),
        *(f"Missing here: {reason}." for reason in missing.values() if other_chip and not chip),
        *([] if chip or not devices else _another_chip(ladder, rungs, devices)),
        f"{_processes(ladder, rungs, ablate)}; each with a window of up to {p.blocks} blocks of about "
        f"{p.block_seconds:g} s ({fewer}) and a limit of {p.timeout_seconds:g} s.",
        "Memory: estimate of weights, gradients, AdamW's state and activations; libraries add their own "
        "(docs/devices.md: how far off that is).",
        f"{workload.model}: {workload.config.parameters:,} parameters; {workload.flops_per_token:,} FLOPs "
        f"per token at T = {workload.seq_len} ({FLOPS_FORMULA}); data: {workload.data}.",
    ]
    full = Column[Planned](where, lambda row: row.answer and row.answer.text, words=True)
    return Brief(
        answer=[f"{where}: {able} of {len(ours)} rungs of {ladder.name} can run."],
        table=table,
        whole=[replace(table, columns=[*columns, full], notes=notes)],
        notes=notes,
    )


def _why_not(rows: Sequence[Planned]) -> list[str]:
    """A line for each reason why rungs cannot run, the most frequent first."""
    reasons = Counter(row.answer.text for row in rows if row.answer and row.refused)
    return [f"{count} of {len(rows)} rungs {reason}." for reason, count in reasons.most_common()]


def _another_chip(ladder: Ladder, rungs: Sequence[Rung], devices: Mapping[str, Device]) -> list[str]:
    here = [devices[rung.toggles.device] for rung in rungs if rung.toggles.device in devices]
    other = ladder.written_for_another(here[-1].chip())
    return [f"{other}."] if other else []


def _processes(ladder: Ladder, rungs: Sequence[Rung], ablate: bool) -> str:
    tried = ""
    if ladder.protocol.carry == "if_faster":
        own = sum(not rung.external for rung in rungs)
        tried = f"{own + 1} short processes or more that try the rungs; then, if all are carried, "
    schedule = Schedule(ladder, rungs, ablate)
    rounds = schedule.planned_rounds
    first, each = list(schedule.round(1)), list(schedule.round(2))
    controls = sum(task.kind == "control" for task in each)
    parity = sum(task.kind == "parity" for task in first)
    ceilings = sum(task.is_ceiling for task in first) + len(list(schedule.closing(rounds)))
    more = [f"{parity} for loss parity"] if parity else []
    more += [f"{ceilings} for the measured ceiling"] if ceilings else []
    control = f"the A/A control{'s' * (controls > 1)} included" if controls else "without an A/A control"
    rest = "".join(f", and {part}" for part in more)
    return f"{tried}{_rounds(ladder)} of {len(each)} processes, {control}{rest}"


def _rounds(ladder: Ladder) -> str:
    until, repeats = ladder.protocol.until, ladder.protocol.repeats
    if until is not None:
        return f"{LEAST_ROUNDS_UNTIL} to {MOST_ROUNDS_UNTIL} rounds"
    return f"{repeats} rounds" if repeats > 1 else "1 round"


def _fits(ladder: Ladder, rung: Rung, memory: MemoryEstimate) -> Answer:
    try:
        with warnings.catch_warnings(action="ignore"):  # they are for processes that train
            device = find(rung.toggles)
        check_time(ladder, rung.toggles)
    except UnsupportedToggle as error:
        return _unsupported(error)
    except DeviceError as error:
        return Answer(f"no: {error}", refusal="no")
    here, ranks = device.memory_bytes(), rung.toggles.world_size if device.shared_by_ranks else 1
    if here is None or memory.total * ranks <= TIGHT * here:
        return Answer("yes")
    if memory.total * ranks <= here:
        return Answer(f"perhaps: tight in {_gib(here / ranks)}")
    return _too_large(ladder.workload, rung.toggles, memory, here / ranks)


def _peer_here(ladder: Ladder, rung: Rung, external: PeerRung, missing: Mapping[str, str]) -> Answer:
    reason = missing.get(rung.toggles.device) or why_missing(external, rung.toggles, ladder.path)
    return _unsupported(reason) if reason else Answer("yes")


def _on_chip(workload: Workload, rung: Rung, memory: MemoryEstimate, chip: Chip) -> Answer:
    """Return whether a rung fits a chip, by its kind of device and its datasheet."""
    if rung.toggles.device == HOST:
        return Answer("trains on a CPU")
    if rung.toggles.device != chip.device:
        return _unsupported(f"trains on device: {rung.toggles.device}; {chip.name} has device: {chip.device}")
    try:
        check(rung.toggles)
    except UnsupportedToggle as error:
        return _unsupported(error)
    number_format = rung.toggles.product_format()
    if chip.lacks(number_format):
        instead = "float16" if number_format == "bfloat16" else "highest"
        return _unsupported(f"{chip.name} has no {number_format} units; choose {instead}")
    if rung.toggles.attention == "flash" and chip.lacks("bfloat16"):
        return _unsupported(f"{chip.name} is older than FlashAttention's kernels; choose efficient")
    if chip.memory_bytes is None:
        return Answer("unknown: its name covers several sizes of memory")
    if TIGHT * chip.memory_bytes < memory.total <= chip.memory_bytes:
        return Answer(f"perhaps: tight in {_gib(chip.memory_bytes)}{_needs(rung)}")
    if memory.total <= chip.memory_bytes:
        return Answer(f"fits into {_gib(chip.memory_bytes)}{_needs(rung)}")
    return _too_large(workload, rung.toggles, memory, chip.memory_bytes)


def _too_large(workload: Workload, toggles: Toggles, memory: MemoryEstimate, available: float) -> Answer:
    """Return the answer, with remedies, where the estimate exceeds the available memory."""
    remedies = ["a smaller micro_batch_size"] if toggles.micro_batch_size > 1 else []
    if toggles.recompute != "block" and _possible(replace(toggles, recompute="block")):
        remedies.append("recompute: block")
    if devices := _devices_needed(workload, toggles, memory, available):
        at_once = " without accumulation" if toggles.grad_accum_steps > 1 else ""
        remedies.append(f"sharding: fsdp2 over {devices} devices or more{at_once}")
    if toggles.device == HOST and toggles.world_size > 1:
        remedies = ["fewer processes, which share this machine's memory"]
    tried = ", ".join(remedies) or "a smaller model"
    return Answer(f"will not fit into {_gib(available)}; try {tried}", refusal="does not fit")


def _gib(size: float) -> str:
    return f"{size / GIB:,.{0 if size >= 10 * GIB else 2}f} GiB"


def _needs(rung: Rung) -> str:
    """Return how many of the chip a rung needs; empty for one."""
    return f"; needs {rung.toggles.world_size} of them" if rung.toggles.world_size > 1 else ""


def _devices_needed(
    workload: Workload, toggles: Toggles, memory: MemoryEstimate, available: float
) -> int | None:
    """Return over how many devices FSDP would make a rung fit; None where it would not."""
    sharded = replace(toggles, sharding="fsdp2", world_size=2, grad_accum_steps=1)
    if toggles.sharding != "none" or not _possible(sharded):
        return None
    state = memory.total - memory.activations
    room = available - (estimate(workload, sharded).total - state / 2)
    return max(2, math.ceil(state / room)) if room > 0 else None


def _possible(toggles: Toggles) -> bool:
    """Whether this kind of device supports the toggles."""
    try:
        check(toggles)
    except UnsupportedToggle:
        return False
    return True

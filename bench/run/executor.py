"""Run one process of a run: its command, its environment, and the record of its end. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from bench.analysis.schedule import Cut, Task
from bench.host.doctor import other_work_cores, warnings
from bench.host.telemetry import cpu_times, other_cores, state
from bench.ladder.ladder import Ladder, Rung
from bench.process.shutdown import Stop, StopSignal
from bench.process.supervisor import CACHE, CODE, classify, read_outcome, supervise
from bench.process.worker_side import RUNNER, cause, mark_of
from bench.records.machine import State
from bench.records.measurement import External
from bench.records.record import Ended, Outcome, Record, ToggleValues
from bench.run.command import (
    Options,
    anonymous,
    ceiling_command,
    external_command,
    worker_command,
)
from bench.run.nodes.coordinator import DistributedTask, Team
from bench.run.nodes.topology import Part, nodes_for
from bench.run.probe import ProbeResult
from gpt2.config.toggles import HOST, MATMUL_CHOICES, Toggles, UnsupportedToggle
from gpt2.training.reexec import own_path, own_variables
from gpt2.training.stages import environment, threads, unheeded_threads


class Watcher(Protocol):
    """Shows the progress of a run (see bench.cli.progress)."""

    def note(self, text: str) -> None: ...
    def waiting(self, what: str) -> None: ...
    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None: ...
    def working(self, phase: str, steps: int, tps: float | None) -> None: ...
    def finished(self, record: Record) -> None: ...


SAFE_PATH = "-P"
"""Python's option to ignore a bench.py or torch.py in the working directory."""
UNKEYED = (
    *("device", "threads", "affinity", "world_size", "sharding"),
    *("attention", "autocast", "matmul_precision"),
)
"""Toggles on which compiled code may depend though torch's keys for it do not name them all.

Which kernel attention takes is a flag of the process that torch forgets (pytorch #185449); so is the format
of autocast in older versions.
"""
FULL = 2**20
"""Bytes left on a disk below which a process that failed is taken to have failed for want of them."""
GPU_SECONDS = 1.0
"""Seconds between samples of the GPUs within a window."""


def now() -> str:
    """Return the time in UTC, as records hold it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass
class Executor:
    """Runs one task after another, each in processes of its own, and makes the record of each."""

    ladder: Ladder
    options: Options
    scratch: Path
    run_id: str
    probed: ProbeResult
    watcher: Watcher
    session: str = field(default_factory=now)
    standing: tuple[str, ...] = ()
    """Warnings for each rung on a CPU whose memory comes from the C library."""
    stop: StopSignal = field(default_factory=Stop)
    """Ends the running process when the user asks for it."""
    team: Team | None = None
    """The other nodes; None if there is one."""
    _cut_off: int = 0
    """Processes that may have left files of compiled code half written."""
    _proved: set[tuple[str, int]] = field(default_factory=set)
    """Kinds and numbers of the rungs of which a process of this session was asked for proofs and measured."""

    def run(self, task: Task) -> Record:
        """Measure a rung once, on each of the nodes that it takes, and return the record.

        If anything fails after the process has written its outcome, the record holds that outcome.
        """
        started, task = now(), self._told_of_proofs(task)
        try:
            record = self._run(task, started)
            self._note_proofs(task, record)
            return task.judge(record) if task.judge else record
        except Exception as error:
            if (outcome := read_outcome(self._out(task))) is None:
                raise
            lacking = (
                f"the state of the machine could not be recorded ({cause(error)}); the measurement stands"
            )
            outcome = outcome.model_copy(update={"warnings": [*outcome.warnings, lacking]})
            record = self._record(task, started, 1, outcome, bare=True)
            with contextlib.suppress(Exception):  # else it is a try of which nothing is known
                return task.judge(record) if task.judge else record
            return record

    def _out(self, task: Task) -> Path:
        """The file to which a task's process writes its Outcome."""
        return self.scratch / f"{task.repetition}-{task.kind}-{task.rung.index}.json"

    def _run(self, task: Task, started: str) -> Record:
        nodes = 1
        missing = self.probed.missing.get(task.rung.toggles.device) if task.rung.external else None
        try:
            if task.refused:
                outcome = Outcome(status="unsupported", error=task.refused)
            elif missing:  # shorter than the error of another trainer
                outcome = Outcome(status="unsupported", error=missing)
            elif self.team and (nodes := self._nodes(task.rung, self.team)) > 1:
                outcome = self._observe_distributed(task, nodes, self.team)
            else:
                outcome = self.observe(task, self.stop)
        except UnsupportedToggle as error:
            outcome = Outcome(status="unsupported", error=str(error))
        return self._record(task, started, nodes, outcome)

    def not_begun(self, cut: Cut) -> Record:
        """Return the record of a process that there was no time for."""
        outcome = Outcome(status="interrupted", error=f"not begun: {cut.why}", not_begun=cut.why)
        return self._record(self._told_of_proofs(cut.task), now(), 1, outcome)

    def _nodes(self, rung: Rung, team: Team) -> int:
        last = self.ladder.chosen(self.options.rungs)[-1]
        return nodes_of(rung, last, team.place.nodes, self.probed)

    def _observe_distributed(self, task: Task, nodes: int, team: Team) -> Outcome:
        if absent := team.absent(nodes):
            return Outcome(status="failed", error=absent)
        distributed = DistributedTask(team, task, nodes)
        outcome = distributed.conclude(self.observe(task, distributed, distributed.part))
        if shared := sorted(team.shared.intersection(range(nodes))):
            names = ", ".join(map(str, [0, *shared]))
            warning = f"nodes {names} share the cores of one machine: not the speed of several machines"
            outcome = outcome.model_copy(update={"warnings": [*outcome.warnings, warning]})
        return outcome

    def observe(self, task: Task, stop: StopSignal, part: Part | None = None) -> Outcome:
        """Run this node's processes of a task; return their outcome with the state of the machine."""
        toggles, nodes = task.rung.toggles, part.nodes if part else 1
        out, environ = self._out(task), self._environ(task, part)
        timeout = self.ladder.protocol.timeout_seconds
        before, times, others = state(), cpu_times(), other_cores()
        during: list[State] = []
        sampled = 0.0

        def working(phase: str, steps: int, tps: float | None) -> None:
            nonlocal sampled
            self.watcher.working(phase, steps, tps)
            if phase == "window" and time.monotonic() - sampled > GPU_SECONDS:
                sampled = time.monotonic()
                during.append(state())

        argv = [sys.executable, SAFE_PATH, *self._command(task, part), *self._copy(task), "--out", str(out)]
        process = supervise(argv, environ, out, timeout, working, stop)
        after, since = state(), cpu_times()
        outcome = classify(out, process, timeout)
        if outcome.status == "failed" and _is_full(self.scratch):
            full = "the disk of temporary files is full (free some, or set TMPDIR)"
            outcome = outcome.model_copy(update={"error": f"{full}: {outcome.error}"})
        if process.was_cut_off:
            self._give_up_code(task)
        machine = outcome.environment or self.probed.environment
        device = HOST if machine.xla_on_cpu else toggles.device
        ranks = toggles.processes // nodes
        found = warnings(
            before,
            _under_load(during, after),
            device=device,
            threads=threads(toggles, nodes),
            unheeded=None if task.rung.external else unheeded_threads(toggles, nodes),
            ranks=ranks,
            stolen_cores=since.stolen_cores_since(times),
            memory_bytes=None if task.is_ceiling else self._memory_bytes(task, nodes),
        )
        other_work = other_work_cores(
            max(
                filter(None, (others, outcome.measurement and outcome.measurement.other_cores)), default=None
            ),
            device=device,
            threads=threads(toggles, nodes),
            ranks=ranks,
        )
        outcome = outcome.model_copy(
            update={
                "warnings": [*outcome.warnings, *found],
                "other_work_cores": other_work,
                "exit_code": process.exit_code,
                "process_seconds": process.seconds,
                "before": before,
                "during": _together(during) if during else None,
                "after": after,
            }
        )
        if outcome.disturbed or process.was_cut_off:  # what was timed meanwhile may not be the fastest
            self._choices(task).unlink(missing_ok=True)
        return outcome

    def _copy(self, task: Task) -> list[str]:
        """Arguments by which a process reads the ladder as this one did: its file may have been edited."""
        return [] if task.is_ceiling else ["--copy", str(self.ladder.copy_in(self.scratch))]

    def _environ(self, task: Task, part: Part | None = None) -> dict[str, str]:
        """Environment variables of a task's processes on this node."""
        folder, code = self._compiled_code(task)
        return {
            **os.environ,
            **(own_path() if task.rung.external else own_variables()),
            **environment(task.rung.toggles, part.nodes if part else 1),
            **(part.environment if part else {}),
            CACHE: str(folder),
            CODE: code,
            RUNNER: str(os.getpid()),
            "TMPDIR": str(self.scratch),  # torchrun leaves a folder behind each time
            MATMUL_CHOICES: str(self._choices(task)) if self.ladder.protocol.short_of_time else "",
        }

    def _choices(self, task: Task) -> Path:
        """The file in which a task's processes keep the ways of matmuls that they have chosen.

        Rungs on other threads, cores or allocators choose by themselves.
        """
        alike = [getattr(task.rung.toggles, name) for name in (*UNKEYED, "allocator")]
        return self.scratch / f"matmuls-{self._digest('matmuls', alike)}"

    def _told_of_proofs(self, task: Task) -> Task:
        """The task with whether its processes take proofs: where time is short, only the first of each rung.

        Tries are judged one by one, so that each takes them.
        """
        if not self.ladder.protocol.short_of_time:
            return task
        proved = task.kind == "control" or task.key[:2] in self._proved
        return replace(task, proofs="none" if proved and task.kind != "scout" else "once")

    def _note_proofs(self, task: Task, record: Record) -> None:
        """Ask no more processes of a rung once one has measured: one that ended earlier took no proofs."""
        if record.measurement:
            self._proved.add(task.key[:2])

    def _compiled_code(self, task: Task) -> tuple[Path, str]:
        """The folder of a task's compiled code, and its name there; both depend on what the code does.

        Each rung has a folder of its own, empty in the first round unless --compile-cache is given, so that
        its first step shows how long compiling takes. Where time is short all share one of this run, for most
        differ by little, and compiling takes half the time of a process.
        """
        rung, protocol = task.rung, self.ladder.protocol
        kept = self.options.compile_cache
        # A control compiles as its rung does: in the first round too, unless that rung finds compiled code by
        # then. A rung that was tried finds what its try compiled.
        found = protocol.short_of_time or kept
        kind = "cumulative" if task.kind == "scout" or (task.kind == "control" and found) else task.kind
        folder = code = self._digest(kind, rung.external or asdict(rung.toggles))
        if protocol.short_of_time and not kept and not rung.external:
            alike = [getattr(rung.toggles, name) for name in UNKEYED]
            folder = self._digest(f"shared {self._cut_off}", alike)
        return (kept.absolute() if kept else self.scratch) / f"inductor-{folder}", code

    def _give_up_code(self, task: Task) -> None:
        """Give up code that may be half written: torch takes a library cut off for a fault of this CPU."""
        folder, code = self._compiled_code(task)
        if folder.name != f"inductor-{code}":  # it is shared
            self._cut_off += 1
        elif not mark_of(folder, code).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def _digest(self, kind: str, what: object) -> str:
        machine = self.probed.environment  # a change of any of these compiles anew
        content = [
            kind,
            asdict(self.ladder.workload),
            what,
            machine.torch,
            machine.code_hash,
            machine.chip,
            machine.cpu,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _memory_bytes(self, task: Task, nodes: int) -> int | None:
        """Estimated memory of the ranks on this node."""
        if task.rung.without:  # the estimates are of the ladder as its file has it
            return None
        needed = self.probed.memory_bytes.get(task.name)
        return needed // nodes if needed is not None else None

    def _command(self, task: Task, part: Part | None) -> list[str]:
        if task.is_ceiling:
            return ceiling_command(self.ladder, task.rung.toggles.device)
        if task.rung.external:
            return external_command(self.ladder, task, self.options)
        return worker_command(self.ladder, task, self.options, part)

    def _record(
        self, task: Task, started: str, nodes: int, outcome: Outcome, *, bare: bool = False
    ) -> Record:
        """Return the record of a task. bare: without command and error text, where making them failed."""
        ladder, rung = self.ladder, task.rung
        machine = outcome.environment or self.probed.environment
        if self.team:
            machine = machine.model_copy(update={"nodes": self.team.place.nodes})
        return Record(
            **{name: getattr(outcome, name) for name in Ended.model_fields},
            run_id=self.run_id,
            session=self.session,
            chosen=list(self.options.rungs) or None,
            ablate=self.options.ablate,
            time=started,
            kind=task.kind,
            ladder=ladder.name,
            ladder_hash=ladder.hash,
            protocol=self._protocol(task),
            rung=rung.name,
            rung_index=rung.index,
            repetition=task.repetition,
            expect=rung.expect,
            error=(outcome.status if bare else self._shareable(outcome.error)) if outcome.error else None,
            command="" if bare else self._shown(task, nodes),
            warnings=[*outcome.warnings, *(self.standing if _by_the_c_library(rung.toggles) else ())],
            changed=rung.changed,
            workload=asdict(ladder.workload),
            toggles=ToggleValues(all=asdict(rung.toggles), resolved=outcome.resolved),
            environment=machine,
            external=_external(task, outcome),
            price_per_hour=self.options.price_per_hour,
        )

    def _protocol(self, task: Task) -> dict[str, Any]:
        """The protocol as a record has it: of a run that takes as many rounds as fit, with those begun."""
        protocol = asdict(self.ladder.protocol)
        begun = 1 if task.kind == "scout" else task.repetition
        return {**protocol, "repeats": begun, "until": None} if self.options.minutes else protocol

    def _shareable(self, text: str) -> str:
        """Remove the user's paths and the nodes' addresses from a text."""
        hosts = self.team.hosts if self.team else {}
        for host in sorted(hosts, key=len, reverse=True):
            text = re.sub(rf"\b{re.escape(host)}\b", hosts[host], text)
        return anonymous(text)

    def _shown(self, task: Task, nodes: int) -> str:
        """Command of a task for a record, with words for what differs between machines and nodes.

        DATA stands for the corpus, LADDER for a ladder outside the working directory, and over several nodes
        NODE, HOST and PORT for each node's number and for node 0's address.
        """
        part = Part(nodes=nodes, node="NODE", host="HOST", port="PORT") if nodes > 1 else None
        places = {str(self.options.data): "DATA"} if self.options.data else {}
        if not self.ladder.path.resolve().is_relative_to(Path.cwd()):
            places[str(self.ladder.path)] = "LADDER"
        words = ["python", SAFE_PATH, *self._command(task, part), "--out", "m.json"]
        return anonymous(shlex.join(places.get(word, word) for word in words), command=True)


def _is_full(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < FULL
    return False


def nodes_of(rung: Rung, last: Rung, nodes: int, probed: ProbeResult) -> int:
    """Return how many of `nodes` a rung takes. last: the last rung of the run. Raises UnsupportedToggle."""
    # Only the number of devices of the last rung's kind is known; ranks on others are spread evenly.
    known = rung.toggles.device == last.toggles.device
    return nodes_for(rung.toggles, nodes, probed.environment.device_count if known else None)


def _external(task: Task, outcome: Outcome) -> External | None:
    rung = task.rung.external
    return External(peer=rung.peer, version=outcome.peer_version, command=rung.command) if rung else None


def _by_the_c_library(toggles: Toggles) -> bool:
    """Whether a rung has the default allocator, whose page faults the runner has timed."""
    return toggles.device == HOST and toggles.allocator == Toggles().allocator


def _under_load(during: list[State], after: State) -> State:
    """Return the state after a process, with clocks and power of its GPUs while they worked.

    Other processes on a GPU are those after it, when its own are gone.
    """
    if not during:
        return after
    others = {gpu.index: gpu.other_processes for gpu in after.gpus}
    gpus = [
        gpu.model_copy(update={"other_processes": others.get(gpu.index)}) for gpu in _together(during).gpus
    ]
    return after.model_copy(update={"gpus": gpus})


def _together(samples: list[State]) -> State:
    """Return the last of several states, with each GPU's mean clocks and power, and all throttle reasons.

    Processes of others on a GPU cannot be told from the rung's own while it runs.
    """
    gpus = []
    for gpu in samples[-1].gpus:
        same = [sample for state in samples for sample in state.gpus if sample.index == gpu.index]
        reasons = {reason for sample in same for reason in sample.throttle_reasons}
        means = {name: _mean([getattr(sample, name) for sample in same]) for name in AVERAGED}
        facts = {"throttle_reasons": sorted(reasons), "other_processes": None, **means}
        gpus.append(gpu.model_copy(update=facts))
    return samples[-1].model_copy(update={"gpus": gpus})


AVERAGED = ("sm_clock_mhz", "memory_clock_mhz", "power_watts")
"""Fields of GpuState that fluctuate."""


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

"""One process of a run: its command, its environment, and the record of how it ended. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from bench.analysis.schedule import Cut, Task
from bench.host.doctor import other_work_cores, warnings
from bench.host.telemetry import cpu_times, other_cores, state
from bench.ladder.ladder import Ladder
from bench.process.shutdown import Ending, Stop
from bench.process.supervisor import CACHE, classify, said, supervise
from bench.process.worker_side import cause
from bench.records.machine import State
from bench.records.measurement import External
from bench.records.record import Outcome, Record, ToggleValues
from bench.run.command import Options, anonymous, ceiling_command, external_command, worker_command
from bench.run.nodes.coordinator import JointTask, Team
from bench.run.nodes.topology import Part, nodes_for
from bench.run.probe import Answer
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.training.reexec import own_path, own_variables
from gpt2.training.stages import environment, threads, unheeded_threads


class Watcher(Protocol):
    """Is told how a run gets on (see bench.cli.progress)."""

    def note(self, text: str) -> None: ...
    def waiting(self, what: str) -> None: ...
    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None: ...
    def working(self, phase: str, steps: int, tps: float | None) -> None: ...
    def finished(self, record: Record) -> None: ...


SAFE_PATH = "-P"
"""Python's option by which no bench.py or torch.py of the working directory is run in place of the right one.
"""
GPU_SECONDS = 1.0
"""Between looks at the GPUs during a window."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """How a task ended on this node, and what the machine did before, within and after it; null: it never
    began.
    """

    outcome: Outcome
    exit_code: int | None = None
    before: State | None = None
    during: State | None = None
    after: State | None = None
    seconds: float | None = None


@dataclass
class Processes:
    """Runs one task after the other, each in processes of its own, and says how each ended."""

    ladder: Ladder
    options: Options
    scratch: Path
    run_id: str
    asked: Answer
    watcher: Watcher
    session: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    standing: tuple[str, ...] = ()
    """Warnings that hold for the whole run on a CPU."""
    stop: Ending = field(default_factory=Stop)
    """By which the user ends the process that runs."""
    team: Team | None = None
    """The other nodes, where there are several."""

    def run(self, task: Task) -> Record:
        """Measure one rung once, in a process of its own, or in several on each of the nodes that it takes.

        Whatever goes wrong here once the process has said how it went, that is what the record says.
        """
        started = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            return self._run(task, started)
        except Exception as error:
            if (outcome := said(self._out(task))) is None:
                raise
            lacking = (
                f"what surrounded the process could not be recorded ({cause(error)}); what it measured stands"
            )
            outcome = outcome.model_copy(update={"warnings": [*outcome.warnings, lacking]})
            return self._record(task, started, 1, Observed(outcome=outcome), bare=True)

    def _out(self, task: Task) -> Path:
        """Where its process writes its Outcome."""
        return self.scratch / f"{task.repetition}-{task.kind}-{task.rung.index}.json"

    def _run(self, task: Task, started: str) -> Record:
        nodes = 1
        missing = self.asked.missing.get(task.rung.toggles.device) if task.rung.external else None
        if missing:  # a peer would say so at length
            return self._record(
                task, started, nodes, Observed(outcome=Outcome(status="unsupported", error=missing))
            )
        try:
            if self.team:
                nodes = self._nodes(task, self.team)
            seen = (
                self._jointly(task, nodes, self.team)
                if self.team and nodes > 1
                else self.observe(task, self.stop)
            )
        except UnsupportedToggle as error:
            seen = Observed(outcome=Outcome(status="unsupported", error=str(error)))
        return self._record(task, started, nodes, seen)

    def not_begun(self, cut: Cut) -> Record:
        """The record of a process that there was no time for."""
        seen = Observed(
            outcome=Outcome(status="interrupted", error=f"not begun: {cut.why}", not_begun=cut.why)
        )
        return self._record(cut.task, datetime.now(UTC).isoformat(timespec="seconds"), 1, seen)

    def _nodes(self, task: Task, team: Team) -> int:
        """How many nodes a task takes. Raises UnsupportedToggle."""
        toggles = task.rung.toggles
        # What was asked is about the last rung's device; others can only be spread evenly.
        same = toggles.device == self.ladder.chosen(self.options.rungs)[-1].toggles.device
        return nodes_for(toggles, team.place.nodes, self.asked.environment.device_count if same else None)

    def _jointly(self, task: Task, nodes: int, team: Team) -> Observed:
        if absent := team.absent(nodes):
            return Observed(outcome=Outcome(status="failed", error=absent))
        joint = JointTask(team, task, nodes)
        seen = self.observe(task, joint, joint.part)
        outcome = joint.conclude(seen.outcome)
        if shared := sorted(team.shared.intersection(range(nodes))):
            who = ", ".join(map(str, [0, *shared]))
            one = (
                f"nodes {who} are one machine and share its cores: this is not the speed of several machines"
            )
            outcome = outcome.model_copy(update={"warnings": [*outcome.warnings, one]})
        return replace(seen, outcome=outcome)

    def observe(self, task: Task, stop: Ending, part: Part | None = None) -> Observed:
        """Run this node's processes of a task, and see how they end and what the machine does meanwhile."""
        toggles, nodes = task.rung.toggles, part.nodes if part else 1
        out, environ = self._out(task), self._environ(task, part)
        timeout = self.ladder.protocol.timeout_seconds
        before, times, others = state(), cpu_times(), other_cores()
        during: list[State] = []
        looked = 0.0

        def working(phase: str, steps: int, tps: float | None) -> None:
            nonlocal looked
            self.watcher.working(phase, steps, tps)
            if phase == "window" and time.monotonic() - looked > GPU_SECONDS:
                looked = time.monotonic()  # at work a device shows what an idle one does not
                during.append(state())

        argv = [sys.executable, SAFE_PATH, *self._command(task, part), "--out", str(out)]
        ended = supervise(argv, environ, out, timeout, working, stop)
        after, since = state(), cpu_times()
        outcome = classify(out, ended, timeout)
        machine = outcome.environment or self.asked.environment
        device = HOST if machine.xla_on_cpu else toggles.device
        ranks = toggles.processes // nodes
        noticed = warnings(
            before,
            _under_load(during, after),
            device=device,
            threads=threads(toggles, nodes),
            unheeded=None if task.rung.external else unheeded_threads(toggles, nodes),
            ranks=ranks,
            stolen_cores=since.stolen_cores_since(times),
            memory_bytes=None if task.is_ceiling else self._memory_bytes(task, nodes),
        )
        contending = other_work_cores(
            max(others, (outcome.measurement and outcome.measurement.other_cores) or 0.0),
            device=device,
            threads=threads(toggles, nodes),
            ranks=ranks,
        )
        return Observed(
            outcome=outcome.model_copy(
                update={"warnings": [*outcome.warnings, *noticed], "other_work_cores": contending}
            ),
            exit_code=ended.exit_code,
            before=before,
            during=_together(during) if during else None,
            after=after,
            seconds=ended.seconds,
        )

    def _environ(self, task: Task, part: Part | None = None) -> dict[str, str]:
        """The environment of a task's processes on this node."""
        # Each rung has a compiler cache of its own, empty in the first round unless --compile-cache names a
        # folder.
        kept = self.options.compile_cache
        return {
            **os.environ,
            **(own_path() if task.rung.external else own_variables()),
            **environment(task.rung.toggles, part.nodes if part else 1),
            **(part.environment if part else {}),
            CACHE: str((kept.absolute() if kept else self.scratch) / f"inductor-{self._compiled(task)}"),
            "BENCH_RUNNER_PID": str(os.getpid()),
            "TMPDIR": str(self.scratch),  # torchrun leaves a folder behind each time
        }

    def _compiled(self, task: Task) -> str:
        """A name for what a task compiles, which another model, other toggles or another torch does not
        share.
        """
        version = self.asked.environment.torch
        what = task.rung.external or asdict(task.rung.toggles)
        # A control shares its rung's only where code is kept to save time: else both compile, and so are
        # alike.
        kind = task.kind.replace("control", "cumulative") if self.options.compile_cache else task.kind
        content = [kind, asdict(self.ladder.workload), what, version]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _memory_bytes(self, task: Task, nodes: int) -> int | None:
        """What the ranks here need."""
        needed = self.asked.memory_bytes.get(task.name)
        return needed // nodes if needed is not None else None

    def _command(self, task: Task, part: Part | None) -> list[str]:
        if task.is_ceiling:
            return ceiling_command(self.ladder, task.rung.toggles.device)
        if task.rung.external:
            return external_command(self.ladder, task, self.options)
        return worker_command(self.ladder, task, self.options, part)

    def _record(self, task: Task, started: str, nodes: int, seen: Observed, *, bare: bool = False) -> Record:
        """bare: without what could not be made a moment ago, the command and the output."""
        ladder, rung, outcome = self.ladder, task.rung, seen.outcome
        machine = outcome.environment or self.asked.environment
        if self.team:
            machine = machine.model_copy(update={"nodes": self.team.place.nodes})
        return Record(
            run_id=self.run_id,
            session=self.session,
            chosen=list(self.options.rungs) or None,
            ablate=self.options.ablate,
            time=started,
            process_seconds=seen.seconds,
            kind=task.kind,
            ladder=ladder.name,
            ladder_hash=ladder.hash,
            protocol=asdict(ladder.protocol),
            rung=rung.name,
            rung_index=rung.index,
            repetition=task.repetition,
            status=outcome.status,
            expect=rung.expect,
            error=(outcome.status if bare else self._shareable(outcome.error)) if outcome.error else None,
            exit_code=seen.exit_code,
            command="" if bare else self._shown(task, nodes),
            warnings=[*outcome.warnings, *(self.standing if _by_the_c_library(rung.toggles) else ())],
            interrupted_late=outcome.interrupted_late,
            not_begun=outcome.not_begun,
            other_work_cores=outcome.other_work_cores,
            changed=rung.changed,
            workload=asdict(ladder.workload),
            data_sha256=outcome.data_sha256,
            toggles=ToggleValues(all=asdict(rung.toggles), resolved=outcome.resolved),
            environment=machine,
            measurement=outcome.measurement,
            ceiling=outcome.ceiling,
            external=_external(task, outcome),
            before=seen.before,
            during=seen.during,
            after=seen.after,
            price_per_hour=self.options.price_per_hour,
        )

    def _shareable(self, text: str) -> str:
        """Without places, and without addresses of the nodes."""
        hosts = self.team.hosts if self.team else {}
        for host in sorted(hosts, key=len, reverse=True):
            text = re.sub(rf"\b{re.escape(host)}\b", hosts[host], text)
        return anonymous(text)

    def _shown(self, task: Task, nodes: int) -> str:
        """For a record: a corpus, and a ladder from elsewhere, by what they are and not by where they lie.

        What to put there over several nodes is node 0's host, a port of it, and each node's number.
        """
        part = Part(nodes=nodes, node="NODE", host="HOST", port="PORT") if nodes > 1 else None
        places = {str(self.options.data): "DATA"} if self.options.data else {}
        if not self.ladder.path.resolve().is_relative_to(Path.cwd()):
            places[str(self.ladder.path)] = "LADDER"
        parts = ["python", SAFE_PATH, *self._command(task, part), "--out", "m.json"]
        return anonymous(shlex.join(places.get(part, part) for part in parts))


def _external(task: Task, outcome: Outcome) -> External | None:
    rung = task.rung.external
    return External(peer=rung.peer, version=outcome.peer_version, command=rung.command) if rung else None


def _by_the_c_library(toggles: Toggles) -> bool:
    """Whether a rung's memory comes from where the runner's own does, which has looked at what that costs."""
    return toggles.device == HOST and toggles.allocator == Toggles().allocator


def _under_load(during: list[State], after: State) -> State:
    """The state after a process, but its GPUs as they were at work; others' processes are told from its own
    then.
    """
    if not during:
        return after
    others = {gpu.index: gpu.other_processes for gpu in after.gpus}
    gpus = [
        gpu.model_copy(update={"other_processes": others.get(gpu.index)}) for gpu in _together(during).gpus
    ]
    return after.model_copy(update={"gpus": gpus})


def _together(looks: list[State]) -> State:
    """The last of several looks, with the mean of each GPU's clocks and power, and all reasons to throttle."""
    gpus = []
    for gpu in looks[-1].gpus:
        each = [seen for look in looks for seen in look.gpus if seen.index == gpu.index]
        reasons = {reason for seen in each for reason in seen.throttle_reasons}
        means = {name: _mean([getattr(seen, name) for seen in each]) for name in AVERAGED}
        gpus.append(gpu.model_copy(update={"throttle_reasons": sorted(reasons), **means}))
    return looks[-1].model_copy(update={"gpus": gpus})


AVERAGED = ("sm_clock_mhz", "memory_clock_mhz", "power_watts")
"""Fields of GpuState that change from moment to moment."""


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

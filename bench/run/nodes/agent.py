"""A run over several nodes, as a node other than node 0 sees it. Imports no torch.

It runs its part of each task of node 0 and writes no records. From node 0 it takes the name of a rung, a
round and a port only; the commands follow from its own ladder and options.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn, get_args

from bench.analysis.schedule import Task, variant
from bench.ladder.ladder import Ladder, LadderError
from bench.process.shutdown import Stop, stoppable
from bench.records.record import Kind, Outcome
from bench.run.command import Options, anonymous
from bench.run.executor import Executor, Watcher
from bench.run.nodes.coordinator import POLL_SECONDS, described
from bench.run.nodes.rendezvous import Facts, Rendezvous, interface
from bench.run.nodes.topology import Part, Place, patience
from bench.run.probe import probe
from bench.run.runner import check_data
from gpt2.hardware.host import temp_folder


class NodeExit(Exception):
    """The end of this node's part in the run; the message is for the user."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def take_part(ladder: Ladder, options: Options, place: Place, watcher: Watcher) -> NodeExit:
    """Take part in the run of node 0 until it ends; return how it ended. Raises BenchError."""
    come_seconds, rungs = patience("come"), ladder.chosen(options.rungs)
    data_sha256 = check_data(ladder, rungs, options.data)
    probed = probe(rungs[-1].toggles.device, ladder.path, options.overrides, ablate=options.ablate)
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
        stoppable() as stop,
        contextlib.closing(Rendezvous(place)) as store,
    ):
        store.outgoing |= described(place, ladder, data_sha256, probed.environment)
        executor = Executor(ladder, options, Path(scratch), "", probed, watcher)
        try:
            Agent(place, store, executor, stop).run(come_seconds)
        except NodeExit as end:
            return end


class Agent:
    """Runs the tasks of node 0; is the stop signal of what runs here."""

    def __init__(self, place: Place, store: Rendezvous, executor: Executor, stop: Stop) -> None:
        self._place, self._store, self._executor, self._stop = place, store, executor, stop
        self._ladder, self._watcher = executor.ladder, executor.watcher
        self._name = place.called(place.node)
        self._task = 0
        """Number of the current or last task."""

    def run(self, come_seconds: float) -> NoReturn:
        """Find node 0, and run its tasks until the run ends. Raises NodeExit."""
        self._watcher.waiting(f"{self._name}: looking for node 0 at {self._place.endpoint}")
        deadline = time.monotonic() + come_seconds
        while not self._node_0:
            self._leave_if_over()
            if time.monotonic() > deadline:
                where = f"at {self._place.endpoint} within {come_seconds:g} s"
                raise NodeExit(6, f"no bench run of node 0 was found {where}")
        self._watcher.waiting(f"{self._name}: found node 0, which keeps the records; waiting for a rung")
        while True:
            self._leave_if_over()
            task = self._node_0["task"]
            if task and task["number"] > self._task and self._store.arrival in task["arrivals"]:
                self._task = task["number"]
                self._run(task)
            time.sleep(POLL_SECONDS)

    @property
    def _node_0(self) -> Facts:
        """What node 0 said last; empty before it is found."""
        return self._store.incoming.get(0, {})

    def _leave_if_over(self) -> None:
        """Read what node 0 says; raise NodeExit if this node's part in the run has ended."""
        self._store.exchange()
        exits = self._node_0.get("exits", {})
        if order := exits.get(str(self._store.arrival)) or exits.get("all"):
            raise NodeExit(*order)
        if self._stop.requested:
            self._store.outgoing["interrupted"] = True
            self._store.exchange()
            raise NodeExit(130, f"{self._name} was interrupted, and has told node 0")
        if self._store.lost:
            raise NodeExit(6, f"{self._place.called(0)} was lost: {self._store.lost}")

    @property
    def requested(self) -> bool:
        """Whether this node's part of a task is to end."""
        if self._stop.requested:  # before this side ends, which node 0 would take for a failure
            self._store.outgoing["interrupted"] = True
        try:
            self._leave_if_over()
        except NodeExit:
            return True
        return self._node_0["end"] >= self._task

    def _run(self, order: dict[str, Any]) -> None:
        task, part = self._parse(order)
        self._watcher.started(task, max(task.repetition, self._ladder.protocol.repeats), None)
        answer = _answer(self._executor.observe(task, self, part))
        self._leave_if_over()
        self._store.outgoing["answer"] = {"task": self._task, "outcome": answer}
        self._watcher.waiting(f"{self._name}: {task.title}: {answer['status']}; waiting for a rung")

    def _parse(self, order: dict[str, Any]) -> tuple[Task, Part]:
        """Return the task that node 0 names, and this node's part. Raises NodeExit if there is none."""
        rung = None
        with contextlib.suppress(LadderError):
            if order["kind"] in get_args(Kind):
                upto = order["rung"] if order["kind"] == "scout" else None
                ladder = self._ladder.carrying(without=order.get("without", ()), upto=upto)
                rung = variant(ladder, ladder.rung(order["rung"]), order["kind"])
        if rung is None or rung.toggles.processes % order["nodes"]:
            raise NodeExit(6, f"{self._place.called(0)} asked for what this ladder does not have")
        task = Task(
            kind=order["kind"],
            rung=rung,
            repetition=order["repetition"],
            together=tuple(order.get("together", ())),
            stop_below=order.get("stop_below"),
            proofs=order["proofs"],
        )
        own, place = interface(self._store.outgoing["address"]), self._place
        return task, Part(
            nodes=order["nodes"], node=place.node, host=place.host, port=order["port"], interface=own
        )


def _answer(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an Outcome that node 0 needs from another node."""
    noticed = {"warnings": outcome.warnings, "other_work_cores": outcome.other_work_cores}
    if outcome.exit_code == 0:  # only rank 0, on node 0, writes an outcome of success
        return {"status": "ok", **noticed}
    error = anonymous(outcome.error) if outcome.error else None
    return {"status": outcome.status, "error": error, **noticed}

"""A run over several nodes, as a node other than node 0 sees it: it starts its part of each rung that it is told of.

It writes no records. What it runs it works out itself, from its own ladder and options: all it takes from node 0 are
the name of a rung, a round, and a port. Imports no torch.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.analysis.schedule import Task, variant
from bench.ladder.ladder import Ladder, LadderError
from bench.process.shutdown import Stop, stoppable
from bench.run.command import Options, anonymous
from bench.run.executor import Observed, Processes, Watcher
from bench.run.nodes.connection import Link, connect, interface
from bench.run.nodes.coordinator import POLL_SECONDS, Patience, described
from bench.run.nodes.distributed_task import Order, Part
from bench.run.nodes.topology import Place, PlaceError
from bench.run.probe import probe
from bench.run.runner import check_data
from gpt2.hardware.host import plain_folder


class Farewell(Exception):
    """What ends this node's part in the run; the message is for the user."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def follow(ladder: Ladder, options: Options, place: Place, watcher: Watcher) -> Farewell:
    """Take part in the run of node 0 until it ends; returns how it ended.

    Raises LadderError, DataError, ProbeError, or PlaceError where node 0 does not want this node.
    """
    patience, rungs = Patience.as_set(), ladder.chosen(options.rungs)
    data_sha256 = check_data(ladder, rungs, options.data)
    asked = probe(rungs[-1].toggles.device, ladder.path, options.overrides, ablate=options.ablate)
    hello = described(place, ladder, data_sha256, asked.environment)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=plain_folder()) as scratch, stoppable() as stop:
        try:
            link = _reach(place, patience, stop, watcher)
            processes = Processes(ladder, options, Path(scratch), place.name, asked, watcher)
            return Follower(ladder, place, link, processes, watcher, stop).follow(hello)
        except Farewell as farewell:
            return farewell


def _reach(place: Place, patience: Patience, stop: Stop, watcher: Watcher) -> Link:
    watcher.waiting(f"{place.name}: looking for node 0 at {place.endpoint}")
    deadline = time.monotonic() + patience.come_seconds
    while time.monotonic() < deadline:
        if stop.asked:
            raise Farewell(130, "interrupted")
        if link := connect(place, patience.silence_seconds):
            return link
    raise Farewell(6, f"no bench run of node 0 was found at {place.endpoint} within {patience.come_seconds:g} s")


class Follower:
    """A node that has found node 0."""

    def __init__(
        self, ladder: Ladder, place: Place, link: Link, processes: Processes, watcher: Watcher, stop: Stop
    ) -> None:
        self._ladder, self._place, self._link, self._stop = ladder, place, link, stop
        self._processes, self._watcher = processes, watcher
        self._ended_by_node_0 = False
        self._goodbye: Farewell | None = None

    def follow(self, hello: dict[str, Any]) -> Farewell:
        """Say hello, and do as node 0 says until the end. Raises Farewell, or PlaceError."""
        self._link.send("hello", **hello)
        self._watcher.waiting(f"{self._place.name}: found node 0, which takes nodes in between rungs")
        while True:
            for message in self._link.receive(POLL_SECONDS):
                self._heed(message)
                if message.get("what") == "task":
                    self._take_part(message)
            self._leave_if_over()

    def _heed(self, message: dict[str, Any]) -> None:
        """Anything but a task."""
        what = message.get("what")
        if what == "refused":
            raise PlaceError(str(message.get("why")))
        if what == "welcome":
            self._watcher.waiting(f"{self._place.name}: taken in, waiting for a rung; node 0 keeps the records")
        if what == "end":
            self._ended_by_node_0 = True
        if what == "bye":
            code = message.get("exit_code")
            self._goodbye = Farewell(code if isinstance(code, int) and 0 <= code < 256 else 6, str(message.get("why")))

    def _leave_if_over(self) -> None:
        if self._goodbye:
            raise self._goodbye
        if self._stop.asked:
            self._link.send("interrupted")
            raise Farewell(130, f"{self._place.name} was interrupted, and node 0 is told so")
        if self._link.lost:
            raise Farewell(6, f"node 0 of {self._place.nodes} was lost: {self._link.lost}")

    @property
    def asked(self) -> bool:
        """Whether this node's part of a rung is to end."""
        for message in self._link.receive():
            self._heed(message)
        if self._stop.asked:  # said before this side ends, for node 0 would take that for the cause
            self._link.send("interrupted")
        return bool(self._stop.asked or self._link.lost or self._ended_by_node_0 or self._goodbye)

    def _take_part(self, message: dict[str, Any]) -> None:
        task, part = self._understand(message)
        self._ended_by_node_0 = False
        self._watcher.started(task, max(task.repetition, self._ladder.protocol.repeats), None)
        seen = self._processes.observe(task, self, part)
        self._leave_if_over()
        self._link.send("ended", task=list(task.key), outcome=self._told(seen))
        self._watcher.waiting(f"{self._place.name}: {task.title}: {self._told(seen)['status']}; waiting for a rung")

    def _understand(self, message: dict[str, Any]) -> tuple[Task, Part]:
        """Raises Farewell where this ladder has no such task."""
        try:
            order = Order.model_validate({key: value for key, value in message.items() if key != "what"})
            rung = variant(self._ladder, self._ladder.rung(order.rung), order.kind)
        except (ValidationError, LadderError):
            order = rung = None
        if order is None or rung is None or rung.toggles.processes % order.nodes:
            raise Farewell(6, f"node 0 of {self._place.nodes} asked for what this ladder does not have")
        own = interface(self._link.own_host)
        part = Part(nodes=order.nodes, node=self._place.node, host=self._place.host, port=order.port, interface=own)
        return Task(kind=order.kind, rung=rung, repetition=order.repetition), part

    def _told(self, seen: Observed) -> dict[str, Any]:
        """Of an Outcome, what is not rank 0's to tell."""
        outcome = seen.outcome
        noticed = {"warnings": outcome.warnings, "other_work_cores": outcome.other_work_cores}
        if seen.exit_code == 0:  # where no rank is rank 0, none has anything to say of success
            return {"status": "ok", **noticed}
        error = anonymous(outcome.error) if outcome.error else None
        return {"status": outcome.status, "error": error, **noticed}

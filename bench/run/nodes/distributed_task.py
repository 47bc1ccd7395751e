"""One rung over several nodes, as node 0 sees it: what the others are told, what they answer, who was the cause.

Each node's ranks are started there by torchrun, and ended there with all that they started. Imports no torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pydantic import Field, ValidationError

from bench.analysis.schedule import Task
from bench.analysis.warnings import disturbances
from bench.records.machine import Plain
from bench.records.record import Kind, Outcome
from bench.run.nodes.connection import interface
from bench.run.nodes.coordinator import POLL_SECONDS, Team
from bench.run.nodes.topology import Place
from gpt2.hardware.host import free_port

SETTLE_SECONDS = 3.0
"""After one side has ended badly: for the others to end by themselves and tell their own story."""
ANSWER_SECONDS = 30.0
"""After node 0's side has ended well: for the others' answers."""
END_SECONDS = 15.0
"""After the others were told to end theirs: for their answers."""
JOIN_SECONDS = 120
"""How long torchrun waits for that of another node, which may import torch from a slow disk."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What torchrun on one node must know of a rung that several take."""

    nodes: int
    node: int | str
    host: str
    port: int | str
    interface: str | None = None
    """Where gloo is to find the other nodes."""

    def arguments(self, world_size: int) -> list[str]:
        """Of torchrun, instead of --standalone; of its ways to meet the one that puts rank 0 on node 0 for certain."""
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node)),
            *("--nproc-per-node", str(world_size // self.nodes)),
            *("--master-addr", self.host, "--master-port", str(self.port)),
            *("--rdzv-conf", f"timeout={JOIN_SECONDS}"),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the processes need; what the user has set stays."""
        # gloo would else take whatever address the host's name stands for, often one that only this host knows.
        if self.interface is None or os.environ.get("GLOO_SOCKET_IFNAME"):
            return {}
        return {"GLOO_SOCKET_IFNAME": self.interface}


def part_shown(nodes: int) -> Part:
    """For a record, which names no host: what to put there is node 0's host, a port of it, and each node's number."""
    return Part(nodes=nodes, node="NODE", host="HOST", port="PORT")


class Order(Plain):
    """What another node must know of a task; the rest it knows from its own ladder and options."""

    kind: Kind
    rung: str
    repetition: int
    nodes: int = Field(ge=2)
    port: int


class Joint:
    """A rung that has begun on several nodes."""

    def __init__(self, team: Team, task: Task, nodes: int) -> None:
        """Have the first `nodes` nodes, none of them absent, start their part."""
        self._team, self._key = team, list(task.key)
        self._others = range(1, nodes)
        self._answers: dict[int, Outcome] = {}
        self._lost: set[int] = set()
        """Of the nodes with an answer, those that did not give it themselves."""
        self._wrong_since: float | None = None
        port = free_port()
        links = [team.links[node] for node in self._others]
        own = interface(links[0].own_host)
        self.part = Part(nodes=nodes, node=0, host=team.place.host, port=port, interface=own)
        """That of this node."""
        order = Order(kind=task.kind, rung=task.rung.name, repetition=task.repetition, nodes=nodes, port=port)
        for link in links:
            link.send("task", **order.model_dump())

    @property
    def asked(self) -> bool:
        """Whether this node's side is to end: a user says so, or another's has ended badly and ours does not."""
        self._listen()
        late = self._wrong_since is not None and time.monotonic() > self._wrong_since + SETTLE_SECONDS
        return self._team.stopped or late

    def conclude(self, mine: Outcome) -> Outcome:
        """What came of the rung, once this node's side has ended; waits for the others, and ends theirs if need be."""
        if not self._team.stopped:
            self._await(ANSWER_SECONDS if mine.status == "ok" else SETTLE_SECONDS)
        for node in self._open:
            self._team.links[node].send("end")
        self._await(END_SECONDS)
        for node in self._open:
            self._team.drop(node, "it did not answer, and should have ended its part of a rung")
        self._listen()
        by = self._team.interrupted_by
        if mine.status != "ok" and by is not None:  # whatever came of it here
            return Outcome(
                status="interrupted",
                error=f"by Ctrl-C or a signal, on node {by}",
                warnings=mine.warnings,
                other_work_cores=mine.other_work_cores,
            )
        if mine.status == "interrupted" and self._team.stopped:
            return mine
        return verdict(self._team.place, mine, self._answers, self._lost)

    @property
    def _open(self) -> list[int]:
        return [node for node in self._others if node not in self._answers]

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._listen()

    def _listen(self) -> None:
        for node, message in self._team.hear():
            if node in self._open and message.get("what") == "ended" and message.get("task") == self._key:
                try:
                    self._answers[node] = Outcome.model_validate(message.get("outcome"))
                except ValidationError:
                    self._team.drop(node, "it sent what cannot be read")
        for node in self._open:
            if node not in self._team.links:
                self._answers[node] = Outcome(status="failed", error=self._team.gone[node])
                self._lost.add(node)
        if self._wrong_since is None and any(answer.status != "ok" for answer in self._answers.values()):
            self._wrong_since = time.monotonic()


CONSEQUENCE = re.compile(
    "connection closed by peer|connection reset by peer|connection refused|broken pipe|timed out|socket timeout|"
    "remote process exit|ncclRemoteError|DistNetworkError|DistStoreError|connectFullMesh|failed to connect",
    re.IGNORECASE,
)
"""What torch says on one node when another's ranks are gone. Of several errors, another kind is the likelier cause."""


def verdict(place: Place, mine: Outcome, answers: Mapping[int, Outcome], lost: Collection[int] = ()) -> Outcome:
    """One outcome of all sides: node 0's, with what the others add, or else that of the side that was the cause.

    lost: nodes that have gone without a word, whose answers are node 0's own account of that.
    """
    warnings = [
        f"node {node}: {warning}"
        for node, answer in answers.items()
        for warning in (*disturbances(answer), *answer.warnings)
    ]
    sides = {0: mine, **answers}
    # A side is interrupted here only because another had gone wrong before.
    wrong = {node: side for node, side in sides.items() if side.status not in ("ok", "interrupted")}
    if mine.status == "ok":
        # The window was complete, on all nodes: what was wrong came after it.
        after = [f"after the window: {place.called(node)}: {_first(side)}" for node, side in wrong.items()]
        return mine.model_copy(update={"warnings": [*mine.warnings, *warnings, *after]})
    ranked = sorted(wrong, key=lambda node: 2 if node in lost else _unlikeliness(wrong[node]))
    if not ranked:
        return mine
    cause, *others = ranked
    lines = [f"{place.called(cause)}: {wrong[cause].error or wrong[cause].status}"]
    lines += [f"{place.called(node)}: {_first(wrong[node])}" for node in others]
    return mine.model_copy(
        update={
            "status": wrong[cause].status,
            "error": "\n".join(lines),
            "warnings": [*mine.warnings, *warnings],
        }
    )


def _first(side: Outcome) -> str:
    return (side.error or side.status).splitlines()[0]


def _unlikeliness(side: Outcome) -> int:
    """Of being the cause of the others' ends; the lowest is."""
    if side.status == "failed":
        return 4 if CONSEQUENCE.search(_first(side)) else 2
    return {"out_of_memory": 0, "unsupported": 1, "timeout": 3}[side.status]

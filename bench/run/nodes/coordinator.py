"""A run over several nodes, as node 0 sees it. Imports no torch.

Each node runs the same `bench run`, and only node 0 keeps records. In the store it says who its members are,
which task they run, and whether that is to end; the others answer there (see agent.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bench.analysis.schedule import Task
from bench.analysis.warnings import disturbances
from bench.ladder.ladder import Ladder
from bench.process.shutdown import Stop
from bench.records.machine import Environment, differences
from bench.records.record import Outcome
from bench.run.nodes.rendezvous import Facts, Rendezvous, interface, own_address
from bench.run.nodes.topology import Part, Place, PlaceError, patience
from gpt2.hardware.host import free_port

POLL_SECONDS = 0.25
SETTLE_SECONDS = 3.0
"""Limit for the other nodes to report their own errors after one has failed."""
ANSWER_SECONDS = 30.0
"""Limit for the other nodes to answer after node 0's side has ended well, or after they were told to end."""
LEAVE_SECONDS = 5.0
"""Limit for the other nodes to leave at the end of the run."""
OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables in which nodes may differ, because they name devices and network cards."""


def described(place: Place, ladder: Ladder, data_sha256: str, environment: Environment) -> Facts:
    """Return what a node says of itself when it joins, including what must be equal on all nodes."""
    decided_by_node_0 = {"repeats", "until"}
    protocol = {f"protocol.{k}": v for k, v in asdict(ladder.protocol).items() if k not in decided_by_node_0}
    variables = {name: value for name, value in environment.variables.items() if name not in OWN}
    boot = Path("/proc/sys/kernel/random/boot_id")  # one for all containers and namespaces of a machine
    return {
        "node": place.node,
        "address": own_address(place.host),
        "machine": boot.read_text() if boot.exists() else None,
        "equal": {
            "--nnodes": place.nodes,
            "the code of gpt2/ and bench/ (hash)": environment.code_hash[:12],
            "the ladder's workload or toggles (hash)": ladder.hash[:12],
            "the text (sha256)": data_sha256[:12],
            **protocol,
        },
        "environment": environment.model_copy(update={"variables": variables}).model_dump(mode="json"),
    }


def difference(node_0: Facts, other: Facts) -> str | None:
    """Return the first difference: "torch is 2.12.0 there and 2.13.0 on node 0"; None if there is none."""
    pairs = [(what, other["equal"].get(what), value) for what, value in node_0["equal"].items()]
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    if not unequal:
        there, here = (Environment.model_validate(facts["environment"]) for facts in (other, node_0))
        unequal = list(differences(there, here))
    return "{} is {} there and {} on node 0".format(*unequal[0]) if unequal else None


def _wait(done: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so, for a limited time."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


class Team:
    """Node 0 and the other nodes that have joined."""

    def __init__(
        self, place: Place, here: Facts, store: Rendezvous, stop: Stop, note: Callable[[str], None]
    ) -> None:
        """here: what node 0 says of itself, from described()."""
        self.place, self.store = place, store
        self.members: dict[int, int] = {}
        """Number of arrival by node."""
        self.gone = dict.fromkeys(range(1, place.nodes), f"did not come within {patience('come'):g} s")
        """Why a node is not a member, by node; meaningless for members."""
        self.hosts = {place.host: "HOST"}
        """Words by which records replace addresses."""
        self.shared: set[int] = set()
        """Nodes on the same machine as node 0."""
        self.interrupted_by: int | None = None
        """Another node on which the user has interrupted the run."""
        self._here, self._stop, self._note = here, stop, note
        self._considered: set[int] = {0}
        self._begun = False
        self.outgoing = self.store.outgoing
        self.outgoing |= {"task": None, "end": 0, "exits": {}}

    def dismiss(self, exit_code: int, why: str) -> None:
        """Tell the other nodes to exit with this code and message, and wait until they have left."""
        self.outgoing["exits"].setdefault("all", [exit_code, why])

        def all_left() -> bool:
            self.store.exchange()
            others = [facts for arrival, facts in self.store.incoming.items() if arrival]
            return self.store.lost is not None or all("left" in facts for facts in others)

        _wait(all_left, LEAVE_SECONDS)

    @property
    def requested(self) -> bool:
        """Whether a user has interrupted the run, on any node."""
        self.update()
        return self._stop.requested

    def gather(self, nodes: int) -> None:
        """Wait for the first `nodes` nodes, up to the time limit. Raises PlaceError if one differs."""
        if nodes > 1:
            self._note(f"waiting for {nodes - 1} more of {self.place.nodes} nodes at {self.place.endpoint}")

        def enough() -> bool:
            return not self.absent(nodes) or self._stop.requested or self.store.lost is not None

        _wait(enough, patience("come"))
        if self.store.lost:
            self.gone |= dict.fromkeys(self._missing(nodes), f"cannot come: {self.store.lost}")
        if not self._stop.requested:
            for node in self._missing(nodes):
                self._note(f"{self.place.called(node)} {self.gone[node]}; rungs that need it will fail")
        self._begun = True

    def absent(self, nodes: int) -> str | None:
        """Return why a rung over the first `nodes` nodes cannot run now; None if it can."""
        self.update()
        return next((f"{self.place.called(node)} {self.gone[node]}" for node in self._missing(nodes)), None)

    def _missing(self, nodes: int) -> list[int]:
        return [node for node in range(1, nodes) if node not in self.members]

    def update(self) -> None:
        """Update who is lost, who has joined, and whether the run was interrupted. Raises as gather()."""
        self.store.exchange()
        for node, arrival in list(self.members.items()):
            facts = self.store.incoming.get(arrival, {"left": "what it says cannot be read"})
            if facts.get("interrupted"):
                self.interrupted_by, self._stop.requested = node, True
            if why := self.store.lost or facts.get("left"):
                self.drop(node, why)
        for arrival in self.store.incoming.keys() - self._considered:
            self._considered.add(arrival)
            if "left" not in self.store.incoming[arrival]:
                try:
                    self._admit(arrival, self.store.incoming[arrival])
                except (AttributeError, KeyError, TypeError, ValueError):  # not a bench run
                    self._dismiss(arrival, 2, "node 0 cannot read what this node says of itself")

    def drop(self, node: int, why: str) -> None:
        """Count a member as lost; it may come back."""
        if node not in self.members:
            return
        self.gone[node] = f"was lost: {why}"
        self._dismiss(self.members.pop(node), 6, f"{self.place.called(node)} {self.gone[node]}")
        if not self._stop.requested:
            self._note(f"{self.place.called(node)} {self.gone[node]}; the same command there brings it back")

    def _dismiss(self, arrival: int, exit_code: int, why: str) -> None:
        self.outgoing["exits"][str(arrival)] = [exit_code, why]

    def _admit(self, arrival: int, facts: Facts) -> None:
        """Take a node in, or tell it why not."""
        node = facts["node"]
        why = difference(self._here, facts)
        if not why and not 0 < node < self.place.nodes:
            why = "--node-rank 0 is node 0's own"
        if not why and node in self.members:
            why = f"another node with --node-rank {node} is here already"
        if why:
            why = f"{self.place.called(node)} does not fit: {why}"
            why += "; run the same command from the same files on every node"
            self._dismiss(arrival, 2, why)
            if not self._begun:
                raise PlaceError(why)
            return self._note(why)
        machine, address = facts["machine"], facts["address"]
        if machine is not None and machine == self._here["machine"]:
            self.shared.add(node)
        if address:
            self.hosts |= {own_address(address) or self.place.host: "node 0", address: f"node {node}"}
        self.members[node] = arrival
        return self._note(f"{self.place.called(node)} is here")


class DistributedTask:
    """A task that runs on several nodes, on each by a torchrun of its own."""

    def __init__(self, team: Team, task: Task, nodes: int) -> None:
        """Have the first `nodes` nodes, all of them members, start their part."""
        self._team = team
        self._number = team.outgoing["end"] + 1
        self._answers: dict[int, Outcome] = {}
        """Outcomes by node; of one that was lost it is node 0's account of that."""
        self._others = {node: team.members[node] for node in range(1, nodes)}
        self._failed_since: float | None = None
        port = free_port()
        own = interface(own_address(team.store.incoming[self._others[1]]["address"] or ""))
        self.part = Part(nodes=nodes, node=0, host=team.place.host, port=port, interface=own)
        """Node 0's part."""
        team.outgoing["task"] = {
            "number": self._number,
            "arrivals": list(self._others.values()),
            "kind": task.kind,
            "rung": task.rung.name,
            "without": list(task.rung.without),
            "together": list(task.together),
            "stop_below": task.stop_below,
            "repetition": task.repetition,
            "proofs": task.proofs,
            "nodes": nodes,
            "port": port,
        }
        team.update()

    @property
    def requested(self) -> bool:
        """Whether node 0's side is to end: it was interrupted, or another node has failed."""
        interrupted = self._team.requested
        self._collect_answers()
        late = self._failed_since is not None and time.monotonic() > self._failed_since + SETTLE_SECONDS
        return interrupted or late

    def conclude(self, mine: Outcome) -> Outcome:
        """Return the outcome over all nodes, once node 0's side has ended; ends the other sides if needed."""
        if not self._team.requested:
            _wait(self._all_answered, ANSWER_SECONDS if mine.status == "ok" else SETTLE_SECONDS)
        self._team.outgoing["end"] = self._number
        _wait(self._all_answered, ANSWER_SECONDS)
        for node in self._unanswered:
            self._team.drop(node, "it did not answer, and should have ended its part of a rung")
        self._collect_answers()
        node = self._team.interrupted_by
        if mine.status != "ok" and node is not None:
            error = f"by Ctrl-C or a signal, on node {node}"
            return mine.model_copy(update={"status": "interrupted", "error": error})
        if mine.status == "interrupted" and self._team.requested:
            return mine
        return merged_outcome(self._team.place, {0: mine, **self._answers})

    @property
    def _unanswered(self) -> list[int]:
        return [node for node in self._others if node not in self._answers]

    def _all_answered(self) -> bool:
        self._team.update()
        self._collect_answers()
        return not self._unanswered

    def _collect_answers(self) -> None:
        """Take the answers of nodes that have ended their part, and note those that were lost."""
        for node in self._unanswered:
            answer = self._team.store.incoming.get(self._others[node], {}).get("answer")
            try:
                if answer and answer["task"] == self._number:
                    self._answers[node] = Outcome.model_validate(answer["outcome"])
                    continue
            except (KeyError, TypeError, ValidationError):
                self._team.drop(node, "its answer cannot be read")
            if self._team.members.get(node) != self._others[node]:
                self._answers[node] = Outcome(status="failed", error=self._team.gone[node])
        if self._failed_since is None and any(answer.status != "ok" for answer in self._answers.values()):
            self._failed_since = time.monotonic()


CONSEQUENCE = re.compile(
    "connection closed by peer|connection reset by peer|connection refused|broken pipe|timed out|socket "
    "timeout|remote process exit|ncclRemoteError|DistNetworkError|DistStoreError|connectFullMesh|failed to "
    "connect",
    re.IGNORECASE,
)
"""Matches errors that a node's ranks report when the ranks of another are gone."""


def merged_outcome(place: Place, sides: Mapping[int, Outcome]) -> Outcome:
    """Merge the outcomes of all nodes: that of node 0, or of the likeliest cause if one has failed."""
    mine = sides[0]
    warnings = [
        f"node {node}: {warning}"
        for node, side in sides.items()
        if node
        for warning in (*disturbances(side), *side.warnings)
    ]
    # A side is interrupted here only because another had failed before.
    failed = [node for node, side in sides.items() if side.status not in ("ok", "interrupted")]
    errors = {node: f"{place.called(node)}: {sides[node].error or sides[node].status}" for node in failed}
    update: dict[str, Any] = {"warnings": [*mine.warnings, *warnings]}
    if mine.status == "ok":
        # The window was complete on all nodes: the failures came after it.
        update["warnings"] += [f"after the window: {errors[node].splitlines()[0]}" for node in failed]
    elif failed:
        cause, *others = sorted(failed, key=lambda node: _cause_rank(sides[node]))
        error = "\n".join([errors[cause], *(errors[node].splitlines()[0] for node in others)])
        update |= {"status": sides[cause].status, "error": error}
    return mine.model_copy(update=update)


def _cause_rank(side: Outcome) -> int:
    """Root-cause rank of a failure; lower is likelier. A node that was lost ranks as one that failed."""
    if side.status == "failed":
        return 4 if CONSEQUENCE.search((side.error or side.status).splitlines()[0]) else 2
    return {"out_of_memory": 0, "unsupported": 1, "too_slow": 2, "timeout": 3}[side.status]

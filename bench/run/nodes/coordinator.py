"""A run over several nodes, as node 0 sees it: who takes part, what they run together, and whose fault a bad
end was.

Each node runs the same `bench run`, and only node 0 keeps records. What it says in the store is who its
members are, which task they are on, and whether that is to end; the others answer there (see agent.py).
Imports no torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping
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
"""After one node has ended badly: for the others to end by themselves and tell their own story."""
ANSWER_SECONDS = 30.0
"""For the others to answer, once node 0's side has ended well or they were told to end theirs."""
LEAVE_SECONDS = 5.0
"""For the others to leave at the end."""
OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables in which nodes may differ: they name devices and network cards, of which number and kind count.
"""


def described(place: Place, ladder: Ladder, data_sha256: str, environment: Environment) -> Facts:
    """What a node says of itself at first, and what must be equal on all of them."""
    free = {"repeats", "until"}  # node 0 decides on the rounds
    variables = {name: value for name, value in environment.variables.items() if name not in OWN}
    boot = Path(
        "/proc/sys/kernel/random/boot_id"
    )  # the same for all that runs on a machine, namespaces included
    return {
        "node": place.node,
        "address": own_address(place.host),
        "machine": boot.read_text() if boot.exists() else None,
        "equal": {
            "--nnodes": place.nodes,
            "the code of gpt2/ and bench/ (hash)": environment.code_hash[:12],
            "the ladder's workload or toggles (hash)": ladder.hash[:12],
            "the text (sha256)": data_sha256[:12],
            **{
                f"protocol.{name}": value
                for name, value in asdict(ladder.protocol).items()
                if name not in free
            },
        },
        "environment": environment.model_copy(update={"variables": variables}).model_dump(mode="json"),
    }


def difference(ours: Facts, theirs: Facts) -> str | None:
    """The first thing that is not equal on node 0 and on another: "torch is 2.12.0 there and 2.13.0 on node
    0".
    """
    pairs = [(what, theirs["equal"].get(what), value) for what, value in ours["equal"].items()]
    unequal = [pair for pair in pairs if pair[1] != pair[2]]
    if not unequal:
        there, here = (Environment.model_validate(facts["environment"]) for facts in (theirs, ours))
        unequal = list(differences(there, here))
    return "{} is {} there and {} on node 0".format(*unequal[0]) if unequal else None


class Team:
    """Node 0 and those of the others that are here."""

    def __init__(
        self, place: Place, here: Facts, store: Rendezvous, stop: Stop, note: Callable[[str], None]
    ) -> None:
        """here: what node 0 says of itself, as described()."""
        self.place, self.store = place, store
        self.members: dict[int, int] = {}
        """By node, the number of its arrival."""
        self.gone = dict.fromkeys(range(1, place.nodes), f"did not come within {patience('come'):g} s")
        """Of those that are not here, why; of those that are, it does not matter."""
        self.hosts = {place.host: "HOST"}
        """Names for addresses, which belong into no record."""
        self.shared: set[int] = set()
        """Nodes that are the same machine as this one."""
        self.interrupted_by: int | None = None
        """The node where the user asked for an end, if it is another than this."""
        self._here, self._stop, self._note = here, stop, note
        self._greeted: set[int] = {0}
        self._begun = False
        self.says = self.store.says
        self.says |= {"task": None, "end": 0, "bye": {}}

    def send_home(self, exit_code: int, why: str) -> None:
        """Have the other nodes end, by word of why and with an exit code, and wait a little until they have."""
        self.says["bye"].setdefault("all", [exit_code, why])
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            self.store.look()
            here = [facts for arrival, facts in self.store.heard.items() if arrival and "over" not in facts]
            if self.store.lost or not here or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    @property
    def asked(self) -> bool:
        """Whether a user has asked for an end, on whichever node."""
        self.look()
        return self._stop.asked

    def gather(self, nodes: int) -> None:
        """Wait for the first `nodes` nodes to come, up to the limit. Raises PlaceError where one does not
        fit.
        """
        if nodes > 1:
            self._note(f"waiting for {nodes - 1} more of {self.place.nodes} nodes at {self.place.endpoint}")
        deadline = time.monotonic() + patience("come")
        while (
            self.absent(nodes)
            and not self._stop.asked
            and not self.store.lost
            and time.monotonic() < deadline
        ):
            time.sleep(POLL_SECONDS)
        if self.store.lost:
            self.gone |= dict.fromkeys(self._missing(nodes), f"cannot come: {self.store.lost}")
        if not self._stop.asked:
            for node in self._missing(nodes):
                self._note(f"{self.place.called(node)} {self.gone[node]}; what needs it will fail")
        self._begun = True

    def absent(self, nodes: int) -> str | None:
        """Why a rung over the first `nodes` nodes cannot run now; None if it can."""
        self.look()
        return next((f"{self.place.called(node)} {self.gone[node]}" for node in self._missing(nodes)), None)

    def _missing(self, nodes: int) -> list[int]:
        return [node for node in range(1, nodes) if node not in self.members]

    def look(self) -> None:
        """Hear who is lost, who has come, and whether somebody was interrupted. Raises PlaceError as
        gather().
        """
        self.store.look()
        for node, arrival in list(self.members.items()):
            facts = self.store.heard.get(arrival, {"over": "what it says cannot be read"})
            if facts.get("interrupted"):
                self.interrupted_by, self._stop.asked = node, True
            if why := self.store.lost or facts.get("over"):
                self.drop(node, why)
        for arrival in self.store.heard.keys() - self._greeted:
            self._greeted.add(arrival)
            if "over" not in self.store.heard[arrival]:
                try:
                    self._greet(arrival, self.store.heard[arrival])
                except (AttributeError, KeyError, TypeError, ValueError):  # it is no bench run
                    self.says["bye"][str(arrival)] = [2, "node 0 cannot read what this node says of itself"]

    def drop(self, node: int, why: str) -> None:
        """Count a node as lost, if it is not; it may come back."""
        if node not in self.members:
            return
        self.gone[node] = f"was lost: {why}"
        self.says["bye"][str(self.members.pop(node))] = [6, f"{self.place.called(node)} {self.gone[node]}"]
        if not self._stop.asked:
            self._note(f"{self.place.called(node)} {self.gone[node]}; the same command there brings it back")

    def _greet(self, arrival: int, facts: Facts) -> None:
        node = facts["node"]
        why = difference(self._here, facts)
        if not why and not 0 < node < self.place.nodes:
            why = "--node-rank 0 is node 0's own"
        if not why and node in self.members:
            why = f"another node with --node-rank {node} is here already"
        if why:
            why = f"{self.place.called(node)} does not fit: {why}"
            why += "; run the same command from the same files on every node"
            self.says["bye"][str(arrival)] = [2, why]
            if not self._begun:
                raise PlaceError(why)
            return self._note(why)
        machine, theirs = facts["machine"], facts["address"]
        if machine is not None and machine == self._here["machine"]:
            self.shared.add(node)
        if theirs:
            self.hosts |= {own_address(theirs) or self.place.host: "node 0", theirs: f"node {node}"}
        self.members[node] = arrival
        return self._note(f"{self.place.called(node)} is here")


class JointTask:
    """A task that has begun on several nodes, each of which runs its part in a torchrun of its own."""

    def __init__(self, team: Team, task: Task, nodes: int) -> None:
        """Have the first `nodes` nodes, none of them absent, start their part."""
        self._team = team
        self._number = team.says["end"] + 1
        self._answers: dict[int, Outcome] = {}
        self._lost: set[int] = set()
        """Nodes that have gone without an answer; the one under their number is node 0's own account of that.
        """
        self._others = {node: team.members[node] for node in range(1, nodes)}
        self._wrong_since: float | None = None
        port = free_port()
        own = interface(own_address(team.store.heard[self._others[1]]["address"] or ""))
        self.part = Part(nodes=nodes, node=0, host=team.place.host, port=port, interface=own)
        """That of this node."""
        who = {"number": self._number, "arrivals": list(self._others.values())}
        what = {"kind": task.kind, "rung": task.rung.name, "repetition": task.repetition}
        team.says["task"] = {**who, **what, "nodes": nodes, "port": port}
        team.look()

    @property
    def asked(self) -> bool:
        """Whether this node's side is to end: a user says so, or another's has ended badly and ours does not."""
        asked = self._team.asked
        self._hear()
        late = self._wrong_since is not None and time.monotonic() > self._wrong_since + SETTLE_SECONDS
        return asked or late

    def conclude(self, mine: Outcome) -> Outcome:
        """What came of the task, once this node's side has ended; waits for the others, and ends theirs if
        need be.
        """
        if not self._team.asked:
            self._await(ANSWER_SECONDS if mine.status == "ok" else SETTLE_SECONDS)
        self._team.says["end"] = self._number
        self._await(ANSWER_SECONDS)
        for node in self._open:
            self._team.drop(node, "it did not answer, and should have ended its part of a rung")
        self._hear()
        by = self._team.interrupted_by
        if mine.status != "ok" and by is not None:  # whatever came of it here
            return Outcome(
                status="interrupted",
                error=f"by Ctrl-C or a signal, on node {by}",
                warnings=mine.warnings,
                other_work_cores=mine.other_work_cores,
            )
        if mine.status == "interrupted" and self._team.asked:
            return mine
        return verdict(self._team.place, {0: mine, **self._answers}, self._lost)

    @property
    def _open(self) -> list[int]:
        return [node for node in self._others if node not in self._answers]

    def _await(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._open and time.monotonic() < deadline:
            self._team.look()
            self._hear()
            time.sleep(POLL_SECONDS)

    def _hear(self) -> None:
        """Take the answers of those who have ended their part, and of those who were lost within it."""
        for node in self._open:
            answer = self._team.store.heard.get(self._others[node], {}).get("answer")
            try:
                if answer and answer["task"] == self._number:
                    self._answers[node] = Outcome.model_validate(answer["outcome"])
                    continue
            except (KeyError, TypeError, ValidationError):
                self._team.drop(node, "its answer cannot be read")
            if self._team.members.get(node) != self._others[node]:
                self._answers[node] = Outcome(status="failed", error=self._team.gone[node])
                self._lost.add(node)
        if self._wrong_since is None and any(answer.status != "ok" for answer in self._answers.values()):
            self._wrong_since = time.monotonic()


CONSEQUENCE = re.compile(
    "connection closed by peer|connection reset by peer|connection refused|broken pipe|timed out|socket "
    "timeout|remote process exit|ncclRemoteError|DistNetworkError|DistStoreError|connectFullMesh|failed to "
    "connect",
    re.IGNORECASE,
)
"""What torch says on one node when another's ranks are gone. Of several errors, another kind is the likelier
cause.
"""


def verdict(place: Place, sides: Mapping[int, Outcome], lost: Collection[int] = ()) -> Outcome:
    """One outcome of all nodes' sides: node 0's, with what the others add, or else that of the likeliest
    cause.

    lost: nodes that have gone without an answer, whose sides are node 0's own account of that.
    """
    mine = sides[0]
    warnings = [
        f"node {node}: {warning}"
        for node, side in sides.items()
        if node
        for warning in (*disturbances(side), *side.warnings)
    ]
    # A side is interrupted here only because another had gone wrong before.
    wrong = [node for node, side in sides.items() if side.status not in ("ok", "interrupted")]
    said = {node: f"{place.called(node)}: {sides[node].error or sides[node].status}" for node in wrong}
    update: dict[str, Any] = {"warnings": [*mine.warnings, *warnings]}
    if mine.status == "ok":
        # The window was complete, on all nodes: what was wrong came after it.
        update["warnings"] += [f"after the window: {said[node].splitlines()[0]}" for node in wrong]
    elif wrong:
        cause, *others = sorted(wrong, key=lambda node: 2 if node in lost else _unlikeliness(sides[node]))
        error = "\n".join([said[cause], *(said[node].splitlines()[0] for node in others)])
        update |= {"status": sides[cause].status, "error": error}
    return mine.model_copy(update=update)


def _unlikeliness(side: Outcome) -> int:
    """Rank of a bad end by how unlikely it is the cause of the others; the lowest is the likeliest."""
    if side.status == "failed":
        return 4 if CONSEQUENCE.search((side.error or side.status).splitlines()[0]) else 2
    return {"out_of_memory": 0, "unsupported": 1, "timeout": 3}[side.status]

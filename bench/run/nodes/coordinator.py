"""A run over several nodes, as node 0 sees it: who may take part, who is here, and who is lost.

Each node runs the same `bench run`; only node 0 keeps records. Messages between the nodes (connection.py) hold names
of rungs, and words on how they ended. distributed_task.py joins what the nodes tell of one rung. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from bench.ladder.ladder import Ladder
from bench.process.shutdown import Stop
from bench.records.machine import Environment, differences
from bench.run.nodes.connection import Link, listen
from bench.run.nodes.topology import Place, PlaceError

POLL_SECONDS = 0.25
OWN = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
"""Variables in which nodes may differ: they name devices and network cards, of which number and kind count."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long nodes wait for one another."""

    come_seconds: float = 300.0
    """For a node to come at the beginning. BENCH_NODE_COME_SECONDS changes it."""
    silence_seconds: float = 30.0
    """A node that is silent for so long is lost. BENCH_NODE_SILENCE_SECONDS changes it."""

    @classmethod
    def as_set(cls) -> Patience:
        """By the environment variables. Raises PlaceError."""
        given: dict[str, float] = {}
        for field in ("come_seconds", "silence_seconds"):
            name = f"BENCH_NODE_{field.upper()}"
            if text := os.environ.get(name):
                try:
                    given[field] = float(text)
                except ValueError:
                    given[field] = -1.0
                if not 0 < given[field] < 86400:
                    raise PlaceError(f"{name}={text}: write seconds, such as {getattr(cls, field):g}")
        return cls(**given)


def described(place: Place, ladder: Ladder, data_sha256: str, environment: Environment) -> dict[str, Any]:
    """What a node says of itself, and what must be equal on all of them."""
    free = {"repeats", "until"}  # node 0 decides on the rounds
    protocol = {key: value for key, value in asdict(ladder.protocol).items() if key not in free}
    variables = {name: value for name, value in environment.variables.items() if name not in OWN}
    alike = environment.model_copy(update={"variables": variables})
    return {
        "node": place.node,
        "nodes": place.nodes,
        "code": environment.code_hash,
        "ladder": ladder.hash,
        "protocol": protocol,
        "data": data_sha256,
        "host": _boot(),
        "environment": alike.model_dump(mode="json"),
    }


def _boot() -> str | None:
    """Of the system that runs, the same for all that runs in it, namespaces included; None where it does not tell."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(boot.encode()).hexdigest()[:12]
    return None


def difference(here: dict[str, Any], there: dict[str, Any]) -> str | None:
    """The first thing that is not equal on node 0 and on another: "torch is 2.12.0 there and 2.13.0 on node 0"."""

    def unequal(what: str, theirs: object, ours: object) -> str:
        return f"{what} is {theirs} there and {ours} on node 0"

    for key, what in (
        ("nodes", "--nnodes"),
        ("code", "the code of gpt2/ and bench/ (hash)"),
        ("ladder", "the ladder's workload or toggles (hash)"),
        ("data", "the text (sha256)"),
    ):
        if here[key] != there.get(key):
            return unequal(what, str(there.get(key))[:12], str(here[key])[:12])
    protocol = there.get("protocol")
    for key, value in here["protocol"].items():
        theirs = protocol.get(key) if isinstance(protocol, dict) else None
        if theirs != value:
            return unequal(f"protocol.{key}", theirs, value)
    try:
        machine = Environment.model_validate(there.get("environment"))
    except ValidationError:
        return "what it says of its machine cannot be read here"
    ours = Environment.model_validate(here["environment"])
    return next((unequal(*each) for each in differences(machine, ours)), None)


class Team:
    """The nodes that came; a context manager that sends them home."""

    def __init__(
        self, place: Place, here: dict[str, Any], patience: Patience, stop: Stop, note: Callable[[str], None]
    ) -> None:
        """Listen at the place. here: from described(). Raises PlaceError."""
        self.place = place
        self.links: dict[int, Link] = {}
        self.gone = dict.fromkeys(range(1, place.nodes), f"did not come within {patience.come_seconds:g} s")
        """Of those that are not here, why; of those that are, it does not matter."""
        self.hosts = {place.host: "HOST"}
        """Names for addresses, which belong into no record."""
        self.shared: set[int] = set()
        """Nodes that are the same machine as this one."""
        self.interrupted_by: int | None = None
        """The node where the user asked for an end, if it is another than this."""
        self._here, self._patience, self._stop, self._note = here, patience, stop, note
        self._begun = False
        self._strangers: list[tuple[Link, float]] = []
        self._server = listen(place)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say goodbye; where send_home() has done so, to nobody."""
        self.send_home(2 if isinstance(error, PlaceError) else 6, "node 0 ended early; it says why")
        self._server.close()

    def send_home(self, exit_code: int, why: str) -> None:
        """Have the other nodes end, by word of why and with an exit code."""
        self._let_in(0.0)
        for link in [*self.links.values(), *(link for link, _ in self._strangers)]:
            link.send("bye", exit_code=exit_code, why=why)
            link.close()
        self.links, self._strangers = {}, []

    @property
    def asked(self) -> bool:
        """Whether a user has asked for an end, on whichever node."""
        self.hear()
        return self.stopped

    @property
    def stopped(self) -> bool:
        """The same, as far as it was heard."""
        return self._stop.asked

    def gather(self, nodes: int) -> None:
        """Wait for the first `nodes` nodes to come, up to the limit. Raises PlaceError where one does not fit."""
        if nodes > 1:
            self._note(f"waiting for {nodes - 1} more of {self.place.nodes} nodes at {self.place.endpoint}")
        deadline = time.monotonic() + self._patience.come_seconds
        while self._missing(nodes) and not self._stop.asked and time.monotonic() < deadline:
            self._let_in(POLL_SECONDS)
        if not self._stop.asked:
            for node in self._missing(nodes):
                self._note(f"{self.place.called(node)} {self.gone[node]}; what needs it will fail")
        self._begun = True

    def absent(self, nodes: int) -> str | None:
        """Why a rung over the first `nodes` nodes cannot run now; None if it can."""
        self._let_in(0.0)
        self.hear()
        return next((f"{self.place.called(node)} {self.gone[node]}" for node in self._missing(nodes)), None)

    def hear(self) -> list[tuple[int, dict[str, Any]]]:
        """What the other nodes have said by now, and who; those that are lost are here no longer."""
        said: list[tuple[int, dict[str, Any]]] = []
        for node, link in list(self.links.items()):
            for message in link.receive():
                if message.get("what") == "interrupted":
                    self.interrupted_by, self._stop.asked = node, True
                said.append((node, message))
            if link.lost:
                self.drop(node, link.lost)
        return said

    def drop(self, node: int, why: str) -> None:
        """Count a node as lost, if it is not; it may come back."""
        if node not in self.links:
            return
        self.links.pop(node).close()
        self.gone[node] = f"was lost: {why}"
        if not self._stop.asked:
            self._note(f"{self.place.called(node)} {self.gone[node]}; the same command there brings it back")

    def _missing(self, nodes: int) -> list[int]:
        return [node for node in range(1, nodes) if node not in self.links]

    def _let_in(self, wait_seconds: float) -> None:
        """Greet those who have come, waiting a moment for somebody."""
        while select.select([self._server], [], [], wait_seconds)[0]:
            wait_seconds = 0.0
            with contextlib.suppress(OSError):  # gone before it could be greeted
                connection, _ = self._server.accept()
                self._strangers.append((Link(connection, self._patience.silence_seconds), time.monotonic()))
        for stranger in list(self._strangers):
            link, since = stranger
            messages = link.receive()
            if not messages and not link.lost and time.monotonic() < since + self._patience.silence_seconds:
                continue
            self._strangers.remove(stranger)
            if messages:
                self._greet(link, messages[0])
            else:
                link.close()

    def _greet(self, link: Link, message: dict[str, Any]) -> None:
        """Take in who fits. Raises PlaceError where one does not, but only before anything was run."""
        node = message.get("node")
        if message.get("what") != "hello" or not isinstance(node, int):
            self._note(f"something that is no bench run came to {self.place.endpoint} and was sent away")
            return link.close()
        self.hear()  # whether the one that was here before is lost
        why = difference(self._here, message)
        if not why and not 0 < node < self.place.nodes:
            why = f"--node-rank {node} is node 0's own" if node == 0 else f"there is no --node-rank {node}"
        if not why and node in self.links:
            why = f"another node with --node-rank {node} is here already"
        if not why:
            link.send("welcome")
            self.links[node] = link
            if message.get("host") is not None and message.get("host") == self._here["host"]:
                self.shared.add(node)
            self.hosts |= {link.own_host: "node 0", link.other_host: f"node {node}"}
            return self._note(f"{self.place.called(node)} is here")
        why = f"{self.place.called(node)} does not fit: {why}; run the same command from the same files on every node"
        link.send("refused", why=why)
        link.close()
        if not self._begun:
            raise PlaceError(why)
        return self._note(why)

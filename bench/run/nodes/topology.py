"""Which of several nodes this is, and how many of them a rung takes. Imports no torch.

place(nnodes=2, node_rank=0, rdzv="10.0.0.1:29400")
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.toggles import HOST, Toggles, UnsupportedToggle


class PlaceError(Exception):
    """Options or SLURM's variables that make no place among the nodes; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of at least two nodes."""

    nodes: int
    node: int
    """Counted from 0; node 0 keeps the records."""
    host: str
    """Where node 0 is found, by name or address."""
    port: int

    @property
    def name(self) -> str:
        """Of this node."""
        return self.called(self.node)

    def called(self, node: int) -> str:
        """Any of the nodes, as a person is told of it."""
        return f"node {node} of {self.nodes}"

    @property
    def endpoint(self) -> str:
        """As in --rdzv."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place(
    nnodes: int | None, node_rank: int | None, rdzv: str | None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """This node's place; None where there is one node only.

    What no option says is read from SLURM's variables, within a step that srun has started. Raises PlaceError.
    """
    step = environ if "SLURM_STEP_NUM_NODES" in environ else {}
    nodes = nnodes if nnodes is not None else _number(step, "SLURM_STEP_NUM_NODES") if step else None
    if nodes is None:
        if node_rank is not None or rdzv is not None:
            raise PlaceError("--node-rank and --rdzv are of one among several nodes; say with --nnodes how many")
        return None
    if nodes < 1:
        raise PlaceError(f"--nnodes {nodes} is less than 1")
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise PlaceError(f"--node-rank {node_rank} is not one of 0 to {nodes - 1}, the nodes of --nnodes {nodes}")
    if step and nnodes is None and node_rank is None:
        _check_tasks(step, nodes)
    if nodes == 1:
        return None
    node = node_rank if node_rank is not None else _number(step, "SLURM_NODEID") if step else None
    if node is None or (rdzv is None and not step):
        raise PlaceError(f"--nnodes {nodes}: give --node-rank (0 to {nodes - 1}) and --rdzv HOST:PORT of node 0, too")
    if not 0 <= node < nodes:
        raise PlaceError(f"SLURM_NODEID {node} is not one of 0 to {nodes - 1}; give --node-rank")
    host, port = _endpoint(rdzv) if rdzv is not None else (_first_host(step), _port(step))
    return Place(nodes=nodes, node=node, host=host, port=port)


def _endpoint(rdzv: str) -> tuple[str, int]:
    host, colon, port = rdzv.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and bare and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise PlaceError(f"--rdzv {rdzv}: write HOST:PORT of node 0, such as 10.0.0.1:29400")
    if ":" in bare and bare == host:
        raise PlaceError(f"--rdzv {rdzv}: write an IPv6 address in brackets, such as [fd00::1]:29400")
    return bare, int(port)


# --- SLURM -----------------------------------------------------------------------------------------------------------


def _number(step: Mapping[str, str], name: str) -> int:
    value = step.get(name, "")
    if not value.isdecimal():
        raise PlaceError(f"{name} is {value!r} and should be a number; give --nnodes, --node-rank and --rdzv instead")
    return int(value)


def _check_tasks(step: Mapping[str, str], nodes: int) -> None:
    tasks = _number(step, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in step else nodes
    if tasks > nodes:
        raise PlaceError(
            f"srun started {tasks} tasks on {nodes} node(s), but bench run starts the ranks of its node itself and is "
            "to run once on each: srun --ntasks-per-node=1"
        )


def _first_host(step: Mapping[str, str]) -> str:
    """The host of node 0."""
    hosts = step.get("SLURM_STEP_NODELIST") or step.get("SLURM_JOB_NODELIST")
    if not hosts:
        raise PlaceError("neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set; give --rdzv HOST:PORT of node 0")
    command = ["scontrol", "show", "hostnames", hosts]
    why = "it named none"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env=dict(step))
        names = done.stdout.split() if not done.returncode else []
        why = (done.stderr.strip().splitlines() or [why])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        names, why = [], getattr(error, "strerror", None) or "no answer in 30 s"
    if not names:
        raise PlaceError(f"scontrol show hostnames {hosts}: {why}; give --rdzv HOST:PORT of node 0")
    return names[0]


def _port(step: Mapping[str, str]) -> int:
    """The same on all nodes and another for each job, below the ports that systems hand out by themselves."""
    return 20000 + _number(step, "SLURM_JOB_ID") % 10000


# --- ranks over nodes ------------------------------------------------------------------------------------------------


def nodes_for(toggles: Toggles, nodes: int, devices: int | None) -> int:
    """How many of `nodes` a rung takes; as many ranks run on each.

    devices: accelerators of each node; of a CPU it does not matter. A rung on accelerators takes as few nodes as hold
    its ranks; one on CPUs, which hold any number, as many as divide them. Raises UnsupportedToggle.
    """
    ranks = toggles.processes
    even = [count for count in range(1, nodes + 1) if ranks % count == 0]
    if toggles.device == HOST or devices is None:
        return even[-1]
    fits = [count for count in even if ranks // count <= devices]
    if fits:
        return fits[0]
    if ranks > nodes * devices:
        reason = f"more ranks than the {devices} devices on each of {nodes} nodes; choose at most {nodes * devices}"
    else:
        reason = f"does not divide evenly over nodes of {devices} devices each; choose a multiple of the nodes"
    raise UnsupportedToggle("world_size", ranks, reason)

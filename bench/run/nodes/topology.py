"""Which of several nodes this is, how many of them a rung takes, and how its ranks are spread. Imports no
torch.

place(nnodes=2, node_rank=0, rdzv="10.0.0.1:29400")
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle

JOIN_SECONDS = 120
"""How long torchrun waits for that of another node, which may import torch from a slow disk."""


PATIENCE = {"come": 300.0, "silence": 30.0}
"""Seconds that nodes wait for one another: to come at the beginning, and until one that is silent is lost."""


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

    def called(self, node: int) -> str:
        """Any of the nodes, as a person is told of it."""
        return f"node {node} of {self.nodes}"

    @property
    def endpoint(self) -> str:
        """As in --rdzv."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
        """Of torchrun, instead of --standalone; of its ways to meet the one that puts rank 0 on node 0 for
        certain.
        """
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node)),
            *("--nproc-per-node", str(world_size // self.nodes)),
            *("--master-addr", self.host, "--master-port", str(self.port)),
            *("--rdzv-conf", f"timeout={JOIN_SECONDS}"),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the processes need; what the user has set stays."""
        # gloo would else take whatever address the host's name stands for, often one that only this host
        # knows.
        if self.interface is None or os.environ.get("GLOO_SOCKET_IFNAME"):
            return {}
        return {"GLOO_SOCKET_IFNAME": self.interface}


def nodes_for(toggles: Toggles, nodes: int, devices: int | None) -> int:
    """How many of `nodes` a rung takes; as many ranks run on each.

    devices: accelerators of each node; of a CPU it does not matter. A rung on accelerators takes as few nodes
    as hold its ranks; one on CPUs, which hold any number, as many as divide them. Raises UnsupportedToggle.
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
        reason = (
            f"does not divide evenly over nodes of {devices} devices each; choose a multiple of the nodes"
        )
    raise UnsupportedToggle("world_size", ranks, reason)


def place(
    nnodes: int | None, node_rank: int | None, rdzv: str | None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """This node's place; None where there is one node only.

    What no option says is read from SLURM's variables, within a step that srun has started. Raises
    PlaceError.
    """
    step = environ if "SLURM_STEP_NUM_NODES" in environ else {}
    nodes = nnodes if nnodes is not None or not step else _number(step, "SLURM_STEP_NUM_NODES")
    if nodes is None:
        if node_rank is not None or rdzv is not None:
            raise PlaceError(
                "--node-rank and --rdzv are of one among several nodes; say with --nnodes how many"
            )
        return None
    if nodes < 1:
        raise PlaceError(f"--nnodes {nodes} is less than 1")
    if step and nnodes is None and node_rank is None:
        tasks = _number(step, "SLURM_STEP_NUM_TASKS") if "SLURM_STEP_NUM_TASKS" in step else nodes
        if tasks > nodes:
            raise PlaceError(
                f"srun started {tasks} tasks on {nodes} node(s), but bench run starts the ranks of its node "
                "itself and is to run once on each: srun --ntasks-per-node=1"
            )
    node = node_rank if node_rank is not None or not step or nodes == 1 else _number(step, "SLURM_NODEID")
    if node is not None and not 0 <= node < nodes:
        raise PlaceError(f"--node-rank {node} is not one of 0 to {nodes - 1}, the nodes of --nnodes {nodes}")
    if nodes == 1:
        return None
    if node is None or (rdzv is None and not step):
        raise PlaceError(
            f"--nnodes {nodes}: give --node-rank (0 to {nodes - 1}) and --rdzv HOST:PORT of node 0, too"
        )
    if rdzv is not None:
        host, port = _endpoint(rdzv)
    else:  # the same on all nodes and another for each job, below the ports that systems hand out by themselves
        host, port = _first_host(step), 20000 + _number(step, "SLURM_JOB_ID") % 10000
    return Place(nodes=nodes, node=node, host=host, port=port)


def _endpoint(rdzv: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[(.+)\]|([^:\[\]]+)):([0-9]{1,5})", rdzv)
    if not match or not 0 < int(match[3]) < 65536:
        raise PlaceError(
            f"--rdzv {rdzv}: write HOST:PORT of node 0, such as 10.0.0.1:29400 or [fd00::1]:29400"
        )
    return match[1] or match[2], int(match[3])


def patience(what: str) -> float:
    """Seconds that nodes wait for one another; BENCH_NODE_COME_SECONDS and ..._SILENCE_... win. Raises
    PlaceError.
    """
    name = f"BENCH_NODE_{what.upper()}_SECONDS"
    text = os.environ.get(name) or str(PATIENCE[what])
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 86400:
            return float(text)
    raise PlaceError(f"{name}={text}: write seconds, such as {PATIENCE[what]:g}")


def _number(step: Mapping[str, str], name: str) -> int:
    value = step.get(name, "")
    if not value.isdecimal():
        raise PlaceError(
            f"{name} is {value!r} and should be a number; give --nnodes, --node-rank and --rdzv instead"
        )
    return int(value)


def _first_host(step: Mapping[str, str]) -> str:
    """The host of node 0, from SLURM's short form of a list."""
    command = [
        "scontrol",
        "show",
        "hostnames",
        step.get("SLURM_STEP_NODELIST") or step.get("SLURM_JOB_NODELIST", ""),
    ]
    why = "it named none"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=30, env=dict(step)
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
        why = done.stderr.strip() or why
    except (OSError, subprocess.TimeoutExpired) as error:
        why = getattr(error, "strerror", None) or "no answer in 30 s"
    raise PlaceError(f"{' '.join(command)}: {why}; give --rdzv HOST:PORT of node 0")

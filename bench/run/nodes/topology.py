"""The nodes of a run: which of them this is, and which ranks of a rung run on each. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from bench.errors import BenchError
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle

JOIN_SECONDS = 120
"""Limit for the torchrun of another node to join, which may import torch from a slow disk."""
PATIENCE = {"come": 300.0, "silence": 30.0}
"""Seconds that nodes wait for one another: to join, and until a silent one counts as lost."""


class PlaceError(BenchError):
    """Options, or variables of SLURM, that make no place among the nodes."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of at least two nodes."""

    nodes: int
    node: int
    """Counted from 0; node 0 keeps the records."""
    host: str
    """Name or address of node 0."""
    port: int

    def called(self, node: int) -> str:
        """Return the name of any of the nodes for a message."""
        return f"node {node} of {self.nodes}"

    @property
    def endpoint(self) -> str:
        """HOST:PORT, as in --rdzv."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One node's part of a rung on several nodes, for torchrun."""

    nodes: int
    node: int | str
    host: str
    port: int | str
    interface: str | None = None
    """Network interface for gloo."""

    def arguments(self, world_size: int) -> list[str]:
        """Return the arguments of torchrun in place of --standalone; they put rank 0 on node 0."""
        return [
            *("--nnodes", str(self.nodes), "--node-rank", str(self.node)),
            *("--nproc-per-node", str(world_size // self.nodes)),
            *("--master-addr", self.host, "--master-port", str(self.port)),
            *("--rdzv-conf", f"timeout={JOIN_SECONDS}"),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the processes need and the user has not set."""
        # By default gloo takes the address of the host's name, which often is a loopback address.
        if self.interface is None or os.environ.get("GLOO_SOCKET_IFNAME"):
            return {}
        return {"GLOO_SOCKET_IFNAME": self.interface}


def nodes_for(toggles: Toggles, nodes: int, devices: int | None) -> int:
    """Return how many of `nodes` a rung takes, with equally many ranks on each. Raises UnsupportedToggle.

    devices: accelerators of each node. A rung on accelerators takes the fewest nodes that hold its ranks; one
    on CPUs the most that divide them.
    """
    ranks = toggles.processes
    even = [count for count in range(1, nodes + 1) if ranks % count == 0]
    if toggles.device == HOST or devices is None:
        return even[-1]
    fits = [count for count in even if ranks // count <= devices]
    if fits:
        return fits[0]
    if ranks > nodes * devices:
        most = nodes * devices
        reason = f"more ranks than the {devices} devices on each of {nodes} nodes; choose at most {most}"
    else:
        reason = (
            f"does not divide evenly over nodes of {devices} devices each; choose a multiple of the nodes"
        )
    raise UnsupportedToggle("world_size", ranks, reason)


def place(
    nnodes: int | None, node_rank: int | None, rdzv: str | None, environ: Mapping[str, str] = os.environ
) -> Place | None:
    """Return this node's place; None if there is one node only. Raises PlaceError.

    Options that are None are read from SLURM's variables, within a step of srun.
    """
    step = environ if "SLURM_STEP_NUM_NODES" in environ else {}
    nodes = nnodes if nnodes is not None or not step else _number(step, "SLURM_STEP_NUM_NODES")
    if nodes is None:
        if node_rank is not None or rdzv is not None:
            raise PlaceError("--node-rank and --rdzv are for several nodes; give their number with --nnodes")
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
    else:  # a port that differs between jobs, below those that systems assign
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
    """Return a limit of PATIENCE, or of BENCH_NODE_COME_SECONDS or ..._SILENCE_.... Raises PlaceError."""
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
    """Return the host of node 0, the first of SLURM's list. Raises PlaceError."""
    nodes = step.get("SLURM_STEP_NODELIST") or step.get("SLURM_JOB_NODELIST", "")
    command = ["scontrol", "show", "hostnames", nodes]
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

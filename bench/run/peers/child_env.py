"""Environment variables and processors of an external rung's program. Imports no torch."""

from __future__ import annotations

import os

from bench.ladder.peers import Peer
from gpt2.config.toggles import HOST, Toggles
from gpt2.hardware.host import one_cpu_per_core
from gpt2.training.stages import environment, threads


def peer_variables(toggles: Toggles, peer: Peer, cache: str | None) -> dict[str, str]:
    """Return the variables a peer gets besides the user's. cache: its compiler's folder, or None."""
    plain = {"PYTHONUNBUFFERED": "1", "TERM": "dumb", "NO_COLOR": "1", **peer.variables}
    if peer.cache_variable:
        plain[peer.cache_variable] = cache or ""  # not the user's, which may be warm
    if toggles.device != HOST:  # one GPU; a trainer may take all that it sees
        plain["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**environment(toggles), **plain}


def processors(toggles: Toggles, peer: Peer) -> list[int] | None:
    """Return logical CPUs, one per thread of the rung, for a peer that ignores OMP_NUM_THREADS; else None."""
    if peer.heeds_threads or toggles.device != HOST or not hasattr(os, "sched_getaffinity"):
        return None
    usable, count = os.sched_getaffinity(0), threads(toggles)
    first = one_cpu_per_core()
    return [*first, *sorted(usable.difference(first))][:count] if count < len(usable) else None

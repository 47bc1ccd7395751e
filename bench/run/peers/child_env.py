"""What an external rung's program is given of the machine: as much as its rung says, in each program's own
terms.

Imports no torch.
"""

from __future__ import annotations

import os

from bench.ladder.peers import Peer
from gpt2.config.toggles import HOST, Toggles
from gpt2.hardware.host import one_cpu_per_core
from gpt2.training.stages import environment, threads


def variables(toggles: Toggles, peer: Peer, cache: str | None) -> dict[str, str]:
    """That a peer gets beside the user's. cache: the folder for its compiler; None: it keeps nothing."""
    plain = {"PYTHONUNBUFFERED": "1", "TERM": "dumb", "NO_COLOR": "1", **peer.variables}
    if peer.cache_variable:
        plain[peer.cache_variable] = cache or ""  # never the user's, who may have compiled the same before
    if toggles.device != HOST:  # one GPU, as a rung says; a trainer may take all that it sees
        plain["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**environment(toggles), **plain}


def processors(toggles: Toggles, peer: Peer) -> list[int] | None:
    """As many logical ones as the rung has threads, on a core each, where a peer counts no threads but
    processors.
    """
    if peer.heeds_threads or toggles.device != HOST or not hasattr(os, "sched_getaffinity"):
        return None
    usable, count = os.sched_getaffinity(0), threads(toggles)
    first = one_cpu_per_core()
    return [*first, *sorted(usable.difference(first))][:count] if count < len(usable) else None

"""Start this program again as its toggles need it: with their variables, and once per rank. Imports no torch."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version

from gpt2.stages import environment
from gpt2.toggles import Toggles


def enter_environment(toggles: Toggles, module: str) -> None:
    """Start this interpreter anew, as `python -m module`, where variables that must come before it are missing."""
    wanted = environment(toggles)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **wanted})


def enter_ranks(toggles: Toggles, module: str) -> None:
    """Become torchrun, which starts `python -m module` once per rank, where several are needed and none is started."""
    if toggles.processes == 1 or "WORLD_SIZE" in os.environ:
        return
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(toggles.processes)]
    # Until then it waits for ranks that are asked to end, and keep their state; older ones wait 30 seconds.
    if tuple(int(part) for part in version("torch").split(".")[:2]) >= (2, 13):
        torchrun += ["--shutdown-timeout", "3600"]
    # Its own notice of OMP_NUM_THREADS says nothing new: the ranks set it themselves.
    os.execve(
        sys.executable,
        [sys.executable, *torchrun, "-m", module, *sys.argv[1:]],
        {**os.environ, **environment(toggles)},
    )

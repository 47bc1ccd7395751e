"""Start this program again with the variables that its toggles need. Imports no torch."""

from __future__ import annotations

import os
import sys

from gpt2.stages import environment
from gpt2.toggles import Toggles


def enter_environment(toggles: Toggles, module: str) -> None:
    """Start this interpreter anew, as `python -m module`, where variables that must come before it are missing."""
    wanted = environment(toggles)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], {**os.environ, **wanted})

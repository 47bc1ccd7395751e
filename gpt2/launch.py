"""Start Python programs of this project, whatever surrounds them. Imports no torch.

subprocess.run([*python("bench.run.probe"), "cpu"], env={**os.environ, **own_variables()})
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpt2.stages import environment, threads, unheeded_threads
from gpt2.toggles import Toggles
from gpt2.validation import ConfigError

ROOT = Path(__file__).resolve().parent.parent
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""By which torchrun tells a process which rank it is."""


def python(module: str) -> list[str]:
    """Command that runs a module of ours: a bench.py or torch.py of the working directory is not taken for it."""
    return [sys.executable, "-P", "-m", module]


def own_variables() -> dict[str, str]:
    """Variables for processes that run this project's code, and for those that they start, as torchrun does.

    Not for other people's programs: these may need to import what lies beside them.
    """
    return {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8:backslashreplace", **own_path()}


def own_path() -> dict[str, str]:
    """PYTHONPATH by which a child finds this project where it is run from a checkout that is not installed."""
    if not sys.path or Path(sys.path[0] or ".").resolve() != ROOT:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, _others_paths())])}


def without_own_path() -> dict[str, str]:
    """This process's environment for other people's programs: without what own_path() may have added."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**environ, "PYTHONPATH": os.pathsep.join(others)} if (others := _others_paths()) else environ


def _others_paths() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [each for each in given.split(os.pathsep) if each != str(ROOT)] if given else []


def enter_environment(toggles: Toggles, module: str) -> None:
    """Start this interpreter anew, as `python -m module`, where variables that must come before it are missing."""
    wanted = environment(toggles)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        tell_unheeded_threads(toggles, module)
        os.execve(sys.executable, [*python(module), *sys.argv[1:]], {**os.environ, **own_variables(), **wanted})


def tell_unheeded_threads(toggles: Toggles, module: str) -> None:
    """Say where the user's OMP_NUM_THREADS asks for other threads than are taken."""
    if unheeded := unheeded_threads(toggles):
        taken = f"OMP_NUM_THREADS={unheeded} is not heeded, {threads(toggles)} threads are taken"
        print(f"{module.partition('.')[0]}: {taken}; set toggles.threads to choose", file=sys.stderr)


def check_rank_variables() -> None:
    """Forget variables of ranks that are set to nothing. Raises ConfigError where one is no number."""
    for name in RANK_VARIABLES:
        value = os.environ.get(name, "").strip()
        if not value:
            os.environ.pop(name, None)
        elif not value.isdecimal():
            raise ConfigError(f"the environment variable {name} is {value!r}, which is no number; unset it")

"""Start Python programs of this project with the environment that they need. Imports no torch.

subprocess.run([*python("bench.run.probe"), "cpu"], env={**os.environ, **own_variables()})
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpt2.config.toggles import Toggles
from gpt2.config.validation import ConfigError
from gpt2.training.stages import environment, threads, unheeded_threads

ROOT = Path(__file__).resolve().parents[2]
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
"""Environment variables with which torchrun tells a process its rank."""


def python(module: str) -> list[str]:
    """Return the command that runs a module of this project, never a file of the working directory."""
    return [sys.executable, "-P", "-m", module]


def own_variables() -> dict[str, str]:
    """Return environment variables for this project's processes and their children, such as torchrun's.

    They are not for other trainers, which may need to import files beside them.
    """
    return {"PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8:backslashreplace", **own_path()}


def own_path() -> dict[str, str]:
    """Return the PYTHONPATH by which a child finds a checkout that is not installed, else nothing."""
    if not sys.path or Path(sys.path[0] or ".").resolve() != ROOT:
        return {}
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, _others_paths())])}


def without_own_path() -> dict[str, str]:
    """Return this process's environment for other trainers, without what own_path() may have added."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**environ, "PYTHONPATH": os.pathsep.join(others)} if (others := _others_paths()) else environ


def _others_paths() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [each for each in given.split(os.pathsep) if each != str(ROOT)] if given else []


def enter_environment(toggles: Toggles, module: str) -> None:
    """Restart as `python -m module` where variables that must be set before start-up are missing."""
    wanted = environment(toggles)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        tell_unheeded_threads(toggles, module)
        variables = {**os.environ, **own_variables(), **wanted}
        os.execve(sys.executable, [*python(module), *sys.argv[1:]], variables)


def tell_unheeded_threads(toggles: Toggles, module: str) -> None:
    """Print a message where the user's OMP_NUM_THREADS differs from the number of threads used."""
    if unheeded := unheeded_threads(toggles):
        taken = f"OMP_NUM_THREADS={unheeded} is not heeded, {threads(toggles)} threads are taken"
        print(f"{module.partition('.')[0]}: {taken}; set toggles.threads to choose", file=sys.stderr)


def forget_ranks() -> None:
    """Unset rank variables, as left over by an earlier job: this process is none of several."""
    for name in RANK_VARIABLES:
        os.environ.pop(name, None)


def check_rank_variables() -> None:
    """Unset rank variables that are empty. Raises ConfigError where one is not a number."""
    for name in RANK_VARIABLES:
        value = os.environ.get(name, "").strip()
        if not value:
            os.environ.pop(name, None)
        elif not value.isdecimal():
            raise ConfigError(f"the environment variable {name} is {value!r}, which is no number; unset it")

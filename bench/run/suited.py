"""Which rungs of a ladder this machine can run, asked in a process of its own, for it imports torch.

Alone: python -m bench.run.suited cuda cpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.ladder.ladder import Ladder, LadderError, load
from bench.process.supervisor import how_it_ended, tail
from gpt2.config.toggles import HOST, XLA, UnsupportedToggle
from gpt2.training.reexec import own_variables, python


def suited(ladders: Sequence[Path]) -> Ladder:
    """Return the first of these ladders whose device is here, without the rungs that cannot run here.

    A number format in which this CPU multiplies no faster than in float32 counts as one of those. Raises
    BenchError where the question cannot be put.
    """
    command = [*python("bench.run.suited"), *map(str, ladders)]
    done = subprocess.run(
        command,
        env={**os.environ, **own_variables()},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode:
        last = "".join(tail(done.stderr)[-1:]) or how_it_ended(done.returncode)
        raise BenchError(f"this machine could not be asked what it supports: {last}")
    path, without = json.loads(done.stdout.splitlines()[-1])
    return load(Path(path)).carrying(without=without)


def main() -> None:
    """Print the path of the ladder and the names of its rungs that cannot run here, as JSON."""
    warnings.simplefilter("ignore")
    ladders = [load(Path(name)) for name in sys.argv[1:]]
    ladder = next((each for each in ladders if _has_device(each.own[-1].toggles.device)), ladders[-1])
    print(json.dumps([str(ladder.path), _not_suited(ladder)]))


def _has_device(name: str) -> bool:
    from gpt2.config.toggles import Toggles
    from gpt2.device import DEVICES, DeviceError

    try:
        device = DEVICES[name](Toggles(), 0)
    except (UnsupportedToggle, DeviceError):
        return False
    return name != XLA or "CPU" not in device.chip()  # torch_xla's CPU backend is for tests


def _not_suited(ladder: Ladder) -> list[str]:
    from bench.host.feasibility import check_time, fits, product_rate
    from gpt2.device import DeviceError, find

    without = [rung.name for rung in ladder.own if rung.again]
    chosen = "float32"
    for rung in ladder.first_tries[1:]:
        try:
            toggles = ladder.carrying(without=without, upto=rung.name).rung(rung.name).toggles
            device = find(toggles)
            check_time(ladder, toggles)
        except (UnsupportedToggle, DeviceError, LadderError):
            without.append(rung.name)
            continue
        other_format = toggles.autocast != chosen
        slower = toggles.device == HOST and product_rate(toggles.autocast) <= product_rate("float32")
        # Of several 16-bit formats the first that runs here is taken.
        if (other_format and (slower or chosen != "float32")) or not fits(ladder, toggles, device):
            without.append(rung.name)
        else:
            chosen = toggles.autocast
    return without


if __name__ == "__main__":
    main()

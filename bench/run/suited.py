"""What suits this machine: the rungs of a ladder that it can run, and the best toggles that are known for it.

The former is asked in a process of its own, for it imports torch. Alone: python -m bench.run.suited cuda cpu
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.analysis.select import load_boards
from bench.format import in_shell, listed, plain
from bench.ladder.ladder import Ladder, LadderError, beside, load
from bench.ladder.shipped import shipped
from bench.process.worker_side import leave_with_runner
from bench.records.machine import Environment
from bench.run.probe import answer, asked
from gpt2.config.toggles import HOST, XLA, Toggles, UnsupportedToggle
from gpt2.terminal import surroundings


def suited(ladders: Sequence[Path], overrides: Sequence[str] = ()) -> tuple[Ladder, list[str]]:
    """Return the first of these ladders whose device is here, without the rungs that cannot run here.

    overrides: with which they are loaded. With it, the names of those rungs, of which one is also a number
    format in which this CPU multiplies no faster than in float32. Raises BenchError where the question cannot
    be put.
    """
    failed = "this machine could not be asked what it supports"
    printed = asked("bench.run.suited", list(map(str, ladders)), overrides, failed=failed)
    path, without = json.loads(printed)
    ladder = load(Path(path), overrides)
    left_out = [rung.name for rung in ladder.first_tries if rung.name in without]
    return ladder.carrying(without=without), left_out


def supported(
    ladder: Ladder, overrides: Sequence[str], note: Callable[[str], None], named: Sequence[str] = ()
) -> Ladder:
    """Return a ladder that chooses its rungs by itself, without those that do not suit this machine.

    Any other ladder is returned as it is, and one whose device is not here. named: rungs that are asked for,
    which stay. note: is told which rungs are left out.
    """
    if ladder.protocol.carry == "always":
        return ladder
    here, left_out = suited([ladder.path], overrides)
    left_out = [name for name in left_out if name not in named]
    if not left_out or len(here.own) == 1:
        return ladder
    note(f"left out, as they do not suit this machine: {listed(left_out)}")
    return ladder.carrying(without=[*left_out, *(rung.name for rung in ladder.own if rung.again)])


# --- the best toggles that are known


def with_best(
    ladder: Ladder, overrides: Sequence[str], out: Path, machine: Environment
) -> tuple[Ladder, list[str]]:
    """Return the ladder with the best known toggles in its best_of rungs, and where these are from.

    overrides: with which it was loaded. out: folder of results. Raises BenchError.
    """
    own, notes = {rung.name: rung.settings for rung in ladder.own if rung.settings}, []
    for rung in ladder.own:
        if rung.best_of is None or rung.name in own:
            continue
        other = load(beside(rung.best_of, ladder.path))
        toggles, found = best_known(other, ladder.workload.model, out, machine)
        own[rung.name] = all_settings(ladder, toggles)
        notes.append(f"{plain(rung.name)}: {found}")
    if notes:
        ladder = load(ladder.path, overrides, own).carrying(without=ladder.own[0].without)
    return ladder, notes


def all_settings(ladder: Ladder, toggles: Toggles) -> tuple[str, ...]:
    """Return toggles as the overrides of a rung that starts from them; never empty."""
    return ladder.settings(Toggles(), toggles) or (f"toggles.device={toggles.device}",)


def best_known(ladder: Ladder, model: str, out: Path, machine: Environment) -> tuple[Toggles, str]:
    """Return the toggles of the fastest rung that this ladder's results have for this machine.

    Runs of some of its rungs only do not count: what they left out may be faster. Without results: those of
    its last rung, as far as this machine supports them. With it, words on where they are from.
    """
    folder = out / machine.machine
    boards, left_out = load_boards([folder], needed=False) if folder.is_dir() else ([], [])
    for board in sorted(boards, key=lambda board: board.begun, reverse=True):
        best, task = board.own.fastest, board.records[0].workload
        same = (board.ladder, task["model"], task["seq_len"]) == (ladder.name, model, ladder.workload.seq_len)
        whole = not board.interrupted and board.records[0].chosen is None
        if same and best and whole and board.environment.machine == machine.machine:
            return best.toggles, f"{plain(best.rung)}, the best of {ladder.name} here ({board.source})"
    top = suited([ladder.path])[0].top
    word = ladder.path.stem if ladder.path in shipped() else in_shell(ladder.path)
    why = f"{ladder.name} has no whole results here (bench run {word} makes some)"
    all_of_it = f"all of {ladder.name} that this machine supports, as {why}"
    return top.toggles, "; ".join([all_of_it, *left_out])  # a file that cannot be read may be why


# --- as a process


def main() -> None:
    """Print the path of the ladder and the names of its rungs that cannot run here, as JSON."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("ladders", type=Path, nargs="+")
    parser.add_argument("--set", action="append", default=[])
    arguments = parser.parse_args()
    ladders = [load(path, arguments.set) for path in arguments.ladders]
    ladder = next((each for each in ladders if _has_device(each.own[-1].toggles.device)), ladders[-1])
    answer(json.dumps([str(ladder.path), _not_suited(ladder)]))


def _has_device(name: str) -> bool:
    from bench.host.feasibility import devices_here

    device = devices_here([name])[0].get(name)
    # torch_xla's CPU backend is for tests.
    return device is not None and (name != XLA or "CPU" not in device.chip())


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
    leave_with_runner()
    with surroundings("torch"):
        main()

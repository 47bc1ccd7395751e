"""`bench ladders`: the ladders that come with gpt2-bench, what each needs, and whether it can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.cli.terminal import print_table
from bench.errors import BenchError

if TYPE_CHECKING:
    from bench.ladder.ladder import Ladder
    from gpt2.device import Device

KINDS = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU", "xpu": "Intel GPU", "xla": "torch_xla"}
"""What a reader calls each kind of device."""


def ladders() -> None:
    """List the ladders that come with gpt2-bench, those that can run here first.

    Each is run by its name: bench run cpu. Here: whether this machine has the devices; bench plan says
    whether the memory suffices, too.

    Example: bench ladders
    """
    from bench.host.feasibility import devices_here
    from bench.ladder.ladder import load
    from bench.ladder.shipped import shipped, shows
    from bench.report.table import Column, Table

    loaded = [load(path) for path in shipped()]
    if not loaded:
        raise BenchError("no ladders came with this installation; give a file: bench run FILE")
    devices, _ = devices_here(rung.toggles.device for ladder in loaded for rung in ladder.own)
    answers = {ladder.path: _here(ladder, devices) for ladder in loaded}
    rows = sorted(loaded, key=lambda ladder: answers[ladder.path] != "yes")
    columns: list[Column[Ladder]] = [
        Column("Name", lambda ladder: ladder.path.stem, words=True),
        Column("Needs", _needs, words=True),
        Column("Here", lambda ladder: answers[ladder.path], words=True),
        Column("Shows", lambda ladder: shows(ladder.path), words=True),
    ]
    can = [ladder.path.stem for ladder in rows if answers[ladder.path] == "yes"]
    first = [f"This machine has the devices for: {', '.join(can) or 'none'}. Begin with: bench quick"]
    print_table(Table(title=f"{len(rows)} ladders", columns=columns, rows=rows, first=first))


def _kinds(ladder: Ladder) -> list[str]:
    return list(dict.fromkeys(rung.toggles.device for rung in ladder.own))


def _most(ladder: Ladder) -> int:
    """Most devices that a rung of it takes, or processes on a CPU."""
    return max(rung.toggles.world_size for rung in ladder.own)


def _needs(ladder: Ladder) -> str:
    kinds = [KINDS[kind] for kind in _kinds(ladder)]
    if ladder.chip:
        kinds = [ladder.chip.name]
    most = _most(ladder)
    return f"{most} x {kinds[0]}" if most > 1 and kinds != ["CPU"] else ", ".join(kinds)


def _here(ladder: Ladder, devices: dict[str, Device]) -> str:
    kinds = _kinds(ladder)
    missing = [kind for kind in kinds if kind not in devices]
    if len(missing) == len(kinds):
        return "no"
    if missing:
        return "in part"
    device = devices[kinds[-1]]
    if kinds[-1] != "cpu" and device.count() < _most(ladder):
        return f"no, {device.count()} of {_most(ladder)}"
    return (
        "yes" if not ladder.written_for_another(device.chip()) else f"for another chip than {device.chip()}"
    )

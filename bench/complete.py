"""What a shell offers when a user presses Tab. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer


def ladders(incomplete: str) -> list[str]:
    """YAML files, and folders on the way to them."""
    found = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    return [f"{each}/" if Path(each).is_dir() else each for each in found if Path(each).is_dir() or _is_ladder(each)]


def _is_ladder(path: str) -> bool:
    return path.endswith((".yaml", ".yml"))


def rungs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the ladder that stands before; of several, the last one."""
    from bench.ladder import LadderError, load

    # Where an option's value is still missing, arguments are left over instead of assigned.
    named = next((word for word in ctx.args if _is_ladder(word)), ctx.params.get("ladder"))
    try:
        ladder = load(Path(str(named)))
    except LadderError:
        return []
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{rung.name}" for rung in ladder.rungs if rung.name.startswith(last)]


def overrides(incomplete: str) -> list[str]:
    """Of --set: workload.X=, protocol.X= and toggles.X=, and the values that a toggle knows by name."""
    from bench.ladder import Protocol
    from gpt2.toggles import Toggles
    from gpt2.workload import Workload

    sections = {"workload": Workload, "protocol": Protocol, "toggles": Toggles}
    return [each for name, kind in sections.items() for each in _paths(name, kind) if each.startswith(incomplete)]


def axes(incomplete: str) -> list[str]:
    """Of --over."""
    return [each for each in overrides(incomplete) if not each.startswith("protocol.")]


def _paths(section: str, kind: Any) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{section}.{field.name}="
        for value in get_args(hints[field.name]):
            if isinstance(value, str):
                yield f"{section}.{field.name}={value}"

"""Shell completion of arguments and options. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer


def ladders(incomplete: str) -> list[str]:
    """Complete YAML files, and folders on the way to them."""
    return _files(incomplete, (".yaml", ".yml"))


def _files(incomplete: str, endings: tuple[str, ...]) -> list[str]:
    paths = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    folders = {path for path in paths if Path(path).is_dir()}
    return [
        f"{path}/" if path in folders else path for path in paths if path in folders or path.endswith(endings)
    ]


def rungs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the last of the rungs' names, of the ladder given before them."""
    # While an option's value is missing, arguments are in ctx.args instead of ctx.params.
    named = next((word for word in ctx.args if word.endswith((".yaml", ".yml"))), ctx.params.get("ladder"))
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _rungs_of(str(named)) if name.startswith(last)]


def _rungs_of(path: str) -> list[str]:
    from bench.ladder.ladder import LadderError, load

    try:
        return [rung.name for rung in load(Path(path)).rungs]
    except LadderError:
        return []


def ladders_and_rungs(incomplete: str) -> list[str]:
    """Complete LADDER:RUNG."""
    path, colon, start = incomplete.partition(":")
    if not colon:
        return ladders(incomplete)
    return [f"{path}:{name}" for name in _rungs_of(path) if name.startswith(start)]


def results_and_rungs(incomplete: str) -> list[str]:
    """Complete FILE:RUNG."""
    from bench.records.record import RUNGS, RecordError, read

    path, colon, start = incomplete.partition(":")
    if not colon:
        return _files(incomplete, (".jsonl",))
    try:
        names = dict.fromkeys(record.rung for record in read(Path(path))[0] if record.kind in RUNGS)
    except RecordError:
        return []
    return [f"{path}:{name}" for name in names if name.startswith(start)]


def chips(incomplete: str) -> list[str]:
    """Complete the name of a chip."""
    from gpt2.hardware.peaks import CHIPS

    return [chip.name for chip in CHIPS if chip.name.startswith(incomplete)]


def overrides(incomplete: str) -> list[str]:
    """Complete --set: workload.X=, protocol.X= and toggles.X=, and named values of toggles."""
    from bench.ladder.ladder import Protocol
    from gpt2.config.toggles import Toggles
    from gpt2.config.workload import Workload

    sections = {"workload": Workload, "protocol": Protocol, "toggles": Toggles}
    paths = [path for name, kind in sections.items() for path in _paths(name, kind)]
    return [path for path in paths if path.startswith(incomplete)]


def axes(incomplete: str) -> list[str]:
    """Complete --over, one value after the other."""
    path, equals, listed = incomplete.partition("=")
    before, comma, last = listed.rpartition(",")
    start = f"{path}{equals}"
    paths = [p for p in overrides(start if comma else incomplete) if not p.startswith("protocol.")]
    if not comma:
        return paths
    values = [path.removeprefix(start) for path in paths]
    left = [value for value in values if value and value.startswith(last) and value not in before.split(",")]
    return [f"{start}{before},{value}" for value in left]


def _paths(section: str, kind: Any) -> Iterator[str]:
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield f"{section}.{field.name}="
        for value in get_args(hints[field.name]):
            if isinstance(value, str):
                yield f"{section}.{field.name}={value}"

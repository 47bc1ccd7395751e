"""What `bench turns` found of other trainers beside ours, read from its files."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench.records.machine import Environment
from bench.records.record import results_files
from bench.stats import Estimate, Verdict

OPPOSITE: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Another trainer that took turns with a rung of ours."""

    source: Path
    """The file of the run of bench turns."""
    ladder: str
    task: tuple[str, int] | None
    """Model and length of sequences; None in files of earlier versions."""
    environment: Environment
    time: str
    """When the run began, in UTC, as ISO 8601."""
    trainer: str
    """Its rung's name."""
    version: str
    ours: str
    """Our rung's name."""
    tokens_per_second: Estimate
    ours_tokens_per_second: Estimate
    """Of our rung in the turns with this trainer."""
    ratio: Estimate
    """Speed of ours over the trainer's, over the starts."""
    verdict: Verdict | None
    """Verdict on the ratio."""
    noise_floor: float | None


def load_turns(paths: Sequence[Path]) -> tuple[list[Turns], list[str]]:
    """Read what other trainers did beside ours, from the files of bench turns below folders.

    Returns, for each machine, ladder, task, rung of ours and trainer, the newest result, the machines
    sorted and the fastest trainer first; and warnings about files that cannot be read. Files named
    themselves are not of bench turns: they hold records of rungs.
    """
    newest: dict[Hashable, Turns] = {}
    warnings: list[str] = []
    folders = [path for path in paths if path.is_dir()]
    files = [file for folder in folders for file in results_files(folder, "turns-", ending=".json")]
    for file in dict.fromkeys(files):
        try:
            found = list(_read(file))
        except (OSError, ValueError) as error:  # of json and pydantic, too
            warnings.append(f"{file}: is no file of bench turns ({_problem(error)}); left out")
            continue
        for each in found:
            name = (each.environment.machine, each.ladder, each.task, each.ours, each.trainer)
            if name not in newest or newest[name].time < each.time:
                newest[name] = each
    return sorted(newest.values(), key=lambda each: (each.environment.machine, each.ratio.value)), warnings


@dataclass(frozen=True, kw_only=True)
class _Pair:
    rung: str
    over: str
    tokens_per_second: Estimate
    over_tokens_per_second: Estimate
    ratio: Estimate
    verdict: Verdict | None = None
    starts: list[Any] | None = None
    """None in files of earlier versions, whose intervals are over turns, not over starts."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    pairs: list[_Pair]
    noise_floor: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """By the names of the rungs of others."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    model: str
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class _File:
    ladder: str
    time: str
    environment: Environment
    groups: list[_Group]
    workload: _Task | None = None


_FILE = TypeAdapter[_File](_File)


def _read(file: Path) -> list[Turns]:
    content = _FILE.validate_python(json.loads(file.read_bytes()))
    workload = content.workload
    return [
        Turns(
            source=file,
            ladder=content.ladder,
            task=(workload.model, workload.seq_len) if workload else None,
            environment=content.environment,
            time=content.time,
            trainer=pair.rung,
            version=group.versions[pair.rung],
            ours=pair.over,
            tokens_per_second=pair.tokens_per_second,
            ours_tokens_per_second=pair.over_tokens_per_second,
            ratio=pair.ratio.inverse(),
            verdict=_of_ours(pair),
            noise_floor=group.noise_floor,
        )
        for group in content.groups
        for pair in group.pairs
        if pair.rung in group.versions and pair.over not in group.versions
    ]


def _of_ours(pair: _Pair) -> Verdict | None:
    """The verdict on the ratio of ours over the trainer."""
    if pair.starts is None:
        return "not replicated"
    return OPPOSITE.get(pair.verdict, pair.verdict) if pair.verdict else None


def _problem(error: Any) -> str:
    """What is wrong with a file, in a few words."""
    if not isinstance(error, ValidationError):
        return getattr(error, "strerror", None) or str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"

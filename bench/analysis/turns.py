"""What `bench turns` found of other trainers beside ours, read from its files."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, TypeAdapter, ValidationError

from bench.records.machine import Amount, AtLeastOne, Environment, Rate
from bench.records.record import results_files
from bench.stats import LEAST_ROUNDS, Estimate, Verdict


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Another trainer that took turns with a rung of ours."""

    source: Path
    """The file of the run of bench turns."""
    ladder: str
    task: tuple[str, int] | None
    """Model and length of sequences; None in files of earlier versions."""
    environment: Environment
    time: datetime
    """When the run began."""
    trainer: str
    """Its rung's name."""
    version: str
    ours: str
    """Our rung's name."""
    starts: int | None
    """How often the processes were started; None in files of earlier versions, which do not tell."""
    tokens_per_second: Estimate
    ours_tokens_per_second: Estimate
    """Of our rung in the turns with this trainer."""
    ratio: Estimate
    """Speed of ours over the trainer's. Without an interval where it is not replicated."""
    verdict: Verdict
    """Verdict on the ratio."""
    noise_floor: float | None

    @property
    def replicated(self) -> bool:
        """Whether there are starts enough for an interval that holds for other processes, too."""
        return _replicated(self.starts)


def _replicated(starts: int | None) -> bool:
    return starts is not None and starts >= LEAST_ROUNDS


def load_turns(paths: Sequence[Path]) -> tuple[list[Turns], list[str]]:
    """Read what other trainers did beside ours, from the files of bench turns below folders.

    Returns one result for each folder, machine, ladder, task, rung of ours and trainer: the newest of those
    that are replicated, else the newest; sorted by these, the fastest trainer first. And warnings about files
    that cannot be read. Files named themselves are not of bench turns: they hold records of rungs.
    """
    chosen: dict[Hashable, Turns] = {}
    warnings: list[str] = []
    folders = [path for path in paths if path.is_dir()]
    files = [file for folder in folders for file in results_files(folder, "turns-", ending=".json")]
    for file in dict.fromkeys(files):
        try:
            found = list(_read(file))
        except OSError as error:
            warnings.append(f"{file}: {error.strerror}; left out")
        except ValueError as error:
            warnings.append(f"{file}: {_problem(file, error)}; left out")
        else:
            for each in found:
                before = chosen.get(_name(each))
                if before is None or (before.replicated, before.time) < (each.replicated, each.time):
                    chosen[_name(each)] = each
    told = [each for each in chosen.values() if each.task]  # what an earlier file trained may be known by now
    for name, each in list(chosen.items()):
        again = [other for other in told if _name(replace(other, task=None)) == name]
        if any(other.time > each.time for other in again):
            del chosen[name]
    in_order = sorted(chosen.values(), key=lambda each: (*map(str, _name(each)[:-1]), each.ratio.value))
    return in_order, warnings


def _name(of: Turns) -> tuple[Any, ...]:
    """What a result is of, the trainer last."""
    return (of.source.parent, of.environment.machine, of.ladder, of.task, of.ours, of.trainer)


# --- the file, as bench.run.turns.results writes it


@dataclass(frozen=True, kw_only=True)
class _Figure:
    value: Rate
    low: Rate | None
    high: Rate | None
    rounds: AtLeastOne

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends")
        if self.low is not None and self.high is not None and not self.low <= self.value <= self.high:
            raise ValueError("the interval does not hold its value")


@dataclass(frozen=True, kw_only=True)
class _Pair:
    rung: str
    over: str
    tokens_per_second: _Figure
    over_tokens_per_second: _Figure
    ratio: _Figure
    verdict: Verdict | None
    """None for the control."""
    starts: list[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Group:
    pairs: list[_Pair]
    noise_floor: Amount | None = None
    versions: dict[str, str] = field(default_factory=dict)
    """By the names of the rungs of others."""


@dataclass(frozen=True, kw_only=True)
class _Task:
    model: str
    seq_len: AtLeastOne


@dataclass(frozen=True, kw_only=True)
class _File:
    ladder: str
    time: Annotated[AwareDatetime, Field(strict=False)]
    environment: Environment
    groups: list[_Group]
    workload: _Task | None = None


_FILE = TypeAdapter[_File](_File)
OPPOSITE: dict[Verdict, Verdict] = {"faster": "slower", "slower": "faster"}


def _read(file: Path) -> Iterator[Turns]:
    content = _FILE.validate_json(file.read_bytes(), strict=True)
    for group in content.groups:
        for pair in group.pairs:
            others = pair.rung in group.versions, pair.over in group.versions
            if pair.verdict is not None and others in ((True, False), (False, True)):
                yield _turns(file, content, group, pair, is_over=others[1])


def _turns(file: Path, content: _File, group: _Group, pair: _Pair, *, is_over: bool) -> Turns:
    """is_over: whether the other trainer is the one that our rung is compared with."""
    starts = None if pair.starts is None else len(pair.starts)
    few = not _replicated(starts)  # intervals would hold for those very processes alone

    def estimate(figure: _Figure) -> Estimate:
        low, high = (None, None) if few else (figure.low, figure.high)
        return Estimate(figure.value, low, high, figure.rounds)

    of_rung, of_over = estimate(pair.tokens_per_second), estimate(pair.over_tokens_per_second)
    ratio, verdict = estimate(pair.ratio), pair.verdict
    assert verdict is not None
    trainer, ours = (pair.over, pair.rung) if is_over else (pair.rung, pair.over)
    return Turns(
        source=file,
        ladder=content.ladder,
        task=(content.workload.model, content.workload.seq_len) if content.workload else None,
        environment=content.environment,
        time=content.time,
        trainer=trainer,
        version=group.versions[trainer],
        ours=ours,
        starts=starts,
        tokens_per_second=of_over if is_over else of_rung,
        ours_tokens_per_second=of_rung if is_over else of_over,
        ratio=ratio if is_over else ratio.inverse(),
        verdict="not replicated" if few else verdict if is_over else OPPOSITE.get(verdict, verdict),
        noise_floor=None if few else group.noise_floor,
    )


def _problem(file: Path, error: ValueError) -> str:
    """What is wrong with a file, in a few words."""
    if not isinstance(error, ValidationError):
        return str(error)
    if not file.stat().st_size:
        return "is empty: bench turns has not ended a round, or was ended before"
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return f"is no file of bench turns ({f'{where}: ' if where else ''}{first['msg']})"

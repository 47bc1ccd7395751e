"""A ladder file, read and resolved: YAML in, rungs with all their toggles out. Imports no torch.

ladder = load(Path("ladders/smoke.yaml"), ["workload.seed=7"])
ladder.rungs[2].toggles
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from bench.ladder.peers import PEERS, PeerRung
from bench.ladder.validation import LadderError, near, near_file, validate
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles, describe, resolve
from gpt2.config.workload import STRICT, Workload
from gpt2.hardware import peaks

LEAST_BLOCKS = 5
"""Of a window: fewer raw samples would show nothing of how evenly the machine ran."""
MOST_FILE_NAME = 160
"""Bytes of a file's name that are a ladder's."""
LONGEST_NAME = 100
"""Characters of a ladder's or a rung's: tables hold it in one column."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How long, and how often, each rung is run."""

    __pydantic_config__: ClassVar = STRICT

    repeats: int = 3
    """Rounds over all rungs; each rung gets one fresh process per round."""
    until: float | None = None
    """Instead of `repeats`: rounds until the interval of every speed-up is this narrow (0.02: +-2 %)."""
    min_warmup_steps: int = 3
    """Fewest untimed optimiser steps before the clock starts; warm-up goes on while anything compiles."""
    min_warmup_seconds: float = 0.0
    """Fewest seconds of untimed steps after the first: clocks of a GPU that idled while code was compiled
    settle in about ten.
    """
    block_seconds: float = 1.0
    """About how long a block is; the device is waited for at block ends only."""
    blocks: int = 10
    """Blocks in the timed window, at least 5."""
    max_window_seconds: float = 90.0
    """The window has fewer blocks, but at least 5, where it would last longer than this."""
    timeout_seconds: float = 900.0
    """Wall-clock limit of one process; beyond it the rung is recorded as a timeout."""
    loss_steps: int = 0
    """Losses wanted: in the first round a rung runs on untimed after the window until it has this many."""
    ceiling_seconds: float = 0.3
    """How long each matrix product of the measured ceiling is timed; 0 leaves the ceiling out."""

    def __post_init__(self) -> None:
        for name, least in {
            "repeats": 1,
            "min_warmup_steps": 1,
            "blocks": LEAST_BLOCKS,
            "loss_steps": 0,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} is less than {least}")
        for name in ("block_seconds", "max_window_seconds", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0")
        for name in ("ceiling_seconds", "min_warmup_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is less than 0")
        if self.until is not None and not 0.001 <= self.until <= 1:
            raise ValueError(f"until {self.until:g} is outside 0.001 to 1, that is 0.1 % to 100 %")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One line of the scoreboard: everything set above it, and its own changes."""

    name: str
    index: int
    changed: list[str]
    """What differs from the rung before, as a reader sees it."""
    expect: Literal["inert", "out_of_memory"] | None
    """An outcome that is the point of the rung, not a failure."""
    toggles: Toggles
    """Resolved: all toggles, with grad_accum_steps derived where the workload fixes the tokens per step."""
    base: str | None = None
    """Of a sweep's candidate: the ladder's rung that it is but for its settings."""
    settings: tuple[str, ...] = ()
    """What the candidate changes of that, as overrides."""
    external: PeerRung | None = None
    """Another trainer in place of ours; of its toggles only device, threads and allocator say something of
    it.
    """


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What to compute, how long to measure it, and the rungs in order."""

    path: Path
    name: str
    workload: Workload
    protocol: Protocol
    rungs: tuple[Rung, ...]
    chip: peaks.Chip | None = None
    """What its batches were chosen for; nothing that is measured depends on it."""

    @property
    def hash(self) -> str:
        """sha256 of the workload and of every rung's toggles; not of the protocol, so that rounds can be
        added.
        """
        content = {"workload": asdict(self.workload), "rungs": [_hashed(rung) for rung in self.rungs]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """Its name as the beginning of a results file's, which a file system may hold to 255 bytes in all."""
        return re.sub(r"[^\w.-]+", "-", self.name).encode()[:MOST_FILE_NAME].decode(errors="ignore")

    def written_for_another(self, chip: str) -> str | None:
        """What to tell a reader where the chip found here, by the name it gives itself, is not the ladder's."""
        if self.chip is None or self.chip == peaks.lookup(chip):
            return None
        return f"{self.path} is written for {self.chip.name}, and this is {chip}: its batches may not suit it"

    @property
    def own(self) -> tuple[Rung, ...]:
        """Without external rungs."""
        return tuple(rung for rung in self.rungs if not rung.external)

    def chosen(self, names: Sequence[str]) -> list[Rung]:
        """The rungs of these names, in the ladder's order; all of them if no name is given. Raises
        LadderError.
        """
        wanted = {self.rung(name).index for name in names}
        found = [rung for rung in self.rungs if rung.index in wanted or not names]
        if found[0].external:
            raise LadderError(
                f"--rungs: {found[0].name!r} is external, and the first rung is what all are held to: name "
                f"one of {self.path}'s own too, such as {self.rungs[0].name!r}"
            )
        return found

    def rung(self, name: str) -> Rung:
        """The rung called `name`. Raises LadderError."""
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise LadderError(
            f"{self.path}: no rung is called {name!r}{near(name, [r.name for r in self.rungs])}"
        )


# --- the file as written
# ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _RungFile:
    __pydantic_config__: ClassVar = STRICT
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    expect: Literal["inert", "out_of_memory"] | None = None
    external: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _LadderFile:
    __pydantic_config__: ClassVar = STRICT
    name: str
    rungs: list[dict[str, Any]]
    chip: str | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)


def load(path: Path, overrides: Iterable[str] = (), own: Mapping[str, Iterable[str]] | None = None) -> Ladder:
    """Read a ladder and resolve its rungs.

    overrides: "workload.x=value", "protocol.x=value" or "toggles.x=value" (for every rung, after its own
    changes), with YAML values. own: by a rung's name, "toggles.x=value" for that rung alone, after all
    others. Raises LadderError, whose one line names file, rung and key.
    """
    file = validate(_LadderFile, _read_yaml(path), f"{path}")
    if not 1 <= len(file.name.strip()) <= LONGEST_NAME:
        what = f"some text of at most {LONGEST_NAME} characters"
        raise LadderError(f"{path}: name is {what}; results files are called by it")
    try:
        chip = None if file.chip is None else peaks.named(file.chip)
    except ValueError as error:
        raise LadderError(f"{path}: chip: {error}") from None
    extra = _parsed(overrides)
    where = "--set" if any(extra.values()) else str(path)
    workload = validate(Workload, {**file.workload, **extra["workload"]}, f"{path}: workload")
    protocol = validate(Protocol, {**file.protocol, **extra["protocol"]}, f"{path}: protocol")
    validate(Toggles, extra["toggles"], where, "toggle")
    if not file.rungs:
        raise LadderError(f"{path}: rungs is empty; give at least one, such as {{name: baseline}}")

    rungs: list[Rung] = []
    toggles = Toggles()
    for index, raw in enumerate(file.rungs):
        where = f"{path}: rung {raw.get('name', index + 1)!r}"
        rung = validate(_RungFile, raw, where)
        if not rung.name.strip() or "," in rung.name or len(rung.name) > LONGEST_NAME:
            what = f"some text of at most {LONGEST_NAME} characters, without a comma"
            raise LadderError(f"{where}: a rung's name is {what}")
        if rung.name in [r.name for r in rungs]:
            raise LadderError(f"{where}: name is used twice; every rung needs its own")
        if rung.external is not None:
            rungs.append(_external(rung, workload, rungs, where))
            continue
        validate(Toggles, rung.set, where, "toggle")
        try:
            toggles = replace(toggles, **rung.set)
            changes = {**extra["toggles"], **_parsed((own or {}).get(rung.name, ()))["toggles"]}
            resolved = _resolve(workload, replace(toggles, **changes))
        except ValueError as error:
            raise LadderError(f"{where}: {error}") from None
        before = next((each.toggles for each in reversed(rungs) if not each.external), None)
        changed = describe(resolved, before, workload)
        rungs.append(Rung(name=rung.name, index=index, changed=changed, expect=rung.expect, toggles=resolved))
    return Ladder(
        path=path, name=file.name, workload=workload, protocol=protocol, rungs=tuple(rungs), chip=chip
    )


def _resolve(workload: Workload, toggles: Toggles) -> Toggles:
    """As gpt2.config.toggles.resolve, which overwrites grad_accum_steps; here one that was given must agree."""
    resolved = resolve(workload, toggles)
    if toggles.grad_accum_steps not in (1, resolved.grad_accum_steps):
        raise ValueError(
            f"grad_accum_steps {toggles.grad_accum_steps} contradicts workload.tokens_per_step "
            f"{workload.tokens_per_step}, from which it follows to be {resolved.grad_accum_steps}; leave it "
            "out"
        )
    return resolved


def _external(rung: _RungFile, workload: Workload, above: Sequence[Rung], where: str) -> Rung:
    """Toggles pass it by: it has the device and the threads of the rungs above it, and an allocator of its
    own.
    """
    external = validate(PeerRung, rung.external, f"{where}: external")
    if rung.set or rung.expect:
        key = "set" if rung.set else "expect"
        raise LadderError(f"{where}: an external rung has no {key!r}; what it computes, its command says")
    for key in ("model", "seq_len"):  # of which the record has the ladder's parameters and FLOPs
        theirs, ours = getattr(external, key), getattr(workload, key)
        if theirs != ours:
            raise LadderError(
                f"{where}: external: its command trains {key} {theirs}, and workload.{key} is {ours}; change "
                "its command with it, or leave this rung out of the ladder"
            )
    if not above:
        raise LadderError(
            f"{where}: the first rung is what all are held to; put one of ours, without external, first"
        )
    before = next(each for each in reversed(above) if not each.external)
    device, threads = before.toggles.device, before.toggles.threads
    toggles = Toggles(device=device, threads=threads, allocator=external.allocator)
    changed = [f"external: {PEERS[external.peer].title}"]
    return Rung(
        name=rung.name, index=len(above), changed=changed, expect=None, toggles=toggles, external=external
    )


def _hashed(rung: Rung) -> list[Any]:
    """What a rung is; of an external one not where its folder lies."""
    told = [rung.name, asdict(rung.toggles)]
    external = rung.external
    return [*told, [external.peer, external.tokens_per_step, external.command]] if external else told


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return yaml_files.mapping(path, "a ladder has the keys name, workload, protocol and rungs")
    except OSError as error:
        raise LadderError(f"{path}: {error.strerror or error}{near_file(path)}") from None


def _parsed(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """By section and key."""
    extra: dict[str, dict[str, Any]] = {"workload": {}, "protocol": {}, "toggles": {}}
    for override in overrides:
        section, key, value = _parse_override(override)
        extra[section][key] = value
    return extra


def _parse_override(override: str) -> tuple[str, str, Any]:
    path, equals, value = override.partition("=")
    section, dot, key = path.partition(".")
    if not (equals and dot and key and section in ("workload", "protocol", "toggles")):
        raise LadderError(
            f"--set {override}: write workload.KEY=VALUE, protocol.KEY=VALUE or toggles.KEY=VALUE"
        )
    return section, key, yaml_files.value(value, f"--set {override}")

"""Read a ladder file and resolve the toggles of its rungs. Imports no torch.

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
from bench.ladder.shipped import find
from bench.ladder.validation import LadderError, near, near_file, validate, yaml_mapping, yaml_value
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles, describe, resolve
from gpt2.config.workload import STRICT, Workload
from gpt2.hardware import peaks

LEAST_BLOCKS = 5
"""Blocks that a window has however long they take, unless the ladder asks for fewer."""
FEWEST_BLOCKS = 3
"""The fewest that can be asked for: of fewer, none that was disturbed would stand out."""
MOST_FILE_NAME = 160
"""Most bytes of the ladder's name in a file name."""
LONGEST_NAME = 100
"""Most characters of a ladder's or a rung's name, which is one column of a table."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How long and how often each rung is run."""

    __pydantic_config__: ClassVar = STRICT

    repeats: int = 3
    """Number of rounds over all rungs; each rung has one new process per round."""
    until: float | None = None
    """In place of `repeats`: run rounds until every speed-up's interval is this narrow (0.02: +-2 %)."""
    min_warmup_steps: int = 3
    """Fewest untimed optimiser steps before the window; warm-up goes on while anything compiles."""
    min_warmup_seconds: float = 0.0
    """Fewest seconds of untimed steps; a GPU's clocks settle about ten seconds after compilation."""
    block_seconds: float = 1.0
    """Approximate length of a block; the device is synchronised at block ends only."""
    blocks: int = 10
    """Number of blocks in the timed window, at least FEWEST_BLOCKS."""
    max_window_seconds: float = 90.0
    """Limit of the window, which then has fewer blocks, but at least 5 (or `blocks`, if that is less)."""
    timeout_seconds: float = 900.0
    """Wall-clock limit of one process; beyond it the rung is recorded as a timeout."""
    loss_steps: int = 0
    """Number of losses: in the first round a rung trains on untimed until it has these."""
    ceiling_seconds: float = 0.3
    """Time for each matmul of the measured ceiling; 0 leaves the ceiling out."""
    control: Literal["first_and_last", "last"] = "first_and_last"
    """Rungs that run again in each round, by which the noise is known.

    The last alone is for where time is short: it finds what its rung compiled, and the ceiling is measured
    once, not at the end again.
    """
    carry: Literal["always", "if_faster"] = "always"
    """Whether a rung keeps the changes of all rungs above it, or of those that made this machine faster.

    With if_faster each rung is first tried in a short window; see bench.run.rounds.
    """

    def __post_init__(self) -> None:
        not_negative = dict.fromkeys(("min_warmup_seconds", "loss_steps", "ceiling_seconds"), 0)
        for name, least in {
            "repeats": 1,
            "min_warmup_steps": 1,
            "blocks": FEWEST_BLOCKS,
            **not_negative,
        }.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} {getattr(self, name)} is less than {least}")
        for name in ("block_seconds", "max_window_seconds", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0")
        if self.until is not None and not 0.001 <= self.until <= 1:
            raise ValueError(f"until {self.until:g} is outside 0.001 to 1, that is 0.1 % to 100 %")

    @property
    def short_of_time(self) -> bool:
        """Whether what each process should do alike is done once: compiling, choosing, proving."""
        return self.carry == "if_faster" or self.control == "last"

    def of_windows(self) -> dict[str, Any]:
        """Return all but the number of rounds and the time limit, which affect no window."""
        free = ("repeats", "until", "timeout_seconds")
        return {name: value for name, value in asdict(self).items() if name not in free}

    @property
    def least_blocks(self) -> int:
        """Blocks that a window has however long they take."""
        return min(LEAST_BLOCKS, self.blocks)

    @property
    def short(self) -> Protocol:
        """The protocol of a process that only tries a rung."""
        return replace(
            self,
            min_warmup_steps=min(self.min_warmup_steps, 2),
            min_warmup_seconds=min(self.min_warmup_seconds, 2.0),
            block_seconds=min(self.block_seconds, 0.5),
            blocks=LEAST_BLOCKS,  # even if the rounds' windows have fewer: a rung is tried once only
            loss_steps=0,
        )


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One row of the scoreboard: the toggles of the rungs before it, and its own changes."""

    name: str
    index: int
    changed: list[str]
    """Differences from the rung before, as shown to a reader."""
    expect: Literal["inert", "out_of_memory"] | None
    """An outcome that the ladder expects, which is no failure."""
    toggles: Toggles
    """All toggles; grad_accum_steps is derived where the workload fixes the tokens per step."""
    base: str | None = None
    """Name of the ladder's rung that a sweep's candidate varies; None for others."""
    settings: tuple[str, ...] = ()
    """Changes for this rung alone, as overrides: of a sweep's candidate from its base, or of a best_of."""
    best_of: str | None = None
    """Ladder whose best toggles on this machine it starts from, below its own changes; None for others."""
    external: PeerRung | None = None
    """Another trainer in place of ours, to which only device, threads and allocator of the toggles apply."""
    again: str | None = None
    """If set, this is the second attempt at that rung, appended at the end of the ladder."""
    without: tuple[str, ...] = ()
    """Names of the rungs above it whose changes it does not keep, because they were not carried."""

    def tokens_per_step(self, seq_len: int) -> int:
        """Return the tokens per optimiser step; of an external rung as the ladder declares them."""
        return self.external.tokens_per_step if self.external else self.toggles.tokens_per_step(seq_len)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What to compute, how long to measure it, and the rungs in order."""

    path: Path
    name: str
    workload: Workload
    protocol: Protocol
    rungs: tuple[Rung, ...]
    chip: peaks.Chip | None = None
    """Chip for which its batches were chosen; no measurement depends on it."""
    _file: _Parsed | None = field(default=None, repr=False, compare=False)

    def copy_in(self, folder: Path) -> Path:
        """Return a file with what its own held when it was loaded, for load(copy=...), written once.

        Raises OSError.
        """
        assert self._file is not None
        file = folder / "ladder.yaml"
        if not file.exists():
            file.write_text(yaml_files.dump(dict(self._file.content)), encoding="utf-8")
        return file

    @property
    def hash(self) -> str:
        """sha256 of the workload and of every rung's toggles; not of the protocol, so rounds can be added."""
        content = {"workload": asdict(self.workload), "rungs": [_hashed(rung) for rung in self.rungs]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """First part of a results file's name, of which 255 bytes are allowed, and which no dot hides."""
        name = re.sub(r"[^\w.-]+", "-", self.name)
        return re.sub(r"^\.+", "-", name).encode()[:MOST_FILE_NAME].decode(errors="ignore")

    def written_for_another(self, chip: str) -> str | None:
        """Return a note if `chip`, by its own name, is not the ladder's; else None."""
        if self.chip is None or self.chip == peaks.lookup(chip):
            return None
        return f"{self.path} is written for {self.chip.name}, and this is {chip}: its batches may not suit it"

    @property
    def own(self) -> tuple[Rung, ...]:
        """The rungs that are not external."""
        return tuple(rung for rung in self.rungs if not rung.external)

    @property
    def first_tries(self) -> tuple[Rung, ...]:
        """The rungs of ours that are in the file, each once."""
        return tuple(rung for rung in self.own if not rung.again)

    @property
    def top(self) -> Rung:
        """The last of ours that is meant to run: those after it are meant to run out of memory."""
        meant = [rung for rung in self.first_tries if rung.expect != "out_of_memory"]
        return (meant or self.first_tries)[-1]

    def carrying(self, *, without: Sequence[str], upto: str | None = None) -> Ladder:
        """Return the ladder as if the rungs called `without` were not in it; the others keep their index.

        upto: name of the last rung to resolve; by default the last one. Raises LadderError, with the reason
        as its cause, where a rung does not fit what is left of those above it.
        """
        assert self._file is not None
        return replace(self, rungs=_resolved(self._file, without, upto))

    def settings(self, was: Toggles, now: Toggles) -> tuple[str, ...]:
        """Return the overrides by which a worker makes toggles `now` from this ladder's `was`."""
        before = asdict(was)
        changed = {key: value for key, value in asdict(now).items() if value != before[key]}
        if changed and self.workload.tokens_per_step is not None:
            changed["grad_accum_steps"] = 1  # 1 means that it is derived
        return tuple(f"toggles.{key}={value}" for key, value in changed.items())

    def chosen(self, names: Sequence[str]) -> list[Rung]:
        """Return the rungs of these names, in order; all if there are none. Raises LadderError."""
        wanted = {self.rung(name).name for name in names}
        chosen = [rung for rung in self.rungs if not names or {rung.name, rung.again} & wanted]
        if chosen[0].external:
            raise LadderError(
                f"--rungs: the first rung {chosen[0].name!r} is external and cannot be the reference; name "
                f"one of {self.path}'s own too, such as {self.rungs[0].name!r}"
            )
        return chosen

    def rung(self, name: str) -> Rung:
        """Return the rung called `name`. Raises LadderError."""
        for rung in self.rungs:
            if rung.name == name:
                return rung
        raise LadderError(
            f"{self.path}: no rung is called {name!r}{near(name, [r.name for r in self.rungs])}"
        )


# --- the file as written


@dataclass(frozen=True, kw_only=True)
class _RungFile:
    __pydantic_config__: ClassVar = STRICT
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    expect: Literal["inert", "out_of_memory"] | None = None
    retry: bool = False
    best_of: str | None = None
    external: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _LadderFile:
    __pydantic_config__: ClassVar = STRICT
    name: str
    rungs: list[dict[str, Any]]
    chip: str | None = None
    workload: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    """A ladder's file, checked but for how its rungs fit together."""

    path: Path
    content: Mapping[str, Any]
    """What the file holds, as YAML has it."""
    workload: Workload
    rungs: tuple[_RungFile, ...]
    """Those that are tried again stand once more at the end."""
    first_try: Mapping[str, str]
    """Name of the first try by that of the second."""
    toggles: Mapping[str, Any]
    """Values of every rung, after its own changes."""
    own: Mapping[str, Sequence[str]]
    """Overrides of one rung, by its name: after all others, or of a best_of in place of that ladder."""


def load(
    path: Path,
    overrides: Iterable[str] = (),
    own: Mapping[str, Iterable[str]] | None = None,
    *,
    copy: Path | None = None,
) -> Ladder:
    """Read a ladder and resolve its rungs.

    path: its file, or the name of a ladder that comes with gpt2-bench, such as cpu.
    overrides: "workload.x=value", "protocol.x=value" or "toggles.x=value" (for every rung, after its own
    changes), with YAML values. own: by a rung's name, "toggles.x=value" for that rung alone, after all
    others; of a best_of all that differs from the defaults, in place of that ladder. copy: file that is read
    in its place (see Ladder.copy_in()), as a ladder may be edited while a run goes on. Raises LadderError.
    """
    path = path if copy else find(path)
    content = _read_yaml(copy or path)
    file = validate(_LadderFile, content, f"{path}")
    if not 1 <= len(file.name.strip()) <= LONGEST_NAME:
        what = f"some text of at most {LONGEST_NAME} characters"
        raise LadderError(f"{path}: name is {what}; results files are called by it")
    try:
        chip = None if file.chip is None else peaks.named(file.chip)
    except ValueError as error:
        raise LadderError(f"{path}: chip: {error}") from None
    extra = _parsed(overrides)
    workload = validate(Workload, {**file.workload, **extra["workload"]}, f"{path}: workload")
    protocol = validate(Protocol, {**file.protocol, **extra["protocol"]}, f"{path}: protocol")
    validate(Toggles, extra["toggles"], "--set", "toggle")
    if not file.rungs:
        raise LadderError(f"{path}: rungs is empty; give at least one, such as {{name: baseline}}")
    written = [
        validate(_RungFile, raw, f"{path}: rung {raw.get('name', index + 1)!r}")
        for index, raw in enumerate(file.rungs)
    ]
    again = {f"{rung.name}{AGAIN}": rung for rung in written if rung.retry}
    if again and protocol.carry == "always":
        name = next(iter(again.values())).name
        raise LadderError(f"{path}: rung {name!r}: retry needs protocol.carry: if_faster")
    if written[0].retry:
        raise LadderError(f"{path}: rung {written[0].name!r}: the first rung is always kept; leave out retry")
    parsed = _Parsed(
        path=path,
        content=content,
        workload=workload,
        rungs=(*written, *(replace(rung, name=name) for name, rung in again.items())),
        first_try={name: rung.name for name, rung in again.items()},
        toggles=extra["toggles"],
        own={name: tuple(values) for name, values in (own or {}).items()},
    )
    return Ladder(
        path=path,
        name=file.name,
        workload=workload,
        protocol=protocol,
        rungs=_resolved(parsed, (), None),
        chip=chip,
        _file=parsed,
    )


AGAIN = " (second try)"
"""Ends the name of a rung that is tried once more, after all others."""


def _resolved(file: _Parsed, without: Sequence[str], upto: str | None) -> tuple[Rung, ...]:
    """Resolve the rungs of a ladder up to one of them, without those that are not carried."""
    rungs: list[Rung] = []
    names: set[str] = set()
    toggles = Toggles()
    for index, rung in enumerate(file.rungs):
        where = f"{file.path}: rung {rung.name!r}"
        name = rung.name.strip()
        if not name or "," in name or name.startswith("-") or len(rung.name) > LONGEST_NAME:
            what = f"some text of at most {LONGEST_NAME} characters, without a comma or a dash in front"
            raise LadderError(f"{where}: a rung's name is {what}")
        if rung.name in names:
            raise LadderError(f"{where}: name is used twice; every rung needs its own")
        names.add(rung.name)
        if rung.name in without:
            continue
        if rung.external is not None:
            external = _external(rung, index, file.workload, rungs, where)
            rungs.append(replace(external, without=tuple(without)))
        else:
            validate(Toggles, rung.set, where, "toggle")
            settings = file.own.get(rung.name, ())
            own = _parsed(settings)["toggles"]
            try:
                if rung.best_of is not None:
                    toggles = Toggles(**own) if settings else _top(rung.best_of, file, where)
                    own = {}
                toggles = replace(toggles, **rung.set)
                resolved = _resolve(file.workload, replace(toggles, **{**file.toggles, **own}))
            except ValueError as error:
                raise LadderError(f"{where}: {error}") from error
            before = next((each.toggles for each in reversed(rungs) if not each.external), None)
            rungs.append(
                Rung(
                    name=rung.name,
                    index=index,
                    changed=describe(resolved, before, file.workload),
                    expect=rung.expect,
                    toggles=resolved,
                    settings=tuple(settings),
                    best_of=rung.best_of,
                    again=file.first_try.get(rung.name),
                    without=tuple(without),
                )
            )
        if rung.name == upto:
            break
    return tuple(rungs)


def _top(name: str, file: _Parsed, where: str) -> Toggles:
    """Return the toggles of the last rung of a ladder that is meant to run. Raises LadderError."""
    other = beside(name, file.path)
    if other.exists() and other.resolve() == file.path.resolve():
        raise LadderError(f"{where}: best_of: {name} is this ladder; name another")
    if not other.exists():
        raise LadderError(f"{where}: best_of: there is no ladder {name}{near_file(other)}")
    if any(isinstance(rung, dict) and "best_of" in rung for rung in _read_yaml(other).get("rungs", ())):
        raise LadderError(f"{where}: best_of: {name} looks at another ladder itself; name that one")
    ladder = load(other)
    if ladder.workload.model != file.workload.model:
        raise LadderError(
            f"{where}: best_of: {name} trains {ladder.workload.model}, and workload.model is "
            f"{file.workload.model}; name a ladder of that model"
        )
    return ladder.top.toggles


def beside(name: str, ladder: Path) -> Path:
    """Return the file of a ladder that another one names: beside it, or a shipped one."""
    file = ladder.parent / name
    return file if file.is_file() else find(Path(name))


def _resolve(workload: Workload, toggles: Toggles) -> Toggles:
    """Do as gpt2.config.toggles.resolve, and raise ValueError if a given grad_accum_steps contradicts it."""
    resolved = resolve(workload, toggles)
    if toggles.grad_accum_steps not in (1, resolved.grad_accum_steps):
        raise ValueError(
            f"grad_accum_steps {toggles.grad_accum_steps} contradicts workload.tokens_per_step "
            f"{workload.tokens_per_step}, which makes it {resolved.grad_accum_steps}; leave it out"
        )
    return resolved


def _external(rung: _RungFile, index: int, workload: Workload, above: Sequence[Rung], where: str) -> Rung:
    """Return an external rung, with device and threads of the rung above it. Raises LadderError."""
    external = validate(PeerRung, rung.external, f"{where}: external")
    if key := next((key for key in ("set", "expect", "retry", "best_of") if getattr(rung, key)), None):
        raise LadderError(f"{where}: an external rung has no {key!r}; change its command instead")
    for key in ("model", "seq_len"):  # records have the ladder's parameters and FLOPs
        declared, wanted = getattr(external, key), getattr(workload, key)
        if declared != wanted:
            raise LadderError(
                f"{where}: external: its command trains {key} {declared}, and workload.{key} is {wanted}; "
                "change its command with it, or leave this rung out of the ladder"
            )
    if not above:
        raise LadderError(
            f"{where}: the first rung cannot be external, as it is the reference; put one of ours first"
        )
    before = next(each for each in reversed(above) if not each.external)
    device, threads = before.toggles.device, before.toggles.threads
    toggles = Toggles(device=device, threads=threads, allocator=external.allocator)
    changed = [f"external: {PEERS[external.peer].title}"]
    return Rung(name=rung.name, index=index, changed=changed, expect=None, toggles=toggles, external=external)


def _hashed(rung: Rung) -> list[Any]:
    """Return what identifies a rung; of an external one without its folder."""
    content = [rung.name, asdict(rung.toggles)]
    external = rung.external
    return [*content, [external.peer, external.tokens_per_step, external.command]] if external else content


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.suffix == ".jsonl":
        raise LadderError(f"{path}: holds results, not a ladder; see bench report and bench ladders")
    try:
        return yaml_mapping(path, "a ladder has the keys name, workload, protocol and rungs")
    except OSError as error:
        raise LadderError(f"{path}: {error.strerror or error}{near_file(path)}") from None


def _parsed(overrides: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse overrides into values by section and key. Raises LadderError."""
    extra: dict[str, dict[str, Any]] = {"workload": {}, "protocol": {}, "toggles": {}}
    for override in overrides:
        path, equals, value = override.partition("=")
        section, dot, key = path.partition(".")
        if not (equals and dot and key and section in extra):
            raise LadderError(
                f"--set {override}: write workload.KEY=VALUE, protocol.KEY=VALUE or toggles.KEY=VALUE"
            )
        extra[section][key] = yaml_value(value, f"--set {override}")
    return extra

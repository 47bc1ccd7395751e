"""An axis of a sweep: one toggle or workload field, and its values. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from bench.ladder.validation import LadderError, near, validate, yaml_value
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

DOUBLED = "micro_batch_size"
"""The only toggle whose values may go on doubling, until the device's memory is full."""
DOTS = ("...", "\u2026")
"""Spellings of the dots after which values go on doubling."""
SECTIONS: dict[str, type] = {"toggles": Toggles, "workload": Workload}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The values of one --over option."""

    section: Literal["toggles", "workload"]
    key: str
    values: tuple[Any, ...]
    doubling: bool = False
    """Whether the values go on doubling until one does not fit."""

    @property
    def of_workload(self) -> bool:
        """Whether each value is another task, with a results file of its own."""
        return self.section == "workload"

    def written(self, value: Any) -> str:
        """Return key=value as YAML."""
        return f"{self.key}={yaml_files.dump(value).splitlines()[0]}"


def parse(text: str) -> Axis:
    """Parse toggles.micro_batch_size=1,2,4,... or workload.model=gpt2,gpt2-medium. Raises LadderError."""
    path, equals, listed = text.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and section in SECTIONS):
        raise LadderError(f"--over {text}: write toggles.KEY=A,B,... or workload.KEY=A,B,...")
    known = [field.name for field in fields(SECTIONS[section])]
    if key not in known:
        raise LadderError(f"--over {text}: {section} has no {key!r}{near(key, known)}")
    words = [word.strip() for word in listed.split(",")]
    doubling = words[-1] in DOTS
    words = words[:-1] if doubling else words
    if not any(words):
        raise LadderError(f"--over {text}: give at least one value")
    if "" in words:
        raise LadderError(f"--over {text}: a value is missing before or after a comma; write null for none")
    if dots := [word for word in words if word in DOTS]:
        raise LadderError(f"--over {text}: {dots[0]} must come last, as it stands for all values that follow")
    values = [yaml_value(word, f"--over {text}") for word in words]
    for value in values:
        if section == "toggles":  # workload values are checked with the ladder
            validate(Toggles, {key: value}, f"--over {text}", "toggle")
        if values.count(value) > 1:
            raise LadderError(f"--over {text}: {value} is listed twice")
    if doubling and key != DOUBLED:
        raise LadderError(
            f"--over {text}: only toggles.{DOUBLED} goes on doubling (...); list the values of {key}"
        )
    if key == DOUBLED and values != sorted(values):
        raise LadderError(f"--over {text}: list batch sizes from the smallest up")
    return Axis(
        section="toggles" if section == "toggles" else "workload",
        key=key,
        values=tuple(values),
        doubling=doubling,
    )


def parse_all(texts: list[str]) -> list[Axis]:
    """Parse all --over options. Raises LadderError."""
    axes = [parse(text) for text in texts]
    paths = [f"{axis.section}.{axis.key}" for axis in axes]
    for path in paths:
        if paths.count(path) > 1:
            raise LadderError(f"--over {path} is given twice; list all its values in one")
    return axes

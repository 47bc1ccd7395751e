"""What a sweep goes over: one toggle or workload field, and the values it takes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from bench.ladder.validation import LadderError, near, validate
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

DOUBLED = "micro_batch_size"
"""The toggle whose values may go on doubling: of all others none ends at the device's memory."""
DOTS = ("...", "\u2026")
"""What stands for values that go on doubling."""
SECTIONS: dict[str, type] = {"toggles": Toggles, "workload": Workload}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One --over."""

    section: Literal["toggles", "workload"]
    key: str
    values: tuple[Any, ...]
    doubling: bool = False
    """Whether the values go on, each twice the one before, until one does not fit."""

    @property
    def of_workload(self) -> bool:
        """Whether each of its values is another task, with a results file of its own."""
        return self.section == "workload"

    def written(self, value: Any) -> str:
        """key=value, as YAML reads it again."""
        return f"{self.key}={yaml_files.dump(value).splitlines()[0]}"


def parse(text: str) -> Axis:
    """toggles.micro_batch_size=1,2,4,... or workload.model=gpt2,gpt2-medium. Raises LadderError."""
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
        raise LadderError(f"--over {text}: there is no value before or after a comma; null stands for none")
    if dots := [word for word in words if word in DOTS]:
        raise LadderError(f"--over {text}: {dots[0]} stands for all that follow, so nothing comes after it")
    values = [yaml_files.value(word, f"--over {text}") for word in words]
    for value in values:
        if section == "toggles":  # whether a workload's value fits the others, only the ladder can tell
            validate(Toggles, {key: value}, f"--over {text}", "toggle")
        if values.count(value) > 1:
            raise LadderError(f"--over {text}: {value} is listed twice")
    if doubling and key != DOUBLED:
        raise LadderError(
            f"--over {text}: only toggles.{DOUBLED} goes on doubling (...); list the values of {key}"
        )
    if key == DOUBLED and values != sorted(values):
        raise LadderError(
            f"--over {text}: list batches from the smallest up; what is larger than one that fails is"
        )
    return Axis(
        section="toggles" if section == "toggles" else "workload",
        key=key,
        values=tuple(values),
        doubling=doubling,
    )


def parse_all(texts: list[str]) -> list[Axis]:
    """Of all --over options. Raises LadderError."""
    axes = [parse(text) for text in texts]
    paths = [f"{axis.section}.{axis.key}" for axis in axes]
    for path in paths:
        if paths.count(path) > 1:
            raise LadderError(f"--over {path} is given twice; list all its values in one")
    return axes

"""Configuration of a long run: a YAML file, or the name of one in gpt2/pretrain/configs.

name: gpt2-shakespeare
steps: 1000
workload: {model: gpt2, data: tinyshakespeare, tokens_per_step: 1024, lr: 6.0e-4}
toggles: {device: cpu, autocast: bfloat16, attention: sdpa}
evaluation: {val_every: 50, sample_every: 500}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles, resolve
from gpt2.config.validation import ConfigError, near, validate
from gpt2.config.workload import STRICT, Workload
from gpt2.pretrain.anomaly import Policy

CONFIGS = Path(__file__).parent / "configs"
PROMPTS = ("Hello, I'm a language model,", "Romeo and Juliet")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Intervals, in steps, between evaluations of the model; 0 means never."""

    __pydantic_config__: ClassVar = STRICT

    val_every: int = 250
    """Steps between validation losses, which are also taken before the first step and after the last."""
    val_tokens: int = 10_485_760
    """Tokens from the beginning of the validation shard; rounded down to whole batches, at least one."""
    hellaswag_every: int = 0
    hellaswag_style: Literal["completion", "harness"] = "completion"
    """Scoring as in llm.c (completion) or lm-evaluation-harness (harness)."""
    sample_every: int = 0
    sample_tokens: int = 64
    prompts: tuple[str, ...] = PROMPTS

    def __post_init__(self) -> None:
        for name in ("val_every", "hellaswag_every", "sample_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is negative")
        for name in ("val_tokens", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is less than 1")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, besides the end of the run and orderly interruptions."""

    __pydantic_config__: ClassVar = STRICT

    every: int = 1000
    """Steps between checkpoints; 0 writes only the last."""
    keep: int = 2
    """Number of newest checkpoints kept, besides the one with the lowest validation loss."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ValueError(f"every {self.every} must be 0 or more, keep {self.keep} 1 or more")

    def due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step` steps."""
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One training from its first step to its last."""

    __pydantic_config__: ClassVar = STRICT

    name: str
    steps: int
    """Optimiser steps of all legs of the run together."""
    workload: Workload
    toggles: Toggles = field(default_factory=Toggles)
    val_corpus: str | None = None
    """Corpus to take validation tokens from; None: the validation shard of the training corpus."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    guard: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps {self.steps} is less than 1")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"name {self.name!r} is no name for a folder")
        if self.guard.skips and self.toggles.launch == "graph":
            reason = "launch: graph records whole steps, so that guard cannot skip one"
            raise ValueError(f"{reason}; choose stop or report")
        object.__setattr__(self, "toggles", resolve(self.workload, self.toggles))

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimiser step over all ranks."""
        return self.toggles.tokens_per_step(self.workload.seq_len)


def load(config: str, overrides: Sequence[str] = (), *, val_corpus: str | None = None) -> TrainingRun:
    """Load a TrainingRun by its file or name.

    overrides: PATH=VALUE with YAML values, such as toggles.device=cuda. val_corpus: in place of that of the
    file; it is no YAML, for a folder may be called null. Raises ConfigError, which names file and key.
    """
    path = find(config)
    try:
        content = yaml_files.mapping(path, "a run has the keys name, steps, workload and toggles")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    content.setdefault("name", path.stem)
    for override in overrides:
        _set(content, override)
    if val_corpus is not None:
        content["val_corpus"] = val_corpus
    return build(content, str(path))


def build(content: dict[str, Any], where: str) -> TrainingRun:
    """Build a TrainingRun from its keys; `where` begins error messages. Raises ConfigError."""
    parts = {"workload": Workload, "toggles": Toggles, "evaluation": Evaluation, "checkpoints": Checkpoints}
    for name, kind in {**parts, "guard": Policy}.items():
        if name in content:
            validate(kind, content[name], f"{where}: {name}")  # so that an error names the part
    run = validate(TrainingRun, content, where)
    given = content.get("toggles", {}).get("grad_accum_steps", 1)
    if given not in (1, run.toggles.grad_accum_steps):
        raise ConfigError(
            f"{where}: toggles: grad_accum_steps {given} contradicts workload.tokens_per_step "
            f"{run.workload.tokens_per_step}, which makes it {run.toggles.grad_accum_steps}; leave it out"
        )
    return run


def find(config: str) -> Path:
    """Return the configuration file for a path or name. Raises ConfigError where there is none."""
    path = Path(config)
    if path.suffix in (".yaml", ".yml") or (path.exists() and not path.is_dir()):
        if path.is_dir() or not path.exists():
            raise ConfigError(f"{path}: {'is a folder' if path.is_dir() else 'does not exist'}")
        return path
    known = {each.stem: each for each in sorted(CONFIGS.glob("*.yaml"))}
    if config not in known:
        raise ConfigError(f"no configuration {config!r}{near(config, list(known))}; or give a YAML file")
    return known[config]


def _set(content: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: should be PATH=VALUE, such as toggles.device=cuda")
    *parents, key = path.split(".")
    place = content
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"--set {override}: {parent} has no keys")
    place[key] = yaml_files.value(text, f"--set {override}")

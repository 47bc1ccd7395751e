"""Checkpoints as folders: tensors in safetensors (see gpt2.state), all else in checkpoint.json. Imports no torch.

for folder in folders(run / "checkpoints"): print(read(folder).step)
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from gpt2.strict_json import dumps
from gpt2.workload import GPT2Config

FORMAT = "gpt2-bench checkpoint"
VERSION = 1
FACTS = "checkpoint.json"
PART = ".part"
"""At the end of a folder's name while a checkpoint is being written."""


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written; the message says which, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What must be equal for weights to fit: GPT2Config without the choices that toggles make."""

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int
    vocab_size: int

    @classmethod
    def of(cls, config: GPT2Config) -> Shape:
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint says of itself."""

    shape: Shape
    step: int
    """Steps taken; the next one is of this number."""
    updates: int
    """Steps of AdamW, which those passed over lack; 0 where there are weights only."""
    tokens: int
    """Trained on so far."""
    elapsed_seconds: float = 0.0
    """From the start of each leg to its last checkpoint, added up."""
    run: dict[str, Any] = field(default_factory=dict)
    """The configuration that it was trained by."""
    data: dict[str, Any] = field(default_factory=dict)
    """The corpus: its name, the sha256 of its tokens, a stream's place in it, and what it is validated on."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """Of float16's gradients."""
    guard: dict[str, Any] = field(default_factory=dict)
    """What gpt2.guard remembers of the steps before."""
    looked: bool = True
    """Whether the evaluations that are due at this step were done before it was kept."""
    val_loss: float | None = None
    """Of this very step, in nats per token; null, too, where it was no finite number, which is never the lowest."""
    looking_seconds: float = 0.0
    """That the evaluations of a step took at most, for a leg of limited time that has made none yet."""
    files: dict[str, int] = field(default_factory=dict)
    """Sizes of its files in bytes."""


STEP = re.compile(r"step-(\d{8,})")


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def folders(root: Path) -> list[Path]:
    """Whole checkpoints under `root`, that of the most steps last; a copy by another name is the user's own."""
    steps = {int(found[1]): each for each in root.glob("step-*") if (found := STEP.fullmatch(each.name))}
    return [steps[step] for step in sorted(steps) if (steps[step] / FACTS).is_file()]


def newest(path: Path) -> Path:
    """The newest checkpoint where `path` is a run's folder, else `path`."""
    kept = folders(path / "checkpoints")
    return kept[-1] if kept else path


def read(folder: Path) -> Saved:
    """What the checkpoint in `folder` says, its files held to it. Raises CheckpointError."""
    path = folder / FACTS
    if not path.is_file():
        what = "is no folder" if not folder.is_dir() else f"holds no {FACTS}: it is no checkpoint of gpt2 train"
        raise CheckpointError(f"{folder} {what}; weights of others come in by: gpt2 import SOURCE FOLDER")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is not of a {FORMAT}")
        if (version := content.pop("version")) != VERSION:
            raise CheckpointError(f"{path} is of version {version}; this program reads version {VERSION}")
        saved = Saved(**{**content, "shape": Shape(**content["shape"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    for name, size in saved.files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if not os.access(file, os.R_OK) and found is not None:
            raise CheckpointError(f"{file} cannot be read (permission denied)")
        if found != size:
            how = (
                "is missing"
                if found is None
                else f"has {found:,} bytes instead of {size:,}; it was cut off or changed"
            )
            raise CheckpointError(f"{file} {how}")
    return saved


def seal(part: Path, folder: Path, saved: Saved) -> None:
    """Make what was written into `part` the checkpoint `folder`, at once; one of that name is replaced."""
    sizes = {each.name: each.stat().st_size for each in sorted(part.iterdir())}
    content = {"format": FORMAT, "version": VERSION, **asdict(saved), "files": sizes}
    with (part / FACTS).open("w", encoding="utf-8") as file:
        file.write(dumps(content, indent=1))
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    with contextlib.suppress(OSError):  # so that the new name outlives a power failure, too; not all drives can
        handle = os.open(folder.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def prune(root: Path, keep: int) -> None:
    """Remove all checkpoints under `root` but the newest `keep` and the one of the lowest validation loss.

    Losses on other tokens do not compare: where a run changed its validation, the best of each stays.
    """
    found = folders(root)
    best: dict[str, tuple[float, Path]] = {}
    for folder in found:
        with contextlib.suppress(CheckpointError):  # a damaged one is no reason to end a sound run
            saved = read(folder)
            judged_by = str(saved.data.get("validation"))
            if saved.val_loss is not None and saved.val_loss < best.get(judged_by, (math.inf, folder))[0]:
                best[judged_by] = saved.val_loss, folder
    for folder in found[:-keep]:
        if folder not in [each for _, each in best.values()]:
            shutil.rmtree(folder, ignore_errors=True)
    for torn in root.glob(f"step-*{PART}"):
        shutil.rmtree(torn, ignore_errors=True)

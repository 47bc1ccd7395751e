"""Checkpoints as folders: safetensors (see gpt2.pretrain.checkpoint_tensors) and checkpoint.json.

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

from gpt2.config.workload import GPT2Config
from gpt2.errors import GPT2Error
from gpt2.files.atomic import leftovers, new_folder
from gpt2.files.listing import hidden, name_problem, printable
from gpt2.files.strict_json import dumps

FORMAT = "gpt2-bench checkpoint"
VERSION = 1
FACTS = "checkpoint.json"
WEIGHTS = ".safetensors"
"""Suffix of the files of tensors."""


class CheckpointError(GPT2Error):
    """A checkpoint that cannot be used or written; the message says which, and what is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model sizes that must match for weights to fit: GPT2Config without its toggles."""

    n_layer: int
    n_head: int
    n_embd: int
    n_ctx: int
    vocab_size: int

    @classmethod
    def of(cls, config: GPT2Config) -> Shape:
        """Take the shape from a config."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})

    @property
    def config(self) -> GPT2Config:
        """The plain model's config of this shape."""
        return GPT2Config(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The contents of a checkpoint.json."""

    shape: Shape
    step: int
    """Steps taken so far, which is the number of the next step."""
    updates: int
    """AdamW steps taken, without skipped steps; 0 for a checkpoint of weights only."""
    tokens: int
    """Tokens trained on so far."""
    elapsed_seconds: float = 0.0
    """Wall-clock seconds of all legs, each from its start to its last checkpoint."""
    run: dict[str, Any] = field(default_factory=dict)
    """The configuration of the run."""
    data: dict[str, Any] = field(default_factory=dict)
    """The corpus: its name, the sha256 of its tokens, the position in a stream, and the validation tokens."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """State of the gradient scaler for float16."""
    guard: dict[str, Any] = field(default_factory=dict)
    """State of gpt2.pretrain.anomaly.Guard: losses and gradient norms of recent steps."""
    evaluated: bool = True
    """True if the evaluations due at this step were made before the checkpoint was written."""
    val_loss: float | None = None
    """Validation loss at this step, in nats per token; null where none was taken or it was not finite."""
    evaluating_seconds: float = 0.0
    """Longest time that one step's evaluations took, for a leg of limited time that has made none yet."""
    other_vocabulary: bool = False
    """True for weights imported with another tokenizer than GPT-2's, and for what was trained from them."""
    begun_from: str = ""
    """Place of the weights that the training began with; empty where they were drawn."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each of its files, by name."""


RENAMED = {"looked": "evaluated", "looking_seconds": "evaluating_seconds"}
"""Fields of Saved by the names that older checkpoints have for them."""

STEP = re.compile(r"step-(\d{8,})")


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return root / f"step-{step:08d}"


def folders(root: Path) -> list[Path]:
    """Return the checkpoints under `root` by step.

    Other names are left alone, as are misnamed() ones. Raises PermissionError where it may not be read: a
    glob would find nothing there.
    """
    return [each for step, each in _named(root) if _step_within(each) in (step, None)]


def misnamed(root: Path) -> list[tuple[Path, int]]:
    """Return the checkpoints under `root` of another step than their name says, each with its step."""
    found = [(each, step, _step_within(each)) for step, each in _named(root)]
    return [(each, within) for each, step, within in found if within not in (step, None)]


def _named(root: Path) -> list[tuple[int, Path]]:
    """Return the folders that are named as checkpoints and hold facts or weights, by the step in the name.

    One that was copied without its facts counts, so that read() refuses it: an older one in its place would
    lose the steps between them.
    """
    try:
        entries = [*root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        entries = []
    steps = [(int(found[1]), each) for each in entries if (found := STEP.fullmatch(each.name))]
    return [(step, each) for step, each in sorted(steps) if (each / FACTS).is_file() or _has_weights(each)]


def _has_weights(folder: Path) -> bool:
    return any(folder.glob(f"*{WEIGHTS}"))


def _step_within(folder: Path) -> int | None:
    """Return the step in a training's facts; None for weights alone.

    Damaged facts give None here; read() reports the error when the checkpoint is used.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        return int(facts["step"]) if facts["run"] else None
    return None


def newest(path: Path) -> Path:
    """Return the newest checkpoint where `path` is a run's folder, else `path` itself."""
    kept = folders(path / "checkpoints")
    return kept[-1] if kept else path


def read(folder: Path) -> Saved:
    """Read a checkpoint.json and check the sizes of the files that it lists.

    Raises CheckpointError where it is no checkpoint, of another version, damaged, or a file is missing or of
    another size; where the folder holds other weights besides, or its name is not UTF-8.
    """
    if problem := name_problem(folder):
        raise CheckpointError(problem)
    path = folder / FACTS
    if not path.is_file():
        if STEP.fullmatch(folder.name) and _has_weights(folder):
            raise CheckpointError(f"{folder} holds weights but no {FACTS}: only a part of it was copied")
        what = f"holds no {FACTS}: it is no checkpoint of gpt2 train" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{folder} {what}; weights of others come in by: gpt2 import SOURCE FOLDER")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content = {RENAMED.get(name, name): value for name, value in content.items()}
        if content.pop("format") != FORMAT:
            raise CheckpointError(f"{path} is not of a {FORMAT}")
        if (version := content.pop("version")) != VERSION:
            raise CheckpointError(f"{path} is of version {version}; this program reads version {VERSION}")
        saved = Saved(**{**content, "shape": Shape(**content["shape"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    for name, size in saved.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if not os.access(file, os.R_OK):
            raise CheckpointError(f"{file} cannot be read (permission denied)")
        if (found := file.stat().st_size) != size:
            differs = f"has {found:,} bytes instead of {size:,}"
            raise CheckpointError(f"{file} {differs}; it was cut off or changed")
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() == WEIGHTS and not hidden(file.name) and file.name not in saved.files:
            unlisted = f"{printable(str(file))} is none of the files that {FACTS} lists"
            raise CheckpointError(f"{unlisted}; move it elsewhere")
    return saved


def seal(part: Path, folder: Path, saved: Saved, *, replace: bool) -> None:
    """Turn the folder `part` into the checkpoint `folder`.

    replace: whether it takes the place of one of that name, which is removed last: what is there before is
    lost only once the new one is in place (see recover()). Raises OSError.
    """
    sizes = {each.name: each.stat().st_size for each in sorted(part.iterdir()) if not hidden(each.name)}
    content = {"format": FORMAT, "version": VERSION, **asdict(saved), "files": sizes}
    with (part / FACTS).open("w", encoding="utf-8") as file:
        file.write(dumps(content, indent=1))
        file.flush()
        os.fsync(file.fileno())
    before = new_folder(folder) if replace and folder.exists() else None
    if before:
        folder.rename(before)  # an empty folder's place may be taken
    try:
        part.rename(folder)
    except OSError:
        if before:
            before.rename(folder)
        raise
    if before:
        shutil.rmtree(before, ignore_errors=True)
    with contextlib.suppress(OSError):  # makes the rename survive a power failure; not every file system can
        handle = os.open(folder.parent, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def recover(root: Path) -> None:
    """Give whole checkpoints their names that were killed before they had one, unless another has that name.

    Those that are not whole are removed, for the disk may have no room for them and the next one. Raises
    OSError.
    """
    for part in leftovers(root, STEP.pattern):
        if not (part / FACTS).exists():  # which is written last
            shutil.rmtree(part, ignore_errors=True)
        folder = part.with_name(part.name.rpartition("-")[0])
        if not folder.exists():
            with contextlib.suppress(CheckpointError):  # it is not whole
                read(part)
                part.rename(folder)


def prune(root: Path, keep: int) -> None:
    """Remove all checkpoints under `root` but the newest `keep` and the one with the lowest validation loss.

    Losses on different validation tokens are not comparable, so the best of each validation set is kept. One
    that read() refuses is left to the user: it may be the best, with a file of theirs beside it.
    """
    readable: dict[Path, Saved] = {}
    for folder in folders(root):
        with contextlib.suppress(CheckpointError):
            readable[folder] = read(folder)
    best: dict[str, tuple[float, Path]] = {}
    for folder, saved in readable.items():
        judged_by = str(saved.data.get("validation"))
        if saved.val_loss is not None and saved.val_loss < best.get(judged_by, (math.inf, folder))[0]:
            best[judged_by] = saved.val_loss, folder
    for folder in [*readable][:-keep]:
        if folder not in [each for _, each in best.values()]:
            shutil.rmtree(folder, ignore_errors=True)
    for torn in leftovers(root, STEP.pattern):
        shutil.rmtree(torn, ignore_errors=True)

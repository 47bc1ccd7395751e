"""What a run writes down as it goes: metrics.jsonl and metrics.csv, and TensorBoard or Weights & Biases where asked.

Imports no torch. One line per event; a resumed run drops what lies beyond the checkpoint that it goes on from.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from gpt2.strict_json import dumps

Kind = Literal["step", "val", "hellaswag", "sample", "note", "leg"]
EVALUATIONS: tuple[Kind, ...] = ("val", "hellaswag", "sample")
COLUMNS = (
    *("kind", "step", "tokens", "loss", "grad_norm", "lr", "seconds", "elapsed_seconds", "tps", "mfu"),
    *("peak_memory_bytes", "wait_seconds", "corpus", "style", "acc", "acc_norm", "examples", "prompt", "text"),
)
"""Of metrics.csv; what an event lacks stays empty."""


class MetricsError(Exception):
    """What a run should write down cannot be written or read; the message says what and where."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something measured or seen once `step` steps had been taken."""

    kind: Kind
    step: int
    values: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {"kind": self.kind, "step": self.step, **self.values}


class Sink(Protocol):
    """Somewhere that events go."""

    def write(self, event: Event) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Files:
    """metrics.jsonl and metrics.csv in a run's folder.

    step: the run goes on from there; later events of an earlier leg are dropped. looked: whether the evaluations due
    at this step were done before its checkpoint; those that are made again are dropped, too. Raises MetricsError.
    """

    def __init__(self, folder: Path, step: int = 0, *, looked: bool = True) -> None:
        self._jsonl_path, self._csv_path = folder / "metrics.jsonl", folder / "metrics.csv"
        self.set_aside: Path | None = None
        """Where metrics went that cannot be gone on with: no checkpoint is theirs, or they are damaged."""
        kept = self._kept(step, looked)
        try:
            part = self._jsonl_path.with_suffix(".part")
            part.write_text("".join(f"{_json(event)}\n" for event in kept), encoding="utf-8")
            part.replace(self._jsonl_path)
            self._jsonl: IO[str] = self._jsonl_path.open("a", encoding="utf-8")
            self._csv: IO[str] = self._csv_path.open("w", encoding="utf-8", newline="")
            self._rows = csv.DictWriter(self._csv, COLUMNS, extrasaction="ignore")
            self._rows.writeheader()
            self._rows.writerows(event.row() for event in kept)
        except OSError as error:
            raise MetricsError(f"cannot write {folder} ({error.strerror})") from None

    def _kept(self, step: int, looked: bool) -> list[Event]:
        """Events up to a checkpoint; what is no use is moved, for a run is not held up by its log."""
        if not self._jsonl_path.exists():
            return []
        with contextlib.suppress(MetricsError):
            found = list(read(self._jsonl_path.parent))
            if step:
                again = () if looked else EVALUATIONS
                return [e for e in found if e.step < step or (e.step == step and e.kind not in again)]
            if not any(event.kind == "step" for event in found):
                return []
        others = len(list(self._jsonl_path.parent.glob("metrics-before*.jsonl")))
        self.set_aside = self._jsonl_path.with_name(f"metrics-before{f'-{others + 1}' if others else ''}.jsonl")
        self._jsonl_path.replace(self.set_aside)
        return []

    def write(self, event: Event) -> None:
        try:
            self._jsonl.write(f"{_json(event)}\n")
            self._jsonl.flush()
            self._rows.writerow(event.row())
            self._csv.flush()
        except OSError as error:
            raise MetricsError(f"cannot write {self._jsonl_path.parent} ({error.strerror})") from None

    def close(self, *, failed: bool = False) -> None:
        self._jsonl.close()
        self._csv.close()


class TensorBoard:
    """The numbers as scalars in the run's folder tensorboard/; later ones of an earlier leg are hidden."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MetricsError("TensorBoard is not installed; pip install tensorboard") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def write(self, event: Event) -> None:
        for name, value in event.values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{event.kind}/{name}", value, event.step)
        if event.kind == "sample":
            self._writer.add_text("sample", f"{event.values['prompt']}{event.values['text']}", event.step)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The numbers by wandb, whose own variables choose project, key and WANDB_MODE=offline; a resumed run goes on."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], run_id: str) -> None:
        try:
            import wandb
        except ImportError:
            raise MetricsError("Weights & Biases is not installed; pip install wandb") from None
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "gpt2-bench"),
                dir=str(folder),
                name=name,
                id=run_id,
                resume="allow",
                config=config,
            )
        except Exception as error:  # of several kinds, all of its own
            raise MetricsError(f"Weights & Biases: {error}; WANDB_MODE=offline needs no key") from None
        self._run.define_metric("*", step_metric="step")  # its own counts events

    def write(self, event: Event) -> None:
        numbers = {f"{event.kind}/{k}": v for k, v in event.values.items() if isinstance(v, int | float)}
        said = {"sample": f"{event.values['prompt']}{event.values['text']}"} if event.kind == "sample" else {}
        self._run.log({**numbers, **said, "step": event.step})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def read(folder: Path) -> Iterator[Event]:
    """What a run wrote down, in order; a last line that was cut off is left out. Raises MetricsError."""
    path = folder / "metrics.jsonl"
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    except OSError as error:
        raise MetricsError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip(b" \t\r\0"):  # an editor's, or what a crash of the machine left
            continue
        try:
            row = json.loads(line.decode())
            event = Event(kind=row.pop("kind"), step=row.pop("step"), values=row)
        except (ValueError, KeyError, AttributeError, TypeError):
            if number == len(lines):  # cut off
                return
            raise MetricsError(f"{path}: line {number} is damaged") from None
        yield event


def _json(event: Event) -> str:
    """A line of metrics.jsonl."""
    return dumps(event.row())

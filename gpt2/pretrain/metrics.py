"""Metrics of a run: metrics.jsonl, and TensorBoard or Weights & Biases where asked for.

There is one line per event. A resumed run drops the events after the checkpoint that it resumes from. Imports
no torch.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from gpt2.errors import GPT2Error
from gpt2.files.atomic import atomic_write
from gpt2.files.strict_json import dumps, json_lines

Kind = Literal["step", "val", "hellaswag", "sample", "note", "leg"]
EVALUATIONS: tuple[Kind, ...] = ("val", "hellaswag", "sample")


class MetricsError(GPT2Error):
    """Metrics that cannot be written or read; the message says what and where."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something measured or observed after `step` steps."""

    kind: Kind
    step: int
    values: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the event as a line of metrics.jsonl."""
        return f"{dumps({'kind': self.kind, 'step': self.step, **self.values})}\n"


class Sink(Protocol):
    """A destination for events; `failed` tells close() that the run ended with an error."""

    def write(self, event: Event) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class MetricsFile:
    """The sink that writes metrics.jsonl in a run's folder.

    step: number of steps that the run resumes from; later events of an earlier leg are dropped. evaluated:
    whether the evaluations due at this step precede its checkpoint; if not, they will be repeated, so earlier
    ones are dropped too. Raises MetricsError.
    """

    def __init__(self, folder: Path, step: int = 0, *, evaluated: bool = True) -> None:
        self._path = folder / "metrics.jsonl"
        self.set_aside: Path | None = None
        """New path of metrics that could not be continued: they have no checkpoint, or are damaged."""
        kept = self._kept(step, evaluated)
        try:
            with atomic_write(self._path) as file:
                file.write("".join(event.line() for event in kept).encode())
            self._file: IO[str] = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise MetricsError(f"cannot write {folder} ({error.strerror})") from None

    def _kept(self, step: int, evaluated: bool) -> list[Event]:
        """Return the events up to the checkpoint; a file that cannot be continued is renamed."""
        if not self._path.exists():
            return []
        with contextlib.suppress(MetricsError):
            found = list(read(self._path.parent))
            if step:
                again = () if evaluated else EVALUATIONS
                return [e for e in found if e.step < step or (e.step == step and e.kind not in again)]
            if not any(event.kind == "step" for event in found):
                return []
        numbers = ("", *(f"-{number}" for number in range(2, 1000)))
        places = (self._path.with_name(f"metrics-before{number}.jsonl") for number in numbers)
        self.set_aside = self._path.replace(next(place for place in places if not place.exists()))
        return []

    def write(self, event: Event) -> None:
        try:
            self._file.write(event.line())
            self._file.flush()
        except OSError as error:
            raise MetricsError(f"cannot write {self._path.parent} ({error.strerror})") from None

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


class TensorBoard:
    """The sink that writes numbers as scalars to RUN/tensorboard; a resumed run hides later ones."""

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
    """The sink that logs numbers with wandb, configured by wandb's environment variables.

    These include its project, API key and WANDB_MODE=offline. A resumed run continues under its id.
    """

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
        except Exception as error:  # wandb raises many types of its own
            offline = "" if os.environ.get("WANDB_MODE") else "; WANDB_MODE=offline needs no key"
            raise MetricsError(f"Weights & Biases: {' '.join(str(error).split())}{offline}") from None
        self._run.define_metric("*", step_metric="step")  # wandb's own step counts events

    def write(self, event: Event) -> None:
        numbers = {f"{event.kind}/{k}": v for k, v in event.values.items() if isinstance(v, int | float)}
        said = {"sample": f"{event.values['prompt']}{event.values['text']}"} if event.kind == "sample" else {}
        self._run.log({**numbers, **said, "step": event.step})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


def read(folder: Path) -> Iterator[Event]:
    """Yield a run's events in order; an incomplete last line is left out.

    Raises MetricsError, also where steps do not increase: then the file holds two runs, or one twice.
    """
    last_step = 0
    path = folder / "metrics.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise MetricsError(f"{path}: cannot be read ({error.strerror})") from None
    for number, line in json_lines(content):
        try:
            row = json.loads(line.decode())
            event = Event(kind=row.pop("kind"), step=operator.index(row.pop("step")), values=row)
        except (ValueError, KeyError, AttributeError, TypeError):
            if number == content.count(b"\n") + 1:  # incomplete
                return
            raise MetricsError(f"{path}: line {number} is damaged") from None
        if event.kind == "step":
            if event.step <= last_step:
                raise MetricsError(
                    f"{path}: line {number} has step {event.step} after step {last_step}: it holds two runs' "
                    "metrics, or one's twice; keep those of one"
                )
            last_step = event.step
        yield event

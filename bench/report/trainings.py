"""Long runs of `gpt2 train` side by side: what each learnt, in what time, beside what others have published.

Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.record import RecordError
from bench.report.sheet import Sheet
from bench.report.text import DASH, duration, gib, number, percent
from gpt2.hellaswag import PUBLISHED
from gpt2.metrics import Event, MetricsError, read
from gpt2.workload import PRESETS

SMOOTHED = 20
"""Steps that a training loss is the mean of: that of one step wanders with its batch."""


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """What a run's folder says."""

    name: str
    run: dict[str, Any]
    """Its configuration."""
    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def workload(self) -> dict[str, Any]:
        return self.run["workload"]

    @property
    def losses(self) -> list[float]:
        """Not a number where a step's was not."""
        return [math.nan if (loss := event.values["loss"]) is None else loss for event in self.of("step")]

    @property
    def seconds(self) -> float:
        """From the start of each leg to its end or the checkpoint that the next went on from, added up."""
        return max((event.values.get("elapsed_seconds") or 0.0 for event in self.events), default=0.0)

    @property
    def tps(self) -> float | None:
        """Median over steps: evaluations, checkpoints and compilation are between them, or in few of them."""
        steps = self.of("step")
        return median(event.values["tps"] for event in steps) if steps else None


def load(folders: Sequence[Path]) -> list[LongRun]:
    """The runs in these folders. Raises RecordError, in one line, where one holds none or is damaged."""
    found = []
    for folder in folders:
        try:
            run = json.loads((folder / "run.json").read_text(encoding="utf-8"))["run"]
            events = tuple(read(folder))
            PRESETS[run["workload"]["model"]]
        except MetricsError as error:
            raise RecordError(str(error)) from None
        except OSError as error:
            raise RecordError(f"{folder} holds no run of gpt2 train ({error.strerror}: {error.filename})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder / 'run.json'} is damaged ({type(error).__name__}: {error})") from None
        found.append(LongRun(name=run["name"], run=run, events=events))
    if len({run.name for run in found}) < len(found):  # then by their folders
        found = [LongRun(name=str(f), run=r.run, events=r.events) for f, r in zip(folders, found, strict=True)]
    return found


def sheets(runs: Sequence[LongRun]) -> list[Sheet]:
    """What they learnt, HellaSwag beside what is published, and how they go on with a prompt."""
    parts = [_learnt(runs)]
    parts += [sheet for style in ("completion", "harness") if (sheet := _hellaswag(runs, style))]
    if sheet := _samples(runs):
        parts.append(sheet)
    return parts


def _learnt(runs: Sequence[LongRun]) -> Sheet:
    head = ("Run", "Model", "Corpus", "On", "Steps", "Tokens", "Time", "TPS, median", "MFU, median")
    head = (*head, "Peak memory (GiB)", "Loader", "Training loss", "Validation loss", "Lowest")
    rows = []
    for run in runs:
        steps, vals, legs = run.of("step"), run.of("val"), run.of("leg")
        where = {f"{leg.values['devices']} x {leg.values['chip']}" for leg in legs}
        mfu = [event.values["mfu"] for event in steps if event.values.get("mfu") is not None]
        memory = [m for event in steps if (m := event.values.get("peak_memory_bytes")) is not None]
        waited = sum(event.values["wait_seconds"] for event in steps)
        busy = sum(event.values["seconds"] for event in steps)
        rows.append(
            [
                run.name,
                run.workload["model"],
                run.workload["data"],
                "; ".join(sorted(where)) or DASH,
                f"{len(steps):,} of {run.run['steps']:,}",
                f"{steps[-1].values['tokens']:,}" if steps else DASH,
                duration(run.seconds) if steps else DASH,
                number(run.tps) if run.tps else DASH,
                percent(median(mfu)) if mfu else DASH,
                gib(max(memory)) if memory else DASH,
                percent(waited / busy) if busy else DASH,
                f"{fmean(run.losses[-SMOOTHED:]):.4f}" if steps else DASH,
                f"{vals[-1].values['loss']:.4f} ({vals[-1].values['corpus']})" if vals else DASH,
                f"{min(v.values['loss'] for v in vals):.4f}" if vals else DASH,
            ]
        )
    notes = [
        f"Losses in nats per token; the training loss is the mean of the last {SMOOTHED} steps. Losses on unlike "
        "corpora do not compare. Loader: the share of the steps' time that was spent waiting for batches.",
        "Time: of all legs, evaluations, checkpoints and compilation included, which tokens per second are without.",
    ]
    return Sheet(title="Long runs", head=head, rows=rows, words=frozenset({0, 1, 2, 3}), notes=notes)


def _hellaswag(runs: Sequence[LongRun], style: str) -> Sheet | None:
    """All of one style: the other's figures stand in a table of their own."""
    rows = []
    for run in runs:
        scores = [event for event in run.of("hellaswag") if event.values["style"] == style]
        if scores:
            last = scores[-1].values
            ours = [run.name, run.workload["model"], run.workload["data"], f"{scores[-1].step:,}"]
            rows.append([*ours, f"{last['acc']:.4f}", f"{last['acc_norm']:.4f}", f"{last['examples']:,} examples"])
    if not rows:
        return None
    models = {run.workload["model"] for run in runs}
    published = [each for each in PUBLISHED if each.style == style and each.model in models]
    for each in published:
        acc, norm = (f"{share:.4f}" if share is not None else DASH for share in (each.acc, each.acc_norm))
        told = f"published: {each.source}{', ' + each.note if each.note else ''}"
        rows.append([f"{each.model} ({each.source})", each.model, each.corpus, DASH, acc, norm, told])
    head = ("Run", "Model", "Corpus", "Step", "acc", "acc_norm", "Source")
    return Sheet(
        title=f"HellaSwag, {style} style",
        head=head,
        rows=rows,
        words=frozenset({0, 1, 2, 6}),
        notes=["Of the two styles (docs/training.md) no figures compare; chance is 0.25."],
        beneath=len(published),
    )


def _samples(runs: Sequence[LongRun]) -> Sheet | None:
    rows = [
        [run.name, f"{event.step:,}", event.values["prompt"], event.values["text"]]
        for run in runs
        for event in run.of("sample")
    ]
    if not rows:
        return None
    head = ("Run", "Step", "Prompt", "Goes on")
    return Sheet(title="Samples", head=head, rows=rows, words=frozenset({0, 2, 3}), notes=[])


def reference_lines(runs: Sequence[LongRun], style: str) -> dict[str, float]:
    """acc_norm of OpenAI's released weights, by model, for a plot of these runs."""
    models = {run.workload["model"] for run in runs}
    lines: dict[str, float] = {}
    for each in PUBLISHED:
        if each.corpus == "webtext" and each.style == style and each.model in models and each.acc_norm is not None:
            lines.setdefault(each.model, each.acc_norm)
    return lines


def same_validation(runs: Sequence[LongRun]) -> bool:
    """Whether their validation losses are of one corpus, and so compare."""
    return len({event.values["corpus"] for run in runs for event in run.of("val")}) <= 1

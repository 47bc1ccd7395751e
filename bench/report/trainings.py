"""Long runs of `gpt2 train` side by side: what each learnt, in what time, beside what others have published.

Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.format import DASH, duration, gib, loss, number, percent
from bench.records.record import RecordError
from bench.report.table import Sheet
from gpt2.hellaswag import PUBLISHED
from gpt2.metrics import Event, MetricsError, read
from gpt2.toggles import Toggles
from gpt2.workload import PRESETS


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What somebody else says of a training; None is what they do not say."""

    source: str
    model: str
    corpus: str
    hardware: str
    products: str | None = None
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    tps: int | None = None
    mfu: float | None = None
    val_loss: float | None = None

    def like(self, runs: Sequence[LongRun]) -> bool:
        """Whether one of these trains the same model on the same corpus."""
        return any((self.model, self.corpus) == (run.workload["model"], run.corpus) for run in runs)


POST = "jjschwartz-2024"
PUBLISHED_RUNS = (
    PublishedRun(
        **{"source": POST, "model": "gpt2", "corpus": "tinyshakespeare", "hardware": "M3 laptop CPU"},
        **{"products": "float32", "steps": 1000, "tokens": 1_024_000, "minutes": 26, "tps": 645},
    ),
    PublishedRun(
        **{"source": POST, "model": "gpt2", "corpus": "fineweb-edu", "hardware": "8 x H100 SXM"},
        **{"products": "bfloat16", "steps": 18_865, "tokens": 10**10, "minutes": 59.5, "tps": 3_000_000},
    ),
    PublishedRun(
        **{"source": POST, "model": "gpt2-xl", "corpus": "fineweb-edu", "hardware": "8 x H100 SXM"},
        **{"products": "bfloat16", "steps": 9_500, "tokens": 10**10, "minutes": 582, "tps": 320_000, "mfu": 0.4194},
    ),
    PublishedRun(
        **{"source": "high-performance-gpt2-cuda", "model": "gpt2", "corpus": "fineweb", "hardware": "8 x A100 40GB"},
        **{"products": "bfloat16", "steps": 18_865, "tokens": 10**10, "minutes": 107, "tps": 1_590_000},
        val_loss=3.2,
    ),
    PublishedRun(source="gpt2-jax-tpu", model="gpt2", corpus="openwebtext", hardware="TPU v3-8", minutes=420),
    PublishedRun(source="gpt2-jax-tpu", model="gpt2", corpus="openwebtext", hardware="TPU v6e", minutes=82),
)

SMOOTHED = 20
"""Steps that a training loss is the mean of: that of one step wanders with its batch."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_or_null(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


NEEDED: dict[str, dict[str, Callable[[Any], bool]]] = {
    "step": {
        **dict.fromkeys(("tokens", "seconds", "tps", "wait_seconds"), _is_number),
        **dict.fromkeys(("loss", "mfu", "peak_memory_bytes", "elapsed_seconds"), _is_number_or_null),
    },
    "val": {"loss": _is_number_or_null, "corpus": _is_text},
    "hellaswag": {"style": _is_text, "acc": _is_number, "acc_norm": _is_number, "examples": _is_number},
    "sample": {"prompt": _is_text, "text": _is_text},
    "leg": {"devices": _is_number, "chip": _is_text},
}
"""What an event must say to be shown."""


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """What a run's folder says."""

    name: str
    folder: Path
    run: dict[str, Any]
    """Its configuration."""
    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def workload(self) -> dict[str, Any]:
        return self.run["workload"]

    @property
    def corpus(self) -> str:
        """What it was in fact trained on: --data may name another than the configuration."""
        told = [leg.values["corpus"] for leg in self.of("leg") if leg.values.get("corpus")]
        return told[-1] if told else self.workload["data"]

    @property
    def products(self) -> str:
        """Number format of its matrix products."""
        known = {each.name for each in fields(Toggles)}
        toggles = {name: value for name, value in self.run.get("toggles", {}).items() if name in known}
        return Toggles(**toggles).product_format()

    @property
    def losses(self) -> list[float]:
        """Not a number where a step's was not."""
        return [loss_of(event) for event in self.of("step")]

    @property
    def seconds(self) -> float:
        """From the start of each leg to its end or the checkpoint that the next went on from, added up."""
        return max((event.values.get("elapsed_seconds") or 0.0 for event in self.events), default=0.0)

    @property
    def tps(self) -> float | None:
        """Median over steps: evaluations, checkpoints and compilation are between them, or in few of them."""
        steps = self.of("step")
        return median(event.values["tps"] for event in steps) if steps else None


def loss_of(event: Event) -> float:
    """Not a number where a file, which is JSON, has null for it."""
    return math.nan if event.values["loss"] is None else event.values["loss"]


def load(folders: Sequence[Path]) -> list[LongRun]:
    """The runs in these folders. Raises RecordError, in one line, where one holds none or is damaged."""
    found = []
    for folder in folders:
        try:
            run = json.loads((folder / "run.json").read_text(encoding="utf-8-sig"))["run"]
            events = tuple(read(folder))
            _check(events, folder / "metrics.jsonl")
            PRESETS[run["workload"]["model"]]
            name, _ = str(run["name"]), int(run["steps"])
        except MetricsError as error:
            raise RecordError(str(error)) from None
        except OSError as error:
            raise RecordError(f"{folder} holds no run of gpt2 train ({error.strerror}: {error.filename})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{folder / 'run.json'} is damaged ({type(error).__name__}: {error})") from None
        found.append(LongRun(name=name, folder=folder, run=run, events=events))
    return told_apart(found)


def _check(events: Sequence[Event], path: Path) -> None:
    """Raises RecordError where an event does not say what is to be shown of it."""
    for event in events:
        for key, is_right in NEEDED.get(event.kind, {}).items():
            if not is_right(event.values.get(key)):
                raise RecordError(
                    f"{path} is damaged: {key!r} of the {event.kind!r} at step {event.step} is missing, or not what "
                    "it should be"
                )


def told_apart(runs: Sequence[LongRun]) -> list[LongRun]:
    """By their folders, where two have one name."""
    alike = len({run.name for run in runs}) < len(runs)
    return [replace(run, name=str(run.folder)) if alike else run for run in runs]


def sheets(runs: Sequence[LongRun]) -> list[Sheet]:
    """What they learnt, HellaSwag beside what is published, and how they go on with a prompt."""
    parts = [_learnt(runs)]
    parts += [sheet for style in ("completion", "harness") if (sheet := _hellaswag(runs, style))]
    if sheet := _samples(runs):
        parts.append(sheet)
    return parts


def _learnt(runs: Sequence[LongRun]) -> Sheet:
    head = ("Run", "Model", "Corpus", "On", "Products", "Steps", "Tokens", "Time", "TPS, median", "MFU, median")
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
                run.corpus,
                "; ".join(sorted(where)) or DASH,
                run.products,
                f"{len(steps):,} of {run.run['steps']:,}",
                f"{steps[-1].values['tokens']:,}" if steps else DASH,
                duration(run.seconds) if steps else DASH,
                number(run.tps) if run.tps else DASH,
                percent(median(mfu)) if mfu else DASH,
                gib(max(memory)) if memory else DASH,
                percent(waited / busy) if busy else DASH,
                loss(fmean(run.losses[-SMOOTHED:])) if steps else DASH,
                f"{loss(loss_of(vals[-1]))} ({vals[-1].values['corpus']})" if vals else DASH,
                _lowest(vals),
            ]
        )
    published = [_as_row(each) for each in PUBLISHED_RUNS if each.like(runs)]
    notes = [
        f"Losses in nats per token; the training loss is the mean of the last {SMOOTHED} steps. Losses on unlike "
        "corpora do not compare. Loader: the share of the steps' time that was spent waiting for batches.",
        "Time: of all legs, evaluations, checkpoints and compilation included, which tokens per second are without.",
    ]
    if made := [line for run in runs if (line := _made_by(run))]:
        notes.append(f"Code: {'; '.join(made)}.")
    if published:
        notes.append(
            "Published: what others say of a training of the same model on the same corpus; not measured here."
        )
    words = frozenset({0, 1, 2, 3, 4})
    rows += published
    return Sheet(title="Long runs", head=head, rows=rows, words=words, notes=notes, beneath=len(published))


def _lowest(vals: Sequence[Event]) -> str:
    """The lowest loss of those on the same tokens as the last one: others do not compare."""
    if not vals:
        return DASH
    last = vals[-1].values
    alike = [
        loss_of(event)
        for event in vals
        if all(
            event.values.get(key) in (last.get(key), None) or last.get(key) is None  # older versions kept no sha256
            for key in ("corpus", "sha256", "tokens")
        )
    ]
    return loss(min(alike, key=lambda each: (math.isnan(each), each)))


def _made_by(run: LongRun) -> str | None:
    """The commits that a run's legs were trained by; None where they do not tell."""
    legs = [leg.values for leg in run.of("leg") if leg.values.get("commit")]
    commits = [f"{leg['commit'][:12]}{', changed since' if leg.get('changed') else ''}" for leg in legs]
    return f"{run.name} by {' and '.join(dict.fromkeys(commits))}" if commits else None


def _as_row(run: PublishedRun) -> list[str]:
    return [
        f"published: {run.source}",
        run.model,
        run.corpus,
        run.hardware,
        run.products or DASH,
        f"{run.steps:,}" if run.steps else DASH,
        f"{run.tokens:,}" if run.tokens else DASH,
        duration(60 * run.minutes) if run.minutes else DASH,
        number(run.tps) if run.tps else DASH,
        percent(run.mfu) if run.mfu else DASH,
        *(DASH, DASH, DASH),
        f"{run.val_loss} ({run.corpus})" if run.val_loss else DASH,
        DASH,
    ]


def _hellaswag(runs: Sequence[LongRun], style: str) -> Sheet | None:
    """All of one style: the other's figures stand in a table of their own."""
    rows = []
    for run in runs:
        scores = [event for event in run.of("hellaswag") if event.values["style"] == style]
        if scores:
            last = scores[-1].values
            ours = [run.name, run.workload["model"], run.corpus, f"{scores[-1].step:,}"]
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


def reference_lines(runs: Sequence[LongRun], style: str) -> list[tuple[str, float, float]]:
    """Models and the lowest and highest acc_norm published of OpenAI's weights: of these runs' sizes, and gpt2-xl."""
    models = dict.fromkeys([*(run.workload["model"] for run in runs), "gpt2-xl"])
    lines = []
    for model in models:
        webtext = [each for each in PUBLISHED if (each.corpus, each.style, each.model) == ("webtext", style, model)]
        if shares := [each.acc_norm for each in webtext if each.acc_norm is not None]:
            lines.append((model, min(shares), max(shares)))
    return lines


def same_validation(runs: Sequence[LongRun]) -> bool:
    """Whether their validation losses are of one corpus, and so compare."""
    return len({event.values["corpus"] for run in runs for event in run.of("val")}) <= 1

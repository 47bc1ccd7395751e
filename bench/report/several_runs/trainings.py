"""Long runs of `gpt2 train` side by side, beside published ones."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import NoneType
from typing import Any

from bench.format import duration, gib, loss, number, percent
from bench.records.record import RecordError
from bench.report.several_runs.published_scores import PUBLISHED
from bench.report.table import Column, Table
from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS
from gpt2.pretrain.metrics import Event, MetricsError, read


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """What a source states of a training; None is what it does not state."""

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
        """Whether one of these runs trains the same model on the same corpus."""
        return any((self.model, self.corpus) == (run.model, run.corpus) for run in runs)


POST = partial(PublishedRun, source="jjschwartz-2024")
ON_H100S = partial(POST, corpus="fineweb-edu", hardware="8 x H100 SXM", products="bfloat16", tokens=10**10)
PUBLISHED_RUNS = (
    POST(
        model="gpt2",
        corpus="tinyshakespeare",
        hardware="M3 laptop CPU",
        products="float32",
        steps=1000,
        tokens=1_024_000,
        minutes=26,
        tps=645,
    ),
    ON_H100S(model="gpt2", steps=18_865, minutes=59.5, tps=3_000_000),
    ON_H100S(model="gpt2-xl", steps=9_500, minutes=582, tps=320_000, mfu=0.4194),
    PublishedRun(
        source="high-performance-gpt2-cuda",
        model="gpt2",
        corpus="fineweb",
        hardware="8 x A100 40GB",
        products="bfloat16",
        steps=18_865,
        tokens=10**10,
        minutes=107,
        tps=1_590_000,
        val_loss=3.2,
    ),
    PublishedRun(source="gpt2-jax-tpu", model="gpt2", corpus="openwebtext", hardware="TPU v3-8", minutes=420),
    PublishedRun(source="gpt2-jax-tpu", model="gpt2", corpus="openwebtext", hardware="TPU v6e", minutes=82),
)

RUN_FILE = "run.json"
SMOOTHED = 20
"""Steps over which a training loss is averaged: that of one step varies with its batch."""


NUMBER, TEXT = (int, float), (str,)
NUMBER_OR_NULL, TEXT_OR_NULL = (*NUMBER, NoneType), (*TEXT, NoneType)
NEEDED: dict[str, dict[str, tuple[type, ...]]] = {
    "step": {
        **dict.fromkeys(("tokens", "seconds", "tps", "wait_seconds"), NUMBER),
        **dict.fromkeys(("loss", "mfu", "peak_memory_bytes"), NUMBER_OR_NULL),
    },
    "val": {"loss": NUMBER_OR_NULL, "corpus": TEXT},
    "hellaswag": {"style": TEXT, "acc": NUMBER, "acc_norm": NUMBER, "examples": NUMBER},
    "sample": {"prompt": TEXT, "text": TEXT},
    "leg": {"devices": NUMBER, "chip": TEXT, "commit": TEXT_OR_NULL, "begun_from": TEXT_OR_NULL},
}
"""For each kind of event the values that are shown, and what they must be."""


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """The contents of a run's folder."""

    name: str
    folder: Path
    run: dict[str, Any]
    """Configuration of the run."""
    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def model(self) -> str:
        return self.run["workload"]["model"]

    @property
    def corpus(self) -> str:
        """Corpus that it was trained on: --data may name another than the configuration."""
        corpora = [leg.values["corpus"] for leg in self.of("leg") if leg.values.get("corpus")]
        return corpora[-1] if corpora else self.run["workload"]["data"]

    @property
    def products(self) -> str:
        """Number format of its matmuls."""
        known = {toggle.name for toggle in fields(Toggles)}
        toggles = {name: value for name, value in self.run.get("toggles", {}).items() if name in known}
        return Toggles(**toggles).product_format()

    @property
    def losses(self) -> list[float]:
        """Training losses; NaN where a step's was not a number."""
        return [loss_of(event) for event in self.of("step")]

    @property
    def seconds(self) -> float:
        """Time of all legs, each up to its end or to the checkpoint that the next went on from."""
        return max((event.values.get("elapsed_seconds") or 0.0 for event in self.events), default=0.0)

    @property
    def tps(self) -> float | None:
        """Median over steps, almost free of evaluations, checkpoints and compilation."""
        steps = self.of("step")
        return median(event.values["tps"] for event in steps) if steps else None


def loss_of(event: Event) -> float:
    """Loss of an event; NaN where a file, which is JSON, has null."""
    loss = event.values.get("loss")
    return math.nan if loss is None else loss


def runs_in(folder: Path) -> list[Path]:
    """The folder itself where it is of a run, else those of the runs in it, if any, sorted by name."""
    if (folder / RUN_FILE).exists():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"*/{RUN_FILE}")) or [folder]


def load(folders: Sequence[Path], left_out: list[str] | None = None) -> list[LongRun]:
    """Load the runs in these folders, each once; runs of one name are called by their folders.

    left_out: takes a line for each folder that holds none or is damaged. Without it, that raises RecordError.
    """
    own: dict[Path, Path] = {}
    for folder in folders:
        own.setdefault(folder.resolve(), folder)
    runs: list[LongRun] = []
    for folder in own.values():
        try:
            runs.append(_load(folder))
        except RecordError as error:
            if left_out is None:
                raise
            left_out.append(f"{error}; left out")
    alike = len({run.name for run in runs}) < len(runs)
    return [replace(run, name=str(run.folder)) if alike else run for run in runs]


def _load(folder: Path) -> LongRun:
    try:
        config = json.loads((folder / RUN_FILE).read_text(encoding="utf-8-sig"))["run"]
        events = tuple(read(folder))
        _check(events, folder / "metrics.jsonl")
        PRESETS[config["workload"]["model"]]
        name, _ = str(config["name"]), int(config["steps"])
        run = LongRun(name=name, folder=folder, run=config, events=events)
        run.products  # noqa: B018, which its toggles must have
    except MetricsError as error:
        raise RecordError(str(error)) from None
    except OSError as error:
        missing = f"{error.strerror}: {error.filename}"
        raise RecordError(f"{folder} holds no run of gpt2 train ({missing})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{folder / RUN_FILE} is damaged ({type(error).__name__}: {error})") from None
    return run


def _check(events: Sequence[Event], path: Path) -> None:
    """Raise RecordError where an event lacks a value that is shown."""
    for event in events:
        for key, types in {"elapsed_seconds": NUMBER_OR_NULL, **NEEDED.get(event.kind, {})}.items():
            value = event.values.get(key)
            if not isinstance(value, types) or isinstance(value, bool):
                where = f"{key!r} of the {event.kind!r} at step {event.step}"
                raise RecordError(f"{path} is damaged: {where} is missing, or not what it should be")


def tables(runs: Sequence[LongRun]) -> list[Table]:
    """What they learnt, HellaSwag beside published scores, and how they continue a prompt."""
    optional = [_learnt(runs), _hellaswag(runs, "completion"), _hellaswag(runs, "harness"), _samples(runs)]
    return [table for table in optional if table]


def _learnt(runs: Sequence[LongRun]) -> Table:
    published = [run for run in PUBLISHED_RUNS if run.like(runs)]
    notes = [
        f"Losses in nats per token; the training loss is the mean of the last {SMOOTHED} steps. Losses on "
        "unlike corpora do not compare. Loader: the share of the steps' time that was spent waiting for "
        "batches.",
        "Time: of all legs, evaluations, checkpoints and compilation included, which tokens per second are "
        "without.",
    ]
    for run in runs:
        if begun := {str(leg.values["begun_from"]) for leg in run.of("leg") if leg.values.get("begun_from")}:
            notes.append(f"{run.name} began with the weights of {' and '.join(sorted(begun))}.")
    if made := [line for run in runs if (line := _made_by(run))]:
        notes.append(f"Code: {'; '.join(made)}.")
    if published:
        notes.append(
            "Published: what others say of a training of the same model on the same corpus; not measured "
            "here."
        )
    return Table(title="Long runs", columns=LEARNT, rows=runs, beneath=published, notes=notes)


def _where(run: LongRun) -> str | None:
    hardware = {f"{leg.values['devices']} x {leg.values['chip']}" for leg in run.of("leg")}
    return "; ".join(sorted(hardware)) or None


def _of_steps(run: LongRun, key: str) -> list[float]:
    """Values of a key in all steps that have it."""
    return [value for event in run.of("step") if (value := event.values.get(key)) is not None]


def _waiting(run: LongRun) -> float | None:
    busy = sum(_of_steps(run, "seconds"))
    return sum(_of_steps(run, "wait_seconds")) / busy if busy else None


def _training_loss(run: LongRun) -> float | None:
    return fmean(run.losses[-SMOOTHED:]) if run.losses else None


def _validation_loss(run: LongRun) -> str | None:
    if not (vals := run.of("val")):
        return None
    last, steps = vals[-1], run.of("step")
    earlier = f", step {last.step:,}" if steps and last.step < steps[-1].step else ""
    return f"{loss(loss_of(last))} ({last.values['corpus']}{earlier})"


LEARNT: list[Column[LongRun]] = [
    Column("Run", lambda run: run.name, beneath=lambda run: f"published: {run.source}", words=True),
    Column("Model", lambda run: run.model, beneath=lambda run: run.model, words=True),
    Column("Corpus", lambda run: run.corpus, beneath=lambda run: run.corpus, words=True),
    Column("On", _where, beneath=lambda run: run.hardware, words=True),
    Column("Matmuls in", lambda run: run.products, beneath=lambda run: run.products, words=True),
    Column(
        "Steps",
        lambda run: f"{len(run.of('step')):,} of {run.run['steps']:,}",
        "{:,}".format,
        beneath=lambda run: run.steps,
    ),
    Column(
        "Tokens",
        lambda run: next((event.values["tokens"] for event in reversed(run.of("step"))), None),
        "{:,}".format,
        beneath=lambda run: run.tokens,
    ),
    Column(
        "Time",
        lambda run: run.seconds if run.of("step") else None,
        duration,
        beneath=lambda run: 60 * run.minutes if run.minutes else None,
    ),
    Column("TPS, median", lambda run: run.tps or None, number, beneath=lambda run: run.tps),
    Column(
        "MFU, median",
        lambda run: median(mfu) if (mfu := _of_steps(run, "mfu")) else None,
        percent,
        beneath=lambda run: run.mfu,
    ),
    Column("Peak memory (GiB)", lambda run: max(_of_steps(run, "peak_memory_bytes"), default=None), gib),
    Column("Loader", _waiting, percent),
    Column("Training loss", _training_loss, loss),
    Column(
        "Validation loss",
        _validation_loss,
        beneath=lambda run: f"{run.val_loss} ({run.corpus})" if run.val_loss else None,
    ),
    Column("Lowest", lambda run: _lowest(run.of("val")), loss),
]


def _lowest(vals: Sequence[Event]) -> float | None:
    """Lowest loss of those on the same tokens as the last one: others do not compare."""
    if not vals:
        return None
    last = vals[-1].values

    def same(event: Event, key: str) -> bool:
        # Older versions kept no sha256.
        return None in (event.values.get(key), last.get(key)) or event.values[key] == last[key]

    keys = ("corpus", "sha256", "tokens")
    losses = [loss_of(event) for event in vals if all(same(event, key) for key in keys)]
    return min(losses, key=lambda loss: (math.isnan(loss), loss))


def _made_by(run: LongRun) -> str | None:
    """Commits by which a run's legs were trained; None where they do not tell."""
    legs = [leg.values for leg in run.of("leg") if leg.values.get("commit")]
    commits = [f"{leg['commit'][:12]}{', changed since' if leg.get('changed') else ''}" for leg in legs]
    return f"{run.name} by {' and '.join(dict.fromkeys(commits))}" if commits else None


def _hellaswag(runs: Sequence[LongRun], style: str) -> Table | None:
    """Scores of one style: those of the other do not compare."""
    last = {
        run.name: event for run in runs for event in run.of("hellaswag") if event.values["style"] == style
    }
    rows = [(run, last[run.name]) for run in runs if run.name in last]
    models = {run.model for run in runs}
    columns: list[Column[tuple[LongRun, Event]]] = [
        Column("Run", lambda row: row[0].name, beneath=lambda row: f"{row.model} ({row.source})", words=True),
        Column("Model", lambda row: row[0].model, beneath=lambda row: row.model, words=True),
        Column("Corpus", lambda row: row[0].corpus, beneath=lambda row: row.corpus, words=True),
        Column("Step", lambda row: row[1].step, "{:,}".format),
        Column("acc", lambda row: row[1].values["acc"], "{:.4f}".format, beneath=lambda row: row.acc),
        Column(
            "acc_norm",
            lambda row: row[1].values["acc_norm"],
            "{:.4f}".format,
            beneath=lambda row: row.acc_norm,
        ),
        Column(
            "Source",
            lambda row: f"{row[1].values['examples']:,} examples",
            beneath=lambda row: f"published: {row.source}{', ' + row.note if row.note else ''}",
            words=True,
        ),
    ]
    table = Table(
        title=f"HellaSwag, {style} style",
        columns=columns,
        rows=rows,
        beneath=[row for row in PUBLISHED if row.style == style and row.model in models],
        notes=["Of the two styles (docs/training.md) no figures compare; chance is 0.25."],
    )
    return table if rows else None


def _samples(runs: Sequence[LongRun]) -> Table | None:
    rows = [(run.name, event) for run in runs for event in run.of("sample")]
    columns: list[Column[tuple[str, Event]]] = [
        Column("Run", lambda row: row[0], words=True),
        Column("Step", lambda row: row[1].step, "{:,}".format),
        Column("Prompt", lambda row: row[1].values["prompt"], words=True),
        Column("Goes on", lambda row: row[1].values["text"], words=True),
    ]
    return Table(title="Samples", columns=columns, rows=rows) if rows else None


def reference_lines(runs: Sequence[LongRun], style: str) -> list[tuple[str, float, float]]:
    """Model, lowest and highest published acc_norm of OpenAI's weights of the runs' sizes and gpt2-xl."""
    models = dict.fromkeys([*(run.model for run in runs), "gpt2-xl"])
    lines = []
    for model in models:
        scores = [
            score
            for score in PUBLISHED
            if (score.corpus, score.style, score.model) == ("webtext", style, model)
        ]
        if shares := [score.acc_norm for score in scores if score.acc_norm is not None]:
            lines.append((model, min(shares), max(shares)))
    return lines


def same_validation(runs: Sequence[LongRun]) -> bool:
    """Whether the validation losses are of one corpus, and so compare."""
    return len({event.values["corpus"] for run in runs for event in run.of("val")}) <= 1

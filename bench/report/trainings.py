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

from bench.format import duration, gib, loss, number, percent
from bench.records.record import RecordError
from bench.report.table import Column, Table
from gpt2.config.toggles import Toggles
from gpt2.config.workload import PRESETS
from gpt2.evals.hellaswag import PUBLISHED
from gpt2.pretrain.metrics import Event, MetricsError, read


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
        **{
            "products": "bfloat16",
            "steps": 9_500,
            "tokens": 10**10,
            "minutes": 582,
            "tps": 320_000,
            "mfu": 0.4194,
        },
    ),
    PublishedRun(
        **{
            "source": "high-performance-gpt2-cuda",
            "model": "gpt2",
            "corpus": "fineweb",
            "hardware": "8 x A100 40GB",
        },
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
    """The runs in these folders, each once. Raises RecordError where one holds none or is damaged."""
    found = []
    own = {folder.resolve(): folder for folder in reversed(folders)}
    for folder in dict.fromkeys(own[folder.resolve()] for folder in folders):
        try:
            run = json.loads((folder / "run.json").read_text(encoding="utf-8-sig"))["run"]
            events = tuple(read(folder))
            _check(events, folder / "metrics.jsonl")
            PRESETS[run["workload"]["model"]]
            name, _ = str(run["name"]), int(run["steps"])
        except MetricsError as error:
            raise RecordError(str(error)) from None
        except OSError as error:
            raise RecordError(
                f"{folder} holds no run of gpt2 train ({error.strerror}: {error.filename})"
            ) from None
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
                    f"{path} is damaged: {key!r} of the {event.kind!r} at step {event.step} is missing, or "
                    "not what it should be"
                )


def told_apart(runs: Sequence[LongRun]) -> list[LongRun]:
    """By their folders, where two have one name."""
    alike = len({run.name for run in runs}) < len(runs)
    return [replace(run, name=str(run.folder)) if alike else run for run in runs]


def tables(runs: Sequence[LongRun]) -> list[Table]:
    """What they learnt, HellaSwag beside what is published, and how they go on with a prompt."""
    found = [_learnt(runs), _hellaswag(runs, "completion"), _hellaswag(runs, "harness"), _samples(runs)]
    return [table for table in found if table]


def _learnt(runs: Sequence[LongRun]) -> Table:
    published = [each for each in PUBLISHED_RUNS if each.like(runs)]
    notes = [
        f"Losses in nats per token; the training loss is the mean of the last {SMOOTHED} steps. Losses on "
        "unlike corpora do not compare. Loader: the share of the steps' time that was spent waiting for "
        "batches.",
        "Time: of all legs, evaluations, checkpoints and compilation included, which tokens per second are "
        "without.",
    ]
    if made := [line for run in runs if (line := _made_by(run))]:
        notes.append(f"Code: {'; '.join(made)}.")
    if published:
        notes.append(
            "Published: what others say of a training of the same model on the same corpus; not measured "
            "here."
        )
    return Table(title="Long runs", columns=LEARNT, rows=runs, beneath=published, notes=notes)


def _where(run: LongRun) -> str | None:
    return (
        "; ".join(sorted({f"{leg.values['devices']} x {leg.values['chip']}" for leg in run.of("leg")}))
        or None
    )


def _of_steps(run: LongRun, key: str) -> list[float]:
    """What its steps say of themselves, as far as they do."""
    return [value for event in run.of("step") if (value := event.values.get(key)) is not None]


def _waiting(run: LongRun) -> float | None:
    busy = sum(_of_steps(run, "seconds"))
    return sum(_of_steps(run, "wait_seconds")) / busy if busy else None


def _training_loss(run: LongRun) -> float | None:
    return fmean(run.losses[-SMOOTHED:]) if run.losses else None


def _validation_loss(run: LongRun) -> str | None:
    vals = run.of("val")
    return f"{loss(loss_of(vals[-1]))} ({vals[-1].values['corpus']})" if vals else None


LEARNT: list[Column[LongRun]] = [
    Column("Run", lambda run: run.name, beneath=lambda run: f"published: {run.source}", words=True),
    Column("Model", lambda run: run.workload["model"], beneath=lambda run: run.model, words=True),
    Column("Corpus", lambda run: run.corpus, beneath=lambda run: run.corpus, words=True),
    Column("On", _where, beneath=lambda run: run.hardware, words=True),
    Column("Products", lambda run: run.products, beneath=lambda run: run.products, words=True),
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
    """The lowest loss of those on the same tokens as the last one: others do not compare."""
    if not vals:
        return None
    last = vals[-1].values
    alike = [
        loss_of(event)
        for event in vals
        if all(
            event.values.get(key) in (last.get(key), None)
            or last.get(key) is None  # older versions kept no sha256
            for key in ("corpus", "sha256", "tokens")
        )
    ]
    return min(alike, key=lambda each: (math.isnan(each), each))


def _made_by(run: LongRun) -> str | None:
    """The commits that a run's legs were trained by; None where they do not tell."""
    legs = [leg.values for leg in run.of("leg") if leg.values.get("commit")]
    commits = [f"{leg['commit'][:12]}{', changed since' if leg.get('changed') else ''}" for leg in legs]
    return f"{run.name} by {' and '.join(dict.fromkeys(commits))}" if commits else None


def _hellaswag(runs: Sequence[LongRun], style: str) -> Table | None:
    """All of one style: the other's figures stand in a table of their own."""
    last = {
        run.name: event for run in runs for event in run.of("hellaswag") if event.values["style"] == style
    }
    rows = [(run, last[run.name]) for run in runs if run.name in last]
    models = {run.workload["model"] for run in runs}
    columns: list[Column[tuple[LongRun, Event]]] = [
        Column(
            "Run", lambda each: each[0].name, beneath=lambda each: f"{each.model} ({each.source})", words=True
        ),
        Column("Model", lambda each: each[0].workload["model"], beneath=lambda each: each.model, words=True),
        Column("Corpus", lambda each: each[0].corpus, beneath=lambda each: each.corpus, words=True),
        Column("Step", lambda each: each[1].step, "{:,}".format),
        Column("acc", lambda each: each[1].values["acc"], "{:.4f}".format, beneath=lambda each: each.acc),
        Column(
            "acc_norm",
            lambda each: each[1].values["acc_norm"],
            "{:.4f}".format,
            beneath=lambda each: each.acc_norm,
        ),
        Column(
            "Source",
            lambda each: f"{each[1].values['examples']:,} examples",
            beneath=lambda each: f"published: {each.source}{', ' + each.note if each.note else ''}",
            words=True,
        ),
    ]
    table = Table(
        title=f"HellaSwag, {style} style",
        columns=columns,
        rows=rows,
        beneath=[each for each in PUBLISHED if each.style == style and each.model in models],
        notes=["Of the two styles (docs/training.md) no figures compare; chance is 0.25."],
    )
    return table if rows else None


def _samples(runs: Sequence[LongRun]) -> Table | None:
    rows = [(run.name, event) for run in runs for event in run.of("sample")]
    columns: list[Column[tuple[str, Event]]] = [
        Column("Run", lambda each: each[0], words=True),
        Column("Step", lambda each: each[1].step, "{:,}".format),
        Column("Prompt", lambda each: each[1].values["prompt"], words=True),
        Column("Goes on", lambda each: each[1].values["text"], words=True),
    ]
    return Table(title="Samples", columns=columns, rows=rows) if rows else None


def reference_lines(runs: Sequence[LongRun], style: str) -> list[tuple[str, float, float]]:
    """Models and the lowest and highest acc_norm published of OpenAI's weights: of these runs' sizes, and
    gpt2-xl.
    """
    models = dict.fromkeys([*(run.workload["model"] for run in runs), "gpt2-xl"])
    lines = []
    for model in models:
        webtext = [
            each for each in PUBLISHED if (each.corpus, each.style, each.model) == ("webtext", style, model)
        ]
        if shares := [each.acc_norm for each in webtext if each.acc_norm is not None]:
            lines.append((model, min(shares), max(shares)))
    return lines


def same_validation(runs: Sequence[LongRun]) -> bool:
    """Whether their validation losses are of one corpus, and so compare."""
    return len({event.values["corpus"] for run in runs for event in run.of("val")}) <= 1

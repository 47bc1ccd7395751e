"""HellaSwag: how often a model ranks the right one of four endings first. Imports no torch.

score = evaluate(model, load(), style="completion", device=device, autocast=training.autocast, batch_size=32)

Two styles of scoring are in use and give different figures for the same weights, so a figure is always
reported with its style. `completion` is the style of llm.c, build-nanogpt and the well-known posts: texts are
taken as they are, and acc_norm divides by the ending's tokens. `harness` is that of EleutherAI's
lm-evaluation-harness, task hellaswag, version 1.0: texts are cleaned and begin with the activity, and
acc_norm divides by the ending's characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from gpt2 import text
from gpt2.errors import GPT2Error
from gpt2.files.cache import DataError, at_hand, cache_dir, download
from gpt2.files.shard_format import TOKEN
from gpt2.files.strict_json import json_lines

if TYPE_CHECKING:
    from gpt2.device import Device
    from gpt2.model.model import GPT2

Style = Literal["completion", "harness"]

ENDINGS = 4
NAME = "hellaswag_val.jsonl"
URL = f"https://raw.githubusercontent.com/rowanz/hellaswag/master/data/{NAME}"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"  # pinned by several projects
END_OF_TEXT = 50256


class ScoreError(GPT2Error):
    """A model that cannot be scored; the message says why and what to do."""


def _no_boolean(label: object) -> object:
    if isinstance(label, bool):  # which Python takes for 0 or 1
        raise ValueError("should be a number from 0 to 3")
    return label


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question: a context and four endings, one of them right, with the original files' fields."""

    activity_label: str
    """Subject of the text, such as "Roof shingle removal"."""
    ctx: Annotated[str, Field(min_length=1)]
    """The whole context."""
    ctx_a: str
    """The complete sentences of the context."""
    ctx_b: str
    """The beginning of the sentence that the endings complete; may be empty."""
    endings: tuple[str, str, str, str]
    label: Annotated[int, BeforeValidator(_no_boolean), Field(ge=0, lt=ENDINGS)]
    """Index of the right ending."""


def load(path: Path | None = None) -> list[Example]:
    """Read the examples of a JSON Lines file in the original format.

    Without a path, hellaswag_val.jsonl (10,042 examples) is taken from $GPT2_DATA_DIR or the cache, or
    downloaded. Raises DataError where it is not found, or a line is not an example.
    """
    source = _find() if path is None else path
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DataError(f"HellaSwag: cannot read {source} ({error.strerror})") from None
    reader = TypeAdapter(Example)
    examples = [_parse(reader, line, f"{source}:{number}") for number, line in json_lines(content)]
    if not examples:
        raise DataError(f"{source} holds no examples; it should be HellaSwag's {NAME}")
    return examples


def _parse(reader: TypeAdapter[Example], line: bytes, where: str) -> Example:
    try:
        return reader.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        advice = f"each line should be one example, as in HellaSwag's {NAME}"
        raise DataError(f"{where}: {what}; {advice}") from None


def _find() -> Path:
    places = f"$GPT2_DATA_DIR or {cache_dir() / 'corpora'}"
    ways = f"put {NAME} into {places}, or give its place to gpt2 eval (--hellaswag-file)"
    return at_hand(NAME) or download("HellaSwag", URL, NAME, SHA256, ways)


@dataclass(frozen=True, eq=False)
class Choice:
    """The tokens of a context with one of its endings."""

    tokens: np.ndarray
    """Context and ending, uint16."""
    scored: int
    """Number of tokens at the end that belong to the ending."""
    length: int
    """Divisor of the log-probability for acc_norm: the ending's tokens, or its characters."""


@cache  # needed at each evaluation; on a fast GPU tokenising would take about as long as scoring
def choices(example: Example, style: Style) -> tuple[Choice, ...]:
    """Return the four texts of an example in one style. Raises DataError without the vocabulary."""
    return tuple(_completion(example) if style == "completion" else _harness(example))


def _encoded(part: str) -> list[int]:
    return text.encode(part).tolist()


def _completion(example: Example) -> list[Choice]:
    context = _encoded(example.ctx)
    endings = [_encoded(f" {ending}") for ending in example.endings]
    return [Choice(np.array(context + ending, dtype=TOKEN), len(ending), len(ending)) for ending in endings]


def _harness(example: Example) -> list[Choice]:
    query = _cleaned(f"{example.activity_label}: {example.ctx_a} {example.ctx_b.capitalize()}")
    # Trailing spaces of the context are scored with the ending: in this vocabulary a space begins a word.
    context = _encoded(query.rstrip())
    found = []
    for ending in map(_cleaned, example.endings):
        scored = _encoded(f"{query} {ending}")[len(context) :]
        # The first token needs a predecessor; the harness uses <|endoftext|> where there is no context.
        tokens = np.array((context or [END_OF_TEXT]) + scored, dtype=TOKEN)
        found.append(Choice(tokens, len(scored), len(ending)))
    return found


def _cleaned(raw: str) -> str:
    """Remove the bracketed marks of WikiHow as the harness does, which may leave spaces behind."""
    unmarked = re.sub(r"\[.*?\]", "", raw.strip().replace(" [title]", ". "))
    return unmarked.replace("  ", " ")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracies in one style; scores of different styles are not comparable."""

    acc: float
    """Share of examples whose right ending has the highest log-probability."""
    acc_norm: float
    """The same, with the log-probability divided by the ending's length."""
    examples: int
    style: Style

    @property
    def acc_norm_interval(self) -> tuple[float, float]:
        """95 % interval of acc_norm."""
        return wilson(self.acc_norm, self.examples)


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` examples, which is valid for small counts too."""
    z2 = 1.959964**2 / count
    half = math.sqrt(z2 * share * (1 - share) + z2**2 / 4)
    return (share + z2 / 2 - half) / (1 + z2), (share + z2 / 2 + half) / (1 + z2)


def evaluate(
    model: GPT2,
    examples: Sequence[Example],
    *,
    style: Style,
    device: Device,
    autocast: Callable[[], AbstractContextManager[Any]],
    batch_size: int,
    rank: int = 0,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score the model on all examples; returns the same score on every rank.

    autocast: entered around each forward pass (see gpt2.training.stages.precision). batch_size: endings per
    forward pass of this process; where it feeds several devices, a multiple of their number. Each rank takes
    every processes-th example. progress: called with this rank's endings done and in total. Raises DataError
    where an ending does not fit the model's context, ScoreError where the model gives NaN.
    """
    from gpt2.evals.log_likelihood import log_probabilities
    from gpt2.training.distributed import gather

    mine = examples[rank::processes]
    asked = [choices(example, style) for example in mine]
    sums = log_probabilities(
        model,
        [(choice.tokens, choice.scored) for each in asked for choice in each],
        device=device,
        autocast=autocast,
        batch_size=batch_size,
        processes=processes,
        progress=progress,
    ).reshape(-1, ENDINGS)
    lengths = np.array([[choice.length for choice in each] for each in asked]).reshape(-1, ENDINGS)
    with np.errstate(divide="ignore"):  # an ending of marks only is empty once cleaned, and ranks last
        by_length = sums / lengths
    labels = np.array([example.label for example in mine])
    counts = [int(np.sum(each.argmax(1) == labels)) for each in (sums, by_length)]
    counts += [len(mine), int(np.isnan(sums).any(1).sum())]
    right, right_norm, count, lost = np.sum(gather(counts, processes), axis=0).tolist()
    if lost:  # raised on all ranks, so that none waits for another
        raise ScoreError(f"the model gives NaN for {lost} of {count} examples; its weights are not finite")
    return Score(acc=right / count, acc_norm=right_norm / count, examples=count, style=style)

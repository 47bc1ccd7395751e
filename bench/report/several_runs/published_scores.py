"""HellaSwag scores that others have published, with their sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class PublishedScore:
    """A published score; None is a figure that the source does not give."""

    model: str
    """A key of gpt2.config.workload.PRESETS."""
    corpus: str
    """Training corpus; webtext is OpenAI's own, which is not public."""
    style: Literal["completion", "harness"] = "completion"
    acc: float | None
    acc_norm: float | None
    source: str
    url: str
    note: str = ""


LLMC_DEV = "https://github.com/karpathy/llm.c/blob/master/dev"
LLMC: dict[str, Any] = {"corpus": "webtext", "source": "llm.c", "url": f"{LLMC_DEV}/data/hellaswag.py"}
PLOTS: dict[str, Any] = LLMC | {
    "url": f"{LLMC_DEV}/vislog.ipynb",
    "note": "a line in its plots, beside the share that its trainer counts: by the mean loss",
}
POST: dict[str, Any] = {
    "source": "jjschwartz-2024",
    "url": "https://jjschwartz.github.io/blog/scaling-gpt2.html",
}
PUBLISHED = (
    PublishedScore(model="gpt2", acc=0.2859, acc_norm=0.2955, **LLMC),
    PublishedScore(model="gpt2-xl", acc=0.3842, acc_norm=0.4893, **LLMC),
    PublishedScore(model="gpt2", style="harness", acc=0.2892, acc_norm=0.3114, **LLMC),
    PublishedScore(model="gpt2-xl", style="harness", acc=0.4004, acc_norm=0.5089, **LLMC),
    PublishedScore(model="gpt2", acc=None, acc_norm=0.294463, **PLOTS),
    PublishedScore(model="gpt2-medium", acc=None, acc_norm=0.375224, **PLOTS),
    PublishedScore(model="gpt2-large", acc=None, acc_norm=0.431986, **PLOTS),
    PublishedScore(model="gpt2-xl", acc=None, acc_norm=0.488946, **PLOTS),
    PublishedScore(model="gpt2", corpus="fineweb-edu", acc=0.2886, acc_norm=0.3007, **POST),
    PublishedScore(model="gpt2-xl", corpus="fineweb-edu", acc=0.3450, acc_norm=0.4122, **POST),
    PublishedScore(model="gpt2", corpus="tinystories", acc=0.2669, acc_norm=0.2631, **POST),
    PublishedScore(
        model="gpt2",
        corpus="fineweb",
        acc=None,
        acc_norm=0.310,
        source="high-performance-gpt2-cuda",
        url="",
        note="the source says accuracy; llm.c's trainer, which ran it, counts by the mean loss",
    ),
)
"""Published scores, OpenAI's released weights first; they are the reference lines of the training plots."""

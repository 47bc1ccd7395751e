"""How figures and foreign words are written, in every output alike."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from bench.stats import Estimate
from gpt2.figures import duration, number

DASH = "-"
GIB = 2**30
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def gib(size: int | None) -> str:
    """Bytes, to a hundredth of a GiB."""
    return f"{size / GIB:.2f}" if size is not None else DASH


def training_time(tokens: float, tps: float) -> str:
    """Of so many tokens; of what takes less than ten seconds, three digits: never 0 s."""
    seconds = tokens / tps
    return f"{number(seconds)} s" if seconds < 10 else duration(seconds)


def letter(place: int) -> str:
    """By which tables call a run or a side: A to Z, then AA."""
    return (letter(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def loss(value: float | None) -> str:
    """In nats per token."""
    return DASH if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"


def percent(share: float | None) -> str:
    """Of a whole."""
    if share is None:
        return DASH
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def ratio(estimate: Estimate | None) -> str:
    """How many times as fast."""
    return with_interval(f"{estimate.value:,.2f}x" if estimate else "", estimate)


def with_interval(text: str, estimate: Estimate | None) -> str:
    """A figure as text, and how far it may be off."""
    if estimate is None:
        return DASH
    if estimate.half_width is None:
        return text
    # A wide interval is symmetric in its logarithm only, which +- would hide.
    if estimate.half_width > 0.5 and estimate.low is not None and estimate.high is not None:
        return f"{text} ({number(estimate.low)} to {number(estimate.high)})"
    return f"{text} ±{estimate.half_width:.1%}"


def floor(delta: float) -> str:
    """How far a noise floor reaches."""
    return (
        f"±{delta:.1%}"
        if delta < 1
        else "none, for the first rung and its repetition differ by more than 100 % themselves"
    )


def plain(text: str) -> str:
    """One line without control characters: no text from a file may steer a terminal."""
    return " ".join("".join(" " if unicodedata.category(c).startswith("C") else c for c in text).split())


def markdown(text: str) -> str:
    """Plain text that Markdown shows as it is, in a table cell too."""
    escaped = re.sub(r"([\\`*_\[\]|#~])", r"\\\1", plain(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def listed(names: Sequence[str]) -> str:
    """Of rungs, one after another; a name that holds commas itself would run into the next."""
    return ("; " if any("," in name for name in names) else ", ").join(map(plain, names))


MARKERS = ("<!-- scoreboard: bench report --update rewrites what follows -->", "<!-- end of scoreboard -->")


def rewrite(path: Path, text: str) -> None:
    """Put `text` between the two markers of a file. Raises ValueError where it has none, OSError."""
    before, start, rest = path.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (start and end):
        raise ValueError(f"{path}: has no lines {MARKERS[0]} and {MARKERS[1]} to write between")
    path.write_text(f"{before}{start}\n\n{text}\n{end}{after}", encoding="utf-8")

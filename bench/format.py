"""How numbers and texts from files are written, in every output alike. Imports no torch."""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.stats import Estimate
from gpt2.format import duration, number

DASH = "-"
GIB = 2**30
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def gib(size: int | None) -> str:
    """Bytes in GiB with two decimals."""
    return f"{size / GIB:.2f}" if size is not None else DASH


def plural(count: int, noun: str, several: str = "") -> str:
    """A count and its noun, such as 1 round or 3 rounds."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def training_time(tokens: float, tps: float) -> str:
    """Time for so many tokens; below ten seconds with three digits, so never 0 s."""
    seconds = tokens / tps
    return f"{number(seconds)} s" if seconds < 10 else duration(seconds)


def letter(place: int) -> str:
    """Name of a run or a side in tables: A to Z, then AA."""
    return (letter(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def loss(value: float | None) -> str:
    """A loss in nats per token."""
    return DASH if value is None else f"{value:.4f}" if math.isfinite(value) else "not finite"


def percent(share: float | None) -> str:
    """A share in percent."""
    if share is None:
        return DASH
    return f"{share:.1%}" if share >= 0.01 else f"{100 * share:.2g}%"


def whole_percent(share: float | None, sign: str = "") -> str:
    """In percent without decimals, but one digit of what is below 1 %; empty where it is absent."""
    if share is None:
        return ""
    percent = 100 * share
    return f"{sign}{percent:.0f} %" if percent >= 1 else f"{sign}{percent:.1g} %"


def speed(estimate: Estimate | None) -> str:
    """Tokens per second with their interval in whole percent; empty where absent."""
    return f"{number(estimate.value)} {spread(estimate)}".strip() if estimate else ""


def spread(estimate: Estimate | None) -> str:
    """An interval, as ±3 % or by its ends; empty where there is none."""
    return _interval(estimate, lambda half_width: whole_percent(half_width, "±")) if estimate else ""


def _interval(estimate: Estimate, narrow: Callable[[float], str]) -> str:
    """An interval as `narrow` writes its half-width, but by its ends where it is wide; empty without one."""
    half_width, low, high = estimate.half_width, estimate.low, estimate.high
    if half_width is None or low is None or high is None:
        return ""
    # A wide interval is symmetric in its logarithm only, which +- would hide.
    return f"({number(low)} to {number(high)})" if half_width > 0.5 else narrow(half_width)


STATUSES = {
    "external": "another trainer",
    "timeout": "timed out",
    "unsupported": "not supported here",
    "parity_failed": "loss differs",
    "inert": "no effect here",
    "recompiled": "compiled again while it was timed",
    "other_maths": "not carried, as it changes the maths",
}
"""What a reader is told of a status or a failed check, where the code of records does not say it itself."""
VERDICTS = {None: "", "same": "no difference", "not replicated": "", "no control": ""}


def status_word(status: str) -> str:
    """What a reader is told of how a rung ended, or of the check that it failed."""
    return STATUSES.get(status, status.replace("_", " "))


def verdict_word(verdict: str | None) -> str:
    """What a reader is told of a difference; empty where nothing can be."""
    return VERDICTS.get(verdict, verdict or "")


def ratio(estimate: Estimate | None) -> str:
    """A speed-up with its interval."""
    return with_interval(times, estimate)


def times(value: float) -> str:
    """A factor, such as 1.25x."""
    return f"{value:,.2f}x" if value >= 0.005 else f"{value:.1g}x"


def bare_ratio(estimate: Estimate | None) -> str:
    """A speed-up without its interval; empty where it is absent."""
    return times(estimate.value) if estimate else ""


def judged(estimate: Estimate | None, verdict: str | None) -> str:
    """A speed-up with its interval and its verdict."""
    word = verdict_word(verdict)
    return f"{ratio(estimate)}, {word}" if estimate and word else ratio(estimate)


def judged_briefly(estimate: Estimate | None, verdict: str | None) -> str:
    """The same with the interval in whole percent; empty where it is absent."""
    return " ".join(filter(None, (bare_ratio(estimate), spread(estimate), verdict_word(verdict))))


def tokens_per_second(estimate: Estimate | None) -> str:
    """Tokens per second with their interval, to a tenth of a percent."""
    return with_interval(number, estimate)


def with_interval(write: Callable[[float], str], estimate: Estimate | None) -> str:
    """The value as `write` writes it, with its interval; a dash where it is absent."""
    return f"{write(estimate.value)} {_interval(estimate, '±{:.1%}'.format)}".rstrip() if estimate else DASH


def floor(delta: float) -> str:
    """A noise floor, such as ±1.5%."""
    if delta < 1:
        return f"±{delta:.1%}"
    return "none, for two equal rungs may differ by more than 100 %"


def plain(text: str) -> str:
    """One line without control characters: no text from a file may steer a terminal."""
    return " ".join("".join(" " if unicodedata.category(c).startswith("C") else c for c in text).split())


def in_shell(path: Path) -> str:
    """A path as it is typed in a command; one that begins with a dash is no option."""
    text = path.as_posix()
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def markdown(text: str) -> str:
    """Plain text that Markdown shows as it is, in a table cell too."""
    escaped = re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", plain(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def listed(names: Sequence[str]) -> str:
    """Names of rungs, separated by semicolons where a name holds a comma or an "and" itself."""
    several = any("," in name or " and " in name for name in names)
    return ("; " if several else ", ").join(map(plain, names))

"""A gate for CI: which change of speed or memory is surely there. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.analysis.compare import Comparison, Pair
from bench.format import DASH
from bench.stats import Estimate

CONDITION = re.compile(r"\s*(tps|memory)\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What is to fail a comparison: a change of speed or memory beyond a bound."""

    metric: str
    below: bool
    bound: float
    """The ratio that is not to be passed."""
    text: str
    """As it was asked."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Of "tps<-5%" or "memory>10%". Raises ValueError."""
        found = CONDITION.fullmatch(text)
        if not found:
            raise ValueError(
                f"--fail-if {text!r}: write tps or memory, < or >, and a change, such as 'tps<-5%'"
            )
        return cls(metric=found[1], below=found[2] == "<", bound=1 + float(found[3]) / 100, text=text.strip())

    def met(self, pair: Pair) -> bool | None:
        """Whether the whole interval lies beyond the bound; None where there is none."""
        change = self.change(pair)
        if change is None or change.low is None or change.high is None:
            return None
        return change.high < self.bound if self.below else change.low > self.bound

    def change(self, pair: Pair) -> Estimate | None:
        """What it is about."""
        return pair.tps if self.metric == "tps" else pair.memory

    @property
    def beyond(self) -> str:
        """Where an interval must lie, in words."""
        return f"{'below' if self.below else 'above'} {self.bound:.4g}x"

    def nearest(self, pairs: Sequence[tuple[str, Pair]]) -> str:
        """Of those that did not meet it, where the interval's far end comes closest."""
        ends = []
        for where, pair in pairs:
            change = self.change(pair)
            if change and change.low is not None and change.high is not None:
                short = change.high / self.bound if self.below else self.bound / change.low
                ends.append((short, f"{where}: {_with_ends(change)}"))
        return min(ends)[1] if ends else ""


def _with_ends(change: Estimate) -> str:
    """For a line in which the interval is to be held to a bound."""
    assert change.low is not None
    assert change.high is not None
    return f"{change.value:.3f}x (95 % interval {change.low:.3f}x to {change.high:.3f}x)"


def _never_fitted(pair: Pair) -> bool:
    """Whether neither side could run the rung, for the same reason: nothing has changed."""
    return pair.first.status == pair.other.status and pair.first.status in ("out_of_memory", "unsupported")


def judge(comparisons: Sequence[Comparison], conditions: Sequence[Condition]) -> tuple[int, list[str]]:
    """The exit code of bench compare, and what came of each condition. Raises ValueError where nothing is
    paired.
    """
    if not any(each.pairs for each in comparisons):
        raise ValueError(
            "no rung of A has a partner that switches on the same, so --fail-if has nothing to judge"
        )
    code, said = 0, []
    judged: list[tuple[str, Pair]] = []
    for each in comparisons:
        for pair in each.pairs:
            where = f"{pair.first.rung}: {each.other.letter} over {each.first.letter}"
            if pair.first.external:
                said.append(f"{where}: another trainer's, which this gate does not judge")
                continue
            if pair.flaw and _never_fitted(pair):
                said.append(f"{where}: {pair.flaw}, and in {each.first.letter} too: no speed to judge")
                continue
            if pair.flaw:
                said.append(f"{where}: not ranked: {pair.flaw}")
                code = code or 6
                continue
            if pair.maths_flaw:
                said.append(f"{where}: judged, though of unlike maths: {pair.maths_flaw}")
            judged.append((where, pair))
            for condition in conditions:
                met = condition.met(pair)
                if met is None:
                    said.append(f"{where}: {condition} cannot be told: too few rounds")
                elif met:
                    change = condition.change(pair)
                    said.append(
                        f"{where}: {condition} is confirmed: {_with_ends(change) if change else DASH}"
                    )
                    code = 3
    for condition in conditions if not code else ():
        if nearest := condition.nearest(judged):
            none = f"of no rung does the whole interval lie {condition.beyond}"
            said.append(f"{condition} is not confirmed: {none}; nearest is {nearest}")
        else:
            said.append(f"{condition} is not confirmed: no rung has an interval")
    return code, said

"""A gate for CI: which change of speed or memory is surely there. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report.compare import Comparison, Pair

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
            raise ValueError(f"--fail-if {text!r}: write tps or memory, < or >, and a change, such as 'tps<-5%'")
        return cls(metric=found[1], below=found[2] == "<", bound=1 + float(found[3]) / 100, text=text.strip())

    def met(self, pair: Pair) -> bool | None:
        """Whether the whole interval lies beyond the bound; None where there is none."""
        change = pair.tps if self.metric == "tps" else pair.memory
        if change is None or change.low is None or change.high is None:
            return None
        return change.high < self.bound if self.below else change.low > self.bound


def _never_fitted(pair: Pair) -> bool:
    """Whether neither side could run the rung, for the same reason: nothing has changed."""
    return pair.first.status == pair.other.status and pair.first.status in ("out_of_memory", "unsupported")


def judge(comparisons: Sequence[Comparison], conditions: Sequence[Condition]) -> tuple[int, list[str]]:
    """The exit code of bench compare, and what came of each condition. Raises ValueError where nothing is paired."""
    if not any(each.pairs for each in comparisons):
        raise ValueError("no rung of A has a partner that switches on the same, so --fail-if has nothing to judge")
    code, said = 0, []
    for each in comparisons:
        for pair in each.pairs:
            where = f"{pair.first.rung}: {each.other.letter} over {each.first.letter}"
            if pair.flaw and _never_fitted(pair):
                said.append(f"{where}: {pair.flaw}, and in {each.first.letter} too: no speed to judge")
                continue
            if pair.flaw:
                said.append(f"{where}: not ranked: {pair.flaw}")
                code = code or 6
                continue
            for condition in conditions:
                met = condition.met(pair)
                if met is None:
                    said.append(f"{where}: {condition} cannot be told: too few rounds")
                elif met:
                    said.append(f"{where}: {condition} is confirmed")
                    code = 3
    if not code:
        said.append(f"{', '.join(map(str, conditions))}: no rung is surely so")
    return code, said

"""Detect steps with a non-finite or outlying loss or gradient norm, and apply the run's policy.

Such a step is reported, skipped, or ends the run; it never passes silently.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal

from gpt2.config.workload import STRICT

MOST_PASSED = 20
"""Consecutive skipped steps that end the run, which does not recover from them by itself."""
WINDOW = 128
"""Number of previous steps that a loss or gradient norm is compared with."""


class TrainingStopped(Exception):
    """The policy ends the run; the message names the step and the reason."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The action for steps with a non-finite or outlying loss or gradient norm."""

    __pydantic_config__: ClassVar = STRICT

    not_finite: Literal["stop", "skip"] = "stop"
    """Action for an infinite or NaN loss or gradient norm; float16's scaler skips its own overflows."""
    spike: Literal["report", "skip", "stop"] = "report"
    """Action for a loss or gradient norm far above those of the last 128 steps."""
    spike_deviations: float = 8.0
    """Standard deviations above their mean that count as a spike; 0 turns detection off."""

    @property
    def skips(self) -> bool:
        """True if a step may be skipped, which must be decided before AdamW applies it."""
        return "skip" in (self.not_finite, self.spike)

    def __post_init__(self) -> None:
        if self.spike_deviations < 0:
            raise ValueError(f"spike_deviations {self.spike_deviations} is negative")


class Guard:
    """Applies a Policy, called once per step with values common to all ranks, so that all decide alike."""

    def __init__(self, policy: Policy, tell: Callable[[int, str], None], state_dict: dict[str, Any]) -> None:
        self.policy, self.tell = policy, tell
        self._losses = deque[float](state_dict.get("losses", ()), maxlen=WINDOW)
        self._norms = deque[float](state_dict.get("norms", ()), maxlen=WINDOW)
        self._passed: int = state_dict.get("passed", 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"losses": list(self._losses), "norms": list(self._norms), "passed": self._passed}

    def accepts(self, step: int, loss: float, norm: float, *, scaled: bool = False) -> bool:
        """Return whether AdamW should apply this step. Raises TrainingStopped where the policy ends the run.

        scaled: float16's scaler is on; it skips steps with a non-finite gradient norm itself.
        """
        if scaled and math.isfinite(loss) and not math.isfinite(norm):
            return self._pass_over(step, f"float16 overflowed, gradient norm {norm:.6g}")
        if not math.isfinite(loss) or not math.isfinite(norm):
            return self._act(step, f"loss {loss:.6g}, gradient norm {norm:.6g}", self.policy.not_finite)
        for name, value, before in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            if seen := self._spike(name, value, before):
                if not self._act(step, seen, self.policy.spike):
                    return False  # a skipped step does not enter the statistics
                break
        self._losses.append(loss)
        self._norms.append(norm)
        self._passed = 0
        return True

    def _spike(self, name: str, value: float, before: deque[float]) -> str | None:
        if not self.policy.spike_deviations or len(before) < WINDOW:
            return None
        mean, deviation = fmean(before), pstdev(before)
        if value <= mean + self.policy.spike_deviations * deviation:
            return None
        usual = f"{mean:.6g} with a deviation of {deviation:.3g}"
        return f"{name} {value:.6g}, where the last {WINDOW} steps had {usual}"

    def _act(self, step: int, seen: str, action: str) -> bool:
        if action == "stop":
            policy = "the policy is to stop (guard.not_finite, guard.spike)"
            raise TrainingStopped(f"step {step}: {seen}; {policy}")
        if action == "skip":
            return self._pass_over(step, seen)
        self.tell(step, f"{seen}: trained on all the same")
        return True

    def _pass_over(self, step: int, seen: str) -> bool:
        self._passed += 1
        if self._passed >= MOST_PASSED:
            raise TrainingStopped(f"step {step}: {seen}; {self._passed} steps in a row were passed over")
        self.tell(step, f"{seen}: this step was passed over")
        return False

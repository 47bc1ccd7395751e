"""Watch a training's losses and gradients for what spoils it, and say what to do. Imports no torch.

A step whose loss or gradients are not finite, or lie far above those of the steps before, is passed over or ends the
run, as its policy has it; never silently.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, ClassVar, Literal

from gpt2.workload import STRICT

MOST_PASSED = 20
"""Steps passed over in a row that end the run: it does not come back by itself."""
WINDOW = 128
"""Steps that a loss or a gradient norm is held to."""


class TrainingStopped(Exception):
    """The policy ends the run; the message says at which step, and what was seen."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do about steps that went wrong."""

    __pydantic_config__: ClassVar = STRICT

    not_finite: Literal["stop", "skip"] = "stop"
    """A loss or gradient norm that is infinite or no number; float16's scaler passes its overflows over by itself."""
    spike: Literal["report", "skip", "stop"] = "report"
    """A loss or gradient norm far above those of the last 128 steps."""
    spike_deviations: float = 8.0
    """How many standard deviations above their mean that is; 0 looks for none."""

    @property
    def skips(self) -> bool:
        """Whether a step may be passed over, which must be known before AdamW takes it."""
        return "skip" in (self.not_finite, self.spike)

    def __post_init__(self) -> None:
        if self.spike_deviations < 0:
            raise ValueError(f"spike_deviations {self.spike_deviations} is negative")


class Guard:
    """Asked once per step, in order, with what all ranks have in common; so all of them hear the same."""

    def __init__(self, policy: Policy, tell: Callable[[int, str], None], remembered: dict[str, Any]) -> None:
        self.policy, self.tell = policy, tell
        self._losses = deque[float](remembered.get("losses", ()), maxlen=WINDOW)
        self._norms = deque[float](remembered.get("norms", ()), maxlen=WINDOW)
        self._passed: int = remembered.get("passed", 0)

    def remembered(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"losses": list(self._losses), "norms": list(self._norms), "passed": self._passed}

    def accepts(self, step: int, loss: float, norm: float, *, scaled: bool = False) -> bool:
        """Whether AdamW should take this step. Raises TrainingStopped where the policy ends the run.

        scaled: an infinite norm is float16's, and its scaler's to see to: it passes such a step over.
        """
        if scaled and math.isfinite(loss) and not math.isfinite(norm):
            return self._pass_over(step, f"float16 overflowed, gradient norm {norm:.6g}")
        if not math.isfinite(loss) or not math.isfinite(norm):
            return self._act(step, f"loss {loss:.6g}, gradient norm {norm:.6g}", self.policy.not_finite)
        for name, value, before in (("loss", loss, self._losses), ("gradient norm", norm, self._norms)):
            if seen := self._spike(name, value, before):
                if not self._act(step, seen, self.policy.spike):
                    return False  # and what is passed over is no measure for what comes
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
        return f"{name} {value:.6g}, where the last {WINDOW} steps had {mean:.6g} with a deviation of {deviation:.3g}"

    def _act(self, step: int, seen: str, action: str) -> bool:
        if action == "stop":
            raise TrainingStopped(f"step {step}: {seen}; the policy is to stop (guard.not_finite, guard.spike)")
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

"""Scoreboards of made-up ladders: rungs of toggles and speeds on a machine, with a control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samples import MACHINE, records_of

from bench.analysis.scoreboard import Scoreboard, scoreboard
from gpt2.config.toggles import Toggles


def ladder(
    *rungs: tuple[str, Toggles, float], chip: str = "chip", rounds: int = 3, source: str = "a", **changes: Any
) -> Scoreboard:
    """A run whose rounds do not vary, and whose control says so: every difference beyond 1 % is sure."""
    environment = MACHINE.model_copy(update={"chip": chip})
    records = records_of(*rungs, rounds=rounds, environment=environment, **changes)
    controls = [r.model_copy(update={"kind": "control"}) for r in records if r.rung_index == 0]
    return scoreboard([*records, *controls], Path(source))

"""Where the time of a rung's processes goes: before the first step, in it, and in each step of the window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles

from bench.analysis.run_records import is_external, toggles_of
from bench.analysis.scoreboard import Scoreboard
from bench.records.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times of one rung over its rounds, in seconds; None is what was not measured."""

    rung: str
    startup: float
    """Imports, data and weights; median."""
    imports: float | None
    """Part of startup until torch was loaded and the device found; median."""
    data: float | None
    """Part of startup that opened the corpus; median."""
    first_step: float | None
    """First step with an empty compiler cache, compilation included; median."""
    first_step_warm: float | None
    """First step with the compiler cache of an earlier round; median."""
    step: float | None
    """A step of the window; median of all rounds' steps."""
    saved: float | None
    """Median step of the rung before minus this one's, where both steps have as many tokens."""
    step_low: float | None
    """5th percentile of the steps."""
    step_high: float | None
    """95th percentile of the steps."""
    batches: float | None
    """Share of the window that the host took to make batches; median."""
    external: bool
    """Whether it is another trainer, whose start-up includes the first step."""


def timing(board: Scoreboard) -> list[Timing]:
    """Times of each rung that was measured."""
    timings: list[Timing] = []
    rung_before = {row.index: row.before for row in board.rows if row.gain}
    steps_by_rung: dict[int | None, tuple[int, float | None]] = {}  # tokens and seconds of a step, by rung
    tries = [record for record in board.records if record.kind == "scout"]
    for rung in board.records.rungs_of_rounds:
        measurements = [record.measurement for record in rung if record.status == "ok" and record.measurement]
        if not measurements:
            continue
        steps = [seconds for m in measurements for seconds in _steps(m)]
        step, tokens = _median(steps), measurements[0].tokens_per_step
        before = steps_by_rung.get(rung_before.get(rung[0].rung_index))
        step_before = before[1] if before and before[0] == tokens else None
        steps_by_rung[rung[0].rung_index] = tokens, step
        cuts = quantiles(steps, n=20, method="inclusive") if len(steps) > 1 else None
        windows = [(m.data_wait_seconds, sum(m.block_seconds)) for m in measurements]
        # A try of the same toggles leaves its code to the rounds.
        alike = [each.measurement for each in tries if toggles_of([each]) == toggles_of(rung)]
        compiling = [*measurements, *filter(None, alike)]
        firsts = [(m.compile_cache, m.first_step_seconds) for m in compiling]
        timings.append(
            Timing(
                rung=rung[0].rung,
                startup=median(m.startup_seconds for m in measurements),
                imports=_median(m.import_seconds for m in measurements),
                data=_median(m.data_seconds for m in measurements),
                first_step=_median(took for cache, took in firsts if cache in ("cold", None)),
                first_step_warm=_median(took for cache, took in firsts if cache == "warm"),
                step=step,
                saved=step_before - step if step_before is not None and step is not None else None,
                step_low=cuts[0] if cuts else None,
                step_high=cuts[-1] if cuts else None,
                batches=_median(
                    making / seconds for making, seconds in windows if seconds and making is not None
                ),
                external=is_external(rung),
            )
        )
    return timings


def _steps(found: Measurement) -> list[float]:
    """Durations of the window's steps; a block of one step is a step."""
    return found.step_seconds or (found.block_seconds if found.block_steps == 1 else [])


def _median(values: Iterable[float | None]) -> float | None:
    """The median of what was measured."""
    known = [value for value in values if value is not None]
    return median(known) if known else None

"""Where the time of a rung's processes goes: before the first step, in it, and in each step of the window."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median, quantiles

from bench.analysis.run_records import cumulative, is_external
from bench.analysis.scoreboard import Scoreboard
from bench.records.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one rung, over its rounds; seconds. None is what was not measured."""

    rung: str
    startup: float
    """Imports, data and weights; median."""
    imports: float | None
    """Of it, until torch was loaded and the device found; median."""
    data: float | None
    """Of it, to open the corpus; median."""
    first_step: float | None
    """With compilation, where there is any, and an empty compiler cache; median."""
    first_step_warm: float | None
    """With the compiler cache of an earlier round; median."""
    step: float | None
    """Of the window; median of all rounds' steps."""
    saved: float | None
    """Of the median step, over the rung before, whose steps have as many tokens; negative where it takes
    longer.
    """
    step_low: float | None
    """Below it are 5 in 100 steps."""
    step_high: float | None
    """Below it are 95 in 100 steps."""
    batches: float | None
    """Share of the window that the host took to make batches; median."""
    external: bool
    """Whether it is another trainer, of which start-up and first step are one."""


def timing(board: Scoreboard) -> list[Timing]:
    """For each rung that was measured."""
    result: list[Timing] = []
    held = {row.index: row.before for row in board.rows if row.gain}
    known: dict[int | None, tuple[int, float | None]] = {}  # tokens and seconds of a step, by rung
    for rung in cumulative(board.records):
        found = [record.measurement for record in rung if record.status == "ok" and record.measurement]
        if not found:
            continue
        steps = [seconds for each in found for seconds in _steps(each)]
        step, tokens = _median(steps), found[0].tokens_per_step
        before = known.get(held.get(rung[0].rung_index))
        was = before[1] if before and before[0] == tokens else None
        known[rung[0].rung_index] = tokens, step
        cuts = quantiles(steps, n=20, method="inclusive") if len(steps) > 1 else None
        windows = [(each.data_wait_seconds, sum(each.block_seconds)) for each in found]
        firsts = [(each.compile_cache, each.first_step_seconds) for each in found]
        result.append(
            Timing(
                rung=rung[0].rung,
                startup=median(each.startup_seconds for each in found),
                imports=_median([each.import_seconds for each in found if each.import_seconds is not None]),
                data=_median([each.data_seconds for each in found if each.data_seconds is not None]),
                first_step=_median([took for cache, took in firsts if took is not None and cache != "warm"]),
                first_step_warm=_median(
                    [took for cache, took in firsts if took is not None and cache == "warm"]
                ),
                step=step,
                saved=was - step if was is not None and step is not None else None,
                step_low=cuts[0] if cuts else None,
                step_high=cuts[-1] if cuts else None,
                batches=_median(
                    [making / seconds for making, seconds in windows if seconds and making is not None]
                ),
                external=is_external(rung),
            )
        )
    return result


def _steps(found: Measurement) -> list[float]:
    """Those of the window; a block of one step is a step."""
    return found.step_seconds or (found.block_seconds if found.block_steps == 1 else [])


def _median(values: list[float]) -> float | None:
    return median(values) if values else None

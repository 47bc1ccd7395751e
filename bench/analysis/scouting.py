"""What trying a rung found: whether its changes are carried on.

A ladder with `carry: if_faster` first tries its rungs in order, each on top of those that were carried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from bench.analysis.claim_checks import check_claims
from bench.analysis.run_records import carried_rungs, group_by, together, toggles_of
from bench.records.record import Record, Scout
from bench.stats import LEAST_DELTA, block_error, geometric_mean
from gpt2.config.toggles import Toggles

FAR_TOO_SLOW = 0.5
"""Share of the best so far below which a rung's first steps end it."""
ERRORS = 2.0
"""Standard errors of the two windows by which a rung has to be ahead."""
STALE = 2
"""Re-measure the best rung after this many near-ties: its one window may have been lucky."""


def judge(record: Record, tried: Sequence[Record], together_with: Sequence[str] = ()) -> Scout:
    """Decide whether a rung that was tried is carried.

    tried: the records of those before it, in order, each with its own decision. together_with: the rungs
    that were tried in one process, all of which are carried or none. The first rung is always carried, and
    so is the best so far where it is tried again. Another one is carried if it ran, kept the losses, did what
    it claims, and was faster than the last that was carried, in the mean of its tries, by more than the
    floor: LEAST_DELTA, the difference between two tries of one rung, or ERRORS standard errors of the
    windows, whichever is largest.
    """
    best = last_carried(tried)
    earlier = [each for each in tried if _configuration(each) == _configuration(record)]
    if not tried or any(_is_carried(each, tried) for each in earlier):
        return Scout(
            over=record.rung if tried else None,
            ratio=_ratio([record], best),
            floor=None,
            carried=True,
            check=record.status,
            reason=record.error,
            together=[*together_with],
        )
    check, reason = _failed_check(record, tried)
    tries = [*(each for each in earlier if each.session == record.session), record]
    ratio = _ratio(tries, best)
    floor = max(LEAST_DELTA, _difference_of_tries(tried), _error(tries, best))
    faster = best is None or (ratio is not None and ratio > 1 + floor)
    return Scout(
        over=best.rung if best else None,
        ratio=ratio,
        floor=floor,
        carried=check == "ok" and record.status == "ok" and faster,
        check=check,
        reason=reason,
        together=[*together_with],
    )


def _failed_check(record: Record, tried: Sequence[Record]) -> tuple[str, str | None]:
    """The check that a try fails, and why; ok where it fails none, or was ended early for being too slow."""
    if record.status == "too_slow":
        return "ok", None
    chain = [each for each in tried if _is_carried(each, tried)]
    alike = [each for each in chain if _tokens(each) == _tokens(record) is not None]
    check, reason = check_claims([record], chain[:1], chain[-1:], alike[:1])
    known = toggles_of(tried[:1]).maths()
    for setting, why in toggles_of([record]).maths().items():
        if check == "ok" and setting not in known:
            return "other_maths", f"{setting}: {why}"
    return check, reason


def last_carried(tried: Sequence[Record]) -> Record | None:
    """The last rung that was carried and measured: what the next one stands on and is compared with."""
    return next((r for r in reversed(tried) if _is_carried(r, tried) and _speed(r)), None)


def is_stale(tried: Sequence[Record]) -> bool:
    """Whether the best so far is to be tried again, before anything else is compared with it."""
    best = last_carried(tried)
    since = tried[tried.index(best) + 1 :] if best else ()
    close = {r.rung_index for r in since if (over := _over_floor(r)) is not None and over >= -1}
    return len(close) >= STALE


def is_close(tried: Sequence[Record], rung_index: int) -> bool:
    """Whether a rung seemed faster in its only try, but within the noise, so that it is tried again."""
    tries = [record for record in tried if record.rung_index == rung_index]
    over = _over_floor(tries[0]) if len(tries) == 1 else None
    gained = any(record.scout and (record.scout.ratio or 0.0) > 1 + LEAST_DELTA for record in tries)
    return over is not None and over <= 1 and gained


def within_noise(tried: Sequence[Record]) -> dict[str, float]:
    """The rungs that are not carried, but slower by less than half the noise, by name, with their ratios."""
    carried = carried_rungs(tried)
    last = {each.rung: each for each in tried if each.rung not in carried and not together(each)}
    close = [each for each in last.values() if (over := _over_floor(each)) is not None and over >= -0.5]
    return {each.rung: each.scout.ratio for each in close if each.scout and each.scout.ratio}


def _over_floor(record: Record) -> float | None:
    """A sound try's lead over the best, in units of its floor; below 0 if it was slower.

    None where the try is not sound, or has no ratio.
    """
    scout = record.scout
    if record.status != "ok" or not scout or scout.check != "ok" or not scout.ratio or not scout.floor:
        return None
    return (scout.ratio - 1) / scout.floor


def _is_carried(record: Record, tried: Sequence[Record]) -> bool:
    """Whether a rung is carried: the first one always is, even if nothing is known of its try."""
    return record.rung_index == tried[0].rung_index or (record.scout is not None and record.scout.carried)


def _configuration(record: Record) -> tuple[int, Toggles]:
    """What a try ran: a rung, with the changes that it then kept."""
    return record.rung_index, toggles_of([record])


def _speed(record: Record) -> float | None:
    if record.measurement and record.status == "ok":
        return record.measurement.tokens_per_second
    return record.first_tokens_per_second


def _tokens(record: Record) -> int | None:
    return record.measurement.tokens_per_step if record.measurement else None


def _ratio(tries: Sequence[Record], best: Record | None) -> float | None:
    """Mean speed of a rung's tries over the best's."""
    speeds, over = [speed for each in tries if (speed := _speed(each))], best and _speed(best)
    return geometric_mean(speeds).value / over if speeds and over else None


def _difference_of_tries(tried: Sequence[Record]) -> float:
    """Relative difference between consecutive tries of one rung, the A/A comparison of this stage.

    Of several pairs it is the root of their mean square. Two tries with a break of the run between them are
    no pair.
    """
    by_rung = group_by(tried, lambda record: (_configuration(record), record.session))
    speeds = [[speed for record in rung if (speed := _speed(record))] for rung in by_rung.values()]
    differences = [max(pair) / min(pair) - 1 for of_one in speeds for pair in pairwise(of_one)]
    return math.sqrt(math.fsum(each**2 for each in differences) / len(differences)) if differences else 0.0


def _error(tries: Sequence[Record], best: Record | None) -> float:
    """ERRORS relative standard errors of that ratio, from the scatter of the windows' blocks."""
    errors = [block_error(each.measurement.block_seconds) for each in tries if each.measurement]
    own = math.hypot(*errors) / max(1, len(errors))
    over = block_error(best.measurement.block_seconds) if best and best.measurement else 0.0
    return ERRORS * math.hypot(own, over)

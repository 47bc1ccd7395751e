"""The ladder that leads to a sweep's winner, as YAML."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from bench.analysis.row import Row
from bench.analysis.schedule import changes_of
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.warnings import disturbed, ended_early
from bench.format import plain, plural, ratio, tokens_per_second
from bench.ladder.ladder import LONGEST_NAME, Ladder, Rung
from bench.report.one_run.caption import fastest_claim
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles


def ladder_to(ladder: Ladder, base: Rung, winner: Row, board: Scoreboard) -> str:
    """The rungs of `ladder` up to `base`, and the winner above them."""
    rungs: list[dict[str, Any]] = []
    before = Toggles()
    for rung in ladder.rungs:
        if rung.external or rung.index > base.index:
            continue
        rungs.append(_rung(rung.name, before, rung.toggles, ladder, rung.expect))
        before = rung.toggles
    if winner.toggles != before:
        best = _rung(winner.rung, before, winner.toggles, ladder)
        if best["name"] in {rung["name"] for rung in rungs}:  # the ladder led to an earlier winner
            best["name"] = f"best {best['name']}"[:LONGEST_NAME]
        rungs.append(best)
    workload = asdict(ladder.workload)
    # Ladders to different winners need different names, or their results would count as runs of one ladder.
    own = hashlib.sha256(json.dumps([workload, rungs], sort_keys=True).encode()).hexdigest()[:6]
    content = {
        "name": f"{ladder.name[:80]}-best-{own}",
        **({"chip": ladder.chip.name} if ladder.chip else {}),
        "workload": workload,
        "protocol": {**asdict(ladder.protocol), "carry": "always"},  # each rung says what it changes
        "rungs": rungs,
    }
    source = board.source.as_posix() if board.source else "a sweep"
    head = [
        _chosen(winner, board),
        *fastest_claim(board, signs=False),
        *(f"Chosen from measurements that were disturbed: {each}." for each in disturbed(board)),
        *(f"Chosen before the end: {each}." for each in ended_early(board)),
        f"From {source}, torch {board.environment.torch}.",
    ]
    lines = "".join(f"# {plain(line)}\n" for line in head)
    return lines + yaml_files.dump(content)


def _chosen(winner: Row, board: Scoreboard) -> str:
    """By which figure the winner won, and among how many candidates."""
    tps = f"{tokens_per_second(winner.tps)} tokens/s" if winner.tps else "?"
    over_first = board.over_first(winner)
    over = f", {ratio(over_first)} the first candidate" if over_first else ""
    others = [row for row in board.rows if row.other_maths]  # none of these could win
    ran = [row.tps.rounds if row.tps else 0 for row in board.rows if row not in others]
    most, complete = max(ran), ran.count(max(ran))
    among = plural(len(ran), "candidate") + (
        f", {complete} of which ran in all" if complete < len(ran) else " in"
    )
    where = f"{plural(most, 'round')} on {board.environment.machine}"
    apart = f"; {len(others)} of other maths could not win" if others else ""
    return f"{winner.rung}: {tps}{over}, the most of {among} {where}, by which it won{apart}."


def _rung(
    name: str, before: Toggles, now: Toggles, ladder: Ladder, expect: str | None = None
) -> dict[str, Any]:
    # --rungs separates names by commas.
    rung = {
        "name": name.replace(",", " and")[:LONGEST_NAME],
        "set": changes_of(before, now, ladder.workload),
    }
    return {**rung, "expect": expect} if expect else rung

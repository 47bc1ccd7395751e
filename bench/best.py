"""The ladder that leads to a sweep's winner, as YAML. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import yaml

from bench.ladder import Ladder, Rung
from bench.report.caption import fastest
from bench.report.row import Row
from bench.report.scoreboard import Scoreboard
from bench.report.text import number, plain, with_interval
from gpt2.toggles import Toggles


def ladder_to(ladder: Ladder, base: Rung, winner: Row, board: Scoreboard) -> str:
    """The rungs of `ladder` up to `base`, and the winner above them."""
    rungs: list[dict[str, Any]] = []
    before = Toggles()
    for rung in ladder.rungs[: base.index + 1]:
        if rung.external:
            continue
        rungs.append(_rung(rung.name, before, rung.toggles, ladder, rung.expect))
        before = rung.toggles
    if winner.toggles != before:
        rungs.append(_rung(winner.rung, before, winner.toggles, ladder))
    content = {
        "name": f"{ladder.name}-best",
        **({"chip": ladder.chip.name} if ladder.chip else {}),
        "workload": asdict(ladder.workload),
        "protocol": asdict(ladder.protocol),
        "rungs": rungs,
    }
    rounds = f"{board.rounds} round{'s' if board.rounds > 1 else ''}"
    source = board.source.as_posix() if board.source else "a sweep"
    tps = with_interval(number(winner.tps.value), winner.tps) if winner.tps else "?"
    head = [
        f"{winner.rung}: {tps} tokens/s, the most of {len(board.rows)} candidates on {board.environment.machine} in "
        f"{rounds}, by which it was chosen.",
        *fastest(board),
        f"From {source}, torch {board.environment.torch}.",
    ]
    lines = "".join(f"# {plain(line)}\n" for line in head)
    return lines + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=119)


def _rung(name: str, before: Toggles, now: Toggles, ladder: Ladder, expect: str | None = None) -> dict[str, Any]:
    derived = {"grad_accum_steps"} if ladder.workload.tokens_per_step is not None else set()
    was = asdict(before)
    changes = {key: value for key, value in asdict(now).items() if value != was[key] and key not in derived}
    # A name stands in --rungs, where a comma parts two.
    rung = {"name": name.replace(",", " and"), "set": changes}
    return {**rung, "expect": expect} if expect else rung

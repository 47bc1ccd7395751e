"""Ratios, noise floor and verdicts of bench.run.turns.interleave, and the file they are kept in."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.ladder.ladder import Ladder
from bench.records.machine import Environment
from bench.run.command import anonymous
from bench.run.turns.interleave import CONTROL, Group, TurnOptions
from bench.stats import LEAST_ROUNDS, Estimate, Verdict, geometric_mean, noise_floor, verdict
from gpt2.files.atomic import atomic_write
from gpt2.files.strict_json import dumps


@dataclass(frozen=True, kw_only=True)
class Result:
    """Speed-up of a rung over its reference, and the speeds of both in their common turns."""

    rung: str
    over: str
    """The reference."""
    starts: Sequence[Sequence[tuple[float, float]]]
    """By start that has turns: seconds per step of (over, rung)."""
    tokens_per_second: Estimate
    over_tokens_per_second: Estimate
    ratio: Estimate
    verdict: Verdict | None = None
    """None for the control."""

    @property
    def turns(self) -> int:
        return sum(map(len, self.starts))

    @property
    def is_control(self) -> bool:
        return self.rung == self.over + CONTROL

    @property
    def replicated(self) -> bool:
        """Whether intervals are over starts; else they are over turns, and hold for these processes alone."""
        return len(self.starts) >= LEAST_ROUNDS


def results(ladder: Ladder, group: Group) -> list[Result]:
    """Return the result of each pair that took turns, the control last."""
    tokens = {rung.name: rung.tokens_per_step(ladder.workload.seq_len) for rung in group.rungs}
    tokens |= {name + CONTROL: count for name, count in tokens.items()}
    measured = []
    for pair in group.pairs:
        if not (starts := [turns for turns in pair.starts if turns]):
            continue
        over, rung = tokens[pair.over], tokens[pair.rung]
        measured.append(
            Result(
                rung=pair.rung,
                over=pair.over,
                starts=starts,
                tokens_per_second=over_starts([[rung / r for _, r in turns] for turns in starts]),
                over_tokens_per_second=over_starts([[over / o for o, _ in turns] for turns in starts]),
                ratio=over_starts([[rung / r / (over / o) for o, r in turns] for turns in starts]),
            )
        )
    floor = floor_of(measured)
    judged = [each if each.is_control else replace(each, verdict=_judged(each, floor)) for each in measured]
    return sorted(judged, key=lambda each: each.is_control)


def over_starts(values: Sequence[Sequence[float]]) -> Estimate:
    """Return the geometric mean of turns, given by start, with the interval of the starts' means.

    Turns of one start share their processes, so their number says nothing of other processes. With fewer
    starts than LEAST_ROUNDS the interval is that of the turns.
    """
    if len(values) < LEAST_ROUNDS:
        return geometric_mean([value for turns in values for value in turns])
    return geometric_mean([geometric_mean(turns).value for turns in values])


def floor_of(results: Sequence[Result]) -> float | None:
    """Return the noise floor, by the control alone, as others may be of programs that scatter otherwise.

    None if no control was replicated.
    """
    return noise_floor([each.ratio for each in results if each.is_control and each.replicated], [])


def _judged(result: Result, floor: float | None) -> Verdict:
    return verdict(result.ratio, floor) if result.replicated else "not replicated"


# --- the file


def write(
    path: Path,
    options: TurnOptions,
    groups: Sequence[Group],
    environment: Environment,
    time: str,
    data_sha256: str,
) -> None:
    """Replace the file of results as a whole. Raises BenchError, and leaves the file as it was."""
    content = {
        "command": anonymous(shlex.join(_command(options))),
        "time": time,
        "ladder": options.ladder.name,
        "ladder_hash": options.ladder.hash,
        "workload": asdict(options.ladder.workload),
        "protocol": asdict(options.ladder.protocol),
        "data_sha256": data_sha256,
        "environment": environment.model_dump(mode="json"),
        "groups": [_group(options.ladder, group) for group in groups],
    }
    try:
        with atomic_write(path) as file:
            file.write(f"{dumps(content, indent=1)}\n".encode())
    except OSError as error:
        holds = "it holds the rounds before" if path.exists() and path.stat().st_size else "nothing is kept"
        raise BenchError(f"cannot write {path} ({error.strerror}); {holds}") from None


def _command(options: TurnOptions) -> list[str]:
    command = [
        "bench",
        "turns",
        options.ladder.path.as_posix(),
        *(["--data", "DATA"] if options.data else []),
    ]
    command += ["--rungs", ",".join(rung.name for rung in options.rungs), *["--first"] * options.first]
    command += [part for override in options.overrides for part in ("--set", override)]
    for name in ("starts", "rounds", "steps", "at_once"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return command


def _group(ladder: Ladder, group: Group) -> dict[str, Any]:
    pairs = results(ladder, group)
    return {
        "noise_floor": floor_of(pairs),
        "pairs": [{**asdict(pair), "starts": list(map(_start, pair.starts))} for pair in pairs],
        "failed": {name: anonymous(why) for name, why in group.failed.items()},
        "unsupported": {name: anonymous(why) for name, why in group.unsupported.items()},
        "versions": group.versions,
        "stolen_cores": group.stolen_cores,
    }


def _start(turns: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    return {"over": [over for over, _ in turns], "rung": [rung for _, rung in turns]}

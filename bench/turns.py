"""`bench turns`: rungs beside each other on a machine that is never quiet."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.options import Corpus, LadderFile, Overrides, ResultsFolder, RungNames, names
from bench.stop import interruptible
from bench.terminal import console, fail

if TYPE_CHECKING:
    from rich.table import Table

    from bench.ladder import Rung
    from bench.machine import Environment
    from bench.pairs import Asked, Group


def turns(
    ladder: LadderFile,
    data: Corpus = None,
    rungs: RungNames = None,
    first: Annotated[
        bool, typer.Option("--first", help="Hold each to the first rung, not to the one before.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=3, help="Turns of each pair.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed in each turn, after one that is not.")] = 2,
    at_once: Annotated[
        int, typer.Option(min=3, help="Processes in memory, one of them for the noise floor; more rungs go in groups.")
    ] = 6,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
) -> None:
    """Let the rungs of a LADDER train in turn, two at a time, and print how many times as fast each is.

    Each has a process of its own, which is stopped while another has the machine; a rung and the one that it is held
    to take a few steps in turn, so that what slows the machine for longer than that slows both alike. On a noisy
    machine that is far surer than bench run, but it tells of no memory, losses and proofs. What was measured is kept
    after each round.

    Exit code: 0 measured; 2 wrong ladder or usage; 6 a rung failed, or none took a turn; 130 interrupted.

    Example: bench turns ladders/peers-cpu.yaml --rungs "ours,nanoGPT bfloat16 compiled" --first
    """
    from bench.ladder import LadderError, load
    from bench.pairs import Asked, TurnError, groups, take_turns
    from bench.probe import ProbeError, probe
    from bench.runner import RunError, check_data, results_file
    from gpt2.data import DataError

    begun = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        loaded = load(ladder, set_ or [])
        asked = Asked(
            ladder=loaded,
            rungs=_of_one_process(loaded.chosen(names(rungs))),
            first=first,
            rounds=rounds,
            steps=steps,
            at_once=at_once,
            data=data,
            overrides=tuple(set_ or []),
        )
        parts = groups(asked.rungs, first, at_once)
        check_data(loaded, asked.rungs, data)
        environment = probe(asked.rungs[0].toggles.device).environment
        path = results_file(loaded, out, environment)
    except (LadderError, ProbeError, RunError, DataError) as error:
        fail(error)
    path = path.with_name(f"turns-{path.stem}.json")

    def keep() -> None:
        part = path.with_suffix(".part")
        try:
            part.write_text(json.dumps(content(asked, parts, environment, begun), indent=1) + "\n")
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise RunError(f"cannot write {path} ({error.strerror}); what it holds are the rounds before") from None

    interrupted, lost = False, None
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, interruptible():
        try:
            for part in parts:
                try:
                    take_turns(asked, part, Path(scratch), partial(typer.echo, err=True), keep)
                except TurnError as error:
                    typer.echo(f"bench: {error}", err=True)
        except KeyboardInterrupt:
            interrupted = True
        except RunError as error:
            lost = error
    for part in parts:
        if part.pairs or part.failed or part.unsupported:
            console().print(table(asked, part))
    if lost:
        typer.echo(f"bench: {lost}", err=True)
        raise typer.Exit(6)
    if measured := any(pair.seconds for part in parts for pair in part.pairs):
        typer.echo(f"kept in {path}", err=True)
    if interrupted:
        typer.echo(f"bench: interrupted{'' if measured else ' before a round was over; nothing is kept'}", err=True)
        raise typer.Exit(130)
    raise typer.Exit(6 if any(part.failed for part in parts) or not measured else 0)


def _of_one_process(rungs: Sequence[Rung]) -> list[Rung]:
    """Those that can take turns; says which cannot."""
    if others := [rung.name for rung in rungs if rung.toggles.processes > 1]:
        typer.echo(f"bench: left out, being of several processes: {', '.join(others)}", err=True)
    return [rung for rung in rungs if rung.toggles.processes == 1]


def content(asked: Asked, parts: Sequence[Group], environment: Environment, time: str) -> dict[str, Any]:
    """What is kept: what was asked, each turn's seconds, and what they come to."""
    from bench.command import anonymous
    from bench.pairs import floor_of, results

    command = ["bench", "turns", asked.ladder.path.as_posix()]
    command += ["--rungs", ",".join(rung.name for rung in asked.rungs)]
    command += ["--first"] * asked.first + [part for override in asked.overrides for part in ("--set", override)]
    command += ["--rounds", str(asked.rounds), "--steps", str(asked.steps), "--at-once", str(asked.at_once)]
    groups = []
    for part in parts:
        found = results(asked.ladder, part)
        measured = [pair for pair in part.pairs if pair.seconds]
        pairs = [
            {**asdict(each), "step_seconds": {"over": over, "rung": rung}}
            for each, pair in zip(found, measured, strict=True)
            for over, rung in [zip(*pair.seconds, strict=True)]
        ]
        groups.append(
            {
                "noise_floor": floor_of(found),
                "pairs": pairs,
                "failed": {name: anonymous(why) for name, why in part.failed.items()},
                "unsupported": {name: anonymous(why) for name, why in part.unsupported.items()},
                "versions": part.versions,
                "stolen_cores": part.stolen_cores,
            }
        )
    return {
        "command": anonymous(shlex.join(command)),
        "time": time,
        "ladder": asked.ladder.name,
        "ladder_hash": asked.ladder.hash,
        "environment": environment.model_dump(mode="json"),
        "groups": groups,
    }


def table(asked: Asked, part: Group) -> Table:
    """A group's pairs, and the noise among which they were told apart."""
    from rich.table import Table

    from bench.pairs import floor_of, results
    from bench.report.text import DASH, floor, number, plain, ratio, with_interval

    found = results(asked.ladder, part)
    delta = floor_of(found)
    turn = f"{asked.steps} steps" if asked.steps > 1 else "1 step"
    caption = [f"{turn} a turn; ratios are paired within rounds. One process of each: see docs/measuring.md."]
    caption += [f"Noise floor: {floor(delta)}, by the last row."] if delta is not None else []
    if part.stolen_cores is not None:
        caption.append(f"The host took {part.stolen_cores:.2f} cores away meanwhile.")
    result = Table(title=f"{plain(asked.ladder.name)}, in turn", caption=" ".join(caption), caption_justify="left")
    for title in ("Rung", "Over", "Rounds", "TPS", "TPS of over", "Times as fast", "Verdict"):
        result.add_column(title, justify="left" if title in ("Rung", "Over", "Verdict") else "right")
    for each in found:
        speeds = [with_interval(number(s.value), s) for s in (each.tokens_per_second, each.over_tokens_per_second)]
        cells = (str(each.ratio.rounds), *speeds, ratio(each.ratio), each.verdict or DASH)
        result.add_row(plain(each.rung), plain(each.over), *cells)
    for name, why in {**part.unsupported, **part.failed}.items():
        status = "unsupported" if name in part.unsupported else "failed"
        result.add_row(plain(name), *[DASH] * 5, f"{status}: {plain(why)}")
    return result

"""`bench turns`: rungs beside each other on a machine that is never quiet."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.options import Corpus, LadderFile, Overrides, ResultsFolder, RungNames, names
from bench.cli.terminal import console, fail
from bench.process.shutdown import interruptible
from gpt2.files.strict_json import dumps
from gpt2.files.temporary import whole_file

if TYPE_CHECKING:
    from rich.table import Table

    from bench.ladder.ladder import Rung
    from bench.records.machine import Environment
    from bench.run.turns.interleave import Asked, Group


def turns(
    ladder: LadderFile,
    data: Corpus = None,
    rungs: RungNames = None,
    first: Annotated[
        bool, typer.Option("--first", help="Hold each to the first rung, not to the one before.")
    ] = False,
    starts: Annotated[
        int,
        typer.Option(
            min=1, help="Times that all processes are started; intervals and verdicts are over these."
        ),
    ] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each pair after each start.")] = 8,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps that are timed in each turn, after one that is not.")
    ] = 2,
    at_once: Annotated[
        int,
        typer.Option(
            min=3, help="Processes in memory, one of them for the noise floor; more rungs go in groups."
        ),
    ] = 6,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
) -> None:
    """Let the rungs of a LADDER train in turn, two at a time, and print how many times as fast each is.

    Each has a process of its own, which is stopped while another has the machine; a rung and the one that it
    is held to take a few steps in turn, so that what slows the machine for longer than that slows both alike.
    It tells of no memory, losses and proofs, as bench run does. What was measured is kept after each round.

    Exit code: 0 measured; 2 wrong ladder or usage; 6 a rung failed, or none took a turn; 130 interrupted.

    Example: bench turns ladders/peers-cpu.yaml --rungs "ours,nanoGPT bfloat16 compiled" --first
    """
    from bench.ladder.ladder import LadderError, load
    from bench.records.record import reserved
    from bench.run.probe import ProbeError, probe
    from bench.run.runner import RunError, check_data, new_results
    from bench.run.turns.interleave import Asked, TurnError, groups, open_with_what_runs, take_turns
    from gpt2.data.batches import DataError
    from gpt2.hardware.host import temp_folder

    begun = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        loaded = load(ladder, set_ or [])
        asked = Asked(
            ladder=loaded,
            rungs=_of_one_process(loaded.chosen(names(rungs))),
            first=first,
            starts=starts,
            rounds=rounds,
            steps=steps,
            at_once=at_once,
            data=data,
            overrides=tuple(set_ or []),
        )
        parts = groups(asked.rungs, first, at_once)
        data_sha256 = check_data(loaded, asked.rungs, data)
        environment = probe(asked.rungs[0].toggles.device).environment
        path = new_results(loaded, out, environment, "turns-{}.json")
    except (LadderError, ProbeError, RunError, DataError) as error:
        fail(error)

    def keep() -> None:
        kept = dumps(content(asked, parts, environment, begun, data_sha256), indent=1)
        try:
            with whole_file(path) as file:
                file.write(f"{kept}\n".encode())
        except OSError as error:
            holds = (
                "it holds the rounds before" if path.exists() and path.stat().st_size else "nothing is kept"
            )
            raise RunError(f"cannot write {path} ({error.strerror}); {holds}") from None

    interrupted, lost, tell = False, None, partial(typer.echo, err=True)
    with (
        reserved(path),
        interruptible(),
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
    ):
        try:
            for number, part in enumerate(parts, start=1):
                if not first:
                    open_with_what_runs(part, parts[: number - 1])
                try:
                    take_turns(asked, part, Path(scratch), tell, keep, to_come=len(parts) - number)
                except TurnError as error:
                    typer.echo(f"bench: {error}", err=True)
        except KeyboardInterrupt:
            interrupted = True
        except RunError as error:
            lost = error
    measured = any(part.measured for part in parts)
    if interrupted and measured:  # the round that was cut short counts as far as it went
        try:
            keep()
        except RunError as error:
            lost = error
    for part in parts:
        if part.measured or part.failed or part.unsupported:
            console().print(table(asked, part))
    if lost:
        typer.echo(f"bench: {lost}", err=True)
        raise typer.Exit(6)
    if measured:
        typer.echo(f"kept in {path}", err=True)
    if interrupted:
        typer.echo(f"bench: interrupted{'' if measured else ' before any turn; nothing is kept'}", err=True)
        raise typer.Exit(130)
    if not measured:
        typer.echo(
            "bench: no two rungs took turns, so there is nothing to compare; nothing is kept", err=True
        )
    raise typer.Exit(6 if any(part.failed for part in parts) or not measured else 0)


def _of_one_process(rungs: Sequence[Rung]) -> list[Rung]:
    """Those that can take turns; says which cannot."""
    if others := [rung.name for rung in rungs if rung.toggles.processes > 1]:
        typer.echo(f"bench: left out, being of several processes: {', '.join(others)}", err=True)
    return [rung for rung in rungs if rung.toggles.processes == 1]


def content(
    asked: Asked, parts: Sequence[Group], environment: Environment, time: str, data_sha256: str
) -> dict[str, Any]:
    """What is kept: what was asked, each turn's seconds, and what they come to."""
    from bench.run.command import anonymous
    from bench.run.turns.results import floor_of, results

    command = ["bench", "turns", asked.ladder.path.as_posix(), *(["--data", "DATA"] if asked.data else [])]
    command += ["--rungs", ",".join(rung.name for rung in asked.rungs)]
    command += ["--first"] * asked.first + [
        part for override in asked.overrides for part in ("--set", override)
    ]
    numbers = {"starts": asked.starts, "rounds": asked.rounds, "steps": asked.steps, "at-once": asked.at_once}
    command += [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    groups = []
    for part in parts:
        found = results(asked.ladder, part)
        pairs = [
            {
                **asdict(each),
                "starts": [
                    {"over": [o for o, _ in turns], "rung": [r for _, r in turns]} for turns in each.starts
                ],
            }
            for each in found
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
        "protocol": asdict(asked.ladder.protocol),
        "data_sha256": data_sha256,
        "environment": environment.model_dump(mode="json"),
        "groups": groups,
    }


def table(asked: Asked, part: Group) -> Table:
    """A group's pairs, and the noise among which they were told apart."""
    from rich.table import Table

    from bench.format import DASH, number, plain, ratio, with_interval
    from bench.run.turns.results import floor_of, results
    from bench.stats import LEAST_ROUNDS

    found = results(asked.ladder, part)
    delta = floor_of(found)
    turn = f"{asked.steps} steps" if asked.steps > 1 else "1 step"
    caption = [f"{turn} a turn; ratios are paired within rounds, and intervals are over starts."]
    if not all(each.replicated for each in found):
        fewer = f"Of fewer than {LEAST_ROUNDS} starts they are over turns, and hold for these very processes alone"
        caption.append(f"{fewer}: see docs/measuring.md.")
    caption += [f"Noise floor: ±{delta:.1%}, by the last row."] if delta is not None else []
    if part.stolen_cores is not None:
        caption.append(f"The host took {part.stolen_cores:.2f} cores away meanwhile.")
    result = Table(
        title=f"{plain(asked.ladder.name)}, in turn", caption=" ".join(caption), caption_justify="left"
    )
    for title in ("Rung", "Over", "Starts", "Turns", "TPS", "TPS of over", "Times as fast", "Verdict"):
        result.add_column(title, justify="left" if title in ("Rung", "Over", "Verdict") else "right")
    for each in found:
        speeds = [
            with_interval(number(s.value), s) for s in (each.tokens_per_second, each.over_tokens_per_second)
        ]
        cells = (str(len(each.starts)), str(each.turns), *speeds, ratio(each.ratio), each.verdict or DASH)
        result.add_row(plain(each.rung), plain(each.over), *cells)
    for name, why in {**part.unsupported, **part.failed}.items():
        status = "unsupported" if name in part.unsupported else "failed"
        result.add_row(plain(name), *[DASH] * 6, f"{status}: {plain(why)}")
    return result

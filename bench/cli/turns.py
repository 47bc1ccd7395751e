"""`bench turns`: compare rungs on a machine that is never quiet."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Corpus, LadderFile, Overrides, ResultsFolder, RungNames, names
from bench.cli.terminal import console
from bench.errors import BenchError
from bench.process.shutdown import interruptible

if TYPE_CHECKING:
    from rich.table import Table

    from bench.ladder.ladder import Rung
    from bench.run.turns.interleave import Group, TurnOptions


def turns(
    ladder: LadderFile,
    data: Corpus = None,
    rungs: RungNames = None,
    first: Annotated[
        bool, typer.Option("--first", help="Compare each rung with the first, not with the one before it.")
    ] = False,
    starts: Annotated[
        int,
        typer.Option(
            min=1, help="Times that all processes are started; intervals and verdicts are over these."
        ),
    ] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each pair after each start.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each turn, after one untimed step.")] = 2,
    at_once: Annotated[
        int,
        typer.Option(
            min=3, help="Processes in memory, one of them for the noise floor; more rungs go in groups."
        ),
    ] = 6,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
) -> None:
    """Let the rungs of a LADDER train in turn, two at a time, and print the speed-up of each.

    Each has a process of its own, which is stopped while another trains. A rung and its reference take a few
    steps in turn, so that a slowdown of the machine that lasts longer affects both. Unlike bench run, it
    measures no memory, losses or proofs. The results are written after each round.

    Exit code: 0 measured; 2 wrong ladder or usage; 6 a rung failed, or none took a turn; 130 interrupted.

    Example: bench turns ladders/peers-cpu.yaml --rungs "ours,nanoGPT bfloat16 compiled" --first
    """
    from bench.ladder.ladder import load
    from bench.records.record import reserved
    from bench.run.probe import probe
    from bench.run.runner import check_data, new_results
    from bench.run.turns.interleave import TurnError, TurnOptions, groups, open_with_last_that_ran, take_turns
    from bench.run.turns.results import write
    from gpt2.hardware.host import temp_folder

    time = datetime.now(UTC).isoformat(timespec="seconds")
    loaded = load(ladder, set_ or [])
    options = TurnOptions(
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
    parts = groups(options.rungs, first, at_once)
    data_sha256 = check_data(loaded, options.rungs, data)
    environment = probe(options.rungs[0].toggles.device).environment
    path = new_results(loaded, out, environment, "turns-{}.json")
    keep = partial(write, path, options, parts, environment, time, data_sha256)
    interrupted, write_error, tell = False, None, partial(typer.echo, err=True)
    with (
        reserved(path),
        interruptible(),
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
    ):
        try:
            for number, part in enumerate(parts, start=1):
                if not first:
                    open_with_last_that_ran(part, parts[: number - 1])
                try:
                    take_turns(options, part, Path(scratch), tell, keep, to_come=len(parts) - number)
                except TurnError as error:
                    typer.echo(f"bench: {error}", err=True)
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            write_error = error
    measured = any(part.measured for part in parts)
    if interrupted and measured:  # also keep the round that was cut short
        try:
            keep()
        except BenchError as error:
            write_error = error
    for part in parts:
        if part.measured or part.failed or part.unsupported:
            console().print(table(options, part))
    if write_error:
        typer.echo(f"bench: {write_error}", err=True)
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
    """Return the rungs of one process, which can be stopped; name the others on stderr."""
    if others := [rung.name for rung in rungs if rung.toggles.processes > 1]:
        typer.echo(f"bench: left out, being of several processes: {', '.join(others)}", err=True)
    return [rung for rung in rungs if rung.toggles.processes == 1]


def table(options: TurnOptions, part: Group) -> Table:
    """Return the terminal table of a group's pairs."""
    from rich.table import Table

    from bench.format import DASH, number, plain, ratio, with_interval
    from bench.run.turns.results import floor_of, results
    from bench.stats import LEAST_ROUNDS

    pairs = results(options.ladder, part)
    delta = floor_of(pairs)
    turn = f"{options.steps} steps" if options.steps > 1 else "1 step"
    caption = [f"{turn} a turn; ratios are paired within rounds, and intervals are over starts."]
    if not all(pair.replicated for pair in pairs):
        caption.append(
            f"With fewer than {LEAST_ROUNDS} starts, intervals are over turns and hold for these very "
            "processes alone: see docs/measuring.md."
        )
    caption += [f"Noise floor: ±{delta:.1%}, by the last row."] if delta is not None else []
    if part.stolen_cores is not None:
        caption.append(f"The host took {part.stolen_cores:.2f} cores away meanwhile.")
    result = Table(
        title=f"{plain(options.ladder.name)}, in turn", caption=" ".join(caption), caption_justify="left"
    )
    for title in ("Rung", "Over", "Starts", "Turns", "TPS", "TPS of over", "Speed-up", "Verdict"):
        result.add_column(title, justify="left" if title in ("Rung", "Over", "Verdict") else "right")
    for pair in pairs:
        speeds = [
            with_interval(number(s.value), s) for s in (pair.tokens_per_second, pair.over_tokens_per_second)
        ]
        cells = (str(len(pair.starts)), str(pair.turns), *speeds, ratio(pair.ratio), pair.verdict or DASH)
        result.add_row(plain(pair.rung), plain(pair.over), *cells)
    for name, why in {**part.unsupported, **part.failed}.items():
        status = "unsupported" if name in part.unsupported else "failed"
        result.add_row(plain(name), *[DASH] * 6, f"{status}: {plain(why)}")
    return result

"""`bench turns`: compare rungs on a machine that is never quiet."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.cli.options import Corpus, LadderFile, Overrides, ResultsFolder, RungNames, names
from bench.cli.terminal import after_measuring, print_brief, say
from bench.errors import BenchError
from bench.process.shutdown import interruptible

if TYPE_CHECKING:
    from bench.ladder.ladder import Ladder, Rung
    from bench.records.machine import Environment
    from bench.report.brief import Brief
    from bench.run.turns.interleave import Group
    from bench.run.turns.results import Result


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
    from bench.records.record import ResultsFile
    from bench.run.probe import probe
    from bench.run.runner import check_data, new_results, text_changed
    from bench.run.suited import supported, with_best
    from bench.run.turns.interleave import TurnError, TurnOptions, groups, open_with_last_that_ran, take_turns
    from bench.run.turns.results import write
    from gpt2.hardware.host import temp_folder

    time = datetime.now(UTC).isoformat(timespec="seconds")
    loaded = supported(load(ladder, set_ or []), set_ or [], say, names(rungs))
    environment = probe(loaded.rungs[0].toggles.device).environment
    loaded, found = with_best(loaded, set_ or [], out, environment)
    for each in found:
        typer.echo(each, err=True)
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
    path = new_results(loaded, out, environment, "turns-{}.json")
    keep = partial(write, path, options, parts, environment, time, data_sha256)
    interrupted, ended_by, tell = False, None, partial(typer.echo, err=True)

    def check_text() -> None:
        if check_data(loaded, options.rungs, data) != data_sha256:
            raise BenchError(text_changed(loaded, data))

    with (
        closing(ResultsFile(path)),
        interruptible(),
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
    ):
        try:
            for number, part in enumerate(parts, start=1):
                if not first:
                    open_with_last_that_ran(part, parts[: number - 1])
                try:
                    to_come = len(parts) - number
                    take_turns(options, part, Path(scratch), tell, keep, to_come, check_text)
                except TurnError as error:
                    say(str(error))
        except KeyboardInterrupt:
            interrupted = True
        except BenchError as error:
            ended_by = error
    measured = any(part.measured for part in parts)
    if measured and not ended_by:  # also keep the round that was cut short, and what failed last
        try:
            keep()
        except BenchError as error:
            ended_by = error
    if any(part.measured or part.failed or part.unsupported for part in parts):
        with after_measuring([path]) if measured and not ended_by else nullcontext():
            print_brief(turns_brief(loaded, parts, steps, environment))
    if ended_by:
        say(str(ended_by))
        raise typer.Exit(6)
    if measured:
        typer.echo(f"kept in {path}", err=True)
    if interrupted:
        say(f"interrupted{'' if measured else ' before any turn; nothing is kept'}")
        raise typer.Exit(130)
    if not measured:
        say("no two rungs took turns, so there is nothing to compare; nothing is kept")
    raise typer.Exit(6 if any(part.failed for part in parts) or not measured else 0)


def _of_one_process(rungs: Sequence[Rung]) -> list[Rung]:
    """Return the rungs of one process, which can be stopped; name the others on stderr."""
    if others := [rung.name for rung in rungs if rung.toggles.processes > 1]:
        say(f"left out, being of several processes: {', '.join(others)}")
    return [rung for rung in rungs if rung.toggles.processes == 1 and not rung.again]


def turns_brief(ladder: Ladder, parts: Sequence[Group], steps: int, environment: Environment) -> Brief:
    """Who is ahead by how much, and the speed-up of each rung over its reference.

    steps: timed steps of a turn.
    """
    from bench.format import judged_briefly, plural, speed, status_word, whole_percent
    from bench.report.brief import Brief
    from bench.report.table import Column, Table
    from bench.report.titles import environment_title, model_title
    from bench.run.turns.results import floor_of, results
    from bench.stats import LEAST_ROUNDS
    from gpt2.config.toggles import HOST

    by_part = [results(ladder, part) for part in parts]
    floors = {id(pair): floor_of(pairs) for pairs in by_part for pair in pairs}
    pairs = [pair for of_part in by_part for pair in of_part]
    absent = [
        (name, status_word(status), why)
        for part in parts
        for status, names in (("unsupported", part.unsupported), ("failed", part.failed))
        for name, why in names.items()
    ]
    references = {pair.over for pair in pairs}
    reference = references.pop() if len(references) == 1 else "reference"
    columns: list[Column[Any]] = [
        Column("rung", lambda row: row[0] if isinstance(row, tuple) else row.rung, words=True),
        Column("tokens/s", lambda pair: speed(pair.tokens_per_second)),
        Column("over", lambda pair: pair.over, words=True, drop=5),
        Column(reference, lambda pair: speed(pair.over_tokens_per_second), drop=3),
        Column("speed-up", lambda pair: judged_briefly(pair.ratio, pair.verdict)),
        Column("noise", lambda pair: whole_percent(floors[id(pair)], "±"), drop=4),
        Column("starts", lambda pair: len(pair.starts), drop=1),
        Column("turns", lambda pair: pair.turns, drop=2),
    ]
    warnings = [": ".join(each) for each in absent]
    if not all(pair.replicated for pair in pairs):
        warnings.append(
            f"With fewer than {LEAST_ROUNDS} starts, intervals are over turns and hold for these very "
            "processes alone: see docs/measuring.md."
        )
    over = "starts" if all(pair.replicated for pair in pairs) else "turns"
    each = f"{plural(steps, 'step')} a turn; ratios are paired within rounds, intervals are over {over}"
    notes = [f"{each}; noise: how far a rung's second process (again) may be from itself."]
    if stolen := [part.stolen_cores for part in parts if part.stolen_cores is not None]:
        notes.append(f"The host took up to {max(stolen):.2f} cores away meanwhile.")
    model = model_title(ladder.workload.model, ladder.workload.config.parameters)
    toggles = [rung.toggles for part in parts for rung in part.rungs]
    on_host = all(each.device == HOST for each in toggles)
    machine = environment_title(environment, on_host, max(each.world_size for each in toggles))
    return Brief(
        answer=[_ahead(pairs, floors)],
        about=[f"{model} on {machine} · torch {environment.torch.partition('+')[0]}"],
        table=Table(
            title="",
            columns=columns,
            rows=[*pairs, *absent],
            instead=lambda row: row[1] if isinstance(row, tuple) else None,
        ),
        warnings=warnings,
        notes=[" ".join(notes)],
        rest="see the results file",
    )


def _ahead(pairs: Sequence[Result], floors: dict[int, float | None]) -> str:
    """Which rung is ahead of the others, by how much, and how sure that is."""
    from bench.format import listed, times, verdict_word, whole_percent

    compared = [pair for pair in pairs if not pair.is_control]
    if not compared:
        return "No two rungs took turns, so there is nothing to compare."
    best = max(compared, key=lambda pair: pair.ratio.value)
    r, floor = best.ratio, floors[id(best)]
    interval = f"{times(r.low)} to {times(r.high)} at 95 %" if r.low and r.high else ""
    noise = f"noise {whole_percent(floor, '±')}" if floor is not None else "no noise floor"
    sure = f"({', '.join(filter(None, (interval, noise, verdict_word(best.verdict) or 'not replicated')))})"
    if len({pair.over for pair in compared}) > 1:
        faster = [pair.rung for pair in compared if pair.verdict == "faster"]
        all_faster = f"faster than their reference: {listed(faster)}" if faster else "none is clearly faster"
        most = "Gained most" if r.value >= 1 else "Lost least"
        return f"{most}: {best.rung}, {times(r.value)} {best.over} {sure}; {all_faster}."
    if r.value >= 1:
        return f"Ahead: {best.rung}, {times(r.value)} {best.over} {sure}."
    return f"Ahead: {best.over}; the next, {best.rung}, reaches {times(r.value)} of its speed {sure}."

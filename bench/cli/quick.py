"""`bench quick`: how fast GPT-2 124M trains on this machine, in minutes, without a file or an option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import Corpus, Overrides, PeakTflops, Price, ResultsFolder
from bench.cli.terminal import after_measuring, report_end
from gpt2.terminal import finite

if TYPE_CHECKING:
    from bench.analysis.scoreboard import Scoreboard
    from bench.ladder.ladder import Ladder
    from bench.run.executor import Watcher

PATIENCE = 3.0
"""How many times as long three rounds may take, without which there is no interval."""
BEST = "best known"
"""Name of the rung of quick.yaml that starts from what is best here."""
DEVICES = ("cuda", "mps", "tpu", "cpu")
"""Ladders that find the best of a kind of device, the fastest kind first."""


def quick(
    minutes: Annotated[
        float,
        typer.Option(
            min=0.5, callback=finite, help="Time for it; three rounds may take three times as long."
        ),
    ] = 5.0,
    data: Corpus = None,
    out: ResultsFolder = Path("results"),
    set_: Overrides = None,
    peak_tflops: PeakTflops = None,
    price_per_hour: Price = None,
) -> None:
    """Measure how fast GPT-2 124M trains on this machine's best device, in a few minutes.

    Three configurations take turns: the baseline; what most people switch on; the best that is known for this
    machine (what a whole bench run found here, else all that its kind supports), on a CPU with one sequence a
    step. Ends when the speed-ups are known to 5 %, or after --minutes, but not before three rounds if these
    take less than three times as long. The results are those of a ladder called quick.

    Exit code: as of bench run.

    Example: bench quick --minutes 10
    """
    from bench.analysis.scoreboard import scoreboard
    from bench.cli.progress import Progress
    from bench.cli.report import show
    from bench.run.command import Options
    from bench.run.runner import run

    with Progress() as progress:
        ladder, overrides = _for_this_machine(out, data, list(set_ or []), progress)
        options = Options(
            out=out,
            data=data,
            overrides=tuple(overrides),
            minutes=minutes,
            patience=PATIENCE,
            however_long=True,
            peak_tflops=peak_tflops,
            price_per_hour=price_per_hour,
        )
        measured = run(ladder, options, progress)
    with after_measuring([measured.path]):
        if measured.has_rungs:
            board = scoreboard(measured.records, source=measured.path)
            show([board])
            if standing := _standing(board):
                typer.echo(standing)
    raise typer.Exit(report_end(measured))


def _for_this_machine(
    out: Path, data: Path | None, overrides: list[str], progress: Watcher
) -> tuple[Ladder, list[str]]:
    """Return the ladder quick with what suits this machine, and the overrides with which it was loaded."""
    from bench.errors import BenchError
    from bench.ladder.ladder import load
    from bench.ladder.shipped import QUICK
    from bench.run.probe import probe
    from bench.run.runner import check_data
    from bench.run.suited import all_settings, best_known, suited
    from gpt2.config.toggles import HOST

    not_known_yet = {BEST: ["toggles.device=cpu"]}
    ladder = load(Path(QUICK), overrides, not_known_yet)
    if not any(each.startswith("workload.data=") for each in overrides):
        try:
            check_data(ladder, ladder.rungs[:1], data)
        except BenchError as error:
            if data:
                raise
            overrides.append("workload.data=synthetic")
            ladder = load(Path(QUICK), overrides, not_known_yet)
            progress.note(f"a generated corpus is trained on: {error}")
    whole, _ = suited([Path(name) for name in DEVICES])
    top = whole.own[-1].toggles
    baseline, common, _ = ladder.rungs
    device = {"device": top.device, "adamw": whole.own[0].toggles.adamw}
    chosen = replace(
        common.toggles,
        device=top.device,
        autocast=top.autocast,
        compile=common.toggles.compile if top.compile != "eager" else "eager",
    )
    own = {
        baseline.name: ladder.settings(baseline.toggles, replace(baseline.toggles, **device)),
        common.name: ladder.settings(common.toggles, chosen),
    }
    known = load(whole.path)
    best, found = best_known(known, ladder.workload.model, out, probe(top.device).environment)
    if best.device == HOST:  # more sequences at once make a step longer there, and hardly faster
        best = replace(best, micro_batch_size=1)
    own[BEST] = all_settings(ladder, best)
    progress.note(f"{BEST}: {found}")
    return load(Path(QUICK), overrides, own), overrides


def _standing(board: Scoreboard) -> str:
    """Between which published and which other measured machines the fastest rung is; empty without any."""
    from bench.analysis.select import load_boards, load_published
    from bench.format import number, plain
    from bench.ladder.shipped import published
    from bench.report.titles import machine_title

    best, folder = board.fastest, published()
    if best is None or folder is None or board.task[0] != "gpt2":
        return ""
    known = [
        (each.tps, f"{each.on}, {each.rung}, {number(each.tps)} (published)")
        for each in load_published([folder])[0]
        if each.tps and each.hardware and each.task == board.task
    ]
    for other in load_boards([folder.parent], needed=False)[0] if folder.parent.name == "results" else []:
        row = other.fastest
        if row and other.task == board.task and other.environment.machine != board.environment.machine:
            title = f"{machine_title(other)}, {plain(row.rung)}"
            known.append((row.mean_tps, f"{title}, {number(row.mean_tps)} (measured)"))
    below = max((each for each in known if each[0] <= best.mean_tps), default=None)
    above = min((each for each in known if each[0] > best.mean_tps), default=None)
    ends = [*([f"slower, {below[1]}"] if below else []), *([f"faster, {above[1]}"] if above else [])]
    return f"Nearest known machines, in tokens/s: {'; '.join(ends)}." if ends else ""

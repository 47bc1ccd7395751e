"""Commands about this machine itself: `bench doctor` and `bench roofline`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import ResultsFolder
from bench.cli.terminal import print_brief
from gpt2.terminal import finite

if TYPE_CHECKING:
    from bench.host.checks import Finding
    from bench.report.brief import Brief


def doctor(
    ladder: Annotated[
        Path | None,
        typer.Argument(metavar="[LADDER]", help="Also compare memory with what its rungs need on a CPU."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, whose free space is checked.")] = Path(
        "results"
    ),
    full: Annotated[bool, typer.Option("--full", help="All of each check, with what to do.")] = False,
) -> None:
    """Say what about this machine will spoil a measurement, and what to do about it.

    Takes about six seconds on a quiet machine and changes nothing. Exit code: always 0.

    Example: bench doctor ladders/cpu.yaml
    """
    from bench.host.doctor import diagnose
    from bench.ladder.ladder import load
    from bench.run.probe import probe

    needed = None
    if ladder:
        needed = max(probe(load(ladder).rungs[-1].toggles.device, ladder).memory_bytes.values(), default=None)
    print_brief(findings_brief(diagnose(out, needed)), full=full)


def findings_brief(findings: Sequence[Finding]) -> Brief:
    """What can spoil a measurement first, with what to do about it."""
    from bench.format import listed
    from bench.report.brief import Brief
    from bench.report.table import Column, Table

    bad = [finding for finding in findings if finding.ok is False]
    answer = "Nothing found that would spoil a measurement."
    if bad:
        answer = f"{len(bad)} of these can spoil a measurement: {listed([finding.name for finding in bad])}."
    words = {True: "good", False: "beware", None: "-"}
    columns: list[Column[Finding]] = [
        Column("Check", lambda finding: finding.name, words=True),
        Column("Verdict", lambda finding: words[finding.ok], words=True),
        Column("Found", lambda finding: finding.value, words=True),
    ]
    advice: Column[Finding] = Column("What to do", lambda finding: finding.advice or None, words=True)
    rows = sorted(findings, key=lambda finding: finding.ok is not False)
    table = Table(title="", columns=columns, rows=rows)
    return Brief(
        answer=[answer],
        table=table,
        whole=[replace(table, columns=[*columns, advice])],
        warnings=[f"{finding.name}: {finding.advice}" for finding in bad],
        hints=["Each check in full, with what to do: --full"],
    )


def roofline(
    ladder: Annotated[
        Path | None,
        typer.Argument(metavar="[LADDER]", help="Also show how near to the ceiling its rungs come."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, mps or xla; default: that of the LADDER's last rung, else cpu."),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Where the LADDER was measured: a results file, or a folder of machines.")
    ] = Path("results"),
    out: ResultsFolder = Path("results"),
    seconds: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Timing of each matmul, after as much heating up."),
    ] = 0.3,
    full: Annotated[bool, typer.Option("--full", help="All tables, columns and notes.")] = False,
) -> None:
    """Measure the matmuls and the memory of this machine: the ceiling of every rung.

    With a LADDER, the fewest milliseconds per optimiser step that each rung could take here, and the share of
    that which it reached. Exit code: 0 measured; 2 wrong ladder or usage; 6 not measured; 130 interrupted.

    Example: bench roofline ladders/cpu.yaml
    """
    from bench.cli.progress import Progress
    from bench.ladder.ladder import load
    from bench.report.roofline import ladder_lines, roofline_brief
    from bench.run.roofline import measure, measured
    from gpt2.config.workload import Workload
    from gpt2.hardware.peaks import lookup

    loaded = load(ladder) if ladder else None
    with Progress() as progress:
        path, record = measure(loaded, device, out, seconds, progress)
    if record.ceiling is None:
        raise typer.Exit(130 if record.status == "interrupted" else 6)
    ceiling, machine, lines, source = record.ceiling, record.environment.machine, [], ""
    if loaded:
        board, source = measured(loaded, results, machine)
        lines = ladder_lines(loaded, record.toggles.as_toggles.device, ceiling, board)
    chip = lookup(ceiling.chip)
    peak = chip.peak(ceiling.best.number_format) if chip else None
    title = f"{loaded.name} on {machine}" if loaded else ""
    brief = roofline_brief(
        ceiling, peak, loaded.workload if loaded else Workload(), lines, title=title, source=source
    )
    print_brief(brief, full=full)
    typer.echo(f"record in {path}", err=True)

"""Commands about this machine itself: `bench doctor` and `bench roofline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.cli.terminal import console
from gpt2.terminal import finite


def doctor(
    ladder: Annotated[
        Path | None,
        typer.Argument(metavar="[LADDER]", help="Also compare memory with what its rungs need on a CPU."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results, whose free space is checked.")] = Path(
        "results"
    ),
) -> None:
    """Say what about this machine will spoil a measurement, and what to do about it.

    Takes about six seconds on a quiet machine and changes nothing. Exit code: always 0.

    Example: bench doctor ladders/cpu.yaml
    """
    from bench.host.doctor import diagnose, table
    from bench.ladder.ladder import load
    from bench.run.probe import probe

    needed = None
    if ladder:
        needed = max(probe(load(ladder).rungs[-1].toggles.device, ladder).memory_bytes.values(), default=None)
    console().print(table(diagnose(out, needed)))


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
    out: Annotated[Path, typer.Option(help="Folder for results.")] = Path("results"),
    seconds: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Timing of each matmul, after as much heating up."),
    ] = 0.3,
) -> None:
    """Measure the matmuls and the memory of this machine: the ceiling of every rung.

    With a LADDER, the fewest milliseconds per optimiser step that each rung could take here, and the share of
    that which it reached. Exit code: 0 measured; 2 wrong ladder or usage; 6 not measured; 130 interrupted.

    Example: bench roofline ladders/cpu.yaml
    """
    from bench.cli.progress import Progress
    from bench.ladder.ladder import load
    from bench.report.roofline import bound_table, ceiling_table, ladder_lines
    from bench.run.roofline import measure, measured

    loaded = load(ladder) if ladder else None
    with Progress() as progress:
        path, record = measure(loaded, device, out, seconds, progress)
    if record.ceiling is None:
        raise typer.Exit(130 if record.status == "interrupted" else 6)
    console().print(ceiling_table(record.ceiling))
    if loaded:
        machine = record.environment.machine
        board, note = measured(loaded, results, machine)
        lines = ladder_lines(loaded, str(record.toggles.all["device"]), record.ceiling, board)
        console().print(bound_table(f"{loaded.name} on {machine}", lines, [note]))
    typer.echo(f"record in {path}", err=True)

"""Commands about this machine: `bench doctor`, `bench roofline` and `bench ladders`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.cli.options import ResultsFolder
from bench.cli.terminal import after_measuring, print_brief, print_parts, say
from bench.errors import BenchError
from gpt2.terminal import finite

if TYPE_CHECKING:
    from bench.host.checks import Diagnosis
    from bench.ladder.ladder import Ladder
    from bench.report.brief import Brief
    from gpt2.device import Device


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
    print_brief(doctor_brief(diagnose(out, needed)), full=full)


def doctor_brief(diagnoses: Sequence[Diagnosis]) -> Brief:
    """What can spoil a measurement first, with what to do about it."""
    from bench.format import listed
    from bench.report.brief import Brief
    from bench.report.table import Column, Table

    bad = [diagnosis for diagnosis in diagnoses if diagnosis.ok is False]
    answer = "Nothing found that would spoil a measurement."
    if bad:
        answer = (
            f"{len(bad)} of these can spoil a measurement: {listed([diagnosis.name for diagnosis in bad])}."
        )
    words = {True: "good", False: "beware", None: "-"}
    columns: list[Column[Diagnosis]] = [
        Column("Check", lambda diagnosis: diagnosis.name, words=True),
        Column("Verdict", lambda diagnosis: words[diagnosis.ok], words=True),
        Column("Found", lambda diagnosis: diagnosis.value, words=True),
    ]
    advice: Column[Diagnosis] = Column("What to do", lambda diagnosis: diagnosis.advice or None, words=True)
    rows = sorted(diagnoses, key=lambda diagnosis: diagnosis.ok is not False)
    table = Table(title="", columns=columns, rows=rows)
    return Brief(
        answer=[answer],
        table=table,
        whole=[replace(table, columns=[*columns, advice])],
        warnings=[f"{diagnosis.name}: {diagnosis.advice}" for diagnosis in bad],
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
    from bench.report.one_run.roofline import ladder_lines, roofline_brief
    from bench.run.roofline import measure, measured
    from gpt2.config.workload import Workload
    from gpt2.hardware.peaks import lookup

    loaded = load(ladder) if ladder else None
    with Progress() as progress:
        path, record, lost = measure(loaded, device, out, seconds, progress)
    if record.ceiling is None:
        raise typer.Exit(130 if record.status == "interrupted" else 6)
    ceiling, machine, lines, source = record.ceiling, record.environment.machine, [], ""
    with contextlib.nullcontext() if lost else after_measuring([path]):
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
    if lost:
        say(lost)
        raise typer.Exit(6)
    typer.echo(f"record in {path}", err=True)


KINDS = {"cpu": "CPU", "cuda": "GPU", "mps": "Apple GPU", "xpu": "Intel GPU", "xla": "torch_xla"}
"""What a reader calls each kind of device."""


def ladders() -> None:
    """List the ladders that come with gpt2-bench, those that can run here first.

    Each is run by its name: bench run cpu. Here: whether this machine has the devices; bench plan says
    whether the memory suffices, too.

    Example: bench ladders
    """
    from bench.host.feasibility import devices_here
    from bench.ladder.ladder import load
    from bench.ladder.shipped import shipped, shows
    from bench.report.table import Column, Table

    loaded = [load(path) for path in shipped()]
    if not loaded:
        raise BenchError("no ladders came with this installation; give a file: bench run FILE")
    devices, _ = devices_here(rung.toggles.device for ladder in loaded for rung in ladder.own)
    answers = {ladder.path: _runs_here(ladder, devices) for ladder in loaded}
    rows = sorted(loaded, key=lambda ladder: answers[ladder.path] != "yes")
    columns: list[Column[Ladder]] = [
        Column("Name", lambda ladder: ladder.path.stem, words=True),
        Column("Needs", _needs, words=True),
        Column("Here", lambda ladder: answers[ladder.path], words=True),
        Column("Shows", lambda ladder: shows(ladder.path), words=True),
    ]
    can = [ladder.path.stem for ladder in rows if answers[ladder.path] == "yes"]
    first = [f"This machine has the devices for: {', '.join(can) or 'none'}. Begin with: bench quick"]
    print_parts(Table(title=f"{len(rows)} ladders", columns=columns, rows=rows, first=first).to_terminal)


def _kinds(ladder: Ladder) -> list[str]:
    return list(dict.fromkeys(rung.toggles.device for rung in ladder.own))


def _most(ladder: Ladder) -> int:
    """Most devices that a rung of it takes, or processes on a CPU."""
    return max(rung.toggles.world_size for rung in ladder.own)


def _needs(ladder: Ladder) -> str:
    kinds = [KINDS[kind] for kind in _kinds(ladder)]
    if ladder.chip:
        kinds = [ladder.chip.name]
    most = _most(ladder)
    return f"{most} x {kinds[0]}" if most > 1 and kinds != ["CPU"] else ", ".join(kinds)


def _runs_here(ladder: Ladder, devices: dict[str, Device]) -> str:
    kinds = _kinds(ladder)
    missing = [kind for kind in kinds if kind not in devices]
    if len(missing) == len(kinds):
        return "no"
    if missing:
        return "in part"
    device = devices[kinds[-1]]
    if kinds[-1] != "cpu" and device.count() < _most(ladder):
        return f"no, {device.count()} of {_most(ladder)}"
    return (
        "yes" if not ladder.written_for_another(device.chip()) else f"for another chip than {device.chip()}"
    )

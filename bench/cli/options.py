"""Options that several commands share, and the ladder that they change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.errors import BenchError
from gpt2.terminal import finite

if TYPE_CHECKING:
    from bench.ladder.ladder import Ladder

LadderFile = Annotated[
    Path,
    typer.Argument(
        metavar="LADDER",
        help="A ladder's file, or its name in bench ladders, such as smoke.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Override workload.X, protocol.X or toggles.X (every rung).",
    ),
]
RungNames = Annotated[
    str | None,
    typer.Option("--rungs", metavar="A,B", help="Only the rungs of these names."),
]
Repeats = Annotated[int | None, typer.Option(min=1, help="Rounds over all rungs.")]
Until = Annotated[
    str | None,
    typer.Option(metavar="2%", help="Rounds until every speed-up's interval is this narrow: 5 to 20."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        callback=finite,
        help="Take so much time: windows of 3 blocks, and rounds while there is time for another, or until "
        "each ratio is known to 2 %.",
    ),
]
Ablate = Annotated[
    bool,
    typer.Option("--ablate", help="Also measure each rung's changes alone, and all others without them."),
]
Nodes = Annotated[
    int | None, typer.Option("--nnodes", help="Number of machines of the run; the same on each.")
]
NodeRank = Annotated[
    int | None, typer.Option("--node-rank", help="Number of this machine, from 0; 0 keeps the records.")
]
Rendezvous = Annotated[str | None, typer.Option("--rdzv", metavar="HOST:PORT", help="Where node 0 listens.")]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, callback=finite, help="Price of the whole machine, for the cost of a run."),
]

Corpus = Annotated[Path | None, typer.Option("--data", help="Where the ladder's corpus lies.")]
ResultsFolder = Annotated[Path, typer.Option("--out", help="Folder for results.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Markdown instead of a terminal table.")]
Plots = Annotated[bool, typer.Option("--plots", help="Draw plots into the folder that --out names.")]
PeakTflops = Annotated[
    float | None, typer.Option(min=0.001, callback=finite, help="Dense bfloat16 peak of one device, for MFU.")
]

ABLATION_WINDOW = 20.0
"""Longest window, in seconds, of a run that ablates."""


def as_overrides(set_: list[str] | None, repeats: int | None) -> list[str]:
    """Return --set and --repeats as overrides of the ladder."""
    return [*(set_ or []), *([f"protocol.repeats={repeats}"] if repeats else [])]


def load_with_options(
    ladder: Path,
    set_: list[str] | None,
    repeats: int | None,
    until: str | None,
    ablate: bool,
    minutes: float | None = None,
) -> tuple[Ladder, list[str]]:
    """Load the ladder with the options applied; return it and the overrides. Raises BenchError."""
    from bench.ladder.ladder import FEWEST_BLOCKS, load

    overrides = as_overrides(set_, repeats)
    if until is not None:
        if repeats:
            raise BenchError("--repeats and --until exclude each other; choose one")
        overrides.append(f"protocol.until={_fraction(until)}")
    if minutes and any(each.startswith("protocol.blocks=") for each in overrides):
        raise BenchError("--minutes chooses the number of blocks; leave out --set protocol.blocks")
    loaded = load(ladder, overrides)
    protocol, added = loaded.protocol, list[str]()
    if minutes and protocol.blocks > FEWEST_BLOCKS:
        added.append(f"protocol.blocks={FEWEST_BLOCKS}")
    # There are three times as many processes.
    if ablate and protocol.max_window_seconds > ABLATION_WINDOW:
        added.append(f"protocol.max_window_seconds={ABLATION_WINDOW}")
    return (load(ladder, [*overrides, *added]) if added else loaded), [*overrides, *added]


def _fraction(text: str) -> float:
    """Parse 2% or 0.02."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0.001 <= value <= 1:
        raise BenchError(f"--until {text}: write the width of an interval, such as 2%; from 0.1% to 100%")
    return value


def names(rungs: str | None) -> tuple[str, ...]:
    """Split the value of --rungs."""
    return tuple(name.strip() for name in rungs.split(",")) if rungs is not None else ()

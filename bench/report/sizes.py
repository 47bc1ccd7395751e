"""The sizes of GPT-2, and how fast each of those among the runs was trained. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.rung_view import Entry, best, best_name, by_speed
from bench.analysis.scoreboard import Scoreboard
from bench.format import DASH, plain
from bench.report.notes import derived_notes, ranks_notes, sources
from bench.report.table import Sheet
from bench.stats import LEAST_ROUNDS
from gpt2.workload import FLOPS_FORMULA, PRESETS, Workload

REFERENCES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
"""Whose facts are shown whether they were measured or not."""
HEAD = (
    "Model",
    "Parameters",
    "Layers",
    "Heads",
    "Width",
    "Sequence (T)",
    "FLOPs per token",
    "TPS",
    "MFU (bf16)",
    "Devices",
    "Fastest rung",
    "On",
)


def sizes(boards: Sequence[Scoreboard]) -> Sheet | None:
    """A line for each model and sequence length; None for a single run, whose caption has its model's facts."""
    if len(boards) < 2:
        return None
    fastest: dict[tuple[str, int], Entry] = {}
    for entry in by_speed(filter(None, map(best, boards))):
        fastest.setdefault(entry.task, entry)
    missing = [name for name in REFERENCES if name not in [model for model, _ in fastest]]
    tasks = [*fastest, *((name, PRESETS[name].n_ctx) for name in missing)]
    tasks.sort(key=lambda task: (PRESETS[task[0]].parameters, task[1]))
    return Sheet(
        title="Model sizes",
        head=HEAD,
        rows=[_cells(*task, fastest.get(task)) for task in tasks],
        words=frozenset({0, 10, 11}),
        notes=[
            f"Sizes are those of gpt2/workload.py; FLOPs per token at T: {FLOPS_FORMULA}.",
            "TPS and MFU: of the fastest rung of that model and T in all runs shown, those that leave a doubt, were "
            f"interrupted or have fewer than {LEAST_ROUNDS} rounds of it only where no other has any; a dash: it is "
            "in none of them.",
            *ranks_notes([*fastest.values()]),
            *derived_notes([*fastest.values()]),
            sources([*fastest.values()]),
        ],
        dispensable=("Sequence", "On", "Devices", "Heads", "Width", "Layers", "MFU", "Fastest"),
    )


def _cells(model: str, length: int, entry: Entry | None) -> list[str]:
    config, workload = PRESETS[model], Workload(model=model, seq_len=length)
    shape = (config.n_layer, config.n_head, config.n_embd, length)
    cells = [model, f"{config.parameters:,}", *map(str, shape), f"{workload.flops_per_token:,}"]
    if entry is None:
        return [*cells, DASH, DASH, DASH, DASH, DASH]
    return [
        *cells,
        entry.tps,
        entry.mfu,
        str(entry.row.toggles.world_size),
        plain(f"{entry.board.ladder}: {best_name(entry)}"),
        plain(entry.machine),
    ]

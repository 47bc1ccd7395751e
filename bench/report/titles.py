"""How a report names models and machines: GPT-2 124M, 8 x H100 SXM, 2 cores of AMD EPYC."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.analysis.run_records import measured
from bench.analysis.scoreboard import Scoreboard
from bench.analysis.several_runs.rungs import RungView
from bench.format import plain, plural
from bench.records.machine import Environment
from gpt2.config.toggles import HOST
from gpt2.config.workload import PRESETS
from gpt2.hardware.peaks import generation

UNITS = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
"""The widest arithmetic of a CPU, by the flag that tells it."""


def task_title(board: Scoreboard) -> str:
    """The model, and the length of its sequences where that is not the model's longest."""
    name, length = model_title_of(board), board.workload["seq_len"]
    preset = PRESETS.get(board.workload["model"])
    return name if preset and length == preset.n_ctx else f"{name}, T = {length}"


def model_title_of(board: Scoreboard) -> str:
    """The model that a run trains, by name and number of parameters."""
    found = measured(board.records)
    return model_title(board.workload["model"], found.parameters if found else None)


def model_title(model: str, parameters: int | None) -> str:
    """Such as GPT-2 124M, or GPT-2 medium 355M; another model by its own name."""
    family, _, size = model.partition("-")
    name = " ".join(filter(None, ("GPT-2", size))) if family == "gpt2" else f"model {model}"
    if parameters is None:
        return name
    millions = parameters / 1e6
    return f"{name} {millions:.0f}M" if millions >= 1 else f"{name} of {parameters:,} parameters"


def machine_title(board: Scoreboard) -> str:
    """What it ran on, in a few words."""
    on_host = all(row.toggles.device == HOST for row in board.rows)
    return environment_title(board.environment, on_host, max(row.toggles.world_size for row in board.rows))


def hardware_title(rung: RungView) -> str:
    """What one rung ran on, in a few words."""
    return environment_title(rung.environment, rung.row.toggles.device == HOST, rung.devices)


def environment_title(e: Environment, on_host: bool, chips: int) -> str:
    """The same of an environment. on_host: whether the CPU trained. chips: how many devices took part."""
    if e.xla_on_cpu or on_host:
        units = next((unit for flag, unit in UNITS.items() if flag in (e.cpu_flags or ())), None)
        cores = min(e.usable_cores or e.cpu_cores, e.cpu_cores)
        what = f"{plural(cores, 'core')} of {cpu_title(e)}"
        what += f" ({units})" if units else ""
        what += " by XLA" if e.xla_on_cpu else ""
    else:
        what = f"{chips // (e.nodes or 1)} x {e.chip}"
    return f"{e.nodes} nodes, each {what}" if e.nodes else what


def told_apart(titles: Sequence[tuple[str, str]]) -> list[str]:
    """Titles of machines, each with the machine's name where another machine has the same title.

    titles: pairs of a title and the name of the machine (Environment.machine).
    """
    return [
        f"{title}, {name}" if any(title == other and name != its for other, its in titles) else title
        for title, name in titles
    ]


def machine_titles(boards: Sequence[Scoreboard]) -> list[str]:
    """What each run ran on, in a few words, with the machine's name where two machines are alike."""
    return told_apart([(machine_title(board), board.environment.machine) for board in boards])


def cpu_title(environment: Environment) -> str:
    """A CPU's own name without what all have; one of AMD's without a model, with its generation."""
    name = re.sub(r"\((R|TM|family.*)\)|\b(CPU|Processor)\b|@.*|\d+-Core.*", "", environment.cpu, flags=re.I)
    numbers = re.search(r"^AMD .*\(family (\d+) model (\d+)\b", environment.cpu)
    cores = generation(int(numbers[1]), int(numbers[2])) if numbers else None
    return plain(f"{name.strip()}, {cores}" if cores else name)

"""Other trainers that took turns with ours, on each machine."""

from __future__ import annotations

from collections.abc import Sequence

from bench.analysis.turns import Turns
from bench.format import floor, judged, tokens_per_second
from bench.report.table import Column, Table
from bench.report.titles import environment_title, model_title, told_apart
from bench.stats import LEAST_ROUNDS


def machines_of(turns: Sequence[Turns]) -> dict[str, str]:
    """What each machine is, in a few words, by its name."""
    environments = {each.environment.machine: each.environment for each in turns}
    titles = [(environment_title(e, e.chip == e.cpu, 1), name) for name, e in environments.items()]
    return dict(zip(environments, told_apart(titles), strict=True))


def task_of(turns: Turns) -> str:
    """What was trained, such as GPT-2, T = 1024; empty where the file does not say."""
    if turns.task is None:
        return ""
    model, length = turns.task
    return f"{model_title(model, None)}, T = {length}"


def turns_table(turns: Sequence[Turns]) -> Table | None:
    """A row for each trainer on each machine; None without any."""
    if not turns:
        return None
    titles = machines_of(turns)
    columns: list[Column[Turns]] = [
        Column("Machine", lambda each: titles[each.environment.machine], words=True),
        Column("Model", lambda each: task_of(each) or None, words=True),
        Column("Trainer", lambda each: each.trainer, words=True),
        Column("Version", lambda each: each.version, words=True),
        Column("TPS", lambda each: tokens_per_second(each.tokens_per_second)),
        Column("Ours", lambda each: f"{each.ours} of {each.ladder}", words=True),
        Column("TPS of ours", lambda each: tokens_per_second(each.ours_tokens_per_second)),
        Column("Ours over it", lambda each: judged(each.ratio, each.verdict)),
        Column("Noise floor", lambda each: each.noise_floor, floor),
        Column("Starts", lambda each: each.starts),
        Column("File", lambda each: each.source.as_posix(), words=True),
    ]
    return Table(
        title="Other trainers in turn with ours",
        columns=columns,
        rows=turns,
        names=3,
        notes=[
            "From bench turns: both train by turns, a few steps each, so that a drift of the machine slows "
            f"both. Shown is each trainer's newest result with {LEAST_ROUNDS} starts of the processes or "
            "more, else its newest. Intervals are over the starts: with fewer, or where their number was not "
            "kept, there is none, and no verdict. Nor is there a verdict without a noise floor, which is "
            "known where our rung was measured beside itself.",
        ],
    )

"""The best toggles that are known for this machine: those that a ladder's newest results found. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.analysis.schedule import full_set
from bench.analysis.select import load_boards
from bench.format import plain
from bench.ladder.ladder import Ladder, beside, load
from bench.records.machine import Environment
from bench.run.suited import suited
from gpt2.config.toggles import Toggles


def with_best(
    ladder: Ladder, overrides: Sequence[str], out: Path, machine: Environment
) -> tuple[Ladder, list[str]]:
    """Return the ladder with the best known toggles in its best_of rungs, and where these are from.

    overrides: with which it was loaded. out: folder of results. Raises BenchError.
    """
    own, notes = {rung.name: rung.settings for rung in ladder.own if rung.settings}, []
    for rung in ladder.own:
        if rung.best_of is None or rung.name in own:
            continue
        other = load(beside(rung.best_of, ladder.path))
        toggles, found = best_of(other, ladder.workload.model, out, machine)
        own[rung.name] = all_settings(ladder, toggles)
        notes.append(f"{plain(rung.name)}: {found}")
    return (load(ladder.path, overrides, own) if notes else ladder), notes


def all_settings(ladder: Ladder, toggles: Toggles) -> tuple[str, ...]:
    """Return toggles as the overrides of a rung that starts from them; never empty."""
    return ladder.settings(Toggles(), toggles) or (f"toggles.device={toggles.device}",)


def best_of(ladder: Ladder, model: str, out: Path, machine: Environment) -> tuple[Toggles, str]:
    """Return the toggles of the fastest rung that this ladder's results have for this machine.

    Without results: those of its last rung, as far as this machine supports them. With it, words on where
    they are from.
    """
    folder = out / machine.machine
    boards = load_boards([folder], needed=False)[0] if folder.is_dir() else []
    for board in sorted(boards, key=lambda board: board.begun, reverse=True):
        best, task = board.own.fastest, board.records[0].workload
        same = (board.ladder, task["model"], task["seq_len"]) == (ladder.name, model, ladder.workload.seq_len)
        if same and best and not board.interrupted:
            return best.toggles, f"{plain(best.rung)}, the best of {ladder.name} here ({board.source})"
    top = full_set(suited([ladder.path])[0].own)[-1]
    why = f"{ladder.name} has no results here (bench run {ladder.path.stem} makes some)"
    return top.toggles, f"all of {ladder.name} that this machine supports, as {why}"

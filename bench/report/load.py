"""Which results files to show, and what a run's results say about its success."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.record import CEILING, Record, RecordError, read
from bench.report.scoreboard import Scoreboard, scoreboard


def load_boards(paths: Sequence[Path]) -> tuple[list[Scoreboard], list[str]]:
    """The scoreboards of results files, and warnings about what was left out of them.

    A file is shown as it is. Of the files below a folder, each subfolder (machine) and ladder shows one: of the runs
    of the ladder as it was last, an uninterrupted one before others, then the one with most rungs, then the newest.
    Files that hold nothing but a measured ceiling are passed over: they belong to bench roofline.
    Raises RecordError where there is nothing to show or a file cannot be read.
    """
    boards: list[Scoreboard] = []
    warnings: list[str] = []
    for path in paths:
        found: dict[tuple[Path, str], list[Scoreboard]] = {}
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            records, torn = read(file)
            warnings += torn
            if any(record.kind == "cumulative" for record in records):
                board = scoreboard(records, source=file)
                found.setdefault((file.parent, board.ladder), []).append(board)
            elif not records or any(record.rung != CEILING for record in records):
                warnings.append(f"{file}: holds no records of rungs")
        boards += [_chosen(runs) for runs in found.values()]
    if not boards:
        shown = ", ".join(str(path) for path in paths)
        raise RecordError(f"{shown}: no results here; bench run ladders/smoke.yaml makes some")
    return boards, warnings


def _chosen(runs: Sequence[Scoreboard]) -> Scoreboard:
    newest = max(runs, key=lambda board: board.records[0].time)
    same = [board for board in runs if board.records[0].ladder_hash == newest.records[0].ladder_hash]
    return max(same, key=lambda board: (not board.interrupted, len(board.rows), board.records[0].time))


def exit_code(records: Sequence[Record]) -> int:
    """0 all as asked, 6 some process failed unexpectedly, 4 all ran but some rung's loss differs or it recompiled."""
    failures = ("failed", "timeout", "out_of_memory")
    expected = {record.rung for record in records if record.expect == "out_of_memory"}
    if any(
        record.status in failures and not (record.status == "out_of_memory" and record.rung in expected)
        for record in records
    ):
        return 6
    return 4 if any(row.status in ("parity_failed", "recompiled") for row in scoreboard(records).rows) else 0

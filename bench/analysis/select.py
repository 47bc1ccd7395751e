"""Which results files to show, and what a run's results say about its success."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from bench.analysis.row import status_of
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.format import plain
from bench.ladder.validation import near
from bench.records.published import Published, is_published, read_published
from bench.records.record import ABLATION, RUNGS, Record, RecordError, not_of_one_run, read, results_files
from bench.stats import LEAST_ROUNDS
from gpt2.config.toggles import Toggles, describe
from gpt2.config.workload import Workload


def load_published(paths: Sequence[Path]) -> tuple[list[Published], list[str]]:
    """The figures of others among results files and folders, and warnings about files that were left out.

    Raises RecordError for a file by name that cannot be read.
    """
    found: list[Published] = []
    seen: set[Path] = set()
    warnings: list[str] = []
    for path in paths:
        for file in _files(path):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                found += read_published(file, warnings) if is_published(file) else []
            except RecordError as error:
                if not path.is_dir():
                    raise
                warnings.append(f"{error}; left out")
    return found, warnings


def _files(path: Path, warnings: list[str] | None = None) -> list[Path]:
    """Those of a folder, or the file itself."""
    return results_files(path, warnings=warnings) if path.is_dir() else [path]


def load_boards(paths: Sequence[Path], *, needed: bool = True) -> tuple[list[Scoreboard], list[str]]:
    """The scoreboards of results files, and warnings about what was left out of them.

    A file is shown as it is, and once, however often it is named. Of the files below a folder, each subfolder
    (machine), ladder, model and text shows one: of the runs of the ladder as its last whole run has it, an
    uninterrupted one before others, then the one with most rungs (not of sweeps, which try as many batches as it takes), then one with rounds
    enough for intervals, then the newest. Newer ones that are passed over are named, and so are whole ones of
    the same name that differ in their values or task. Files that hold nothing but a measured ceiling belong
    to bench roofline and lend it to runs that measured none. Of a folder, a file that cannot be read is left
    out with a warning. Raises RecordError where there is nothing to show, or for a file by name. Figures of
    others are passed over (see load_published()). needed: whether no run at all is an error.
    """
    boards: list[Scoreboard] = []
    warnings: list[str] = []
    rooflines: dict[Path, list[Record]] = {}  # by folder, read once
    for path in paths:
        contents: dict[Path, list[Record]] = {}
        for file in _files(path, warnings):
            if is_published(file):
                continue
            try:
                contents[file], torn = _one_run(file)
                warnings += torn
            except RecordError as error:
                if not path.is_dir():
                    raise
                warnings.append(f"{error}; left out")
        found: dict[tuple[Path, str, str], list[Scoreboard]] = {}
        for file, records in contents.items():
            if any(record.kind in RUNGS for record in records):
                if file.parent not in rooflines:
                    rooflines[file.parent] = _rooflines(file.parent)
                board = scoreboard(
                    records, source=file, elsewhere=_of_machine(rooflines[file.parent], records[0])
                )
                found.setdefault((file.parent, board.ladder, _workload(records[0])), []).append(board)
            elif not records or any(record.kind != "ceiling" for record in records):
                warnings.append(
                    f"{file}: {'holds no records of rungs' if records else 'is empty; name other files'}"
                )
        for runs in found.values():
            chosen = _chosen(runs)
            if not any(chosen.same_run(board) for board in boards):
                boards.append(chosen)
            warnings += _passed_over(runs, chosen)
    if not boards and needed:
        raise RecordError(_nothing(paths, warnings))
    return boards, list(dict.fromkeys(warnings))


def _nothing(paths: Sequence[Path], warnings: Sequence[str]) -> str:
    """Why there is nothing to show, and what to do: one line for files, and one more for each that a folder
    has.
    """
    shown, advice = ", ".join(str(path) for path in paths), "bench run ladders/smoke.yaml makes some"
    if not warnings and any(is_published(file) for path in paths for file in _files(path)):
        return f"{shown}: holds figures that others have published, no results of bench run; bench report shows them"
    if warnings and not any(path.is_dir() for path in paths):
        return f"{'; '.join(warnings)}; {advice}"
    return "\nbench: ".join([f"{shown}: no results here; {advice}", *warnings])


def load_named(name: str, warnings: list[str] | None = None) -> tuple[str, list[Scoreboard], str | None]:
    """What FILE, FOLDER or either with :RUNG stands for: the path, the runs there that have the rung, and its
    name.

    warnings: takes those about what was left out. Raises RecordError.
    """
    path, rung = name, None
    if not Path(name).exists():
        parts = name.split(":")
        cuts = [":".join(parts[:n]) for n in range(1, len(parts))]
        path = next((cut for cut in cuts if Path(cut).exists()), name)
        rung = name[len(path) + 1 :] or None
    boards, left_out = load_boards([Path(path)])
    if warnings is not None:
        warnings += left_out
    if rung is None:
        return path, boards, None
    known = [row.rung for board in boards for row in board.rows]
    if rung not in known:
        raise RecordError(f"{path}: no rung is called {rung!r}{near(rung, known)}")
    return path, [board for board in boards if rung in [row.rung for row in board.rows]], rung


def names(boards: Sequence[Scoreboard]) -> str:
    """Of runs, for an error's line."""
    return ", ".join(f"{board.ladder} on {board.environment.machine}" for board in boards)


def _workload(record: Record) -> str:
    """What makes runs of a ladder answers to different questions: `--set workload.model=gpt2-medium` for one."""
    return f"{record.workload['model']} on {record.workload['data']}"


def _one_run(file: Path) -> tuple[list[Record], list[str]]:
    """The records of a file, and warnings. Raises RecordError, for several runs in one file too."""
    records, warnings = read(file)
    if mixed := not_of_one_run(records):
        raise RecordError(f"{file}: {plain(mixed)}")
    _of_one_ladder(file, records)
    for record in records:
        for key, value in record.workload.items():
            if (other := records[0].workload.get(key, value)) != value:
                both = plain(f"{key} {other} and {value}")
                raise RecordError(
                    f"{file}: holds records of unlike tasks, which do not mix: {both}; one file each"
                )
    return records, warnings


def _of_one_ladder(file: Path, records: Sequence[Record]) -> None:
    """Raise RecordError where records are of several ladders, or what is averaged over rounds is not alike."""
    alike: dict[tuple[str, int], Record] = {}
    for record in records:
        first = records[0]
        if (record.ladder, record.ladder_hash) != (first.ladder, first.ladder_hash):
            both = [f"{each.ladder} ({each.ladder_hash[:12]})" for each in (first, record)]
            raise RecordError(
                f"{file}: holds records of two ladders, {plain(' and '.join(both))}; one file each"
            )
        first = alike.setdefault((record.kind, record.rung_index), record)
        where = f"{file}: {plain(record.rung)!r}, {record.kind}, round {record.repetition}"
        if record.rung != first.rung:
            raise RecordError(f"{where}: has the rung_index {record.rung_index} of {plain(first.rung)!r}")
        now, was = record.toggles.as_toggles, first.toggles.as_toggles
        if now != was:
            unlike = plain(", ".join(describe(now, was, Workload(**record.workload))))
            raise RecordError(f"{where}: its toggles are not those of round {first.repetition}: {unlike}")
        tokens = now.tokens_per_step(record.workload["seq_len"])
        if record.measurement and record.measurement.tokens_per_step != tokens and not record.external:
            found = f"{record.measurement.tokens_per_step:,} tokens per step"
            raise RecordError(f"{where}: measured {found}, but its toggles make {tokens:,}")


def _rooflines(folder: Path) -> list[Record]:
    """What `bench roofline` left in a folder, the newest last."""
    found: list[Record] = []
    for file in results_files(folder, "roofline-"):
        if file.parent != folder:  # another machine's
            continue
        with contextlib.suppress(RecordError):  # another's trouble
            found += [record for record in read(file)[0] if record.ceiling]
    return found


def _of_machine(rooflines: Sequence[Record], record: Record) -> list[Record]:
    """Those of the machine, the torch and the model of `record`."""

    def place(of: Record) -> tuple[str, str, str]:
        return of.environment.machine, of.environment.torch, of.workload["model"]

    return [roofline for roofline in rooflines if place(roofline) == place(record)]


def _chosen(runs: Sequence[Scoreboard]) -> Scoreboard:
    newest = max(runs, key=lambda board: (_says(board), not board.interrupted, board.begun))
    # A ladder that was changed takes the place of what it was; sweeps of one name may go over other values.
    same = [board for board in runs if newest.swept or _same_ladder(board, newest)]

    def merit(board: Scoreboard) -> tuple[bool, bool, int, bool, str]:
        # How many batches a sweep tries, its bisection decides: fewer are no less of an answer.
        rungs = 0 if board.swept else len(board.rows)
        return _says(board), not board.interrupted, rungs, board.rounds >= LEAST_ROUNDS, board.begun

    return max(same, key=merit)


def _says(board: Scoreboard) -> bool:
    """Whether any rung was measured: a whole run in which none was stands for less than a part of another."""
    return any(record.measurement for record in board.records)


def _passed_over(runs: Sequence[Scoreboard], chosen: Scoreboard) -> list[str]:
    """A line for each newer run that is not shown, and for each whole one that the one shown does not stand
    for.
    """
    newer = [board for board in runs if board.begun > chosen.begun]
    why = {True: "interrupted", False: "shorter"}
    others = [
        b for b in runs if b.begun <= chosen.begun and not b.interrupted and not _same_ladder(b, chosen)
    ]
    return [
        *(f"{b.source} is newer but {why[b.interrupted]} and not shown; name it to see it" for b in newer),
        *(
            f"{b.source} is called {b.ladder} like {chosen.source}, but has other rungs or another task; not "
            "shown; name it to see it"
            for b in others
        ),
    ]


def _same_ladder(one: Scoreboard, other: Scoreboard) -> bool:
    """Whether two runs of one name are of the same task and rungs; of one cut short, as far as it came.

    By what their records say: a ladder's hash changes with each toggle that the code learns, and with no
    default.
    """
    if one.records[0].ladder_hash == other.records[0].ladder_hash:
        return True
    if Workload(**one.records[0].workload) != Workload(**other.records[0].workload):
        return False
    mine, theirs = _rungs(one), _rungs(other)
    if mine.keys() != theirs.keys() and not any(_partial(board) for board in (one, other)):
        return False
    common = mine.keys() & theirs.keys()
    return all(mine[rung] == theirs[rung] for rung in common) and common in (mine.keys(), theirs.keys())


def _rungs(board: Scoreboard) -> dict[str, tuple[Toggles, str | None]]:
    """What each rung is, by its name."""
    found = {}
    for row in board.rows:
        first = board.records_of(row)[0]
        found[row.rung] = (first.toggles.as_toggles, first.external.command if first.external else None)
    return found


def _partial(board: Scoreboard) -> bool:
    """Whether the ladder has rungs that this run has not."""
    return board.interrupted or board.has_gaps or any(record.chosen for record in board.records)


def exit_code(records: Sequence[Record]) -> int:
    """0 all as asked, 6 some process failed unexpectedly or no rung is supported, 4 some rung belies what it
    claims.

    That last is: its loss differs, its ranks do, it recompiled, or what the ladder expects of it did not
    happen.
    """
    if nothing_supported(records):
        return 6
    expected = {record.rung for record in records if record.expect == "out_of_memory"}
    swept = any(record.kind == "sweep" for record in records)
    for record in records:
        if record.status in ("failed", "timeout"):
            return 6
        # A large batch alone, without what makes room for it, is an answer to the question that --ablate
        # asks, and any batch to that of a sweep.
        asked = record.kind in ABLATION or record.rung in expected or swept
        if record.status == "out_of_memory" and not asked:
            return 6
    return 4 if claims_refuted(scoreboard(records)) else 0


def nothing_supported(records: Sequence[Record]) -> bool:
    """Whether this machine can run none of the rungs, which nobody asks for: its device is not here, as a
    rule.
    """
    return {record.status for record in records if record.kind in RUNGS} == {"unsupported"}


def claims_refuted(board: Scoreboard) -> list[str]:
    """Why the exit code is 4: for each rung that ran and does not do what it claims, what it does instead."""
    wrong = []
    for row in board.rows:
        if row.status in ("parity_failed", "ranks_differ", "recompiled"):
            wrong.append(f"{row.rung}: {status_of(row)}")
        elif row.expect and row.status == "ok":
            wrong.append(f"{row.rung}: the ladder expects {row.expect}, and it ran as any other")
    return wrong

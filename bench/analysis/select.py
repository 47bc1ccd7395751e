"""Which results files to show, and what a run's results say about its success."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from bench.analysis.row import NOT_CARRIED, status_of
from bench.analysis.run_records import together
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.format import plain
from bench.ladder.validation import near
from bench.records.published import Published, is_published, read_published
from bench.records.record import (
    ABLATION,
    ROOFLINE,
    RUNGS,
    Record,
    RecordError,
    not_of_one_run,
    read,
    results_files,
)
from bench.stats import LEAST_ROUNDS
from gpt2.config.toggles import Toggles, describe
from gpt2.config.workload import Workload

FEW_LINES = 2
"""Up to so many runs that are not shown are named one by one."""


def load_published(paths: Sequence[Path]) -> tuple[list[Published], list[str]]:
    """Load figures of others from results files and folders, with warnings about files left out.

    Raises RecordError where a file given by name cannot be read.
    """
    figures: list[Published] = []
    seen: set[Path] = set()
    warnings: list[str] = []
    for path in paths:
        for file in _files(path):
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                figures += read_published(file, warnings) if is_published(file) else []
            except RecordError as error:
                if not path.is_dir():
                    raise
                warnings.append(f"{error}; left out")
    return figures, warnings


def _files(path: Path, warnings: list[str] | None = None) -> list[Path]:
    """The results files of a folder, or the file itself. Raises RecordError for a pipe or a device."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise RecordError(f"{path}: is no file and no folder; write the results into a file first")
    return results_files(path, warnings=warnings) if path.is_dir() else [path]


def load_boards(
    paths: Sequence[Path], *, needed: bool = True, passed_over: list[Scoreboard] | None = None
) -> tuple[list[Scoreboard], list[str]]:
    """Load the scoreboards of results files, with warnings about what was left out.

    A file is shown as it is, and once, however often it is named. Of the files below a folder, each
    subfolder, machine, ladder, model and text shows one: of the runs of the ladder as its last whole run
    has it, an uninterrupted one before others, then the one with most rungs (not of sweeps, which try as
    many batches as it takes), then one with rounds enough for intervals, then the newest. Newer ones that
    are passed over are named, and so are whole ones of the same name that differ in their values or task.
    Files that hold nothing but a measured ceiling belong to bench roofline and lend it to runs that
    measured none. Of a folder, a file that cannot be read is left out with a warning. Figures of others are
    passed over (see load_published()).

    passed_over: takes the runs of folders in whose place another is shown. needed: whether no run at all is
    an error. Raises RecordError for that, and for a file given by name that cannot be read.
    """
    boards: list[Scoreboard] = []
    warnings: list[str] = []
    others: dict[Path | None, tuple[Scoreboard, Scoreboard]] = {}  # each with the run that stands for it
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
        runs_by_name: dict[tuple[Path, str, str, str], list[Scoreboard]] = {}
        for file, records in contents.items():
            if any(record.kind in RUNGS for record in records):
                if file.parent not in rooflines:
                    rooflines[file.parent] = _rooflines(file.parent)
                of_machine = [r for r in rooflines[file.parent] if _machine(r) == _machine(records[0])]
                board = scoreboard(records, source=file, elsewhere=of_machine)
                workload = records[0].workload  # --set workload.model=gpt2-medium asks another question
                task = f"{workload['model']} on {workload['data']}"
                name = file.parent, board.environment.machine, board.ladder, task
                runs_by_name.setdefault(name, []).append(board)
            elif not records or any(record.kind != "ceiling" for record in records):
                warnings.append(f"{file}: {_nothing_to_show(records)}")
        for runs in runs_by_name.values():
            chosen = choose(runs)
            if not any(chosen.same_run(board) for board in boards):
                boards.append(chosen)
            others |= {board.place: (board, chosen) for board in runs if board is not chosen}
    shown = {board.place for board in boards}
    unseen = [pair for place, pair in others.items() if place not in shown]
    if passed_over is not None:
        passed_over += [board for board, _ in unseen]
    if not boards and needed:
        raise RecordError(_nothing(paths, warnings))
    originals: list[Scoreboard] = []
    for board in boards:
        if copied := next((other for other in originals if board.is_copy_of(other)), None):
            warnings.append(f"{board.source} is a copy of {copied.source}: one run, shown once")
        else:
            originals.append(board)
    not_shown = [line for board, chosen in unseen if (line := _why_not_shown(board, chosen))]
    if len(not_shown) > FEW_LINES:
        why = "newer than the run shown of their ladder but interrupted or shorter, or unlike it"
        not_shown = [f"{len(not_shown)} runs are left out: {why}; name a file to see it"]
    return originals, list(dict.fromkeys([*warnings, *not_shown]))


def _nothing_to_show(records: Sequence[Record]) -> str:
    """Why a file makes no scoreboard, and what to do."""
    if not records:
        return "is empty; name other files"
    if any(record.kind == "scout" for record in records):
        return "holds only short tries, no measured rung (bench run LADDER --resume goes on)"
    return "holds no records of rungs; name other files"


def _nothing(paths: Sequence[Path], warnings: Sequence[str]) -> str:
    """Why there is nothing to show, and what to do: one line, and one more for each file of a folder."""
    shown, advice = ", ".join(map(str, paths)), "bench run ladders/smoke.yaml makes some"
    if not warnings and any(is_published(file) for path in paths for file in _files(path)):
        holds = "holds figures that others have published, no results of bench run"
        return f"{shown}: {holds}; bench report shows them"
    if warnings and not any(path.is_dir() for path in paths):
        return f"{'; '.join(warnings)}; {advice}"
    return "\nbench: ".join([f"{shown}: no results here; {advice}", *warnings])


def load_named(name: str, warnings: list[str] | None = None) -> tuple[str, list[Scoreboard], str | None]:
    """Load FILE, FOLDER, or either with :RUNG: the path, the runs there that have the rung, and its name.

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


def run_names(boards: Sequence[Scoreboard]) -> str:
    """Names of runs for an error message."""
    return ", ".join(board.title for board in boards)


def _one_run(file: Path) -> tuple[list[Record], list[str]]:
    """Records of a file, and warnings. Raises RecordError, for several runs in one file too."""
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
    """Raise RecordError where records are of several ladders, or rounds of a rung are not alike."""
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
        if now != was and record.kind != "scout":  # a rung is also tried with what was carried meanwhile
            unlike = plain(", ".join(describe(now, was, Workload(**record.workload))))
            raise RecordError(f"{where}: its toggles are not those of round {first.repetition}: {unlike}")
        tokens = now.tokens_per_step(record.workload["seq_len"])
        if record.measurement and record.measurement.tokens_per_step != tokens and not record.external:
            measured_tokens = f"{record.measurement.tokens_per_step:,} tokens per step"
            raise RecordError(f"{where}: measured {measured_tokens}, but its toggles make {tokens:,}")


def _rooflines(folder: Path) -> list[Record]:
    """Records that `bench roofline` left in a folder, the newest last."""
    records: list[Record] = []
    for file in results_files(folder, ROOFLINE):
        if file.parent != folder:  # another machine's
            continue
        with contextlib.suppress(RecordError):  # another's trouble
            records += [record for record in read(file)[0] if record.ceiling]
    return records


def _machine(record: Record) -> tuple[str, str, str]:
    """What must be equal for a run to take a ceiling from `bench roofline`."""
    return record.environment.machine, record.environment.torch, record.workload["model"]


def choose(runs: Sequence[Scoreboard]) -> Scoreboard:
    """The run that stands for all runs of one name, see load_boards()."""
    newest = max(runs, key=lambda board: (_has_measurement(board), not board.interrupted, board.begun))
    # A ladder that was changed takes the place of what it was; sweeps of one name may go over other values.
    same = [board for board in runs if newest.swept or _same_ladder(board, newest)]

    def merit(board: Scoreboard) -> tuple[bool, bool, int, bool, str]:
        # How many batches a sweep tries, its bisection decides: fewer are no less of an answer.
        rungs = 0 if board.swept else len(board.rows)
        return (
            _has_measurement(board),
            not board.interrupted,
            rungs,
            board.rounds >= LEAST_ROUNDS,
            board.begun,
        )

    return max(same, key=merit)


def _has_measurement(board: Scoreboard) -> bool:
    """Whether any rung was measured; a part of a run says more than a whole run in which none was."""
    return any(record.measurement for record in board.records)


def _why_not_shown(board: Scoreboard, chosen: Scoreboard) -> str | None:
    """A line for a run that is newer than the one shown, or whole and unlike it; None for others."""
    if board.begun > chosen.begun:
        why = "interrupted" if board.interrupted else "shorter"
        return f"{board.source} is newer but {why} and not shown; name it to see it"
    if board.interrupted or _same_ladder(board, chosen):
        return None
    unlike = f"is called {board.ladder} like {chosen.source}, but has other rungs or another task"
    return f"{board.source} {unlike}; not shown; name it to see it"


def _same_ladder(one: Scoreboard, other: Scoreboard) -> bool:
    """Whether two runs of one name are of the same task and rungs, as far as an interrupted one came.

    Decided by the records: a ladder's hash changes with each toggle that the code learns.
    """
    if one.records[0].ladder_hash == other.records[0].ladder_hash:
        return True
    if Workload(**one.workload) != Workload(**other.workload):
        return False
    a, b = _rungs(one), _rungs(other)
    if a.keys() != b.keys() and not any(_partial(board) for board in (one, other)):
        return False
    common = a.keys() & b.keys()
    return all(a[rung] == b[rung] for rung in common) and common in (a.keys(), b.keys())


def _rungs(board: Scoreboard) -> dict[str, tuple[Toggles, str | None]]:
    """Toggles and other trainer's command of each rung, by its name."""
    rungs = {}
    for row in board.rows:
        first = board.records_of(row)[0]
        rungs[row.rung] = (first.toggles.as_toggles, first.external.command if first.external else None)
    return rungs


def _partial(board: Scoreboard) -> bool:
    """Whether the ladder has rungs that this run has not."""
    return board.interrupted or board.has_gaps or any(record.chosen for record in board.records)


def exit_code(records: Sequence[Record]) -> int:
    """Exit code of a run: 0 all as expected, 4 a failed check, 6 a process failed or nothing is supported.

    4 is: a rung's loss differs, its ranks differ, it recompiled, or the ladder's expectation was not met.
    """
    if nothing_supported(records):
        return 6
    expected = {record.rung for record in records if record.expect == "out_of_memory"}
    swept = any(record.kind == "sweep" for record in records)
    for record in records:
        if record.status in ("failed", "timeout") and not together(record):  # which nobody wrote
            return 6
        # A large batch alone, without what makes room for it, is an answer to the question that --ablate
        # asks, and any batch to that of a sweep, and any rung to that of a climb.
        expected_here = record.kind in (*ABLATION, "scout") or record.rung in expected or swept
        if record.status == "out_of_memory" and not expected_here:
            return 6
    return 4 if claims_refuted(scoreboard(records)) else 0


def nothing_supported(records: Sequence[Record]) -> bool:
    """Whether this machine supports none of the rungs, as a rule because their device is missing."""
    return {record.status for record in records if record.kind in RUNGS} == {"unsupported"}


def claims_refuted(board: Scoreboard) -> list[str]:
    """Why the exit code is 4: a line for each rung that ran and does not do what it claims."""
    lines = []
    for row in board.rows:
        if row.status in ("parity_failed", "ranks_differ", "recompiled"):
            lines.append(f"{row.rung}: {status_of(row)}")
        elif row.expect and (
            row.status == "ok" or (row.status == NOT_CARRIED and row.expect == "out_of_memory")
        ):
            lines.append(f"{row.rung}: the ladder expects {row.expect}, and it ran as any other")
    return lines

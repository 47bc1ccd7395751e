"""Run a ladder: one fresh process per rung and round, and one record per process.

The runner loads no torch and never opens the device.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import cast

from bench.analysis.schedule import Cut
from bench.errors import BenchError
from bench.format import duration, plural
from bench.host.doctor import costly_page_faults
from bench.ladder.ladder import Ladder, Rung
from bench.ladder.shipped import QUICK
from bench.process.shutdown import Stop, stoppable
from bench.process.worker_side import cause
from bench.records.machine import Environment
from bench.records.record import RUNGS, Record, ResultsFile, read
from bench.run.command import Options
from bench.run.executor import Executor, Watcher, nodes_of
from bench.run.nodes.coordinator import Team, described
from bench.run.nodes.rendezvous import Rendezvous
from bench.run.nodes.topology import PlaceError
from bench.run.peers.checkout import why_missing
from bench.run.probe import ProbeResult, probe
from bench.run.resume import repair, unfinished
from bench.run.rounds import Climb, Rounds, TaskSource, TimeLimit
from bench.run.suited import with_best
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle
from gpt2.data.batches import Batches, DataError, open_corpus
from gpt2.hardware.host import SPLITS_WORDS, missing_allocator, temp_folder


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Records and end of a run."""

    path: Path
    records: list[Record]
    """Includes those of the run that was resumed."""
    interrupted: bool
    error: str | None = None
    """Why it ended early, other than by the user."""
    cut: Cut | None = None
    """Where it ran out of time; None if it did not."""

    @property
    def has_rungs(self) -> bool:
        """Whether there is a scoreboard to show."""
        return any(record.kind in RUNGS for record in self.records)


def run(
    ladder: Ladder, options: Options, watcher: Watcher, source: Callable[[], TaskSource] | None = None
) -> RunResult:
    """Run the ladder, appending each process's record to a results file as soon as it ends.

    source: makes the source of tasks; by default the one that the ladder's `carry` asks for. Raises
    BenchError before anything is written. Ctrl-C or SIGTERM ends the running process, records it as
    interrupted and returns.
    """
    watcher = unfailing(watcher)
    data_sha256 = _check(ladder, options)
    probed = _probe(ladder, options)
    machine = probed.environment
    ladder, found = with_best(ladder, options.overrides, options.out, machine)
    rungs = ladder.chosen(options.rungs)
    for each in (*found, *_notes(ladder, rungs, machine)):
        watcher.note(each)
    limit = None
    if options.minutes:
        limit = TimeLimit(60 * options.minutes, options.patience, fill=not options.rounds_given)
    kind = Climb if ladder.protocol.carry == "if_faster" else Rounds
    # Which earlier run is complete does not depend on the time that this one has.
    without_limit = source or partial(kind, ladder, rungs, options.ablate)
    source = source or partial(kind, ladder, rungs, options.ablate, limit)
    if options.place:
        machine = machine.model_copy(update={"nodes": options.place.nodes})
    schedule = source()
    path = _results_file(ladder, options, machine, data_sha256, without_limit)
    records: list[Record] = []
    """Includes those of the run that is resumed."""
    with (
        stoppable() as stop,
        contextlib.closing(ResultsFile(path, watcher.note)) as results,
        _team(ladder, options, data_sha256, probed, stop, watcher) as team,
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
    ):
        if team:
            team.gather(_most_nodes(rungs, team.place.nodes, probed))
        if options.resume:
            repair(path)
            results.reread()
            records += [record for record in read(path)[0] if not record.cut_short]
            schedule.resume(records)
            held = plural(len(records), "process", "processes")
            watcher.note(f"going on with {path}, which holds {held}")
        executor = Executor(
            ladder,
            options,
            Path(scratch),
            records[0].run_id if records else path.stem,
            probed,
            watcher,
            standing=costly_page_faults() if _page_faults_matter(ladder, rungs) else (),
            stop=team or stop,
            team=team,
        )
        interrupted, error = _run_tasks(schedule, executor, results, records, limit, data_sha256)
        if team:
            team.dismiss(*_end_for_other_nodes(interrupted, error))
    return RunResult(
        path=results.path, records=records, interrupted=interrupted, error=error, cut=schedule.cut
    )


def _check(ladder: Ladder, options: Options) -> str:
    """Check the options and the corpus, whose sha256 is returned. Raises BenchError."""
    if options.ablate and options.rungs:
        raise BenchError("--ablate takes each rung out of the whole ladder; leave out --rungs")
    if options.compile_cache:
        _check_compile_cache(options.compile_cache)
    if options.place and any(rung.best_of for rung in ladder.own):
        raise BenchError(f"{ladder.path}: best_of asks for results of one machine; leave out --nnodes")
    return check_data(ladder, ladder.chosen(options.rungs), options.data)


def _probe(ladder: Ladder, options: Options) -> ProbeResult:
    # The ladder's file contains neither a sweep's candidates nor what is best here.
    in_file = not any(rung.base or rung.settings or rung.best_of for rung in ladder.rungs)
    device = ladder.chosen(options.rungs)[-1].toggles.device
    return probe(device, ladder.path if in_file else None, options.overrides, ablate=options.ablate)


def _notes(ladder: Ladder, rungs: Sequence[Rung], machine: Environment) -> Iterator[str]:
    """What the user should know before the run starts."""
    if other := ladder.written_for_another(machine.chip):
        yield other
    for name, reason in missing_peers(ladder, rungs):
        yield f"{name}: {reason}"


def _results_file(
    ladder: Ladder, options: Options, machine: Environment, data_sha256: str, source: Callable[[], TaskSource]
) -> Path:
    """Return the file to resume, or a new one. Raises BenchError."""
    if not options.resume:
        return new_results(ladder, options.out, machine)
    path = unfinished(
        options.out,
        ladder,
        machine,
        chosen=options.rungs,
        data_sha256=data_sha256,
        peak_tflops=options.peak_tflops,
        ablate=options.ablate,
        lacks=lambda records: lacks(source(), records),
    )
    _check_writable(path.parent)
    return path


def _run_tasks(
    schedule: TaskSource,
    executor: Executor,
    results: ResultsFile,
    records: list[Record],
    limit: TimeLimit | None,
    data_sha256: str,
) -> tuple[bool, str | None]:
    """Run the tasks one after another, appending each record to `records` and to the file.

    data_sha256: of the corpus when the run began. Returns whether the user interrupted the run, and why it
    could not go on, None if it could.
    """
    options, watcher = executor.options, executor.watcher
    held, unwritten = len(records), None
    on_quick = executor.ladder.name == QUICK
    try:
        for task in schedule.tasks(records, watcher.note):
            if executor.stop.requested:  # a measurement that is complete by then counts
                return True, None
            rounds = max(schedule.planned_rounds, task.repetition)
            left = schedule.seconds_left(1 if task.kind == "scout" else task.repetition, rounds)
            if limit and left is not None:
                in_first = task.kind == "scout" or task.repetition == 1
                certain = (schedule.seconds_left(1, 1) or 0.0) if in_first else 0.0
                left = limit.seconds_to_go(left, certain)
            watcher.started(task, rounds, left)
            start = time.monotonic()
            try:
                record = executor.run(task)
            except OSError as problem:
                what = f"rung {task.rung.name!r}: {_not_run(problem)}"
                return False, f"{what}; {_kept(results, records, on_quick)}"
            try:
                changed = _read_another_text(record, executor, data_sha256)
            except Exception as error:
                changed = False
                unsure = f"its text was not compared with the run's ({cause(error)}); the measurement stands"
                record = record.model_copy(update={"warnings": [*record.warnings, unsure]})
            if changed:
                what = text_changed(executor.ladder, options.data)
                return False, f"{what}; {_not_kept(record)}{_kept(results, records, on_quick)}"
            unwritten = record
            records.append(record)
            results.append(record)
            unwritten = None
            schedule.ended(record, time.monotonic() - start)
            watcher.finished(record)
            if record.status == "interrupted":
                return True, None
            if options.minutes and len(records) == held + 1:
                _check_minutes(options.minutes, schedule, watcher, options.however_long)
        if schedule.cut:  # the file must say that the run is incomplete
            records.append(executor.not_begun(schedule.cut))
            results.append(records[-1])
    except OSError as problem:
        lost = _not_kept(unwritten)
        kept = _kept(results, records[:-1] if unwritten else records, on_quick)
        return False, f"{problem.filename or results.path}: {problem.strerror or problem}; {lost}{kept}"
    return False, None


def _not_run(problem: OSError) -> str:
    """Words on why a process could not be started or followed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the working directory is no longer there"
    return f"{problem.filename or 'its process could not be run'}: {problem.strerror or problem}"


def text_changed(ladder: Ladder, data: Path | None) -> str:
    """Say that the corpus, which lies at `data` if given, is another than when the run began."""
    where = data or f"{ladder.path}: workload.data"
    return f"{where}: the text changed while the run went on; put it back, or begin anew"


def _read_another_text(record: Record, executor: Executor, data_sha256: str) -> bool:
    """Whether a process of ours read another text than the run began with, or could not read it any more."""
    if record.external or record.kind == "ceiling":
        return False
    if record.data_sha256 is not None or record.status != "failed":
        return record.data_sha256 not in (None, data_sha256)
    ladder, options = executor.ladder, executor.options
    try:
        return check_data(ladder, ladder.chosen(options.rungs), options.data) != data_sha256
    except BenchError:
        return True


def _kept(results: ResultsFile, records: Sequence[Record], on_quick: bool) -> str:
    """Words on the records that are in the file, and on how to go on."""
    if not results.whole:
        return f"{results.path} was taken away, and its records could not be written again"
    if not records:
        return "there are no records yet"
    return f"the records before are kept{'' if on_quick else ', and --resume goes on from there'}"


def _check_minutes(minutes: float, schedule: TaskSource, watcher: Watcher, however_long: bool) -> None:
    """Say where one round takes far longer than there is time, by the first process.

    however_long: whether it is run all the same; if not, this raises BenchError.
    """
    needed = schedule.seconds_left(1, 1)
    if needed is None or needed < FAR_TOO_LONG * 60 * minutes:
        return
    what = f"--minutes {minutes:g}: one window of each rung takes about {duration(needed)} here"
    if however_long:
        watcher.note(f"{what}; that is measured all the same")
        return
    raise BenchError(
        f"{what}; give as much, or fewer rungs with --rungs (the first record is kept, and --resume goes on)"
    )


FAR_TOO_LONG = 1.5
"""Factor by which the first estimate, from one process alone, may be wrong."""


def _not_kept(record: Record | None) -> str:
    """Words for a process that ended but whose record could not be written."""
    if record is None:
        return ""
    tps = record.measurement.tokens_per_second if record.measurement else None
    measured = f", {tps:,.0f} tokens/s," if tps else ""
    return f"the last process, of rung {record.rung!r}{measured} is not kept; "


def unfailing(watcher: Watcher) -> Watcher:
    """Wrap a watcher so that its errors, such as those of a closed terminal, do not end the run."""

    class Unfailing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            tell = getattr(watcher, name)

            def suppressed(*facts: object) -> None:
                with contextlib.suppress(Exception):
                    tell(*facts)

            return suppressed

    return cast(Watcher, Unfailing())


def lacks(source: TaskSource, records: Sequence[Record]) -> bool:
    """Whether tasks are left after those of these records."""
    source.resume(records)
    left = next(source.tasks(list(records), lambda _: None), None)
    return left is not None or source.cut is not None


@contextlib.contextmanager
def _team(
    ladder: Ladder, options: Options, data_sha256: str, probed: ProbeResult, stop: Stop, watcher: Watcher
) -> Iterator[Team | None]:
    """Open the store in which other nodes find this one; None if there is one node. Raises PlaceError."""
    if options.place is None:
        yield None
        return
    here = described(options.place, ladder, data_sha256, probed.environment)
    with contextlib.closing(Rendezvous(options.place)) as store:
        team = Team(options.place, here, store, stop, watcher.note)
        try:
            yield team
        except BaseException as error:
            team.dismiss(2 if isinstance(error, PlaceError) else 6, "node 0 ended early; it says why")
            raise


def _most_nodes(rungs: Sequence[Rung], nodes: int, probed: ProbeResult) -> int:
    """Return the most nodes that a rung takes: no others need be waited for."""
    most = 1
    for rung in rungs:
        with contextlib.suppress(UnsupportedToggle):
            most = max(most, nodes_of(rung, rungs[-1], nodes, probed))
    return most


def _end_for_other_nodes(interrupted: bool, error: str | None) -> tuple[int, str]:
    """Return exit code and message of the other nodes' bench run."""
    if error:
        return 6, "node 0 could not go on; it says why"
    return (130, "the run was interrupted") if interrupted else (0, "the run is done; node 0 has its records")


HEAP_BYTES = 32 * 2**20
"""Largest block of glibc's heap; larger ones are mapped as fresh pages (mallopt, M_MMAP_THRESHOLD)."""


def _page_faults_matter(ladder: Ladder, rungs: Sequence[Rung]) -> bool:
    """Whether to advise against page faults: rungs on a CPU have them at each step, and none avoids them."""
    others = {rung.toggles.allocator for rung in rungs} - {Toggles().allocator}
    if any(missing_allocator(name) is None for name in others):
        return False
    sequence = ladder.workload.seq_len * ladder.workload.config.vocab_size * 4  # logits in float32
    return any(
        rung.toggles.device == HOST and rung.toggles.micro_batch_size * sequence > HEAP_BYTES
        for rung in rungs
    )


def check_data(ladder: Ladder, rungs: Sequence[Rung], data: Path | None) -> str:
    """Open the corpus for all rungs before any process starts; return its sha256. Raises BenchError."""
    workload = ladder.workload
    where = f"{ladder.path}: workload.data"
    try:
        corpus = open_corpus(
            workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=data
        )
        for rung in rungs:
            if rung.external:  # reads its own data
                continue
            where = f"{ladder.path}: rung {rung.name!r}"
            tokens = rung.toggles.tokens_per_step(workload.seq_len)
            Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
    except DataError as error:
        raise BenchError(f"{where}: {error}") from None
    return corpus.sha256


def missing_peers(ladder: Ladder, rungs: Sequence[Rung]) -> Iterator[tuple[str, str]]:
    """Yield name and reason of each external rung that is not supported here."""
    for rung in rungs:
        if rung.external and (reason := why_missing(rung.external, rung.toggles, ladder.path)):
            yield rung.name, reason


def new_results(ladder: Ladder, out: Path, machine: Environment, name: str = "{}.jsonl") -> Path:
    """Create an empty results file; one of the same second gets a later name. Raises BenchError.

    name: of the file, with {} for ladder and time.
    """
    folder = out / machine.machine
    _check_writable(folder)
    begun = datetime.now(UTC)
    while True:
        path = folder / name.format(f"{ladder.file_name}-{begun:%Y%m%dT%H%M%SZ}")
        folder.mkdir(parents=True, exist_ok=True)  # another run may have found it empty, and removed it
        with contextlib.suppress(FileExistsError):
            path.open("x").close()
            return path
        begun += timedelta(seconds=1)


def _check_compile_cache(folder: Path) -> None:
    """Check that torch.compile can use a folder. Raises BenchError."""
    if SPLITS_WORDS.search(str(folder.absolute())):
        where = f"torch.compile cannot compile in {str(folder.absolute())!r}"
        raise BenchError(f"{where}; choose a folder without blanks or quotes with --compile-cache")
    _check_writable(folder, "--compile-cache")


def _check_writable(folder: Path, option: str = "--out") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        dangling = [each for each in (folder, *folder.parents) if each.is_symlink() and not each.exists()]
        why = f"{dangling[0]} is a link to nothing" if dangling else error.strerror
        raise BenchError(f"cannot write to {folder} ({why}); choose another folder with {option}") from None

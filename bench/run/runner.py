"""Run a ladder: one fresh process per rung and round, one record per process, appended as soon as it ends.

The parent loads no torch and never opens the device; it meets the worker at a file only.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Protocol, cast

from bench.analysis.attribution import ratios
from bench.analysis.schedule import Cut, Schedule, Task
from bench.analysis.scoreboard import scoreboard
from bench.host.doctor import costly_page_faults
from bench.ladder.ladder import Ladder, Rung
from bench.process.shutdown import Stop, stoppable
from bench.records.machine import Environment
from bench.records.record import RUNGS, Record, append, read, reserved
from bench.run.command import Options
from bench.run.executor import Processes, Watcher
from bench.run.nodes.coordinator import Team, described
from bench.run.nodes.rendezvous import Rendezvous
from bench.run.nodes.topology import PlaceError, nodes_for
from bench.run.peers.checkout import why_missing
from bench.run.probe import Answer, probe
from bench.run.resume import repair, unfinished
from bench.stats import MOST_ROUNDS_UNTIL, narrow_enough
from gpt2.config.toggles import HOST, UnsupportedToggle
from gpt2.data.batches import Batches, DataError, open_corpus
from gpt2.hardware.host import SPLITS_WORDS, temp_folder


class RunError(Exception):
    """A run that cannot start; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a run."""

    path: Path
    records: list[Record]
    """With those of the run that was resumed."""
    interrupted: bool
    error: str | None = None
    """Why it ended early, where it was not the user who ended it."""
    cut: Cut | None = None
    """Where its time was over, if it had a limit and that was too short."""

    @property
    def has_rungs(self) -> bool:
        """Whether there is a scoreboard to show."""
        return any(record.kind in RUNGS for record in self.records)


class Plan(Protocol):
    """Which processes a run consists of; it is told how each one ended."""

    cut: Cut | None
    """Where its time was over, if it has a limit."""

    @property
    def planned_rounds(self) -> int: ...
    def resume(self, records: Sequence[Record]) -> None: ...
    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]: ...
    def ended(self, record: Record, seconds: float | None = None) -> None: ...
    def seconds_left(self, repetition: int, rounds: int) -> float | None: ...


class Rounds(Schedule):
    """A ladder's processes, in rounds until there are enough."""

    cut: Cut | None = None

    def tasks(self, records: list[Record], note: Callable[[str], None]) -> Iterator[Task]:
        """All of them; `records` grows meanwhile."""
        protocol = self.ladder.protocol
        for repetition in count(1):
            yield from self.round(repetition)
            if repetition < self.planned_rounds:
                continue
            known = ratios(scoreboard(records)) if protocol.until is not None else []
            # Of the ratios the widths only play a part, never the values.
            if (
                protocol.until is None
                or repetition >= MOST_ROUNDS_UNTIL
                or narrow_enough(known, protocol.until)
            ):
                yield from self.closing(repetition)
                return
            widest = max((ratio.half_width for ratio in known if ratio.half_width), default=None)
            wide = (
                f"the widest interval is ±{widest:.1%}" if widest is not None else "there is no interval yet"
            )
            note(f"{wide} and is to be ±{protocol.until:.1%}: another round, of {MOST_ROUNDS_UNTIL} at most")


def run(ladder: Ladder, options: Options, watcher: Watcher, plan: Callable[[], Plan] | None = None) -> Run:
    """Run the ladder, appending each process's record to a results file as soon as it ends.

    plan: makes what says which processes, where that is not each rung in rounds. Raises LadderError,
    DataError, ProbeError, ResumeError, RecordError, PlaceError or RunError before anything is written. Ctrl-C
    or SIGTERM ends the process that runs, records it as interrupted and returns what there is.
    """
    rungs, watcher = ladder.chosen(options.rungs), unfailing(watcher)
    if options.ablate and options.rungs:
        raise RunError("--ablate takes each rung out of the whole ladder; leave out --rungs")
    data_sha256 = check_data(ladder, rungs, options.data)
    if options.compile_cache:
        _check_compile_cache(options.compile_cache)
    plan = plan or partial(Rounds, ladder, rungs, options.ablate)
    schedule = plan()
    swept = rungs[0].base is not None  # whose file knows nothing of these candidates
    asked = probe(
        rungs[-1].toggles.device, None if swept else ladder.path, options.overrides, ablate=options.ablate
    )
    machine = asked.environment
    if other := ladder.written_for_another(machine.chip):
        watcher.note(other)
    for name, reason in missing_peers(ladder, rungs):
        watcher.note(f"{name}: {reason}")
    if options.place:
        machine = machine.model_copy(update={"nodes": options.place.nodes})
    if options.resume:
        path = unfinished(
            options.out,
            ladder,
            machine,
            chosen=options.rungs,
            data_sha256=data_sha256,
            peak_tflops=options.peak_tflops,
            ablate=options.ablate,
            lacks=lambda records: lacks(plan(), records),
        )
        _check_writable(path.parent)
    else:
        path = new_results(ladder, options.out, machine)
    records: list[Record] = []
    interrupted, error = False, None
    with (
        stoppable() as stop,
        reserved(path),
        _team(ladder, options, data_sha256, asked, stop, watcher) as team,
        tempfile.TemporaryDirectory(prefix="bench-", dir=temp_folder()) as scratch,
    ):
        ending = team or stop
        if team:
            team.gather(_most_nodes(rungs, team.place.nodes, asked))
        if options.resume:
            repair(path)
            records += [record for record in read(path)[0] if not record.cut_short]
            schedule.resume(records)
            watcher.note(f"going on with {path}, which holds {len(records)} processes")
        standing = costly_page_faults() if any(_maps_anew(ladder, rung) for rung in rungs) else ()
        one = Processes(
            ladder,
            options,
            Path(scratch),
            path.stem,
            asked,
            watcher,
            standing=standing,
            stop=ending,
            team=team,
        )
        try:
            for task in schedule.tasks(records, watcher.note):
                if ending.asked:  # a measurement that was complete by then stands
                    interrupted = True
                    break
                rounds = max(schedule.planned_rounds, task.repetition)
                watcher.started(task, rounds, schedule.seconds_left(task.repetition, rounds))
                start = time.monotonic()
                record = one.run(task)
                records.append(record)
                append(path, record)
                schedule.ended(record, time.monotonic() - start)
                watcher.finished(record)
                interrupted = record.status == "interrupted"
            if schedule.cut:  # or else nothing in the file would tell that there was to be more
                records.append(one.not_begun(schedule.cut))
                append(path, records[-1])
        except OSError as problem:
            error = (
                f"{problem.filename or path}: {problem.strerror}; what was measured before is kept, and "
                "--resume goes on from there"
            )
        if team:
            team.send_home(*_farewell(interrupted, error))
    return Run(path=path, records=records, interrupted=interrupted, error=error, cut=schedule.cut)


def unfailing(watcher: Watcher) -> Watcher:
    """The same watcher, but that nothing which it cannot show, on a terminal that is gone, ends the run."""

    class Unfailing:
        def __getattr__(self, name: str) -> Callable[..., None]:
            tell = getattr(watcher, name)

            def told(*facts: object) -> None:
                with contextlib.suppress(Exception):
                    tell(*facts)

            return told

    return cast(Watcher, Unfailing())


def lacks(plan: Plan, records: Sequence[Record]) -> bool:
    """Whether something is left to do after what these records say was done."""
    plan.resume(records)
    return next(plan.tasks(list(records), lambda _: None), None) is not None


@contextlib.contextmanager
def _team(
    ladder: Ladder, options: Options, data_sha256: str, asked: Answer, stop: Stop, watcher: Watcher
) -> Iterator[Team | None]:
    """Where the other nodes, if there are any, find this one. Raises PlaceError."""
    if options.place is None:
        yield None
        return
    here = described(options.place, ladder, data_sha256, asked.environment)
    with contextlib.closing(Rendezvous(options.place)) as store:
        team = Team(options.place, here, store, stop, watcher.note)
        try:
            yield team
        except BaseException as error:
            team.send_home(2 if isinstance(error, PlaceError) else 6, "node 0 ended early; it says why")
            raise


def _most_nodes(rungs: Sequence[Rung], nodes: int, asked: Answer) -> int:
    """Nodes that some rung takes; what none takes need not be waited for."""
    most = 1
    for rung in rungs:
        with contextlib.suppress(UnsupportedToggle):
            most = max(most, nodes_for(rung.toggles, nodes, asked.environment.device_count))
    return most


def _farewell(interrupted: bool, error: str | None) -> tuple[int, str]:
    """What the other nodes are told at the end, and the exit codes of their bench run."""
    if error:
        return 6, "node 0 could not go on; it says why"
    return (130, "the run was interrupted") if interrupted else (0, "the run is done; node 0 has its records")


HEAP_BYTES = 32 * 2**20
"""glibc never takes larger blocks from its heap but maps fresh pages for each (mallopt, M_MMAP_THRESHOLD)."""


def _maps_anew(ladder: Ladder, rung: Rung) -> bool:
    """Whether a rung's steps on a CPU make tensors, of logits for one, that cost page faults each time."""
    tokens = rung.toggles.micro_batch_size * ladder.workload.seq_len
    return rung.toggles.device == HOST and tokens * ladder.workload.config.vocab_size * 4 > HEAP_BYTES


def check_data(ladder: Ladder, rungs: Sequence[Rung], data: Path | None) -> str:
    """Find, tokenise and fingerprint the corpus before any process starts; its sha256. Raises DataError."""
    workload = ladder.workload
    where = f"{ladder.path}: workload.data"
    try:
        corpus = open_corpus(
            workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=data
        )
        for rung in rungs:
            if rung.external:  # which reads its own
                continue
            where = f"{ladder.path}: rung {rung.name!r}"
            tokens = rung.toggles.tokens_per_step(workload.seq_len)
            Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    return corpus.sha256


def missing_peers(ladder: Ladder, rungs: Sequence[Rung]) -> Iterator[tuple[str, str]]:
    """Of each external rung that will be unsupported, its name and why: told before the others take their
    hours.
    """
    for rung in rungs:
        if rung.external and (reason := why_missing(rung.external, rung.toggles, ladder.path)):
            yield rung.name, reason


def new_results(ladder: Ladder, out: Path, machine: Environment, kind: str = "{}.jsonl") -> Path:
    """An empty file of this run's own: one that began in the same second has another. Raises RunError.

    kind: its name, where {} stands for ladder and time.
    """
    folder = out / machine.machine
    _check_writable(folder)
    for seconds in count():
        began = datetime.now(UTC) + timedelta(seconds=seconds)
        path = folder / kind.format(f"{ladder.file_name}-{began:%Y%m%dT%H%M%SZ}")
        with contextlib.suppress(FileExistsError):
            path.open("x").close()
            return path
    raise AssertionError


def _check_compile_cache(folder: Path) -> None:
    """Raises RunError."""
    if SPLITS_WORDS.search(str(folder.absolute())):
        where = f"torch.compile cannot compile in {str(folder.absolute())!r}"
        raise RunError(f"{where}; choose a folder without blanks or quotes with --compile-cache")
    _check_writable(folder, "--compile-cache")


def _check_writable(folder: Path, option: str = "--out") -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with {option}"
        ) from None

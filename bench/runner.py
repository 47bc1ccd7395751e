"""Run a ladder: one fresh process per rung and round, one record per process, appended as soon as it ends.

The parent loads no torch and never opens the device; it meets the worker at a file only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from bench.child import classify, supervise, tail
from bench.ladder import Ladder, Rung
from bench.record import Environment, Record, ToggleValues, append
from gpt2.data import Batches, DataError, open_corpus
from gpt2.toggles import environment


class RunError(Exception):
    """A run that cannot start; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `bench run` was asked besides the ladder."""

    out: Path = Path("results")
    data: Path | None = None
    rungs: tuple[str, ...] = ()
    """Names of the rungs to run; empty means all."""
    overrides: tuple[str, ...] = ()
    """As given with --set; workers need them again."""
    peak_tflops: float | None = None


class Watcher(Protocol):
    """Is told how a run gets on (see bench.progress)."""

    def started(self, rung: Rung, repetition: int, repeats: int, seconds_left: float | None) -> None: ...
    def working(self, phase: str, steps: int, tps: float | None) -> None: ...
    def finished(self, record: Record) -> None: ...


@dataclass
class Schedule:
    """Which processes are still to come and, from those that ended, how long they will take."""

    rungs: Sequence[Rung]
    repeats: int
    _seconds: dict[int, list[float]] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)

    def __iter__(self) -> Iterator[tuple[int, Rung]]:
        """Round by round, so that drift of the machine meets all rungs alike."""
        for repetition in range(1, self.repeats + 1):
            for rung in self.rungs:
                if rung.index not in self._skipped:
                    yield repetition, rung

    def ended(self, rung: Rung, status: str, seconds: float) -> None:
        """Note an outcome; a rung that this machine does not support is not tried again."""
        self._seconds.setdefault(rung.index, []).append(seconds)
        if status == "unsupported":
            self._skipped.add(rung.index)

    def seconds_left(self, repetition: int, rung: Rung) -> float | None:
        """From the start of this process on; None before anything has ended."""
        known = [seconds for times in self._seconds.values() for seconds in times]
        if not known:
            return None
        place = self.rungs.index(rung)
        total = 0.0
        for number, other in enumerate(self.rungs):
            if other.index in self._skipped:
                continue
            times = self._seconds.get(other.index, known)
            total += sum(times) / len(times) * (self.repeats - repetition + (number >= place))
        return total


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a run."""

    path: Path
    records: list[Record]
    interrupted: bool


def run(ladder: Ladder, options: Options, watcher: Watcher) -> Run:
    """Run the ladder, appending each process's record to a new results file as soon as it ends.

    Raises LadderError, DataError or RunError before anything is written. Ctrl-C or SIGTERM ends the process that
    runs, records it as interrupted and returns what there is.
    """
    rungs = ladder.chosen(options.rungs)
    _check_data(ladder, rungs, options.data)
    machine = probe(rungs[-1].toggles.device)
    path = _results_file(ladder, options.out, machine)
    run_id = path.stem
    schedule = Schedule(rungs, ladder.protocol.repeats)
    records: list[Record] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, _terminate_as_interrupt():
        try:
            for repetition, rung in schedule:
                watcher.started(rung, repetition, schedule.repeats, schedule.seconds_left(repetition, rung))
                start = time.monotonic()
                record = run_rung(ladder, rung, repetition, options, Path(scratch), run_id, machine, watcher)
                schedule.ended(rung, record.status, time.monotonic() - start)
                append(path, record)
                records.append(record)
                watcher.finished(record)
                if record.status == "interrupted":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupted = True
    return Run(path=path, records=records, interrupted=interrupted)


def _check_data(ladder: Ladder, rungs: Sequence[Rung], data: Path | None) -> None:
    """Find, tokenise and fingerprint the corpus before any process starts. Raises DataError."""
    workload = ladder.workload
    where = f"{ladder.path}: workload.data"
    try:
        corpus = open_corpus(workload.data, vocab_size=workload.config.vocab_size, seed=workload.seed, path=data)
        for rung in rungs:
            where = f"{ladder.path}: rung {rung.name!r}"
            tokens = rung.toggles.tokens_per_step(workload.seq_len)
            Batches(corpus, seq_len=workload.seq_len, tokens_per_step=tokens, seed=workload.seed)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def probe(device: str) -> Environment:
    """The environment as a process on `device` sees it, asked of a child so that this process loads no torch."""
    command = [sys.executable, "-m", "bench.environment", device]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RunError(f"torch does not start here: {''.join(tail(answer.stderr)[-1:]) or 'no output'}")
    return Environment.model_validate_json(answer.stdout)


def _results_file(ladder: Ladder, out: Path, machine: Environment) -> Path:
    folder = out / machine.machine
    name = re.sub(r"[^\w.-]+", "-", ladder.name)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(f"cannot write to {folder} ({error.strerror}); choose another folder with --out") from None
    return folder / f"{name}-{stamp}.jsonl"


@contextlib.contextmanager
def _terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, sent at the end of a job, and SIGHUP, of a closed terminal, end a run as Ctrl-C does.

    Only the first of them counts: what follows it, ending the processes and writing the record, is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():  # where Python allows no handlers
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        for each in previous:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


# --- one process ------------------------------------------------------------------------------------------------


def run_rung(
    ladder: Ladder,
    rung: Rung,
    repetition: int,
    options: Options,
    scratch: Path,
    run_id: str,
    machine: Environment,
    watcher: Watcher,
) -> Record:
    """Measure one rung once, in a process of its own, and say how that ended."""
    out = scratch / f"{repetition}-{rung.index}.json"
    command = worker_command(ladder, rung, repetition, options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    environ = {
        **os.environ,
        **environment(rung.toggles),
        # Each rung has a compiler cache of its own, empty in the first round: no rung profits from another's.
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / f"inductor-{rung.index}"),
        "BENCH_RUNNER_PID": str(os.getpid()),
    }
    ended = supervise(
        [sys.executable, *command, "--out", str(out)], environ, out, ladder.protocol.timeout_seconds, watcher.working
    )
    outcome = classify(out, ended, ladder.protocol.timeout_seconds)
    shown = ["python", *command, "--out", "m.json"]
    return Record(
        run_id=run_id,
        time=started,
        kind="cumulative",
        ladder=ladder.name,
        ladder_hash=ladder.hash,
        protocol=asdict(ladder.protocol),
        rung=rung.name,
        rung_index=rung.index,
        repetition=repetition,
        status=outcome.status,
        expect=rung.expect,
        error=_anonymous(outcome.error) if outcome.error else None,
        exit_code=ended.exit_code,
        command=_anonymous(
            shlex.join("DATA" if options.data and part == str(options.data) else part for part in shown)
        ),
        warnings=outcome.warnings,
        changed=rung.changed,
        workload=asdict(ladder.workload),
        data_sha256=outcome.data_sha256,
        toggles=ToggleValues(all=asdict(rung.toggles), resolved=outcome.resolved),
        environment=outcome.environment or machine,
        measurement=outcome.measurement,
    )


def worker_command(ladder: Ladder, rung: Rung, repetition: int, options: Options) -> list[str]:
    """Arguments of the interpreter that measures one rung, --out excepted."""
    command = ["-m", "bench.worker", str(ladder.path), rung.name]
    if rung.toggles.world_size > 1:
        ranks = str(rung.toggles.world_size)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *command]
    if options.data:
        command += ["--data", str(options.data)]
    overrides = list(options.overrides)
    if repetition > 1 and ladder.protocol.loss_steps:  # a curve once drawn is the same in every round
        overrides.append("protocol.loss_steps=0")
    for override in overrides:
        command += ["--set", override]
    if options.peak_tflops is not None:
        command += ["--peak-tflops", str(options.peak_tflops)]
    return command


def _anonymous(text: str) -> str:
    """Without the places where this user keeps his files: results are made to be shared."""
    for place, name in ((str(Path.cwd()), "."), (str(Path.home()), "~")):
        text = text.replace(place, name) if len(place) > 1 else text
    return text

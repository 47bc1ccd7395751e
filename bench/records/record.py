"""Records of a run: one JSON object per process, appended to a .jsonl file. Imports no torch.

Everything a report shows is computed from these records. What was not measured is null, never 0; in the
lists of losses and gradient norms null is what was no finite number, which JSON cannot express.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, field_validator, model_validator

from bench.errors import BenchError
from bench.ladder.ladder import Protocol
from bench.ladder.validation import LadderError, validate
from bench.records.machine import Amount, AtLeastOne, Ceiling, Environment, Plain, State
from bench.records.measurement import External, Measurement
from bench.records.older import translated
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.files.lock import Locked, lock
from gpt2.files.strict_json import BLANK, NUL, json_lines

SCHEMA = 1

Kind = Literal[
    "cumulative",
    "alone",
    "left_out",
    "control",
    "sweep",
    "parity",
    "external",
    "ceiling",
    "scout",
]
RUNGS: tuple[Kind, ...] = ("cumulative", "external", "sweep")
"""Kinds that have a row in a scoreboard: rungs of a ladder, other trainers, and candidates of a sweep."""
ABLATION: tuple[Kind, ...] = ("alone", "left_out")
"""Kinds that `bench run --ablate` adds."""
Status = Literal["ok", "out_of_memory", "unsupported", "failed", "timeout", "interrupted", "too_slow"]
"""How a process ended; too_slow: a rung that was tried ended itself, as its first steps were far too slow."""


class Scout(Plain):
    """What trying a rung in a short window found, in a ladder that carries what is faster."""

    over: str | None
    """Name of the rung that it stands on and is compared with; null for the first."""
    ratio: Amount | None
    """Its tokens/s over that rung's; null where either has none."""
    floor: Amount | None
    """Relative difference that it had to exceed; null for the first rung."""
    carried: bool
    """Whether the rungs after it keep its changes, and the rounds measure it."""
    check: str
    """ok, or the check that it failed, or how its process ended (see bench.analysis.claim_checks)."""
    reason: str | None
    """What that check found; null where it is ok."""
    together: list[str] = Field(default_factory=list)
    """Names of rungs that were tried in one process, as none alone was told from the noise.

    All of them are carried, or none. Empty where a rung was tried by itself.
    """


class Ended(Plain):
    """How a process ended: what its record takes over as it is."""

    status: Status
    exit_code: int | None
    """Exit code as the shell would show it; minus the signal's number where a signal ended it."""
    process_seconds: Amount | None = None
    """From the start of the process to its end, by the runner's clock."""
    interrupted_late: bool = False
    """Whether the user ended it once its window was complete, which counts; only the proof is missing."""
    not_begun: str | None = None
    """Why there was no process at all, where a sweep ran out of time."""
    other_work_cores: Amount | None = None
    """Cores that other programs kept busy; null where that is unknown or does no harm."""
    first_tokens_per_second: Amount | None = None
    """Of a process that is too_slow, the tokens/s of the step after which it ended."""
    data_sha256: str | None
    measurement: Measurement | None
    ceiling: Ceiling | None = None
    """Result of a process that measures the ceiling and nothing else."""
    before: State | None = None
    during: State | None = None
    """Telemetry of the last sample within the window.

    A GPU's throttle reasons are all that were seen within the window, its clocks and power the means of one
    sample a second (the last sample's in older records).
    """
    after: State | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other programs or a standstill disturbed it, so that its speed may be wrong."""
        stood_still = self.measurement is not None and self.measurement.stood_still is not None
        return stood_still or self.other_work_cores is not None


class Outcome(Ended):
    """What a worker writes to its file, and what the runner adds to it."""

    exit_code: int | None = None
    data_sha256: str | None = None
    measurement: Measurement | None = None
    error: str | None = None
    environment: Environment | None = None
    resolved: dict[str, AtLeastOne | None] = Field(default_factory=dict)
    """Values of toggles that the process chose: threads, rows of the embedding, nodes."""
    warnings: list[str] = Field(default_factory=list)
    peer_version: str | None = None
    """Version of the other trainer that the process timed (see External)."""


def progress_path(out: Path) -> Path:
    """File in which a worker that will write its Outcome to `out` keeps its progress."""
    return out.with_name(out.name + ".progress")


@lru_cache(maxsize=4096)
def _checked(kind: type, text: str, *required: str) -> Any:
    """Parse and check a JSON text as `kind`; cached, for a run's records repeat it. Raises ValueError."""
    value = json.loads(text)
    for key in required:
        if key not in value:
            raise ValueError(f"{key} is missing")
    try:
        return validate(kind, value, "not of this version of bench", "toggle" if kind is Toggles else "key")
    except LadderError as error:
        raise ValueError(str(error)) from None


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, default=str)


class ToggleValues(Plain):
    """A rung's toggles; one that is absent from an older record had its default."""

    all: dict[str, Any]
    resolved: dict[str, AtLeastOne | None]

    @field_validator("all")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        _checked(Toggles, _text(value))
        return value

    @model_validator(mode="after")
    def _a_rank_on_each_node(self) -> Self:
        if self.nodes > (ranks := self.as_toggles.world_size):
            raise ValueError(f"world_size {ranks} is too small for {self.nodes} nodes")
        return self

    @property
    def nodes(self) -> int:
        """Number of nodes over which the ranks were spread."""
        return self.resolved.get("nodes") or 1

    @cached_property
    def as_toggles(self) -> Toggles:
        """The toggles, with defaults for what an older record does not know."""
        return _checked(Toggles, _text(self.all))


class Identity(Plain):
    """Which process of which run it is."""

    schema_version: Literal[1] = Field(default=SCHEMA, alias="schema")
    run_id: str
    """Shared by all records of one `bench run`, resumed or not."""
    session: str = ""
    """UTC start of the `bench run` that ran this process: resuming begins another."""
    chosen: list[str] | None = None
    """Names of the rungs that the run was told to take; null means all."""
    ablate: bool = False
    """Whether the run was told to measure each rung's changes alone and left out, too."""
    time: str
    """UTC start of the process, ISO 8601."""
    kind: Kind
    ladder: str
    ladder_hash: str
    protocol: dict[str, Any]
    rung: str
    rung_index: int
    """Place in the ladder, counted from 0; of a ceiling, that of the device among those of the run."""
    repetition: AtLeastOne
    """Round, counted from 1."""


class Record(Ended, Identity):
    """One process run of one rung, however it ended."""

    expect: Literal["inert", "out_of_memory"] | None = None
    error: str | None
    """Why it did not end well: first a line that says how, then the last lines of its output."""
    command: str
    """Command that runs this rung again, alone.

    DATA stands for the path of the corpus, LADDER for a ladder from elsewhere. Over several nodes it is for
    each of them: NODE is its number, HOST and PORT are those of node 0.
    """
    warnings: list[str]
    changed: list[str]
    """Differences from the ladder's rung before, as shown to a reader."""
    workload: dict[str, Any]
    toggles: ToggleValues
    environment: Environment
    external: External | None = None
    """The other trainer, for records of that kind only."""
    scout: Scout | None = None
    """What trying the rung found, for records of that kind; null where it was interrupted."""
    price_per_hour: Amount | None = None
    """Price of the whole machine, in the user's currency."""

    @field_validator("workload")
    @classmethod
    def _of_a_task(cls, value: dict[str, Any]) -> dict[str, Any]:
        _checked(Workload, _text(value), "model", "data", "seq_len")
        return value

    @field_validator("protocol")
    @classmethod
    def _of_a_run(cls, value: dict[str, Any]) -> dict[str, Any]:
        _checked(Protocol, _text(value), "repeats")
        return value

    @field_validator("time")
    @classmethod
    def _in_utc(cls, value: str) -> str:
        # Records are sorted by the time as text.
        if datetime.fromisoformat(value).utcoffset() != timedelta(0):
            raise ValueError("is not in UTC: it must end in +00:00")
        return value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if (self.kind == "external") != (self.external is not None):
            raise ValueError("external: a record of that kind names the peer, and no other does")
        if self.scout is not None and self.kind != "scout":
            raise ValueError("scout: only a record of that kind says what trying the rung found")
        if self.status == "ok" and self.kind != "ceiling":
            if not self.measurement:
                raise ValueError("measurement: a process that ended well has one")
            if self.kind != "parity" and not self.measurement.block_seconds:
                raise ValueError("measurement.block_seconds: a process that ended well has some")
        if self.kind != "external" and self.measurement and (lacking := self.measurement.lacks):
            raise ValueError(f"measurement.{lacking}: only an external rung may lack it")
        return self

    @property
    def cut_short(self) -> bool:
        """Whether the user ended it before it was done, so that resuming runs it again.

        A window that was complete by then counts meanwhile; only the proof is missing.
        """
        unproved = self.measurement is not None and self.measurement.proofs is None and not self.external
        return self.status == "interrupted" or (unproved and self.interrupted_late)

    @property
    def begun(self) -> bool:
        """Whether there was a process at all."""
        return self.not_begun is None

    @property
    def key(self) -> tuple[str, int, int]:
        """Which process of its run this is; an interrupted one and the one that replaces it share it."""
        return self.kind, self.rung_index, self.repetition


class RecordError(BenchError):
    """A results file that cannot be read; the message names file and line."""


def not_of_one_run(records: Sequence[Record]) -> str | None:
    """Why the records of a file cannot be of one run; None where they can."""
    runs = dict.fromkeys(record.run_id for record in records if record.kind in RUNGS)
    if len(runs) > 1:
        return f"holds {len(runs)} runs ({', '.join(runs)}), which do not mix; one file each"
    done: set[tuple[str, int, int]] = set()
    for record in records:
        if record.key in done:
            what = f"{record.rung!r}, {record.kind}, round {record.repetition}"
            return f"holds the process {what} twice; was a file appended to itself?"
        if not record.cut_short:
            done.add(record.key)
    return None


def _write(file: io.FileIO, content: bytes) -> None:
    """Append to a file opened without a buffer; on return it is on the disk.

    Raises OSError, as for a full disk, and then leaves the file as it was.
    """
    left, size = memoryview(content), os.fstat(file.fileno()).st_size
    try:
        while left:
            left = left[file.write(left) :]  # a disk that is nearly full takes a part
        os.fsync(file.fileno())
    except OSError:
        file.truncate(size)
        raise


def _sync_folder(path: Path) -> None:
    """Have the name of a new file on the disk, too."""
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class ResultsFile:
    """A results file that one run writes to, locked against others.

    What somebody takes from it meanwhile is written again, at the next append() or in close(): the file was
    removed, moved or emptied, or has the content that it had earlier. Where another run's file took its name,
    that one is left alone, and all records of this run go to a new file: `path` says which. Any other change
    is taken for an edit.
    """

    def __init__(self, path: Path, note: Callable[[str], None] = lambda text: None) -> None:
        """Raises RecordError where another run is writing to it. note: is told of records written again."""
        self.path, self._note = path, note
        self._place = path.absolute()  # the working directory may be removed
        self.whole = True
        """False once records are lost that could not be written again."""
        self._run_id: str | None = None
        try:
            self._file = self._opened()
        except BlockingIOError as error:
            raise RecordError(f"{path}: {error.strerror}; wait for it, or end it") from None
        self.reread()

    def reread(self) -> None:
        """Take what the file holds now for what must not be lost."""
        self._written = self._place.read_bytes()
        self._run_id = _run_id(self._written)

    def append(self, record: Record) -> None:
        """Add one record; on return it is on the disk.

        Raises OSError, as for a full disk, and then leaves the file as it was.
        """
        self._run_id = record.run_id
        self._restore()
        line = (record.as_json() + "\n").encode()
        new = not self._written
        _write(self._file, line)
        self._written += line
        if new:
            _sync_folder(self._place)

    def close(self) -> None:
        """Unlock the file; one that nothing was written to is removed, with its folder if that is empty."""
        with contextlib.suppress(OSError):  # its folder may have been taken away
            if self._written:
                self._restore()
            elif self._in_place() and not self._place.stat().st_size:
                self._place.unlink()
                self._place.parent.rmdir()
        self._file.close()

    def _opened(self) -> io.FileIO:
        """Open and lock the file, made anew where it is not there. Raises BlockingIOError if it is locked."""
        file = self._place.open("ab", buffering=0)
        try:
            lock(file)
        except Locked:
            file.close()
            what = "another bench run is writing to it"
            raise BlockingIOError(errno.EWOULDBLOCK, what, str(self.path)) from None
        return file

    def _in_place(self) -> bool:
        """Whether the file that is open is the one of its name."""
        try:
            return os.path.samestat(self._place.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _restore(self) -> None:
        """Write again what has been taken from the file. Raises OSError."""
        if self._in_place() and self._place.stat().st_size == len(self._written):
            return
        self.whole, file = False, self._file
        moved = self._replaced()
        if moved:
            self._take_another_name()
        if not self._in_place():
            self._place.parent.mkdir(parents=True, exist_ok=True)
            file = self._opened()
        try:
            held = self._place.read_bytes()
            taken = len(held) < len(self._written) and self._written.startswith(held)
            if taken:
                _write(file, self._written[len(held) :])
                _sync_folder(self._place)
                if not moved:
                    self._note(f"{self.path} lacked records that were in it, and they are written again")
            else:
                self._written = held
                if held and not held.endswith(b"\n"):  # as some editors leave it
                    _write(file, b"\n")
                    self._written += b"\n"
        except OSError:
            if file is not self._file:  # the one before may be the last that holds what was written
                file.close()
            raise
        if file is not self._file:
            self._file.close()
        self.whole, self._file = True, file

    def _replaced(self) -> bool:
        """Whether the file of this name holds another run's records now."""
        own = _run_id(self._written) or self._run_id
        if own is None or not self._place.exists():
            return False
        return _run_id(self._place.read_bytes()) not in (None, own)

    def _take_another_name(self) -> None:
        number, old = 2, self.path
        while (new := old.with_name(f"{old.stem}-{number}{old.suffix}")).exists():
            number += 1
        self.path, self._place = new, self._place.with_name(new.name)
        self._note(f"{old} holds another run's records now; all of this run's are in {new}")


def _run_id(content: bytes) -> str | None:
    """The run that the first record is of; None where there is none to be read."""
    try:
        first = json.loads(content.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return first.get("run_id") if isinstance(first, dict) else None


ROOFLINE = "roofline-"
"""Beginning of the names of files that hold nothing but a measured ceiling."""


def results_files(
    folder: Path, prefix: str = "", warnings: list[str] | None = None, *, ending: str = ".jsonl"
) -> list[Path]:
    """The files of results below a folder, sorted, each once; links are followed.

    Hidden files are left out, and so are the metrics of long runs, which lie beside their run.json. prefix
    and ending: of the files' names. warnings: takes those about folders that cannot be read.
    """
    root, seen, by_real_path = Path(os.path.realpath(folder)), set[str](), dict[str, Path]()
    folders, links, files = [folder], list[Path](), list[Path]()
    while folders or links:
        place = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(place)
        if real in seen or (place != folder and root.is_relative_to(real)):
            continue
        seen.add(real)
        try:
            entries = sorted(path for path in place.iterdir() if not path.name.startswith("."))
        except OSError as error:
            if warnings is not None:
                warnings.append(f"{place}: {error.strerror}; left out")
            continue
        for path in entries:
            if path.is_dir():
                (links if path.is_symlink() else folders).append(path)
            elif path.suffix == ending and not path.is_fifo() and not (place / "run.json").exists():
                files.append(path)
    for path in sorted(files, key=Path.is_symlink):  # a path without links before one with them
        by_real_path.setdefault(os.path.realpath(path), path)
    return sorted(path for path in by_real_path.values() if path.name.startswith(prefix))


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Read the records of a results file, with warnings about what was left out. Raises RecordError."""
    return read_lines(path, Record, "record", translated)


Line = TypeVar("Line", bound=Plain)
PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
"""Formats of compressed files by their first bytes."""
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""First bytes of UTF-16 text."""


def read_lines(
    path: Path, kind: type[Line], noun: str, translate: Callable[[str], str] = str
) -> tuple[list[Line], list[str]]:
    """Read a file with a JSON object a line, with warnings about what was left out.

    translate: turns a line of an older version into one of today's.

    Line ends of Windows, a byte order mark and blank lines are accepted, as people edit files. A last line
    that is cut off, which a killed run leaves, and NULs, which a crash of the machine leaves, are left out
    with a warning. Anything else that is not of `kind` raises RecordError, with file and line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    if packed := next((name for magic, name in PACKED.items() if content.startswith(magic)), None):
        raise RecordError(f"{path}: is compressed ({packed}); unpack it first")
    if content.startswith(WIDE):
        raise RecordError(f"{path}: is UTF-16 text; save it as UTF-8")
    parsed, warnings, last = [], [], content.count(b"\n") + 1
    if NUL in content:
        warnings.append(f"{path}: holds NULs, as a crash leaves them; they were left out")
    for number, line in json_lines(content):
        text = line.strip(BLANK)
        if number == last and torn(text):
            warnings.append(f"{path}: the last line is cut off and was left out")
            continue
        try:
            parsed.append(kind.model_validate_json(translate(text.decode())))
        except UnicodeDecodeError:
            raise RecordError(f"{path}:{number}: is not UTF-8 text; save the file as UTF-8") from None
        except RecursionError:
            raise RecordError(f"{path}:{number}: no result of bench run; name other files") from None
        except ValidationError as error:
            raise RecordError(_complaint(path, number, text.decode(), error, noun)) from None
    return parsed, warnings


def torn(last: bytes) -> bool:
    """Whether a file's last line, which has no end, is only the beginning of an object."""
    try:
        json.loads(last.decode())
    except (ValueError, RecursionError):
        return last.startswith(b"{")
    return False


def _complaint(path: Path, number: int, line: str, error: ValidationError, noun: str) -> str:
    """What is wrong with a line, and what to do."""
    first = error.errors()[0]
    if path.suffix == ".json" and number == 1:
        return f"{path}: no results of bench run; bench turns keeps its own as JSON"
    if first["type"] == "json_invalid":
        if path.suffix != ".jsonl":
            return f"{path}: no results of bench run, which are .jsonl; name others"
        cut = line[0] in "{[" and "EOF" in first["msg"]
        if cut and _spread(path):
            several = "JSON over several lines, as an editor prints it"
            return f"{path}:{number}: {several}; write each {noun} on one line"
        if line.startswith("{") and "trailing" in first["msg"]:
            return f"{path}:{number}: something follows the {noun}; write each on a line of its own"
        what = "the line is cut off" if cut else "no result of bench run"
        return f"{path}:{number}: {what}; delete this line, or name other files"
    value = json.loads(line)
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "a single value"
        return f"{path}:{number}: {what}, no {noun}, which is a JSON object on one line"
    schema = value.get("schema", SCHEMA)
    if isinstance(schema, int) and schema > SCHEMA:
        return f"{path}:{number}: schema {schema}: written by a newer gpt2-bench; upgrade"
    where = ".".join(str(part) for part in first["loc"])
    if all(problem["type"] == "extra_forbidden" for problem in error.errors()):
        return f"{path}:{number}: unknown field {where!r}: written by a newer gpt2-bench (upgrade), or edited"
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return f"{path}:{number}: no {noun} of schema {SCHEMA}: {message}"


def _spread(path: Path) -> bool:
    """Whether a file as a whole is JSON, though its lines are not."""
    text, at = path.read_bytes().decode("utf-8-sig", errors="replace").strip(), 0
    try:
        while at < len(text):
            at = json.JSONDecoder().raw_decode(text, at)[1]
            at += len(text) - at - len(text[at:].lstrip())
    except (ValueError, RecursionError):
        return False
    return True

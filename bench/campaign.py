"""Run the most valuable commands first on a machine rented for half an hour, each with a time limit.

python -m bench.campaign --minutes 30 --out results/gpu-HOST     # run again to go on; see docs/gpu.md
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from rich.text import Text

from bench.campaign_parts import COMPILED, KINDS, ROOT, Part, report
from bench.format import duration, number, plain
from bench.process.shutdown import Stop, stoppable
from bench.process.supervisor import end_marked, end_of
from bench.records.record import RecordError, read
from gpt2.files.atomic import atomic_write
from gpt2.files.lock import Locked, exclusive
from gpt2.terminal import LiveLine, stderr_console, use_streams

MARK = "BENCH_CAMPAIGN"
"""Environment variable that marks all processes of a campaign, whoever started them."""
GRACE_SECONDS = 20.0
"""Seconds between SIGINT and SIGKILL for a part."""
POLL_SECONDS = 0.25
REFUTED = 4
"""Exit code of `bench run` where all rungs were measured and a check failed."""
LAST_BYTES = 8192
"""Bytes at the end of a log in which its last line is searched."""

Status = Literal["done", "failed", "out of time", "interrupted", "skipped"]


@dataclass(frozen=True, kw_only=True)
class PartOutcome:
    """How a part ended: one line of parts.ndjson."""

    part: str
    status: Status
    seconds: float = 0.0
    exit_code: int | None = None
    """Exit code of its command; None if that was ended."""
    found: str | None = None
    """Result, or why it was skipped, for a person."""
    command: str | None = None
    """Command; a part of the same name with another command is another part."""


def carry_out(parts: Sequence[Part], folder: Path, minutes: float) -> tuple[list[PartOutcome], bool]:
    """Run in order the parts not done yet, then the report; return their outcomes, and if interrupted.

    folder: absolute; receives logs, parts.ndjson and the output of the parts. minutes: for all parts but the
    report. Raises Locked if another campaign uses the folder.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    with exclusive(folder), stoppable() as stop:
        end_marked(str(folder), MARK)  # processes left by a killed campaign
        outcomes = [_unless_done(part, folder, deadline, stop) for part in parts if not stop.requested]
        if not stop.requested:
            last = report(folder)
            ended = (
                _skipped(last, last.missing) if last.missing else run(last, folder, 60 * last.minutes, stop)
            )
            outcomes.append(_keep(ended, folder))
    return outcomes, stop.requested


def _unless_done(part: Part, folder: Path, deadline: float, stop: Stop) -> PartOutcome:
    """Run a part, unless it is done, cannot run here, or has too little time until `deadline`."""
    before = earlier(folder).get(part.name)
    wanted = "done", shlex.join(part.command)
    alike = before is not None and (before.status, before.command) == wanted
    if before and alike and (part.result is None or _there(folder, part.result)):
        _tell(f"{part.name}: done before")
        return before
    left = deadline - time.monotonic()
    if part.missing or left < 60 * part.least:
        no_time = f"for time: {max(0, left) / 60:.1f} minutes left, and it takes {part.least:g} at least"
        return _keep(_skipped(part, part.missing or no_time), folder)
    return _keep(run(part, folder, min(60 * part.minutes, left), stop), folder)


def _skipped(part: Part, why: str) -> PartOutcome:
    return PartOutcome(part=part.name, status="skipped", found=why)


def run(part: Part, folder: Path, limit: float, stop: Stop) -> PartOutcome:
    """Run one part in a session of its own for `limit` seconds at most, and end all that it started."""
    command = [*part.command, *(part.go_on if part.result and _there(folder, part.result) else ())]
    log = folder / "logs" / f"{part.name}.log"
    begun = time.monotonic()
    status: Status | None = None
    with log.open("ab") as sink:
        sink.write(f"$ {shlex.join(command)}\n".encode())
        sink.flush()
        environ, nothing = {**os.environ, MARK: str(folder)}, subprocess.DEVNULL
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=nothing, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            with _shown(part, log, begun, limit):
                while process.poll() is None and status is None:
                    time.sleep(POLL_SECONDS)
                    if part.killed_at and _there(folder, part.killed_at):
                        status = "done"
                    elif stop.requested:
                        status = "interrupted"
                    elif time.monotonic() - begun > limit:
                        status = "out of time"
                if process.poll() is None and not part.killed_at:
                    os.killpg(process.pid, signal.SIGINT)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_marked(str(folder), MARK)  # also workers of bench run, which have their own sessions
    exit_code = process.returncode if status is None else None
    if status is None:
        # A rung with a failed check is a result, not a failure of the part.
        ended_well = exit_code == 0 or (part.is_ladder and exit_code == REFUTED)
        status = "done" if ended_well and not part.killed_at else "failed"
    seconds = round(time.monotonic() - begun, 1)
    found = _last_line(log) if status == "failed" else _found(part, folder, log)
    return PartOutcome(
        part=part.name,
        status=status,
        seconds=seconds,
        exit_code=exit_code,
        found=found,
        command=shlex.join(part.command),
    )


def earlier(folder: Path) -> dict[str, PartOutcome]:
    """Return the last outcome of each part so far."""
    known: dict[str, PartOutcome] = {}
    with contextlib.suppress(OSError):
        for line in (folder / "parts.ndjson").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a line that was cut off
                outcome = PartOutcome(**json.loads(line))
                known[outcome.part] = outcome
    return known


def _keep(outcome: PartOutcome, folder: Path) -> PartOutcome:
    with (folder / "parts.ndjson").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    took = f" after {duration(outcome.seconds)}" if outcome.seconds else ""
    _tell(f"{outcome.part}: {outcome.status}{took}{f': {outcome.found}' if outcome.found else ''}")
    return outcome


def _there(folder: Path, pattern: str) -> bool:
    """Whether a file matches this pattern and is not empty."""
    with contextlib.suppress(FileNotFoundError):  # a checkpoint that a newer one has just replaced
        return any(path.stat().st_size for path in folder.glob(pattern))
    return False


def _found(part: Part, folder: Path, log: Path) -> str:
    """Return the fastest rung of the part's ladder, else the last line that it printed."""
    speeds: list[tuple[float, str]] = []
    for path in folder.glob(part.result or "") if part.is_ladder else ():
        with contextlib.suppress(RecordError):
            for record in read(path)[0]:
                measured = record.measurement if record.status == "ok" else None
                if measured and measured.tokens_per_second:
                    speeds.append((measured.tokens_per_second, record.rung))
    if not speeds:
        return _last_line(log)
    tps, rung = max(speeds)
    return f"{len(speeds)} measured, the fastest {number(tps)} tokens/s ({plain(rung)})"


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = end_of(log, LAST_BYTES).splitlines()
        return plain(next((line.strip() for line in reversed(lines) if line.strip()), ""))
    return ""


# --- display


def _tell(line: str) -> None:
    stderr_console().print(Text(line), soft_wrap=True)


@contextlib.contextmanager
def _shown(part: Part, log: Path, begun: float, limit: float) -> Iterator[None]:
    """Show a live line on a terminal; elsewhere print one line at the start."""

    def line() -> Text:
        took = f"{duration(time.monotonic() - begun)} of {duration(limit)}"
        return Text(f"{part.name} ({took}): {_last_line(log)}", overflow="ellipsis", no_wrap=True)

    with LiveLine(line) as live:
        if not live.is_drawn:
            _tell(f"{part.name} ... at most {duration(limit)}, log in {log}")
        yield


def table(outcomes: Sequence[PartOutcome], folder: Path) -> Table:
    """Return the outcomes as a table, with the logs of failed parts."""
    result = Table(title=Text(plain(str(folder))))
    for name in ("Part", "Status", "Seconds", "Found"):
        result.add_column(name, overflow="fold")
    for outcome in outcomes:
        log = "" if outcome.status in ("done", "skipped") else f"; see logs/{outcome.part}.log"
        found = Text(f"{outcome.found or ''}{log}")
        result.add_row(outcome.part, outcome.status, f"{outcome.seconds:.0f}", found)
    return result


def archive(folder: Path) -> Path:
    """Write FOLDER.tar.gz beside the folder, without checkpoints and compiled code, which are large.

    Raises OSError, and then leaves an earlier one as it was.
    """
    path = folder.with_name(f"{folder.name}.tar.gz")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in ("checkpoints", COMPILED) else member

    with atomic_write(path, sync=False) as part, tarfile.open(fileobj=part, mode="w:gz") as file:
        file.add(folder, folder.name, filter=kept)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 all parts done or skipped; 2 wrong usage; 6 one failed; 130 interrupted."""
    use_streams()
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m bench.campaign", description=description)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="for all parts together; 0: report and archive only"
    )
    parser.add_argument("--out", type=Path, default=Path("results") / f"gpu-{platform.node() or 'host'}")
    parser.add_argument(
        "--device", choices=list(KINDS), default="cuda", help="cpu rehearses with tiny models"
    )
    parser.add_argument(
        "--data", help="the ladders' corpus: a file, or synthetic, which needs none and no network"
    )
    parser.add_argument("--only", help="names of parts, with commas between them")
    arguments = parser.parse_args(argv)
    folder = arguments.out.resolve()
    parts = {part.name: part for part in KINDS[arguments.device](folder, arguments.data)}
    chosen = arguments.only.split(",") if arguments.only else list(parts)
    if unknown := sorted(set(chosen) - parts.keys()):
        parser.error(f"--only: no part is called {', '.join(unknown)}; there are {', '.join(parts)}")
    try:
        outcomes, interrupted = carry_out(
            [parts[name] for name in parts if name in chosen], folder, arguments.minutes
        )
    except Locked:
        _tell(f"{folder} is in use by another campaign; wait for it, or choose another folder with --out")
        return 2
    except OSError as error:
        place = error.filename or folder
        _tell(f"cannot write to {place} ({error.strerror}); choose another folder with --out")
        return 2
    stderr_console().print(table(outcomes, arguments.out))
    if interrupted:
        _tell("interrupted; the same command goes on")
        return 130
    try:
        kept = archive(folder)
    except OSError as error:
        _tell(f"cannot write {error.filename or folder} ({error.strerror}); all of it is in {folder}")
        return 6
    _tell(f"all of it is in {kept}; the same command runs what is not done")
    return 6 if any(each.status == "failed" for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

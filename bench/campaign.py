"""Go through the commands that a machine rented for half an hour is worth, most valuable first, each bounded
in time.

python -m bench.campaign --minutes 30 --out results/gpu-HOST     # the same again goes on; docs/gpu.md
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

from rich.live import Live
from rich.table import Table
from rich.text import Text

from bench.campaign_parts import COMPILED, KINDS, ROOT, Part, report
from bench.format import duration, number, plain
from bench.process.shutdown import Stop, stoppable
from bench.process.supervisor import end_marked
from bench.records.record import RecordError, read
from gpt2.files.lock import Locked, exclusive
from gpt2.terminal import stderr_console, use_streams

MARK = "BENCH_CAMPAIGN"
"""Environment variable by which all processes of a campaign are known, whoever started them."""
GRACE_SECONDS = 20.0
"""What a part has to end in order once it was asked to, before it is killed."""
POLL_SECONDS = 0.25
REFUTED = 4
"""Exit code of `bench run` where all rungs were measured, and not all claims hold."""
LAST_BYTES = 8192
"""Of a log, in which its last line is looked for."""

Status = Literal["done", "failed", "out of time", "interrupted", "skipped"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part ended: one line of parts.ndjson."""

    part: str
    status: Status
    seconds: float = 0.0
    exit_code: int | None = None
    """Of its command, where that ended by itself."""
    found: str | None = None
    """For a person: what came of it, or why it was skipped."""
    command: str | None = None
    """What was run: another device or corpus is another part, though of the same name."""


def carry_out(parts: Sequence[Part], folder: Path, minutes: float) -> tuple[list[Outcome], bool]:
    """Run in order what is not done yet, then the report; how each part ended, and if interrupted.

    folder: absolute; takes logs, parts.ndjson and whatever the parts write. minutes: from now on, for all
    parts but the report. Raises Locked where another campaign uses the folder.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * minutes
    with exclusive(folder), stoppable() as stop:
        end_marked(str(folder), MARK)  # what a campaign that was killed has left at work
        outcomes = [_unless_done(part, folder, deadline, stop) for part in parts if not stop.asked]
        if not stop.asked:
            last = report(folder)
            ended = (
                _skipped(last, last.missing) if last.missing else run(last, folder, 60 * last.minutes, stop)
            )
            outcomes.append(_keep(ended, folder))
    return outcomes, stop.asked


def _unless_done(part: Part, folder: Path, deadline: float, stop: Stop) -> Outcome:
    """As far as the time until `deadline` allows it."""
    before = earlier(folder).get(part.name)
    same = before is not None and before.command == shlex.join(part.command)
    if before and same and before.status == "done" and (part.result is None or _there(folder, part.result)):
        _tell(f"{part.name}: done before")
        return before
    left = deadline - time.monotonic()
    if part.missing or left < 60 * part.least:
        why = (
            part.missing
            or f"for time: {max(0, left) / 60:.1f} minutes left, and it takes {part.least:g} at least"
        )
        return _keep(_skipped(part, why), folder)
    return _keep(run(part, folder, min(60 * part.minutes, left), stop), folder)


def _skipped(part: Part, why: str) -> Outcome:
    return Outcome(part=part.name, status="skipped", found=why)


def run(part: Part, folder: Path, limit: float, stop: Stop) -> Outcome:
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
                    elif stop.asked:
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
            end_marked(str(folder), MARK)  # a worker of bench run has a session of its own
    exit_code = process.returncode if status is None else None
    if status is None:
        # A rung whose loss differs, or that was to be inert, is a finding, and no failure of the part.
        ended_well = exit_code == 0 or (part.is_ladder and exit_code == REFUTED)
        status = "done" if ended_well and not part.killed_at else "failed"
    seconds = round(time.monotonic() - begun, 1)
    found = _last_line(log) if status == "failed" else _found(part, folder, log)
    return Outcome(
        part=part.name,
        status=status,
        seconds=seconds,
        exit_code=exit_code,
        found=found,
        command=shlex.join(part.command),
    )


def earlier(folder: Path) -> dict[str, Outcome]:
    """The last outcome of each part so far."""
    known: dict[str, Outcome] = {}
    with contextlib.suppress(OSError):
        for line in (folder / "parts.ndjson").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # cut off when the machine went away
                outcome = Outcome(**json.loads(line))
                known[outcome.part] = outcome
    return known


def _keep(outcome: Outcome, folder: Path) -> Outcome:
    with (folder / "parts.ndjson").open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")
    took = f" after {duration(outcome.seconds)}" if outcome.seconds else ""
    _tell(f"{outcome.part}: {outcome.status}{took}{f': {outcome.found}' if outcome.found else ''}")
    return outcome


def _there(folder: Path, pattern: str) -> bool:
    """Whether something of this name is there and not empty."""
    with contextlib.suppress(FileNotFoundError):  # a checkpoint that a newer one has just replaced
        return any(path.stat().st_size for path in folder.glob(pattern))
    return False


def _found(part: Part, folder: Path, log: Path) -> str:
    """The fastest rung of a ladder that the part ran, else the last line that it printed."""
    speeds: list[tuple[float, str]] = []
    for path in folder.glob(part.result or "") if part.is_ladder else ():
        with contextlib.suppress(RecordError):
            measured = [(each.measurement, each.rung) for each in read(path)[0] if each.status == "ok"]
            speeds += [
                (got.tokens_per_second, rung) for got, rung in measured if got and got.tokens_per_second
            ]
    if not speeds:
        return _last_line(log)
    tps, rung = max(speeds)
    return f"{len(speeds)} measured, the fastest {number(tps)} tokens/s ({plain(rung)})"


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return plain(next((line.strip() for line in reversed(lines) if line.strip()), ""))
    return ""


# --- what a person sees
# -------------------------------------------------------------------------------------------


def _tell(line: str) -> None:
    stderr_console().print(Text(line), soft_wrap=True)


@contextlib.contextmanager
def _shown(part: Part, log: Path, begun: float, limit: float) -> Iterator[None]:
    """A live line on a terminal; elsewhere a line at the beginning."""

    def line() -> Text:
        took = f"{duration(time.monotonic() - begun)} of {duration(limit)}"
        return Text(f"{part.name} ({took}): {_last_line(log)}", overflow="ellipsis", no_wrap=True)

    console = stderr_console()
    if not console.is_terminal:
        _tell(f"{part.name} ... at most {duration(limit)}, log in {log}")
        yield
        return
    with Live(console=console, refresh_per_second=2, transient=True, get_renderable=line):
        yield


def table(outcomes: Sequence[Outcome], folder: Path) -> Table:
    """How each part ended; of one that did not end well, where its log is."""
    result = Table(title=Text(plain(str(folder))))
    for name in ("Part", "Status", "Seconds", "Found"):
        result.add_column(name, overflow="fold")
    for each in outcomes:
        log = f"; see logs/{each.part}.log" if each.status not in ("done", "skipped") else ""
        result.add_row(each.part, each.status, f"{each.seconds:.0f}", Text(f"{each.found or ''}{log}"))
    return result


def archive(folder: Path) -> Path:
    """All of the folder but checkpoints and compiled code, which are large, as FOLDER.tar.gz beside it."""
    path = folder.with_name(f"{folder.name}.tar.gz")

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if Path(member.name).name in ("checkpoints", COMPILED) else member

    with tarfile.open(path, "w:gz") as file:
        file.add(folder, folder.name, filter=kept)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit code: 0 all parts done or skipped; 2 wrong usage; 6 one failed; 130 interrupted."""
    use_streams()
    parser = argparse.ArgumentParser(
        prog="python -m bench.campaign", description=(__doc__ or "").splitlines()[0]
    )
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
    asked = parser.parse_args(argv)
    folder = asked.out.resolve()
    parts = {part.name: part for part in KINDS[asked.device](folder, asked.data)}
    chosen = asked.only.split(",") if asked.only else list(parts)
    if unknown := sorted(set(chosen) - parts.keys()):
        parser.error(f"--only: no part is called {', '.join(unknown)}; there are {', '.join(parts)}")
    try:
        outcomes, interrupted = carry_out(
            [parts[name] for name in parts if name in chosen], folder, asked.minutes
        )
    except Locked:
        _tell(
            f"{folder} is in use by another campaign; wait for its end, or choose another folder with --out"
        )
        return 2
    except OSError as error:
        _tell(
            f"cannot write to {error.filename or folder} ({error.strerror}); choose another folder with --out"
        )
        return 2
    stderr_console().print(table(outcomes, asked.out))
    if interrupted:
        _tell("interrupted; the same command goes on")
        return 130
    _tell(f"all of it is in {archive(folder)}; the same command runs what is not done")
    return 6 if any(each.status == "failed" for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

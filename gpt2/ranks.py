"""Start this program once per rank on this machine, and end all ranks as one. Imports no torch.

    code = train_in_ranks("gpt2.cli", processes=8, variables=environment(toggles))

Not by torchrun: it makes 1 of every exit code, prints an error once per rank and a traceback of its own beneath, and
before torch 2.13 kills ranks 30 seconds after Ctrl-C, while they keep their state. Ranks that somebody else started,
as torchrun does on several machines, have WORLD_SIZE in their environment; then there is nothing to start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from gpt2.hardware.host import free_port
from gpt2.launch import own_variables, python
from gpt2.signals import handled

GRACE_SECONDS = 30.0
"""Given to the others once a rank has failed: on most backends they notice, on some they would wait for long."""
ENDING_SECONDS = 120.0
"""Given to the others once a rank has ended as it was asked to; rank 0 may yet send metrics away."""
REFUSING_SECONDS = 5.0
"""Given to the others once rank 0 has said what the user can mend."""
HELD = "GPT2_RANKS_HELD"
"""Set where standard input ends with the process that started this rank."""
ASKED = (signal.SIGINT, signal.SIGTERM)
"""What asks a rank to end in order; then its exit code is 128 and the signal's number."""
IN_ORDER = (0, *(128 + each for each in ASKED))
REFUSED, FAILED = 2, 6
"""Exit codes of a rank: of what the user can mend, which rank 0 says, too, and of any other failure."""
TAIL_LINES = 20


def started() -> bool:
    """Whether this process is a rank already."""
    return "WORLD_SIZE" in os.environ  # see gpt2.launch.check_rank_variables()


def end_with_launcher() -> None:
    """In a rank: end at once when the process that started it is killed; else it would hold its device for good."""
    if os.environ.get(HELD):
        threading.Thread(target=_wait_for_launcher, name="launcher", daemon=True).start()


def _wait_for_launcher() -> None:
    os.read(0, 1)  # not by sys.stdin, whose lock a thread must not hold while the interpreter ends
    os._exit(FAILED)


def train_in_ranks(module: str, processes: int, variables: Mapping[str, str]) -> int:
    """Run `python -m module`, with this program's arguments, in so many ranks; the exit code of the first that failed.

    Only rank 0 writes to the terminal; of another that fails first, the last lines are shown. Signals go on to all
    ranks. `variables` are added to their environment.
    """
    command = [*python(module), *sys.argv[1:]]
    shared = {
        **os.environ,
        **own_variables(),
        **variables,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), HELD: "1"}
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpt2-ranks-")))
        stack.enter_context(handled(pass_on))
        stack.callback(_end, ranks)  # where not all could be started
        for rank in range(processes):
            said = stack.enter_context(_file(folder, rank).open("wb")) if rank else None
            ranks.append(
                subprocess.Popen(
                    command,
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.PIPE,  # which is never written to: see end_with_launcher
                    stdout=said,
                    stderr=said,
                    start_new_session=True,  # else Ctrl-C would reach them twice
                )
            )
        failed = _wait(ranks)
        if not failed:
            return max(rank.returncode for rank in ranks)
        refused = ranks[0].returncode == REFUSED  # which has been said; others may have missed rank 0 only
        for rank in failed:
            code = ranks[rank].returncode
            if not refused or code < 0 or (0 not in failed and code != REFUSED):
                _show(rank, code, _file(folder, rank))
        code = ranks[failed[0]].returncode
        return 128 - code if -code in ASKED else max(code, 0) or FAILED


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Until all have ended. Returns those that failed first, at about the same moment."""
    failed: list[int] = []
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks):
        failed = failed or _failed(ranks)
        patience = GRACE_SECONDS if failed else ENDING_SECONDS
        if ranks[0].returncode == REFUSED:
            patience = REFUSING_SECONDS
        if any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            late = ", ".join(str(number) for number, rank in enumerate(ranks) if rank.poll() is None)
            if patience == ENDING_SECONDS:
                print(f"gpt2: rank {late} did not end with the others and were killed", file=sys.stderr)
            _end(ranks)
            return failed
        time.sleep(0.02)
    return failed or _failed(ranks)


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [number for number, rank in enumerate(ranks) if rank.poll() not in (None, *IN_ORDER)]


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()  # nothing, where it has ended
        rank.wait()


def _show(rank: int, code: int, said: Path) -> None:
    """How it ended, where it has not said so itself on the terminal, and its last words."""
    if code < 0 and -code not in ASKED:
        why = ", as the system does where memory is short" if -code == signal.SIGKILL else ""
        print(f"gpt2: rank {rank} was ended by {signal.Signals(-code).name}{why}", file=sys.stderr)
    if rank:
        for line in said.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]:
            print(f"rank {rank}: {line}", file=sys.stderr)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"

"""Start this program once per rank on this machine, and end all ranks together. Imports no torch.

    code = launch_ranks("gpt2.cli", processes=8, variables=environment(toggles))

torchrun is not used here: it turns every exit code into 1, prints an error once per rank and a traceback of
its own below, and before torch 2.13 kills ranks 30 seconds after Ctrl-C, while they still write a checkpoint.
Ranks started by others, as by torchrun on several machines, have WORLD_SIZE in their environment; then there
is nothing to start.
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
from gpt2.signals import Asked, handled, signal_name
from gpt2.training.reexec import own_variables, python

GRACE_SECONDS = 30.0
"""Time for the other ranks to end after one has failed; on some backends they would wait for it for long."""
ENDING_SECONDS = 120.0
"""Time for the other ranks to end after one has ended on request; rank 0 may still be sending metrics."""
REFUSING_SECONDS = 5.0
"""Time for the other ranks to end after rank 0 has reported an error that the user can fix, or for all after
a later Ctrl-C has asked for the end at once."""
HELD = "GPT2_RANKS_HELD"
"""Environment variable of a rank whose standard input closes when its launcher ends."""
ASKED = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask a rank to end in order."""
REFUSED, FAILED, INTERRUPTED = 2, 6, 130
"""Exit codes of a rank: an error that the user can fix, which rank 0 reports; any other failure; a signal."""
IN_ORDER = (0, INTERRUPTED)
TAIL_LINES = 20


def started() -> bool:
    """Return whether this process already is a rank."""
    return "WORLD_SIZE" in os.environ  # see gpt2.training.reexec.check_rank_variables()


def end_with_launcher() -> None:
    """In a rank, exit as soon as its launcher is killed, or the rank would keep its device for good."""
    if os.environ.get(HELD):
        threading.Thread(target=_wait_for_launcher, name="launcher", daemon=True).start()


def _wait_for_launcher() -> None:
    os.read(0, 1)  # not sys.stdin, whose lock a thread must not hold while the interpreter exits
    os._exit(FAILED)


def launch_ranks(module: str, processes: int, variables: Mapping[str, str]) -> int:
    """Run `python -m module` with this program's arguments in `processes` ranks, and return the exit code.

    It is that of the first rank that failed. Only rank 0 writes to the terminal; of another rank that fails
    first, the last lines of output are shown. The first signal is passed on to all ranks; after a later
    Ctrl-C they have REFUSING_SECONDS to end. `variables` are added to their environment.
    """
    command = [*python(module), *sys.argv[1:]]
    shared = {**os.environ, **own_variables(), **variables, HELD: "1"}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks: list[subprocess.Popen[bytes]] = []
    asked = Asked()

    def pass_on(number: int, frame: object) -> None:
        again = asked.first is not None
        asked.hear(number)
        for rank in ranks if asked.at_once or not again else ():
            rank.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpt2-ranks-")))
        stack.enter_context(handled(pass_on))
        stack.callback(_end, ranks)  # in case not all could be started
        for rank in range(processes):
            said = stack.enter_context(_file(folder, rank).open("wb")) if rank else None
            process = subprocess.Popen(
                command,
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,  # never written to; see end_with_launcher
                stdout=said,
                stderr=said,
                start_new_session=True,  # else they would receive Ctrl-C twice
            )
            ranks.append(process)
        failed = _wait(ranks, asked)
        if not failed and asked.at_once:
            return INTERRUPTED
        if not failed:
            return max(rank.returncode for rank in ranks)
        # Rank 0 has reported why; others may have failed only for lack of it.
        refused = ranks[0].returncode == REFUSED
        for rank in failed:
            code = ranks[rank].returncode
            if not refused or code < 0 or (0 not in failed and code != REFUSED):
                _show(rank, code, _file(folder, rank))
        code = ranks[failed[0]].returncode
        return 128 - code if -code in ASKED else max(code, 0) or FAILED


def _wait(ranks: Sequence[subprocess.Popen[bytes]], asked: Asked) -> list[int]:
    """Wait until all ranks have ended; returns those that failed first, at about the same moment.

    asked: what the signals ask for that have come, and those that come meanwhile.
    """
    failed: list[int] = []
    deadline = float("inf")
    while any(rank.poll() is None for rank in ranks):
        failed = failed or _failed(ranks)
        patience, at_once = GRACE_SECONDS if failed else ENDING_SECONDS, asked.at_once
        if at_once or ranks[0].returncode == REFUSED:
            patience = REFUSING_SECONDS
        if at_once or any(rank.returncode for rank in ranks):
            deadline = min(deadline, time.monotonic() + patience)
        if time.monotonic() > deadline:
            late = ", ".join(str(number) for number, rank in enumerate(ranks) if rank.poll() is None)
            if at_once or patience == ENDING_SECONDS:
                print(f"gpt2: rank {late} did not end with the others: killed", file=sys.stderr)
            _end(ranks)
            return failed
        time.sleep(0.02)
    return failed or _failed(ranks)


def _failed(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [number for number, rank in enumerate(ranks) if rank.poll() not in (None, *IN_ORDER)]


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()  # does nothing where it has ended
        rank.wait()
        if rank.stdin:
            rank.stdin.close()


def _show(rank: int, code: int, said: Path) -> None:
    """Print how a rank ended, where it did not say so on the terminal, and its last lines of output."""
    if code < 0 and -code not in ASKED:
        how = "--resume goes on from the newest checkpoint, if there is one"
        print(f"gpt2: rank {rank} was ended by {signal_name(-code)}; {how}", file=sys.stderr)
    if rank:
        for line in said.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]:
            print(f"rank {rank}: {line}", file=sys.stderr)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"

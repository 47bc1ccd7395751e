"""A peer ends with what times it and with the runner, whatever it does about that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from standin import SILENT, SINGLE_STEPS, await_none, await_peer, command, paced, timed

from bench.process.shutdown import Stop
from bench.process.supervisor import MOST_OUTPUT, ProcessEnd, classify, supervise

DETACHES = """\
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        time.sleep(600)
    os._exit(0)
os.wait()
"""
"""A process of its own session that is no longer its child."""
STUBBORN = {
    "ignores SIGTERM": "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n",
    "ignores SIGHUP": "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n",
    "leaves a child in a session of its own": DETACHES,
}


@pytest.mark.parametrize(
    ("first", "number"),
    [
        ("", signal.SIGKILL),
        pytest.param("", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(
            STUBBORN["ignores SIGHUP"],
            signal.SIGKILL,
            id="ignores its terminal's end",
            marks=pytest.mark.skipif(
                sys.platform != "linux",
                reason="only Linux tells a program of its starter's end but by a terminal",
            ),
        ),
        *(pytest.param(first, signal.SIGTERM, id=name) for name, first in STUBBORN.items()),
    ],
)
def test_a_peer_however_stubborn_dies_with_the_process_that_times_it(
    peer, tmp_path: Path, first: str, number: int
) -> None:
    words = command(peer(first + SILENT))
    timing = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await_peer(tmp_path / "checkout")
    timing.send_signal(number)
    timing.wait(timeout=120)
    await_none(tmp_path / "checkout")


def test_what_a_measured_peer_started_apart_ends_with_it(peer, tmp_path: Path) -> None:
    outcome, _ = timed(peer(DETACHES + paced(), **SINGLE_STEPS))
    assert outcome.status == "ok", outcome.error
    await_none(tmp_path / "checkout")


@pytest.mark.parametrize("first", ["", *STUBBORN.values()], ids=["as usual", *STUBBORN])
def test_a_peer_dies_with_the_runner(peer, tmp_path: Path, first: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    words = command(peer(first + SILENT))
    environ = {**os.environ, "BENCH_RUNNER_PID": str(holder.pid)}
    with subprocess.Popen(words, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL) as timing:
        await_peer(tmp_path / "checkout")
        holder.kill()
        holder.wait()
        assert timing.wait(timeout=120) == 1
    await_none(tmp_path / "checkout")


def test_of_a_process_that_floods_its_log_only_the_end_is_read(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('x' * 20_000_000); print('the last line')"]
    ended = supervise(words, dict(os.environ), tmp_path / "m.json", 600, lambda *told: None, Stop())
    assert len(ended.output) == MOST_OUTPUT
    assert ended.output.endswith("the last line\n")


@pytest.mark.parametrize(
    "said",
    [
        "OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2\nKeyboardInterrupt\n",
        "libgomp: Thread creation failed: Resource temporarily unavailable\n",
        "RuntimeError: can't start new thread\nException ignored in a thread\n",
    ],
)
def test_a_limit_on_threads_is_named_whatever_the_last_line_says(said: str, tmp_path: Path) -> None:
    end = ProcessEnd(exit_code=1, reason="exit", output=said, kernel_killed=False)
    outcome = classify(tmp_path / "none.json", end, timeout=60)
    assert outcome.status == "failed"
    limits = "ulimit -u, a container's limit on processes"
    assert outcome.error is not None
    assert outcome.error.splitlines()[0] == (
        f"exit code 1: no more threads may be started; raise the limit ({limits})"
    )

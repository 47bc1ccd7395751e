"""Ctrl-C that falls into code whose exceptions Python ignores, or into the start of a process."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from places import ROOT
from waiting import Sleepless, until

from gpt2 import signals
from gpt2.signals import Asked, interrupt_held_back, listening

PROGRAM = """
import contextlib, signal, time
from bench.process.shutdown import interruptible
from gpt2.signals import heed_every_interrupt

class Dropping:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a script ignores it
heed_every_interrupt()
try:
    with BLOCK:
        Dropping()
        time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize("block", ["contextlib.nullcontext()", "interruptible()"])
def test_control_c_within_a_destructor_is_heard_after_it(block: str) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("BLOCK", block)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("heard\n", "")


def test_an_interrupt_that_another_thread_takes_is_held_back_to_the_end_of_the_block() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()  # with the signal not blocked
    told, handled = socket.socketpair()
    handled.setblocking(False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    wakeup = signal.set_wakeup_fd(handled.fileno())
    steps = []

    def interrupted_at_work() -> None:
        with interrupt_held_back():
            os.kill(os.getpid(), signal.SIGINT)
            told.recv(1)  # the other thread took it
            steps.append("went on")

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_at_work()
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGINT, before)
        over.set()
        other.join()
        told.close()
        handled.close()
    assert steps == ["went on"]


def test_what_is_started_while_an_interrupt_is_held_back_hears_none() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    with interrupt_held_back():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "goes on\n"


def test_an_interrupt_after_the_block_is_raised_at_once() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupt_held_back():
            pass
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("came", "at_once"),
    [
        ([(signal.SIGHUP, 0.0), (signal.SIGHUP, 0.0002)], False),
        ([(signal.SIGTERM, 0.0), (signal.SIGHUP, 0.005)], False),
        ([(signal.SIGTERM, 0.0), (signal.SIGTERM, 60.0)], False),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.3)], False),
        ([(signal.SIGINT, 0.0), (signal.SIGINT, 0.3), (signal.SIGINT, 1.5)], True),
        ([(signal.SIGTERM, 0.0), (signal.SIGINT, 1.5)], True),
        ([(signal.SIGINT, 0.0), (signal.SIGHUP, 60.0)], False),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 0.3)], False),
        ([(signal.SIGINT, 0.0), (signal.SIGTERM, 60.0)], True),
    ],
)
def test_only_a_ctrl_c_some_time_after_the_first_signal_asks_for_the_end_at_once(
    came: list[tuple[int, float]], at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = Sleepless(), Asked()
    monkeypatch.setattr(signals, "time", clock)
    for number, seconds in came:
        clock.now = seconds
        asked.hear(number)
    assert (asked.first, asked.at_once) == (came[0][0], at_once)


def test_signals_are_listened_to_within_the_block_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with listening(heard.append):
            signal.raise_signal(signal.SIGTERM)
            until(lambda: heard)
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1

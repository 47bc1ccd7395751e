"""Signals that ask for an end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bench.process.shutdown import interruptible, stoppable

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever started the tests: nohup and a shell's & leave some of them ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_signal_interrupts_and_those_after_it_leave_what_the_end_takes_alone(number: int) -> None:
    events = []
    with interruptible():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            events.append("interrupted")
            for each in NUMBERS:
                os.kill(os.getpid(), each)
            events.append("ended")
    assert events == ["interrupted", "ended"]
    assert {signal.getsignal(each) for each in NUMBERS} == {signal.SIG_DFL}


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible(), stoppable() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

"""Time within a window that was not the program's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from samples import record
from windows import FACTS, PROTOCOL, FakeDevice, run

from bench.analysis.warnings import disturbances
from bench.host.standstill import Instant, Pulse, far_longer, pulse_beside, standstills
from bench.records.measurement import StoodStill
from bench.run.aggregate import combine
from bench.run.measure import Window, first_losses
from bench.run.worker import _unevenness
from gpt2.training.reexec import ROOT


def blocks(*lasted: float | tuple[float, float] | tuple[float, float, float]) -> list[Instant]:
    """Of seconds by the clock, lost, and asleep."""
    each = [of if isinstance(of, tuple) else (of,) for of in lasted]
    return [Instant(seconds=of[0], lost_seconds=sum(of[1:2]), asleep_seconds=sum(of[2:3])) for of in each]


class FakePulse(Pulse):
    """By what it is told, and by nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0.0

    def lost_seconds(self) -> float:
        return self.lost


@pytest.mark.parametrize(
    ("odd", "seconds"),
    [
        ((6.0, 5.0), 5.0),  # stopped for five seconds
        ((1.3, 0.3), 0.3),  # for less than a block
        ((1.0, 0.0, 30.0), 30.0),  # asleep, which the clock does not show
        ((1.5, 0.5, 0.2), 0.7),  # asleep, which it does in part
    ],
)
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_block_that_the_process_did_not_run_throughout_is_told(
    odd: tuple[float, float], seconds: float, place: int
) -> None:
    window = blocks(*[1.0] * place, odd, *[1.0] * (7 - place))
    assert standstills(window) == {place: pytest.approx(seconds)}


def test_standstills_in_most_blocks_are_told() -> None:
    assert len(standstills(blocks((6.0, 5.0), (6.0, 5.0), (4.0, 3.0), 1.0))) == 3


@pytest.mark.parametrize(
    "window",
    [
        blocks(),
        blocks(1.0),
        blocks(*[1.0] * 7, 6.0),  # it ran: it waited for data, for instance
        blocks(*[1.0, 2.0] * 4),
        [Instant(seconds=1.0, lost_seconds=None, asleep_seconds=None)] * 5,  # nobody looked
        blocks(1.0, (1.0, 0.0, 0.01), 1.0),  # clocks read one after the other
    ],
)
def test_a_block_that_is_only_slow_is_no_standstill(window: list[Instant]) -> None:
    assert standstills(window) == {}


@pytest.mark.parametrize(
    ("seconds", "longer"),
    [
        ([1.0] * 7 + [1.9], []),
        ([1.0] * 7 + [4.0], [7]),
        ([3.0, 1.0, 1.0, 1.0, 2.5], [0, 4]),
        ([0.01] * 7 + [0.2], []),  # a fifth of a second
        ([1.0, 2.0] * 4, []),
        ([], []),
    ],
)
def test_blocks_far_longer_than_the_median_one_are_found(seconds: list[float], longer: list[int]) -> None:
    assert far_longer(seconds) == longer


def test_a_process_that_is_stopped_for_real_knows_for_how_long() -> None:
    script = (
        "import sys, time; from bench.host.standstill import Pulse\n"
        "with Pulse() as pulse:\n"
        "    print('up', flush=True); sys.stdin.readline(); print(pulse.lost_seconds())"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(2)  # the fault itself
    os.kill(child.pid, signal.SIGCONT)
    lost = float(child.communicate("\n", timeout=60)[0])
    assert lost > 1.0


class Time:
    """A clock, and the processor time of a thread, that go on as they are told."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0
        self.pulse = Pulse(lambda: self.now, lambda: self.worked)

    def passes(self, seconds: float, worked: float) -> None:
        self.now += seconds
        self.worked += worked


@pytest.mark.parametrize(
    ("seconds", "worked", "lost"),
    [
        (5.0, 0.0, 4.9),  # stopped
        (5.0, 0.06, 4.84),  # after some work
        (5.0, 5.0, 0.0),  # at work that holds Python's lock
        (0.3, 0.0, 0.0),  # a thread has to wait its turn
        (0.1, 0.0, 0.0),  # as ever
    ],
)
def test_what_is_lost_is_a_gap_within_which_nobody_worked(seconds: float, worked: float, lost: float) -> None:
    time_of = Time()
    time_of.passes(seconds, worked)
    assert time_of.pulse.lost_seconds() == pytest.approx(lost)


def test_waiting_is_no_standstill_while_the_pulse_beats() -> None:
    time_of = Time()
    for _ in range(100):
        time_of.passes(0.1, 0.0)
        assert time_of.pulse.lost_seconds() == 0.0


def test_a_pulse_beats_by_itself_while_its_thread_waits() -> None:
    beats: list[float] = []

    def clock() -> float:
        beats.append(time.perf_counter())
        return beats[-1]

    with Pulse(clock):
        deadline = time.monotonic() + 60
        while len(beats) < 5 and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert len(beats) >= 5


class Stopping(FakeDevice):
    """A step takes a tenth of a second, and the process is stopped for some seconds after some steps."""

    def __init__(self, stops: dict[int, float]) -> None:
        super().__init__(0.1)
        self.stops, self.pulse = stops, FakePulse()

    def synchronize(self) -> None:
        super().synchronize()
        for step in [step for step in self.stops if step <= self.steps]:
            self.now += self.stops[step]
            self.pulse.lost += self.stops.pop(step)


SIX = replace(PROTOCOL, blocks=6)


def stopping(stops: dict[int, float], **options) -> Window:
    device = Stopping(stops)
    return run(device, SIX, pulse=device.pulse, **options)


def test_a_window_within_which_the_process_stood_still_is_taken_once_more() -> None:
    window = stopping({40: 5.0})
    assert window.block_seconds == pytest.approx([1.0] * 6)
    assert [round(block.seconds) for block in window.set_aside] == [1, 1, 6, 1, 1, 1]
    assert _unevenness([window]) == [
        "taken once more: within the first window the process stood still, for about 5.0 s in 1 of 6 blocks: "
        "stopped, without a processor, or swapped out"
    ]


def test_what_the_first_window_measured_is_kept_before_a_second_is_taken() -> None:
    kept: list[Window] = []
    device = Stopping({40: 5.0})

    def keep(window: Window) -> None:
        kept.append(window)
        assert device.steps < 80

    window = run(device, SIX, pulse=device.pulse, keep=keep)
    assert kept[0].blocks == window.set_aside
    assert combine(kept[:1], [[1.0]], [1.0], **FACTS).stood_still is not None


def test_a_second_window_of_that_kind_stays_and_is_told() -> None:
    window = stopping({40: 5.0, 100: 2.0})
    assert len(window.set_aside) == 6
    assert list(standstills(window.blocks).values()) == [pytest.approx(2.0)]
    measured = combine([window], [[1.0]], [1.0], **FACTS)
    assert measured.block_lost_seconds is not None
    assert sum(measured.block_lost_seconds) == pytest.approx(2.0)
    (line,) = disturbances(record(measurement=measured))
    assert line == (
        "stood still: in the window the process did, for about 2.0 s in 1 of 6 blocks: stopped, without a "
        "processor, or swapped out; measure again"
    )


def test_before_a_second_window_a_block_is_run_that_does_not_count() -> None:
    window = stopping({40: 5.0})
    steps = sum(1 for _ in window.history)
    assert steps - window.warmup_steps == 6 * (window.block_steps or 0)
    assert window.warmup_steps == stopping({}).warmup_steps + 7 * (window.block_steps or 0)


def test_a_window_that_the_machine_slept_through_is_told_where_no_pulse_can_be() -> None:
    asleep = [Instant(seconds=1.0, lost_seconds=None, asleep_seconds=each) for each in (0.0, 30.0, 0.0)]
    measured = combine([replace(stopping({}), blocks=asleep)], [[1.0]], [1.0], **FACTS)
    assert measured.block_lost_seconds == [0.0, 30.0, 0.0]
    assert measured.stood_still == StoodStill(seconds=30.0, blocks=1, of_blocks=3, asleep=True)


@pytest.mark.parametrize("waits_with_the_lock", [False, True])
def test_no_pulse_is_taken_where_waiting_for_the_device_would_stop_it(waits_with_the_lock: bool) -> None:
    device = FakeDevice(0.1)
    device.waits_with_the_lock = waits_with_the_lock
    with pulse_beside(device) as pulse:
        assert (pulse is None) is waits_with_the_lock


def test_where_there_is_no_time_for_a_second_window_the_first_stays() -> None:
    asked = []

    def has_time(seconds: float) -> bool:
        asked.append(round(seconds))
        return False

    window = stopping({40: 5.0}, has_time=has_time)
    assert asked == [11]
    assert window.set_aside == []
    assert standstills(window.blocks) == {2: pytest.approx(5.0)}


def test_all_ranks_take_a_second_window_where_one_stood_still() -> None:
    heard, device = [], Stopping({})

    def agree(value: float) -> float:
        # The window is over, and another rank stood still.
        if value == 0.0 and device.steps > 60 and not heard:
            heard.append(value)
            return 1.0
        return value

    window = run(device, SIX, pulse=device.pulse, agree=agree)
    assert len(window.set_aside) == 6
    assert standstills(window.set_aside) == {}


def test_of_several_ranks_the_one_that_stood_still_is_named_once() -> None:
    still, waiting = stopping({40: 5.0, 100: 2.0}), stopping({})
    waiting = replace(
        waiting, blocks=blocks(*[block.seconds for block in still.blocks]), set_aside=still.blocks
    )
    assert [line.split(":")[0] for line in _unevenness([waiting, still])] == ["taken once more"]
    found = combine([waiting, still], [[1.0]] * 2, [1.0], **FACTS).stood_still
    assert found is not None
    assert (found.rank, found.blocks) == (1, 1)
    assert "of rank 1: " in found.text


def test_a_process_for_its_losses_alone_has_no_blocks_to_be_uneven() -> None:
    device = FakeDevice(0.5)
    assert _unevenness([first_losses(device.steps_of(), device, 5)]) == []


def test_blocks_that_waited_for_something_are_told_and_stay() -> None:
    window = replace(stopping({}), blocks=blocks(1.0, 1.0, 6.0, 1.0))
    assert _unevenness([window]) == [
        "uneven: 1 of 4 blocks lasted over twice as long as the median one, up to 6.0 s: it ran meanwhile, "
        "and waited for data, the device, memory or the disk"
    ]

"""Time within a window that was not the program's."""

from __future__ import annotations

import pytest
from test_measure import FakeDevice

from bench import standstill
from bench.ladder import Protocol
from bench.measure import measure
from bench.standstill import Instant, standstills
from gpt2.prefetch import Waiting


def blocks(*lasted: tuple[float, float | None] | tuple[float, float | None, float]) -> list[Instant]:
    """Of seconds by the clock, of the processor, and asleep."""
    return [
        Instant(seconds=each[0], cpu_seconds=each[1], asleep_seconds=each[2] if len(each) > 2 else 0.0)
        for each in lasted
    ]


EVEN = [(1.0, 2.0)] * 7


@pytest.mark.parametrize(
    ("odd", "seconds"),
    [
        ((6.0, 2.0), 5.0),  # stopped for five seconds
        ((1.6, 2.0), 0.6),  # for less than a block
        ((2.0, 2.9), 1.0),  # given half of the processors that it had
        ((1.0, 2.0, 30.0), 30.0),  # asleep, which the clock does not show
        ((1.5, 2.1, 0.2), 0.7),  # asleep, which it does in part
    ],
)
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_block_that_the_process_did_not_work_throughout_is_told(
    odd: tuple[float, ...], seconds: float, place: int
) -> None:
    window = blocks(*EVEN[:place], odd, *EVEN[place:])  # type: ignore[arg-type]
    assert standstills(window) == {place: pytest.approx(seconds)}


@pytest.mark.parametrize(
    "window",
    [
        blocks(),
        blocks((1.0, 2.0)),
        blocks(*EVEN),
        blocks(*EVEN, (1.2, 2.0)),  # as blocks differ
        blocks(*EVEN, (3.0, 6.0)),  # slow, but at work: clocks fell, or the work is more
        blocks(*[(0.01, 0.02)] * 7, (0.2, 0.02)),  # a fifth of a second
        blocks(*[(1.0, 0.05)] * 7, (1.6, 0.06)),  # a process that only waits for a device: its own time tells nothing
        blocks(*[(1.0, 2.0), (2.0, 4.0)] * 4),
    ],
)
def test_a_block_that_is_only_slow_is_none(window: list[Instant]) -> None:
    assert standstills(window) == {}


@pytest.mark.parametrize("cpu_seconds", [None, 0.05])
def test_where_processor_time_tells_nothing_only_a_far_longer_block_counts(cpu_seconds: float | None) -> None:
    assert standstills(blocks(*[(1.0, cpu_seconds)] * 7, (1.9, cpu_seconds))) == {}
    assert standstills(blocks(*[(1.0, cpu_seconds)] * 7, (4.0, cpu_seconds))) == {7: pytest.approx(3.0)}


class Clocks:
    """A machine on which a step takes a tenth of a second of two processors, and that stops after some steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stops: dict[int, float]) -> None:
        self.device = FakeDevice(0.1)
        self.stops, self.cpu = stops, 0.0
        genuine = self.device.synchronize

        def synchronize() -> None:
            self.cpu += 0.2 * self.device.queued
            genuine()
            for step in [step for step in self.stops if step <= self.device.steps]:
                self.device.now += self.stops.pop(step)

        monkeypatch.setattr(self.device, "synchronize", synchronize)
        monkeypatch.setattr(standstill.time, "process_time", lambda: self.cpu)

    def measure(self, **options):
        protocol = Protocol(min_warmup_steps=3, block_seconds=1.0, blocks=6, max_window_seconds=90)
        steps = self.device.steps_of()
        return measure(steps, self.device, protocol, Waiting([]), clock=lambda: self.device.now, **options)


def test_a_window_within_which_the_process_stood_still_is_taken_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Clocks(monkeypatch, {40: 5.0}).measure()
    assert window.block_seconds == pytest.approx([1.0] * 6)
    assert [round(block.seconds) for block in window.set_aside] == [1, 1, 6, 1, 1, 1]
    assert standstill.told(window.set_aside, "so")[0].startswith("stood still: for about 5.0 s in block 3 of 6")


def test_a_second_window_of_that_kind_stays_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    window = Clocks(monkeypatch, {40: 5.0, 100: 2.0}).measure()
    assert len(window.set_aside) == 6
    assert list(standstills(window.blocks).values()) == [pytest.approx(2.0)]


def test_where_there_is_no_time_for_a_second_window_the_first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def has_time(seconds: float) -> bool:
        asked.append(round(seconds))
        return False

    window = Clocks(monkeypatch, {40: 5.0}).measure(has_time=has_time)
    assert asked == [11]
    assert window.set_aside == []
    assert standstills(window.blocks) == {2: pytest.approx(5.0)}


def test_all_ranks_take_a_second_window_where_one_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, heard = Clocks(monkeypatch, {}), []

    def agree(value: float) -> float:
        if value == 0.0 and clocks.device.steps > 60 and not heard:  # the window is over, and another rank stood still
            heard.append(value)
            return 1.0
        return value

    window = clocks.measure(agree=agree)
    assert len(window.set_aside) == 6
    assert standstills(window.set_aside) == {}

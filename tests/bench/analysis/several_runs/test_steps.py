"""The steps from the slowest hardware to the fastest rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.analysis.several_runs import steps as module
from bench.analysis.several_runs.steps import Step, is_plain, steps
from bench.records.published import Published
from gpt2.config.toggles import Toggles
from ladders import ladder

HOST = Toggles(device="cpu")
CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
FUSED = replace(BF16, adamw="fused")
SDPA = replace(FUSED, attention="sdpa")


def told(found: Sequence[Step]) -> list[tuple[str, float, str]]:
    """Group, tokens/s, and our rung's name or the published hardware."""
    return [
        (
            step.group,
            round(step.tps),
            step.rung.row.rung if step.rung else f"{step.figure and step.figure.hardware}",
        )
        for step in found
    ]


def figure(tps: float, hardware: str, **changes: Any) -> Published:
    facts = {"source": "s", "series": "ladder", "rung": "r", "hardware": hardware, "devices": 1, "tps": tps}
    return Published.model_validate({**facts, "model": "gpt2", "seq_len": 1024, **changes})


SLOW = ladder(("cpu base", HOST, 10.0), ("cpu half", replace(HOST, autocast="bfloat16"), 20.0), chip="slow")
QUICK = ladder(
    ("gpu base", CUDA, 100.0),
    ("no faster", replace(CUDA, adamw="foreach"), 90.0),
    ("half", BF16, 300.0),
    ("slower", replace(BF16, attention="sdpa"), 200.0),
    ("fused", FUSED, 400.0),
    ("two", replace(FUSED, world_size=2), 700.0),
    chip="quick",
)


def test_baselines_stand_by_speed_then_the_fastest_machine_climbs_then_several_devices() -> None:
    found = steps([QUICK, SLOW])
    assert told(found) == [
        ("Hardware", 10, "cpu base"),
        ("Hardware", 100, "gpu base"),
        ("Software", 300, "half"),
        ("Software", 400, "fused"),
        ("Distributed", 700, "two"),
    ]
    assert [round(step.over_first) for step in found] == [1, 10, 30, 40, 70]


def test_a_step_is_the_next_rung_only_where_none_was_left_out_between() -> None:
    found = steps([ladder(("a", CUDA, 1.0), ("b", BF16, 2.0), ("c", FUSED, 1.5), ("d", SDPA, 3.0))])
    assert [(step.rung and step.rung.row.rung, step.next_rung) for step in found] == [
        ("a", False),
        ("b", True),
        ("d", False),
    ]


def test_the_longest_published_ladder_joins_where_it_has_more_steps_than_ours() -> None:
    theirs = [
        figure(50.0, "laptop"),
        figure(200.0, "card"),
        figure(250.0, "card"),
        figure(240.0, "card"),
        figure(260.0, "card"),
        figure(270.0, "card"),
        figure(5000.0, "card", devices=8),
        figure(9e9, "elsewhere", source="of one row"),
        figure(9e9, "elsewhere", series="scaling"),
        figure(9e9, "elsewhere", model="gpt2-xl"),
    ]
    assert told(steps([QUICK, SLOW], theirs)) == [
        ("Hardware", 10, "cpu base"),
        ("Hardware", 50, "laptop"),
        ("Hardware", 100, "gpu base"),
        ("Hardware", 200, "card"),
        ("Software", 250, "card"),
        ("Software", 260, "card"),
        ("Software", 270, "card"),
        ("Software", 300, "half"),
        ("Software", 400, "fused"),
        ("Distributed", 700, "two"),
    ]
    assert ("Distributed", 5000, "card") in told(steps([SLOW], theirs))


def test_a_baseline_is_plain_where_only_its_device_and_torch_s_own_adamw_are_chosen() -> None:
    assert is_plain(CUDA)
    assert is_plain(replace(CUDA, adamw="foreach"))
    assert not is_plain(replace(HOST, adamw="foreach"))
    assert not is_plain(replace(CUDA, adamw="fused"))
    assert not is_plain(replace(CUDA, micro_batch_size=2))


def test_a_complete_baseline_stands_for_a_machine_before_a_faster_one_of_few_rounds() -> None:
    one = ladder(("base", HOST, 50.0), chip="slow", rounds=1)
    assert told(steps([QUICK, one, ladder(("base", HOST, 10.0), chip="slow")]))[0] == ("Hardware", 10, "base")


def test_several_devices_are_a_step_only_where_they_are_faster_than_one() -> None:
    few = ladder(("one", HOST, 10.0), ("two", replace(HOST, world_size=2), 15.0), chip="slow")
    assert [step.group for step in steps([few])] == ["Hardware", "Distributed"]
    found = steps([few, ladder(("gpu base", CUDA, 100.0), chip="quick")])
    assert [step.group for step in found] == ["Hardware", "Hardware"]


def test_the_software_steps_that_gain_least_are_left_out_beyond_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST", 3)
    threads = [replace(CUDA, threads=n) for n in (1, 2, 3)]
    found = steps(
        [ladder(("a", CUDA, 100.0), *((f"t{n}", t, 100.0 * (n + 1)) for n, t in enumerate(threads, 1)))]
    )
    assert told(found) == [("Hardware", 100, "a"), ("Software", 200, "t1"), ("Software", 400, "t3")]
    assert [step.next_rung for step in found] == [False, True, False]
    assert found[-1].tps_before == pytest.approx(200.0)


def test_one_measured_rung_makes_no_steps() -> None:
    assert steps([ladder(("base", CUDA, 100.0))], [figure(50.0, "laptop"), figure(90.0, "card")]) == []
    assert steps([], []) == []

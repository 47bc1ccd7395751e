"""The atlas: what each change gains on each machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples import measurement, record

from bench.analysis.scoreboard import scoreboard
from bench.analysis.several_runs.atlas import atlas, changes
from bench.records.published import Published
from gpt2.config.toggles import Toggles
from ladders import ladder

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
FUSED = replace(BF16, adamw="fused")


def test_a_change_is_told_by_toggle_and_value_and_by_the_value_before_where_that_is_no_default() -> None:
    assert list(map(str, changes(CUDA, FUSED))) == ["autocast=bfloat16", "adamw=fused"]
    (change,) = changes(FUSED, replace(FUSED, adamw="compiled"))
    assert str(change) == "adamw=compiled (from fused)"


def test_one_change_on_two_machines_is_one_line_whatever_the_rungs_are_called() -> None:
    a = ladder(("base", CUDA, 100.0), ("half", BF16, 250.0), chip="a")
    b = ladder(("first", CUDA, 100.0), ("other name", BF16, 80.0), chip="b")
    (line,) = atlas({"a": [a], "b": [b]})
    assert line.title == "autocast=bfloat16"
    gains = {title: (cell.ratio and cell.ratio.value, cell.verdict) for title, cell in line.cells.items()}
    assert gains == {"a": (pytest.approx(2.5), "faster"), "b": (pytest.approx(0.8), "slower")}
    assert line.differs
    assert line.agreement == "direction differs"


def test_a_rung_that_changes_two_toggles_is_one_line_named_by_both() -> None:
    (line,) = atlas({"a": [ladder(("base", CUDA, 100.0), ("both", FUSED, 300.0))]})
    assert line.title == "autocast=bfloat16, adamw=fused"


def test_the_same_value_from_another_value_is_another_change() -> None:
    foreach = replace(BF16, adamw="foreach")
    a = ladder(("base", BF16, 100.0), ("fused", FUSED, 150.0), chip="a")
    b = ladder(("base", foreach, 100.0), ("fused", FUSED, 120.0), chip="b")
    lines = atlas({"a": [a], "b": [b]})
    assert [line.title for line in lines] == ["adamw=fused", "adamw=fused (from foreach)"]
    assert [list(line.cells) for line in lines] == [["a"], ["b"]]


def test_of_several_measurements_on_a_machine_that_of_most_rounds_stands_then_the_newest() -> None:
    def run(tps: float, rounds: int, day: int) -> object:
        rungs = (("base", CUDA, 100.0), ("half", BF16, tps))
        return ladder(*rungs, rounds=rounds, time=f"2026-01-0{day}T00:00:00+00:00")

    def gain(*runs: object) -> float | None:
        (line,) = atlas({"a": runs})  # type: ignore[dict-item]
        return line.cells["a"].ratio and line.cells["a"].ratio.value

    assert gain(run(200.0, 5, 1), run(300.0, 3, 2)) == pytest.approx(2.0)
    assert gain(run(300.0, 3, 2), run(200.0, 3, 1)) == pytest.approx(3.0)


def test_a_failed_check_or_other_maths_gives_no_cell() -> None:
    differs = record("half", 1, toggles=BF16, measurement=measurement(losses=[10.9, 9.0, 8.0, 7.0]))
    assert atlas({"a": [scoreboard([record(), differs])]}) == []
    narrow = replace(BF16, residual="bfloat16")
    (line,) = atlas({"a": [ladder(("base", CUDA, 100.0), ("half", BF16, 200.0), ("narrow", narrow, 300.0))]})
    assert line.title == "autocast=bfloat16"


def test_the_largest_clear_gain_comes_first_and_changes_of_three_toggles_are_left_out() -> None:
    many = replace(FUSED, attention="sdpa")
    a = ladder(("base", CUDA, 100.0), ("half", BF16, 150.0), ("fused", FUSED, 300.0))
    b = ladder(("base", CUDA, 100.0), ("many", many, 900.0))
    titles = [line.title for line in atlas({"a": [a], "b": [b]})]
    assert titles == ["adamw=fused", "autocast=bfloat16"]


def figure(tps: float, batch: int | None, rung: str = "a", **changes: object) -> Published:
    facts = {"source": "s", "series": "batch sweep", "rung": rung, "hardware": "H", "devices": 1, "tps": tps}
    return Published.model_validate({**facts, "micro_batch_size": batch, **changes})


def test_published_gains_stand_beside_ours_only_where_stated_batch_or_devices_alone_changed() -> None:
    ours = ladder(("base", CUDA, 100.0), ("two", replace(CUDA, micro_batch_size=2), 150.0))
    (line,) = atlas({"a": [ours]}, [figure(100.0, 1), figure(180.0, 2)])
    assert line.published == {"H": pytest.approx(1.8)}
    named = [figure(100.0, None), figure(180.0, None, "micro_batch_size=2")]
    elsewhere = [figure(100.0, 1), figure(180.0, 2, hardware="other")]
    for figures in (named, elsewhere):
        assert atlas({"a": [ours]}, figures)[0].published == {}

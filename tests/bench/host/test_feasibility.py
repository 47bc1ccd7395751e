"""Rungs that a CPU cannot finish in their time: what is said of them, and where nothing is."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from places import ROOT
from shown import in_full

from bench.cli import dry_run as plan
from bench.host import feasibility as foresight
from bench.host.feasibility import TIMES_SLOWER_IF_EMULATED, check_time, product_rate
from bench.ladder.ladder import Ladder, load
from bench.run import worker
from gpt2.config.toggles import HOST, Toggles, UnsupportedToggle

BFLOAT16_UNITS = torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN has kernels for it here."""
SLOW = {"float32": 130e9, "bfloat16": 0.9e9, "float16": 0.9e9}
"""FLOP/s of a CPU that has AVX2 and no more."""


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch):
    def of(rates: dict[str, float]) -> None:
        monkeypatch.setattr(foresight, "product_rate", lambda number_format, enough=0.0: rates[number_format])

    return of


@pytest.fixture
def ladder() -> Ladder:
    return load(ROOT / "ladders" / "cpu.yaml")


def refused(ladder: Ladder, name: str) -> bool:
    try:
        check_time(ladder, ladder.rung(name).toggles)
    except UnsupportedToggle:
        return True
    return False


def test_a_format_without_units_is_refused_where_a_window_takes_longer_than_the_limit(
    cpu, ladder: Ladder
) -> None:
    cpu(SLOW)
    with pytest.raises(UnsupportedToggle) as error:
        check_time(ladder, ladder.rung("bfloat16").toggles)
    assert str(error.value) == (
        "autocast: bfloat16: this CPU has no units for it: a thread makes 0.9 GFLOP/s, and 130 in float32, "
        "so that a window outlasts protocol.timeout_seconds 900; choose float32"
    )
    assert refused(ladder, "batch of 4")
    assert not refused(ladder, "baseline")


def test_the_same_format_is_tried_where_the_model_is_small_enough_or_there_is_time(
    cpu, ladder: Ladder
) -> None:
    cpu(SLOW)
    assert not refused(load(ROOT / "ladders" / "smoke.yaml"), "bfloat16")
    assert not refused(load(ladder.path, ["protocol.timeout_seconds=20000"]), "bfloat16")


def test_a_cpu_that_is_as_slow_in_float32_is_not_refused_what_float32_would_not_mend(
    cpu, ladder: Ladder
) -> None:
    cpu({"float32": 0.9e9 * TIMES_SLOWER_IF_EMULATED * 0.99, "bfloat16": 0.9e9})
    assert not refused(ladder, "bfloat16")


def test_other_devices_are_not_asked_about_this_cpu(cpu, ladder: Ladder) -> None:
    cpu({})
    check_time(ladder, Toggles(device="cuda", autocast="bfloat16"))


def test_no_rung_of_the_ladder_is_refused_once_bfloat16_is_not_carried(cpu, ladder: Ladder) -> None:
    cpu(SLOW)
    instead = ladder.carrying(without=["bfloat16", "bfloat16 (second try)"])
    assert not any(refused(instead, rung.name) for rung in instead.rungs)
    assert {rung.toggles.device for rung in instead.rungs} == {HOST}


def test_a_plan_says_so_beforehand(cpu, ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(SLOW)
    monkeypatch.setattr("gpt2.device.check", lambda *what: None)  # whatever else is missing here
    of = sum(not rung.again for rung in ladder.rungs)
    told = f"1 of {of} rungs not supported: autocast: bfloat16: this CPU has no units for it"
    assert told in in_full(plan.plan(ladder, ladder.rungs))


def test_a_process_that_would_measure_such_a_rung_ends_at_once(cpu, ladder: Ladder, tmp_path: Path) -> None:
    cpu(SLOW)
    asked = Namespace(out=tmp_path / "m.json", data=None)
    outcome = worker._run(ladder, ladder.rung("bfloat16"), asked)
    assert outcome.status == "unsupported"
    assert "choose float32" in (outcome.error or "")


def test_a_product_is_not_timed_again_once_it_was_fast_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: calls.append(1) or multiply(*args, **options))
    assert product_rate("float32", 1.0) > 1.0
    assert len(calls) == 2  # of which the first is not timed


@pytest.mark.skipif(BFLOAT16_UNITS, reason="this CPU multiplies bfloat16 by oneDNN")
def test_where_onednn_has_no_kernels_for_bfloat16_its_rate_tells() -> None:
    assert product_rate("bfloat16") * TIMES_SLOWER_IF_EMULATED < product_rate("float32")

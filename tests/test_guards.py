from __future__ import annotations

from dataclasses import replace

import pytest
from samples import MACHINE, measurement, record

from bench.record import Proof
from bench.report.load import exit_code
from bench.report.scoreboard import Row, scoreboard
from bench.report.tables import to_markdown
from gpt2.toggles import GRADIENT_TOLERANCE, Toggles

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
FUSED = replace(CUDA, adamw="fused")


def second(*records) -> Row:
    return scoreboard([record(), *records]).rows[1]


def test_a_compilation_within_the_window_flags_the_rung_and_keeps_its_figures() -> None:
    late = record("b", 1, toggles=FUSED, measurement=measurement(2000.0, recompiles=2))
    row = second(late)
    assert row.status == "recompiled"
    assert row.error == "compiled 2 more graphs within the window of round 1"
    assert row.tps is not None
    assert exit_code([record(), late]) == 4


def proofs(**took_effect: bool) -> dict[str, Proof]:
    return {name: Proof(took_effect=value, evidence=f"saw {name}") for name, value in took_effect.items()}


def test_a_changed_toggle_without_effect_makes_the_rung_inert_and_keeps_its_figures() -> None:
    idle = record("b", 1, toggles=FUSED, measurement=measurement(2000.0, proofs=proofs(adamw=False, device=True)))
    row = second(idle)
    assert row.status == "inert"
    assert row.error == "adamw=fused had no effect: saw adamw"
    assert row.tps is not None
    assert row.mfu is not None
    assert row.peak_memory_bytes is not None
    assert exit_code([record(), idle]) == 0


def test_a_toggle_that_this_rung_did_not_change_does_not_make_it_inert() -> None:
    idle = record("b", 1, toggles=FUSED, measurement=measurement(proofs=proofs(adamw=True, attention=False)))
    assert second(idle).status == "ok"


def test_one_process_without_the_effect_is_enough() -> None:
    good = record("b", 1, 1, toggles=FUSED, measurement=measurement(proofs=proofs(adamw=True)))
    bad = record("b", 1, 2, toggles=FUSED, measurement=measurement(proofs=proofs(adamw=False)))
    assert scoreboard([record(), record(repetition=2), good, bad]).rows[1].status == "inert"


def test_an_inert_rung_that_was_expected_is_said_to_be_one_and_one_that_was_not_inert_too() -> None:
    idle = measurement(proofs=proofs(adamw=False))
    text = to_markdown(scoreboard([record(), record("b", 1, toggles=FUSED, expect="inert", measurement=idle)]))
    assert "| inert |" in text
    text = to_markdown(scoreboard([record(), record("b", 1, toggles=FUSED, expect="inert")]))
    assert "| ok, not inert |" in text


def test_compiled_gradients_beyond_their_tolerance_fail_parity() -> None:
    allowed = GRADIENT_TOLERANCE["float32"]
    compiled = replace(CUDA, compile="default")
    for difference, status in (
        (allowed * 0.9, "ok"),
        (allowed * 1.1, "parity_failed"),
        (float("nan"), "parity_failed"),
    ):
        found = record("b", 1, toggles=compiled, measurement=measurement(gradient_difference=difference))
        assert second(found).status == status
    assert "compiled gradients by" in (second(found).error or "")


def test_a_larger_step_is_held_to_the_rung_before_accumulating_as_many_tokens() -> None:
    child = record(
        "b",
        1,
        kind="parity",
        measurement=measurement(tokens_per_step=4096, losses=[10.9, 10.4], block_seconds=[], block_steps=None),
    )
    good = record("b", 1, measurement=measurement(tokens_per_step=4096, losses=[10.9, 10.4, 10.1]))
    bad = record("b", 1, measurement=measurement(tokens_per_step=4096, losses=[10.9, 9.4, 10.1]))
    assert second(child, good).status == "ok"
    assert second(child, bad).status == "parity_failed"
    assert "the rung before, accumulating as many tokens" in (second(child, bad).error or "")
    assert second(bad).status == "ok"  # without the child there is nothing to hold it to


def test_a_parity_process_makes_no_row_and_no_tokens_per_second() -> None:
    child = record("b", 1, kind="parity", measurement=measurement(99.0, tokens_per_step=4096))
    assert len(scoreboard([record(), child]).rows) == 1


@pytest.mark.parametrize(
    ("environment", "error"),
    [
        (MACHINE.model_copy(update={"torch": "2.12.0"}), "torch 2.12.0, but 2.11.0 for baseline"),
        (MACHINE.model_copy(update={"code_hash": "other"}), "code other, but c0de for baseline"),
        (MACHINE.model_copy(update={"chip": "NVIDIA H200"}), "machine h200-x1, but h100-80gb-hbm3-x1 for baseline"),
    ],
)
def test_a_rung_of_other_software_or_another_machine_is_not_compared(environment, error: str) -> None:
    row = second(record("b", 1, environment=environment))
    assert (row.status, row.error) == ("not_comparable", error)
    assert row.speedup is row.gain is row.verdict is None
    assert row.tps is not None


def test_rungs_of_several_devices_of_one_machine_compare() -> None:
    cpu = MACHINE.model_copy(update={"chip": "Some CPU", "device_count": 8})
    first = record(toggles=Toggles(), environment=cpu)
    assert scoreboard([first, record("b", 1)]).rows[1].status == "ok"


def test_the_fastest_rung_is_one_that_nothing_is_held_against() -> None:
    broken = record("broken", 1, measurement=measurement(9000.0, losses=[1.0] * 4))
    good = record("good", 2, toggles=FUSED, measurement=measurement(2000.0))
    fastest = scoreboard([record(), broken, good]).fastest
    assert fastest is not None
    assert fastest.rung == "good"

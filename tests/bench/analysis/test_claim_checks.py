from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from samples import MACHINE, measurement, record, records_of
from shown import to_markdown

from bench.analysis.row import Row
from bench.analysis.scoreboard import scoreboard
from bench.analysis.select import exit_code
from bench.analysis.several_runs.atlas import atlas
from bench.analysis.warnings import warnings
from bench.records.measurement import Measurement, Proof
from gpt2.config.toggles import Toggles
from gpt2.config.tolerances import GRADIENT_TOLERANCE

CUDA = Toggles(device="cuda")
FUSED = replace(CUDA, adamw="fused")


def second(*records) -> Row:
    return scoreboard([record(), *records]).rows[1]


def test_a_compilation_within_the_window_flags_the_rung_and_keeps_its_figures() -> None:
    late = record("b", 1, toggles=FUSED, measurement=measurement(2000.0, recompiles=2))
    row = second(late)
    assert row.status == "recompiled"
    assert row.error == "compiled or recorded 2 more graphs within the window of round 1"
    assert row.tps is not None
    assert exit_code([record(), late]) == 4


def proved(tps: float = 1000.0, **took_effect: bool) -> Measurement:
    """A measurement of this version, with proofs."""
    proofs = {name: Proof(took_effect=value, evidence=f"saw {name}") for name, value in took_effect.items()}
    return measurement(tps, product_format="float32", proofs=proofs)


def test_a_changed_toggle_without_effect_makes_the_rung_inert_and_keeps_its_figures() -> None:
    idle = record("b", 1, toggles=FUSED, measurement=proved(2000.0, adamw=False, device=True))
    row = second(idle)
    assert row.status == "inert"
    assert row.error == "adamw=fused had no effect: saw adamw"
    assert row.tps is not None
    assert row.mfu is not None
    assert row.peak_memory_bytes is not None
    assert exit_code([record(), idle]) == 0


def test_a_toggle_that_this_rung_did_not_change_does_not_make_it_inert() -> None:
    idle = record("b", 1, toggles=FUSED, measurement=proved(adamw=True, attention=False))
    assert second(idle).status == "ok"


def test_one_process_without_the_effect_is_enough_and_how_many_there_were_is_said() -> None:
    good = record("b", 1, 1, toggles=FUSED, measurement=proved(adamw=True))
    bad = record("b", 1, 2, toggles=FUSED, measurement=proved(adamw=False))
    board = scoreboard([record(), record(repetition=2), good, bad])
    row = board.rows[1]
    assert (row.status, row.error) == ("inert", "adamw=fused had no effect in 1 of 2 rounds: saw adamw")
    assert row.inert_rounds == (1, 2)
    assert "| no effect in 1 of 2 rounds |" in to_markdown(board)


def test_of_several_toggles_each_one_s_rounds_without_effect_are_counted() -> None:
    both = replace(FUSED, attention="math")
    took = [{"adamw": False, "attention": True}, {"adamw": True, "attention": False}]
    found = [record("b", 1, n, toggles=both, measurement=proved(**each)) for n, each in enumerate(took, 1)]
    board = scoreboard([record(), record(repetition=2), *found])
    assert board.rows[1].inert_rounds == (1, 2)
    said = [f"{each} had no effect in 1 of 2 rounds" for each in ("adamw=fused", "attention=math")]
    assert board.rows[1].error == f"{said[0]}: saw adamw; {said[1]}: saw attention"


def test_a_round_without_proofs_leaves_the_rounds_without_effect_uncounted() -> None:
    idle = record("b", 1, 1, toggles=FUSED, measurement=proved(adamw=False))
    unproved = record("b", 1, 2, toggles=FUSED, measurement=measurement(proofs=None))
    row = scoreboard([record(), record(repetition=2), idle, unproved]).rows[1]
    assert (row.status, row.error) == ("inert", "no proof was taken in round 2")
    assert row.inert_rounds is None


def test_an_inert_rung_that_was_expected_is_said_to_be_one_and_one_that_was_not_inert_too() -> None:
    idle = proved(adamw=False)
    expected = record("b", 1, toggles=FUSED, expect="inert", measurement=idle)
    assert "| no effect here |" in to_markdown(scoreboard([record(), expected]))
    text = to_markdown(scoreboard([record(), record("b", 1, toggles=FUSED, expect="inert")]))
    assert "| ran, though expected: no effect here |" in text


def test_a_process_that_the_user_ended_before_its_proof_leaves_that_of_other_rounds() -> None:
    good = record("b", 1, 1, toggles=FUSED, measurement=proved(adamw=True))
    cut = record("b", 1, 2, toggles=FUSED, measurement=measurement(proofs=None), interrupted_late=True)
    first = [record(repetition=n) for n in (1, 2)]
    assert scoreboard([*first, good, cut]).rows[1].status == "ok"
    assert scoreboard([*first, cut]).rows[1].error == "no proof was taken in round 2"


def test_a_first_rung_without_a_proof_is_what_the_next_is_compared_with() -> None:
    unproved = record(measurement=measurement(proofs=None))
    board = scoreboard([unproved, record("b", 1, toggles=FUSED, measurement=proved(2000.0, adamw=True))])
    assert [row.status for row in board.rows] == ["inert", "ok"]
    assert board.rung_before(board.rows[1]) is board.rows[0]


def test_the_rung_after_one_without_effect_is_compared_with_the_one_before_that() -> None:
    sdpa = replace(FUSED, attention="sdpa")
    processes = [record(repetition=n) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        idle, good = proved(500.0, adamw=False), proved(2000.0, attention=True)
        processes.append(record("b", 1, n, toggles=FUSED, measurement=idle))
        processes.append(record("c", 2, n, toggles=sdpa, measurement=good))
    board = scoreboard(processes)
    first, idle, last = board.rows
    assert (idle.status, last.status) == ("inert", "ok")
    assert board.rung_before(last) is first
    assert last.gain is not None
    assert last.gain.value == pytest.approx(2.0)
    assert last.verdict is not None
    assert last.changed == ("attention=sdpa",)
    (line,) = atlas({"a": [board]})
    assert line.title == "attention=sdpa"


def test_compiled_gradients_beyond_their_tolerance_fail_parity() -> None:
    allowed = GRADIENT_TOLERANCE["float32"]
    compiled = replace(CUDA, compile="default")
    statuses = {allowed * 0.9: "ok", allowed * 1.1: "parity_failed", math.nan: "parity_failed"}
    for difference, status in statuses.items():
        found = record("b", 1, toggles=compiled, measurement=measurement(gradient_difference=difference))
        assert second(found).status == status
        assert "gradients" in (second(found).error or "gradients")


FAR = "gradients by 9.00% from those of eager code"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (1.2, "ok", None),
        (2.5, "parity_failed", f"{FAR}, and 2.5 times as far from float32's as those are"),
        (None, "parity_failed", f"{FAR}; the number formats explain 3.00%"),
    ],
)
def test_gradients_far_from_eager_code_pass_only_where_eager_code_is_about_as_far_from_float32(
    error: float | None, status: str, says: str | None
) -> None:
    compiled = replace(CUDA, compile="default", autocast="bfloat16")
    found = measurement(gradient_difference=0.09, gradient_error_over_eager=error)
    row = second(record("b", 1, toggles=compiled, measurement=found))
    assert (row.status, row.error) == (status, says)


def test_a_warning_says_where_rounding_explains_gradients_that_are_far_from_eager_code() -> None:
    compiled = replace(CUDA, compile="default", autocast="bfloat16")
    found = measurement(gradient_difference=0.09, gradient_error_over_eager=1.2)
    board = scoreboard([record(), record("b", 1, toggles=compiled, measurement=found)])
    (said,) = [line for line in warnings(board) if "rounding explains it" in line]
    assert said.startswith("b, round 1: its gradients are up to 9.0% from those of eager code")
    assert "by a factor of 1.2 at most" in said


def held(losses: list[float], first: list[float] | None = None) -> list[Row]:
    """A baseline with these first losses, and a rung with these."""
    own = measurement(losses=first) if first else measurement()
    other = record("b", 1, toggles=FUSED, measurement=measurement(losses=losses))
    return list(scoreboard([record(measurement=own), other]).rows)


SOUND = [10.9, 10.5, 10.2, 10.0]


@pytest.mark.parametrize(
    ("first", "where"),
    [
        ([10.9, math.nan, math.nan, math.nan], "from step 2 on"),
        ([10.9, 10.5, 10.2, math.inf], "from step 4 on"),
        ([math.nan] * 4, "from step 1 on"),
        ([10.9, math.inf, 10.2, 10.0], "at step 2"),
    ],
)
def test_a_baseline_that_diverged_is_said_to_have_and_fails_what_is_held_to_it(
    first: list[float], where: str
) -> None:
    rows, says = held(SOUND, first), f"the baseline diverged: its loss is not finite {where}"
    assert [(row.status, row.error) for row in rows] == [("parity_failed", says)] * 2
    assert exit_code([record(measurement=measurement(losses=first))]) == 4


def test_a_rung_that_diverged_from_a_sound_baseline_is_the_one_that_did() -> None:
    baseline, row = held([10.9, 10.5, math.nan, math.nan])
    assert baseline.status == "ok"
    assert (row.status, row.error) == ("parity_failed", "it diverged: its loss is not finite from step 3 on")


def test_a_first_gradient_that_is_not_finite_is_named() -> None:
    found = measurement(grad_norms=[math.nan, 1.0, 1.0, 1.0])
    row = second(record("b", 1, toggles=FUSED, measurement=found))
    said = "it diverged: its gradient norm is not finite at step 1"
    assert (row.status, row.error) == ("parity_failed", said)


def test_a_loss_that_is_not_finite_is_shown_as_that() -> None:
    diverged = measurement(losses=[10.9, math.nan, math.nan, math.nan])
    text = to_markdown(scoreboard([record(measurement=diverged)]))
    assert "| not finite |" in text
    assert "inf%" not in text


def test_a_larger_step_is_held_to_the_rung_before_accumulating_as_many_tokens() -> None:
    untimed: dict[str, Any] = {"block_seconds": [], "block_steps": None}
    found = measurement(tokens_per_step=4096, losses=[10.9, 10.4], **untimed)
    child = record("b", 1, kind="parity", measurement=found)
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
    ("changes", "error"),
    [
        ({"torch": "2.12.0"}, "torch 2.12.0, but 2.11.0 for baseline"),
        ({"code_hash": "other"}, "code other, but c0de for baseline"),
        ({"chip": "NVIDIA H200"}, "machine h200-x1, but h100-80gb-hbm3-x1 for baseline"),
    ],
)
def test_a_rung_of_other_software_or_another_machine_is_not_compared(changes: dict, error: str) -> None:
    row = second(record("b", 1, environment=MACHINE.model_copy(update=changes)))
    assert (row.status, row.error) == ("not_comparable", error)
    assert row.speedup is row.gain is row.verdict is None
    assert row.tps is not None


def test_a_run_is_said_to_be_of_the_machine_whose_figures_count() -> None:
    other = MACHINE.model_copy(update={"device_count": MACHINE.device_count - 1, "chip": "NVIDIA H200"})
    board = scoreboard([record(), record("b", 1, environment=other)])
    assert board.rows[1].status == "not_comparable"
    assert board.environment.machine == MACHINE.machine


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


def test_a_proof_that_reads_as_that_of_the_rung_before_proves_nothing() -> None:
    """64 and 128 both pad to 50304 rows."""
    pads = [(f"pad {n}", replace(CUDA, vocab_multiple=n), 1e3) for n in (64, 128)]
    row = scoreboard(records_of(*pads, measurement=proved(vocab_multiple=True))).rows[1]
    said = "vocab_multiple=128 had no effect: saw vocab_multiple, as before"
    assert (row.status, row.error) == ("inert", said)


def test_where_timing_leaves_all_as_before_a_rung_that_changes_more_is_not_inert() -> None:
    alone, more = replace(CUDA, products="tuned"), replace(CUDA, products="tuned", adamw="fused")
    for toggles, status in ((alone, "inert"), (more, "ok")):
        later = record("b", 1, toggles=toggles, measurement=proved(products=True, adamw=True))
        assert scoreboard([record(measurement=proved(products=True)), later]).rows[1].status == status


def test_a_mode_of_compilation_may_leave_the_same_traces() -> None:
    modes = ("default", "max-autotune-no-cudagraphs")
    rungs = [(mode, replace(CUDA, compile=mode), 1e3) for mode in modes]
    assert scoreboard(records_of(*rungs, measurement=proved(compile=True))).rows[1].status == "ok"


def test_a_rung_without_any_proof_is_inert() -> None:
    without = measurement(proofs=None)
    row = second(record("b", 1, toggles=FUSED, measurement=without))
    assert (row.status, row.error) == ("inert", "no proof was taken in round 1")


def test_a_proof_that_one_round_took_holds_for_those_that_were_asked_for_none() -> None:
    inert = Proof(took_effect=False, evidence="nothing ran")
    for took, status, error in (
        (Proof(took_effect=True, evidence="fused"), "ok", None),
        (inert, "inert", "adamw=fused had no effect: nothing ran"),
    ):
        rounds = [
            record("b", 1, repetition=repetition, toggles=FUSED, measurement=measurement(proofs=proofs))
            for repetition, proofs in ((1, {"adamw": took}), (2, {}), (3, {}))
        ]
        row = second(*rounds)
        assert (row.status, row.error) == (status, error)


def test_a_toggle_that_a_later_rung_put_out_of_effect_is_a_warning() -> None:
    both = replace(FUSED, compile="default")
    fused = Proof(took_effect=True, evidence="fused")
    proofs = {"adamw": fused, "compile": Proof(took_effect=False, evidence="nothing compiled ran")}
    late = record("b", 1, toggles=both, measurement=measurement(product_format="float32", proofs=proofs))
    board = scoreboard([record(toggles=replace(CUDA, compile="default")), late])
    assert board.rows[1].status == "ok"
    assert "Warning: b: compile=default is not in effect: nothing compiled ran." in to_markdown(board)


def test_a_rung_that_lost_an_earlier_toggle_is_not_called_the_fastest() -> None:
    proofs = {"compile": Proof(took_effect=False, evidence="fell back to eager")}
    both = replace(FUSED, compile="default")
    found = measurement(9000.0, gradient_difference=0.0, proofs=proofs)
    board = scoreboard(
        [record(toggles=replace(CUDA, compile="default")), record("b", 1, toggles=both, measurement=found)]
    )
    assert board.rows[1].caveats == ("compile=default is not in effect: fell back to eager",)
    assert board.fastest is not board.rows[1]


def test_compiled_gradients_that_were_held_to_nothing_keep_a_rung_from_being_the_fastest() -> None:
    compiled = replace(CUDA, compile="default")
    doubt = "its gradients were not compared with those of eager code"
    for difference, doubts in ((None, (doubt,)), (0.0, ())):
        found = measurement(9000.0, gradient_difference=difference)
        board = scoreboard([record(), record("b", 1, toggles=compiled, measurement=found)])
        assert board.rows[1].caveats == doubts
        assert (board.fastest is board.rows[1]) == (not doubts)


def test_a_process_that_the_user_ended_is_missing_in_its_round_and_no_more() -> None:
    ended = record("b", 1, 2, toggles=FUSED, status="interrupted")
    records = [record(), record(repetition=2), record("b", 1, toggles=FUSED), ended]
    board = scoreboard(records)
    assert board.rows[1].status == "ok"
    assert board.interrupted
    assert scoreboard([record(), ended]).rows[1].status == "interrupted"


def test_a_rung_held_to_one_whose_losses_differ_fails_with_it() -> None:
    """The parity process trains like the broken rung, and so does the larger batch: they agree."""
    wrong, big = [10.9, 9.0, 8.0, 7.0], [10.9, 8.8, 7.7]
    child = measurement(tokens_per_step=4096, losses=big, block_seconds=[], block_steps=None)
    larger = measurement(9000.0, tokens_per_step=4096, losses=big)
    records = [
        record(),
        record("broken", 1, toggles=FUSED, measurement=measurement(2000.0, losses=wrong)),
        record("batch of 4", 2, kind="parity", toggles=replace(FUSED, grad_accum_steps=4), measurement=child),
        record("batch of 4", 2, toggles=FUSED, measurement=larger),
        record("next", 3, toggles=FUSED, measurement=larger),
    ]
    board = scoreboard(records)
    assert [row.status for row in board.rows] == ["ok", "parity_failed", "parity_failed", "parity_failed"]
    assert board.rows[2].error == "its losses are compared with broken's, which differ themselves"
    assert board.fastest is board.rows[0]


def test_ranks_that_ended_with_different_weights_fail_the_rung_and_keep_its_figures() -> None:
    two = replace(CUDA, world_size=2)
    rounds = [
        record("b", 1, n, toggles=two, measurement=measurement(9000.0, ranks_agree=n != 2)) for n in (1, 2)
    ]
    board = scoreboard([record(), record(repetition=2), *rounds])
    row = board.rows[1]
    assert row.status == "ranks_differ"
    assert row.error == "the ranks of round 2 ended with different weights: they did not train one model"
    assert row.tps is not None
    assert board.fastest is not row
    assert exit_code([record(), *rounds]) == 4
    assert "| ranks differ |" in to_markdown(board)


def test_ranks_that_agree_or_were_not_asked_have_nothing_held_against_them() -> None:
    for agree in (True, None):
        assert second(record("b", 1, measurement=measurement(ranks_agree=agree))).status == "ok"


def test_other_text_under_the_same_name_is_not_compared() -> None:
    row = second(record("b", 1, data_sha256="other"))
    assert (row.status, row.error) == ("not_comparable", "text other, but da7a for baseline")


def float16(norms: list[float], losses: list[float]) -> Row:
    half = replace(CUDA, autocast="float16")
    found = measurement(losses=losses, grad_norms=norms, skipped_steps=norms.count(math.inf))
    return second(record("b", 1, toggles=half, measurement=found))


def test_losses_after_a_step_that_the_scaler_skipped_are_not_compared_and_the_rung_is_not_fastest() -> None:
    row = float16([1.0, math.inf, 1.0, 1.0], [10.9, 10.5, 10.5, 10.2])  # one step behind from there on
    assert row.status == "ok"
    said = "its losses are compared for 2 steps only: float16's scaler skipped the last of them"
    assert row.caveats == (said,)


def test_a_first_step_that_the_scaler_skipped_leaves_its_loss_to_be_held() -> None:
    assert float16([math.inf, 1.0, 1.0, 1.0], [10.9, 10.9, 10.5, 10.2]).status == "ok"
    assert float16([math.inf, 1.0, 1.0, 1.0], [11.9, 11.9, 10.5, 10.2]).status == "parity_failed"


def test_losses_before_a_skipped_step_are_held_as_ever() -> None:
    assert float16([1.0, 1.0, math.inf, 1.0], [10.9, 11.5, 10.2, 10.2]).status == "parity_failed"

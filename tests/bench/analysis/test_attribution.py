from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from samples import measurement, record
from shown import to_markdown

from bench.analysis.attribution import Attribution, Gain, attribution
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import exit_code
from bench.records.measurement import Proof
from bench.stats import Estimate, Verdict
from gpt2.config.toggles import Toggles

FIRST = Toggles(device="cuda")
BF16 = replace(FIRST, autocast="bfloat16")
SDPA = replace(BF16, attention="sdpa")
FULL = replace(SDPA, adamw="fused")


def board(alone_sdpa: float, without_sdpa: float, *, rounds: int = 3) -> Scoreboard:
    """Four rungs at 100, 200, 220 and 440 tokens per second, and what SDPA does alone and left out."""
    records = []
    for number in range(1, rounds + 1):
        wobble = 1 + 0.001 * number  # of the whole round: pairing takes it out

        def process(name, index, toggles, tps, kind="cumulative", number=number, wobble=wobble):
            found = measurement(tps * wobble)
            return record(name, index, number, toggles=toggles, kind=kind, measurement=found)

        records += [
            process("baseline", 0, FIRST, 100.0),
            process("bfloat16", 1, BF16, 200.0),
            process("SDPA", 2, SDPA, 220.0),
            process("fused", 3, FULL, 440.0),
            process("SDPA", 2, replace(FIRST, attention="sdpa"), alone_sdpa, "alone"),
            process("fused", 3, replace(FIRST, adamw="fused"), 150.0, "alone"),
            process("bfloat16", 1, replace(FULL, autocast="float32"), 110.0, "left_out"),
            process("SDPA", 2, replace(FULL, attention="explicit"), without_sdpa, "left_out"),
            process("baseline", 0, FIRST, 100.0, "control"),
        ]
    return scoreboard(records)


def test_three_answers_are_given_for_each_change() -> None:
    bf16, sdpa, fused = attribution(board(130.0, 400.0))
    for found, expected in ((bf16, (2.0, 2.0, 4.0)), (sdpa, (1.1, 1.3, 1.1)), (fused, (2.0, 1.5, 2.0))):
        ratios = [gain.ratio.value for gain in (found.in_order, found.alone, found.last) if gain.ratio]
        assert [round(ratio, 6) for ratio in ratios] == list(expected)
        assert found.agreement == "same direction"


def test_a_process_that_is_some_rung_already_is_found_there() -> None:
    """bfloat16 alone is the second rung, fused left out the third; neither was run again."""
    bf16, _, fused = attribution(board(130.0, 400.0))
    assert bf16.alone.ratio is not None
    assert fused.last.ratio is not None
    assert fused.last.ratio.rounds == 3


@pytest.mark.parametrize(
    ("tps", "verdict", "agreement"),
    [(80.0, "slower", "direction differs"), (99.9, "same", "direction differs, within noise")],
)
def test_a_sign_that_differs_is_flagged_and_said_to_be_within_the_noise_if_it_is(
    tps: float, verdict: str, agreement: str
) -> None:
    _, sdpa, _ = attribution(board(tps, 400.0))
    assert (sdpa.alone.verdict, sdpa.agreement) == (verdict, agreement)


def test_what_leans_against_a_sure_direction_is_flagged_and_what_is_all_unclear_is_not() -> None:
    def agreement(in_order: Verdict, ratio: float) -> str:
        sure = Gain(ratio=Estimate(ratio, 0.9 * ratio, 1.1 * ratio, 5), verdict=in_order)
        leaning = Gain(ratio=Estimate(0.96, 0.88, 1.05, 5), verdict="unclear")
        return Attribution(rung="batch of 4", in_order=sure, alone=leaning, last=sure).agreement

    assert agreement("faster", 1.4) == "direction differs, unclear"
    assert agreement("slower", 0.7) == ""
    assert agreement("unclear", 1.01) == ""


def test_a_change_that_a_later_rung_sets_again_cannot_be_left_out() -> None:
    foreach, fused = replace(FIRST, adamw="foreach"), replace(FIRST, adamw="fused")
    records = [
        record("a", 0, toggles=FIRST),
        record("b", 1, toggles=foreach),
        record("c", 2, toggles=fused),
        record("c", 2, toggles=fused, kind="alone"),
    ]
    found, _ = attribution(scoreboard(records))
    assert found.last.absent == "set again later"


@pytest.mark.parametrize(
    ("change", "status", "shown"),
    [
        ({"attention": "cudnn"}, "unsupported", "not supported here"),
        ({"micro_batch_size": 64}, "out_of_memory", "out of memory"),
    ],
)
def test_what_did_not_run_alone_says_how_and_is_an_answer_and_no_failure(
    change: dict[str, Any], status: str, shown: str
) -> None:
    records = [
        record("a", 0, toggles=FIRST),
        record("b", 1, toggles=BF16),
        record("c", 2, toggles=replace(BF16, **change)),
        record("c", 2, toggles=replace(FIRST, **change), kind="alone", status=status),
    ]
    _, last = attribution(scoreboard(records))
    assert last.alone.absent == shown
    assert exit_code(records) == 0
    assert f"| {shown} |" in to_markdown(scoreboard(records))


def test_a_change_that_did_nothing_alone_is_called_inert_there() -> None:
    records = list(board(100.0, 400.0).records)
    place = next(n for n, r in enumerate(records) if (r.kind, r.rung) == ("alone", "SDPA"))
    proof = Proof(took_effect=False, evidence="torch chose its math kernel")
    idle = measurement(100.0, product_format="float32", proofs={"attention": proof})
    records[place] = records[place].model_copy(update={"measurement": idle})
    _, sdpa, _ = attribution(scoreboard(records))
    failed = [gain.failed_check for gain in (sdpa.in_order, sdpa.alone, sdpa.last)]
    assert failed == ["", "no effect here", ""]
    assert ", no effect here |" in to_markdown(scoreboard(records))


def test_a_run_that_did_not_ablate_has_no_such_table() -> None:
    assert attribution(scoreboard([record(), record("b", 1, toggles=BF16)])) == []
    assert "What each change buys" not in to_markdown(scoreboard([record(), record("b", 1, toggles=BF16)]))


def test_the_table_stands_below_the_scoreboard_with_verdicts() -> None:
    text = to_markdown(board(80.0, 400.0))
    (line,) = [
        line for line in text.splitlines() if line.startswith("| SDPA |") and "direction differs" in line
    ]
    told = "1.10x ±0.0%, faster | 0.80x ±0.0%, slower | 1.10x ±0.0%, faster | direction differs"
    assert line == f"| SDPA | {told} |"


def test_a_last_rung_that_is_to_run_out_of_memory_is_not_part_of_the_full_set() -> None:
    records = list(board(130.0, 400.0).records)
    huge = replace(FULL, micro_batch_size=4096)
    for number in (1, 2, 3):
        oom = {"toggles": huge, "status": "out_of_memory", "expect": "out_of_memory"}
        records.append(record("huge", 4, number, **oom))
    found = attribution(scoreboard(records))
    assert [each.rung for each in found] == ["bfloat16", "SDPA", "fused"]
    assert found[1].last.ratio is not None


def test_where_too_little_is_known_no_direction_is_told() -> None:
    for each in attribution(board(130.0, 400.0, rounds=1)):
        assert each.alone.verdict == "not replicated"
        assert each.agreement == ""


def test_alone_pairs_with_the_control_where_the_first_rung_ran_before_an_interruption() -> None:
    sdpa = replace(FIRST, attention="sdpa")
    slow, quick = measurement(100.0), measurement(130.0)
    records = []
    for number in (1, 2, 3):
        late = {"session": "later" if number == 3 else "first"}
        again = {"toggles": FIRST, "kind": "control", "measurement": slow, **late}
        apart = {"toggles": sdpa, "kind": "alone", "measurement": quick, **late}
        records += [
            record("baseline", 0, number, toggles=FIRST, session="first", measurement=slow),
            record("bfloat16", 1, number, toggles=BF16, session="first", measurement=measurement(200.0)),
            record("SDPA", 2, number, toggles=SDPA, session="first", measurement=measurement(220.0)),
            record("SDPA", 2, number, **apart),
            record("baseline", 0, number, **again),
        ]
    alone = attribution(scoreboard(records))[1].alone.ratio
    assert alone is not None
    assert (alone.rounds, round(alone.value, 6)) == (3, 1.3)


def test_without_a_noise_floor_directions_neither_agree_nor_differ() -> None:
    records = [r for r in board(0.9 * 100, 400.0).records if r.kind != "control"]
    assert {each.agreement for each in attribution(scoreboard(records))} == {""}


def test_one_change_is_the_same_in_order_alone_and_last() -> None:
    records = [
        record(repetition=n, kind=kind, toggles=FIRST, ablate=True, measurement=measurement(100.0 + n))
        for n in (1, 2, 3)
        for kind in ("cumulative", "control")
    ]
    records += [
        record("bfloat16", 1, n, toggles=BF16, ablate=True, measurement=measurement(2 * (100.0 + n)))
        for n in (1, 2, 3)
    ]
    (only,) = attribution(scoreboard(records))
    assert [gain.ratio and round(gain.ratio.value, 6) for gain in only.gains] == [2.0, 2.0, 2.0]

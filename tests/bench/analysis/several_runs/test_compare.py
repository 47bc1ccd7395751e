"""Runs side by side: what is paired, what ranks, and what a gate makes of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from samples import MACHINE, append, measurement, record, step_of
from scipy import stats as scipy_stats

from bench.analysis.several_runs.compare import Comparison, Condition, compare, judge, sides
from bench.errors import BenchError
from bench.records.record import External, RecordError, Scout
from bench.report.several_runs.comparison import comparison_brief
from bench.report.several_runs.comparison import comparison_table as table_of
from bench.report.table import Table
from bench.stats import independent_ratio
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
BEFORE, AFTER = (1000.0, 1010.0, 990.0), (1100.0, 1111.0, 1089.0)


def run_of(path: Path, speeds: tuple[float, ...] = BEFORE, **changes: Any) -> Path:
    """A run of two rungs, the second twice as fast, with an A/A control."""
    for n, tps in enumerate(speeds, start=1):
        rungs = (("cumulative", 0, CUDA, 1.0), ("cumulative", 1, BF16, 2.0), ("control", 0, CUDA, 1.001))
        for kind, index, toggles, factor in rungs:
            found = measurement(tps * factor, tokens_per_step=step_of(toggles, changes))
            facts = {"kind": kind, "toggles": toggles, "measurement": found, **changes}
            append(path, record("ab"[index], index, n, **facts))
    return path


def compared(*names: object) -> Comparison:
    ((first, *others),) = sides([str(name) for name in names])
    return compare(first, others[0])


def shown(*names: object) -> Table:
    ((first, *others),) = sides([str(name) for name in names])
    return table_of([compare(first, other) for other in others])


def test_a_rung_that_one_side_tried_and_left_out_is_not_ranked_and_its_try_is_told(tmp_path: Path) -> None:
    climbed = tmp_path / "climbed.jsonl"
    append(climbed, record("a", measurement=measurement(1000.0)))
    scout = Scout(over="a", ratio=0.9, floor=0.01, carried=False, check="ok", reason=None)
    append(climbed, record("b", 1, kind="scout", toggles=BF16, scout=scout))
    pair = compared(climbed, run_of(tmp_path / "b.jsonl")).pairs[-1]
    assert (pair.tps, pair.not_ranked) == (None, "in A not carried by its short try (0.90x)")


def test_the_interval_of_two_runs_is_welch_s() -> None:
    import numpy as np

    values, reference = [110.0, 113.0, 108.0, 111.0], [100.0, 99.0, 104.0]
    found = independent_ratio(values, reference)
    test = scipy_stats.ttest_ind(np.log(values), np.log(reference), equal_var=False)
    expected = test.confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((np.exp(expected.low), np.exp(expected.high)))


def test_two_rounds_make_no_interval_between_runs() -> None:
    found = independent_ratio([110.0, 113.0], [100.0, 99.0, 104.0])
    assert found is not None
    assert found.low is found.high is None


def test_rungs_are_paired_by_what_they_switch_on_and_not_by_name(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a.jsonl")
    append(tmp_path / "b.jsonl", record("quick", 0, toggles=BF16, measurement=measurement(3000.0)))
    append(tmp_path / "b.jsonl", record("other", 1, toggles=replace(BF16, compile="default")))
    found = compared(first, tmp_path / "b.jsonl")
    assert [(pair.first.rung, pair.other.rung) for pair in found.pairs] == [("b", "quick")]
    assert found.unpaired == ("Only in A: a.", "Only in B: other.")


def test_the_fastest_rungs_of_two_runs_are_compared_whatever_they_switch_on(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    sdpa = replace(BF16, attention="sdpa")
    for n in (1, 2, 3):
        append(second, record("other", 0, n, toggles=CUDA, measurement=measurement(1000.0)))
        append(second, record("sdpa", 1, n, toggles=sdpa, measurement=measurement(3000.0 + n)))
    fastest = compared(first, second).fastest
    assert fastest is not None
    assert fastest.tps is not None
    assert (fastest.first.rung, fastest.other.rung) == ("b", "sdpa")
    assert fastest.tps.value == pytest.approx(1.5, rel=0.01)
    assert compared(f"{first}:a", f"{second}:sdpa").fastest is None


def answer(*names: object) -> str:
    return comparison_brief([compared(*names)]).answer[0]


def test_rungs_without_a_verdict_and_those_that_do_not_rank_are_counted_in_the_answer(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a.jsonl")
    assert answer(first, run_of(tmp_path / "two.jsonl", AFTER[:2])) == (
        "B over A: 2 without a verdict of 2 rungs; speed-ups of 1.11x."
    )
    append(tmp_path / "b.jsonl", record("a", 0, toggles=CUDA, measurement=measurement(2000.0)))
    append(tmp_path / "b.jsonl", record("b", 1, toggles=BF16, status="out_of_memory", measurement=None))
    assert answer(first, tmp_path / "b.jsonl") == (
        "B over A: fastest over fastest, of unlike settings, 1.00x. "
        "Like for like: 2.00x at rung a; 1 not ranked."
    )
    append(tmp_path / "c.jsonl", record("b", 1, toggles=BF16, status="out_of_memory", measurement=None))
    none = answer(first, tmp_path / "c.jsonl")
    assert none == "B over A: 1 rung of equal settings, of which none ranks."
    append(tmp_path / "d.jsonl", record("d", toggles=replace(CUDA, adamw="foreach")))
    assert answer(first, tmp_path / "d.jsonl") == (
        "B over A: fastest over fastest, of unlike settings, 0.50x. Like for like: no rung of equal settings."
    )


def test_two_rungs_of_unlike_maths_are_compared_with_a_warning_and_the_gate_says_so(tmp_path: Path) -> None:
    path = run_of(tmp_path / "a.jsonl")
    residual = replace(BF16, residual="bfloat16")
    for n, tps in enumerate(AFTER, start=1):
        append(path, record("narrow", 2, n, toggles=residual, measurement=measurement(3 * tps)))
    unlike = "residual=bfloat16 changes the maths: each layer's sum is rounded to bfloat16 against equal"
    notes = shown(f"{path}:b", f"{path}:narrow").notes
    assert f"Warning: b: its speeds are of unlike maths: {unlike}." in notes
    _, said = judge([compared(f"{path}:b", f"{path}:narrow")], [Condition.parse("tps<-5%")])
    assert f"b: B over A: judged, though of unlike maths: {unlike}" in said
    assert not any("maths" in note for note in shown(f"{path}:a", f"{path}:b").notes)


def test_a_faster_run_is_said_to_be_by_how_much(tmp_path: Path) -> None:
    found = compared(run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl", AFTER))
    assert [pair.tps and round(pair.tps.value, 3) for pair in found.pairs] == [1.1, 1.1]
    assert {pair.verdict for pair in found.pairs} == {"faster"}


def test_two_named_rungs_are_a_pair_whatever_they_switch_on_and_rounds_of_one_run_are_paired(
    tmp_path: Path,
) -> None:
    file = run_of(tmp_path / "a.jsonl", (1000.0, 2000.0, 500.0))
    (pair,) = compared(f"{file}:a", f"{file}:b").pairs
    assert pair.tps is not None
    assert (pair.tps.value, pair.tps.low) == pytest.approx((2.0, 2.0))  # twice as fast in every round
    assert "toggles.autocast: float32 in A, bfloat16 in B" in shown(f"{file}:a", f"{file}:b").first


@pytest.mark.parametrize("way", ["link", "path"])
def test_one_file_by_two_names_is_one_run(way: str, tmp_path: Path) -> None:
    file, other = run_of(tmp_path / "a.jsonl", (1000.0, 2000.0, 500.0)), tmp_path / "b.jsonl"
    if way == "link":
        other.symlink_to(file)
    else:
        other = tmp_path / ".." / tmp_path.name / file.name
    (pair,) = compared(f"{file}:a", f"{other}:b").pairs
    assert pair.tps is not None
    assert pair.tps.low == pytest.approx(2.0)  # the interval of paired rounds


def test_memory_of_one_run_is_paired_within_rounds(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for n, size in enumerate((1, 4, 2), start=1):
        for index, toggles in enumerate((CUDA, BF16)):
            found = measurement(peak_memory_bytes=(1 + index) * size * 2**30)
            append(file, record("ab"[index], index, n, toggles=toggles, measurement=found))
    (pair,) = compared(f"{file}:a", f"{file}:b").pairs
    assert pair.memory is not None
    assert pair.memory.low == pytest.approx(2.0)


def test_the_text_is_that_of_our_rungs_though_another_trainer_was_measured_last(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl")
    peer = External(peer="nanogpt", version="3adf61e", command="python train.py")
    append(second, record("peer", 2, 3, kind="external", external=peer, toggles=CUDA, data_sha256=None))
    assert not [line for line in compared(first, second).differences if "text" in line]


def test_other_trainers_are_a_pair_where_their_rungs_have_one_name(tmp_path: Path) -> None:
    """An edit of a checkout, of which the command says nothing, makes another trainer of it."""
    first, second = run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl")
    rungs = ((first, "plain", 2), (first, "both", 3), (second, "edited", 2), (second, "both", 3))
    for file, name, index in rungs:
        peer = External(peer="nanogpt", version="3adf61e", command="python train.py")
        append(file, record(name, index, 1, kind="external", external=peer, toggles=CUDA, data_sha256=None))
    found = [(pair.first.rung, pair.other.rung) for pair in compared(first, second).pairs]
    assert found == [("a", "a"), ("b", "b"), ("both", "both")]


def test_a_top_rung_that_never_read_the_text_is_of_no_other_text(tmp_path: Path) -> None:
    first, second = run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl")
    append(second, record("top", 2, toggles=CUDA, status="unsupported", data_sha256=None))
    assert not [line for line in compared(first, second).differences if "text" in line]


def test_another_torch_is_the_first_of_the_differences(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a.jsonl")
    other = MACHINE.model_copy(update={"torch": "2.12.0", "chip": "NVIDIA H200"})
    found = compared(first, run_of(tmp_path / "b.jsonl", environment=other))
    assert found.differences[0] == "torch: 2.11.0 in A, 2.12.0 in B"
    assert found.differences[1] == "the chip: NVIDIA H100 80GB HBM3 in A, NVIDIA H200 in B"


def test_unlike_tasks_do_not_rank_and_it_says_why(tmp_path: Path) -> None:
    longer = asdict(Workload(seq_len=512))
    found = compared(run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl", workload=longer))
    assert {pair.not_ranked for pair in found.pairs} == {"another task: seq_len 512 against 1024"}
    assert all(pair.tps is None for pair in found.pairs)


def test_memory_that_was_found_out_otherwise_does_not_compare(tmp_path: Path) -> None:
    sampled = measurement(peak_memory_method="sampled")
    append(tmp_path / "b.jsonl", record("a", measurement=sampled))
    (pair,) = compared(run_of(tmp_path / "a.jsonl"), tmp_path / "b.jsonl").pairs
    assert pair.memory is None
    assert pair.memory_not_ranked == "sampled against allocated, window (torch.cuda)"


def test_a_run_that_trains_otherwise_is_found_out(tmp_path: Path) -> None:
    off = measurement(losses=[10.9, 10.5, 9.0, 8.0])
    append(tmp_path / "b.jsonl", record("a", measurement=off))
    table = shown(run_of(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    said = "Warning: a: B trains otherwise: it differs in a loss by"
    assert any(line.startswith(said) for line in table.notes)


def test_several_machines_stand_in_one_table(tmp_path: Path) -> None:
    files = [run_of(tmp_path / f"{n}.jsonl", tuple(n * tps for tps in BEFORE)) for n in (1, 2, 3)]
    head, row = shown(*files).head, shown(*files).cells[0]
    speeds = [row[head.index(name)].split(" ")[0] for name in ("A TPS", "B TPS", "C TPS")]
    assert speeds == ["1,000", "2,000", "3,000"]
    assert row[head.index("C over A")].startswith("3.00x")


def test_a_ladder_that_only_one_folder_has_is_named(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        run_of(tmp_path / folder / "l.jsonl")
    run_of(tmp_path / "a" / "m.jsonl", ladder="alone")
    warnings: list[str] = []
    assert len(sides([str(tmp_path / "a"), str(tmp_path / "b")], warnings)) == 1
    assert warnings == ["only in A, and not compared: alone (gpt2)"]


def test_folders_are_compared_ladder_by_ladder(tmp_path: Path) -> None:
    for side in "ab":
        for ladder in ("one", "two"):
            (tmp_path / side).mkdir(exist_ok=True)
            run_of(tmp_path / side / f"{ladder}.jsonl", ladder=ladder)
    found = sides([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [[side.board.ladder for side in each] for each in found] == [["one", "one"], ["two", "two"]]


def test_what_is_left_out_of_a_torn_file_is_told(tmp_path: Path) -> None:
    whole, torn = run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl")
    with torn.open("a") as file:
        file.write('{"schema": 1, "run')
    warnings: list[str] = []
    sides([str(whole), str(torn)], warnings)
    assert warnings == [f"{torn}: the last line is cut off and was left out"]


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    file = run_of(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match="not all different runs; name each once"):
        sides([str(file), f"{tmp_path}/./a.jsonl"])


def test_a_rung_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    file = run_of(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match="no rung is called 'c'"):
        sides([f"{file}:c", str(file)])


@pytest.mark.parametrize(
    ("text", "after", "met"),
    [
        ("tps<-5%", AFTER, False),
        ("tps<-5%", tuple(0.9 * tps for tps in BEFORE), True),
        ("tps < -5 %", tuple(0.955 * tps for tps in BEFORE), False),
        ("tps<-5%", tuple(0.945 * tps for tps in BEFORE), False),  # below, but not for sure
        ("tps>5%", AFTER, True),
        ("memory>1%", BEFORE, False),
        ("tps<-5%", (100.0,), None),  # one round confirms nothing
    ],
)
def test_a_condition_is_met_only_where_the_whole_interval_is_beyond(
    text: str, after: tuple[float, ...], met: bool | None, tmp_path: Path
) -> None:
    found = compared(run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl", after))
    assert [Condition.parse(text).met(pair) for pair in found.pairs] == [met, met]


def test_a_ratio_of_memory_bears_the_interval_that_a_gate_judges_by(tmp_path: Path) -> None:
    grown = tmp_path / "b.jsonl"
    for n, size in enumerate((1030, 1034, 1032), start=1):
        found = measurement(100.0, peak_memory_bytes=3 * 2**20 * size)
        append(grown, record("a", 0, n, toggles=CUDA, measurement=found))
    comparison = compared(run_of(tmp_path / "a.jsonl"), grown)
    assert table_of([comparison]).cells[0][-1] == "1.008x ±0.5%"
    _, said = judge([comparison], [Condition.parse("memory>1%")])
    assert said == [
        "memory>1% is not confirmed: of no rung does the whole interval lie above 1.01x; "
        "nearest is a: B over A: 1.008x (95 % interval 1.003x to 1.013x)"
    ]


@pytest.mark.parametrize("text", ["tps<-100%", "memory<-200%"])
def test_a_condition_that_nothing_can_meet_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="nothing can fall by 100 % or more"):
        Condition.parse(text)


@pytest.mark.parametrize("text", ["tps", "tps<5", "loss<5%", "tps<-5%x", ""])
def test_a_condition_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BenchError, match="write tps or memory"):
        Condition.parse(text)


OF_NONE, SLOWER = "tps<-5% is not confirmed: of no rung", tuple(0.8 * tps for tps in BEFORE)


@pytest.mark.parametrize(
    ("after", "changes", "code", "says"),
    [
        (BEFORE, {}, 0, f"{OF_NONE} does the whole interval lie below 0.95x; nearest is a: B"),
        (SLOWER, {}, 3, "a: B over A: tps<-5% is confirmed: 0.800x (95 % interval 0."),
        ((100.0,), {}, 0, "a: B over A: tps<-5% cannot be told: too few rounds"),
        (BEFORE, {"workload": asdict(Workload(seq_len=512))}, 6, "a: B over A: not ranked: another task"),
    ],
)
def test_a_gate_s_exit_code_is_3_for_what_is_confirmed_and_6_for_what_does_not_rank(
    after: tuple[float, ...], changes: dict, code: int, says: str, tmp_path: Path
) -> None:
    found = compared(run_of(tmp_path / "a.jsonl"), run_of(tmp_path / "b.jsonl", after, **changes))
    given, said = judge([found], [Condition.parse("tps<-5%")])
    assert given == code
    assert any(line.startswith(says) for line in said)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("out_of_memory", "out_of_memory", 0),
        ("unsupported", "unsupported", 0),
        ("failed", "failed", 6),
        ("unsupported", "out_of_memory", 6),
        ("ok", "out_of_memory", 6),
    ],
)
def test_a_gate_passes_over_a_rung_that_neither_side_can_run_for_the_same_reason(
    before: str, after: str, code: int, tmp_path: Path
) -> None:
    large = replace(CUDA, micro_batch_size=512)
    for name, status in (("a", before), ("b", after)):
        found = measurement(tokens_per_step=step_of(large, {})) if status == "ok" else None
        last = record("large", 2, toggles=large, status=status, measurement=found)
        append(run_of(tmp_path / f"{name}.jsonl"), last)
    given, said = judge([compared(tmp_path / "a.jsonl", tmp_path / "b.jsonl")], [Condition.parse("tps<-5%")])
    assert given == code
    assert any(line.startswith("large: ") for line in said)


def test_a_gate_without_a_single_pair_is_one_clear_error(tmp_path: Path) -> None:
    append(tmp_path / "b.jsonl", record("other", 0, toggles=replace(BF16, compile="default")))
    found = compared(run_of(tmp_path / "a.jsonl"), tmp_path / "b.jsonl")
    with pytest.raises(BenchError, match="nothing to judge"):
        judge([found], [Condition.parse("tps<-5%")])


def test_a_folder_of_several_runs_beside_one_rung_is_refused(tmp_path: Path) -> None:
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    append(tmp_path / "one" / "a.jsonl", record("a"))
    for ladder in ("first", "second"):
        append(tmp_path / "many" / f"{ladder}.jsonl", record("a", ladder=ladder))
    with pytest.raises(RecordError, match=r"many: holds 2 runs, .*; name one file$"):
        sides([str(tmp_path / "many"), f"{tmp_path / 'one' / 'a.jsonl'}:a"])


def test_a_run_beside_its_copy_is_one_run_and_says_so(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a.jsonl")
    (tmp_path / "copy.jsonl").write_bytes(first.read_bytes())
    said = comparison_brief([compared(first, tmp_path / "copy.jsonl")]).warnings
    assert f"{tmp_path / 'copy.jsonl'} is a copy of {first}: one run, not two." in said
    other = comparison_brief([compared(first, run_of(tmp_path / "b.jsonl", run_id="other"))]).warnings
    assert not any("copy" in line for line in other)

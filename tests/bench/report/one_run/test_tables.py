from __future__ import annotations

import io
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from samples import MACHINE, append, measurement, record, records_of
from shown import to_markdown, to_terminal

from bench.analysis.bound import limit_tps
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import claims_refuted, exit_code, load_boards, load_named
from bench.analysis.timing import timing
from bench.analysis.warnings import disturbed, warnings
from bench.ladder.ladder import Protocol, load
from bench.ladder.shipped import shipped
from bench.records.machine import Ceiling, Matmul
from bench.records.measurement import StoodStill
from bench.records.record import Record, RecordError
from bench.report.one_run.caption import caption
from bench.report.one_run.screen import share_of_limit
from bench.report.one_run.tables import tables
from bench.stats import LOUD, noise_floor
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")


def ladder() -> list:
    """Two rungs in three rounds; the second is twice as fast in each, though the machine slowed down."""
    records = []
    for n, tps in ((1, 1000.0), (2, 500.0), (3, 250.0)):
        second = {"toggles": BF16, "changed": ["autocast=bfloat16"], "measurement": measurement(2 * tps)}
        records += [record(repetition=n, measurement=measurement(tps)), record("bfloat16", 1, n, **second)]
    return records


def rounds_of(*speeds: tuple[float, ...]) -> Scoreboard:
    """Rounds of a first rung, others called b, c and d, and the control."""
    records = []
    for n, (*rungs, again) in enumerate(speeds, start=1):
        for index, speed in enumerate(rungs):
            name, toggles = ("baseline", CUDA) if index == 0 else ("abcd"[index], BF16)
            records.append(record(name, index, n, toggles=toggles, measurement=measurement(speed)))
        records.append(record(repetition=n, kind="control", toggles=CUDA, measurement=measurement(again)))
    return scoreboard(records)


def terminal(board: Scoreboard, width: int = 300) -> str:
    """What a terminal shows, without styles."""
    shown = io.StringIO()
    Console(width=width, file=shown).print(to_terminal(board, width=min(width, 200)))
    return shown.getvalue()


def text_of(*records: Record) -> str:
    return to_markdown(scoreboard(list(records)))


def test_speed_ups_and_tokens_per_second_are_means_over_rounds() -> None:
    first, second = scoreboard(ladder()).rows
    assert first.tps is not None
    assert first.tps.value == pytest.approx(math.cbrt(1000 * 500 * 250))
    assert second.speedup is not None
    assert (second.speedup.value, second.speedup.low) == pytest.approx((2.0, 2.0))
    assert first.gain is None
    assert second.gain == second.speedup


def test_mfu_is_flops_per_token_times_tps_over_the_peak_of_all_devices() -> None:
    fast = measurement(400_000.0)
    (one,) = scoreboard([record(measurement=fast)]).rows
    (eight,) = scoreboard([record(measurement=fast, toggles=replace(CUDA, world_size=8))]).rows
    assert one.mfu == pytest.approx(854_438_400 * 400_000 / 989.4e12)
    assert eight.mfu == pytest.approx(854_438_400 * 400_000 / 989.4e12 / 8)


def test_an_unknown_peak_leaves_mfu_absent_with_the_reason() -> None:
    m = measurement(peak_flops_bf16=None, peak_flops_source="no published peak is known")
    text = text_of(record(measurement=m))
    assert scoreboard([record(measurement=m)]).rows[0].mfu is None
    assert "MFU is absent: no published peak is known." in text


def test_losses_are_shown_at_the_largest_stated_step_that_every_rung_has() -> None:
    def board(lengths: list[int]):
        curves = [measurement(losses=[20.0 - n / 10 for n in range(length)]) for length in lengths]
        return scoreboard([record(f"r{n}", n, measurement=curve) for n, curve in enumerate(curves)])

    steps = [board(lengths).loss_step for lengths in ([13, 14], [13, 300], [1000, 2000], [1])]
    assert steps == [10, 10, 1000, 1]
    assert [row.loss for row in board([13, 300]).rows] == [20.0 - 0.9, 20.0 - 0.9]


def test_a_curve_drawn_in_the_first_round_only_is_shown_to_its_end() -> None:
    first, later = measurement(losses=[10.9] * 999 + [3.5]), measurement(losses=[10.9] * 15)
    board = scoreboard([record(measurement=first), record(repetition=2, measurement=later)])
    assert (board.loss_step, board.rows[0].loss) == (1000, 3.5)


def test_a_rung_whose_loss_leaves_its_precision_class_fails_parity() -> None:
    records = [record(), record("broken", 1, measurement=measurement(losses=[10.9, 10.5, 10.2, 9.0]))]
    assert [row.status for row in scoreboard(records).rows] == ["ok", "parity_failed"]
    said = "broken: loss differs: a loss by 10% from baseline's; the number formats explain 0.1%"
    assert said in text_of(*records)
    assert exit_code(records) == 4


def test_a_loss_within_the_tolerance_of_its_precision_passes_parity() -> None:
    near = measurement(losses=[10.9, 10.5 * 1.004, 10.2, 10.0])
    assert scoreboard([record(), record("b", 1, toggles=BF16, measurement=near)]).rows[1].status == "ok"
    assert scoreboard([record(), record("b", 1, measurement=near)]).rows[1].status == "parity_failed"


def test_a_gradient_norm_that_differs_at_the_first_step_fails_parity() -> None:
    off = measurement(grad_norms=[1.1, 1.0, 1.0, 1.0])
    assert scoreboard([record(), record("b", 1, measurement=off)]).rows[1].status == "parity_failed"


def test_after_a_larger_batch_losses_are_held_to_the_first_rung_of_that_size() -> None:
    big, off = (measurement(tokens_per_step=4096, losses=[10.9, last]) for last in (9.0, 99.0))
    board = scoreboard([record(), record("big", 1, measurement=big), record("wrong", 2, measurement=off)])
    assert [row.status for row in board.rows] == ["ok", "ok", "parity_failed"]


def test_a_coarse_reference_allows_its_own_tolerance() -> None:
    near = measurement(losses=[10.9, 10.5 * 1.004, 10.2, 10.0])
    board = scoreboard([record(toggles=BF16, measurement=near), record("float32", 1)])
    assert [row.status for row in board.rows] == ["ok", "ok"]


def test_only_cumulative_records_make_the_rows() -> None:
    slow = record(kind="control", measurement=measurement(10.0))
    (row,) = scoreboard([record(), slow]).rows
    assert row.tps is not None
    assert row.tps.value == pytest.approx(1000.0)


def test_left_out_rungs_and_set_variables_are_said_in_the_caption() -> None:
    tuned = MACHINE.model_copy(update={"variables": {"LD_PRELOAD": "libtcmalloc.so"}})
    text = text_of(record(), record("third", 2, environment=tuned))
    assert "not all rungs of the ladder were run" in text
    assert "LD\\_PRELOAD=libtcmalloc.so" in text
    assert "not all rungs" not in to_markdown(scoreboard(ladder()))


def test_a_rung_with_other_tokens_per_step_is_not_compared_by_loss_and_says_so() -> None:
    big = measurement(tokens_per_step=4096, losses=[10.9])
    board = scoreboard([record(), record("batch of 4", 1, measurement=big)])
    assert board.rows[1].status == "ok"
    assert board.rows[1].caveats == (
        "its losses are compared with no others: no other process took steps of that size",
    )
    text = to_markdown(board)
    assert "batch of 4: its losses are compared with no others" in text
    assert "| 10.9000 † |" in text
    assert "† Tokens per optimiser step: 1,024, but 4,096 (batch of 4)." in text


@pytest.mark.parametrize(
    ("status", "expect", "code"),
    [
        ("failed", None, 6),
        ("timeout", None, 6),
        ("out_of_memory", None, 6),
        ("out_of_memory", "out_of_memory", 0),
        ("unsupported", None, 0),
        ("ok", "out_of_memory", 4),
        ("ok", None, 0),
    ],
)
def test_the_exit_code_says_whether_all_went_as_asked(status: str, expect: str | None, code: int) -> None:
    assert exit_code([record(), record("b", 1, status=status, expect=expect)]) == code


def test_a_ladder_of_which_nothing_is_supported_here_is_no_success() -> None:
    refused = [record(status="unsupported"), record("b", 1, status="unsupported")]
    assert exit_code([ceiling(400.0), *refused]) == 6


def test_changes_are_those_from_the_row_above_whatever_was_left_out() -> None:
    full = replace(BF16, attention="flash", adamw="fused")
    rows = scoreboard([record(), record("last", 5, toggles=full, changed=["adamw=fused"])]).rows
    assert rows[0].changed == ("device=cuda",)
    assert rows[1].changed == ("autocast=bfloat16", "attention=flash", "adamw=fused")


def test_an_out_of_memory_that_was_expected_and_did_not_come_is_said() -> None:
    assert "| ran, though expected: out of memory |" in text_of(record(expect="out_of_memory"))


def test_an_interrupted_run_and_a_busy_machine_are_said() -> None:
    busy = MACHINE.model_copy(update={"load_average": 17.0})
    text = text_of(record(environment=busy), record("b", 1, status="interrupted", error="by the user"))
    assert "interrupted in round 1 of 1" in text
    assert "load average up to 17.0 on 8 cores" in text


def test_a_run_that_was_cut_within_a_round_and_resumed_to_its_end_is_not_interrupted() -> None:
    """Where time is short the first rung is run again in the round that was cut in two alone."""
    protocol = {**record().protocol, "control": "last", "repeats": 3}
    records = [record("a", 0, 1, protocol=protocol)]
    records.append(record("a", 0, 1, kind="control", protocol=protocol, session="2"))
    for n in (1, 2, 3):
        records += [record("a", 0, n, protocol=protocol, session="2")] if n > 1 else []
        records += [
            record("b", 1, n, kind=kind, protocol=protocol, session="2") for kind in ("cumulative", "control")
        ]
    assert not scoreboard(records).interrupted
    assert scoreboard(records[:-1]).interrupted


def test_an_interrupted_bench_quick_is_measured_anew_for_it_cannot_be_resumed() -> None:
    board = scoreboard([record(ladder="quick"), record("b", 1, status="interrupted", ladder="quick")])
    assert warnings(board)[0] == "the run was interrupted in round 1 of 1; bench quick measures all anew"


def test_a_run_that_was_killed_counts_as_interrupted_though_no_record_says_so() -> None:
    planned = asdict(Protocol(repeats=2))
    first = [record(protocol=planned), record("b", 1, protocol=planned)]
    second = [record(repetition=2, protocol=planned), record("b", 1, 2, protocol=planned)]
    assert scoreboard(first).interrupted
    assert scoreboard([*first, second[0]]).interrupted
    assert not scoreboard([*first, *second]).interrupted
    assert not scoreboard([record(), record("b", 1, status="unsupported"), record(repetition=2)]).interrupted


def test_a_run_killed_before_its_last_control_or_ceiling_counts_as_interrupted() -> None:
    planned = asdict(Protocol(repeats=2))
    rungs = [record("a", 0, n, protocol=planned) for n in (1, 2)]
    controls = [record("a", 0, n, kind="control", protocol=planned) for n in (1, 2)]
    ceilings = [ceiling(400.0, n).model_copy(update={"protocol": planned}) for n in (1, 2)]
    assert not scoreboard([*rungs, *controls, *ceilings]).interrupted
    assert scoreboard([*rungs, *controls[:1], *ceilings]).interrupted
    assert scoreboard([*rungs, *controls, *ceilings[:1]]).interrupted
    alone = [record("a", 0, n, kind="alone", protocol=planned) for n in (1, 2)]
    assert not scoreboard([*rungs, *controls, *ceilings, *alone]).interrupted
    assert scoreboard([*rungs, *controls, *ceilings, alone[1]]).interrupted


def test_a_column_without_any_figure_is_left_out_of_the_terminal_table() -> None:
    text = terminal(scoreboard([record(measurement=measurement(peak_flops_bf16=None))]))
    assert "MFU (bf16)" not in text
    assert "Peak memory" in text


def test_a_rung_that_failed_is_a_row_with_dashes_and_its_reason() -> None:
    error = "RuntimeError: the reason\nTraceback ..."
    text = text_of(record(), record("bad", 1, status="failed", error=error))
    (line,) = [line for line in text.splitlines() if line.startswith("| bad")]
    assert line == "| bad | - | - | - | - | - | - | - | - | failed |"
    assert "bad: failed: RuntimeError: the reason" in text


GOLDEN = """\
### h100 on h100-80gb-hbm3-x1

| Rung | Changed | Maths | TPS | Speed-up | MFU (bf16) | Peak memory (GiB) | Loss at step 2 | Hours to 10B tokens \
| Status |
|---|---|---|--:|--:|--:|--:|--:|--:|---|
| baseline | device=cuda | equal | 1,000 | 1.00x | 0.086% | 3.00 | 10.5000 | 2,778 | ok |
| too large | micro\\_batch\\_size=64 | - | - | - | - | - | - | - | out of memory |

NVIDIA H100 80GB HBM3 (1 here; Some CPU, 8 cores of 2.0 GHz with avx2), 64.0 GiB; torch 2.11.0, cuda 13.0, \
Python 3.12.1, Linux.
gpt2 (124,439,808 parameters) on synthetic, T = 1024, 1,024 tokens per optimiser step.
Largest batch that ran: 1 (baseline); 64 ran out of memory.
2 processes, each fresh: 1 round over the rungs.
TPS: tokens per second of the timed window, geometric mean over rounds; speed-ups paired within rounds; too few \
rounds for an interval.
"""  # noqa: E501


def test_the_markdown_scoreboard_reads_as_agreed() -> None:
    toggles = replace(CUDA, micro_batch_size=64)
    oom = record("too large", 1, toggles=toggles, status="out_of_memory", error="CUDA out of memory")
    found = text_of(record(), oom)
    assert found.replace("  \n", "\n").startswith(GOLDEN)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_words(width: int) -> None:
    text = terminal(scoreboard(ladder()), width)
    for word in ("baseline", "bfloat16", "TPS", "Status"):
        assert word in text, text
    assert ("a wider terminal shows all" in " ".join(text.split())) == (width < 140)


def test_a_rung_that_changes_the_maths_says_so_and_is_never_the_fastest() -> None:
    residual = replace(BF16, residual="bfloat16")
    board = scoreboard(records_of(("a", CUDA, 1e3), ("bfloat16", BF16, 2e3), ("residual", residual, 9e3)))
    assert [row.maths for row in board.rows[:2]] == ["equal", "equal"]
    assert board.fastest is board.rows[1]
    text = to_markdown(board)
    assert "| residual | residual=bfloat16 | changed | 9,000 |" in text
    assert "residual: residual=bfloat16 changes the maths: each layer's sum is rounded to bfloat16." in text


def test_every_cell_and_the_caption_reach_the_terminal_too() -> None:
    text = terminal(scoreboard(ladder()))
    for part in ("bfloat16", "2.00x ±0.0%", "dense bfloat16 peak", "3 rounds over the rungs"):
        assert part in text


def test_the_caption_names_formula_denominator_method_and_processes() -> None:
    text = to_markdown(scoreboard(ladder()))
    for part in (
        "854,438,400 FLOPs per token (F)",
        "By other conventions: 6 N without embeddings 510,336,000 (x 0.597), llm.c 803,478,528 (x 0.940).",
        "each device's dense bfloat16 peak of 989.4 TFLOP/s (a datasheet)",
        "allocated, window (torch.cuda)",
        "6 processes, each fresh: 3 rounds",
    ):
        assert part in text, part


def test_warnings_and_a_changed_checkout_are_shown() -> None:
    dirty = MACHINE.model_copy(update={"dirty": True})
    text = text_of(record(warnings=["the corpus is short"], environment=dirty))
    assert "Warning: the corpus is short." in text
    assert "changed checkout of commit abc" in text


def test_warnings_that_begin_alike_are_one_line_with_their_number() -> None:
    busy = [record(repetition=n, other_work_cores=n / 10) for n in (3, 4)]
    text = text_of(*busy, record(repetition=5))
    assert text.count("Warning: other work") == 1
    said = "others keep 0.30 to 0.40 cores busy; stop other programs (top shows them) and measure again "
    assert said in text
    assert " again (in 2 of 3 processes: baseline in rounds 3, 4)." in text


def test_warnings_of_different_kinds_are_different_lines() -> None:
    hot = record(warnings=["GPU 0: 86 C; cool it", "GPU 0: its clock is held down: power cap; compare only"])
    text = text_of(hot)
    assert "Warning: GPU 0: 86 C; cool it." in text
    assert "Warning: GPU 0: its clock is held down" in text


def test_collections_and_allocation_retries_in_the_window_are_warnings() -> None:
    slow = measurement(gc_collections=4, gc_seconds=2.0, alloc_retries=3)
    text = text_of(record(measurement=slow))
    assert "garbage collector took 19.5% of the window" in text
    assert "the allocator ran out and retried 3 times" in text
    skipping = text_of(record(measurement=measurement(skipped_steps=2)))
    assert "float16 could not hold the gradients of 2 of 4 steps, which changed no weight" in skipping
    assert "could not hold" not in text_of(record(measurement=measurement(skipped_steps=0)))
    quick = measurement(gc_collections=4, gc_seconds=0.001)
    assert "garbage collector" not in text_of(record(measurement=quick))


def test_a_speed_beyond_the_chip_s_peak_is_a_warning() -> None:
    impossible = measurement(3_000_000.0, peak_flops_kind="datasheet")
    text = text_of(record(measurement=impossible))
    assert "baseline: its speed is 259% of the datasheet peak, so one of the two is wrong" in text
    possible = measurement(400_000.0, peak_flops_kind="datasheet")
    assert "of the datasheet peak" not in text_of(record(measurement=possible))


# --- three denominators -------------------------------------------------------------------------------------


def test_each_format_has_its_own_peak_beside_the_one_of_the_whole_ladder() -> None:
    slow = measurement(10_000.0, peak_flops_dtype=66.9e12, product_format="float32")
    fast = measurement(400_000.0, peak_flops_dtype=989.4e12, product_format="bfloat16")
    board = scoreboard([record(measurement=slow), record("b", 1, toggles=BF16, measurement=fast)])
    assert board.rows[0].mfu == pytest.approx(854_438_400 * 10_000 / 989.4e12)
    assert board.rows[0].mfu_own == pytest.approx(854_438_400 * 10_000 / 66.9e12)
    assert board.rows[1].mfu_own == board.rows[1].mfu
    assert "in TFLOP/s: bfloat16 989.4, float32 66.9." in to_markdown(board)


def test_ranks_that_share_one_device_share_its_peak() -> None:
    shared = measurement(400_000.0, peak_devices=1)
    (row,) = scoreboard([record(measurement=shared, toggles=replace(CUDA, world_size=8))]).rows
    assert row.mfu == pytest.approx(854_438_400 * 400_000 / 989.4e12)


def ceiling(tflops: float, repetition: int = 1):
    product = Matmul(
        name="square", number_format="bfloat16", m=8192, k=8192, n=8192, flops_per_second=tflops * 1e12
    )
    slower = Matmul(
        name="qkv", number_format="float32", m=1024, k=768, n=2304, flops_per_second=tflops * 1e11
    )
    found = Ceiling(
        chip="c", threads=None, matmuls=[slower, product], copy_bytes_per_second=1e12, seconds=1.0
    )
    return record("ceiling", 0, repetition, kind="ceiling", measurement=None, ceiling=found)


def test_a_round_of_any_number_costs_a_report_nothing() -> None:
    late = [
        record(repetition=10**12),
        record("b", 1, 10**12, toggles=BF16, status="unsupported", error="why"),
    ]
    assert scoreboard(late).interrupted


@pytest.mark.parametrize(("control", "interrupted"), [("first_and_last", True), ("last", False)])
def test_a_run_that_is_short_of_time_is_whole_with_one_ceiling(control: Any, interrupted: bool) -> None:
    planned = asdict(Protocol(repeats=3, control=control))
    kinds = ("cumulative", "control")
    records = [record("a", 0, n, protocol=planned, kind=kind) for n in (1, 2, 3) for kind in kinds]
    once = ceiling(400.0).model_copy(update={"protocol": planned})
    assert scoreboard([*records, once]).interrupted == interrupted


def test_a_run_that_is_resumed_with_fewer_rounds_is_whole_with_these() -> None:
    begun = [record("a", 0, 1, protocol=asdict(Protocol(repeats=3)))]
    fewer = asdict(Protocol(repeats=2))
    resumed = record("a", 0, 2, protocol=fewer, time="2026-01-02T00:00:00+00:00")
    controls = [record("a", 0, n, kind="control", protocol=fewer) for n in (1, 2)]
    assert not scoreboard([*begun, *controls, resumed]).interrupted


def test_the_share_of_the_measured_ceiling_is_that_of_its_fastest_product_over_both_processes() -> None:
    board = scoreboard([ceiling(400.0), record(measurement=measurement(100_000.0)), ceiling(900.0, 3)])
    assert len(board.rows) == 1
    assert board.rows[0].ceiling_share == pytest.approx(854_438_400 * 100_000 / 600e12)
    text = to_markdown(board)
    said = "400 and 900 TFLOP/s, in the first and the last round, sustained by square 8192 x 8192 x 8192"
    assert said in text
    assert "the measured ceiling of this cuda drifted" in text
    assert "Of measured ceiling" not in text_of(record())


def test_a_derived_peak_that_a_matmul_beat_is_withdrawn_with_the_reason() -> None:
    derived = measurement(peak_flops_bf16=300e12, peak_flops_kind="derived")
    board = scoreboard([ceiling(400.0), record(measurement=derived)])
    assert (board.peaks, board.rows[0].mfu) == ({}, None)
    (line,) = [each for each in warnings(board) if "derived for this" in each]
    assert line.startswith(
        "no MFU is shown: a matmul ran at 400 TFLOP/s, above the peak derived for this cuda"
    )
    absent = "MFU is absent: a matmul here beat the derived peak"
    assert any(line.startswith(absent) for line in caption(board))
    assert "do not rank this MFU" not in to_markdown(board)


@pytest.mark.parametrize("kind", ["datasheet", "given"])
def test_a_peak_of_a_datasheet_or_a_user_stays_whatever_is_measured(kind: str) -> None:
    told = measurement(peak_flops_bf16=300e12, peak_flops_kind=kind)
    board = scoreboard([ceiling(400.0), record(measurement=told)])
    assert board.rows[0].mfu is not None
    assert not [each for each in warnings(board) if "derived for this" in each]


def test_of_two_measured_ceilings_the_limit_is_that_of_the_faster_one() -> None:
    """A product at twice the rate halves all of a step's least time but AdamW's traffic."""
    rounds = rounds_of(*[(1e5, 2e5, 1e5)] * 3).records
    low, high, both = (
        limit_tps(board, board.rows[1]) or 0.0
        for board in (
            scoreboard([ceiling(4.0), *rounds]),
            scoreboard([ceiling(8.0), *rounds]),
            scoreboard([ceiling(4.0), *rounds, ceiling(8.0, 3)]),
        )
    )
    assert 1.5 < high / low < 2
    assert both == high


def test_a_derived_peak_is_called_that_in_the_column_s_title() -> None:
    text = text_of(record(measurement=measurement(peak_flops_kind="derived")))
    assert "MFU (bf16, derived peak)" in text
    assert "do not rank this MFU" in text


def test_of_a_ladder_of_two_devices_each_rung_s_mfu_is_over_its_own_kind_of_peak() -> None:
    cpu = record(toggles=Toggles(), measurement=measurement(peak_flops_kind="derived", peak_flops_bf16=1e12))
    gpu = record("gpu", 1, measurement=measurement(400_000.0, peak_flops_kind="datasheet"))
    board = scoreboard([cpu, gpu])
    shown = to_markdown(board)
    assert "derived peak)" not in shown
    assert "each device's dense bfloat16 peak of 989.4 TFLOP/s" in shown
    assert "A derived peak (of baseline) is arithmetic, not a datasheet's: do not rank this MFU" in shown
    title, share = share_of_limit(board)
    assert title == "MFU"
    assert [share(row) for row in board.rows] == [None, pytest.approx(854_438_400 * 400_000 / 989.4e12)]


def test_mfu_over_a_derived_peak_of_the_rung_s_own_format_alone_is_called_that() -> None:
    own = measurement(peak_flops_kind="derived", peak_flops_bf16=None, peak_flops_dtype=1e12)
    text = text_of(record(measurement=own))
    assert "MFU (own format, derived peak)" in text
    assert "do not rank this MFU" in text


def test_what_is_computed_twice_counts_for_hfu_only() -> None:
    again = measurement(400_000.0, hardware_flops_per_token=1_000_000_000)
    (row,) = scoreboard([record(measurement=again)]).rows
    assert row.hfu == pytest.approx(1e9 * 400_000 / 989.4e12)
    assert row.mfu == pytest.approx(854_438_400 * 400_000 / 989.4e12)
    assert scoreboard([record()]).rows[0].hfu is None


# --- noise floor and verdicts -------------------------------------------------------------------------------


def noisy(control: tuple[float, float, float]) -> Scoreboard:
    """A second rung that is 3 % faster in each round, and a control of these ratios."""
    return rounds_of(*((1000.0, 1030.0, 1000.0 * ratio) for ratio in control))


def test_a_gain_is_judged_against_the_noise_floor() -> None:
    quiet, loud = noisy((1.001, 0.999, 1.0)), noisy((1.03, 0.97, 1.0))
    assert quiet.delta == 0.01
    assert quiet.rows[1].verdict == "faster"
    assert loud.delta is not None
    assert 0.03 < loud.delta < LOUD
    assert loud.rows[1].verdict == "unclear"
    assert "| 1.03x ±0.0%, faster |" in to_markdown(quiet)


def test_the_caption_prints_the_noise_floor_and_the_control() -> None:
    said = "Noise floor: ±1.0%. The first rung again, at the end of each round (A/A control), ran 1.000x"
    assert said in to_markdown(noisy((1.001, 0.999, 1.0)))
    loud = noisy((1.1, 0.9, 1.0))
    hint = "Noise hides most differences below 30 %: try bench doctor, or repeat it with --resume"
    assert f"Warning: {hint}" in to_markdown(loud)
    assert loud.rows[1].verdict == "unclear"


def with_last(
    again: tuple[float, float, float], first: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> Scoreboard:
    """noisy(first), and a control of the last rung of these ratios."""
    last = [
        record("b", 1, n, kind="control", toggles=BF16, measurement=measurement(1030.0 * ratio))
        for n, ratio in enumerate(again, start=1)
    ]
    return scoreboard([*noisy(first).records, *last])


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), "faster"),
        ((1.0, 1.0, 1.0), (1.05, 0.95, 1.0), "unclear"),
        ((1.05, 0.95, 1.0), (1.0, 1.0, 1.0), "unclear"),
    ],
)
def test_the_scatter_of_either_control_raises_the_noise_floor(
    first: tuple[float, float, float], last: tuple[float, float, float], verdict: str
) -> None:
    found = with_last(last, first)
    assert found.rows[1].verdict == verdict
    gain = found.rows[1].gain
    assert found.control
    assert found.last_control
    assert gain
    assert found.delta == pytest.approx(noise_floor([found.control, found.last_control], [gain]))


def test_the_caption_tells_what_both_controls_did_and_warns_of_either() -> None:
    said = "(A/A control), ran 1.000x ±0.0% as fast, and the last one 1.000x ±0.0%."
    assert said in to_markdown(with_last((1.0, 1.0, 1.0)))
    drifting = to_markdown(with_last((1.05, 1.05, 1.05)))
    assert "Noise floor: ±5.0%." in drifting
    assert "Warning: The machine drifted within rounds: let it settle" in drifting


def test_a_run_killed_before_its_second_control_was_interrupted() -> None:
    three, records = asdict(Protocol(repeats=3)), with_last((1.0, 1.0, 1.0)).records
    planned = [each.model_copy(update={"protocol": three}) for each in records]
    assert not scoreboard(planned).interrupted
    assert scoreboard(planned[:-1]).interrupted


def test_a_control_that_differs_from_itself_is_a_warning() -> None:
    off = noisy((1.041, 1.039, 1.04))
    assert "Warning: The machine drifted within rounds: let it settle" in to_markdown(off)
    assert off.delta == pytest.approx(0.0425, abs=0.001)
    assert off.rows[1].verdict == "unclear"
    assert "drifted" not in to_markdown(noisy((1.001, 0.999, 1.0)))


def test_without_rounds_enough_nothing_is_called_faster() -> None:
    board = scoreboard([record(), record("b", 1, measurement=measurement(5000.0))])
    assert board.rows[1].verdict == "not replicated"
    assert "Not replicated: verdicts need 3 rounds" in to_markdown(board)


def test_two_controls_are_said_to_be_too_few_not_absent() -> None:
    kept = [r for r in noisy((1.0, 1.0, 1.0)).records if r.kind != "control" or r.repetition < 3]
    assert "of the A/A control only 2 rounds are here" in text_of(*kept)


def test_a_rung_that_something_is_held_against_and_the_next_one_get_no_verdict() -> None:
    records = []
    for n in (1, 2, 3):
        late = measurement(2000.0 + n, recompiles=1)
        records += [
            record(repetition=n, measurement=measurement(1000.0 + n)),
            record("late", 1, n, toggles=BF16, measurement=late),
            record("next", 2, n, toggles=replace(BF16, adamw="fused"), measurement=measurement(4000.0 + n)),
        ]
    rows = scoreboard(records).rows
    assert [row.verdict for row in rows] == [None, None, None]
    assert rows[2].gain is not None


def test_what_lies_on_two_sides_of_an_interruption_is_not_paired() -> None:
    """The machine was twice as fast on the second day; the control stands in for the first rung there."""
    day1, day2 = {"session": "1"}, {"session": "2"}
    records = [
        record("a", 0, 1, measurement=measurement(1000.0), **day1),
        record("b", 1, 1, measurement=measurement(1100.0), **day1),
        record("c", 2, 1, measurement=measurement(2400.0), **day2),
        record("a", 0, 1, kind="control", measurement=measurement(2000.0), **day2),
    ]
    _, b, c = scoreboard(records).rows
    assert b.speedup is not None
    assert b.speedup.value == pytest.approx(1.1)
    assert c.speedup is not None
    assert c.speedup.value == pytest.approx(1.2)
    assert c.gain is None
    assert scoreboard(records).control is None
    assert "the run was resumed within a round" in to_markdown(scoreboard(records))
    between = [record(repetition=n, session=f"{n}") for n in (1, 2)]  # rounds are whole
    assert "resumed" not in to_markdown(scoreboard(between))


def test_memory_found_out_in_another_way_is_marked() -> None:
    graphs = measurement(peak_memory_method="reserved, window (torch.cuda)")
    text = text_of(record(), record("b", 1, measurement=graphs))
    assert "| 3.00 ‡ |" in text
    assert "‡ But reserved, window (torch.cuda): do not compare." in text


# --- hours, energy, money -----------------------------------------------------------------------------------


def test_hours_to_ten_billion_tokens_are_always_told() -> None:
    text = text_of(record(measurement=measurement(1_000_000.0)))
    assert "Hours to 10B tokens" in text
    assert "| 2.78 | ok |" in text


def test_without_a_price_or_a_counter_there_is_no_table_of_costs() -> None:
    board = scoreboard([record()])
    assert "10 billion tokens" not in to_markdown(board)
    assert "Energy is absent: no energy counter was readable" in to_markdown(board, 2.0)


def test_energy_and_cost_follow_from_the_counter_and_the_price() -> None:
    # A window of 10 x 1,024 tokens: 7 J of 10,240 tokens.
    found = measurement(1_000_000.0, energy_joules=7.0)
    priced = record(measurement=found, price_per_hour=2.5)
    board = scoreboard([priced, record(repetition=2, measurement=found)])
    assert board.rows[0].joules_per_token == pytest.approx(7.0 / 10_240)
    text = to_markdown(board)
    assert "| Rung | Hours | Joules per token | kWh | Cost at 2.5 per hour |" in text
    assert "| baseline | 2.78 | 0.000684 | 1.90 | 6.94 |" in text
    assert "Cost at 4 per hour" in to_markdown(board, 4.0)


def test_an_energy_counter_that_did_not_move_is_kept_and_shown_as_nought(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record(measurement=measurement(1_000_000.0, energy_joules=0.0)))
    (board,), _ = load_boards([tmp_path])
    assert board.rows[0].joules_per_token == 0
    assert "| baseline | 2.78 | 0 | 0 |" in to_markdown(board)


@pytest.mark.parametrize("again", ["r.jsonl", ".", "../{}/r.jsonl"])
def test_a_file_that_is_named_twice_is_one_run(again: str, tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record())
    boards, _ = load_boards([tmp_path / "r.jsonl", tmp_path / again.format(tmp_path.name)])
    assert len(boards) == 1


def test_what_could_not_be_measured_costs_nothing_because_it_is_not_listed() -> None:
    oom = record("too large", 1, status="out_of_memory", error="CUDA out of memory")
    (table,) = [each for each in tables(scoreboard([record(), oom]), 2.0) if "10 billion" in each.title]
    assert [row[0] for row in table.cells] == ["baseline"]


HOSTILE = "a|b <script>alert(1)</script> \x1b[31m `x` [l](u)\nnext"


def test_hostile_text_changes_no_table_and_steers_no_terminal() -> None:
    board = scoreboard([record(HOSTILE, changed=[HOSTILE])])
    line = next(line for line in to_markdown(board).splitlines() if line.startswith("| a"))
    head = to_markdown(board).splitlines()[2]
    assert line.count("|") - line.count("\\|") == head.count("|")
    assert "<script" not in line
    assert "\x1b" not in line
    text = terminal(board)
    assert "\x1b[31m" not in text


def test_a_partial_or_interrupted_run_does_not_hide_a_full_one(tmp_path: Path) -> None:
    for name, time, rungs in [("full", 1, 3), ("partial", 2, 1), ("interrupted", 3, 3)]:
        for index in range(rungs):
            status = "interrupted" if (name, index) == ("interrupted", 2) else "ok"
            item = record(f"{name} {index}", index, time=f"2026-01-0{time}T00:00:00+00:00", status=status)
            append(tmp_path / f"{name}.jsonl", item)
    (board,), _ = load_boards([tmp_path])
    assert board.rows[0].rung == "full 0"


def test_a_quick_run_does_not_hide_a_replicated_one_and_is_named(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        append(tmp_path / "long.jsonl", record("long", repetition=n, time="2026-01-01T00:00:00+00:00"))
    append(tmp_path / "quick.jsonl", record("quick", time="2026-01-02T00:00:00+00:00"))
    (board,), warnings = load_boards([tmp_path])
    assert board.rows[0].rung == "long"
    assert warnings == [f"{tmp_path / 'quick.jsonl'} is newer but shorter and not shown; name it to see it"]


def test_a_run_that_is_named_beside_its_folder_is_not_said_to_be_hidden(tmp_path: Path) -> None:
    for n in (1, 2, 3):
        append(tmp_path / "long.jsonl", record("long", repetition=n, time="2026-01-01T00:00:00+00:00"))
    append(tmp_path / "quick.jsonl", record("quick", time="2026-01-02T00:00:00+00:00"))
    passed_over: list[Scoreboard] = []
    boards, warnings = load_boards([tmp_path, tmp_path / "quick.jsonl"], passed_over=passed_over)
    assert [board.rows[0].rung for board in boards] == ["long", "quick"]
    assert warnings == passed_over == []


def test_a_copy_of_a_run_is_told_from_another_run(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", record("a"))
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    append(tmp_path / "other.jsonl", record("a", run_id="other"))
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "copy", "other")]
    boards, warnings = load_boards(files)
    assert [board.source for board in boards] == [files[0], files[2]]
    assert warnings == [f"{files[1]} is a copy of {files[0]}: one run, shown once"]


def test_a_file_of_tries_alone_says_how_to_go_on(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record(kind="scout"))
    with pytest.raises(
        RecordError, match=r"only short tries, no measured rung \(bench run LADDER --resume goes on\)"
    ):
        load_boards([tmp_path / "r.jsonl"])


def test_each_disturbance_names_the_processes_that_it_befell() -> None:
    still = measurement(stood_still=StoodStill(seconds=3.0, blocks=1, of_blocks=5, asleep=False))
    records = [record("a", 0, measurement=still), record("b", 1, other_work_cores=1.0), record("c", 2)]
    stood, other = disturbed(scoreboard(records))
    assert stood.endswith("(in 1 of 3 processes: a in round 1)")
    assert other.endswith("(in 1 of 3 processes: b in round 1)")


def test_of_two_sweeps_the_newest_is_shown_however_many_batches_it_tried(tmp_path: Path) -> None:
    for index, rung in enumerate(("1", "2", "4")):
        append(tmp_path / "old.jsonl", record(rung, index, kind="sweep"))
    append(tmp_path / "new.jsonl", record("1", kind="sweep", time="2026-01-02T00:00:00+00:00"))
    (board,), warnings = load_boards([tmp_path])
    assert (board.source, warnings) == (tmp_path / "new.jsonl", [])


def test_a_run_without_a_ceiling_borrows_that_of_bench_roofline_on_the_same_machine(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record(measurement=measurement(100_000.0)))
    own = ceiling(600.0).model_copy(update={"ladder": "roofline", "run_id": "roof"})
    append(tmp_path / "roofline-1.jsonl", own)
    other = MACHINE.model_copy(update={"torch": "9.9"})
    foreign = ceiling(1.0).model_copy(update={"ladder": "roofline", "environment": other})
    append(tmp_path / "roofline-2.jsonl", foreign)
    (board,), _ = load_boards([tmp_path])
    assert board.rows[0].ceiling_share == pytest.approx(854_438_400 * 100_000 / 600e12)
    assert "600 TFLOP/s, taken from roof" in to_markdown(board)


def test_a_full_run_of_an_older_ladder_gives_way_to_the_newer_ladder(tmp_path: Path) -> None:
    for index in range(3):
        append(tmp_path / "old.jsonl", record(f"old {index}", index, time="2026-01-01T00:00:00+00:00"))
    append(tmp_path / "new.jsonl", record("new", time="2026-01-02T00:00:00+00:00", ladder_hash="other"))
    (board,), warnings = load_boards([tmp_path])
    assert board.rows[0].rung == "new"
    (said,) = warnings
    old, new = (tmp_path / f"{name}.jsonl" for name in ("old", "new"))
    assert said.startswith(f"{old} is called h100 like {new}, but has other rungs or another task; not shown")


@pytest.mark.parametrize(
    ("later", "shown", "told"),
    [
        ({}, "new", []),
        ({"toggles": BF16}, "new", ["old", "has other rungs or another task"]),
        ({"workload": asdict(Workload(lr=1e-3))}, "new", ["old", "has other rungs or another task"]),
        ({"chosen": ["a"]}, "old", ["new", "is newer but shorter"]),
        ({"chosen": ["a"], "toggles": BF16}, "new", ["old", "has other rungs or another task"]),
    ],
)
def test_two_runs_are_of_one_ladder_by_their_rungs_and_task_whatever_code_made_its_hash(
    tmp_path: Path, later: dict[str, Any], shown: str, told: list[str]
) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("old", "new")}
    newer = {"ladder_hash": "other", "time": "2027-01-01T00:00:00+00:00", **later}
    for index, name in enumerate("ab"):
        append(files["old"], record(name, index))
        if name in later.get("chosen", "ab"):
            append(files["new"], record(name, index, 1, **newer))
    (board,), warnings = load_boards([tmp_path])
    assert board.source == files[shown]
    assert len(warnings) == bool(told)
    if told:
        assert warnings[0].startswith(str(files[told[0]]))
        assert told[1] in warnings[0]


@pytest.mark.parametrize(
    ("kind", "ended"),
    [
        ("cumulative", {"error": "by the user"}),
        ("sweep", {"not_begun": "--budget ended the sweep in round 1 of 1"}),
    ],
)
def test_an_interrupted_run_of_a_newer_ladder_does_not_hide_a_whole_one_of_the_older(
    kind: str, ended: dict[str, str], tmp_path: Path
) -> None:
    append(tmp_path / "old.jsonl", record("1", kind=kind, time="2026-01-01T00:00:00+00:00"))
    later: dict[str, Any] = {"kind": kind, "ladder_hash": "other", "time": "2026-01-02T00:00:00+00:00"}
    append(tmp_path / "new.jsonl", record("1", **later))
    append(tmp_path / "new.jsonl", record("2", 1, status="interrupted", **ended, **later))
    (board,), warnings = load_boards([tmp_path])
    assert board.source == tmp_path / "old.jsonl"
    assert warnings == [f"{tmp_path / 'new.jsonl'} is newer but interrupted and not shown; name it to see it"]


def test_a_whole_run_that_measured_nothing_does_not_hide_an_interrupted_one_that_did(tmp_path: Path) -> None:
    append(tmp_path / "none.jsonl", record("44", kind="sweep", status="out_of_memory", measurement=None))
    later: dict[str, Any] = {"kind": "sweep", "ladder_hash": "other", "time": "2026-01-02T00:00:00+00:00"}
    append(tmp_path / "part.jsonl", record("36", **later))
    append(tmp_path / "part.jsonl", record("40", 1, status="interrupted", error="by the user", **later))
    (board,), _ = load_boards([tmp_path])
    assert board.source == tmp_path / "part.jsonl"


def test_of_a_folder_the_newest_file_per_machine_and_ladder_is_shown(tmp_path: Path) -> None:
    for machine, name, day in (("a", "old", 1), ("a", "new", 2), ("b", "other", 1)):
        (tmp_path / machine).mkdir(exist_ok=True)
        append(tmp_path / machine / f"{name}.jsonl", record(name, time=f"2026-01-0{day}T00:00:00+00:00"))
    boards, warnings = load_boards([tmp_path])
    assert sorted(board.rows[0].rung for board in boards) == ["new", "other"]
    assert warnings == []
    (board,), _ = load_boards([tmp_path / "a" / "old.jsonl"])
    assert board.rows[0].rung == "old"


def test_runs_of_several_machines_in_one_folder_are_shown_each(tmp_path: Path) -> None:
    other = MACHINE.model_copy(update={"chip": "NVIDIA H200"})
    append(tmp_path / "ours.jsonl", record("a"))
    append(tmp_path / "theirs.jsonl", record("a", environment=other))
    boards, warnings = load_boards([tmp_path])
    assert {board.environment.machine for board in boards} == {MACHINE.machine, other.machine}
    assert warnings == []


def test_a_broken_file_of_a_folder_is_left_out_with_a_warning_and_refused_by_name(tmp_path: Path) -> None:
    append(tmp_path / "good.jsonl", record())
    (tmp_path / "bad.jsonl").write_text("no json\n")
    boards, warnings = load_boards([tmp_path])
    assert [board.source for board in boards] == [tmp_path / "good.jsonl"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{tmp_path}/bad.jsonl:1: no result of bench run; delete this line")
    with pytest.raises(RecordError, match=r"bad\.jsonl:1"):
        load_boards([tmp_path / "bad.jsonl"])


def test_of_files_with_nothing_to_show_one_line_says_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(RecordError, match=r"^[^\n]*r\.jsonl: is empty; [^\n]*bench run [^\n]*$"):
        load_boards([tmp_path / "r.jsonl"])
    with pytest.raises(RecordError, match=r"llm\.c\.jsonl: holds figures that others have published"):
        load_named("results/published/llm.c.jsonl")


def test_two_runs_in_one_file_are_refused(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record())
    append(tmp_path / "r.jsonl", record(run_id="another"))
    with pytest.raises(RecordError, match=r"holds 2 runs .*another.* one file each"):
        load_boards([tmp_path / "r.jsonl"])


def test_the_fastest_rung_is_named_with_its_interval_and_not_where_it_is_no_faster_for_sure() -> None:
    sure = to_markdown(rounds_of((100, 200, 100), (100, 202, 101), (100, 198, 100)))
    said = (
        "Fastest: b, 200 tokens/s, 2.00x over baseline. "
        "How sure: 1.95x to 2.05x over baseline (95 % interval)."
    )
    assert said in sure
    once = to_markdown(rounds_of((100, 200, 100)))
    how = "1 round gives no interval; 3 do (repeat it with --resume --repeats 3)."
    assert f"Fastest: b, 200 tokens/s, 2.00x over baseline. How sure: {how}" in once
    unsure = to_markdown(rounds_of((100, 200, 100), (100, 50, 100), (100, 300, 100)))
    said = (
        "Fastest: b, 144 tokens/s, 1.44x over baseline. "
        "How sure: 0.14x to 14.88x over baseline (95 % interval), not wholly beyond the noise floor."
    )
    assert said in unsure


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({}, "bench run h100"),
        ({"blocks": 3}, "repeat it with"),  # as --minutes sets it: a plain run's windows are others
        ({"repeats": 7}, "bench run h100"),
    ],
)
def test_how_to_run_on_is_a_whole_command_where_it_needs_no_options_of_the_runs(
    changes: dict[str, int], again: str
) -> None:
    (path,) = (path for path in shipped() if path.stem == "h100")
    h100 = load(path)
    facts = {"ladder_hash": h100.hash, "protocol": {**asdict(h100.protocol), **changes}}
    board = scoreboard([record(**facts), record("b", 1, measurement=measurement(2000.0), **facts)])
    assert f"3 do ({again} --resume --repeats 3)." in to_markdown(board)


def test_a_noise_floor_without_bounds_is_no_percentage_of_millions() -> None:
    text = to_markdown(rounds_of((100, 200, 100), (100, 200, 3000), (100, 200, 7)))
    said = "Noise floor: none, for two equal rungs may differ by more than 100 %."
    assert said in text
    assert "1.281x (" in text


def test_two_rounds_tell_what_the_control_did_and_how_far_they_lie_apart() -> None:
    text = to_markdown(rounds_of((100, 200, 90), (1000, 2000, 900)))
    assert "The first rung again (A/A control) ran 0.900x as fast." in text
    said = "baseline: its rounds lie 10.0x apart, from 100 to 1,000 tokens/s: something else ran meanwhile"
    assert said in text


def test_one_denominator_of_mfu_holds_for_the_whole_ladder() -> None:
    """A derived peak follows the clock, which a process may find elsewhere than the one before."""
    high, low = (measurement(peak_flops_bf16=peak) for peak in (5e12, 4e12))
    first, second = scoreboard([record(measurement=high), record("b", 1, measurement=low)]).rows
    assert first.mfu == second.mfu


def test_where_the_time_goes_is_told_for_each_rung() -> None:
    cold = measurement(first_step_seconds=40.0, compile_cache="cold", step_seconds=[0.1] * 50)
    warm = measurement(first_step_seconds=4.0, compile_cache="warm", step_seconds=[0.1] * 40 + [0.3] * 10)
    shared = measurement(first_step_seconds=9.0, compile_cache="shared", step_seconds=[0.1] * 50)
    records = [record(), *(record("b", 1, n, measurement=m) for n, m in enumerate((cold, warm, shared), 1))]
    first, second = timing(scoreboard(records))
    assert (first.first_step_warm, first.step) == (None, pytest.approx(1.024))  # blocks of one step are steps
    assert (second.first_step, second.first_step_warm) == (40.0, 4.0)
    assert (second.step, second.step_low, second.step_high) == (0.1, 0.1, 0.3)
    assert "#### Where the time goes: " in to_markdown(scoreboard(records))


@pytest.mark.parametrize("content", [None, ""])
def test_nothing_to_show_is_said(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(RecordError, match="no results here"):
        load_boards([tmp_path])


def test_a_name_of_300_letters_takes_no_room_from_other_columns() -> None:
    shown = terminal(scoreboard([record(), record("x" * 300, 1, toggles=BF16)]), width=120)
    line = next(line for line in shown.splitlines() if line.strip().startswith("baseline"))
    assert "device=cuda" in line
    assert "1,000" in line


def test_rungs_that_the_run_cannot_tell_from_the_fastest_are_named() -> None:
    board = rounds_of((100, 200, 201, 150, 100), (100, 203, 199, 151, 100), (100, 199, 202, 152, 100))
    assert [row.rung for row in board.ties] == ["b"]
    assert "Fastest: c, 201 tokens/s, 2.01x over baseline. How sure: " in to_markdown(board)
    assert " (95 % interval); not clearly faster than b." in to_markdown(board)


def test_in_a_caption_names_that_hold_commas_are_parted_by_semicolons_and_sizes_said_once() -> None:
    names = [f"attention=sdpa, micro_batch_size={size}" for size in (1, 4, 4, 4)]
    records = []
    for n, size in enumerate((1, 4, 4, 4)):
        found = measurement(tokens_per_step=1024 * size, attention_kernel="flash" if n else None)
        toggles = replace(CUDA, micro_batch_size=size, threads=n + 1)
        records.append(record(names[n], n, toggles=toggles, measurement=found))
    text = to_markdown(scoreboard(records)).replace("\\", "")
    assert f"1,024, but 4,096 ({'; '.join(names[1:])})." in text
    assert f"Attention kernels seen: flash ({'; '.join(names[1:])})." in text


def test_a_kernel_that_every_rung_ran_is_said_to_be_that_of_all() -> None:
    flash = measurement(attention_kernel="flash")
    records = [record(name, n, measurement=flash) for n, name in enumerate("abc")]
    assert "Attention kernels seen: flash (all rungs)." in text_of(*records)


def test_rungs_that_failed_alike_are_one_line() -> None:
    error = "device: cuda: torch finds no CUDA device here; choose cpu"
    rungs = [record(name, n, status="unsupported", error=error) for n, name in enumerate("ab", start=1)]
    text = text_of(record(), *rungs)
    assert text.count("torch finds no CUDA device here") == 1
    assert f"a, b: not supported here: {error}" in text


def test_where_nothing_was_measured_there_is_no_table_of_costs() -> None:
    board = scoreboard([record(status="unsupported", error="device: cuda: no")])
    assert "10 billion tokens" not in to_markdown(board, 2.5)
    assert "10 billion tokens" in to_markdown(scoreboard([record()]), 2.5)


def test_a_lead_beyond_a_loud_noise_floor_is_the_fastest_and_one_within_it_is_not() -> None:
    far = to_markdown(rounds_of((100, 2000, 100), (100, 2200, 120), (100, 2100, 105)))
    assert "Fastest: b, 2,098 tokens/s, 20.98x over baseline. How sure: " in far
    assert "clearly faster" not in far
    near = to_markdown(rounds_of((100, 120, 100), (100, 122, 150), (100, 121, 105)))
    assert "Fastest: b, " in near
    assert "over baseline (95 % interval), not wholly beyond the noise floor." in near


def test_the_first_rung_too_is_named_where_it_is_the_fastest() -> None:
    text = to_markdown(rounds_of((200, 100, 200), (202, 100, 201), (198, 99, 200)))
    assert "Fastest: baseline, 200 tokens/s. How sure: faster than every other rung." in text


def test_without_a_control_no_rung_is_clearly_the_fastest() -> None:
    text = to_markdown(scoreboard(ladder()))
    again = "that takes the first rung run again in each round (A/A control)."
    assert f"Fastest: bfloat16, 1,000 tokens/s, 2.00x over baseline. How sure: not known; {again}" in text


def numbered(*speeds: tuple[Toggles, float]) -> Scoreboard:
    """Rungs r0, r1 and so on."""
    return scoreboard(records_of(*((f"r{n}", toggles, tps) for n, (toggles, tps) in enumerate(speeds))))


def efficiencies(board: Scoreboard) -> list[float | None]:
    return [row.efficiency.value if row.efficiency else None for row in board.rows]


def test_efficiency_is_that_of_each_rank_against_a_rung_alike_on_one() -> None:
    one, two, four = (replace(BF16, world_size=n, grad_accum_steps=4 // n) for n in (1, 2, 4))
    compiled = replace(four, compile="default")
    board = numbered((CUDA, 1000.0), (one, 2000.0), (two, 3600.0), (four, 6000.0), (compiled, 9000.0))
    assert efficiencies(board) == [None, None, pytest.approx(0.9), pytest.approx(0.75), None]
    assert "those of a rung alike on fewer devices: r2 over r1; r3 over r1." in to_markdown(board)


def test_without_a_rung_on_one_rank_efficiency_is_against_the_fewest_that_share_out_as_much() -> None:
    eight, sixteen = (replace(BF16, world_size=n, grad_accum_steps=32 // n) for n in (8, 16))
    sharing = replace(sixteen, sharding="zero1")
    board = numbered((eight, 8000.0), (sixteen, 12000.0), (sharing, 14000.0))
    assert efficiencies(board) == [None, pytest.approx(0.75), None]
    assert [row.efficiency_over for row in board.rows] == [None, "r0", None]


def test_where_rungs_are_of_several_devices_tokens_per_second_are_told_for_each_of_them_too() -> None:
    alone, eight = records_of(("one", BF16, 1000.0), ("eight", replace(BF16, world_size=8), 6000.0))
    head, _, *rows = [line.split(" | ") for line in text_of(alone, eight).splitlines() if "|" in line]
    place = head.index("TPS per device")
    assert [row[place] for row in rows[:2]] == ["1,000", "750"]
    assert "TPS per device" not in text_of(alone)


def test_a_process_cut_short_before_its_proof_counts_until_it_is_run_again() -> None:
    cut = measurement(500.0, proofs=None)
    first = record(measurement=cut, interrupted_late=True)
    again = record(session="later", time="2026-01-01T01:00:00+00:00")
    assert first.cut_short
    assert not again.cut_short
    assert [row.tps.value for row in scoreboard([first]).rows if row.tps] == [pytest.approx(500.0)]
    assert [row.tps.value for row in scoreboard([first, again]).rows if row.tps] == [pytest.approx(1000.0)]


def test_in_a_round_cut_in_two_the_first_rung_s_control_stands_in_for_it_in_every_column() -> None:
    two = replace(BF16, world_size=2)
    early = record(toggles=BF16, measurement=measurement(1000.0))
    late = [
        record("two", 1, session="b", toggles=two, measurement=measurement(3000.0)),
        record(kind="control", session="b", toggles=BF16, measurement=measurement(2000.0)),
    ]
    row = scoreboard([early, *late]).rows[1]
    found = [estimate.value for estimate in (row.speedup, row.gain, row.efficiency) if estimate]
    assert found == [pytest.approx(1.5), pytest.approx(1.5), pytest.approx(0.75)]


def test_steps_that_grow_by_more_than_the_ranks_have_no_efficiency() -> None:
    one, eight = BF16, replace(BF16, world_size=8)
    accumulating = replace(eight, grad_accum_steps=8)
    board = numbered((one, 1000.0), (eight, 6000.0), (accumulating, 8400.0))
    assert efficiencies(board) == [None, pytest.approx(0.75), None]


def test_another_model_on_the_same_ladder_is_another_scoreboard(tmp_path: Path) -> None:
    medium = asdict(Workload(model="gpt2-medium"))
    append(tmp_path / "a.jsonl", record())
    later = record(workload=medium, ladder_hash="0ther", time="2027-01-01T00:00:00+00:00")
    append(tmp_path / "b.jsonl", later)
    boards, warnings = load_boards([tmp_path])
    assert [board.records[0].workload["model"] for board in boards] == ["gpt2", "gpt2-medium"]
    assert warnings == []


def test_why_the_exit_code_is_4_is_said_of_each_rung() -> None:
    off = measurement(losses=[10.9, 10.5, 10.2, 9.0])
    board = scoreboard([record(), record("b", 1, measurement=off), record("c", 2, expect="out_of_memory")])
    expected = "c: the ladder expects out_of_memory, and it ran as any other"
    assert claims_refuted(board) == ["b: loss differs", expected]


def test_the_caption_names_the_attention_kernels_that_ran_and_in_which_rungs() -> None:
    flash = measurement(attention_kernel="flash")
    rungs = [record(), record("b", 1, measurement=flash), record("c", 2, measurement=flash)]
    assert "Attention kernels seen: flash (b, c)." in to_markdown(scoreboard(rungs))
    assert "Attention kernels" not in to_markdown(scoreboard(rungs[:1]))


def test_a_record_that_names_no_device_was_of_the_default_one() -> None:
    """As all toggles that an older record does not know."""
    known = record(toggles=Toggles())
    del known.toggles.all["device"]
    measured = known.measurement
    assert measured
    derived = {"peak_flops_source": "derived from the clock", "peak_flops_kind": "derived"}
    known = known.model_copy(update={"measurement": measured.model_copy(update=derived)})
    assert any("the CPU's" in str(line) for line in caption(scoreboard([known])))


def test_where_another_rung_has_more_tokens_per_second_on_average_that_is_told() -> None:
    """In each round b is faster than a; but a was also run in a faster hour."""
    a = [
        record("baseline", 0, n, measurement=measurement(tps))
        for n, tps in ((1, 100.0), (2, 300.0), (3, 900.0))
    ]
    b = [record("b", 1, n, measurement=measurement(tps)) for n, tps in ((1, 110.0), (2, 330.0))]
    text = to_markdown(scoreboard([*a, *b]))
    higher = "the mean of baseline, 300 tokens/s, is higher, from other rounds"
    assert f"Fastest: b, 191 tokens/s, 1.10x over baseline; {higher}." in text

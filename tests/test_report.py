from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from samples import MACHINE, measurement, record

from bench.record import RecordError, append
from bench.report.load import exit_code, load_boards
from bench.report.scoreboard import Scoreboard, scoreboard
from bench.report.tables import to_markdown, to_terminal
from bench.report.text import duration, markdown, number, plain
from gpt2.toggles import Toggles

CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")


def ladder() -> list:
    """Two rungs in three rounds; the second is twice as fast in each, though the machine slowed down."""
    speeds = [(1, 1000.0, 2000.0), (2, 500.0, 1000.0), (3, 250.0, 500.0)]
    records = []
    for repetition, slow, fast in speeds:
        records.append(record(repetition=repetition, measurement=measurement(slow)))
        records.append(
            record(
                "bfloat16",
                1,
                repetition,
                toggles=BF16,
                changed=["autocast=bfloat16"],
                measurement=measurement(fast),
            )
        )
    return records


def terminal(board: Scoreboard) -> str:
    """What a wide terminal shows, without styles."""
    shown = io.StringIO()
    Console(width=300, file=shown).print(to_terminal(board))
    return shown.getvalue()


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
    text = to_markdown(scoreboard([record(measurement=m)]))
    assert scoreboard([record(measurement=m)]).rows[0].mfu is None
    assert "MFU is absent: no published peak is known." in text


def test_losses_are_shown_at_the_largest_stated_step_that_every_rung_has() -> None:
    def board(lengths: list[int]):
        curves = [[20.0 - n / 10 for n in range(length)] for length in lengths]
        return scoreboard([record(f"r{n}", n, measurement=measurement(losses=c)) for n, c in enumerate(curves)])

    assert [board(lengths).loss_step for lengths in ([13, 14], [13, 300], [1000, 2000], [1])] == [10, 10, 1000, 1]
    assert [row.loss for row in board([13, 300]).rows] == [20.0 - 0.9, 20.0 - 0.9]


def test_a_curve_drawn_in_the_first_round_only_is_shown_to_its_end() -> None:
    first, later = measurement(losses=[10.9] * 999 + [3.5]), measurement(losses=[10.9] * 15)
    board = scoreboard([record(measurement=first), record(repetition=2, measurement=later)])
    assert (board.loss_step, board.rows[0].loss) == (1000, 3.5)


def test_a_rung_whose_loss_leaves_its_precision_class_fails_parity() -> None:
    off = measurement(losses=[10.9, 10.5, 10.2, 9.0])
    board = scoreboard([record(), record("broken", 1, measurement=off)])
    assert [row.status for row in board.rows] == ["ok", "parity_failed"]
    assert "broken: loss differs: by 10.00% from baseline's; the number formats explain 0.10%" in to_markdown(board)
    assert exit_code([record(), record("broken", 1, measurement=off)]) == 4


def test_a_loss_within_the_tolerance_of_its_precision_passes_parity() -> None:
    near = measurement(losses=[10.9 * 1.005, 10.5, 10.2, 10.0])
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
    near = measurement(losses=[10.9 * 1.005, 10.5, 10.2, 10.0])
    board = scoreboard([record(toggles=BF16, measurement=near), record("float32", 1)])
    assert [row.status for row in board.rows] == ["ok", "ok"]


def test_only_cumulative_records_make_the_rows() -> None:
    slow = record(kind="control", measurement=measurement(10.0))
    (row,) = scoreboard([record(), slow]).rows
    assert row.tps is not None
    assert row.tps.value == pytest.approx(1000.0)


def test_left_out_rungs_and_set_variables_are_said_in_the_caption() -> None:
    tuned = MACHINE.model_copy(update={"variables": {"LD_PRELOAD": "libtcmalloc.so"}})
    text = to_markdown(scoreboard([record(), record("third", 2, environment=tuned)]))
    assert "not all rungs of the ladder were run" in text
    assert "LD\\_PRELOAD=libtcmalloc.so" in text
    assert "not all rungs" not in to_markdown(scoreboard(ladder()))


def test_a_rung_with_other_tokens_per_step_is_not_compared_by_loss_and_says_so() -> None:
    big = measurement(tokens_per_step=4096, losses=[10.9])
    board = scoreboard([record(), record("batch of 4", 1, measurement=big)])
    assert board.rows[1].status == "ok"
    assert board.rows[1].loss_difference == 0
    text = to_markdown(board)
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
        ("ok", None, 0),
    ],
)
def test_the_exit_code_says_whether_all_went_as_asked(status: str, expect: str | None, code: int) -> None:
    assert exit_code([record(), record("b", 1, status=status, expect=expect)]) == code


def test_changes_are_those_from_the_row_above_whatever_was_left_out() -> None:
    full = replace(BF16, attention="flash", adamw="fused")
    rows = scoreboard([record(), record("last", 5, toggles=full, changed=["adamw=fused"])]).rows
    assert rows[0].changed == ("device=cuda",)
    assert rows[1].changed == ("autocast=bfloat16", "attention=flash", "adamw=fused")


def test_an_out_of_memory_that_was_expected_and_did_not_come_is_said() -> None:
    assert "| ok, not out\\_of\\_memory |" in to_markdown(scoreboard([record(expect="out_of_memory")]))


def test_an_interrupted_run_and_a_busy_machine_are_said() -> None:
    busy = MACHINE.model_copy(update={"load_average": 17.0})
    text = to_markdown(
        scoreboard([record(environment=busy), record("b", 1, status="interrupted", error="by the user")])
    )
    assert "interrupted in round 1 of 3" in text
    assert "load average up to 17.0 on 8 cores" in text


def test_a_column_without_any_figure_is_left_out_of_the_terminal_table() -> None:
    text = terminal(scoreboard([record(measurement=measurement(peak_flops_bf16=None))]))
    assert "MFU (bf16)" not in text
    assert "Peak memory" in text


def test_a_rung_that_failed_is_a_row_with_dashes_and_its_reason() -> None:
    error = "RuntimeError: the reason\nTraceback ..."
    text = to_markdown(scoreboard([record(), record("bad", 1, status="failed", error=error)]))
    (line,) = [line for line in text.splitlines() if line.startswith("| bad")]
    assert line == "| bad | - | - | - | - | - | - | - | failed |"
    assert "bad: failed: RuntimeError: the reason" in text


GOLDEN = """\
### h100 on h100-80gb-hbm3-x1

| Rung | Changed | TPS | Speed-up | Over rung before | MFU (bf16) | Peak memory (GiB) | Loss at step 2 | Status |
|---|---|--:|--:|--:|--:|--:|--:|---|
| baseline | device=cuda | 1,000 | 1.00x | - | 0.1% | 3.00 | 10.5000 | ok |
| too large | micro\\_batch\\_size=64 | - | - | - | - | - | - | OOM |

NVIDIA H100 80GB HBM3 (1 here; Some CPU, 8 cores with avx2), 64.0 GiB; torch 2.11.0, cuda 13.0, \
Python 3.12.1, Linux.
gpt2 (124,439,808 parameters) on synthetic, T = 1024, 1,024 tokens per optimiser step.
2 processes, each fresh: 1 round over the rungs. TPS: tokens per second of the timed window, geometric mean over \
rounds; speed-ups paired within rounds; too few rounds for an interval.
"""


def test_the_markdown_scoreboard_reads_as_agreed() -> None:
    toggles = replace(CUDA, micro_batch_size=64)
    oom = record("too large", 1, toggles=toggles, status="out_of_memory", error="CUDA out of memory")
    found = to_markdown(scoreboard([record(), oom]))
    assert found.replace("  \n", "\n").startswith(GOLDEN)


def test_every_cell_and_the_caption_reach_the_terminal_too() -> None:
    text = terminal(scoreboard(ladder()))
    for part in ("bfloat16", "2.00x ±0.0%", "dense bfloat16 peak", "3 rounds over the rungs"):
        assert part in text


def test_the_caption_names_formula_denominator_method_and_processes() -> None:
    text = to_markdown(scoreboard(ladder()))
    for part in (
        "854,438,400 FLOPs per token (F)",
        "989.4 TFLOP/s each (a datasheet)",
        "allocated, window (torch.cuda)",
        "6 processes, each fresh: 3 rounds",
    ):
        assert part in text, part


def test_records_of_different_software_are_flagged() -> None:
    other = MACHINE.model_copy(update={"torch": "2.12.0"})
    assert "do not compare" in to_markdown(scoreboard([record(), record("b", 1, environment=other)]))
    assert "do not compare" not in to_markdown(scoreboard(ladder()))


def test_warnings_and_a_changed_checkout_are_shown() -> None:
    dirty = MACHINE.model_copy(update={"dirty": True})
    text = to_markdown(scoreboard([record(warnings=["the corpus is short"], environment=dirty)]))
    assert "Warning: the corpus is short." in text
    assert "changed checkout of commit abc" in text


HOSTILE = "a|b <script>alert(1)</script> \x1b[31m `x` [l](u)\nnext"


def test_hostile_text_changes_no_table_and_steers_no_terminal() -> None:
    board = scoreboard([record(HOSTILE, changed=[HOSTILE])])
    (line,) = [line for line in to_markdown(board).splitlines() if line.startswith("| a")]
    assert line.count("|") - line.count("\\|") == 10
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


def test_a_full_run_of_an_older_ladder_gives_way_to_the_newer_ladder(tmp_path: Path) -> None:
    for index in range(3):
        append(tmp_path / "old.jsonl", record(f"old {index}", index, time="2026-01-01T00:00:00+00:00"))
    append(tmp_path / "new.jsonl", record("new", time="2026-01-02T00:00:00+00:00", ladder_hash="other"))
    (board,), _ = load_boards([tmp_path])
    assert board.rows[0].rung == "new"


def test_of_a_folder_the_newest_file_per_machine_and_ladder_is_shown(tmp_path: Path) -> None:
    for machine, name, time, rung in [
        ("a", "old", "2026-01-01T00:00:00+00:00", "old"),
        ("a", "new", "2026-01-02T00:00:00+00:00", "new"),
        ("b", "other", "2026-01-01T00:00:00+00:00", "other"),
    ]:
        (tmp_path / machine).mkdir(exist_ok=True)
        append(tmp_path / machine / f"{name}.jsonl", record(rung, time=time))
    boards, warnings = load_boards([tmp_path])
    assert sorted(board.rows[0].rung for board in boards) == ["new", "other"]
    assert warnings == []
    (board,), _ = load_boards([tmp_path / "a" / "old.jsonl"])
    assert board.rows[0].rung == "old"


@pytest.mark.parametrize("content", [None, ""])
def test_nothing_to_show_is_said(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "r.jsonl").write_text(content)
    with pytest.raises(RecordError, match="no results here"):
        load_boards([tmp_path])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.0123, "0.0123"), (4.561, "4.56"), (78.94, "78.9"), (1234567.8, "1,234,568")]
)
def test_numbers_keep_three_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (720, "12 min"), (12240, "3.4 h")])
def test_durations_are_rounded_to_what_matters(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_control_characters_are_taken_out_and_markdown_is_escaped() -> None:
    assert plain("a\x1b[31m\r\n\tb\u202e") == "a [31m b"
    assert markdown("a|b*c <i>") == "a\\|b\\*c &lt;i&gt;"

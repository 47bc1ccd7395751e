"""The table of other trainers that took turns with ours."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from samples import MACHINE

from bench.analysis.turns import Turns
from bench.report.several_runs.trainers import turns_table
from bench.stats import Estimate

NANOGPT = Turns(
    source=Path("results/turns-peers-1.json"),
    ladder="peers",
    task=("gpt2", 1024),
    environment=MACHINE,
    time=datetime(2026, 11, 25, tzinfo=UTC),
    trainer="nanoGPT",
    version="3adf61e",
    ours="ours",
    starts=3,
    tokens_per_second=Estimate(100.0, 95.0, 105.0, 3),
    ours_tokens_per_second=Estimate(150.0, 140.0, 160.0, 3),
    ratio=Estimate(1.5, 1.4, 1.6, 3),
    verdict="faster",
    noise_floor=0.012,
)


def cells(*turns: Turns) -> list[dict[str, str]]:
    table = turns_table(turns)
    assert table
    return [dict(zip(table.head, row, strict=True)) for row in table.cells]


def test_a_row_says_what_was_trained_by_whom_and_how_fast_both_were() -> None:
    (row,) = cells(NANOGPT)
    assert row["Machine"] == "1 x NVIDIA H100 80GB HBM3"
    assert row["Model"] == "GPT-2, T = 1024"
    assert (row["Trainer"], row["TPS"]) == ("nanoGPT", "100 ±5.0%")
    assert (row["Ours"], row["TPS of ours"]) == ("ours of peers", "150 ±6.7%")
    assert row["Ours over it"] == "1.50x ±6.7%, faster"
    assert (row["Noise floor"], row["Starts"]) == ("±1.2%", "3")


def test_what_a_file_does_not_tell_is_absent() -> None:
    once = replace(NANOGPT, task=None, starts=None, noise_floor=None, verdict="not replicated")
    (row,) = cells(replace(once, ratio=Estimate(1.5, None, None, 4)))
    assert (row["Model"], row["Starts"], row["Noise floor"]) == ("-", "-", "-")
    assert row["Ours over it"] == "1.50x"


def test_a_noise_floor_that_tells_nothing_is_not_a_percentage() -> None:
    (row,) = cells(replace(NANOGPT, noise_floor=1.03))
    assert row["Noise floor"] == "none, for two equal rungs may differ by more than 100 %"


def test_without_turns_there_is_no_table() -> None:
    assert turns_table([]) is None

"""Tables over all runs shown: what is in them, what is kept apart, and when there is none."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import REAL, ROOT
from rich.console import Console
from samples import MACHINE, measurement, record, records_of

from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.timing import timing
from bench.ladder.ladder import Protocol
from bench.records.published import read_published
from bench.report.assembly import assemble, to_terminal
from bench.report.folder import files
from bench.report.one_run.tables import tables as board_tables
from bench.report.published import tables as published_tables
from bench.report.several_runs.atlas import machines
from bench.report.several_runs.tables import (
    hardware,
    mfu_context,
    overview,
    overview_brief,
    scaling,
    sizes,
    tables,
)
from bench.report.table import Table
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from ladders import ladder

PUBLISHED = ROOT / "results" / "published"
POST = read_published(PUBLISHED / "jjschwartz-2024.jsonl")
CONTEXT = read_published(PUBLISHED / "mfu-context.jsonl")
CUDA = Toggles(device="cuda")
BF16 = replace(CUDA, autocast="bfloat16")
TF32 = replace(CUDA, matmul_precision="high")


def board(
    *rungs: tuple[str, Toggles, float], chip: str = MACHINE.chip, source: str = "a", **changes: Any
) -> Scoreboard:
    """Of three rounds in which nothing varies."""
    environment = MACHINE.model_copy(update={"chip": chip})
    return scoreboard(records_of(*rungs, rounds=3, environment=environment, **changes), Path(source))


def column(table: Table | None, title: str) -> list[str]:
    assert table is not None
    return [row[table.head.index(title)] for row in table.cells]


def titles(shown: Sequence[Table]) -> list[str]:
    return [table.title for table in shown]


SLOW, FAST = board(("a", CUDA, 1e3)), board(("b", CUDA, 5e3), chip="NVIDIA H200", source="b")
MEDIUM = board(("m", CUDA, 500.0), workload=asdict(Workload(model="gpt2-medium")), source="c")


def test_machines_of_one_model_are_ranked_and_published_ones_stand_beneath_labelled() -> None:
    (table,) = hardware([SLOW, FAST, MEDIUM], POST)
    assert table.title == "Hardware: gpt2 at T = 1024"
    assert column(table, "Chip")[:2] == ["NVIDIA H200", "NVIDIA H100 80GB HBM3"]
    assert column(table, "Figures") == ["measured"] * 2 + ["published"] * len(table.beneath)
    assert column(table, "TPS")[2] == "3,046,409"  # faster than ours, and not among them
    assert all("gpt2-xl" not in " ".join(row) for row in table.cells)


def test_of_a_source_and_its_hardware_the_fastest_published_figure_is_shown() -> None:
    (table,) = hardware([SLOW, FAST], POST)
    stated = [f for f in POST if f.hardware == "H100 SXM" and f.devices == 1 and f.model == "gpt2" and f.tps]
    line = next(row for row in table.cells if row[:3] == ["published", "H100 SXM", "1"])
    assert line[table.head.index("TPS")] == f"{max(f.tps or 0 for f in stated):,.0f}"


def test_a_run_that_leaves_only_doubts_is_shown_by_its_ok_rung_and_says_so() -> None:
    compiled = replace(CUDA, compile="default")  # whose gradients were held to nothing
    doubtful = board(("compiled", compiled, 9e3), source="b")
    (table,) = hardware([SLOW, doubtful], [])
    assert column(table, "Rung") == ["a", "compiled (caveat)"]  # beneath, though it is faster
    assert any(note.startswith("Caveat, ") for note in table.notes)
    assert column(sizes([doubtful, SLOW]), "Fastest rung")[0] == "h100: a"


def test_a_rung_of_other_maths_is_no_run_s_fastest_in_any_table() -> None:
    residual = replace(BF16, residual="bfloat16")
    equal = board(("bfloat16", BF16, 2e3), ("residual", residual, 9e3), source="b")
    none = board(("residual", residual, 9e3), source="c")
    (table,) = hardware([SLOW, equal, none], [])
    assert column(table, "Rung") == ["bfloat16", "a"]
    assert "No rung is ok and of equal maths: c." in table.notes
    assert column(overview([SLOW, equal, none]), "Fastest rung") == ["a", "bfloat16", "none"]
    assert column(sizes([SLOW, equal, none]), "Fastest rung")[0] == "h100: bfloat16"
    assert column(mfu_context([none, equal], CONTEXT), "Run or source")[0] == "h100: bfloat16"


def test_for_want_of_a_rung_without_a_doubt_one_of_other_maths_does_not_step_in() -> None:
    compiled = replace(BF16, compile="default")  # whose gradients were held to nothing
    doubtful = board(("compiled", compiled, 2e3), ("residual", replace(compiled, residual="bfloat16"), 9e3))
    assert column(overview([SLOW, doubtful]), "Fastest rung") == ["a", "compiled (caveat)"]


def test_an_interrupted_run_and_one_of_few_rounds_stand_beneath_the_others_and_are_marked() -> None:
    once = scoreboard([record("once", measurement=measurement(9e9))], Path("once"))
    three = asdict(Protocol(repeats=3))
    torn = [record("torn", 0, n, protocol=three, measurement=measurement(8e9)) for n in (1, 2)]
    torn = scoreboard([*torn, record("torn", 0, 3, status="interrupted", error="by the user")], Path("torn"))
    (table,) = hardware([once, torn, SLOW, FAST], [])
    assert column(table, "Rung") == ["b", "a", "once (1 round)", "torn (interrupted, 2 rounds)"]
    assert any(note.startswith("Beneath the others: ") for note in table.notes)
    assert column(sizes([once, torn, SLOW]), "Fastest rung")[0] == "h100: a"
    assert column(sizes([once, torn]), "Fastest rung")[0] == "h100: once (1 round)"


def test_a_run_without_an_ok_rung_is_named_and_not_listed() -> None:
    broken = scoreboard([record("x", status="failed", error="why")], Path("broken.jsonl"))
    (table,) = hardware([SLOW, FAST, broken], [])
    assert len(table.cells) == 2
    assert "No rung is ok and of equal maths: broken.jsonl." in table.notes


def test_a_derived_peak_is_marked_wherever_its_mfu_stands() -> None:
    derived = measurement(peak_flops_kind="derived")
    cpu = scoreboard(records_of(("d", Toggles(), 1e3), rounds=3, measurement=derived), Path("d"))
    (table,) = hardware([SLOW, cpu], [])
    found = dict(zip(column(table, "Rung"), column(table, "MFU (bf16)"), strict=True))
    assert found == {"a": "0.086%", "d": "0.086%§"}
    context = mfu_context([cpu, SLOW], CONTEXT)
    assert column(context, "MFU")[:2] == ["0.086%", "0.086%§"]  # a datasheet's first
    assert any(note.startswith("§ ") for note in table.notes)


def test_how_an_mfu_on_ranks_of_one_cpu_follows_from_its_peak_is_said() -> None:
    """The peak is counted once, though two ranks share it."""
    two = Toggles(world_size=2)
    shared = measurement(1e3, tokens_per_step=2048, peak_flops_bf16=5e12, peak_devices=1)
    cpu = scoreboard(records_of(("d", two, 1e3), rounds=3, measurement=shared), Path("d"))
    (table,) = hardware([SLOW, cpu], [])
    assert column(table, "MFU (bf16)")[1] == f"{854_438_400 * 1e3 / 5e12:.1%}"
    assert any("MFU counts each CPU once" in note for note in table.notes)


def test_each_size_is_told_with_its_facts_and_its_fastest_rung() -> None:
    table = sizes([SLOW, FAST])
    assert table is not None
    lines = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.cells}
    assert list(lines) == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    assert lines["gpt2-xl"]["Parameters"] == "1,557,611,200"
    assert lines["gpt2-xl"]["FLOPs per token"] == "10,273,545,600"  # as the post states it
    assert (lines["gpt2"]["TPS"], lines["gpt2"]["Fastest rung"]) == ("5,000 ±0.0%", "h100: b")
    assert lines["gpt2-medium"]["TPS"] == "-"
    assert sizes([SLOW]) is None


def test_ranges_of_mfu_stand_beneath_ours_and_in_no_other_table() -> None:
    table = mfu_context([SLOW], [*POST, *CONTEXT])
    assert column(table, "MFU")[1:] == ["21.3% to 46.2%", "up to 56.3%", "38.0% to 43.0%"]
    assert column(table, "Figures") == ["measured", "published", "published", "published"]
    assert mfu_context([SLOW], POST) is None
    assert titles(published_tables([*POST, *CONTEXT])) == titles(published_tables(POST))


def test_the_committed_ranges_are_those_of_the_reference() -> None:
    reference = REAL.parent / "reference" / "published.yaml"
    if not reference.is_file():
        pytest.skip("the reference figures are not at hand")
    stated = yaml.safe_load(reference.read_text())["mfu_context"]
    assert len(stated) == len(CONTEXT)
    for row, figure in zip(stated, CONTEXT, strict=True):
        assert figure.source == row["source"]
        for ours, theirs in ((figure.mfu_low, row.get("low")), (figure.mfu_high, row.get("high"))):
            assert ours == (pytest.approx(theirs / 100) if theirs is not None else None)


def test_scaling_is_held_to_a_line_through_the_single_device() -> None:
    speeds = ((1, 400e3), (2, 780e3), (8, 3.04e6))
    rungs = [(f"{n} GPUs", replace(CUDA, world_size=n), tps) for n, tps in speeds]
    table = scaling([board(*rungs)])
    assert column(table, "Linear would be") == ["-", "800,000", "3,200,000"]
    assert column(table, "Efficiency") == ["-", f"{780 / 800:.1%} ±0.0%", f"{3040 / 3200:.1%} ±0.0%"]
    assert scaling([SLOW, FAST]) is None
    assert scaling([board(*rungs[:2])]) is None  # of which the scoreboard says as much


def test_a_rung_s_memory_and_step_are_held_to_the_rung_before() -> None:
    found = [measurement(tps, peak_memory_bytes=size * 2**30) for tps, size in ((1e3, 4), (2e3, 3))]
    second = record("b", 1, toggles=BF16, measurement=found[1])
    shown = scoreboard([record("a", measurement=found[0]), second])
    assert column(board_tables(shown)[0], "Memory over rung before") == ["-", "0.75x"]
    assert [each.saved for each in timing(shown)] == [None, pytest.approx(1.024 - 0.512)]


def test_in_a_grid_speed_memory_and_step_are_all_held_to_the_one_rung_before_that_the_caption_names() -> None:
    """That is the next smaller batch of the same toggles or else the first row, whatever row stands above."""
    grid = [(CUDA, 1e3, 8), (replace(CUDA, micro_batch_size=4), 2e3, 16), (BF16, 4e3, 4)]
    grid.append((replace(BF16, micro_batch_size=4), 5e3, 6))
    records = []
    for index, (toggles, tps, size) in enumerate(grid):
        tokens = 1024 * toggles.micro_batch_size
        found = measurement(tps, tokens_per_step=tokens, peak_memory_bytes=size * 2**30)
        records.append(record(str(index), index, kind="sweep", toggles=toggles, measurement=found))
    shown = scoreboard(records)
    table = board_tables(shown)[0]
    over = [each.split(",")[0] for each in column(table, "Over rung before")]
    assert over == ["-", "2.00x", "4.00x", "1.25x"]
    assert column(table, "Memory over rung before") == ["-", "2.00x", "0.50x", "1.50x"]
    assert [each.saved for each in timing(shown)] == [None, None, pytest.approx(1.024 - 0.256), None]


def test_a_step_of_another_size_saves_nothing_over_the_rung_before() -> None:
    larger, four = measurement(1e3, tokens_per_step=4096), replace(CUDA, micro_batch_size=4)
    shown = scoreboard([record(), record("b", 1, toggles=four, measurement=larger)])
    assert timing(shown)[1].saved is None


def test_a_single_run_without_ranks_has_no_table_beside_its_own() -> None:
    assert tables([SLOW], POST) == []


def full(boards: list[Scoreboard]) -> str:
    """All tables of these runs on a wide terminal."""
    console = Console(file=io.StringIO(), width=250)
    for part in to_terminal(assemble(boards), 250):
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_report_of_several_runs_begins_with_a_list_of_them_and_says_once_how_all_were_measured() -> None:
    several = full([SLOW, FAST])
    assert several.startswith("2 runs")
    assert several.count("Medians over rounds.") == several.count("dense bfloat16 peak of 989.4") == 1
    _, _, end = several.partition("Notes to several tables\n")
    assert end.startswith("1. TPS: tokens per second of the timed window")
    assert several.count("Notes to several tables, at the end: 1, 2, ") == 2


def test_the_report_of_one_run_is_complete_in_itself() -> None:
    one = " ".join(full([SLOW]).split())
    assert "Medians over rounds." in one
    assert "dense bfloat16 peak of 989.4" in one
    assert "Notes to several tables" not in one
    assert "1 runs" not in one


def test_the_list_of_runs_tells_which_was_interrupted_and_which_has_no_sound_rung() -> None:
    three = asdict(Protocol(repeats=3))
    torn = scoreboard([record("torn", protocol=three)], Path("torn"))
    broken = scoreboard([record("x", status="failed", error="why")], Path("broken"))
    table = overview([FAST, torn, broken])
    assert column(table, "Rounds") == ["3", "1, interrupted", "1"]
    assert column(table, "Fastest rung") == ["b", "torn (interrupted, 1 round)", "none"]
    assert overview([FAST]) is None


def test_a_run_left_out_that_is_faster_than_what_is_shown_of_its_machine_is_named() -> None:
    slower, faster = board(("a", CUDA, 900.0), source="s"), board(("a", CUDA, 2e3), source="before.jsonl")
    assert overview_brief([SLOW, FAST], [slower]).findings[1:] == [
        "Left out, as another run of the same name is shown: 1 run."
    ]
    assert overview_brief([SLOW, FAST], [slower, faster]).findings[1:] == [
        "Left out, as another run of the same name is shown: 2 runs.",
        f"Faster than what is shown of its machine: a on {MACHINE.machine}, 2,000 tokens/s: before.jsonl",
    ]


def test_a_range_is_not_broken_over_lines() -> None:
    found = measurement(1e3, step_seconds=[4.741] * 40 + [5.126] * 10)
    shown = scoreboard([record(measurement=found)])
    lines = io.StringIO()
    Console(width=80, file=lines).print(*board_tables(shown)[1].to_terminal(80))
    assert "4,741 to 5,126" in lines.getvalue()


def test_hostile_names_stay_text_in_every_table() -> None:
    hostile = "<b>x</b> | `y`"
    runs = [board((hostile, CUDA, 1e3), ladder=hostile, source=hostile), FAST]
    for table in assemble(runs, [*POST, *CONTEXT]).together:
        text = table.to_markdown("###")
        assert "<b>" not in text
        lines = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1


# --- What helps where


def two_machines() -> list[Scoreboard]:
    quick = ladder(("base", CUDA, 100.0), ("half", BF16, 300.0), ("tf", TF32, 120.0), chip="quick")
    slow = ladder(("base", CUDA, 100.0), ("half", BF16, 80.0), chip="slow")
    return [quick, slow]


def test_what_helps_on_which_hardware_is_the_first_comparison() -> None:
    table = assemble(two_machines()).together[0]
    assert table.title == "What helps on which hardware"
    assert table.head == ["Change from the rung before", "1 x quick", "1 x slow", "Direction"]
    assert table.cells == [
        ["autocast=bfloat16", "3.00x ±0.0%, faster", "0.80x ±0.0%, slower", "direction differs"],
        ["autocast=float32 (from bfloat16), matmul_precision=high", "0.40x ±0.0%, slower", "", ""],
    ]
    assert table.first == [
        "Faster, in how many of the columns that have it: autocast=bfloat16: 1 of 2.",
        "Slower, in how many of the columns that have it: autocast=bfloat16: 1 of 2; "
        "autocast=float32 (from bfloat16), matmul_precision=high: 1 of 1.",
    ]


def test_a_machine_that_trained_several_models_has_a_column_for_each_and_namesakes_say_who_they_are() -> None:
    tiny = asdict(Workload(model="tiny", seq_len=64))
    small = ladder(("base", CUDA, 100.0), ("half", BF16, 300.0), chip="quick", workload=tiny)
    assert list(machines([*two_machines(), small])) == [
        "1 x quick, GPT-2 124M",
        "1 x slow",
        "1 x quick, model tiny 124M, T = 64",
    ]
    host = replace(CUDA, device="cpu")
    assert list(machines([ladder(("base", host, 1.0), chip=chip) for chip in ("one", "other")])) == [
        "8 cores of Some (AVX2), one-x1",
        "8 cores of Some (AVX2), other-x1",
    ]


def test_the_index_begins_with_the_whole_climb_and_has_the_atlas_beneath_the_best_of_each_machine() -> None:
    index = files(assemble(two_machines()))["scoreboard.md"]
    parts = ("plots/summary.svg", "| machine |", "plots/atlas.svg", "## quick-x1")
    assert (places := [index.index(part) for part in parts]) == sorted(places)


def test_no_page_links_a_picture_that_is_not_drawn() -> None:
    written = files(assemble(two_machines()), drawn=lambda picture: picture.endswith("-rungs"))
    linked = {found for text in written.values() for found in re.findall(r'src="([^"]+)"', text)}
    assert linked
    assert all(each.endswith("-rungs.svg") for each in linked)


FASTER = "Most tokens per second on this machine: "


def test_the_page_of_a_run_names_a_faster_one_of_its_model_and_machine() -> None:
    slow = scoreboard(records_of(("slow", CUDA, 1000.0), ladder="slow"))
    fast = scoreboard(records_of(("fast", replace(CUDA, micro_batch_size=2), 2000.0), ladder="[fast]"))
    other = scoreboard(
        records_of(("other", CUDA, 3000.0), ladder="other", workload=asdict(Workload(seq_len=512)))
    )
    written = files(assemble([slow, fast, other]))
    names = [name for name, text in written.items() if FASTER in text]
    assert [name.rpartition("/")[2] for name in names] == ["slow.md"]
    assert f"\n{FASTER}fast, 2,000 tokens/s (1 round), in [\\[fast\\]](" in written[names[0]]


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"toggles": Toggles(device="cpu")},  # on another device of the machine
        {"toggles": replace(CUDA, residual="bfloat16")},  # which trains otherwise
        {"measurement": measurement(1000.0)},
    ],
    ids=["another device", "other maths", "no faster"],
)
def test_a_run_that_does_not_compare_is_not_named_as_a_faster_one(elsewhere: dict[str, Any]) -> None:
    here = scoreboard(records_of(("here", CUDA, 1000.0), ladder="here"))
    there = scoreboard(records_of(("there", CUDA, 2000.0), ladder="there", **elsewhere))
    assert not [text for text in files(assemble([here, there])).values() if FASTER in text]


def test_a_run_s_own_rung_that_counts_nowhere_is_not_passed_over_for_a_slower_run() -> None:
    own = scoreboard(records_of(("own", replace(CUDA, residual="bfloat16"), 3000.0), ladder="own"))
    slower = scoreboard(records_of(("slower", CUDA, 1000.0), ladder="slower"))
    assert own.fastest is None
    assert not [text for text in files(assemble([own, slower])).values() if FASTER in text]

"""The answer of one run on one screen: what stands there, how wide it is, and whose figures they are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from places import ROOT
from rich.cells import cell_len
from samples import append, measurement, record
from shown import check_golden, to_markdown

from bench.analysis.bound import limit_tps
from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import load_boards
from bench.format import number, times
from bench.records.machine import Ceiling, Matmul
from bench.report.assembly import assemble, short
from bench.report.brief import MOST_NOTES
from bench.report.one_run.screen import (
    findings,
    screen,
    screen_markdown,
    share_of_limit,
    swept_toggles,
)
from bench.report.one_run.tables import columns
from bench.report.titles import cpu_title, model_title
from gpt2.config.toggles import Toggles
from ladders import ladder

EAGER = Toggles(device="cuda")
BF16 = Toggles(device="cuda", autocast="bfloat16")
FUSED = Toggles(device="cuda", adamw="fused")
RUNS = {
    "zen5": "amd-epyc-26-2-1-x2/cpu-20261125T050205Z",
    "choosing": "amd-epyc-25-17-1-x2/cpu-20261126T155125Z",
    "h200": "h200-x1/gpu-65k-20261127T111453Z",
    "uncounted": "h200-x1/gpu-batch-1-20261126T023026Z",
    "peers": "amd-epyc-x2/peers-cpu-20261125T022550Z",
    "ddp": "intel-xeon-x2/ddp-cpu-20261121T211353Z",
    "sweep": "intel-xeon-x2/cpu-vocabulary-of-50304-over-micro_batch_size-20261122T010805Z",
    "sweep-of-three": "intel-xeon-x2/cpu-SDPA-over-autocast-and-matmul_precision-and-micro_batch_size-"
    "20261122T013112Z",
}


def board_of(name: str) -> Scoreboard:
    (board,), _ = load_boards([Path("results") / f"{RUNS[name]}.jsonl"])
    return board


def text(board: Scoreboard, width: int = 100, *, notes: bool = False) -> str:
    return "\n".join(str(line) for line in screen(board, width, notes=notes))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where the paths of results are as they are shown


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("name", RUNS)
def test_a_committed_run_is_shown_as_it_was_looked_at(name: str, width: int) -> None:
    check_golden(f"{name}-{width}", text(board_of(name), width) + "\n")


@pytest.mark.parametrize("width", [1, 40, 60, 80, 100, 300])
@pytest.mark.parametrize("name", RUNS)
def test_no_line_is_wider_than_the_terminal_nor_than_a_hundred_columns(name: str, width: int) -> None:
    lines = [line for line in text(board_of(name), width).splitlines() if " " in line]  # a path stays whole
    widest = max(map(cell_len, lines))
    assert widest <= max(60, min(width, 100))


def test_a_ladder_of_eighteen_rungs_fits_forty_lines() -> None:
    board = board_of("zen5")
    assert len(board.rows) == 18
    assert len(text(board).splitlines()) <= 40


def test_every_rung_of_a_climb_that_chooses_has_a_row_or_is_said_to_be_left_out() -> None:
    board = board_of("choosing")
    table, _, findings = text(board, 200).partition("\nFastest: ")
    rows = [row.rung for row in board.rows if f"\n  {row.rung}" in table]
    assert rows == ["baseline", "bfloat16", "torch.compile", "jemalloc", "attention by blocks"]
    words = " ".join(findings.split())
    tried, _, rest = words.partition("slower or no clear gain: ")[2].partition(
        ". Could not run on this machine"
    )
    cannot = rest.partition(": ")[2].partition(". ")[0].split(", ")
    named = {re.split(r" [\d.]+x", rung)[0] for rung in tried.split("; ")}
    assert named | {*cannot} == {row.rung.removesuffix(" (second try)") for row in board.rows} - {*rows}
    assert "casts by AdamW" in cannot
    full = to_markdown(board)
    assert "weight_casts: optimizer: it takes adamw: compiled" in full.replace("\\", "")


def test_tries_of_one_rung_stand_together_and_the_rung_that_came_nearest_is_first() -> None:
    words = " ".join(text(board_of("choosing"), 200).split())
    tried = words.partition("slower or no clear gain: ")[2].partition(". ")[0].split("; ")
    assert tried[0] == "SDPA 1.08x"
    assert "compiled AdamW 0.97x, then 1.03x" in tried
    best = [max(map(float, re.findall(r"([\d.]+)x", rung))) for rung in tried]
    assert best == sorted(best, reverse=True)


def test_a_screen_of_few_rungs_says_what_each_switches_on() -> None:
    shown = text(ladder(("a", EAGER, 100.0), ("b", BF16, 150.0)))
    assert "Settings of b: autocast=bfloat16." in shown


def test_settings_are_all_that_a_run_would_have_to_set_also_where_the_first_rung_sets_some() -> None:
    both = replace(BF16, attention="sdpa")
    shown = text(ladder(("a", BF16, 100.0), ("b", both, 150.0)))
    assert "Settings of b: autocast=bfloat16, attention=sdpa." in shown


def test_a_warning_that_the_fastest_rung_is_free_of_comes_last() -> None:
    slow, *others = board().records
    fastest = board().fastest
    assert fastest
    assert slow.rung != fastest.rung
    warned = [slow.model_copy(update={"warnings": ["one is odd; see to it"]})]
    for other in others:
        told = ["two is odd; see to it"] if other.rung == fastest.rung else []
        warned.append(other.model_copy(update={"warnings": told}))
    lines = [line for line in text(scoreboard(warned)).splitlines() if "is odd" in line]
    assert ["two" in line for line in lines] == [True, False]


@pytest.mark.parametrize("name", RUNS)
def test_its_figures_are_those_of_the_full_table(name: str) -> None:
    board = board_of(name)
    full = {column.title: column for column in columns(board)}
    shown = screen_markdown(board)
    counted = [row for row in board.rows if row.status in ("ok", "external") and row.tps]
    for row in counted:
        assert row.tps
        values = [str(getattr(row.toggles, toggle)) for toggle in swept_toggles(board)]
        name = f"| {' | '.join(values or [row.rung])} |"
        (line,) = [line for line in shown.splitlines() if line.replace("\\", "").startswith(name)]
        assert full["TPS"].cell(row).split(" ")[0] == number(row.tps.value)
        assert f"| {number(row.tps.value)}" in line
        if row.gain:
            assert times(row.gain.value) in line
        if row.speedup and len(counted) > 1:  # one alone is over nothing
            assert times(row.speedup.value) in line


def board(**of_second: object) -> Scoreboard:
    records = []
    for n in (1, 2, 3):
        kinds = ("cumulative", "control")
        records += [record(repetition=n, kind=kind, measurement=measurement(1000.0 + n)) for kind in kinds]
        second = {"toggles": Toggles(device="cuda", attention="sdpa"), "measurement": measurement(2000.0 + n)}
        records.append(record("SDPA", 1, n, **{**second, **of_second}))
    return scoreboard(records)


@pytest.mark.parametrize(
    ("status", "words"), [("out_of_memory", "out of memory"), ("timeout", "timed out"), ("failed", "failed")]
)
def test_words_stand_in_place_of_figures_that_are_not_there(status: str, words: str) -> None:
    shown = text(board(status=status, error="no room\nTraceback", measurement=None))
    assert f"{words}: no room" in shown
    assert "Traceback" not in shown


def test_a_rung_that_ran_though_it_was_expected_to_fail_counts_and_a_warning_says_so() -> None:
    shown = text(board(expect="out_of_memory"))
    assert "not counted" not in shown
    assert re.search(r"^! .+: ran, though expected: out of memory$", shown, re.MULTILINE)


def test_an_outcome_that_was_the_point_is_called_expected() -> None:
    shown = text(board(status="out_of_memory", expect="out_of_memory", error="no room", measurement=None))
    assert "out of memory, as expected" in shown


def test_a_verdict_is_said_in_one_word_of_the_glossary() -> None:
    assert "2.00x ±0.1 % faster" in text(board())
    assert "no difference" in text(board(measurement=measurement(1002.0)))


def test_columns_that_are_equal_in_all_rows_are_left_out() -> None:
    assert "memory" not in text(board())
    assert "memory" in text(board(measurement=measurement(2000.0, peak_memory_bytes=2**30)))


def test_three_warnings_are_shown_and_the_others_counted() -> None:
    warned = board(warnings=[f"{kind} is odd; see to it" for kind in ("one", "two", "three", "four", "five")])
    shown = text(warned)
    assert shown.count("is odd") == MOST_NOTES
    assert "2 more warnings: --notes" in shown
    assert text(warned, notes=True).count("is odd") == 5


def test_a_run_that_was_broken_off_says_so_before_any_other_warning() -> None:
    warned = board(warnings=["one is odd; see to it"])
    records = list(warned.records)[:-1]
    lines = [line for line in text(scoreboard(records)).splitlines() if line.startswith("! ")]
    assert "--resume" in lines[0] + lines[1]


def test_a_rung_that_changes_the_maths_is_marked_and_never_the_fastest() -> None:
    changed = board(toggles=Toggles(device="cuda", autocast="bfloat16", residual="bfloat16"))
    shown = text(changed)
    assert "  *" in shown
    assert "Changes the maths" in shown
    assert "Fastest: SDPA" not in shown


def test_a_rung_that_makes_good_what_another_lost_gave_nothing() -> None:
    lost = ladder(("a", EAGER, 100.0), ("b", BF16, 150.0), ("c", EAGER, 90.0), ("d", FUSED, 149.0))
    assert "Largest clear gains: b 1.50x." in text(lost)


def test_a_ladder_says_what_its_rungs_keep() -> None:
    kept = ladder(("a", EAGER, 100.0), ("b", BF16, 150.0))
    assert "Each rung adds its change to those above. " in text(kept)


def test_a_quick_run_of_too_few_rounds_says_for_how_long_three_would_take() -> None:
    """It took from 00:00:00 to 13 minutes later, for two rounds."""
    times = ("2026-11-28T00:00:00+00:00", "2026-11-28T00:12:00+00:00")
    runs = [
        record(name, n, round_, ladder="quick", time=times[round_ - 1], process_seconds=60.0, toggles=toggles)
        for round_ in (1, 2)
        for n, (name, toggles) in enumerate((("baseline", EAGER), ("best known", BF16)))
    ]
    said = " ".join(text(scoreboard(runs)).split())
    assert "2 rounds give no interval; 3 do (bench quick --minutes 20)." in said


def test_rungs_of_a_quick_run_are_not_said_to_stand_on_each_other() -> None:
    """The best known settings are given whole: they need not have the usual ones."""
    runs = [
        record(name, n, ladder="quick", toggles=toggles)
        for n, (name, toggles) in enumerate((("usual settings", BF16), ("best known", EAGER)))
    ]
    said = " ".join(text(scoreboard(runs)).split())
    assert "Each rung has settings of its own: the second those that most people switch on, the last" in said
    assert "adds its change" not in said


@pytest.mark.parametrize(
    ("model", "parameters", "said"),
    [
        ("gpt2", 124_439_808, "GPT-2 124M"),
        ("gpt2-medium", 354_823_168, "GPT-2 medium 355M"),
        ("tiny", 140_864, "model tiny of 140,864 parameters"),
        ("gpt2", None, "GPT-2"),
    ],
)
def test_a_model_goes_by_the_name_that_people_know(model: str, parameters: int | None, said: str) -> None:
    assert model_title(model, parameters) == said


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("Intel(R) Xeon(R) Processor", "Intel Xeon"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "Intel Core i7-8550U"),
        ("AMD Ryzen 9 7950X 16-Core Processor", "AMD Ryzen 9 7950X"),
        ("AMD EPYC (family 26 model 2 stepping 1)", "AMD EPYC, Zen 5"),
        ("AMD EPYC (family 25 model 17 stepping 1)", "AMD EPYC, Zen 4"),
        ("AMD EPYC (family 25 model 1 stepping 1)", "AMD EPYC, Zen 3"),
        ("AMD EPYC (family 23 model 49 stepping 0)", "AMD EPYC, Zen 2"),
        ("AMD EPYC (family 23 model 1 stepping 2)", "AMD EPYC, Zen"),
        ("AMD EPYC (family 99 model 1 stepping 2)", "AMD EPYC"),
        ("Intel Xeon Processor (family 6 model 143 stepping 8)", "Intel Xeon"),
        ("Apple M3", "Apple M3"),
    ],
)
def test_a_cpu_goes_by_its_name_without_trademarks(own: str, said: str) -> None:
    environment = board().environment
    assert cpu_title(environment.model_copy(update={"cpu": own})) == said


GELU, JEMALLOC = replace(BF16, gelu="sigmoid"), replace(BF16, gelu="sigmoid", allocator="jemalloc")


def told(board: Scoreboard, begins: str) -> str:
    (line,) = [line for line in findings(board) if line.startswith(begins)]
    return line


def test_what_all_rungs_after_the_last_clear_gain_bring_together_is_told() -> None:
    rungs = (("a", EAGER, 100.0), ("b", BF16, 200.0), ("c", GELU, 201.0), ("d", JEMALLOC, 203.0))
    assert (
        told(ladder(*rungs), "Largest clear gains")
        == "Largest clear gains: b 2.00x; all after b together 1.01x ±0 %."
    )


def test_where_no_single_rung_is_clearly_faster_but_all_together_are_that_is_told() -> None:
    rungs = (("a", EAGER, 100.0), ("b", BF16, 100.9), ("c", GELU, 101.8), ("d", JEMALLOC, 102.7))
    said = "Largest clear gains: none of a single rung; all together 1.03x ±0 %."
    assert told(ladder(*rungs), "Largest clear gains") == said
    found = [
        each.model_copy(update={"measurement": each.measurement.model_copy(update={"recompiles": 1})})
        if each.rung == "b" and each.measurement
        else each
        for each in ladder(*rungs).records
    ]
    assert told(scoreboard(found), "Largest clear gains") == "Largest clear gains: none beyond the noise."
    rungs = (("a", EAGER, 100.0), ("b", BF16, 100.3), ("c", GELU, 100.6))
    assert told(ladder(*rungs), "Largest clear gains") == "Largest clear gains: none beyond the noise."


def test_of_rungs_that_are_not_clearly_faster_together_nothing_is_told() -> None:
    rungs = (("a", EAGER, 100.0), ("b", BF16, 200.0), ("c", GELU, 200.0), ("d", JEMALLOC, 200.2))
    assert told(ladder(*rungs), "Largest clear gains") == "Largest clear gains: b 2.00x."


def test_a_single_rung_after_the_last_clear_gain_is_not_told_twice() -> None:
    rungs = (("a", EAGER, 100.0), ("b", BF16, 200.0), ("c", GELU, 201.5))
    assert "together" not in told(ladder(*rungs), "Largest clear gains")


def limited(*formats: str, flops_per_second: float = 1e12) -> Scoreboard:
    """A run of a rung in float32 and one in bfloat16, with matmuls measured in these formats."""
    shape = {"name": "square", "m": 1024, "k": 4096, "n": 4096, "flops_per_second": flops_per_second}
    matmuls = [Matmul(**shape, number_format=each) for each in formats]
    found = Ceiling(chip="c", threads=None, matmuls=matmuls, copy_bytes_per_second=1e11, seconds=1.0)
    unknown = {"peak_flops_bf16": None, "peak_flops_dtype": None}
    records = [
        each.model_copy(
            update={"measurement": each.measurement and each.measurement.model_copy(update=unknown)}
        )
        for each in ladder(("a", EAGER, 100.0), ("b", BF16, 200.0)).records
    ]
    rates = record("ceiling", 0, kind="ceiling", toggles=EAGER, measurement=None, ceiling=found)
    return scoreboard([*records, rates])


def test_every_rung_s_share_is_of_the_fastest_one_s_limit() -> None:
    board = limited("float32", "bfloat16")
    name, share = share_of_limit(board)
    assert name == "of limit"
    most = limit_tps(board, board.rows[1])
    assert most
    assert [share(row) for row in board.rows] == pytest.approx([100.0 / most, 200.0 / most])
    assert told(board, "Limit: ").startswith(f"Limit: {number(most)} tokens/s")


def test_where_the_fastest_rung_s_format_was_not_measured_the_limit_s_absence_has_its_reason() -> None:
    assert told(limited("float32"), "Limit: ").startswith("Limit: no ceiling for bfloat16: ")


def test_a_rung_beyond_its_limit_has_a_word_on_why() -> None:
    assert "slower hour" in told(limited("float32", "bfloat16", flops_per_second=1e11), "Limit: ")


def test_a_run_whose_folder_holds_others_says_where_these_are_shown(tmp_path: Path) -> None:
    source = tmp_path / "cpu-1.jsonl"
    append(source, record())
    board = replace(ladder(("a", EAGER, 100.0), ("b", BF16, 200.0)), source=source)
    for no_run in ("turns-1.json", "roofline-1.jsonl", ".hidden.jsonl"):
        source.with_name(no_run).write_text("")
        assert "other runs" not in text(board)
    append(source.with_name("quick-2.jsonl"), record())
    said = f"Compare with the other runs in its folder: bench report {source.parent}"
    assert said in " ".join(text(board).split())


def test_of_a_folder_that_shows_one_run_those_left_out_are_told_in_its_place(tmp_path: Path) -> None:
    for name, tps, time in (("h100-1", 2000.0, "2026-01-01"), ("h100-2", 1000.0, "2026-01-02")):
        one = record(measurement=measurement(tps), time=f"{time}T00:00:00+00:00")
        append(tmp_path / f"{name}.jsonl", one)
    passed_over: list[Scoreboard] = []
    boards, _ = load_boards([tmp_path], passed_over=passed_over)
    assert [board.source for board in boards] == [tmp_path / "h100-2.jsonl"]
    lines = [str(line) for line in short(assemble(boards, passed_over=passed_over), 100)]
    assert "Left out, as another run of the same name is shown: 1 run." in lines
    (faster,) = [line for line in lines if line.startswith("Faster than what is shown of its machine: ")]
    assert "2,000 tokens/s" in faster
    assert not any(line.startswith("Other runs") for line in lines)

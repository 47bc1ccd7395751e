"""Pictures: that they are drawn, say where they are from, and show what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from samples import MACHINE, measurement, record, records_of
from shown import to_markdown

from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.records.machine import Ceiling, Matmul
from bench.records.published import Published
from bench.report.assembly import assemble
from bench.report.page import page
from bench.report.plots.atlas import atlas_picture
from bench.report.plots.losses import losses_by_step
from bench.report.plots.pictures import draw
from bench.report.plots.rungs import climb, panels
from bench.report.plots.style import fit_log_axis, shortened
from bench.report.plots.style import label_rows as labelled
from bench.report.plots.summary import summary
from gpt2.config.toggles import Toggles
from ladders import ladder

CUDA = Toggles(device="cuda")
FUSED = replace(CUDA, adamw="fused")


def board(**changes: object):
    rungs = [
        ("first", CUDA, 1000.0),
        ("$x$ <script>alert(1)</script> & a name that is much too long for an axis", FUSED, 1500.0),
        ("wide", replace(FUSED, micro_batch_size=4), 1400.0),
        ("two", replace(FUSED, micro_batch_size=4, world_size=2), 2600.0),
    ]
    records = [
        record(name, n, r, toggles=toggles, measurement=measurement(tps * (1 + r / 100)), **changes)  # type: ignore[arg-type]
        for n, (name, toggles, tps) in enumerate(rungs)
        for r in (1, 2, 3)
    ]
    huge = replace(FUSED, micro_batch_size=64)
    return scoreboard([*records, record("huge", 4, toggles=huge, status="out_of_memory", error="no room")])


def words(figure: Figure | None) -> str:
    """All that a picture says."""
    assert figure is not None
    return " ".join(each.get_text() for each in figure.findobj(Text) if isinstance(each, Text))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {file.name: file for file in draw([board()], tmp_path_factory.mktemp("reports"))}


def test_every_picture_is_drawn_as_png_and_svg_on_light_and_on_dark_paper(drawn: dict[str, Path]) -> None:
    stems = {re.sub(r"(-dark)?\.(png|svg)$", "", name) for name in drawn}
    assert {
        f"{stem}{paper}.{kind}" for stem in stems for paper in ("", "-dark") for kind in ("png", "svg")
    } == set(drawn)
    assert {stem.rpartition("h100-")[2] for stem in stems} == {"climb", "rungs", "loss-by-step", "summary"}


def test_a_picture_says_model_machine_torch_and_rounds(drawn: dict[str, Path]) -> None:
    for name, file in drawn.items():
        if name.endswith(".svg"):
            text = file.read_text()
            assert all(word in text for word in ("gpt2", "h100", "torch 2.11.0", "3 rounds")), name


def test_no_text_of_a_results_file_becomes_markup_or_a_formula(drawn: dict[str, Path]) -> None:
    text = next(file for name, file in drawn.items() if name.endswith("climb.svg")).read_text()
    assert "<script" not in text
    assert "$x$ &lt;script" in text


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shortened("attention=explicit, micro_batch_size=16", 28) == "attention=expl…batch_size=16"
    assert shortened("a name of 28 letters exactly", 28) == "a name of 28 letters exactly"
    assert shortened("costs $2\nin two \x1blines") == "costs $2\nin two lines"


def test_what_two_candidates_differ_in_is_on_the_axis_though_it_is_in_the_middle_of_long_names() -> None:
    values = ("highest", "medium")
    names = [f"autocast=float32, matmul_precision={value}, micro_batch_size=1" for value in values]
    rungs = [(name, replace(CUDA, threads=n + 1), 1e3) for n, name in enumerate(names)]
    figure = panels(scoreboard(records_of(*rungs, kind="sweep")))
    assert figure is not None
    assert [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()] == names


def test_names_that_are_too_long_to_be_told_apart_are_numbered() -> None:
    rungs = [f"{'a' * 200}{n}{'b' * 200}" for n in range(2)]
    axes = Figure().add_subplot()
    labelled(axes, rungs)
    assert [label.get_text()[:3] for label in axes.get_yticklabels()] == ["1: ", "2: "]


def test_what_ran_out_of_memory_is_marked(drawn: dict[str, Path]) -> None:
    for what in ("climb", "rungs"):
        drawing = next(file for name, file in drawn.items() if name.endswith(f"{what}.svg")).read_text()
        assert "out of memory" in drawing


@pytest.mark.slow
def test_the_same_results_give_the_same_files(drawn: dict[str, Path], tmp_path: Path) -> None:
    for file in draw([board()], tmp_path):
        assert file.read_bytes() == drawn[file.name].read_bytes()


def test_a_run_of_one_rung_draws_what_it_has(tmp_path: Path) -> None:
    names = [file.name for file in draw([scoreboard([record()])], tmp_path)]
    assert any("rungs" in name for name in names)
    assert not any("climb" in name for name in names)


def test_an_axis_writes_millions_out() -> None:
    figure = panels(scoreboard(records_of(("a", CUDA, 1_500_000.0), ("b", FUSED, 3_000_000.0))))
    assert figure is not None
    assert figure.axes[0].xaxis.get_major_formatter().format_ticks([0.5, 3_500_000.0]) == ["0.5", "3,500,000"]


# --- the whole climb, and what helps where ------------------------------------------------------------------


def climbed() -> list[Scoreboard]:
    """A slow and a quick machine; on the quick one bfloat16 triples what the baseline does."""
    host, half = Toggles(device="cpu"), replace(CUDA, autocast="bfloat16")
    fused = replace(half, adamw="fused")
    slow = ladder(("base", host, 10.0), ("half", replace(host, autocast="bfloat16"), 8.0), chip="slow")
    quick = ladder(("base", CUDA, 100.0), ("half", half, 300.0), ("fused", fused, 400.0), chip="quick")
    return [slow, quick]


def published(tps: float, hardware: str, **changes: Any) -> Published:
    facts = {"source": "a post", "series": "ladder", "rung": "r", "hardware": hardware, "devices": 1}
    return Published.model_validate({**facts, "tps": tps, "model": "gpt2", "seq_len": 1024, **changes})


def labels(figure: Figure | None) -> list[str]:
    """Left of a picture's rows."""
    assert figure is not None
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_the_summary_has_a_bar_a_step_under_headings_with_what_each_part_gains() -> None:
    figure = summary(climbed())
    assert labels(figure) == [
        "Hardware, plain baseline · 10x",
        "8 cores of Some (AVX2)",
        "1 x quick",
        "Software on 1 x quick · 4.00x",
        "half",
        "fused",
    ]
    said = words(figure)
    assert all(beside in said for beside in ("10.0 · 1.00x", "100 · 10x", "300 · 30x", "400 · 40x"))
    assert "GPT-2 124M: 40x measured, from 8 cores of Some (AVX2) to 1 x quick" in said
    assert "published" not in said


def test_published_bars_of_the_summary_are_hatched_and_say_so() -> None:
    theirs = [published(50.0, "laptop"), published(200.0, "card"), published(900.0, "card", devices=8)]
    figure = summary(climbed(), theirs)
    assert figure is not None
    bars = [bar for bar in figure.axes[0].patches if isinstance(bar, Rectangle)]
    assert [bool(bar.get_hatch()) for bar in bars] == [False, True, False, True, False, False, True]
    said = words(figure)
    assert "50.0 · 5.00x · published" in said
    assert "Distributed on 8 x card" in said
    assert "4.50x" not in said  # the rows of a published ladder need not be of one workload
    assert "With published figures 90x, to 8 x card" in said
    assert "published by a post, not measured here" in said


def test_a_step_that_is_not_the_next_rung_of_its_run_names_the_toggles_that_changed() -> None:
    board = climbed()[1]
    later = ladder(("top", replace(CUDA, autocast="bfloat16", adamw="fused"), 500.0), chip="quick")
    assert labels(summary([board, later]))[-1] == "autocast=bfloat16, adamw=fused"


def test_one_measured_rung_makes_no_summary() -> None:
    assert summary([ladder(("base", CUDA, 100.0))], [published(50.0, "laptop")]) is None


def test_the_atlas_shows_gains_by_change_and_machine_and_marks_signs_that_differ() -> None:
    figure = atlas_picture(climbed())
    assert labels(figure) == ["≠ autocast=bfloat16", "adamw=fused"]
    assert figure is not None
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1 x quick", "8 cores of Some\n(AVX2)"]
    cells = {(text.get_position(), text.get_text()) for text in axes.texts}
    assert cells == {((0, 0.0), "3.00x ±0 %"), ((1, 0.0), "0.80x ±0 %"), ((0, 1.0), "1.33x ±0 %")}
    assert "autocast=bfloat16 helps most often: 3.00x on 1 of 2" in words(figure)


def test_one_machine_makes_no_atlas_picture() -> None:
    assert atlas_picture(climbed()[1:]) is None


def test_a_panel_of_which_nothing_is_known_is_not_drawn() -> None:
    unknown = measurement(peak_flops_bf16=None, peak_memory_bytes=None)
    figure = panels(scoreboard([record(measurement=unknown)]))
    assert figure is not None
    shown = [axes.get_xlabel() for axes in figure.axes]
    assert shown == ["tokens per second", "speed-up over the first rung"]


def test_where_no_datasheet_tells_a_peak_the_panel_shows_the_share_of_the_limit_by_measured_rates() -> None:
    derived = measurement(100.0, peak_flops_kind="derived")
    square = Matmul(name="square", number_format="float32", m=1024, k=4096, n=4096, flops_per_second=1e12)
    rates = Ceiling(chip="c", threads=None, matmuls=[square], copy_bytes_per_second=1e9, seconds=1.0)
    ceiling = record("ceiling", 0, kind="ceiling", toggles=CUDA, measurement=None, ceiling=rates)
    figure = panels(scoreboard([record(measurement=derived), ceiling]))
    assert figure is not None
    assert "% of the limit" in [axes.get_xlabel() for axes in figure.axes]
    assert "MFU" not in words(figure)


def test_a_climb_s_title_says_how_far_it_came_where_and_what_gave_most() -> None:
    assert "4.00x on 1 x quick: half gave most" in words(climb(climbed()[1]))
    assert "100 tokens/s on 1 x quick" in words(panels(ladder(("base", CUDA, 100.0), chip="quick")))


def test_losses_that_coincide_are_lines_of_unlike_widths_and_other_steps_are_dashed() -> None:
    other = measurement(500.0, tokens_per_step=4096)
    larger = record("larger", 2, toggles=FUSED, measurement=other)
    figure = losses_by_step(scoreboard([record(), record("same", 1, toggles=FUSED), larger]))
    assert figure is not None
    lines = figure.axes[0].lines
    assert [round(line.get_linewidth(), 2) for line in lines] == [3.97, 2.63, 1.3]
    assert [line.get_linestyle() for line in lines] == ["-", "-", "--"]
    assert "larger (4,096 tokens per step)" in words(figure)


def test_a_run_without_a_loss_curve_has_no_picture_of_it() -> None:
    assert losses_by_step(scoreboard([record(measurement=measurement(losses=[5.0]))])) is None


def test_the_axis_ends_where_the_words_beside_the_last_mark_do() -> None:
    axes = Figure(figsize=(8, 3)).add_subplot()
    fit_log_axis(axes, 100.0, [(1000.0, "1,000, 10.00x, faster")])
    short = axes.get_xlim()[1]
    fit_log_axis(axes, 100.0, [(1000.0, "1,000")])
    assert 1000 < axes.get_xlim()[1] < short < 3000


def other_maths() -> Scoreboard:
    """A first rung, a faster one, and one of other maths, faster still."""
    half = replace(CUDA, autocast="bfloat16")
    residual = replace(half, residual="bfloat16")
    return scoreboard(records_of(("first", CUDA, 1e3), ("half", half, 2e3), ("residual", residual, 9e3)))


def test_the_climb_ends_with_the_last_rung_of_equal_maths_and_marks_the_others() -> None:
    said = words(climb(other_maths()))
    assert "2.00x on 1 x NVIDIA H100 80GB HBM3, from first to half" in said
    assert "9,000, 4.50x, other maths" in said


def test_the_last_rung_of_a_climb_is_one_whose_speed_ranks() -> None:
    late = record("late", 2, toggles=replace(CUDA, adamw="fused"), measurement=measurement(9e3, recompiles=1))
    board = scoreboard([*other_maths().records[:2], late])
    assert "2.00x on 1 x NVIDIA H100 80GB HBM3, from first to half" in words(climb(board))


def test_where_all_is_of_other_maths_nothing_is_called_the_fastest() -> None:
    narrow = replace(CUDA, autocast="bfloat16", residual="bfloat16")
    found = scoreboard([record("a", toggles=narrow), record("b", 1, toggles=replace(narrow, adamw="fused"))])
    figure = climb(found)
    assert "No rung is sound" in words(figure)


@pytest.mark.parametrize(("limit", "drawn"), [(700.0, True), (90_000.0, False)])
def test_a_limit_far_beyond_the_bars_is_told_and_not_drawn(
    limit: float, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bars of 100 to 400 tokens/s would be slivers."""
    monkeypatch.setattr("bench.report.plots.rungs.limit_tps", lambda *_: limit)
    figure = climb(climbed()[1])
    assert figure is not None
    (axes,) = figure.axes
    assert bool(axes.get_xlim()[1] >= limit) is drawn
    assert axes.get_xlim()[1] < 2000
    assert f"limit {limit:,.0f}" in words(figure)


def test_a_sweep_does_not_climb_from_candidate_to_candidate() -> None:
    sizes = [(f"b{n}", replace(CUDA, micro_batch_size=1 + n), 1e3) for n in range(3)]
    found = scoreboard(records_of(*sizes, kind="sweep"))
    assert climb(found) is None
    assert panels(found) is not None


def test_no_name_is_a_formula_and_no_control_character_reaches_a_picture(tmp_path: Path) -> None:
    name = "a $\\frac{1$ rung\x1b[31m\x00"
    machine = MACHINE.model_copy(update={"chip": name, "torch": name})
    where: dict[str, Any] = {"ladder": name, "environment": machine}
    board = scoreboard([record(name, **where), record(f"{name}2", 1, measurement=measurement(2e3), **where)])
    for file in draw([board], tmp_path):
        if file.suffix == ".svg":
            text = file.read_text()
            ElementTree.fromstring(text)
            assert "\x1b" not in text
    assert any(r"$\frac{1$" in file.read_text() for file in tmp_path.rglob("*.svg"))


NAMES = {
    "Chinese": "基线 快速注意力",
    "Arabic": "خط الأساس",
    "Devanagari": "आधार रेखा",
    "emoji": "fast 🚀🔥",
    "family": "👩\u200d💻 rung",
    "mathtext": r"$\frac{1}{0$ ^_{",
    "an underscore": "_first",
    "a table's bars": "a | b || `c` *d* _e_ [f](g)",
    "markup": "<b>&amp;</b><!-- --><script>alert(1)</script>",
    "escapes": "\x1b[31mred\x1b[0m\x07\x00\u202e",
    "lines": "one\ntwo\r\nthree\u2028four",
    "braces": "{0} %s {x}",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_rungs_and_ladders_of_any_name_are_drawn_without_a_warning(tmp_path: Path) -> None:
    names = list(NAMES.values())
    rungs = [(name, replace(CUDA, micro_batch_size=1 + n), 1e3) for n, name in enumerate(names)]
    runs = [
        scoreboard(records_of(*rungs, rounds=3, ladder=" ".join(names[at:]))) for at in (0, len(names) // 2)
    ]
    files = draw(runs, tmp_path)
    for file in files:
        if file.suffix == ".svg":
            ElementTree.parse(file)
    climbed = next(file for file in files if file.name.endswith("-climb.svg"))
    shown = "".join(ElementTree.parse(climbed).getroot().itertext())
    for kind in ("Chinese", "Arabic", "Devanagari", "emoji", "mathtext", "an underscore", "braces"):
        assert NAMES[kind].split()[0] in shown


@pytest.mark.parametrize("kind", NAMES)
def test_a_rung_of_any_name_stands_in_the_tables_and_on_the_page(kind: str) -> None:
    rungs = (NAMES[kind], CUDA, 1e3), (f"{NAMES[kind]} 2", replace(CUDA, micro_batch_size=2), 2e3)
    run = scoreboard(records_of(*rungs, rounds=3, ladder=NAMES[kind]))
    table = to_markdown(run)
    rows = table.split("\n\n")[1].splitlines()
    assert len(rows) == 4
    assert len({line.replace(r"\|", "").count("|") for line in rows}) == 1
    assert "\x1b" not in table
    assert "<script>" not in table
    assert "\x1b" not in (shown := page(assemble([run])))
    assert "<script>alert" not in shown


def test_a_legend_has_a_rung_whose_name_begins_with_an_underscore(tmp_path: Path) -> None:
    board = scoreboard(records_of(("_first", CUDA, 1e3), ("_second", CUDA, 1.5e3)))
    (file,) = (file for file in draw([board], tmp_path) if file.name.endswith("-loss-by-step.svg"))
    text = "".join(ElementTree.parse(file).getroot().itertext())
    assert "_first" in text
    assert "_second" in text


def test_a_clipping_rectangle_s_last_bits_do_not_change_a_picture() -> None:
    from bench.report.plots.style import _same_clips

    drawn = '<clipPath id="{0}"/><clipPath id="{1}"/><path clip-path="url(#{1})"/><use href="#m0123456789"/>'
    first, second = (
        _same_clips(drawn.format(*names))
        for names in (("p0123456789", "pabcdef0123"), ("p" + "1" * 10, "p" + "2" * 10))
    )
    assert first == second
    assert len(set(re.findall(r"p[0-9a-f]{10}-\d", first))) == 2
    assert "#m0123456789" in first

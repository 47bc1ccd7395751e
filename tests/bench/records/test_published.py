"""Figures of others: what is committed was published, and tables never mix it with ours unlabelled."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import REAL, ROOT
from samples import append, record

from bench.analysis.scoreboard import scoreboard
from bench.analysis.select import load_boards, load_published
from bench.records.published import Published, is_published, read_published
from bench.records.record import RecordError
from bench.report.published import beside, tables
from gpt2.config.toggles import Toggles

FOLDER = ROOT / "results" / "published"
POST = read_published(FOLDER / "jjschwartz-2024.jsonl")
LADDER = [figure for figure in POST if figure.series == "ladder"]


@pytest.mark.parametrize("figure", LADDER, ids=lambda figure: figure.rung)
def test_the_post_s_speed_ups_follow_from_its_tokens_per_second(figure: Published) -> None:
    assert figure.tps is not None
    assert LADDER[0].tps is not None
    assert figure.tps / LADDER[0].tps == pytest.approx(figure.speedup, abs=0.01)


@pytest.mark.parametrize(
    "figure", [f for f in POST if f.mfu], ids=lambda figure: f"{figure.series} {figure.rung}"
)
def test_the_post_s_mfu_follows_from_its_formula(figure: Published) -> None:
    for number_format, stated in figure.mfu.items():
        found = figure.recomputed_mfu(number_format)
        if found is None:
            assert figure.series == "full run"  # of which it states neither formula nor peak
            continue
        rounded = 0.5 if stated in (0.30,) else 0.01  # one is stated as 30 %
        assert 100 * found == pytest.approx(100 * stated, abs=rounded)


def test_a_file_that_is_named_twice_counts_once() -> None:
    assert load_published([FOLDER, FOLDER / ".." / FOLDER.name])[0] == load_published([FOLDER])[0]


def test_the_committed_figures_are_those_of_the_reference() -> None:
    reference = REAL.parent / "reference" / "published.yaml"
    if not reference.is_file():
        pytest.skip("the reference figures are not at hand")
    figures, warnings = load_published([FOLDER])
    assert warnings == []
    for source in yaml.safe_load(reference.read_text())["sources"]:
        ours = [figure for figure in figures if figure.source == source["source"]]
        stated = [*source.get("rungs", ()), *source.get("batch_sweep", ()), *source.get("apart", ())]
        for row in [*stated, *source.get("ddp_scaling", ())]:
            alike = [f for f in ours if f.tps == row.get("tps") and f.rung == row.get("rung", f.rung)]
            assert alike, row
            if "mem_mib" in row:
                assert alike[0].memory_bytes == row["mem_mib"] * 2**20
            if "step_ms" in row:
                assert alike[0].step_seconds == pytest.approx(row["step_ms"] / 1e3)


def test_each_series_is_a_table_of_its_own_that_says_it_was_published() -> None:
    found = tables(POST)
    assert len(found) == len({figure.series for figure in POST})
    assert all(table.title.startswith("Published: jjschwartz-2024") for table in found)
    assert all("not measured by this code" in table.notes[0] for table in found)


def test_speeds_of_two_models_in_one_published_table_make_no_ratio() -> None:
    (table,) = [each for each in tables(POST) if each.title == "Published: jjschwartz-2024, full run"]
    found = [[row[table.head.index(title)] for title in ("Model", "Speed-up")] for row in table.cells]
    assert found == [["gpt2", "-"], ["gpt2-xl", "-"], ["gpt2", "-"]]


def test_efficiency_is_told_within_a_scaling_series_only() -> None:
    for table in tables(POST):
        place = table.head.index("Efficiency")
        cells = {row[place] for row in table.cells}
        assert (cells != {"-"}) == ("scaling" in table.title)


def test_a_run_is_shown_beside_published_rungs_of_the_same_name_and_model(tmp_path: Path) -> None:
    board = scoreboard([record("bfloat16"), record("what nobody published", 1)])
    found = beside(board, POST)
    assert found is not None
    assert [row[:4] for row in found.cells] == [["bfloat16", "1,000", "42,871", "H100 SXM"]]
    assert "They rank nothing here" in found.notes[0]
    assert beside(scoreboard([record("bfloat16", toggles=Toggles())]), POST) is None  # on a CPU
    assert beside(scoreboard([record("what nobody published")]), POST) is None


def test_folders_of_results_may_hold_both_kinds_of_file(tmp_path: Path) -> None:
    append(tmp_path / "ours.jsonl", record())
    (tmp_path / "theirs.jsonl").write_text((FOLDER / "llm.c.jsonl").read_text())
    assert is_published(tmp_path / "theirs.jsonl")
    assert not is_published(tmp_path / "ours.jsonl")
    boards, warnings = load_boards([tmp_path])
    assert (len(boards), warnings) == (1, [])
    assert {figure.source for figure in load_published([tmp_path])[0]} == {"llm.c"}


def theirs(file: Path, **changes: Any) -> Path:
    """A file of two figures, with changes to the second."""
    figure: dict[str, Any] = {"schema": 1, "kind": "published", "source": "x", "series": "ladder"}
    figure |= {"rung": "a", "model": "gpt2"}
    figure |= {"tps": 1000.0, "devices": 1, "flops_per_token": 1000, "peak_flops": {"bfloat16": 1e12}}
    lines = [json.dumps(each, ensure_ascii=False) + "\n" for each in (figure, {**figure, **changes})]
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("tps", "many"),
        ("tps", -5),
        ("tps", math.nan),
        ("tps", math.inf),
        ("devices", 0),
        ("flops_per_token", -1),
        ("peak_flops", {"bfloat16": 0.0}),
        ("memory_bytes", 0),
        ("minutes", math.nan),
    ],
)
def test_a_figure_that_cannot_be_is_one_clear_error(field: str, wrong: object, tmp_path: Path) -> None:
    file = theirs(tmp_path / "theirs.jsonl", **{field: wrong})
    with pytest.raises(RecordError, match=rf"theirs.jsonl:2: no published figure of schema 1: {field}"):
        load_published([file])


def test_a_last_figure_that_is_cut_off_is_left_out_with_a_warning(tmp_path: Path) -> None:
    file = theirs(tmp_path / "theirs.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    figures, warnings = load_published([file])
    assert (len(figures), warnings) == (1, [f"{file}: the last line is cut off and was left out"])


def test_a_line_separator_within_a_text_ends_no_line(tmp_path: Path) -> None:
    file = theirs(tmp_path / "theirs.jsonl", note="one\u2028two")
    assert [figure.note for figure in read_published(file)] == [None, "one\u2028two"]

"""Pictures: that they are drawn, say where they are from, and show what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from samples import measurement, record

from bench.report.plots import draw
from bench.report.scoreboard import scoreboard
from gpt2.toggles import Toggles

CUDA = Toggles(device="cuda")


def board(**changes: object):
    rungs = [
        ("first", CUDA, 1000.0),
        (
            "$x$ <script>alert(1)</script> & a name that is much too long for an axis",
            replace(CUDA, adamw="fused"),
            1500.0,
        ),
        ("wide", replace(CUDA, adamw="fused", micro_batch_size=4), 1400.0),
        ("two", replace(CUDA, adamw="fused", micro_batch_size=4, world_size=2), 2600.0),
    ]
    records = [
        record(name, n, r, toggles=toggles, measurement=measurement(tps * (1 + r / 100)), **changes)  # type: ignore[arg-type]
        for n, (name, toggles, tps) in enumerate(rungs)
        for r in (1, 2, 3)
    ]
    huge = replace(CUDA, adamw="fused", micro_batch_size=64)
    return scoreboard([*records, record("huge", 4, toggles=huge, status="out_of_memory", error="no room")])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {file.name: file for file in draw([board()], tmp_path_factory.mktemp("reports"))}


def test_every_picture_is_drawn_as_png_and_svg_on_light_and_on_dark_paper(drawn: dict[str, Path]) -> None:
    stems = {re.sub(r"(-dark)?\.(png|svg)$", "", name) for name in drawn}
    assert {f"{stem}{paper}.{kind}" for stem in stems for paper in ("", "-dark") for kind in ("png", "svg")} == set(
        drawn
    )
    assert {stem.rpartition("h100-")[2] for stem in stems} >= {"climb", "rungs", "batch", "world-size", "block-times"}


def test_a_picture_says_model_machine_torch_and_rounds(drawn: dict[str, Path]) -> None:
    for name, file in drawn.items():
        if name.endswith(".svg"):
            text = file.read_text()
            assert all(word in text for word in ("gpt2", "h100", "torch 2.11.0", "3 rounds")), name


def test_no_text_of_a_results_file_becomes_markup_or_a_formula(drawn: dict[str, Path]) -> None:
    text = next(file for name, file in drawn.items() if name.endswith("climb.svg")).read_text()
    assert "<script" not in text
    assert "$x$ &lt;script" in text


def test_what_ran_out_of_memory_is_marked(drawn: dict[str, Path]) -> None:
    for what in ("climb", "rungs", "batch"):
        assert "OOM" in next(file for name, file in drawn.items() if name.endswith(f"{what}.svg")).read_text()


def test_the_same_results_give_the_same_files(drawn: dict[str, Path], tmp_path: Path) -> None:
    for file in draw([board()], tmp_path):
        assert file.read_bytes() == drawn[file.name].read_bytes()


def test_a_run_of_one_rung_draws_what_it_has(tmp_path: Path) -> None:
    names = [file.name for file in draw([scoreboard([record()])], tmp_path)]
    assert any("rungs" in name for name in names)
    assert not any("climb" in name or "world-size" in name or "batch" in name for name in names)

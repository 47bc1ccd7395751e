"""Pictures: that they are drawn, say where they are from, and show what there is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from samples import measurement, record

from bench.machine import Ceiling, Matmul
from bench.report.plots import draw
from bench.report.plots.alike import by_batch
from bench.report.plots.memory import device_gib, fitted, memory_by_batch
from bench.report.plots.roofline import roofline
from bench.report.plots.scaling import batch_sizes, world_sizes
from bench.report.scoreboard import Scoreboard, scoreboard
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


def marks(figure: Figure | None, label: str, panel: int = 0) -> list[tuple[float, float]]:
    """The points of what a panel's legend calls `label`."""
    assert figure is not None
    (line,) = [line for line in figure.axes[panel].lines if line.get_label() == label]
    return [(float(x), float(y)) for x, y in line.get_xydata()]  # type: ignore[union-attr]


def words(figure: Figure | None) -> str:
    """All that a picture says."""
    assert figure is not None
    return " ".join(each.get_text() for each in figure.findobj(Text) if isinstance(each, Text))


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


# --- against the measured ceiling -----------------------------------------------------------------------------------


def with_ceiling() -> Scoreboard:
    """One TFLOP/s in float32 and one GB/s: the least time of a step is 4,769 ms (see test_roofline)."""
    square = Matmul(name="square", number_format="float32", m=1024, k=4096, n=4096, flops_per_second=1e12)
    measured = Ceiling(chip="c", threads=None, matmuls=[square], copy_bytes_per_second=1e9, seconds=1.0)
    ceiling = record("ceiling", -1, kind="control", toggles=CUDA, measurement=None, ceiling=measured)
    half = record("half", 1, toggles=replace(CUDA, autocast="bfloat16"))
    return scoreboard([record(measurement=measurement(100.0)), half, record("huge", 2, status="failed"), ceiling])


def test_a_rung_stands_beside_the_most_that_the_measured_ceiling_allows() -> None:
    figure = roofline(with_ceiling())
    least_ms = 6 * 1024 * 123_532_032 / 1e9 + 3 * 4 * 12 * 768 * 1024 * 512.5 / 1e9 + 32 * 124_439_808 / 1e6
    ((most, place),) = marks(figure, "bound")
    assert (most, place) == (pytest.approx(1e3 * 1024 / least_ms), 0.0)
    assert marks(figure, "measured") == [(pytest.approx(100.0), 0.0)]
    assert f"100: {100 / most:.0%} of {most:.0f}" in words(figure)


def test_a_rung_whose_format_has_no_measured_ceiling_says_so() -> None:
    said = words(roofline(with_ceiling()))
    assert "1,000; no ceiling measured" in said
    assert "no ceiling for bfloat16: not measured" in said


def test_without_a_ceiling_there_is_no_roofline() -> None:
    assert roofline(board()) is None


# --- by batch and by devices ----------------------------------------------------------------------------------------


def sweep(*formats: Any, gib: dict[int, float | None]) -> Scoreboard:
    """A rung for each format and batch size, which peaks at so many GiB or, at None, finds no room."""
    records = []
    for number_format in formats:
        for batch, peak in gib.items():
            toggles = replace(CUDA, autocast=number_format, micro_batch_size=batch)
            if peak is None:
                ended: dict[str, Any] = {"status": "out_of_memory", "error": "no room"}
            else:
                ended = {"measurement": measurement(100.0 * batch, peak_memory_bytes=int(peak * 2**30))}
            records.append(record(f"{number_format} {batch}", len(records), toggles=toggles, **ended))
    return scoreboard(records)


def test_the_line_through_peaks_says_what_a_sequence_takes_and_where_memory_ends() -> None:
    figure = memory_by_batch(sweep("float32", gib={1: 5.0, 2: 8.0, 4: 14.0, 32: None}))
    said = words(figure)
    assert "3,072 MiB per sequence + 2.00 GiB (fit of 3 sizes)" in said
    assert "by the line 27 is the first beyond 80.0 GiB; first OOM at 32" in said
    assert marks(figure, "_line") == [(1.0, pytest.approx(5.0)), (26.0, pytest.approx(80.0))]
    assert marks(figure, "_meets") == [(26.0, pytest.approx(80.0))]
    assert marks(figure, "_ended") == [(32.0, 80.0)]


def test_the_line_is_that_of_least_squares() -> None:
    line = fitted([(1, 1.0), (2, 3.0), (3, 2.0)])
    assert (line.each, line.fixed) == (pytest.approx(0.5), pytest.approx(1.0))


def test_two_sizes_make_no_fit_and_predict_nothing() -> None:
    figure = memory_by_batch(sweep("float32", gib={1: 5.0, 2: 8.0, 32: None}))
    assert "(2 sizes: no fit); OOM at 32" in words(figure)
    assert "first beyond" not in words(figure)
    assert figure is not None
    assert "--" in [line.get_linestyle() for line in figure.axes[0].lines if line.get_label() == "_line"]


def test_ranks_on_a_cpu_may_fill_their_part_of_its_memory_each() -> None:
    found = sweep("float32", gib={1: 5.0})
    assert device_gib(found, CUDA) == 80.0
    assert device_gib(found, Toggles(device="cpu")) == 64.0
    assert device_gib(found, Toggles(device="cpu", world_size=4)) == 16.0


def test_a_sweep_of_two_toggles_has_a_line_for_each_value_of_the_other() -> None:
    figure = batch_sizes(sweep("float32", "bfloat16", gib={1: 5.0, 4: 14.0, 32: None}))
    assert figure is not None
    lines = [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_label() == "_line"]  # type: ignore[union-attr]
    assert lines == [[[1, pytest.approx(100)], [4, pytest.approx(400)]]] * 2
    assert {"autocast=float32", "autocast=bfloat16"} <= set(words(figure).split())
    assert words(figure).count("OOM") == 2 * 3


def test_of_many_lines_those_of_most_rungs_are_drawn() -> None:
    records = []
    for batches, (attention, number_format) in enumerate(
        product(("explicit", "sdpa", "math", "efficient"), ("float32", "bfloat16")), start=1
    ):
        for batch in range(1, batches + 1):
            changes: dict[str, Any] = {"attention": attention, "autocast": number_format, "micro_batch_size": batch}
            records.append(record(f"{len(records)}", len(records), toggles=replace(CUDA, **changes)))
    groups = by_batch(scoreboard(records))
    assert [len(group.rows) for group in groups] == [3, 4, 5, 6, 7, 8]


def test_each_sharding_is_a_line_that_begins_with_one_device() -> None:
    rungs: list[dict[str, Any]] = [
        {"world_size": 1},
        {"world_size": 2},
        {"world_size": 4},
        {"world_size": 2, "sharding": "zero1"},
    ]
    records = [
        record(f"{n}", n, toggles=replace(CUDA, **changes), measurement=measurement(1000.0 * (n + 1)))
        for n, changes in enumerate(rungs)
    ]
    figure = world_sizes(scoreboard(records))
    assert figure is not None
    lines = [line.get_xydata().tolist() for line in figure.axes[0].lines if line.get_label() == "_line"]  # type: ignore[union-attr]
    assert [[size for size, _ in line] for line in lines] == [[1, 2, 4], [1, 2]]
    assert lines[1][1][1] == pytest.approx(4000)
    assert {"sharding=none", "sharding=zero1"} <= set(words(figure).split())

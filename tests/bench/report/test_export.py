"""All figures unrounded, for other programs."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields, replace

import pytest
from samples import measurement, record

from bench.analysis.scoreboard import scoreboard
from bench.report.export import to_csv, to_json
from gpt2.config.toggles import Toggles

CUDA = Toggles(device="cuda")
FULL = {"toggles": replace(CUDA, micro_batch_size=512), "status": "out_of_memory", "error": "no room\nmore"}
BOARD = scoreboard([record("a", 0, measurement=measurement(1000.0 / 3)), record("b", 1, 1, **FULL)])


def test_csv_has_a_line_for_each_rung_and_empty_cells_for_what_is_absent() -> None:
    first, second = csv.DictReader(io.StringIO(to_csv([BOARD])))
    assert float(first["tps"]) == pytest.approx(1000.0 / 3, rel=1e-12)
    found = [second[key] for key in ("rung", "status", "error", "tps")]
    assert found == ["b", "out_of_memory", "no room", ""]
    assert second["toggles.micro_batch_size"] == "512"


def test_the_columns_of_toggles_are_the_toggles_and_nothing_else() -> None:
    (first, *_) = csv.DictReader(io.StringIO(to_csv([BOARD])))
    found = [name.removeprefix("toggles.") for name in first if name.startswith("toggles.")]
    assert found == [toggle.name for toggle in fields(Toggles)]


def test_a_rung_that_may_not_be_called_the_fastest_says_why() -> None:
    residual = record("r", 1, toggles=replace(CUDA, residual="bfloat16"), measurement=measurement(9e3))
    first, second = json.loads(to_json([scoreboard([record(), residual])]))
    assert (first["maths"], first["caveats"]) == ("equal", None)
    said = "residual=bfloat16 changes the maths: each layer's sum is rounded to bfloat16"
    assert second["caveats"] == second["maths"] == said


def test_json_has_null_for_what_is_absent() -> None:
    first, second = json.loads(to_json([BOARD]))
    assert first["speedup"] == 1.0
    assert second["tps"] is second["peak_memory_bytes"] is None
    assert first["tps_low"] is None  # one round

"""Records of earlier versions had facts within texts alone: they are read as those of today."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from samples import append, measurement, record

from bench.analysis.warnings import disturbances
from bench.records.older import translated
from bench.records.record import Record, read

NEW = ("interrupted_late", "not_begun", "other_work_cores")
MEASURED_NEW = ("stood_still", "peak_flops_kind")


def older(measured: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A results line from before its texts' facts were fields; measured: changes to its measurement."""
    line = json.loads(record().model_dump_json(by_alias=True))
    for name in NEW:
        del line[name]
    for name in MEASURED_NEW:
        del line["measurement"][name]
    line["measurement"] |= measured or {}
    return {**line, **changes}


def read_back(line: dict[str, Any], tmp_path: Path) -> Record:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(line) + "\n")
    ((found,), warnings) = read(path)
    assert warnings == []
    return found


def committed() -> Iterator[tuple[dict[str, Any], Record]]:
    """Each committed record as it lies in its file, and as it is read."""
    for path in sorted((ROOT / "results").glob("*/*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if '"rung_index"' in lines[0]:
            yield from zip(map(json.loads, lines), read(path)[0], strict=True)


def test_every_committed_record_keeps_all_that_its_texts_said() -> None:
    seen = set()
    for line, found in committed():
        if "other_work_cores" in line:  # of today's form, whose texts hold no facts
            assert found.warnings == line["warnings"]
            assert found.other_work_cores == line["other_work_cores"]
            continue
        assert sorted([*disturbances(found), *found.warnings]) == sorted(line["warnings"])
        assert found.disturbed == any(
            each.startswith(("other work", "stood still")) for each in line["warnings"]
        )
        assert found.begun == (not (line["error"] or "").startswith("not begun"))
        assert (found.kind == "ceiling") == (line["rung_index"] < 0)
        if found.measurement:
            derived = found.measurement.peak_flops_source.startswith("derived")
            assert (found.measurement.peak_flops_kind == "derived") == derived
        seen |= {
            found.kind,
            *(["disturbed"] if found.disturbed else []),
            *([] if found.begun else ["not begun"]),
        }
    assert seen >= {"cumulative", "control", "ceiling", "external", "sweep", "disturbed", "not begun"}


def test_a_standstill_is_what_its_warning_said(tmp_path: Path) -> None:
    said = (
        "stood still: in the window the process did, for about 5.0 s in 1 of 6 blocks of rank 2: the machine "
        "slept, and its clocks and caches were cold; measure again"
    )
    found = read_back(older(warnings=[said, "steal time: 3.0%"]), tmp_path)
    assert found.disturbed
    assert (disturbances(found), found.warnings) == ([said], ["steal time: 3.0%"])


def test_a_process_that_the_user_ended_before_its_proofs_is_cut_short(tmp_path: Path) -> None:
    unproved = {"proofs": None}
    assert read_back(older(unproved, warnings=["after the window: interrupted"]), tmp_path).cut_short
    assert not read_back(older(unproved, warnings=["after the window: exit code 1"]), tmp_path).cut_short


def test_a_sweep_s_time_that_was_over_is_why_a_process_did_not_begin(tmp_path: Path) -> None:
    ended = older(status="interrupted", error="not begun: --budget ended the sweep", measurement=None)
    assert read_back(ended, tmp_path).not_begun == "--budget ended the sweep"
    assert read_back(older(status="interrupted", error="by the user", measurement=None), tmp_path).begun


@pytest.mark.parametrize(("index", "place"), [(-1, 0), (-2, 1)])
def test_a_control_of_a_negative_index_is_a_ceiling(index: int, place: int, tmp_path: Path) -> None:
    found = read_back(older(kind="control", rung="ceiling", rung_index=index, measurement=None), tmp_path)
    assert (found.kind, found.rung_index) == ("ceiling", place)


@pytest.mark.parametrize(
    ("source", "peak", "kind"),
    [
        ("derived: 2 cores x 3 GHz", None, "derived"),
        ("given with --peak-tflops", 1e12, "given"),
        ("H100 SXM: NVIDIA H100 datasheet, dense", 1e12, "datasheet"),
        ("no published peak is known for x; bench run --peak-tflops gives one", None, None),
    ],
)
def test_a_peak_is_of_the_kind_that_its_source_said(
    source: str, peak: float | None, kind: str | None, tmp_path: Path
) -> None:
    found = read_back(older({"peak_flops_source": source, "peak_flops_bf16": peak}), tmp_path).measurement
    assert found is not None
    assert found.peak_flops_kind == kind


def test_no_text_of_a_newer_record_is_read(tmp_path: Path) -> None:
    said = ["other work: others keep 0.50 cores busy; stop other programs", "after the window: interrupted"]
    newer = record(warnings=said, measurement=measurement(proofs=None, peak_flops_source="derived"))
    append(tmp_path / "r.jsonl", newer)
    ((found,), _) = read(tmp_path / "r.jsonl")
    assert found == newer
    assert not found.disturbed
    assert not found.cut_short


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"warnings": 1}', '{"warnings": [1]}', "[" * 10**5])
def test_a_line_that_is_no_record_stays_as_it_is(line: str) -> None:
    assert translated(line) == line

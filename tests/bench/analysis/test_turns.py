"""What other trainers did in turn with ours, read from the files of bench turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from samples import MACHINE

from bench.analysis.turns import load_turns

NANOGPT, OURS = "nanoGPT compiled", "ours"


def estimate(value: float, *, width: float = 1.1) -> dict[str, Any]:
    return {"value": value, "low": value / width, "high": value * width, "rounds": 3}


def pair(rung: str = NANOGPT, *, over: str = OURS, ratio: float = 0.5, **changes: Any) -> dict[str, Any]:
    found = {"rung": rung, "over": over, "tokens_per_second": estimate(100.0), "ratio": estimate(ratio)}
    found |= {"over_tokens_per_second": estimate(200.0), "starts": [], "verdict": "slower"}
    return {key: value for key, value in {**found, **changes}.items() if value is not ...}


def write(
    path: Path,
    *pairs: dict[str, Any],
    time: str = "2026-11-25T00:00:00+00:00",
    workload: dict[str, Any] | None = None,
) -> Path:
    group = {"pairs": pairs, "noise_floor": 0.02, "versions": {NANOGPT: "3adf61e"}}
    environment = MACHINE.model_dump(mode="json")
    found = {
        "ladder": "peers",
        "time": time,
        "environment": environment,
        "groups": [group],
        "workload": workload,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found), encoding="utf-8")
    return path


def test_the_ratio_is_turned_to_ours_over_the_trainer_and_the_verdict_with_it(tmp_path: Path) -> None:
    write(tmp_path / "turns-peers-1.json", pair(ratio=0.5))
    (found,), warnings = load_turns([tmp_path])
    assert warnings == []
    assert found.ratio.value == pytest.approx(2.0)
    assert (found.ratio.low, found.ratio.high) == (pytest.approx(2 / 1.1), pytest.approx(2 * 1.1))
    assert (found.trainer, found.ours, found.verdict) == (NANOGPT, OURS, "faster")


@pytest.mark.parametrize("other", ["ours (again)", "our other rung"])
def test_rungs_of_our_own_are_no_other_trainers(other: str, tmp_path: Path) -> None:
    write(tmp_path / "turns-peers-1.json", pair(), pair(other))
    found, _ = load_turns([tmp_path])
    assert [each.trainer for each in found] == [NANOGPT]


def test_of_two_results_of_a_trainer_the_newest_is_taken_whatever_the_files_names(tmp_path: Path) -> None:
    write(tmp_path / "turns-a.json", pair(ratio=0.25), time="2026-11-26T00:00:00+00:00")
    write(tmp_path / "turns-b.json", pair(ratio=0.5), time="2026-11-25T00:00:00+00:00")
    (found,), _ = load_turns([tmp_path])
    assert found.ratio.value == pytest.approx(4.0)


def test_results_of_another_model_stand_beside_those_of_the_first(tmp_path: Path) -> None:
    write(tmp_path / "turns-a.json", pair(), workload={"model": "gpt2", "seq_len": 1024})
    write(tmp_path / "turns-b.json", pair(), workload={"model": "gpt2-medium", "seq_len": 1024})
    found, _ = load_turns([tmp_path])
    assert {each.task for each in found} == {("gpt2", 1024), ("gpt2-medium", 1024)}


def test_intervals_over_turns_of_one_start_support_no_verdict(tmp_path: Path) -> None:
    """Files of earlier versions have no starts."""
    write(tmp_path / "turns-peers-1.json", pair(starts=...))
    (found,), _ = load_turns([tmp_path])
    assert found.verdict == "not replicated"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("[]", "the file: Input should be a dictionary"),
        ('{"ladder": "peers"}', "time: Field required"),
        ("\xff", "can't decode byte"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "turns-sound.json", pair())
    (tmp_path / "turns-torn.json").write_text(text, encoding="latin-1")
    found, (warning,) = load_turns([tmp_path])
    assert len(found) == 1
    assert warning.startswith(f"{tmp_path / 'turns-torn.json'}: is no file of bench turns (")
    assert said in warning


def test_committed_files_of_bench_turns_are_all_read() -> None:
    found, warnings = load_turns([ROOT / "results"])
    assert warnings == []
    of_zen_5 = {t.trainer: t.ratio for t in found if t.environment.machine == "amd-epyc-26-2-1-x2"}
    assert of_zen_5["nanoGPT float32 compiled"].value == pytest.approx(4.17, abs=0.005)

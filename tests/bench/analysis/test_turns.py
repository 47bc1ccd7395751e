"""What other trainers did in turn with ours, read from the files of bench turns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from samples import MACHINE

from bench.analysis.turns import load_turns

NANOGPT, OURS = "nanoGPT compiled", "ours"
NOON = "2026-11-25T12:00:00+00:00"


def figure(value: float, *, width: float = 1.1) -> dict[str, Any]:
    return {"value": value, "low": value / width, "high": value * width, "rounds": 3}


def pair(rung: str = NANOGPT, *, over: str = OURS, ratio: float = 0.5, **changes: Any) -> dict[str, Any]:
    """A result of three starts; `...` leaves a field out."""
    found = {"rung": rung, "over": over, "tokens_per_second": figure(100.0), "ratio": figure(ratio)}
    found |= {"over_tokens_per_second": figure(200.0), "starts": [{}] * 3, "verdict": "slower"}
    return {key: value for key, value in {**found, **changes}.items() if value is not ...}


def write(path: Path, *pairs: dict[str, Any], noise_floor: float = 0.02, **content: Any) -> Path:
    group = {"pairs": pairs, "noise_floor": noise_floor, "versions": {NANOGPT: "3adf61e"}}
    found = {"ladder": "peers", "time": NOON, "environment": MACHINE.model_dump(mode="json")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**found, "groups": [group], **content}), encoding="utf-8")
    return path


def test_the_ratio_is_turned_to_ours_over_the_trainer_and_the_verdict_with_it(tmp_path: Path) -> None:
    write(tmp_path / "turns-peers-1.json", pair(ratio=0.5))
    (found,), warnings = load_turns([tmp_path])
    assert warnings == []
    assert found.ratio.value == pytest.approx(2.0)
    assert (found.ratio.low, found.ratio.high) == (pytest.approx(2 / 1.1), pytest.approx(2 * 1.1))
    assert (found.trainer, found.ours, found.verdict) == (NANOGPT, OURS, "faster")
    assert (found.tokens_per_second.value, found.ours_tokens_per_second.value) == (100.0, 200.0)


def test_a_rung_of_ours_that_follows_a_trainer_is_its_pair_too(tmp_path: Path) -> None:
    write(tmp_path / "turns-peers-1.json", pair(OURS, over=NANOGPT, ratio=0.5))
    (found,), _ = load_turns([tmp_path])
    assert (found.trainer, found.ours, found.verdict, found.ratio.value) == (NANOGPT, OURS, "slower", 0.5)
    assert (found.tokens_per_second.value, found.ours_tokens_per_second.value) == (200.0, 100.0)


@pytest.mark.parametrize(
    "other", [pair("our other rung"), pair(f"{NANOGPT} (again)", over=NANOGPT, verdict=None)]
)
def test_pairs_of_ours_alone_and_a_trainer_beside_itself_are_left_out(
    other: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "turns-peers-1.json", pair(), other)
    found, _ = load_turns([tmp_path])
    assert [(each.trainer, each.ours) for each in found] == [(NANOGPT, OURS)]


@pytest.mark.parametrize("later", ["2026-11-25T12:00:01+00:00", "2026-11-25T11:30:00-05:00"])
def test_of_two_results_of_a_trainer_the_newest_is_taken_whatever_the_files_names(
    later: str, tmp_path: Path
) -> None:
    write(tmp_path / "turns-a.json", pair(ratio=0.25), time=later)
    write(tmp_path / "turns-b.json", pair(ratio=0.5))
    (found,), _ = load_turns([tmp_path])
    assert found.ratio.value == pytest.approx(4.0)


def test_a_newer_result_of_one_start_does_not_stand_in_for_one_of_three(tmp_path: Path) -> None:
    write(tmp_path / "turns-a.json", pair(ratio=0.25))
    newer = pair(ratio=0.5, starts=[{}], verdict="not replicated")
    write(tmp_path / "turns-b.json", newer, time="2026-11-26T12:00:00+00:00")
    (found,), _ = load_turns([tmp_path])
    assert found.ratio.value == pytest.approx(4.0)


@pytest.mark.parametrize("starts", [[{}] * 2, ...])
def test_without_three_starts_there_is_neither_interval_nor_verdict(starts: Any, tmp_path: Path) -> None:
    """Files of earlier versions do not tell the starts, and have verdicts over the turns of one."""
    write(tmp_path / "turns-peers-1.json", pair(starts=starts))
    (found,), _ = load_turns([tmp_path])
    assert (found.verdict, found.noise_floor, found.ratio.low) == ("not replicated", None, None)
    assert found.tokens_per_second.half_width is found.ours_tokens_per_second.half_width is None


def test_results_of_another_model_stand_beside_those_of_the_first(tmp_path: Path) -> None:
    write(tmp_path / "turns-a.json", pair(), workload={"model": "gpt2", "seq_len": 1024})
    write(tmp_path / "turns-b.json", pair(), workload={"model": "gpt2-medium", "seq_len": 1024})
    found, _ = load_turns([tmp_path])
    assert {each.task for each in found} == {("gpt2", 1024), ("gpt2-medium", 1024)}


@pytest.mark.parametrize(
    ("later", "tasks"), [("2026-11-26", {("gpt2", 64)}), ("2026-11-24", {None, ("gpt2", 64)})]
)
def test_a_file_that_does_not_tell_its_model_gives_way_to_a_newer_one_that_does(
    later: str, tasks: set[Any], tmp_path: Path
) -> None:
    write(tmp_path / "turns-a.json", pair())
    task = {"model": "gpt2", "seq_len": 64}
    write(tmp_path / "turns-b.json", pair(), workload=task, time=f"{later}T12:00:00+00:00")
    assert {each.task for each in load_turns([tmp_path])[0]} == tasks


@pytest.mark.parametrize("bad", [0, -2, float("nan"), float("inf"), True, "337"])
@pytest.mark.parametrize("place", ["ratio", "tokens_per_second"])
def test_a_figure_that_no_run_gives_leaves_the_file_out(bad: Any, place: str, tmp_path: Path) -> None:
    of = pair()
    of[place]["value"] = bad
    write(tmp_path / "turns-peers-1.json", of)
    found, (warning,) = load_turns([tmp_path])
    assert found == []
    assert f"is no file of bench turns (groups.0.pairs.0.{place}" in warning


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True])
def test_a_noise_floor_that_no_run_gives_leaves_the_file_out(bad: Any, tmp_path: Path) -> None:
    write(tmp_path / "turns-peers-1.json", pair(), noise_floor=bad)
    found, (warning,) = load_turns([tmp_path])
    assert found == []
    assert "is no file of bench turns (groups.0.noise_floor" in warning


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no file of bench turns (Invalid JSON: EOF"),
        ("[]", "is no file of bench turns (Input should be an object)"),
        ('{"ladder": "peers"}', "is no file of bench turns (time: Field required)"),
        ('{"ladder": "peers", "time": "noon"}', "is no file of bench turns (time: "),
        ("\xff", "is no file of bench turns (Invalid JSON: "),
        ("[" * 100_000, "is no file of bench turns (Invalid JSON: recursion limit"),
        ("", "is empty: bench turns has not ended a round, or was ended before"),
    ],
)
def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "turns-sound.json", pair())
    (tmp_path / "turns-torn.json").write_text(text, encoding="latin-1")
    found, (warning,) = load_turns([tmp_path])
    assert len(found) == 1
    assert warning.startswith(f"{tmp_path / 'turns-torn.json'}: {said}")
    assert warning.endswith("; left out")


def test_a_pipe_among_results_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "turns-pipe.json")
    assert load_turns([tmp_path]) == ([], [])


def test_committed_files_of_bench_turns_are_all_read() -> None:
    found, warnings = load_turns([ROOT / "results"])
    assert warnings == []
    for each in found:
        groups = json.loads(each.source.read_text(encoding="utf-8"))["groups"]
        pairs = {p["rung"]: p for group in groups for p in group["pairs"] if p["over"] == each.ours}
        assert each.ratio.value == pytest.approx(1 / pairs[each.trainer]["ratio"]["value"])

"""Rungs that start from the best that a ladder found on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import process
from samples import MACHINE, append

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder, LadderError, load
from bench.run import suited
from bench.run.command import Options, worker_command
from bench.run.suited import with_best

CLIMB = """name: climb
workload: {model: tiny, data: synthetic, seq_len: 32}
protocol: {repeats: 1}
rungs: [{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}]
"""


@pytest.fixture
def climb(tmp_path: Path) -> Ladder:
    (tmp_path / "climb.yaml").write_text(CLIMB)
    return load(tmp_path / "climb.yaml")


def peers(
    tmp_path: Path, own: str = "{vocab_multiple: 64}", of: str = "climb.yaml", model: str = "tiny"
) -> Path:
    path = tmp_path / "peers.yaml"
    path.write_text(
        f"name: peers\nworkload: {{model: {model}, data: synthetic, seq_len: 32}}\n"
        f"rungs: [{{name: plain, set: {{device: cpu}}}}, {{name: ours, best_of: {of}, set: {own}}}]\n"
    )
    return path


def results(
    climb: Ladder,
    out: Path,
    at: str = "20260101T000000Z",
    chosen: list[str] | None = None,
    **speeds: float,
) -> None:
    """Results of the climb on a machine, by a run of one round; without a speed a rung was not reached.

    chosen: names of the rungs that the user asked for; None for all.
    """
    file = out / MACHINE.machine / f"climb-{at}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    for rung in climb.chosen(chosen or ()):
        if rung.name not in speeds:
            append(
                file,
                process(
                    climb,
                    Task(kind="cumulative", rung=rung, repetition=1),
                    1.0,
                    status="interrupted",
                    measurement=None,
                ),
            )
            return
        task = Task(kind="cumulative", rung=rung, repetition=1)
        append(file, process(climb, task, speeds[rung.name], chosen=chosen))


def test_a_rung_starts_from_the_fastest_rung_that_was_found_here(climb: Ladder, tmp_path: Path) -> None:
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    path = peers(tmp_path)
    ladder, (note,) = with_best(load(path), [], tmp_path / "out", MACHINE)
    ours = ladder.rung("ours")
    assert (ours.toggles.attention, ours.toggles.adamw, ours.toggles.vocab_multiple) == (
        "sdpa",
        "for_loop",
        64,
    )
    assert note.startswith("ours: b, the best of climb here (")


def test_a_worker_is_told_of_it_by_options_that_make_the_same_toggles(climb: Ladder, tmp_path: Path) -> None:
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    path = peers(tmp_path)
    ours = with_best(load(path), [], tmp_path / "out", MACHINE)[0].rung("ours")
    assert load(path, [], {"ours": ours.settings}).rung("ours").toggles == ours.toggles


def test_its_own_changes_go_before_what_was_found(climb: Ladder, tmp_path: Path) -> None:
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    path = peers(tmp_path, own="{attention: blocks}")
    ladder, _ = with_best(load(path), [], tmp_path / "out", MACHINE)
    assert ladder.rung("ours").toggles.attention == "blocks"


def test_without_results_it_takes_all_that_this_machine_supports_and_says_so(
    climb: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suited, "suited", lambda ladders: (load(ladders[0]).carrying(without=["b"]), ["b"]))
    ladder, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", MACHINE)
    assert (ladder.rung("ours").toggles.attention, ladder.rung("ours").toggles.adamw) == ("explicit", "fused")
    assert note == (
        "ours: all of climb that this machine supports, as climb has no whole results here "
        f"(bench run {tmp_path / 'climb.yaml'} makes some)"
    )


def test_results_that_cannot_be_read_are_named_where_others_are_taken(
    climb: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    (file,) = (tmp_path / "out").rglob("climb-*.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:300], *lines[2:], ""]))
    monkeypatch.setattr(suited, "suited", lambda ladders: (load(ladders[0]), []))
    _, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", MACHINE)
    assert "has no whole results here" in note
    assert f"{file}:2: the line is cut off" in note


def test_results_of_some_rungs_only_are_not_taken(
    climb: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they left out may be faster."""
    results(climb, tmp_path / "out", chosen=["a", "b"], a=100, b=300)
    monkeypatch.setattr(suited, "suited", lambda ladders: (load(ladders[0]), []))
    ladder, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", MACHINE)
    assert ladder.rung("ours").toggles.adamw == "fused"
    assert "has no whole results here" in note


def test_results_of_another_machine_or_model_are_not_taken(
    climb: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    monkeypatch.setattr(suited, "suited", lambda ladders: (load(ladders[0]), []))
    other = MACHINE.model_copy(update={"chip": "NVIDIA L4"})
    ladder, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", other)
    assert ladder.rung("ours").toggles.adamw == "fused"
    assert "has no whole results here" in note
    (tmp_path / "out" / MACHINE.machine).rename(tmp_path / "out" / other.machine)  # copied into its folder
    _, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", other)
    assert "has no whole results here" in note


def test_a_ladder_of_another_model_is_refused(climb: Ladder, tmp_path: Path) -> None:
    with pytest.raises(
        LadderError, match=r"rung 'ours': best_of: climb.yaml trains tiny, and workload.model is gpt2"
    ):
        load(peers(tmp_path, model="gpt2"))


def test_a_ladder_that_names_itself_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LadderError, match=r"best_of: peers.yaml is this ladder; name another"):
        load(peers(tmp_path, of="peers.yaml"))
    with pytest.raises(LadderError, match=r"rung 'ours': best_of: there is no ladder nowhere"):
        load(peers(tmp_path, of="nowhere"))


@pytest.mark.slow
def test_this_machine_is_asked_for_what_it_supports() -> None:
    """In a process of its own: a GPU that is not here leaves the ladder of the CPU."""
    found, _ = suited.suited([Path("cpu")])
    assert found.own[0].toggles.device == "cpu"
    assert [rung.name for rung in found.own if rung.again] == []
    assert found.rung("SDPA").toggles.attention == "sdpa"


def test_a_rung_above_it_of_another_best_is_known_to_each_worker(climb: Ladder, tmp_path: Path) -> None:
    """A rung after one that starts from a best keeps it, and its command says with what."""
    results(climb, tmp_path / "out", a=100, b=300, c=200)
    path = peers(tmp_path)
    path.write_text(path.read_text().replace("}]", "}, {name: next, set: {adamw: fused}}]"))
    ladder, _ = with_best(load(path), [], tmp_path / "out", MACHINE)
    command = worker_command(
        ladder, Task(kind="cumulative", rung=ladder.rung("next"), repetition=1), Options()
    )
    pairs = [command[place + 1 : place + 3] for place, word in enumerate(command) if word == "--for"]
    assert ["ours", "toggles.attention=sdpa"] in pairs
    own: dict[str, list[str]] = {}
    for name, setting in pairs:
        own.setdefault(name, []).append(setting)
    assert load(path, [], own).rung("next").toggles == ladder.rung("next").toggles
    assert ladder.rung("next").toggles.attention == "sdpa"


def test_a_run_that_was_broken_off_is_not_taken_for_what_was_found(
    climb: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results(climb, tmp_path / "out", a=100)
    monkeypatch.setattr(suited, "suited", lambda ladders: (load(ladders[0]), []))
    ladder, (note,) = with_best(load(peers(tmp_path)), [], tmp_path / "out", MACHINE)
    assert ladder.rung("ours").toggles.adamw == "fused"
    assert "has no whole results here" in note

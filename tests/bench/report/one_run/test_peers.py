"""Other trainers in reports: rows of their own, beside which ours stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from samples import MACHINE, measurement, record
from shown import to_markdown

from bench.analysis.scoreboard import Scoreboard, scoreboard
from bench.analysis.select import exit_code
from bench.analysis.several_runs.compare import Side, compare
from bench.records.measurement import External
from bench.records.record import Record
from bench.report.export import frame
from bench.report.one_run.peers import peer_results, peers
from bench.report.one_run.tables import tables
from bench.report.plots.rungs import climb
from bench.report.plots.style import svg, theme
from gpt2.config.toggles import Toggles

WITHOUT: dict[str, Any] = {
    **dict.fromkeys(("first_step_seconds", "recompiles", "data_wait_seconds", "peak_flops_bf16", "proofs")),
    **{"grad_norms": [], "losses": [9.0, 8.0, 7.0, 6.0]},
}
"""Of what is looked at from outside."""
FIRST, TOP = Toggles(device="cuda"), Toggles(device="cuda", attention="sdpa")


def peer(tps: float, index: int = 1, repetition: int = 1, *, name: str = "nanoGPT", **changes: Any) -> Record:
    named = External(peer="nanogpt", version="3adf61e (edited)", command="python train.py")
    facts = {
        "kind": "external",
        "external": named,
        "toggles": FIRST,
        "measurement": measurement(tps, **{**WITHOUT, **changes.pop("measured", {})}),
    }
    return record(name, index, repetition, **{**facts, **changes})


def rounds_of(
    *speeds: float,
    ours: float = 2000.0,
    rounds: int = 3,
    first: Toggles = FIRST,
    top: Toggles = TOP,
    **changes: Any,
) -> list[Record]:
    """A baseline, a peer of these speeds by round, and a rung of ours above it."""
    records = []
    for n in range(rounds):
        drift = 1 + 0.001 * n
        records += [
            record(repetition=n + 1, toggles=first, measurement=measurement(1000.0 * drift)),
            peer(speeds[n % len(speeds)], repetition=n + 1, **changes),
            record("SDPA", 2, n + 1, toggles=top, measurement=measurement(ours / drift)),
            record(repetition=n + 1, kind="control", toggles=first, measurement=measurement(1000.0)),
        ]
    return records


def board(*speeds: float, **changes: Any) -> Scoreboard:
    return scoreboard(rounds_of(*speeds, **changes))


def claim(records: list[Record]) -> str:
    """The last note, and all that is said in words of ours against peers."""
    table = peers(scoreboard(records))
    assert table is not None
    return str(table.notes[-1])


def test_a_peer_has_a_row_with_its_version_and_its_own_status() -> None:
    row = board(1500.0).rows[1]
    assert (row.status, row.changed) == ("external", ("external: nanoGPT at 3adf61e (edited)",))
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx(1.5, rel=0.01)
    assert (row.gain, row.verdict, row.loss, row.caveats) == (None, None, None, ())
    assert row.mfu is not None  # by the ladder's one peak


def test_the_rung_after_a_peer_is_held_to_the_one_of_ours_before_it() -> None:
    row = board(1500.0).rows[2]
    assert row.gain is not None
    assert row.gain.value == pytest.approx(2.0, rel=0.01)
    assert row.verdict == "faster"
    assert row.changed == ("attention=sdpa",)
    assert row.status != "parity_failed"  # the peer's losses are no reference


def test_a_peer_is_never_the_fastest() -> None:
    found = board(5000.0)
    assert found.fastest is None or found.fastest.rung != "nanoGPT"
    assert "Fastest: nanoGPT" not in to_markdown(found)


def test_ours_is_held_to_each_peer_in_pairs_by_round() -> None:
    ours, (only,) = peer_results(board(1500.0))
    assert ours is not None
    assert ours.row.rung == "SDPA"
    assert only.ratio is not None
    assert only.ratio.value == pytest.approx(2000 / 1500, rel=0.01)
    assert only.verdict == "faster"
    assert only.memory == 1.0
    text = to_markdown(board(1500.0))
    assert "#### Against peers: h100 on h100-80gb-hbm3-x1" in text
    said = "Ours is faster than the one peer measured in this run (nanoGPT)."
    means = "Faster: the whole interval lies beyond the noise floor of ±1.0%."
    assert f"{said} {means}" in text


ONE = "Of the one peer measured in this run"


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ((2000.0, 1500.0, 2600.0), f"{ONE}, ours is not clearly faster than nanoGPT."),
        # Clearly a little faster, within the noise floor.
        ((1990.0,), "ours is not clearly faster than nanoGPT."),
        ((5000.0,), "ours is slower than nanoGPT."),
    ],
)
def test_what_is_not_clear_is_not_claimed(speeds: tuple[float, ...], said: str) -> None:
    assert said in to_markdown(board(*speeds))


def test_a_lead_that_reaches_into_the_noise_floor_is_not_claimed() -> None:
    loud = [
        each.model_copy(update={"measurement": measurement(1000.0 + 15.0 * (each.repetition - 2))})
        if each.kind == "control"
        else each
        for each in rounds_of(1800.0, 1850.0, 1900.0)
    ]
    found = scoreboard(loud)
    _, (only,) = peer_results(found)
    assert only.ratio is not None
    assert only.ratio.low is not None
    assert found.delta is not None
    assert 1 < only.ratio.low < 1 + found.delta
    assert only.verdict == "unclear"
    assert claim(loud).startswith(
        "Of the one peer measured in this run, ours is not clearly faster than nanoGPT."
    )


def test_without_a_control_nothing_is_claimed() -> None:
    alone = [each for each in rounds_of(1500.0) if each.kind != "control"]
    _, (only,) = peer_results(scoreboard(alone))
    assert only.verdict == "no control"
    assert claim(alone) == ("No claim: without an A/A control of 3 rounds a lead may be noise.")


def test_each_peer_that_was_measured_is_named_and_how_ours_does_against_it() -> None:
    slow = [peer(1200.0, 3, n, name="Trainer") for n in (1, 2, 3)]
    quick = [peer(9000.0, 4, n, name="JAX") for n in (1, 2, 3)]
    both = claim([*rounds_of(1500.0), *slow])
    assert both.startswith("Ours is faster than each of the 2 peers measured in this run (nanoGPT, Trainer).")
    every = claim([*rounds_of(1990.0), *slow, *quick])
    said = "ours is faster than Trainer; not clearly faster than nanoGPT; slower than JAX."
    assert every.startswith(f"Of the 3 peers measured in this run, {said}")


def test_peers_that_were_not_measured_or_left_out_do_not_count_as_beaten() -> None:
    absent = [peer(1.0, 3, n, name="llm.c", status="unsupported", measurement=None) for n in (1, 2, 3)]
    said = claim([*rounds_of(1500.0), *absent])
    assert said.startswith("Ours is faster than the one peer measured in this run (nanoGPT).")
    assert said.endswith("Not measured, so not compared: llm.c.")
    some = [each.model_copy(update={"chosen": ["baseline", "nanoGPT", "SDPA"]}) for each in rounds_of(1500.0)]
    assert claim(some).endswith("peers among the others are not compared.")
    assert "not compared" not in claim(rounds_of(1500.0))


def test_a_rung_in_doubt_is_held_to_peers_without_any_claim() -> None:
    first, top = (replace(each, compile="default") for each in (FIRST, TOP))  # gradients were held to nothing
    records = rounds_of(1500.0, ours=9000.0, first=first, top=top)
    ours, (only,) = peer_results(scoreboard(records))
    assert ours is not None
    assert ours.row.rung == "SDPA"
    assert only.verdict is None
    assert claim(records) == "No claim: ours has a caveat, which the scoreboard's warnings state."


def test_a_rung_of_other_maths_is_held_to_no_peer() -> None:
    ours, (only,) = peer_results(board(1500.0, ours=9000.0, top=replace(TOP, residual="bfloat16")))
    assert ours is not None
    assert ours.row.rung == "baseline"
    assert only.verdict == "slower"


def test_one_round_claims_nothing() -> None:
    assert "Not replicated: whether ours is faster needs" in to_markdown(board(1500.0, rounds=1))


def test_memory_is_not_compared_where_it_was_found_out_otherwise() -> None:
    _, (only,) = peer_results(board(1500.0, measured={"peak_memory_method": "whole GPU"}))
    assert only.memory is None


def test_where_the_whole_gpu_s_memory_is_known_of_both_it_is_what_is_compared() -> None:
    whole = {"peak_memory_method": "whole GPU", "peak_memory_bytes": 5 * 2**30, "gpu_memory_bytes": 5 * 2**30}
    records = [
        each.model_copy(update={"measurement": measurement(2000.0, gpu_memory_bytes=4 * 2**30)})
        if each.rung == "SDPA"
        else each
        for each in rounds_of(1500.0, measured=whole)
    ]
    _, (only,) = peer_results(scoreboard(records))
    assert only.memory == 0.8
    table = peers(scoreboard(records))
    assert table is not None
    assert dict(zip(table.head, table.cells[0], strict=True))["Whole GPU (GiB)"] == "5.00"
    assert any("ours 4.00 GiB" in note for note in table.notes)


def test_a_peer_that_is_not_here_is_no_failure_and_is_said() -> None:
    lacks = "nanoGPT: set NANOGPT to the folder of its checkout"
    records = [record(), peer(1.0, status="unsupported", measurement=None, error=lacks)]
    assert exit_code(records) == 0
    text = to_markdown(scoreboard(records))
    assert "nanoGPT: not supported here: nanoGPT: set NANOGPT" in text
    assert "No peer was measured." in text


def test_a_checkout_that_was_changed_between_rounds_is_not_comparable() -> None:
    other = External(peer="nanogpt", version="3adf61e", command="python train.py")
    records = [record(), record(repetition=2), peer(1500.0), peer(1500.0, repetition=2, external=other)]
    row = scoreboard(records).rows[1]
    assert row.status == "not_comparable"
    assert row.error == "the peer was changed meanwhile: 3adf61e (edited) and 3adf61e"


def test_peers_of_two_runs_are_paired_by_their_command() -> None:
    first, other = board(1500.0), board(1600.0)
    found = compare(Side(letter="A", board=first), Side(letter="B", board=other))
    assert [(pair.first.rung, pair.other.rung) for pair in found.pairs][1] == ("nanoGPT", "nanoGPT")
    assert found.pairs[1].loss_differs is None
    eager = External(peer="nanogpt", version=None, command="python train.py --compile=False")
    found = compare(Side(letter="A", board=first), Side(letter="B", board=board(1600.0, external=eager)))
    assert found.unpaired == ("Not compared, as their settings differ between A and B: nanoGPT.",)


def test_only_a_peer_s_record_may_lack_what_we_look_for() -> None:
    with pytest.raises(ValidationError, match=r"measurement\.recompiles: only an external rung may lack it"):
        record(measurement=measurement(recompiles=None))
    with pytest.raises(ValidationError, match="a record of that kind names the peer, and no other does"):
        record(kind="external")


def test_pictures_show_peers_apart_from_the_climb() -> None:
    with theme("light"):
        figure = climb(board(1500.0))
        assert figure is not None
        drawn = svg(figure)
    assert "1,500, another trainer" in drawn
    assert "2.00x on 1 x NVIDIA H100 80GB HBM3: SDPA gave most" in drawn
    assert "url(#h" not in drawn  # by colour, without a hatch


def test_tables_and_frames_name_the_peer_of_a_row() -> None:
    found = board(1500.0)
    assert list(frame([found])["external"].fillna("")) == ["", "nanoGPT at 3adf61e (edited)", ""]
    timing = next(table for table in tables(found) if table.title.startswith("Where the time goes"))
    assert timing.notes[-1].startswith("External rungs: start-up is until the first progress line")
    assert MACHINE.machine in timing.title

"""`bench quick`: three configurations, an answer, and where it stands among others."""

from __future__ import annotations

from bench.analysis.scoreboard import scoreboard
from bench.cli.quick import _standing
from gpt2.config.toggles import Toggles
from ladders import ladder


def test_its_speed_is_put_between_published_and_measured_ones() -> None:
    board = ladder(("plain", Toggles(), 700.0), ("best known", Toggles(attention="sdpa"), 1000.0))
    assert _standing(board) == (
        "Nearest known machines, in tokens/s: slower, 2 cores of AMD EPYC, Zen 5 (AVX-512), our attention "
        "kernel, 981 (measured); faster, M3 laptop MPS, mps, 1,149 (published)."
    )


def test_one_slower_or_faster_than_all_has_one_neighbour() -> None:
    slow = _standing(ladder(("plain", Toggles(), 0.5), ("best known", Toggles(), 0.6)))
    fast = _standing(ladder(("plain", Toggles(), 1e9), ("best known", Toggles(), 2e9)))
    assert "faster" in slow
    assert "slower" not in slow
    assert "slower" in fast
    assert "faster" not in fast


def test_among_no_machines_of_that_length_of_sequences_nothing_is_said() -> None:
    board = ladder(("plain", Toggles(), 1.0))
    shorter = {**board.records[0].workload, "seq_len": 7}
    records = [record.model_copy(update={"workload": shorter}) for record in board.records]
    assert _standing(scoreboard(records)) == ""

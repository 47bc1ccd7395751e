"""`bench quick`: three configurations, an answer, and where it stands among others."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Silent
from samples import MACHINE

from bench.analysis.scoreboard import scoreboard
from bench.cli.quick import _for_this_machine, _standing
from bench.ladder.ladder import load
from bench.run.probe import ProbeResult
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


@pytest.mark.parametrize("compiles", [True, False])
def test_on_a_cpu_a_block_is_compiled_once_and_nothing_where_there_is_no_compiler(
    compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling the whole model would take a good part of the minutes that the answer has."""
    whole = load(Path("cpu"))
    whole = whole if compiles else whole.carrying(without=[rung.name for rung in whole.own[1:]])
    asked = ProbeResult(environment=MACHINE, memory_bytes={})
    monkeypatch.setattr("bench.run.suited.suited", lambda ladders: (whole, []))
    monkeypatch.setattr("bench.run.probe.probe", lambda device: asked)
    monkeypatch.setattr("bench.run.suited.best_known", lambda *rest: (whole.own[-1].toggles, ""))
    given = ["workload.data=synthetic"]
    quick, _ = _for_this_machine(tmp_path, None, given, Silent())
    settings = [(rung.toggles.compile == "eager", rung.toggles.compile_region) for rung in quick.rungs]
    plain, tuned = (True, "model"), (False, "block")
    assert settings == ([plain, tuned, tuned] if compiles else [plain] * 3)

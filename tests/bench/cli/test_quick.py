"""`bench quick`: three configurations, an answer, and where it stands among others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from bench.cli.quick import _standing
from gpt2.config.toggles import Toggles
from ladders import ladder


def test_its_speed_is_put_between_published_and_measured_ones() -> None:
    board = ladder(("plain", Toggles(), 700.0), ("best known", Toggles(attention="sdpa"), 1000.0))
    assert _standing(board) == (
        "Among known machines, in tokens/s: above 2 cores of AMD EPYC (AVX-512), our attention kernel, 981 "
        "(measured); below M3 laptop MPS, mps, 1,149 (published)."
    )


def test_one_slower_or_faster_than_all_has_one_neighbour() -> None:
    slow = _standing(ladder(("plain", Toggles(), 0.5), ("best known", Toggles(), 0.6)))
    fast = _standing(ladder(("plain", Toggles(), 1e9), ("best known", Toggles(), 2e9)))
    assert "below" in slow
    assert "above" not in slow
    assert "above" in fast
    assert "below" not in fast


@pytest.mark.slow
def test_it_measures_three_configurations_without_a_network_and_shows_one_screen(tmp_path: Path) -> None:
    small = [
        "workload.model=tiny",
        "workload.seq_len=32",
        "workload.data=synthetic",
        "protocol.block_seconds=0.02",
    ]
    options = [part for value in small for part in ("--set", value)]
    command = [
        sys.executable,
        "-m",
        "bench.cli",
        "quick",
        "--minutes",
        "0.5",
        "--out",
        str(tmp_path),
        *options,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "COLUMNS": "100"}, timeout=900
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("quick-*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {r["rung"] for r in records if r["kind"] == "cumulative"} == {
        "plain",
        "usual settings",
        "best known",
    }
    assert {r["status"] for r in records} == {"ok"}
    assert "best known: all of cpu that this machine supports" in done.stderr
    assert all(line.strip() in done.stdout for line in ("plain", "usual settings", "best known"))
    assert "interrupted" not in done.stdout
    assert len(done.stdout.splitlines()) <= 40

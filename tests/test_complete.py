"""What Tab offers, asked as bash asks it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def offered(words: str) -> list[str]:
    place = str(len(words.split(" ")) - 1)
    asked = {**os.environ, "_BENCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
    command = [sys.executable, "-m", "bench.cli"]
    done = subprocess.run(command, cwd=ROOT, env=asked, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split("\n")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("bench comp", "compare"),
        ("bench run ladders/smo", "ladders/smoke.yaml"),
        ("bench run ladd", "ladders/"),
        ("bench run ladders/cpu.yaml --rungs SD", "SDPA"),
        ("bench run ladders/cpu.yaml --rungs SDPA,bas", "SDPA,baseline"),
        ("bench plan ladders/cpu.yaml --set toggles.autocast=b", "toggles.autocast=bfloat16"),
        ("bench sweep ladders/cpu.yaml --over workload.se", "workload.seq_len="),
        ("bench sweep ladders/cpu.yaml --over protocol.", ""),
        ("bench run nothing.yaml --rungs S", ""),
    ],
)
def test_tab_offers_what_fits(words: str, first: str) -> None:
    assert offered(words)[0].strip() == first

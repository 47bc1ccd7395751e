"""What Tab offers, asked as typer lets bash ask it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import ROOT

KEPT = "results/intel-xeon-x2/cpu-20261121T115316Z.jsonl"


def offered(line: str) -> list[str]:
    """Return what may stand in place of the last word of the line, split at blanks as zsh and fish do."""
    words = line.split(" ")
    asked = {
        **os.environ,
        "_BENCH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
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
        ("bench run ladders/cpu.yaml --rungs fu", "fused AdamW"),
        ("bench sweep ladders/cpu.yaml:SD", "ladders/cpu.yaml:SDPA"),
        ("bench plan ladders/cpu.yaml --set toggles.autocast=b", "toggles.autocast=bfloat16"),
        (
            "bench sweep ladders/cpu.yaml --over toggles.autocast=float32,b",
            "toggles.autocast=float32,bfloat16",
        ),
        ("bench plan ladders/cpu.yaml --chip GH", "GH200 96 GB"),
        ("bench report --baseline results/published/llm", "results/published/llm.c.jsonl"),
        (f"bench report --baseline {KEPT}:fu", f"{KEPT}:fused AdamW"),
        ("bench sweep ladders/cpu.yaml --over workload.se", "workload.seq_len="),
        ("bench sweep ladders/cpu.yaml --over protocol.", ""),
        ("bench run nothing.yaml --rungs S", ""),
    ],
)
def test_tab_offers_what_fits(words: str, first: str) -> None:
    assert offered(words)[0].strip() == first

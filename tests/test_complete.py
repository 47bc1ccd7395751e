"""What Tab offers, asked as bash asks it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.cli.bash import inserted, rejoined

ROOT = Path(__file__).parent.parent


def parted(line: str) -> list[str]:
    """As bash does it: at = and :, too, which are words themselves."""
    words = line.split(" ")
    return [part for word in words for part in re.findall("[=:]+|[^=:]+", word) or [""]]


def offered(line: str) -> list[str]:
    """What bash gets to insert in place of the last part of the line."""
    parts = parted(line)
    words = {"COMP_WORDS": "\n".join(parts), "COMP_CWORD": str(len(parts) - 1)}
    asked = {**os.environ, "_BENCH_COMPLETE": "complete_bash", **words}
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
        ("bench run ladders/cpu.yaml --rungs fu", r"fused\ AdamW"),
        ('bench run ladders/cpu.yaml --rungs "fu', "fused AdamW"),
        ("bench sweep ladders/cpu.yaml:SD", "SDPA"),
        ("bench plan ladders/cpu.yaml --set toggles.autocast=b", "bfloat16"),
        ("bench sweep ladders/cpu.yaml --over toggles.autocast=float32,b", "float32,bfloat16"),
        ("bench plan ladders/cpu.yaml --chip GH", r"GH200\ 96\ GB"),
        ("bench report --baseline results/published/llm", "results/published/llm.c.jsonl"),
        ("bench report --baseline results/intel-xeon-x2/cpu-20261121T115316Z.jsonl:fu", r"fused\ AdamW"),
        ("bench sweep ladders/cpu.yaml --over workload.se", "workload.seq_len="),
        ("bench sweep ladders/cpu.yaml --over protocol.", ""),
        ("bench run nothing.yaml --rungs S", ""),
    ],
)
def test_tab_offers_what_fits(words: str, first: str) -> None:
    assert offered(words)[0].strip() == first


def test_where_bash_parts_no_words_at_equals_signs_the_whole_word_is_inserted() -> None:
    words, head = rejoined(["bench", "run", "l.yaml", "--set", "toggles.autocast=b"], 4)
    assert words[-1] == "toggles.autocast=b"
    assert inserted("toggles.autocast=bfloat16", words[-1], head) == "toggles.autocast=bfloat16"

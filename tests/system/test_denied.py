"""A place that the user may not enter is one line and exit code 2, whichever command meets it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner", "--inh-caps=-all"]
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"),
    reason="only root can make a folder that this user may not enter",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("gpt2.cli", "prepare", "locked/my.txt", "--out", "out"),
        ("gpt2.cli", "train", "locked/x.yaml"),
        pytest.param(("gpt2.cli", "train", "tiny", "--out", "locked/run"), marks=pytest.mark.slow),
        pytest.param(("gpt2.cli", "eval", "locked/run", "--hellaswag"), marks=pytest.mark.slow),
        pytest.param(("gpt2.cli", "export", "locked/run", "out"), marks=pytest.mark.slow),
        pytest.param(("gpt2.cli", "eval", "locked-run", "--val-corpus", "synthetic"), marks=pytest.mark.slow),
        ("bench.cli", "report", "locked/results"),
        ("bench.cli", "compare", "locked/a.jsonl", "locked/b.jsonl"),
        ("bench.cli", "run", str(ROOT / "ladders" / "smoke.yaml"), "--data", "locked/my.txt", "--out", "out"),
    ],
    ids=" ".join,
)
def test_a_folder_that_may_not_be_entered_is_told_in_one_line(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "locked").mkdir(mode=0o700)
    os.chown(tmp_path / "locked", 65534, 65534)
    (tmp_path / "locked-run").mkdir()
    (tmp_path / "locked-run" / "checkpoints").symlink_to(tmp_path / "locked")
    command = [*UNPRIVILEGED, sys.executable, "-m", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "locked" in done.stderr

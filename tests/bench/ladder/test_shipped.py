"""The ladders that come with gpt2-bench: found by name, listed, and in the wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from typer.testing import CliRunner

from bench.cli.main import app
from bench.ladder.ladder import LadderError, load
from bench.ladder.shipped import find, shipped, shows


def test_a_ladder_is_found_by_its_name_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path("smoke")).path == ROOT / "ladders" / "smoke.yaml"
    assert load(Path("smoke.yaml")).path == ROOT / "ladders" / "smoke.yaml"


def test_a_file_here_goes_before_a_shipped_ladder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("smoke.yaml").write_text("name: mine\nrungs: [{name: baseline}]\n")
    assert load(Path("smoke.yaml")).name == "mine"


def test_a_folder_called_like_a_ladder_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cpu").mkdir()
    assert find(Path("cpu")) == ROOT / "ladders" / "cpu.yaml"


def test_a_name_that_is_no_ladder_s_is_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LadderError, match=r"smokee: No such file or directory; did you mean smoke\?"):
        load(Path("smokee"))


def test_a_file_whose_name_begins_with_a_dash_is_no_option_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("-l.yaml").write_text((ROOT / "ladders" / "smoke.yaml").read_text())
    assert load(Path("./-l.yaml")).path == tmp_path / "-l.yaml"


def test_every_shipped_ladder_says_in_its_first_clause_what_it_shows() -> None:
    assert len(shipped()) == len(list((ROOT / "ladders").glob("*.yaml")))
    assert [path.name for path in shipped() if not 10 < len(shows(path)) < 170] == []
    assert all((path.read_text().startswith("# Shows ")) for path in shipped())


def test_the_list_says_what_runs_here_first_and_what_each_ladder_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(app, ["ladders"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[1].startswith("This machine has the devices for: ")
    assert "smoke" in lines[1]
    rows = {line.split()[0]: line for line in lines[4:] if line.strip()}
    assert rows["cpu"].split()[1:3] == ["CPU", "yes"]
    assert "8 x A100 SXM 40 GB" in rows["a100x8"]


@pytest.mark.slow
def test_an_installed_wheel_runs_quick_and_a_ladder_by_its_name_from_an_empty_folder(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a build leaves folders behind
    for name in ("bench", "gpt2", "ladders", "results/published"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    empty.mkdir()

    def measured(ladder: str, *words: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
        """Run a command of the installed package; returns how it ended, and the rungs in its results."""
        short = ["--set", "protocol.block_seconds=0.02", "--set", "protocol.ceiling_seconds=0"]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.cli", *words, *short],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "100"},
            capture_output=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (results,) = empty.glob(f"results/*/{ladder}-*.jsonl")
        records = [json.loads(line) for line in results.read_text().splitlines()]
        assert {record["status"] for record in records} == {"ok"}
        return done, {record["rung"] for record in records if record["kind"] == "cumulative"}

    one = ("--rungs", "baseline", "--repeats", "1", "--set", "protocol.carry=always")
    assert measured("smoke", "run", "smoke", *one)[1] == {"baseline"}
    small = ["workload.model=tiny", "workload.seq_len=32", "workload.data=synthetic"]
    options = [part for value in small for part in ("--set", value)]
    done, rungs = measured("quick", "quick", "--minutes", "0.5", *options)
    assert rungs == {"baseline", "usual settings", "best known"}
    assert "best known: all of cpu that this machine supports" in done.stderr
    shown = [line.strip().split("  ")[0] for line in done.stdout.splitlines()]
    assert rungs <= set(shown)
    assert "interrupted" not in done.stdout
    assert len(shown) <= 40

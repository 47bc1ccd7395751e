"""What depends on what, read from the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from gpt2.toggles import Toggles

ROOT = Path(__file__).parent.parent
TORCH_FREE = [
    "gpt2.workload",
    "gpt2.stages",
    "gpt2.tolerances",
    "gpt2.support",
    "gpt2.toggle",
    "gpt2.toggles",
    "gpt2.validation",
    "gpt2.peaks",
    "gpt2.data",
    "gpt2.prefetch",
    "gpt2.native",
    "gpt2.ranks",
    "gpt2.signals",
    "gpt2.checkpoint",
    "gpt2.cli",
    "gpt2.corpora",
    "gpt2.documents",
    "gpt2.encode",
    "gpt2.display",
    "gpt2.feed",
    "gpt2.figures",
    "gpt2.guard",
    "gpt2.hellaswag",
    "gpt2.hub",
    "gpt2.index",
    "gpt2.launch",
    "gpt2.lock",
    "gpt2.metrics",
    "gpt2.models_cli",
    "gpt2.prepare",
    "gpt2.readers",
    "gpt2.run",
    "gpt2.stream",
    "gpt2.terminal",
    "gpt2.tokenizer_files",
    "bench.arrivals",
    "bench.axis",
    "bench.bash",
    "bench.candidate",
    "bench.best",
    "bench.checkout",
    "bench.checks",
    "bench.child",
    "bench.child_side",
    "bench.cli",
    "gpt2.code",
    "bench.complete",
    "bench.command",
    "bench.doctor",
    "bench.external",
    "bench.follower",
    "bench.foreign",
    "bench.joint",
    "bench.here",
    "bench.ladder",
    "bench.link",
    "bench.log",
    "bench.machine",
    "bench.measurement",
    "bench.nodes",
    "bench.options",
    "bench.pairs",
    "bench.peers",
    "bench.place",
    "bench.record",
    "bench.search",
    "bench.sleeper",
    "bench.steps",
    "bench.sweep",
    "bench.state",
    "bench.stats",
    "bench.surroundings",
    "bench.terminal",
    "bench.trainings",
    "bench.turns",
    "bench.runner",
    "bench.progress",
    "bench.probe",
    "bench.processes",
    "bench.published",
    "bench.resume",
    "bench.roofline",
    "bench.schedule",
    "bench.schema",
    "bench.show",
    "bench.validation",
    "bench.report.across",
    "bench.report.attribution",
    "bench.report.bound",
    "bench.report.caption",
    "bench.report.chain",
    "bench.report.chained",
    "bench.report.compare",
    "bench.report.compared",
    "bench.report.entry",
    "bench.report.formats",
    "bench.report.frame",
    "bench.report.gate",
    "bench.report.guards",
    "bench.report.hardware",
    "bench.report.load",
    "bench.report.peers",
    "bench.report.published",
    "bench.report.roofline",
    "bench.report.rungs",
    "bench.report.scoreboard",
    "bench.report.scaling",
    "bench.report.sheet",
    "bench.report.sizes",
    "bench.report.tables",
    "bench.report.trainings",
]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_the_trainer_never_imports_the_harness() -> None:
    for path in (ROOT / "gpt2").rglob("*.py"):
        assert not [name for name in imported(path) if name.split(".")[0] == "bench"], path


def test_the_trainer_holds_no_clock() -> None:
    for name in ("train.py", "model.py", "toggles.py", "stages.py"):
        assert not imported(ROOT / "gpt2" / name) & {"time", "datetime", "logging"}, name


def test_runner_and_worker_meet_only_at_a_file() -> None:
    assert "bench.worker" not in imported(ROOT / "bench" / "runner.py")
    assert "bench.runner" not in imported(ROOT / "bench" / "worker.py")


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_must_start_quickly_loads_no_torch(module: str) -> None:
    program = (
        f"import json, sys, {module}; print(json.dumps([m for m in ('torch', 'matplotlib') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == []


def test_a_report_loads_no_torch_from_start_to_end(tmp_path: Path) -> None:
    from samples import record

    from bench.record import append

    append(tmp_path / "r.jsonl", record())
    program = (
        "import sys\n"
        "from bench.cli import app\n"
        f"app(['report', {str(tmp_path / 'r.jsonl')!r}, '--markdown'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"


def test_train_asks_for_no_toggle_of_its_own() -> None:
    """Every optimisation is a branch of a stage, not of the loop."""
    tree = ast.parse((ROOT / "gpt2" / "train.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            assert "toggles" not in ast.dump(node.test), ast.unparse(node.test)


def test_devices_are_named_only_behind_their_seam() -> None:
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        if path.parent.name == "device":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                names = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not names & {"cuda", "mps", "xla"}, f"{path}: {ast.unparse(node)}"


def test_the_readme_describes_every_toggle_and_value() -> None:
    readme = (ROOT / "README.md").read_text()
    hints = get_type_hints(Toggles)
    for toggle in fields(Toggles):
        (line,) = [line for line in readme.splitlines() if line.startswith(f"| `{toggle.name}` |")]
        assert toggle.metadata["help"] in line
        for value in get_args(hints[toggle.name]):
            if isinstance(value, str | int):
                assert f"`{value}`" in line, (toggle.name, value)


def test_nothing_imports_an_undeclared_package() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = ("float8", "corpora", "wandb", "tensorboard", "xla", "tpu")
    extras = [each for name in names for each in project["optional-dependencies"][name]]
    declared = {re.split(r"[>=\[]", each)[0].lower() for each in [*project["dependencies"], *extras]}
    provided = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "tpu_info": "tpu-info", "pyarrow": "datasets"}
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        for name in {name.split(".")[0] for name in imported(path)} - {"bench", "gpt2", "__future__"}:
            assert name in sys.stdlib_module_names or provided.get(name, name) in declared, f"{path}: {name}"

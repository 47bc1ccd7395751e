"""What depends on what, read from the code."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from places import ROOT

from gpt2.config.toggles import Toggles

MAY_IMPORT = {
    name: imports.split()
    for name, _, imports in (
        line.partition(":")
        for line in """
bench.cli: bench gpt2
bench.run: bench.errors bench.process bench.host bench.analysis bench.records bench.ladder bench.format \
  bench.stats gpt2
bench.report: bench.analysis bench.errors bench.records bench.ladder bench.format bench.stats gpt2.config \
  gpt2.files gpt2.hardware.peaks gpt2.pretrain.metrics
bench.analysis: bench.errors bench.records bench.ladder bench.format bench.stats gpt2.config
bench.process: bench.host bench.records bench.format gpt2.errors gpt2.hardware gpt2.signals gpt2.files
bench.host: bench.records bench.ladder bench.format gpt2.training gpt2.device gpt2.config gpt2.hardware \
  gpt2.provenance
bench.records: bench.errors bench.ladder gpt2.config gpt2.hardware gpt2.files
bench.errors:
bench.ladder: bench.errors gpt2.config gpt2.hardware
bench.campaign: bench.campaign_parts bench.process bench.records bench.format gpt2.files gpt2.terminal
bench.campaign_parts: gpt2.hardware
bench.format: bench.stats gpt2.format
bench.stats:
gpt2.cli: gpt2
gpt2.pretrain: gpt2.errors gpt2.evals gpt2.training gpt2.data gpt2.model gpt2.device gpt2.text gpt2.files \
  gpt2.config gpt2.hardware gpt2.terminal gpt2.signals gpt2.prefetch gpt2.provenance gpt2.format
gpt2.proofs: gpt2.training gpt2.model gpt2.device gpt2.config gpt2.hardware
gpt2.evals: gpt2.errors gpt2.training gpt2.data gpt2.model gpt2.device gpt2.text gpt2.files
gpt2.interop: gpt2.errors gpt2.model gpt2.data gpt2.files gpt2.config
gpt2.training: gpt2.errors gpt2.device gpt2.model gpt2.data gpt2.config gpt2.hardware
gpt2.model: gpt2.config gpt2.hardware
gpt2.device: gpt2.errors gpt2.config gpt2.hardware gpt2.prefetch
gpt2.data: gpt2.errors gpt2.text gpt2.files gpt2.config gpt2.prefetch gpt2.signals
gpt2.text: gpt2.files
gpt2.config: gpt2.errors
gpt2.hardware:
gpt2.files: gpt2.errors
gpt2.errors:
gpt2.format:
gpt2.prefetch:
gpt2.provenance:
gpt2.signals:
gpt2.terminal: gpt2.errors
""".strip().splitlines()
    )
}
"""By package or leaf, what it may import besides itself."""
ENTRY_POINTS = ("bench.worker", "bench.external", "bench.ceiling")
"""Three lines each, kept because the commands in committed records name them."""
LOADS_TORCH = (
    *("bench.ceiling", "bench.cli.dry_run", "bench.host.environment", "bench.host.feasibility"),
    *("bench.run.aggregate", "bench.run.ceiling", "bench.run.measure"),
    *("gpt2.device", "gpt2.evals", "gpt2.interop", "gpt2.model", "gpt2.proofs", "gpt2.training"),
    *("gpt2.pretrain.checkpoint_tensors", "gpt2.pretrain.evaluations", "gpt2.pretrain.rank_main"),
    "gpt2.pretrain.session",
)
"""Modules and packages; no other loads torch when it is imported, so that every command starts quickly."""
TORCH_FREE = ("gpt2.training.stages", "gpt2.training.reexec", "gpt2.evals.hellaswag")
"""Modules of such packages that commands import nevertheless before they know whether torch is needed."""
LOADS_MATPLOTLIB = ("bench.report.plots",)


def modules() -> dict[str, Path]:
    """All of ours by dotted name."""
    found = {}
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows() -> dict[str, set[str]]:
    """Which modules of ours each of them imports, within functions and for types only included."""
    known = modules()
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names if alias.name in known}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}: a relative import"
                each = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= {full if full in known else str(node.module) for full in each} & known.keys()
    return graph


def within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def test_packages_import_only_what_lies_below_them() -> None:
    for name, imports in arrows().items():
        (own,) = [package for package in MAY_IMPORT if within(name, [package])] or [None]
        if own is not None:
            wrong = [each for each in imports if not within(each, [own, *MAY_IMPORT[own]])]
            assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"
        elif "." in name:
            assert name in ENTRY_POINTS, f"{name} is of no package"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph, done = arrows(), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for each in sorted(graph[name]):
                visit(each, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_what_the_commands_of_committed_records_name_is_there() -> None:
    commands = {
        json.loads(line).get("command") or ""
        for path in (ROOT / "results").rglob("*.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("{")
    }
    named = {module for command in commands for module in re.findall(r"-m ((?:bench|gpt2)\S*)", command)}
    assert named == set(ENTRY_POINTS)
    for module in named:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        options = set(re.findall(r"(?<!\S)--[\w-]+", done.stdout))
        of_it = [command.partition(f"-m {module}")[2] for command in commands if f"-m {module}" in command]
        given = {option for command in of_it for option in re.findall(r"(?<!\S)--[a-z][\w-]*", command)}
        assert given <= options, module


def test_reports_are_made_anew_from_results_byte_for_byte(tmp_path: Path) -> None:
    against = ["--baseline", "results/intel-xeon-x2/cpu-20261121T115316Z.jsonl:baseline"]
    trainings = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("results/*/trainings/*"))
    (tmp_path / "plots").symlink_to(ROOT / "reports" / "plots")  # what is linked depends on what is there
    for arguments in (["report", "results", *against], ["trainings", *trainings]):
        command = [sys.executable, "-m", "bench.cli", *arguments, "--out", str(tmp_path)]
        subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.md")}
    kept = {path.relative_to(ROOT / "reports"): path.read_text() for path in (ROOT / "reports").rglob("*.md")}
    stale = [str(name) for name in sorted({*made, *kept}) if made.get(name) != kept.get(name)]
    assert not stale, f"make reports writes anew: {', '.join(stale)}"


def test_the_scoreboard_of_the_readme_is_made_anew_from_its_results_file(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (of_readme,) = re.findall(r"`bench report (\S+) --update README\.md`", text)
    copy = tmp_path / "README.md"
    copy.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "bench.cli", "report", of_readme, "--update", str(copy)]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert copy.read_text(encoding="utf-8") == text, "make reports writes it anew"
    assert f"CLIMB := {of_readme}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.slow
def test_pictures_and_the_page_are_made_anew_byte_for_byte(tmp_path: Path) -> None:
    command = [
        "make",
        "reports",
        f"OUT={tmp_path}",
        f"BIN={Path(sys.executable).parent}",
        "-o",
        ".venv/.ready",
    ]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        path.relative_to(ROOT / "reports"): path for path in (ROOT / "reports").rglob("*") if path.is_file()
    }
    assert made.keys() == kept.keys()
    for name, path in kept.items():
        assert made[name] == path.read_bytes(), f"{name}: make reports writes it anew"


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
    for name in ("training/train.py", "training/stages.py", "model/model.py", "config/toggles.py"):
        assert not imported(ROOT / "gpt2" / name) & {"time", "datetime", "logging"}, name


def test_runner_and_worker_meet_only_at_a_file() -> None:
    assert "bench.run.worker" not in imported(ROOT / "bench" / "run" / "runner.py")
    assert "bench.run.runner" not in imported(ROOT / "bench" / "run" / "worker.py")


def test_only_what_trains_loads_torch_and_only_what_draws_matplotlib() -> None:
    entry = [name for name in modules() if name.endswith("__main__")]
    program = "\n".join(
        [
            "import importlib, sys",
            "for name in sys.argv[2:]:",
            "    importlib.import_module(name)",
            "    assert sys.argv[1] not in sys.modules, f'{name} loads it'",
        ]
    )
    for library, exempt in {"torch": LOADS_TORCH, "matplotlib": (*LOADS_MATPLOTLIB, *LOADS_TORCH)}.items():
        free = [name for name in modules() if not within(name, exempt) and name not in entry]
        free += TORCH_FREE
        command = [sys.executable, "-c", program, library, *free]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr


def test_a_report_loads_no_torch_from_start_to_end(tmp_path: Path) -> None:
    from samples import append, record

    append(tmp_path / "r.jsonl", record())
    program = (
        "import sys\n"
        "from bench.cli.main import app\n"
        f"app(['report', {str(tmp_path / 'r.jsonl')!r}, '--markdown'], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_train_asks_for_no_toggle_of_its_own() -> None:
    """Every optimisation is a branch of a stage, not of the loop."""
    tree = ast.parse((ROOT / "gpt2" / "training" / "train.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            assert "toggles" not in ast.dump(node.test), ast.unparse(node.test)


PROSE = {"error", "warning", "warnings", "caveat", "caveats", "changed", "source", "peak_flops_source"}
"""What holds sentences for people, by its name."""
READING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "find", "index", "count"}


def read_from_prose(code: str) -> list[str]:
    """Places where code asks what such a sentence says, in place of a field."""

    def prose(node: ast.AST) -> bool:
        """Whether it is such a name, but for what stands for none: `record.error or ""`."""
        if isinstance(node, ast.BoolOp):
            return any(prose(value) for value in node.values)
        return (
            isinstance(node, ast.Attribute | ast.Name)
            and (node.attr if isinstance(node, ast.Attribute) else node.id) in PROSE
        )

    def words(node: ast.AST) -> bool:
        """Whether it is a text, or a constant's name."""
        if isinstance(node, ast.Name):
            return node.id.isupper()
        return isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""
        )

    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in READING and prose(node.func.value)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(map(prose, sides)) and any(map(words, sides))
        else:
            continue
        if asks:
            found.append(ast.unparse(node))
    return found


def test_no_fact_is_read_out_of_a_sentence_but_from_older_records() -> None:
    for path in (ROOT / "bench").rglob("*.py"):
        if path != ROOT / "bench" / "records" / "older.py":
            assert not read_from_prose(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(
    "code",
    [
        'found.peak_flops_source.startswith("derived")',
        '(record.error or "").startswith(NOT_BEGUN)',
        "CUT_SHORT in self.warnings",
        'any(warning.startswith(f"{OTHER_WORK}: ") for warning in record.warnings)',
        'measured.peak_flops_source == "given with --peak-tflops"',
        '"not begun" in record.error',
    ],
)
def test_code_that_reads_a_fact_out_of_a_sentence_is_found(code: str) -> None:
    assert read_from_prose(code)


def test_devices_are_named_only_behind_their_seam() -> None:
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        if path.parent.name == "device":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                names = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not names & {"cuda", "mps", "xpu", "xla"}, f"{path}: {ast.unparse(node)}"


def test_the_page_of_toggles_is_that_of_the_code() -> None:
    from bench.records.schema import toggles_page

    committed = (ROOT / "docs" / "toggles.md").read_text(encoding="utf-8")
    assert committed == toggles_page(), "python -m bench.records.schema writes it anew"


def test_the_page_of_toggles_has_every_toggle_and_value() -> None:
    page = (ROOT / "docs" / "toggles.md").read_text(encoding="utf-8")
    hints = get_type_hints(Toggles)
    for toggle in fields(Toggles):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| `{toggle.name}` |")]
        assert toggle.metadata["help"] in line
        for value in get_args(hints[toggle.name]):
            if isinstance(value, str | int):
                assert f"`{value}`" in line, (toggle.name, value)


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    for name in ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", text):
            assert (ROOT / name).parent.joinpath(link).exists(), f"{name}: {link}"


def test_nothing_imports_an_undeclared_package() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = ("float8", "kernels", "corpora", "wandb", "tensorboard", "xla", "tpu")
    extras = [each for name in names for each in project["optional-dependencies"][name]]
    declared = {re.split(r"[>=\[]", each)[0].lower() for each in [*project["dependencies"], *extras]}
    provided = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py", "tpu_info": "tpu-info", "pyarrow": "datasets"}
    provided["triton"] = "torch"  # of its CUDA builds
    provided |= {"liger_kernel": "liger-kernel", "quack": "quack-kernels", "flash_attn": "flash-attn-4"}
    # PyPI's has no exact form; gpt2.model.kernel_libraries tells how to install GitHub's.
    declared.add("cut_cross_entropy")
    for path in [*(ROOT / "bench").rglob("*.py"), *(ROOT / "gpt2").rglob("*.py")]:
        for name in {name.split(".")[0] for name in imported(path)} - {"bench", "gpt2", "__future__"}:
            assert name in sys.stdlib_module_names or provided.get(name, name) in declared, f"{path}: {name}"

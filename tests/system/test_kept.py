"""Whatever fails once a process has said how it went, what it measured is in the results file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import samples
from runs import Silent
from typer.testing import CliRunner

import bench
from bench.cli import main as cli
from bench.cli import report as show
from bench.host import checks
from bench.ladder.ladder import load
from bench.process.supervisor import ProcessEnd
from bench.records import record as record_module
from bench.records.record import Outcome, Record, ResultsFile, read
from bench.run import executor as processes
from bench.run import runner
from bench.run.command import Options
from bench.run.probe import ProbeResult
from bench.run.runner import RunResult, run

BENCH = str(Path(bench.__file__).parent)
MEASURED = samples.measurement()
ASKED = ProbeResult(environment=samples.record().environment, memory_bytes={})


class Sabotage(Exception):
    """What goes wrong."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process ends at once, and has measured."""

    def supervise(command: list[str], environ: dict[str, str], out: Path, *rest: Any) -> ProcessEnd:
        out.write_text(Outcome(status="ok", measurement=MEASURED).model_dump_json())
        return ProcessEnd(exit_code=0, reason="exit", output="", kernel_killed=False)

    monkeypatch.setattr(processes, "supervise", supervise)
    monkeypatch.setattr(processes, "other_cores", lambda: 0.0)
    monkeypatch.setattr(runner, "probe", lambda *arguments, **options: ASKED)
    monkeypatch.setattr(runner, "costly_page_faults", tuple)


def calls_until_kept(
    ladder: Path, out: Path, fails: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunResult, list[str]]:
    """Run a ladder whose first call of a function of bench, before its record is kept, fails.

    fails: which, as the functions called meanwhile are named, which are returned.
    """
    called: list[str] = []
    watched = SimpleNamespace(on=False)

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not watched.on or not frame.f_code.co_filename.startswith(BENCH):
            return
        name = f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}"
        if name in called:
            return
        called.append(name)
        if name == fails:
            raise Sabotage(name)

    ended, append = processes.supervise, ResultsFile.append
    record_module._checked.cache_clear()  # or it would not be called again

    def supervise(*arguments: Any) -> ProcessEnd:
        result = ended(*arguments)
        watched.on = True
        return result

    def kept(file: ResultsFile, record: Record) -> None:
        watched.on = False
        append(file, record)

    with monkeypatch.context() as patch:
        patch.setattr(processes, "supervise", supervise)
        patch.setattr(ResultsFile, "append", kept)
        # Any time that the host takes is told, and none too: the same functions are called each time.
        patch.setattr(checks, "STOLEN", -1.0)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return run(load(ladder), Options(out=out), Silent()), called
        finally:
            sys.settrace(before)


@pytest.mark.slow
@pytest.mark.parametrize("carry", ["always", "if_faster"])
def test_whatever_function_fails_after_the_process_its_measurement_is_kept(
    carry: str, write_ladder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = write_ladder("[{name: a}]", carry=carry)
    _, functions = calls_until_kept(ladder, tmp_path / "sound", None, monkeypatch)
    some = {"supervisor.classify", "doctor.warnings", "telemetry.state", "command.anonymous"}
    assert some <= set(functions)
    for number, name in enumerate(functions):
        ended, _ = calls_until_kept(ladder, tmp_path / str(number), name, monkeypatch)
        records = read(ended.path)[0]  # a function may first be called at a later process
        assert records[0].kind == ("scout" if carry == "if_faster" else "cumulative")
        assert all((each.scout is not None) == (each.kind == "scout") for each in records), name
        assert all(each.measurement == MEASURED for each in records), name
        assert all(each.status == "ok" for each in records), name
        warned = [each for each in records if any(f"Sabotage: {name}" in text for text in each.warnings)]
        assert len(warned) == 1, name


@pytest.mark.parametrize("method", ["note", "started", "working", "finished"])
@pytest.mark.parametrize(
    "error", [UnicodeEncodeError("ascii", "±", 0, 1, "no"), BrokenPipeError(), OSError(5, "EIO")]
)
def test_a_display_that_fails_ends_no_run(
    method: str,
    error: Exception,
    write_ladder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(Silent, method, fail)
    ended = run(load(write_ladder("[{name: a}, {name: b}]")), Options(out=tmp_path / "results"), Silent())
    assert [record.rung for record in read(ended.path)[0]] == ["a", "b"]
    assert ended.error is None


@pytest.mark.parametrize(
    "error", [ValueError("no table"), OverflowError(), UnicodeEncodeError("ascii", "±", 0, 1, "no")]
)
def test_a_table_that_cannot_be_shown_is_one_line_and_the_exit_code_is_that_of_the_measuring(
    error: Exception, write_ladder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(show, "show", fail)
    asked = ["run", str(write_ladder("[{name: a}]")), "--out", str(tmp_path / "results")]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 0
    (path,) = tmp_path.rglob("*.jsonl")
    assert f"the table could not be shown ({type(error).__name__}" in done.output
    assert str(path) in done.output.replace("\n", "")
    assert "Traceback" not in done.output


ODD = ["inf", "-inf", "nan", "1e400", "infinity"]
OPTIONS = [
    ["run", "LADDER", "--price-per-hour"],
    ["run", "LADDER", "--peak-tflops"],
    ["sweep", "LADDER", "--over", "toggles.threads=1,2", "--budget"],
    ["sweep", "LADDER", "--over", "toggles.threads=1,2", "--peak-tflops"],
    ["roofline", "--seconds"],
    ["run", "LADDER", "--until"],
]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("words", OPTIONS, ids=lambda words: f"{words[0]} {words[-1]}")
def test_a_number_that_is_not_finite_is_refused_before_anything_runs(
    words: list[str], value: str, write_ladder: Callable[..., Path], tmp_path: Path
) -> None:
    ladder = str(write_ladder("[{name: a}]"))
    arguments = [ladder if word == "LADDER" else word for word in words]
    asked = [*arguments[:-1], f"{arguments[-1]}={value}", "--out", str(tmp_path / "results")]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 2
    assert not list(tmp_path.rglob("*.jsonl"))


def test_two_runs_that_begin_in_the_same_second_have_a_file_each(
    write_ladder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frozen(runner.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 59, tzinfo=tz)

    monkeypatch.setattr(runner, "datetime", Frozen)
    ladder = load(write_ladder("[{name: a}]"))
    paths = [run(ladder, Options(out=tmp_path / "results"), Silent()).path for _ in range(3)]
    times = ("030459", "030500", "030501")
    assert [path.name for path in paths] == [f"test-20260102T{time}Z.jsonl" for time in times]
    assert [len(read(path)[0]) for path in paths] == [1, 1, 1]

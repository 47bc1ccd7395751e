"""The commands as a person types them."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from places import ROOT
from rich.console import Console
from samples import append, measurement, record
from typer.testing import CliRunner
from waiting import PATIENCE, held, holding

from bench.analysis.schedule import Task, ceiling_rung
from bench.cli.main import app
from bench.cli.options import load_with_options
from bench.cli.progress import Progress
from bench.records.record import Record, Scout, read
from bench.run.probe import ProbeResult


def bench(*arguments: str | Path, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """What a command says: a plan or a report in this process, which has torch, others in their own."""
    words = [str(word) for word in arguments]
    wide = {**os.environ, "COLUMNS": "200"}
    if words[0] in ("plan", "report"):
        with contextlib.chdir(ROOT):
            ended = CliRunner().invoke(app, words, env=wide)
        return subprocess.CompletedProcess(words, ended.exit_code, ended.stdout, ended.stderr)
    command = [sys.executable, "-m", "bench.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT, env=wide
    )


@dataclass
class Ran:
    """One `bench run`, of two of a ladder's three rungs."""

    done: subprocess.CompletedProcess[str]
    file: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = tmp_path_factory.mktemp("ran")
    (place / "ladder.yaml").write_text(
        "name: test\nworkload: {model: tiny, data: synthetic, seq_len: 32}\n"
        "protocol: {repeats: 1, block_seconds: 0.01, blocks: 5, max_window_seconds: 1, ceiling_seconds: 0}\n"
        "rungs: [{name: a}, {name: b, set: {attention: sdpa}}, {name: c}]\n"
    )
    foreign = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in foreign.items():
            patch.setenv(name, value)
        options = ("--rungs", "a,c", "--peak-tflops", "1.5", "--out", place / "out")
        done = bench("run", place / "ladder.yaml", *options)
    (file,) = (place / "out").rglob("*.jsonl")
    return Ran(done, file)


def test_a_run_prints_the_scoreboard_and_keeps_the_records(ran: Ran) -> None:
    assert re.search(r"^  c +[\d,]+", ran.done.stdout, re.MULTILINE)
    assert "round 1/1  c: " in ran.done.stderr
    assert len(read(ran.file)[0]) == 2
    assert str(ran.file) in ran.done.stderr


def test_only_the_named_rungs_run_with_what_those_before_them_set(ran: Ran) -> None:
    found = [(record.rung, record.toggles.all["attention"]) for record in read(ran.file)[0]]
    assert [rung for rung, _ in found] == ["a", "c"]
    assert found[1][1] == "sdpa"


def test_what_a_cluster_says_of_its_own_ranks_is_not_taken_for_ours(ran: Ran) -> None:
    assert ran.done.returncode == 0, ran.done.stderr
    assert [record.toggles.all["world_size"] for record in read(ran.file)[0]] == [1, 1]


def test_a_given_peak_gives_an_mfu_and_is_named_as_its_source(ran: Ran) -> None:
    full = bench("report", ran.file, "--full").stdout
    assert "the CPU's dense bfloat16 peak of 1.5 TFLOP/s (given with --peak-tflops)" in " ".join(full.split())


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("rung", "corpus", "data", "complaint"),
    [
        ("name: a, set: {adam: fused}", "synthetic", None, "rung 'a': unknown toggle 'adam'"),
        ("name: a", "mine", None, "'mine' is not at hand"),
        ("name: a", "mine", "missing.bin", "missing.bin does not exist"),
        ("name: a", "mine", "short.bin", "has 20 tokens, a sequence of 32 needs 33"),
        ("name: a", "mine", "ids.bin", "beyond the model's vocabulary of 509"),
        ("name: a", "synthetic", "short.bin", "the synthetic corpus is generated"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_written(
    rung: str, corpus: str, data: str | None, complaint: str, write_ladder, tmp_path: Path
) -> None:
    write(tmp_path / "short.bin", np.arange(20, dtype="<u2").tobytes())
    write(tmp_path / "ids.bin", np.full(500, 509, dtype="<u2").tobytes())
    extra = ["--data", str(tmp_path / data)] if data else []
    ladder = write_ladder(f"[{{{rung}}}]", workload=f"model: tiny, seq_len: 32, data: {corpus}")
    done = CliRunner().invoke(app, ["run", str(ladder), "--out", str(tmp_path / "out"), *extra])
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("bench: ")
    assert complaint in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("option", "value"), [("--peak-tflops", "-5"), ("--rungs", "")])
def test_a_peak_that_is_no_peak_and_a_rung_without_a_name_are_refused(
    option: str, value: str, write_ladder, tmp_path: Path
) -> None:
    done = bench("run", write_ladder("[{name: a}]"), option, value, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("asks_here")
def test_a_missing_ladder_and_an_unwritable_folder_are_exit_code_2(write_ladder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ladder = write_ladder("[{name: a}]")
    for arguments in ([tmp_path / "nowhere.yaml"], [ladder, "--out", tmp_path / "file"]):
        done = CliRunner().invoke(app, ["run", *map(str, arguments)])
        assert done.exit_code == 2
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "code"), [([], 6), (["--allow-failures"], 0)])
def test_a_rung_that_fails_makes_exit_code_6_unless_allowed(
    flags: list[str], code: int, write_ladder, tmp_path: Path
) -> None:
    hopeless = write_ladder("[{name: slow}]", timeout_seconds=0.5)
    done = bench("run", hopeless, "--out", tmp_path / "out", *flags)
    assert done.returncode == code, done.stderr
    assert "timeout" in done.stdout


def test_control_c_prints_the_partial_table_and_exits_130(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder("[{name: a}, {name: b}]")
    command = [sys.executable, "-m", "bench.cli", "run", str(ladder), "--out", str(tmp_path / "out")]
    environ = {**os.environ, **holding(tmp_path, "b")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environ
    )
    with held(process, "b"):
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, error
    assert "tokens/s" in error
    assert " a " in out
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    assert [(record.rung, record.status) for record in read(file)[0]] == [("a", "ok"), ("b", "interrupted")]


@pytest.mark.usefixtures("asks_here")
def test_a_plan_resolves_every_rung_and_writes_nothing(tmp_path: Path) -> None:
    done = bench("plan", "ladders/h100.yaml", "--full")
    assert done.returncode == 0, done.stderr
    for part in ("batch of 64", "65,536", "124,439,808 parameters", "854,438,400 FLOPs per token"):
        assert part in done.stdout
    assert "Missing here: device: cuda" in done.stdout or "yes" in done.stdout


@pytest.mark.usefixtures("asks_here")
def test_a_plan_says_what_will_not_fit(write_ladder) -> None:
    huge = "[{name: huge, set: {micro_batch_size: 100000}}]"
    done = bench("plan", write_ladder(huge, workload="model: gpt2, seq_len: 1024"))
    assert done.returncode == 0, done.stderr
    assert "will not fit" in done.stdout


@pytest.mark.usefixtures("asks_here")
def test_a_plan_says_once_why_several_rungs_cannot_run_here(write_ladder) -> None:
    path = write_ladder("[{name: a}, {name: b, set: {attention: cudnn}}, {name: c, set: {adamw: fused}}]")
    said = " ".join(bench("plan", path).stdout.split())
    assert "2 of 3 rungs not supported: attention: cudnn" in said


@pytest.mark.slow
def test_a_plan_for_a_chip_that_is_not_here_holds_memory_to_its_datasheet() -> None:
    big = ("--set", "toggles.micro_batch_size=64")
    done = bench("plan", "ladders/h100.yaml", "--rungs", "batch of 64", *big, "--chip", "h100_sxm")
    assert done.returncode == 0, done.stderr
    assert "On H100 SXM" in done.stdout
    assert "fits into 80 GiB" in done.stdout
    done = bench("plan", "ladders/h100.yaml", "--rungs", "CUDA on H100", *big, "--chip", "T4")
    assert "will not fit into 16 GiB" in done.stdout
    done = bench("plan", "ladders/h100.yaml", "--chip", "H1000")
    assert done.returncode == 2
    assert "no chip is called 'H1000'; known are: V100" in done.stderr
    done = bench("plan", "ladders/h100.yaml", "--chip", "a100")
    assert "did you mean: A100 SXM" in done.stderr
    assert "did you mean: H100 SXM" in bench("plan", "ladders/h100.yaml", "--chip", "H100 SMX").stderr
    assert "trains on a CPU" in bench("plan", "ladders/mps.yaml", "--chip", "M1 Max").stdout
    done = bench("plan", "ladders/cpu.yaml", "--chip", "H100 SXM")
    assert done.returncode == 2
    assert "all rungs train on a CPU; --chip is for those of a GPU or TPU" in done.stderr


def test_a_plan_counts_the_processes_that_the_run_will_take(
    write_ladder, asked: ProbeResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.run.probe.probe", lambda *arguments, **options: asked)
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {micro_batch_size: 4}}]"
    path = write_ladder(rungs, ceiling_seconds=0.01)
    more = "and 1 for loss parity, and"
    for options, expected in (
        ((), f"1 round of 3 processes, without an A/A control, {more} 1 for the measured ceiling"),
        (("--repeats", "3"), f"3 rounds of 5 processes, the A/A controls included, {more} 2 for"),
        (("--until", "2%", "--ablate"), "5 to 20 rounds of 6 processes"),
    ):
        assert expected in " ".join(CliRunner().invoke(app, ["plan", str(path), *options]).stdout.split())


def test_the_version_is_printed() -> None:
    assert bench("--version").stdout.startswith("gpt2-bench ")


def results(tmp_path: Path) -> Path:
    append(tmp_path / "r.jsonl", record())
    return tmp_path / "r.jsonl"


def test_a_report_goes_to_stdout_as_markdown(tmp_path: Path) -> None:
    done = bench("report", results(tmp_path), "--markdown")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### h100 on h100-80gb-hbm3-x1\n\nGPT-2 124M on ")


MARKERS = ("<!-- scoreboard: bench report --update rewrites what follows -->", "<!-- end of scoreboard -->")


def test_a_report_writes_its_folder_and_updates_a_readme_between_its_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    start, end = MARKERS
    readme.write_text(f"before\n{start}\nstale\n{end}\nafter\n")
    done = bench("report", results(tmp_path), "--markdown", "--out", tmp_path / "reports", "--update", readme)
    assert done.returncode == 0, done.stderr
    page = tmp_path / "reports" / "h100-80gb-hbm3-x1" / "h100.md"
    assert "| baseline |" in page.read_text()
    assert "(h100-80gb-hbm3-x1/h100.md)" in (tmp_path / "reports" / "scoreboard.md").read_text()
    text = readme.read_text()
    assert text.startswith(f"before\n{start}\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "| baseline |" in text
    assert "stale" not in text


def test_csv_is_printed_although_a_readme_is_updated_too(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("\n".join([*MARKERS, ""]))
    done = bench("report", results(tmp_path), "--csv", "--update", readme)
    assert done.stdout.startswith("ladder,machine,")
    assert "| baseline |" in readme.read_text()


@pytest.mark.parametrize("output", [[], ["--markdown"]], ids=["terminal", "Markdown"])
def test_the_price_that_is_given_is_told_in_each_form_of_the_screen(
    output: list[str], tmp_path: Path
) -> None:
    append(tmp_path / "a.jsonl", record())
    done = CliRunner().invoke(app, ["report", str(tmp_path / "a.jsonl"), "--price-per-hour", "2.5", *output])
    assert "at 2.5 per hour" in " ".join(done.output.split())


def test_results_in_a_pipe_are_refused_with_what_to_do(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = bench("report", tmp_path / "pipe")
    assert done.returncode == 2
    said = "is no file and no folder; write the results into a file first"
    assert done.stderr == f"bench: {tmp_path / 'pipe'}: {said}\n"


def test_a_readme_without_markers_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("mine\n")
    done = bench("report", results(tmp_path), "--update", readme)
    assert done.returncode == 2
    assert readme.read_text() == "mine\n"


@pytest.mark.parametrize("content", [b"junk\n", b"", b'{"schema": 2}\n'])
def test_a_file_without_results_is_one_line_and_exit_code_2(content: bytes, tmp_path: Path) -> None:
    done = bench("report", write(tmp_path / "r.jsonl", content))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_breaks_its_lines_where_the_terminal_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    said = CliRunner().invoke(app, ["run", "--help"]).output
    words = said[said.index("Exit code:") : said.index("Example:")].rstrip()
    lines = [line.strip() for line in words.splitlines()]
    assert all(len(line) + 1 + len(after.split()[0]) > 78 for line, after in pairwise(lines)), lines


@pytest.mark.slow
def test_progress_is_live_on_a_terminal(write_ladder, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    ladder = write_ladder("[{name: a}]")
    command = [sys.executable, "-m", "bench.cli", "run", str(ladder), "--out", str(tmp_path)]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT, env=environ)
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], PATIENCE)[0]:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        seen += chunk
    assert process.wait(timeout=PATIENCE) == 0
    assert b"round 1/1  a: starting" in seen
    assert b" tokens/s" in seen


def test_the_block_on_a_terminal_grows_by_a_row_for_each_rung_with_its_gain_so_far() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, force_terminal=True, width=100, height=30)) as progress:
        for repetition in (1, 2):
            progress.finished(record(repetition=repetition))
            progress.finished(record("SDPA", 1, repetition, measurement=measurement(2000.0)))
        progress.finished(record("too large", 2, status="out_of_memory", error="no room"))
    last = out.getvalue().split("baseline")[-1]
    assert "2,000 tokens/s  2.00x" in last
    assert "out of memory: no room" in last
    assert out.getvalue().count("round") == 0  # no line for each process stays above it


def tried(name: str, index: int, tps: float, ratio: float, carried: bool) -> Record:
    found = Scout(over="baseline", ratio=ratio, floor=0.01, carried=carried, check="ok", reason=None)
    return record(name, index, kind="scout", measurement=measurement(tps), scout=found)


def test_a_try_is_told_with_what_it_decided_and_gives_way_to_the_rounds() -> None:
    out, block = io.StringIO(), io.StringIO()
    for console in (Console(file=out), Console(file=block, force_terminal=True, width=100, height=30)):
        with Progress(console) as progress:
            progress.started(Task(kind="scout", rung=ceiling_rung("cpu"), repetition=1), 3, None)
            progress.finished(tried("SDPA", 1, 2000.0, 2.0, True))
            progress.finished(tried("bfloat16", 2, 120.0, 0.12, False))
            progress.finished(record("SDPA", 1, measurement=measurement(2100.0)))
    assert "trying  " in out.getvalue()
    assert "2,000 tokens/s, first step 3.00 s; carried: 2.00x baseline" in out.getvalue()
    assert "120 tokens/s, first step 3.00 s; not carried: 0.12x baseline" in out.getvalue()
    last = block.getvalue().split("SDPA")[-1]
    assert "2,100 tokens/s" in last
    assert "not carried: 0.12x baseline" in last


def test_without_a_terminal_each_process_is_a_line() -> None:
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        progress.finished(record())
        progress.finished(record(repetition=2))
    assert len(out.getvalue().splitlines()) == 2


def test_each_process_beside_which_others_worked_is_told_of_as_it_ends() -> None:
    out = io.StringIO()
    with Progress(Console(file=out)) as progress:
        for cores in (0.4, 1.9):
            progress.finished(record(other_work_cores=cores, warnings=["steal time: 3.0%; choose another"]))
    said = out.getvalue()
    assert [said.count(each) for each in ("0.40 cores", "1.90 cores", "steal time")] == [1, 1, 1]


@pytest.mark.slow
def test_the_doctor_informs_and_exits_0(tmp_path: Path) -> None:
    done = bench("doctor", "--out", tmp_path / "results", "--full")
    assert done.returncode == 0, done.stderr
    for part in ("page faults", "other work", "noise", "What to do"):
        assert part in done.stdout
    assert not (tmp_path / "results").exists()


def test_pages_that_do_not_fit_onto_the_disk_leave_those_that_are_there(
    small_disk: Path, tmp_path: Path
) -> None:
    append(tmp_path / "a.jsonl", record())
    assert bench("report", tmp_path / "a.jsonl", "--out", small_disk).returncode == 0
    pages = {path: path.read_bytes() for path in small_disk.rglob("*.md")}
    append(tmp_path / "a.jsonl", record("another rung", 1))
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    done = bench("report", tmp_path / "a.jsonl", "--out", small_disk)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device" in done.stderr
    assert {path: path.read_bytes() for path in small_disk.rglob("*.md")} == pages
    assert not list(small_disk.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_messages_that_do_not_fit_onto_a_full_disk_end_no_run(tmp_path: Path) -> None:
    (tmp_path / "ladder.yaml").write_text(
        "name: test\nworkload: {model: tiny, data: synthetic, seq_len: 32}\n"
        "protocol: {repeats: 1, block_seconds: 0.01, blocks: 3, max_window_seconds: 1, ceiling_seconds: 0}\n"
        "rungs: [{name: a}]\n"
    )
    command = [sys.executable, "-m", "bench.cli", "run", tmp_path / "ladder.yaml", "--out", tmp_path / "out"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0
    assert "tokens/s" in done.stdout
    (file,) = (tmp_path / "out").rglob("*.jsonl")
    assert [r.status for r in read(file)[0]] == ["ok"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("program", "words"), [("bench", ["report", "{}"]), ("bench", ["--help"]), ("gpt2", ["--help"])]
)
def test_tables_and_helps_that_do_not_fit_onto_a_full_disk_are_one_line_and_exit_code_6(
    program: str, words: list[str], tmp_path: Path
) -> None:
    append(tmp_path / "a.jsonl", record())
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", f"{program}.cli", *(word.format(tmp_path) for word in words)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert done.returncode == 6
    assert done.stderr == f"{program}: cannot write the output: No space left on device\n"


def test_with_minutes_windows_have_the_fewest_blocks_and_tries_keep_theirs() -> None:
    ladder, _ = load_with_options(Path("cpu"), None, None, None, False, minutes=45)
    assert (ladder.protocol.blocks, ladder.protocol.short.blocks) == (3, 5)

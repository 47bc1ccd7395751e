"""Runs of real processes: what ends well, and every way to end badly, becomes a record."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy
import psutil
import pytest
from places import ROOT
from runs import GOOD, Silent, instead_of_workers
from samples import measurement
from waiting import Clock, await_gone, is_gone, said_in, until

from bench.analysis.schedule import Task
from bench.analysis.scoreboard import scoreboard
from bench.errors import BenchError
from bench.ladder.ladder import load
from bench.process import supervisor
from bench.process.shutdown import Stop
from bench.process.supervisor import CACHE, CODE
from bench.process.worker_side import compile_cache, mark_compile_cache
from bench.records.machine import GpuState, State
from bench.records.measurement import Measurement
from bench.records.record import Record, read
from bench.run import executor as processes
from bench.run import runner
from bench.run.command import Options
from bench.run.probe import ProbeResult, _first_here
from bench.run.runner import run
from bench.stats import MOST_ROUNDS_UNTIL
from gpt2.config.toggles import MATMUL_CHOICES, UnsupportedToggle
from gpt2.device import DEVICES, Cpu

pytestmark = pytest.mark.usefixtures("quick_start")


def run_with(
    write_ladder, tmp_path: Path, rungs: str, monkeypatch=None, script: str = "", **protocol: float | str
) -> list[Record]:
    """Run a ladder; with `script`, every worker is that Python program instead, or GOOD for a rung `good`."""
    ladder = load(write_ladder(rungs, **protocol))
    if monkeypatch:
        instead_of_workers(monkeypatch, script)
    result = run(ladder, Options(out=tmp_path / "results"), Silent())
    records, warnings = read(result.path)
    assert warnings == []
    assert records == result.records
    return records


def test_every_process_becomes_a_record_round_by_round(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a worker that trains nothing."""
    rungs = "[{name: a, set: {device: cpu}}, {name: b, set: {attention: sdpa}}]"
    records = run_with(write_ladder, tmp_path, rungs, monkeypatch, GOOD, repeats=2)
    a_round = [("cumulative", "a"), ("cumulative", "b"), ("control", "a"), ("control", "b")]
    found = [(r.repetition, r.kind, r.rung) for r in records]
    assert found == [(n, *each) for n in (1, 2) for each in a_round]
    assert {r.status for r in records} == {"ok"}
    assert records[1].toggles.all["attention"] == "sdpa"
    assert records[1].changed == ["attention=sdpa"]
    assert records[0].environment.machine in str(next((tmp_path / "results").iterdir()))


@pytest.mark.slow
def test_a_rung_learns_the_same_each_time_and_is_timed_in_blocks(write_ladder, tmp_path: Path) -> None:
    one, other = run_with(write_ladder, tmp_path, "[{name: a}]", repeats=2)[:2]
    first, again = one.measurement, other.measurement
    assert first is not None
    assert again is not None
    assert first.losses[:8] == again.losses[:8]
    assert len(first.block_seconds) >= 5
    assert first.peak_memory_bytes is not None


@pytest.mark.slow
def test_the_recorded_command_runs_the_rung_again(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = run_with(write_ladder, tmp_path, "[{name: 'a rung'}]", monkeypatch, GOOD)
    command = record.command.replace("python", sys.executable, 1).replace("m.json", str(tmp_path / "m.json"))
    command = command.replace("LADDER", str(tmp_path / "ladder.yaml"))
    subprocess.run(command, shell=True, check=True, capture_output=True, timeout=600)
    assert '"status":"ok"' in (tmp_path / "m.json").read_text()


@pytest.mark.slow
def test_several_ranks_run_under_torchrun_and_each_is_recorded(write_ladder, tmp_path: Path) -> None:
    rungs = "[{name: two, set: {world_size: 2, autocast: float16}}]"
    record, alone = run_with(write_ladder, tmp_path, rungs)
    assert record.status == "ok", record.error
    assert alone.kind == "parity"
    assert (alone.toggles.all["world_size"], alone.toggles.all["grad_accum_steps"]) == (1, 2)
    assert scoreboard([record, alone]).rows[0].status == "ok"  # with its losses
    measured = record.measurement
    assert measured is not None
    assert len(measured.ranks) == 2
    assert measured.tokens_per_step == 64
    assert measured.block_seconds in [rank.block_seconds for rank in measured.ranks]
    assert "torch.distributed.run --standalone --nproc-per-node 2" in record.command
    assert measured.ranks_agree is True
    assert measured.skipped_steps == 0


@pytest.fixture(scope="module")
def compiled(
    asked: ProbeResult, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], Measurement]:
    """A compiled rung in two rounds, by round and kind."""
    place = tmp_path_factory.mktemp("compiled")
    protocol = "repeats: 2, block_seconds: 0.01, blocks: 5, max_window_seconds: 1, ceiling_seconds: 0"
    (place / "ladder.yaml").write_text(
        "name: compiled\nworkload: {model: tiny, data: synthetic, seq_len: 32}\n"
        f"protocol: {{{protocol}}}\nrungs: [{{name: compiled, set: {{compile: default}}}}]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "probe", lambda *arguments, **options: asked)
        records = run(load(place / "ladder.yaml"), Options(out=place / "results"), Silent()).records
    return {(r.repetition, r.kind): r.measurement for r in records if r.measurement}


@pytest.mark.slow
def test_compiling_is_cold_in_the_first_round_and_warm_after(compiled) -> None:
    cold, warm = compiled[1, "cumulative"], compiled[2, "cumulative"]
    found = [each.compile_cache for each in (cold, compiled[1, "control"], warm)]
    assert found == ["cold", "cold", "warm"]
    assert cold.recompiles == warm.recompiles == 0


@pytest.mark.slow
def test_compiled_gradients_are_held_to_eager_ones_in_the_first_round(compiled) -> None:
    difference = compiled[1, "cumulative"].gradient_difference
    assert difference is not None
    assert difference < 1e-3
    assert compiled[1, "control"].gradient_difference is compiled[2, "cumulative"].gradient_difference is None


@pytest.mark.slow
def test_losses_wanted_after_the_window_are_taken_in_the_first_round_only(
    write_ladder, tmp_path: Path
) -> None:
    records = run_with(write_ladder, tmp_path, "[{name: a}]", repeats=2, loss_steps=150)
    first, *others = (r.measurement for r in records)
    assert first is not None
    assert len(first.losses) >= 150
    profiled = 1
    for other in others:
        assert other is not None
        assert other.block_steps is not None
        timed = other.block_steps * len(other.block_seconds)
        assert len(other.losses) == other.warmup_steps + timed + profiled


@pytest.mark.slow
def test_an_unsupported_rung_is_a_row_with_its_reason_and_is_tried_once(write_ladder, tmp_path: Path) -> None:
    rungs = (
        "[{name: good}, {name: tf32, set: {matmul_precision: high}}, "
        "{name: last, set: {matmul_precision: highest}}]"
    )
    records = run_with(write_ladder, tmp_path, rungs, repeats=2)
    assert [r.rung for r in records if r.kind == "cumulative"] == ["good", "tf32", "last", "good", "last"]
    assert records[1].status == "unsupported"
    assert "on a CPU choose medium" in (records[1].error or "")


BAD_ENDS = {
    "a crash": ("raise SystemExit(7)", "failed", "exit code 7"),
    "an exception": ("raise ValueError('the reason')", "failed", "exit code 1: ValueError: the reason"),
    "a segfault": ("import ctypes; ctypes.string_at(0)", "failed", "killed by SIGSEGV"),
    "an unexplained kill": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "failed",
        "killed by SIGKILL",
    ),
    "an exit without a result": ("pass", "failed", "exit code 0"),
}


@pytest.mark.parametrize("case", BAD_ENDS)
def test_a_bad_end_is_a_row_and_the_ladder_goes_on(
    case: str, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, status, error = BAD_ENDS[case]
    records = run_with(write_ladder, tmp_path, "[{name: bad}, {name: good}]", monkeypatch, script)
    assert [r.status for r in records] == [status, "ok"]
    assert error in (records[0].error or "")
    assert records[0].measurement is None


def test_out_of_memory_is_a_row_of_its_own_kind(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real worker under a real limit: the address space is too small for the batch."""
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    huge = "[{name: huge, set: {micro_batch_size: 200}}]"  # 5 GB of logits
    path = write_ladder(huge, workload="model: mini, seq_len: 128, data: synthetic")
    program = f"{limit}sys.argv[0] = 'worker'; runpy.run_module('bench.worker', run_name='__main__')"
    genuine = processes.worker_command

    def command(*arguments) -> list[str]:
        return ["-c", program, *genuine(*arguments)[2:]]

    monkeypatch.setattr(processes, "worker_command", command)
    (record,) = run(load(path), Options(out=tmp_path / "results"), Silent()).records
    assert record.status == "out_of_memory", record.error


def test_a_hang_ends_at_the_time_limit_with_everything_it_started(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        f"start_new_session=True)\nopen({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(supervisor, "time", Clock(lambda: pid_file.exists() and pid_file.read_text()))
    records = run_with(write_ladder, tmp_path, "[{name: hangs}]", monkeypatch, script)
    assert records[0].status == "timeout"
    assert "longer than protocol.timeout_seconds 600" in (records[0].error or "")
    assert is_gone(int(pid_file.read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_measured_and_ends_the_process(
    number: signal.Signals, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt() -> None:
        said_in(pid_file)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    rungs = "[{name: good}, {name: hangs}, {name: never}]"
    records = run_with(write_ladder, tmp_path, rungs, monkeypatch, script)
    assert [r.status for r in records] == ["ok", "interrupted"]
    assert is_gone(int(pid_file.read_text()))


def test_an_interrupt_while_an_outcome_is_being_kept_loses_nothing(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = processes.classify

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return genuine(*arguments)

    monkeypatch.setattr(processes, "classify", interrupted)
    records = run_with(write_ladder, tmp_path, "[{name: good}, {name: never}]", monkeypatch, GOOD)
    assert [(r.rung, r.status) for r in records] == [("good", "ok")]


def test_many_interrupts_count_as_one(write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt() -> None:
        said_in(pid_file)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0.002)

    # What arrives after the run meets the handlers of before, which would end the tests.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        records = run_with(write_ladder, tmp_path, "[{name: hangs}]", monkeypatch, script)
        sender.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [r.status for r in records] == ["interrupted"]
    assert is_gone(int(pid_file.read_text()))


@pytest.mark.slow
def test_a_time_limit_during_further_losses_keeps_the_window(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = Silent()
    monkeypatch.setattr(supervisor, "time", Clock(lambda: "losses" in watcher.phases))
    ladder = load(write_ladder("[{name: a}]", loss_steps=10**7))
    (record,) = run(ladder, Options(out=tmp_path / "results"), watcher).records
    assert record.status == "ok"
    assert record.measurement is not None
    # A busy machine adds warnings of its own about the window, before or after this one.
    (told,) = [warning for warning in record.warnings if warning.startswith("after the window: ")]
    assert told.startswith("after the window: took longer than")


def test_what_a_finished_process_left_running_is_ended(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        f"start_new_session=True)\nopen({str(pid_file)!r}, 'w').write(str(child.pid))\n"
    )
    run_with(write_ladder, tmp_path, "[{name: leaves}]", monkeypatch, script)
    assert is_gone(int(pid_file.read_text()))


@pytest.mark.slow
def test_a_rank_that_is_killed_is_the_cause_not_its_peer_s_complaint(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is the real one, except that rank 1 kills itself within the first step."""
    spoil = tmp_path / "spoil.py"
    spoil.write_text(
        "import os, runpy, signal, sys, gpt2.training.train\n"
        "def batches(batches, toggles, *, rank=0):\n"
        "    yield from genuine(batches, toggles, rank=rank) if rank == 0 else os.kill(os.getpid(), "
        "signal.SIGKILL)\nfrom gpt2.training import train\n"
        "genuine, train.micro_batches = train.micro_batches, batches\n"
        "runpy.run_module('bench.worker', run_name='__main__', alter_sys=True)\n"
    )
    genuine = processes.worker_command

    def command(*arguments) -> list[str]:
        worker = genuine(*arguments)
        place = worker.index("bench.worker")
        return [*worker[: place - 1], str(spoil), *worker[place + 1 :]]

    monkeypatch.setattr(processes, "worker_command", command)
    ladder = load(write_ladder("[{name: two, set: {world_size: 2}}]"))
    record = run(ladder, Options(out=tmp_path / "results"), Silent()).records[0]
    assert record.status == "failed"
    assert (record.error or "").startswith("killed by SIGKILL")


def test_a_failed_rung_keeps_the_last_lines_of_its_output(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import sys; sys.stderr.write('first\\nsecond\\n'); sys.exit(3)"
    records = run_with(write_ladder, tmp_path, "[{name: bad}]", monkeypatch, script)
    assert records[0].error == "exit code 3: second\nfirst"


class After(Silent):
    """Does something once the first process has been kept."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__()
        self.do, self.notes = do, list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, record: Record) -> None:
        do, self.do = self.do, lambda: None
        do()


@pytest.mark.slow
def test_a_ladder_that_is_edited_while_it_runs_is_measured_as_it_was(write_ladder, tmp_path: Path) -> None:
    path: Path = write_ladder(
        "[{name: a, set: {device: cpu}}, {name: b, set: {adamw: fused, micro_batch_size: 2}}]",
        workload="model: tiny, data: synthetic, seq_len: 32",
    )
    edited = path.read_text().replace("fused, micro_batch_size: 2", "foreach, micro_batch_size: 4")
    ladder = load(path)
    run(ladder, Options(out=tmp_path), After(lambda: path.write_text(edited)))
    (results,) = tmp_path.glob("*/test-*.jsonl")
    b = next(record for record in read(results)[0] if (record.rung, record.kind) == ("b", "cumulative"))
    assert load(path).hash != b.ladder_hash == ladder.hash
    assert b.measurement
    assert b.measurement.tokens_per_step == 64
    assert b.measurement.proofs
    assert b.measurement.proofs["adamw"].took_effect
    assert "fused" in b.measurement.proofs["adamw"].evidence


@pytest.mark.slow
def test_a_ladder_that_is_removed_while_it_runs_is_measured_to_its_end(write_ladder, tmp_path: Path) -> None:
    path: Path = write_ladder("[{name: a, set: {device: cpu}}]", repeats=2)
    result = run(load(path), Options(out=tmp_path), After(path.unlink))
    assert [record.status for record in result.records] == ["ok"] * 4
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("to", ["another", "nothing", "what no process can read"])
def test_a_text_that_changes_while_a_ladder_runs_ends_it_with_what_to_do(
    to: str, write_ladder, tmp_path: Path
) -> None:
    data = tmp_path / "mine.bin"
    (numpy.arange(8000, dtype=numpy.uint16) % 250).tofile(data)
    workload = "model: tiny, data: mine, seq_len: 32"
    path = write_ladder("[{name: a, set: {device: cpu}}, {name: b}]", workload=workload)
    text = data.read_bytes()
    options = Options(out=tmp_path, data=data)
    others = {"another": text[2:] + text[:2], "what no process can read": b"\xff" * len(text)}
    change = data.unlink if to == "nothing" else lambda: data.write_bytes(others[to])
    result = run(load(path), options, After(change))
    assert result.error
    assert f"{data}: the text changed while the run went on; put it back" in result.error
    assert result.error.endswith("the records before are kept, and --resume goes on from there")
    assert [record.rung for record in read(result.path)[0]] == ["a"]
    data.write_bytes(text)
    gone_on = run(load(path), replace(options, resume=True), Silent())
    assert gone_on.error is None
    rungs = [(record.kind, record.rung) for record in read(result.path)[0]]
    assert rungs == [("cumulative", "a"), ("control", "a"), ("cumulative", "b")]


@pytest.mark.parametrize("kept", [0, 1])
def test_a_process_that_cannot_be_started_is_not_blamed_on_the_results_file(
    kept: int, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, calls = processes.supervise, count()

    def supervise(argv: list[str], *rest):
        if next(calls) == kept:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return genuine([sys.executable, "-c", GOOD], *rest)

    monkeypatch.setattr(processes, "supervise", supervise)
    result = run(load(write_ladder("[{name: a}, {name: b}]")), Options(out=tmp_path), Silent())
    goes_on = "the records before are kept, and --resume goes on from there"
    rest = goes_on if kept else "there are no records yet"
    why = "its process could not be run: Resource temporarily unavailable"
    assert result.error == f"rung {'ab'[kept]!r}: {why}; {rest}"
    assert result.path.exists() is bool(kept)


@pytest.mark.slow
def test_where_the_working_directory_goes_in_the_middle_that_is_said_and_no_record_is_lost(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    ladder = load(write_ladder("[{name: a, set: {device: cpu}}, {name: b}]"))
    result = run(ladder, Options(out=Path("results")), After(lambda: shutil.rmtree(place)))
    assert result.error
    assert result.error.startswith("rung 'b': the working directory is no longer there; ")
    assert [record.rung for record in read(place / result.path)[0]] == ["a"]


def test_a_folder_of_results_that_is_moved_away_in_the_middle_loses_no_record(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    instead_of_workers(monkeypatch, GOOD)
    watcher = After(lambda: out.rename(tmp_path / "results-old"))
    result = run(load(write_ladder("[{name: a}, {name: b}]")), Options(out=out), watcher)
    assert result.error is None
    assert read(result.path)[0] == result.records
    assert [record.rung for record in result.records] == ["a", "b"]
    assert [note for note in watcher.notes if note.startswith(str(result.path))]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    write_ladder, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    for name, why in (("file", "Not a directory"), ("link", ".*link is a link to nothing")):
        with pytest.raises(
            BenchError, match=rf"cannot write to .* \({why}\); choose another folder with --out"
        ):
            run(load(write_ladder("[{name: a}]")), Options(out=tmp_path / name), Silent())


@pytest.mark.parametrize(
    ("name", "reason"), [("my cache", "without blanks or quotes"), ("file", "cannot write")]
)
def test_a_folder_that_no_compiler_can_use_is_refused_before_anything_runs(
    name: str, reason: str, write_ladder, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    options = Options(out=tmp_path / "out", compile_cache=tmp_path / name)
    with pytest.raises(BenchError, match=reason):
        run(load(write_ladder("[{name: a}]")), options, Silent())


def test_a_corpus_that_cannot_be_used_is_refused_before_anything_runs(write_ladder, tmp_path: Path) -> None:
    ladder = load(write_ladder("[{name: a}]", workload="model: tiny, data: nowhere, seq_len: 32"))
    with pytest.raises(BenchError, match=r"ladder\.yaml: workload\.data: corpus 'nowhere'"):
        run(ladder, Options(out=tmp_path / "results"), Silent())
    assert not (tmp_path / "results").exists()


def test_a_record_holds_no_path_of_the_corpus_or_of_a_ladder_from_elsewhere(
    write_ladder, tmp_path: Path
) -> None:
    import numpy as np

    corpus = tmp_path / "secret place.bin"
    np.arange(5000, dtype="<u2").__mod__(509).tofile(corpus)
    ladder = load(write_ladder("[{name: a}]", workload="model: tiny, data: mine, seq_len: 32"))
    (record,) = run(ladder, Options(out=tmp_path / "results", data=corpus), Silent()).records
    assert record.status == "ok", record.error
    assert "secret" not in record.model_dump_json()
    assert str(tmp_path) not in record.model_dump_json()
    assert "--data DATA" in record.command
    assert record.data_sha256 is not None


@pytest.mark.slow
def test_a_rung_that_takes_larger_steps_is_followed_by_its_parity_process(
    write_ladder, tmp_path: Path
) -> None:
    rungs = "[{name: a}, {name: b, set: {micro_batch_size: 4}}]"
    records = run_with(write_ladder, tmp_path, rungs)
    assert [(r.kind, r.rung) for r in records] == [("cumulative", "a"), ("cumulative", "b"), ("parity", "b")]
    (child,) = [r for r in records if r.kind == "parity"]
    assert child.status == "ok", child.error
    assert child.toggles.all["grad_accum_steps"] == 4
    assert child.measurement is not None
    larger = next(r.measurement for r in records if r.rung == "b" and r.kind == "cumulative")
    assert larger is not None
    assert child.measurement.losses == pytest.approx(larger.losses[:5], rel=1e-5)
    assert child.measurement.block_seconds == []
    assert child.measurement.tokens_per_second is None


def test_every_toggle_of_a_real_process_is_proved(write_ladder, tmp_path: Path) -> None:
    (record,) = run_with(write_ladder, tmp_path, "[{name: a, set: {attention: sdpa, adamw: fused}}]")
    assert record.measurement is not None
    proofs = record.measurement.proofs
    assert proofs is not None
    assert set(proofs) == set(record.toggles.all)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    assert "_scaled_dot_product_flash_attention_for_cpu" in proofs["attention"].evidence
    assert record.measurement.attention_kernel == "flash"
    # One rank, and no scaler.
    assert record.measurement.ranks_agree is record.measurement.skipped_steps is None


@pytest.mark.slow
def test_an_ablation_measures_each_change_alone_and_left_out(write_ladder, tmp_path: Path) -> None:
    rungs = "[{name: a}, {name: b, set: {attention: sdpa}}, {name: c, set: {adamw: fused}}]"
    ladder = load(write_ladder(rungs))
    records = run(ladder, Options(out=tmp_path, ablate=True), Silent()).records
    # b alone is b, b left out is c alone, c left out is b.
    rungs_of_ours = [("cumulative", name, "ok") for name in "abc"]
    assert [(r.kind, r.rung, r.status) for r in records] == [*rungs_of_ours, ("alone", "c", "ok")]
    assert "--kind alone" in records[3].command


@pytest.mark.slow
def test_the_ceiling_is_measured_in_a_process_of_its_own(write_ladder, tmp_path: Path) -> None:
    records = run_with(write_ladder, tmp_path, "[{name: a}]", repeats=2, ceiling_seconds=0.01)
    ceilings = [r for r in records if r.ceiling]
    found = [(r.repetition, r.kind, r.rung, r.status) for r in ceilings]
    assert found == [(1, "ceiling", "ceiling", "ok"), (2, "ceiling", "ceiling", "ok")]
    assert all(r.ceiling and r.ceiling.best.flops_per_second > 1e9 for r in ceilings)


def test_rounds_are_added_until_every_interval_is_narrow_enough(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are made up: their noise allows 50 % at once, and 0.1 % never."""
    rounds = made_up_rounds(write_ladder, tmp_path, monkeypatch)
    assert rounds(0.5) == 5
    assert rounds(0.001) == MOST_ROUNDS_UNTIL
    assert 5 < rounds(0.022) < MOST_ROUNDS_UNTIL


def made_up_rounds(write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """How many rounds a run takes until its intervals are as narrow as given."""
    import random

    from samples import record

    noise = random.Random(7)

    def made_up(self, task: Task) -> Record:
        speed = 1000.0 * (1 + task.rung.index) * noise.gauss(1.0, 0.02)
        facts = {"kind": task.kind, "toggles": task.rung.toggles, "measurement": measurement(speed)}
        return record(task.rung.name, task.rung.index, task.repetition, data_sha256=None, **facts)

    monkeypatch.setattr(processes.Executor, "run", made_up)
    numbers = iter(range(100))

    def rounds(width: float) -> int:
        ladder = load(write_ladder("[{name: a}, {name: b, set: {adamw: fused}}]", until=width))
        records = run(ladder, Options(out=tmp_path / str(next(numbers))), Silent()).records
        return max(record.repetition for record in records)

    return rounds


def test_an_ablation_of_some_rungs_only_is_refused(write_ladder, tmp_path: Path) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b}]"))
    with pytest.raises(BenchError, match="leave out --rungs"):
        run(ladder, Options(out=tmp_path, ablate=True, rungs=("b",)), Silent())


@pytest.mark.slow
def test_what_was_compiled_and_kept_is_warm_in_a_later_run(write_ladder, tmp_path: Path) -> None:
    ladder = load(write_ladder("[{name: a, set: {compile: default}}]", timeout_seconds=600))
    options = Options(out=tmp_path / "out", compile_cache=tmp_path / "kept")
    found = []
    for _ in range(2):
        (record,) = run(ladder, options, Silent()).records
        assert record.measurement
        found.append(record.measurement.compile_cache)
    assert found == ["cold", "warm"]


def caches_of_workers(monkeypatch: pytest.MonkeyPatch, script: str = GOOD) -> list[tuple[str, str]]:
    """Folder and name of the compiled code that workers are given, in order; each of them trains nothing."""
    caches = list[tuple[str, str]]()

    def supervise(argv: list[str], environ: dict[str, str], *rest):
        caches.append((environ[CACHE], environ[CODE]))
        return genuine([sys.executable, "-c", script], environ, *rest)

    genuine = processes.supervise
    monkeypatch.setattr(processes, "supervise", supervise)
    return caches


def test_code_compiled_and_kept_is_for_a_later_run_of_the_same_rung_only(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = caches_of_workers(monkeypatch)
    for changes in ("compile: default", "compile: default", "compile: default, gelu: sigmoid"):
        ladder = load(write_ladder(f"[{{name: a, set: {{{changes}}}}}]"))
        run(ladder, Options(out=tmp_path / "out", compile_cache=tmp_path / "kept"), Silent())
    first, again, other = caches
    assert first == again != other
    assert Path(first[0]).is_relative_to(tmp_path / "kept")


@pytest.mark.parametrize("fact", ["code_hash", "chip", "cpu"])
def test_code_compiled_and_kept_is_not_for_other_code_or_another_machine(
    fact: str, asked: ProbeResult, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = caches_of_workers(monkeypatch)
    ladder = load(write_ladder("[{name: a, set: {compile: default}}]"))
    for machine in (asked.environment, asked.environment.model_copy(update={fact: "another"})):
        found = asked.model_copy(update={"environment": machine})
        monkeypatch.setattr(runner, "probe", lambda *_, found=found, **__: found)
        run(ladder, Options(out=tmp_path / "out", compile_cache=tmp_path / "kept"), Silent())
    first, other = caches
    assert first != other


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_what_is_asked_of_the_machine_ends_with_the_command_that_asks(
    sent: signal.Signals, code: int, write_ladder, tmp_path: Path
) -> None:
    words = [sys.executable, "-P", "-m", "bench.cli", "run", write_ladder("[{name: a}]"), "--out", tmp_path]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) as command:
        of_command = psutil.Process(command.pid)
        (asking,) = until(
            lambda: [each.pid for each in of_command.children() if "probe" in told(each)], command
        )
        command.send_signal(sent)
        assert command.wait(timeout=60) == code
        await_gone(asking)


def told(process: psutil.Process) -> str:
    """The command line of a process; empty where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def test_rungs_that_are_tried_share_a_folder_of_compiled_code_but_for_what_torch_forgets(
    write_ladder, asked: ProbeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which kernel attention takes is no part of torch's keys, and the number of threads was none."""
    changes = "{gelu: sigmoid}", "{attention: sdpa}", "{threads: 2}"
    more = ", ".join(f"{{name: rung {n}, set: {change}}}" for n, change in enumerate(changes))
    caches = caches_of_workers(monkeypatch)
    ladder = load(write_ladder(f"[{{name: a}}, {more}]", carry="if_faster"))
    executor = processes.Executor(ladder, Options(out=tmp_path), tmp_path, "", asked, Silent())
    for rung in (*ladder.rungs, ladder.rungs[0]):
        executor.run(Task(kind="scout", rung=rung, repetition=1))
    first, same_folder, sdpa, threads, again = caches
    assert again == first
    assert same_folder[0] == first[0]
    assert same_folder[1] != first[1]
    assert len({first[0], sdpa[0], threads[0]}) == 3


@pytest.mark.parametrize(
    ("mark", "kept"),
    [("", False), (";pathlib.Path(cache, 'filled-by-bench-' + e['BENCH_CODE']).touch()", True)],
)
def test_of_a_process_that_was_killed_only_complete_code_is_kept_for_a_later_run(
    mark: str, kept: bool, write_ladder, asked: ProbeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = "import os, pathlib; e = os.environ; cache = e['TORCHINDUCTOR_CACHE_DIR']; os.makedirs(cache)"
    torn = ";pathlib.Path(cache, 'torn.so').touch()"
    caches = caches_of_workers(monkeypatch, f"{begun}{torn}{mark}; os.kill(os.getpid(), 9)")
    options = Options(out=tmp_path, compile_cache=tmp_path / "kept")
    ladder = load(write_ladder("[{name: a}]"))
    executor = processes.Executor(ladder, options, tmp_path, "", asked, Silent())
    executor.observe(Task(kind="cumulative", rung=ladder.rungs[0], repetition=1), Stop())
    assert Path(caches[0][0], "torn.so").exists() is kept


@pytest.mark.parametrize(
    ("end", "changes"),
    [
        ("raise SystemExit(1)", False),
        ("pass", False),  # as on another node, where no outcome is written
        ("import os; os.kill(os.getpid(), 9)", True),
    ],
)
def test_a_shared_folder_of_compiled_code_is_given_up_once_a_process_was_killed(
    end: str, changes: bool, write_ladder, asked: ProbeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = caches_of_workers(monkeypatch, end)
    ladder = load(write_ladder("[{name: a}]", carry="if_faster"))
    executor = processes.Executor(ladder, Options(out=tmp_path), tmp_path, "", asked, Silent())
    for repetition in (1, 2):
        executor.observe(Task(kind="scout", rung=ladder.rungs[0], repetition=repetition), Stop())
    first, second = caches
    assert (first != second) is changes


@pytest.mark.parametrize(
    ("there", "state"),
    [
        ([], "cold"),
        (["half-written.py"], "cold"),
        (["code.py", "filled-by-bench-mine"], "warm"),
        (["code.py", "filled-by-bench-other"], "shared"),
    ],
)
def test_a_cache_is_warm_only_where_all_code_came_into_it(
    there: list[str], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in there:
        (tmp_path / name).touch()
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setenv(CODE, "mine")
    assert compile_cache() == state
    assert mark_compile_cache() is bool(there)
    assert compile_cache() == ("warm" if there else "cold")


ALL = {(repetition, kind) for repetition in (1, 2) for kind in ("cumulative", "control")}


@pytest.mark.slow
@pytest.mark.parametrize(("control", "proved"), [("last", {(1, "cumulative")}), ("first_and_last", ALL)])
def test_where_time_is_short_the_first_process_of_a_rung_alone_proves_its_toggles(
    control: str, proved: set[tuple[int, str]], write_ladder, tmp_path: Path
) -> None:
    records = run_with(write_ladder, tmp_path, "[{name: a}]", repeats=2, control=control)
    assert {(r.repetition, r.kind) for r in records} == ALL
    assert {(r.repetition, r.kind) for r in records if r.measurement and r.measurement.proofs} == proved
    assert all(r.measurement and r.measurement.proofs is not None for r in records)
    (row,) = scoreboard(records).rows
    assert row.status == "ok"


def choices_of_workers(monkeypatch: pytest.MonkeyPatch, script: str = GOOD) -> list[str]:
    """The file of matmuls' choices that workers are given, in order; "" for none. Each runs this script."""
    files, genuine = list[str](), processes.supervise

    def supervise(argv: list[str], environ: dict[str, str], *rest):
        files.append(environ[MATMUL_CHOICES])
        return genuine([sys.executable, "-c", script], environ, *rest)

    monkeypatch.setattr(processes, "supervise", supervise)
    return files


@pytest.mark.parametrize(("control", "kept"), [("last", True), ("first_and_last", False)])
def test_where_time_is_short_processes_of_alike_rungs_are_told_of_one_file_for_the_ways_of_matmuls(
    control: str, kept: bool, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MATMUL_CHOICES, "left over in the shell")
    files = choices_of_workers(monkeypatch)
    rungs = "[{name: a}, {name: b, set: {adamw: fused}}, {name: c, set: {threads: 1}}]"
    records = run(load(write_ladder(rungs, control=control)), Options(out=tmp_path), Silent()).records
    of = {record.rung: file for record, file in zip(records, files, strict=True)}
    if kept:
        assert of["a"] == of["b"] != of["c"]
        assert all(of.values())
    else:
        assert set(of.values()) == {""}


@pytest.mark.parametrize(("cores", "left"), [(None, "x"), (1.5, "")])
def test_what_a_process_chose_that_other_work_disturbed_is_chosen_again(
    cores: float | None,
    left: str,
    write_ladder,
    asked: ProbeResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choices_of_workers(monkeypatch, f"import os; open(os.environ[{MATMUL_CHOICES!r}], 'a').write('x')")
    monkeypatch.setattr(processes, "other_work_cores", lambda busiest, **facts: cores)
    ladder = load(write_ladder("[{name: a}]", control="last"))
    executor = processes.Executor(ladder, Options(out=tmp_path), tmp_path, "", asked, Silent())
    executor.observe(Task(kind="cumulative", rung=ladder.rungs[0], repetition=1), Stop())
    assert "".join(file.read_text() for file in tmp_path.glob("matmuls-*")) == left


def proofs_of_workers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How workers are told to take proofs, in order; each of them trains nothing."""
    proofs, genuine = list[str](), processes.supervise

    def supervise(argv: list[str], *rest):
        proofs.append(argv[argv.index("--proofs") + 1])
        return genuine([sys.executable, "-c", GOOD], *rest)

    monkeypatch.setattr(processes, "supervise", supervise)
    return proofs


@pytest.mark.parametrize(
    ("protocol", "told"),
    [
        ({}, ["each"] * 4),
        ({"control": "last"}, ["once", "none", "none", "none"]),
        ({"carry": "if_faster"}, ["once", "once", "once", "none", "none", "none"]),  # two tries before
    ],
)
def test_where_time_is_short_the_first_process_of_a_rung_and_each_try_are_asked_for_proofs(
    protocol: dict[str, str],
    told: list[str],
    write_ladder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proofs = proofs_of_workers(monkeypatch)
    ladder = load(write_ladder("[{name: a}]", repeats=2, **protocol))
    records = run(ladder, Options(out=tmp_path), Silent()).records
    assert proofs == told
    assert [record.command.split("--proofs ")[1].split()[0] for record in records] == told


def test_where_a_process_ended_before_it_proved_anything_the_next_of_its_rung_is_asked(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs, genuine = list[str](), processes.supervise

    def supervise(argv: list[str], *rest):
        proofs.append(argv[argv.index("--proofs") + 1])
        return genuine([sys.executable, "-c", GOOD if len(proofs) > 1 else "raise SystemExit(1)"], *rest)

    monkeypatch.setattr(processes, "supervise", supervise)
    ladder = load(write_ladder("[{name: a}]", repeats=3, control="last"))
    records = run(ladder, Options(out=tmp_path), Silent()).records
    asked = [how for how, record in zip(proofs, records, strict=True) if record.kind == "cumulative"]
    assert asked == ["once", "once", "none"]


def test_a_run_that_is_resumed_asks_for_proofs_again(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have been set up differently since."""
    proofs = proofs_of_workers(monkeypatch)
    for rounds in (2, 4):
        ladder = load(write_ladder("[{name: a}]", repeats=rounds, control="last"))
        run(ladder, Options(out=tmp_path, resume=rounds > 2), Silent())
    assert proofs == ["once", "none", "none", "none"] * 2


@pytest.mark.parametrize(("carry", "shared"), [("always", False), ("if_faster", True)])
def test_a_control_compiles_in_the_first_round_where_its_rung_does(
    carry: str, shared: bool, write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = caches_of_workers(monkeypatch)
    ladder = load(write_ladder("[{name: a}]", repeats=2, carry=carry))
    records = run(ladder, Options(out=tmp_path), Silent()).records
    of = {
        kind: {cache for record, cache in zip(records, caches, strict=True) if record.kind == kind}
        for kind in ("cumulative", "control")
    }
    assert len(of["cumulative"]) == len(of["control"]) == 1
    assert (of["cumulative"] == of["control"]) is shared


@pytest.mark.slow
def test_what_the_machine_did_meanwhile_is_in_the_record(write_ladder, tmp_path: Path) -> None:
    # Long enough for the runner to look in, however busy the machine is.
    (record,) = run_with(write_ladder, tmp_path, "[{name: a}]", block_seconds=1, max_window_seconds=10)
    for state in (record.before, record.during, record.after):
        assert state is not None
        assert state.memory_available_bytes > 0


def look(**gpu) -> State:
    quiet = State(load_average=None, cpu_mhz=None, swap_used_bytes=0, memory_available_bytes=1)
    return quiet.model_copy(update={"gpus": [GpuState(index=0, **gpu)]})


def test_a_gpu_is_judged_by_all_looks_at_it_at_work_and_by_who_else_uses_it_afterwards() -> None:
    at_work = [look(sm_clock_mhz=990, throttle_reasons=["heat"]), look(sm_clock_mhz=1010)]
    at_work.append(look(throttle_reasons=["power"]))  # a look that the driver did not answer in full
    judged = processes._under_load(at_work, look(sm_clock_mhz=200, other_processes=1)).gpus[0]
    assert judged.throttle_reasons == ["heat", "power"]
    assert (judged.sm_clock_mhz, judged.other_processes) == (1000, 1)


def test_who_else_uses_a_gpu_is_not_known_while_the_rung_is_at_work() -> None:
    assert processes._together([look(other_processes=1)]).gpus[0].other_processes is None


def test_a_process_that_failed_on_a_full_disk_says_that_it_is_full(
    write_ladder, asked: ProbeResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches_of_workers(monkeypatch, "raise SystemExit('CppCompileError')")
    monkeypatch.setattr(processes, "FULL", 2**60)
    executor = processes.Executor(
        load(write_ladder("[{name: a}]")), Options(out=tmp_path), tmp_path, "", asked, Silent()
    )
    record = executor.run(Task(kind="cumulative", rung=executor.ladder.rungs[0], repetition=1))
    assert record.status == "failed"
    assert str(record.error).startswith(
        "the disk of temporary files is full (free some, or set TMPDIR): exit code 1: CppCompileError"
    )


def test_too_little_memory_for_a_rung_is_a_warning_in_its_record(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = processes.warnings
    monkeypatch.setattr(processes, "warnings", lambda *a, **k: genuine(*a, **{**k, "memory_bytes": 2**50}))
    (record,) = run_with(write_ladder, tmp_path, "[{name: good}]", monkeypatch, GOOD)
    assert any("GiB needed" in warning for warning in record.warnings)


def test_a_run_on_another_chip_than_the_ladder_s_says_so(write_ladder, tmp_path: Path) -> None:
    path = write_ladder("[{name: a}]")
    path.write_text(path.read_text().replace("name: test\n", "name: test\nchip: T4\n"))
    notes: list[str] = []

    class Noting(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    with pytest.raises(BenchError):  # before any process starts
        run(load(path), Options(out=tmp_path / "out", resume=True), Noting())
    assert [note.split(", and this is ")[0] for note in notes] == [f"{path} is written for T4"]


def test_a_machine_without_the_last_rung_s_device_is_described_by_the_last_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Absent(Cpu):
        def __init__(self, *arguments: object) -> None:
            raise UnsupportedToggle("device", "cuda", "none here; choose cpu")

    class Present(Cpu):
        pass

    monkeypatch.setitem(DEVICES, "cuda", Absent)
    monkeypatch.setitem(DEVICES, "mps", Present)
    assert isinstance(_first_here(["cuda", "mps", "cpu"])[0], Present)
    assert type(_first_here(["cuda"])[0]) is Cpu


@pytest.mark.parametrize(("allocator", "told"), [("system", ["page faults: costly"]), ("thp", [])])
def test_page_faults_are_told_unless_a_rung_of_the_ladder_avoids_them(
    allocator: str, told: list[str], write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "costly_page_faults", lambda: ("page faults: costly",))
    instead_of_workers(monkeypatch, GOOD)
    rungs = f"[{{name: a, set: {{device: cpu}}}}, {{name: b, set: {{allocator: {allocator}, adamw: fused}}}}]"
    ladder = load(write_ladder(rungs, workload="model: gpt2, data: synthetic, seq_len: 1024"))
    records = run(ladder, Options(out=tmp_path / "results"), Silent()).records
    assert [line for line in records[0].warnings if line.startswith("page faults")] == told

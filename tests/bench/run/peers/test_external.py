"""Timing another trainer: a stand-in's real processes with nanoGPT's lines, and each way to end badly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import standin
from places import ROOT
from runs import Silent
from standin import SILENT, SINGLE_STEPS, await_none, paced, program
from waiting import PATIENCE

from bench.analysis.scoreboard import scoreboard
from bench.host import telemetry
from bench.ladder.ladder import load
from bench.ladder.peers import PEERS
from bench.process import pty_process as foreign
from bench.process.pty_process import Program, Usage
from bench.records.record import Outcome, Record, read
from bench.run.command import Options
from bench.run.peers import external
from bench.run.peers.checkout import peer_variables, processors
from bench.run.runner import run
from gpt2.config.toggles import Toggles
from gpt2.hardware.host import missing_allocator

Timed = Callable[..., tuple[Outcome, str]]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Timed:
    """Time a ladder's peer, in this process: the outcome, and what was printed.

    The peer is a real process, and its lines are read as ever, but by the clock that they are timed by each
    comes `seconds` after the one before. Once it has printed the line `last`, the time is up.
    """
    genuine = Program.lines
    monkeypatch.setattr(external, "age", lambda: 0.0)  # of this process, which times others too

    def time_it(ladder: Path, seconds: float = 0.02, last: str | None = None) -> tuple[Outcome, str]:
        def lines(self: Program, deadline: float) -> Iterator[tuple[float, str]]:
            at = time.perf_counter()
            assert deadline <= at + load(ladder).protocol.timeout_seconds - external.LAST_SECONDS
            for _, text in genuine(self, deadline):
                at += seconds
                yield at, text
                if text == last:
                    return

        monkeypatch.setattr(Program, "lines", lines)
        rung = load(ladder).rung("other")
        assert rung.external
        outcome = external._run(load(ladder), rung, rung.external, ladder.with_name("m.json"))
        return outcome, capsys.readouterr().out

    return time_it


def test_a_peer_is_timed_by_the_arrival_of_its_lines(peer, tmp_path: Path) -> None:
    outcome, printed = standin.timed(peer(paced(), **SINGLE_STEPS))
    assert outcome.status == "ok", outcome.error
    found = outcome.measurement
    assert found is not None
    assert (found.tokens_per_step, found.block_steps, len(found.block_seconds)) == (64, 1, 5)
    assert min(found.block_seconds) >= 0.02
    assert len(found.losses) == found.warmup_steps + 5
    assert found.losses[:2] == [10.0, 9.99]
    assert found.grad_norms == []
    assert (found.first_step_seconds, found.recompiles, found.data_wait_seconds) == (None, None, None)
    assert found.claimed_step_seconds is not None
    assert set(found.claimed_step_seconds) == {0.02}
    assert "iter 0: loss" in printed
    await_none(tmp_path / "checkout")  # it was ended, though it wanted to train on


def test_a_line_is_timed_when_it_comes_and_not_when_the_next_is_read(tmp_path: Path) -> None:
    text = "import os, time\nprint('one')\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('two')"
    with Program([sys.executable, "-c", text], tmp_path, dict(os.environ)) as program:
        lines = program.lines(time.perf_counter() + PATIENCE)
        first = next(lines)
        between = time.perf_counter()
        (tmp_path / "go").touch()
        second = next(lines)
    assert (first[1], second[1]) == ("one", "two")
    assert first[0] <= between <= second[0]


def test_lines_end_when_time_is_up() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    with Program(words, ROOT, dict(os.environ)) as program:
        assert list(program.lines(time.perf_counter() + 0.1)) == []
        assert program.exit_code is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the most that another process held")
def test_the_peak_memory_is_that_of_the_window(peer, timed: Timed) -> None:
    """What was held before and given back does not count; what is held within does."""
    mib = "2**20"
    text = f"held = bytearray(400 * {mib})\ndel held\nkept = bytearray(100 * {mib})\n{program()}"
    outcome, _ = timed(peer(text))
    assert outcome.status == "ok", outcome.error
    found = outcome.measurement
    assert found is not None
    assert found.peak_memory_method == "resident, window (VmHWM)"
    assert found.peak_memory_bytes is not None
    assert found.run_peak_memory_bytes is not None
    assert 100 * 2**20 < found.peak_memory_bytes < 300 * 2**20
    assert found.run_peak_memory_bytes > 400 * 2**20


def test_on_a_gpu_the_peak_is_what_is_in_use_beyond_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([1000, 5000, 7000, 6000])
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda place: next(told))
    with Program([sys.executable, "-c", "input()"], ROOT, dict(os.environ)) as program:
        usage = Usage(program, on_gpu=True)
        usage.begin()
        usage.sample()
        usage.sample()
    assert usage.peak_memory_bytes == 6000
    assert usage.method == "whole GPU, beyond what was used before (NVML, sampled)"


@pytest.mark.parametrize(
    ("on_gpu", "told", "peak", "method"),
    [
        (True, [None, 2000, None, 3000], 3000, "allocated, whole run (by its own log)"),
        (True, [None], 6000, "whole GPU, beyond what was used before (NVML, sampled)"),
        (False, [3000], None, "not measured"),
    ],
)
def test_on_a_gpu_a_peer_s_own_account_of_its_memory_counts_and_is_called_so(
    on_gpu: bool, told: list[int | None], peak: int | None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([1000, 7000])
    monkeypatch.setattr(telemetry, "gpu_memory_used", lambda place: next(seen))
    with Program([sys.executable, "-c", "input()"], ROOT, dict(os.environ)) as program:
        usage = Usage(program, on_gpu=on_gpu)
        if on_gpu:
            usage.begin()
        for each in told:
            usage.note_allocated(each)
    assert (usage.peak, usage.method) == (peak, method)


@pytest.mark.parametrize("cache", [None, "inductor-external-3", "a folder"])
def test_jax_takes_memory_as_it_needs_it_and_compiles_into_the_rung_s_own_folder_or_none(
    cache: str | None, peer, timed: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "the user's")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if cache:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / cache))
    folder = str(tmp_path / cache) if cache else ""
    keeps = "os.environ['JAX_COMPILATION_CACHE_DIR']"
    text = (
        f"import os\nassert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'\nassert {keeps} == "
        f"{folder!r}\nif {keeps}:\n    os.makedirs({keeps} + '/jit_step', exist_ok=True)\n"
    )
    ladder = peer(text + program().replace("iter {step}", "step {step}"), peer="jax")
    found = []
    for _ in range(2):
        outcome, _ = timed(ladder)
        assert outcome.measurement is not None, outcome.error
        found.append(outcome.measurement.compile_cache)
    assert found == (["cold", "warm"] if cache else [None, None])


@pytest.mark.parametrize("name", ["nanogpt", "llmc", "transformers", "own"])
def test_other_peers_are_given_no_variable_of_jax_s(name: str) -> None:
    given = peer_variables(Toggles(device="cuda"), PEERS[name], "/scratch/inductor")
    assert not [variable for variable in given if variable.startswith(("JAX", "XLA"))]


def test_a_peer_that_holds_its_output_back_at_a_pipe_writes_it_at_once_here(peer, timed: Timed) -> None:
    """As C programs do: the terminal that they are run at makes their lines come one by one."""
    as_c_does = "sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=sys.stdout.isatty())"
    assert timed(peer(f"import io, sys\n{as_c_does}\n{program()}"))[0].status == "ok"


def test_what_a_peer_does_between_its_steps_is_warned_of(peer, timed: Timed) -> None:
    outcome, _ = timed(peer(program()), seconds=0.06)
    assert outcome.status == "ok", outcome.error
    (warning,) = outcome.warnings
    said = "nanoGPT's own log says 20 ms per step, and by the arrival of its lines a step took "
    assert warning.startswith(said)


@pytest.mark.parametrize(("name", "told"), [("nanogpt", False), ("gollem", True)])
def test_nanogpt_s_own_time_of_one_step_among_several_is_neither_kept_nor_warned_of(
    name: str, told: bool, peer, timed: Timed
) -> None:
    lines = {
        "nanogpt": "iter {step}: loss 9.0, time 1.00ms",
        "gollem": "Step {step}: train_loss: 9.0, norm: 1.0, time_per_step: 1.00",
    }
    text = f"import time\nfor step in range(0, 1000, 5):\n    print(f'{lines[name]}')\ntime.sleep(600)\n"
    outcome, _ = timed(peer(text, peer=name))
    assert outcome.measurement is not None, outcome.error
    assert bool(outcome.measurement.claimed_step_seconds) == told
    assert any("own log says" in warning for warning in outcome.warnings) == told


def test_a_peer_that_ends_by_itself_after_five_blocks_was_measured(peer, timed: Timed) -> None:
    outcome, _ = timed(peer(program(12, trains_on=False), blocks=10, block_seconds=0.001))
    assert outcome.status == "ok", outcome.error
    assert outcome.measurement is not None
    assert len(outcome.measurement.block_seconds) == 7


def test_a_peer_whose_loss_is_no_number_in_the_window_has_failed(peer, timed: Timed) -> None:
    text = program().replace("10 - step / 100", "10 + 0 * (1e999 if step > 3 else 1)")
    outcome, _ = timed(peer(text, blocks=10))
    assert outcome.status == "failed"
    first = (outcome.error or "").splitlines()[0]
    assert re.fullmatch(r"nanoGPT: its loss is not a number: nan at step \d+", first)


def test_a_peer_that_takes_too_few_steps_is_told_to_take_more(peer, timed: Timed) -> None:
    outcome, _ = timed(peer(program(8, trains_on=False), block_seconds=0.001))
    assert outcome.status == "failed"
    assert outcome.error == (
        "nanoGPT ended with exit code 0, after 8 progress lines and 3 blocks, too few for a window: tell it "
        "to take more steps"
    )


def test_a_peer_that_dies_is_told_by_its_last_line_without_the_place_of_its_checkout(
    peer, timed: Timed, tmp_path: Path
) -> None:
    outcome, printed = timed(peer(f"{program(2, trains_on=False)}raise ValueError('no such data')\n"))
    assert outcome.status == "failed"
    said = "nanoGPT ended with exit code 1, after 2 progress lines and 0 blocks: ValueError:"
    assert (outcome.error or "").startswith(said)
    assert "$CHECKOUT/train.py" in printed
    assert str(tmp_path) not in printed


@pytest.mark.parametrize(
    "error",
    ["MemoryError", "RuntimeError('CUDA error: out of memory')", "RuntimeError('RESOURCE_EXHAUSTED: x')"],
)
def test_a_peer_without_memory_is_out_of_memory(peer, timed: Timed, error: str) -> None:
    outcome, _ = timed(peer(f"raise {error}"))
    assert outcome.status == "out_of_memory", outcome.error


def test_a_peer_that_says_that_it_cannot_run_here_is_unsupported(peer, timed: Timed) -> None:
    outcome, _ = timed(peer("print('jax is not installed; pip install jax')\nraise SystemExit(69)\n"))
    assert outcome.status == "unsupported"
    assert outcome.error == "nanoGPT: jax is not installed; pip install jax"


def test_a_program_that_is_not_there_is_unsupported(peer, timed: Timed) -> None:
    outcome, _ = timed(peer("", command="env A=1 ./train_gpt2"))
    assert outcome.status == "unsupported"
    assert outcome.error is not None
    assert "nanoGPT: ./train_gpt2 is no program" in outcome.error
    assert "docs/peers.md" in outcome.error


def test_a_peer_that_prints_no_progress_shows_what_it_printed_and_is_ended(
    peer, timed: Timed, tmp_path: Path
) -> None:
    ladder = peer(f"print('a model', 'of 124M', sep=chr(10))\n{SILENT}", timeout_seconds=600)
    outcome, _ = timed(ladder, last="loading the data")
    assert outcome.status == "timeout"
    assert outcome.error is not None
    assert "printed no progress line" in outcome.error
    assert outcome.error.endswith("its last line: loading the data\nbefore that:\na model\nof 124M")
    await_none(tmp_path / "checkout")


def test_a_peer_finds_our_threads_its_own_variables_and_no_input(peer, timed: Timed) -> None:
    found = "assert os.environ['A'] == '1' and os.environ['OMP_NUM_THREADS'] and not sys.stdin.read()"
    ladder = peer(f"import os, sys\n{found}\n{program()}", command="env A=1 python train.py")
    assert timed(ladder)[0].status == "ok"


@pytest.mark.parametrize(
    ("piece", "ends"),
    [("'x' * 99 + '\\n'", "lines left out ..."), ("'x' * 100", "x" * 100)],
    ids=["in lines", "in one line"],
)
def test_a_peer_that_floods_its_terminal_is_timed_and_little_of_that_is_kept(
    peer, timed: Timed, piece: str, ends: str
) -> None:
    text = f"import sys\nprint('loading')\nfor _ in range(60): sys.stdout.write(({piece}) * 1000)\nprint()\n"
    outcome, printed = timed(peer(text + program()))
    assert outcome.status == "ok", outcome.error
    assert printed.startswith("loading\n")
    assert ends in printed
    assert printed.rstrip().splitlines()[-1].startswith("iter ")
    assert len(printed) < 2**19  # of 6 MB


def test_a_line_is_kept_as_far_as_a_line_is_looked_at() -> None:
    words = [sys.executable, "-c", "print('x' * 10**7); print('y')"]
    with Program(words, ROOT, dict(os.environ)) as program:
        lines = [text for _, text in program.lines(time.perf_counter() + PATIENCE)]
    assert lines == ["x" * foreign.LONGEST_LINE, "y"]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system keeps no program on a processor"
)
def test_a_peer_of_fewer_threads_than_processors_stays_on_as_many(peer, timed: Timed) -> None:
    """If it is one that starts a thread for each processor that it may use; others heed OMP_NUM_THREADS."""
    text = f"import os\nprint('on', len(os.sched_getaffinity(0)))\n{program()}"
    assert "on 1\n" in timed(peer(text.replace("iter {step}", "step {step}"), peer="jax", threads=1))[1]
    assert f"on {len(os.sched_getaffinity(0))}\n" in timed(peer(text, threads=1))[1]


def test_a_peer_s_processors_are_one_per_core_as_far_as_cores_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("bench.run.peers.checkout.one_cpu_per_core", lambda: [0, 2])
    found = {n: processors(Toggles(device="cpu", threads=n), PEERS["jax"]) for n in (1, 2, 3, 4)}
    assert found == {1: [0], 2: [0, 2], 3: [0, 2, 1], 4: None}
    assert processors(Toggles(device="cuda"), PEERS["jax"]) is None


@pytest.mark.parametrize(
    ("visible", "given"), [(None, "0"), ("3,1", "3"), ("GPU-5ebe9c5a", "GPU-5ebe9c5a"), ("", "")]
)
def test_a_peer_sees_one_gpu_the_first_of_the_user_s(
    visible: str | None, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert peer_variables(Toggles(device="cuda"), PEERS["own"], None)["CUDA_VISIBLE_DEVICES"] == given


@pytest.mark.skipif(missing_allocator("jemalloc") is not None, reason="jemalloc is not here")
def test_a_peer_has_its_memory_from_where_its_rung_says(peer, timed: Timed) -> None:
    found = "assert 'jemalloc' in open('/proc/self/maps').read()\n"
    found += "assert 'thp:always' in os.environ['MALLOC_CONF']"
    outcome, _ = timed(peer(f"import os\n{found}\n{program()}", allocator="jemalloc"))
    assert outcome.status == "ok", outcome.error


def test_a_script_of_ours_tells_its_library_s_version_and_has_a_hash(peer, timed: Timed) -> None:
    text = program().replace("iter {step}", "step {step}")
    outcome, _ = timed(peer(f"print('version jax 0.1')\n{text}", peer="jax"))
    assert outcome.status == "ok", outcome.error
    assert re.fullmatch(r"jax 0\.1, script [0-9a-f]{7}", outcome.peer_version or "")


def test_a_peer_whose_steps_are_of_another_size_than_the_ladder_says_is_refused(peer, timed: Timed) -> None:
    outcome, _ = timed(peer(f"print('tokens per iteration will be: 40,960')\n{program()}"))
    assert outcome.status == "failed"
    assert outcome.error is not None
    said = "nanoGPT: its steps are of 40,960 tokens, and the ladder says 64"
    assert outcome.error.splitlines()[0] == said


# --- in a run -----------------------------------------------------------------------------------------------


def ran(ladder: Path, out: Path) -> list[Record]:
    result = run(load(ladder), Options(out=out), Silent())
    records, _ = read(result.path)
    assert records == result.records
    return records


@pytest.mark.slow
def test_an_external_rung_is_run_among_the_others_and_its_command_can_be_pasted(
    peer, tmp_path: Path, quick_start: None
) -> None:
    ladder = peer(paced(), **SINGLE_STEPS)
    records = ran(ladder, tmp_path / "results")
    ended = [(r.kind, r.rung, r.status) for r in records]
    assert ended == [("cumulative", "a", "ok"), ("external", "other", "ok")]
    record = records[1]
    assert record.external is not None
    assert (record.external.peer, record.external.command) == ("nanogpt", "python train.py")
    assert record.toggles.all["device"] == "cpu"
    row = scoreboard(records).rows[1]
    assert (row.status, row.gain, row.loss) == ("external", None, None)
    assert row.speedup is not None
    pasted = record.command.replace("python", sys.executable, 1).replace("LADDER", str(ladder))
    pasted = pasted.replace("m.json", str(tmp_path / "pasted.json"))
    subprocess.run(pasted, shell=True, check=True, capture_output=True, timeout=600, cwd=ROOT)
    assert Outcome.model_validate_json((tmp_path / "pasted.json").read_text()).status == "ok"


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row_that_says_so(peer, tmp_path: Path, quick_start: None) -> None:
    records = ran(peer("raise ValueError('no data')"), tmp_path / "results")
    assert [record.status for record in records] == ["ok", "failed"]
    assert records[1].error is not None
    assert "ValueError: no data" in records[1].error.splitlines()[0]


@pytest.mark.slow
def test_the_trainer_of_transformers_is_measured_as_a_rung(
    write_ladder, tmp_path: Path, quick_start: None
) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    script = ROOT / "ladders" / "peers"
    command = "python transformers_trainer.py --model tiny --batch 2 --seq-len 32 --bf16 --cpu"
    trains = f"model: tiny, seq_len: 32, tokens_per_step: 64, command: {command}"
    what = f"{{peer: transformers, folder: {script}, {trains}}}"
    ladder = write_ladder(f"[{{name: a, set: {{device: cpu}}}}, {{name: trainer, external: {what}}}]")
    record = ran(ladder, tmp_path / "results")[1]
    assert record.status == "ok", record.error
    assert record.measurement is not None
    assert 5.5 < record.measurement.losses[0] < 7.0  # of 512 tokens that no step has told apart yet: 6.24
    assert record.external is not None
    assert record.external.version is not None
    assert record.external.version.startswith("transformers ")

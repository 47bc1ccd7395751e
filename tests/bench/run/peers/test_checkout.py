"""Other trainers' logs, the rungs that name them, and the windows that their progress lines make."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import ROOT
from samples import record
from shown import in_full

from bench.analysis.schedule import Schedule
from bench.cli.dry_run import plan
from bench.ladder.ladder import Ladder, LadderError, Protocol, load
from bench.ladder.peers import PEERS, LogLine
from bench.run.command import Options, external_command
from bench.run.peers.checkout import MissingPeer, commit, locate, locate_and_check, script
from bench.run.peers.trainer_log import LogError, LogTiming, TrainerLog
from bench.run.runner import missing_peers

NANOGPT = """\
number of parameters: 0.81M
using fused AdamW: False
step 0: train loss 10.8204, val loss 10.8273
iter 0: loss 10.8024, time 36.60ms, mfu -100.00%
iter 10: loss 10.8180, time 12.31ms, mfu 0.00%"""
"""Recorded: nanoGPT 3adf61e with one layer, on a CPU."""

LLMC = """\
num_activations: 73347840
val loss 10.892318
step 0: train loss 10.869716 (took 7182.090594 ms)
step 10: train loss 9.746651 (took 6416.826133 ms)"""
"""Recorded: llm.c f1e2ace, train_gpt2.c; the step of its second line changed."""

LLMC_CUDA = (
    "step %4d/%d | loss %7.6f (%+.2fz)| norm %6.4f (%+.2fz)| lr %.2e | %.2f ms | %.1f%% bf16 MFU | %.0f tok/s"
)
BUILD = "step {:5d} | loss: {:.6f} | lr {:.4e} | norm: {:.4f} | dt: {:.2f}ms | tok/sec: {:.2f}"
GOLLEM = {"train_loss": 10.9, "norm": 2.5, "lr": 6e-4, "tokens_per_second": 419000.0, "time_per_step": 156.4}


def read(peer: str, log: str) -> list[LogLine]:
    lines = [PEERS[peer].read(text, at=1.0) for text in log.splitlines()]
    return [line for line in lines if line]


def test_nanogpt_s_log_is_read() -> None:
    first, second = read("nanogpt", NANOGPT)
    assert (first.step, first.loss, first.claimed_seconds, first.grad_norm) == (0, 10.8024, 0.0366, None)
    assert (second.step, second.loss) == (10, 10.818)


@pytest.mark.parametrize(
    ("peer", "text"),
    [
        ("nanogpt", "tokens per iteration will be: 65,536"),
        ("llmc", f"| total batch size      | {65536:<50d} |"),
        ("build-nanogpt", "total desired batch size: 65536"),
        ("gollem", "total desired batch size: 65536"),
        ("jax", "tokens per step 65536"),
    ],
)
def test_what_a_log_says_of_its_steps_size_is_read(peer: str, text: str) -> None:
    assert PEERS[peer].tokens_of(text) == 65536
    assert PEERS[peer].tokens_of("iter 0: loss 1.0, time 1.00ms") is None


def test_the_log_of_llm_c_in_c_is_read() -> None:
    first, second = read("llmc", LLMC)
    assert (first.step, first.loss) == (0, 10.869716)
    assert first.claimed_seconds == pytest.approx(7.182090594)
    assert second.step == 10


def test_the_log_of_llm_c_on_cuda_is_read() -> None:
    """A line made by the printf of train_gpt2.cu."""
    text = LLMC_CUDA % (3, 18865, 10.5, 0.1, 2.25, -0.3, 6e-4, 1234.5, 40.1, 412345)
    (line,) = read("llmc", text)
    assert (line.step, line.loss, line.grad_norm, line.claimed_seconds) == (3, 10.5, 2.25, 1.2345)


def test_any_trainer_that_prints_the_plain_line_is_read() -> None:
    (line,) = read("own", "step 12: loss 3.4567")
    assert (line.step, line.loss) == (12, 3.4567)
    assert PEERS["own"].tokens_of("tokens per step 1024") == 1024
    assert PEERS["own"].version_of("version mine 1.2") == "mine 1.2"
    assert PEERS["own"].memory_of("peak bytes 123456789") == 123456789
    assert PEERS["own"].memory_of("peak bytes unknown") is None


@pytest.mark.parametrize("name", PEERS)
def test_the_lines_that_the_documentation_shows_are_read(name: str) -> None:
    lines = (ROOT / "docs/peers.md").read_text().splitlines()
    (row,) = [line for line in lines if re.match(rf"\|.*`{name}`.*\|", line)]
    shown = row.split("|", 2)[2].split("`")[1].replace("\\|", "|")
    (line,) = read(name, shown)
    assert line.step == 12
    assert round(line.loss, 2) == 3.46


def test_a_loss_that_is_no_number_is_read_as_such() -> None:
    nan = float("nan")
    (line,) = read("llmc", LLMC_CUDA % (3, 18865, nan, nan, nan, nan, 6e-4, 12.0, 40.1, 412345))
    assert line.loss != line.loss
    assert line.claimed_seconds == 0.012


def test_build_nanogpt_s_log_is_read() -> None:
    """A line made by the print of its train_gpt2.py."""
    (line,) = read("build-nanogpt", BUILD.format(3, 9.5, 6e-4, 1.5, 123.45, 4321.0))
    assert (line.step, line.loss, line.grad_norm, line.claimed_seconds) == (3, 9.5, 1.5, 0.12345)


def test_gollem_s_log_is_read() -> None:
    """A line made as its logger.py makes it of a dict."""
    (line,) = read("gollem", "Step 3: " + ", ".join(f"{k}: {v:.4f}" for k, v in GOLLEM.items()))
    assert (line.step, line.loss, line.grad_norm, line.claimed_seconds) == (3, 10.9, 2.5, 0.1564)


# --- in a ladder --------------------------------------------------------------------------------------------

FIRST = "{name: a, set: {device: cpu, threads: 1}}"
TRAINS = "model: tiny, seq_len: 32, tokens_per_step: 64, command: python train.py"
NOTHING = """'""'"""
"""In YAML a command of one empty word."""
OTHER = f"{{name: n, external: {{peer: nanogpt, folder: $NANOGPT, {TRAINS}}}}}"


def test_toggles_pass_an_external_rung_by(write_ladder) -> None:
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}, {{name: b, set: {{attention: sdpa}}}}]"))
    other, last = ladder.rungs[1:]
    assert (other.toggles.device, other.toggles.threads, other.toggles.attention) == ("cpu", 1, "explicit")
    assert other.changed == ["external: nanoGPT"]
    assert last.changed == ["attention=sdpa"]
    assert last.toggles.threads == 1


@pytest.mark.parametrize(
    ("rungs", "said"),
    [
        (f"[{OTHER}]", "rung 'n': the first rung cannot be external"),
        (
            f"[{FIRST}, {OTHER.replace('nanogpt', 'nanogtp')}]",
            "peer 'nanogtp' is not known; did you mean 'nanogpt'?",
        ),
        (f"[{FIRST}, {OTHER.replace('python train.py', 'env A=1')}]", "command 'env A=1' names no program"),
        (f"[{FIRST}, {OTHER.replace('python train.py', NOTHING)}]", "names no program"),
        (f"[{FIRST}, {OTHER.replace('python train.py', '''python 'x''')}]", "cannot be split into words"),
        (f"[{FIRST}, {OTHER.replace('64', '0')}]", "tokens_per_step 0 is less than 1"),
        (f"[{FIRST}, {OTHER.replace('external', 'set: {autocast: bfloat16}, external')}]", "has no 'set'"),
        (f"[{FIRST}, {OTHER.replace('folder: $NANOGPT, ', '')}]", "external: key 'folder' is missing"),
        (f"[{FIRST}, {OTHER.replace('seq_len: 32, ', '')}]", "external: key 'seq_len' is missing"),
    ],
)
def test_a_wrong_external_rung_is_refused_with_what_to_do(write_ladder, rungs: str, said: str) -> None:
    with pytest.raises(LadderError) as refused:
        load(write_ladder(rungs))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("workload.model=gpt2", "trains model tiny, and workload.model is gpt2"),
        ("workload.seq_len=64", "trains seq_len 32, and workload.seq_len is 64"),
    ],
)
def test_a_peer_whose_command_trains_another_workload_is_refused(
    write_ladder, override: str, said: str
) -> None:
    path = write_ladder(f"[{FIRST}, {OTHER}]")
    with pytest.raises(LadderError) as refused:
        load(path, [override])
    said = f"{said}; change its command with it, or leave"
    assert str(refused.value).startswith(f"{path}: rung 'n': external: its command {said}")


def test_an_external_rung_alone_is_refused(write_ladder) -> None:
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}]"))
    said = "--rungs: the first rung 'n' is external and cannot be the reference"
    with pytest.raises(LadderError, match=said):
        ladder.chosen(["n"])
    assert [rung.name for rung in ladder.chosen(["n", "a"])] == ["a", "n"]


def test_the_hash_knows_an_external_rung_s_command_and_not_its_place(write_ladder) -> None:
    def hash_of(other: str) -> str:
        return load(write_ladder(f"[{FIRST}, {other}]")).hash

    assert hash_of(OTHER) == hash_of(OTHER.replace("$NANOGPT", "$ELSEWHERE"))
    assert hash_of(OTHER) != hash_of(OTHER.replace("train.py", "train.py --compile=False"))
    assert hash_of(OTHER) != hash_of(OTHER.replace("64", "128"))


def test_external_rungs_run_in_each_round_and_are_left_out_of_ablation_and_parity(write_ladder) -> None:
    last = "{name: b, set: {attention: sdpa, micro_batch_size: 2}}"
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}, {last}]", repeats=2))
    schedule = Schedule(ladder, ladder.rungs, ablate=True)
    tasks = list(schedule.round(1))
    assert [task.kind for task in tasks if task.rung.name == "n"] == ["external"]
    kinds = [("cumulative", "a"), ("external", "n"), ("cumulative", "b")]
    kinds += [("control", "a"), ("control", "b"), ("parity", "b")]
    assert [(task.kind, task.rung.name) for task in tasks] == kinds
    # As the rung of ours before it, and not the external one's.
    assert tasks[-1].rung.toggles.attention == "explicit"
    assert external_command(ladder, tasks[1], Options())[:2] == ["-m", "bench.external"]


def test_a_peer_that_is_left_of_an_interrupted_round_gets_a_control_to_be_held_to(write_ladder) -> None:
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}]"))
    schedule = Schedule(ladder, ladder.rungs)
    schedule.resume([record("a")])
    tasks = [(task.kind, task.rung.name) for task in schedule.round(1)]
    assert tasks == [("control", "a"), ("external", "n")]


def test_a_peer_without_its_variable_is_missing_with_what_to_do(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}]"))
    external = ladder.rungs[1].external
    assert external
    monkeypatch.delenv("NANOGPT", raising=False)
    with pytest.raises(MissingPeer, match=r"set NANOGPT to .*git clone https://github.com/karpathy/nanoGPT"):
        locate(external, ladder.path)
    monkeypatch.setenv("NANOGPT", str(tmp_path / "nowhere"))
    said = r"nanoGPT is not in \$NANOGPT: git clone .*set NANOGPT to its folder"
    with pytest.raises(MissingPeer, match=said):
        locate(external, ladder.path)


def test_a_plan_lists_external_rungs_and_what_they_lack(
    write_ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANOGPT", raising=False)
    ladder = load(write_ladder(f"[{FIRST}, {OTHER}]"))
    text = in_full(plan(ladder, ladder.rungs))
    assert "external: nanoGPT" in text
    assert "not supported: nanoGPT: set NANOGPT" in text


def test_a_checkout_s_version_says_whether_it_was_edited_and_to_what(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-qm", "x")
    version = commit(tmp_path)
    assert version is not None
    assert len(version) == 7
    (tmp_path / "train.bin").write_text("data that it made")
    assert commit(tmp_path) == version
    (tmp_path / "train.py").write_text("2")
    edited = commit(tmp_path)
    assert edited is not None
    assert re.fullmatch(rf"{version} \(edited [0-9a-f]{{7}}\)", edited)
    (tmp_path / "train.py").write_text("3")
    assert commit(tmp_path) not in (version, edited)


def ladder_that_needs(what: str, write_ladder, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """One whose peer must contain something; $NANOGPT, where it is looked for, is the checkout."""
    monkeypatch.setenv("NANOGPT", str(checkout))
    return load(write_ladder(f"[{FIRST}, {OTHER.replace('model', f'must_contain: {what}, model')}]"))


def test_a_checkout_without_the_edit_that_a_rung_needs_is_not_run(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = ladder_that_needs("{train.py: [B = 1]}", write_ladder, tmp_path, monkeypatch)
    external = ladder.rungs[1].external
    assert external
    edit = "this rung needs a checkout with the edit of docs/peers.md"
    for content, lacks in (
        (None, "$NANOGPT has no train.py: this rung needs the checkout that docs/peers.md describes"),
        ("B = 4", f"train.py in $NANOGPT lacks 'B = 1': {edit}"),
    ):
        if content:
            (tmp_path / "train.py").write_text(content)
        with pytest.raises(MissingPeer) as refused:
            locate_and_check(external, ladder.rungs[1].toggles, ladder.path)
        assert str(refused.value) == f"nanoGPT: {lacks}"
    (tmp_path / "train.py").write_text("B = 1")
    assert locate_and_check(external, ladder.rungs[1].toggles, ladder.path)[0] == tmp_path


def test_a_checkout_without_a_file_that_a_rung_needs_is_not_run(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as its data, whatever is in it."""
    ladder = ladder_that_needs("{train.bin: []}", write_ladder, tmp_path, monkeypatch)
    assert [name for name, _ in missing_peers(ladder, ladder.rungs)] == ["n"]
    (tmp_path / "train.bin").write_bytes(b"\xff\x00")
    assert list(missing_peers(ladder, ladder.rungs)) == []


def test_a_library_that_a_peer_lacks_is_told_before_anything_runs(
    write_ladder, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OTHER.replace("nanogpt", "transformers").replace("$NANOGPT", ".")
    ladder = load(write_ladder(f"[{FIRST}, {other}]"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "accelerate" else name)
    assert [reason for _, reason in missing_peers(ladder, ladder.rungs)] == [
        "transformers.Trainer: accelerate not installed: pip install transformers accelerate"
    ]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", "there is no libjemalloc here; apt-get install libjemalloc2, or choose thp"),
        ("cuda", "this device has memory of its own; choose system"),
    ],
)
def test_an_allocator_that_a_peer_cannot_have_is_refused_as_ours_is(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, reason: str
) -> None:
    first = f"{{name: a, set: {{device: {device}}}}}"
    ladder = load(write_ladder(f"[{first}, {OTHER.replace('model', 'allocator: jemalloc, model')}]"))
    external = ladder.rungs[1].external
    assert external
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    monkeypatch.setattr("gpt2.hardware.host.find_library", lambda library: None)
    with pytest.raises(MissingPeer, match=f"allocator: jemalloc: {reason}"):
        locate_and_check(external, ladder.rungs[1].toggles, ladder.path)


def test_the_hash_of_a_script_is_of_what_it_says(tmp_path: Path) -> None:
    words = ["env", "A=1", "python", "train.py"]
    assert script(tmp_path, words) is None
    (tmp_path / "train.py").write_text("1")
    before = script(tmp_path, words)
    assert before == script(tmp_path, words)
    (tmp_path / "train.py").write_text("2")
    assert script(tmp_path, words) not in (None, before)


# --- windows ------------------------------------------------------------------------------------------------


def arrive(
    protocol: Protocol, steps: list[int], seconds_per_step: float = 1.0, start: float = 50.0
) -> LogTiming:
    """Lines after `start` seconds of compiling, and then `seconds_per_step` each."""
    timing = LogTiming(protocol)
    for step in steps:
        if timing.complete:
            break
        timing.take(LogLine(at=start + (step - steps[0]) * seconds_per_step, step=step, loss=1.0))
    return timing


def test_a_window_begins_one_block_after_the_warm_up_and_has_the_protocol_s_blocks() -> None:
    timing = arrive(Protocol(min_warmup_steps=3, block_seconds=1.0, blocks=6), list(range(100)))
    assert timing.warmup_steps == 1 + 3 + 1  # the first line's, those after it, and an untimed block
    assert timing.block_steps == 1
    assert timing.block_seconds == [1.0] * 6
    assert len(timing.lines) == 5 + 6
    assert timing.step_seconds == [1.0] * 6


def test_a_peer_s_warm_up_lasts_for_the_protocol_s_seconds_after_its_first_line() -> None:
    timing = arrive(Protocol(min_warmup_steps=3, min_warmup_seconds=8.0, blocks=5), list(range(100)))
    assert timing.warmup_steps == 1 + 8 + 1


def test_short_steps_are_timed_in_blocks_after_one_block_untimed() -> None:
    timing = arrive(Protocol(min_warmup_steps=3, block_seconds=1.0, blocks=5), list(range(100)), 0.125)
    assert timing.block_steps == 8
    assert timing.warmup_steps == 1 + 3 + 8
    assert timing.block_seconds == [1.0] * 5


def test_a_peer_that_logs_every_tenth_step_is_timed_by_the_steps_between_its_lines() -> None:
    timing = arrive(Protocol(min_warmup_steps=3, block_seconds=2.0, blocks=5), list(range(0, 1000, 10)), 0.1)
    assert timing.block_steps == 20
    assert timing.block_seconds == pytest.approx([2.0] * 5)
    assert timing.step_seconds is None


def test_a_window_that_lasts_too_long_ends_after_five_blocks() -> None:
    timing = arrive(Protocol(max_window_seconds=20, blocks=10), list(range(100)), 10.0)
    assert timing.block_seconds == [10.0] * 5


def test_lines_of_several_ranks_are_refused() -> None:
    said = [(float(step), f"step {step}: loss 2.0") for step in (0, 1, 1)]
    program: Any = SimpleNamespace(lines=lambda deadline: said)
    log = TrainerLog(program, PEERS["own"], tokens_per_step=64)
    with pytest.raises(LogError, match="step 1 after step 1"):
        list(log.lines(deadline=3.0))


def test_lines_in_colour_are_read_as_those_without() -> None:
    said = [(0.0, "\x1b[32mstep 5: \x1b[1mloss 3.25\x1b[0m")]
    program: Any = SimpleNamespace(lines=lambda deadline: said)
    (line,) = TrainerLog(program, PEERS["own"], tokens_per_step=64).lines(deadline=3.0)
    assert (line.step, line.loss) == (5, 3.25)


def test_a_full_stop_after_a_number_is_no_part_of_it() -> None:
    (line,) = read("own", "step 12: loss 3.4567.")
    assert line.loss == 3.4567


@pytest.mark.parametrize(
    "text", ["step 5: loss 3,0", "step 5: loss 13,25", "step 5: loss 1.2.3", f"step {2**63}: loss 3.0"]
)
def test_a_number_of_another_form_is_not_read_as_the_digits_before_it(text: str) -> None:
    assert PEERS["own"].read(text, at=1.0) is None


def test_uneven_lines_are_refused() -> None:
    said = "its lines come unevenly: 1 steps make a block, and after step 6 came st"
    with pytest.raises(LogError, match=said):
        arrive(Protocol(), [0, 1, 2, 3, 4, 5, 6, 8, 11])

"""Ranks that this program starts: what they are told, and how they end as one."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from longruns import command, settings
from places import ROOT
from waiting import await_gone, until

from gpt2.config.workload import Workload
from gpt2.hardware.host import free_port
from gpt2.pretrain import launcher
from gpt2.pretrain.checkpoint import folders, read
from gpt2.pretrain.launcher import launch_ranks
from gpt2.pretrain.metrics import read as read_metrics
from gpt2.signals import DELIBERATE_SECONDS

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])

def told(text):
    print(text, file=sys.stderr, flush=True)

def heed(number, frame):
    open(os.path.join(os.environ["PLACE"], f"heeded-{rank}"), "a").write(f"{number} ")
    sys.exit(130)

"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run lines of Python in several ranks; the exit code."""

    def run(lines: str, processes: int = 3) -> int:
        (tmp_path / "program_of_a_rank.py").write_text(RANK + lines)
        monkeypatch.setattr(sys, "argv", ["gpt2", "an argument"])
        return launch_ranks(
            "program_of_a_rank", processes, {"PYTHONPATH": str(tmp_path), "PLACE": str(tmp_path)}
        )

    return run


def test_ranks_are_told_who_they_are_and_get_the_arguments(launch, tmp_path: Path) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    code = launch(
        f"import json; told_so = [os.environ[name] for name in {names}] + sys.argv[1:]\n"
        "open(os.path.join(os.environ['PLACE'], f'said-{rank}'), 'w').write(json.dumps(told_so))\n"
    )
    assert code == 0
    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(3)]
    assert said == [[str(rank), str(rank), "3", "3", "127.0.0.1", "an argument"] for rank in range(3)]


def test_nothing_of_the_ranks_is_left_open(launch) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        assert launch("pass\n") == 0
        gc.collect()
    assert [str(each.message) for each in found if "unclosed" in str(each.message)] == []


WAITS = "time.sleep(600); open(os.path.join(os.environ['PLACE'], 'waited'), 'w').close()\n"
"""A rank that would work on for long, and say so when it is done."""


def test_the_exit_code_is_that_of_the_rank_that_failed_and_its_last_words_are_shown(
    launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    assert launch(f"if rank == 1:\n    told('no luck'); sys.exit(5)\n{WAITS}") == 5
    assert not (tmp_path / "waited").exists()  # the others were not waited for
    assert capfd.readouterr().err.splitlines() == ["rank 1: no luck"]


class Steered:
    """In place of `time` in gpt2.pretrain.launcher: does as the test says between two looks at the ranks."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, place: Path, *between: Callable[[Steered], None]
    ) -> None:
        self.go = place / "go"
        self.started: list[subprocess.Popen[bytes]] = []
        self._between = list(between)
        genuine = subprocess.Popen

        def started(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            rank: Any = genuine(*arguments, **options)
            self.started.append(rank)
            return rank

        monkeypatch.setattr(launcher, "time", self)
        monkeypatch.setattr(launcher, "subprocess", SimpleNamespace(Popen=started, PIPE=subprocess.PIPE))

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        if self._between:
            self._between.pop(0)(self)
        else:
            time.sleep(seconds)

    def let_go(self) -> None:
        """Let the ranks go on that wait for it by AWAITS_GO."""
        self.go.touch()

    def await_end_of(self, *numbers: int) -> None:
        """Wait until these ranks have ended, which the launcher learns when it looks."""
        for number in numbers:
            with contextlib.suppress(ChildProcessError):  # which the launcher has learnt already
                os.waitid(os.P_PID, self.started[number].pid, os.WEXITED | os.WNOWAIT)


AWAITS_GO = "while not os.path.exists(os.path.join(os.environ['PLACE'], 'go')): time.sleep(0.01)\n"


def test_what_all_ranks_refuse_is_said_once(launch, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch("told('a wrong corpus')\nsys.exit(2)\n") == 2
    assert capfd.readouterr().err.splitlines() == ["a wrong corpus"]


def test_ranks_that_missed_rank_0_in_the_moment_it_refused_say_nothing(
    launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Steered(monkeypatch, tmp_path, Steered.let_go, lambda steered: steered.await_end_of(0, 1, 2))
    lines = "told('a wrong corpus' if rank == 0 else 'rank 0 is gone')\nsys.exit(2 if rank == 0 else 6)\n"
    assert launch(AWAITS_GO + lines) == 2
    assert capfd.readouterr().err.splitlines() == ["a wrong corpus"]


def test_a_rank_that_the_system_killed_is_told_of(
    launch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    assert launch("if rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)\n") == 6
    said = "rank 2 was ended by SIGKILL, as the system does where memory is short; --resume goes on from"
    assert said in capfd.readouterr().err


def test_a_killed_rank_is_named_though_rank_0_says_what_became_of_it(
    launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Steered(monkeypatch, tmp_path, lambda steered: steered.await_end_of(1), Steered.let_go)
    lines = f"if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n{AWAITS_GO}"
    assert launch(f"{lines}told('cannot write')\nsys.exit(2)\n") == 6
    said = capfd.readouterr().err
    assert "rank 1 was ended by SIGKILL" in said
    assert said.count("cannot write") == 1


def test_ranks_that_do_not_end_when_others_were_asked_to_are_ended(
    launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ENDING_SECONDS", 0.3)
    assert launch(f"if rank == 1:\n    sys.exit(130)\n{WAITS}") == 130
    assert not (tmp_path / "waited").exists()
    assert "rank 0, 2 did not end with the others: killed" in capfd.readouterr().err


def test_ranks_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    launcher = launched(
        tmp_path, "from gpt2.pretrain.launcher import end_with_launcher\nend_with_launcher()\n"
    )
    children = psutil.Process(launcher.pid).children()
    launcher.kill()
    launcher.wait()
    assert len(children) == 3
    assert psutil.wait_procs(children, timeout=120)[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_every_rank_once_and_they_end_in_order(
    number: signal.Signals, tmp_path: Path
) -> None:
    launcher = launched(tmp_path, "signal.signal(signal.SIGINT, heed); signal.signal(signal.SIGTERM, heed)\n")
    launcher.send_signal(number)
    assert launcher.wait(timeout=120) == 130
    expected = signal.SIGTERM if number == signal.SIGHUP else number
    heeded = [(tmp_path / f"heeded-{rank}").read_text().split() for rank in range(3)]
    assert heeded == [[str(int(expected))]] * 3


@pytest.mark.slow
def test_another_ctrl_c_ends_ranks_too_that_cannot_heed_it(tmp_path: Path) -> None:
    """As one that waits for another within torch's code."""
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    launcher = launched(tmp_path, deaf)
    children = psutil.Process(launcher.pid).children()
    children[1].suspend()
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):  # they may be writing a checkpoint
        launcher.wait(timeout=5 * DELIBERATE_SECONDS)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=120) == 130
    assert not any(child.is_running() for child in children)


def test_a_later_ctrl_c_ends_a_rank_at_once_though_its_step_does_not_end() -> None:
    """Python's handlers do not run within a call of C; it lets other threads run, as torch's calls do."""
    program = (
        "import hashlib, types\n"
        "from gpt2.pretrain.rank_main import _heed_signals\n"
        "with _heed_signals(types.SimpleNamespace(end=print)):\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE)
    assert rank.stdout
    assert rank.stdout.readline() == b"ready\n"
    rank.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(timeout=5 * DELIBERATE_SECONDS)
    rank.send_signal(signal.SIGINT)
    assert rank.wait(timeout=120) == 130


def launched(place: Path, lines: str) -> subprocess.Popen[bytes]:
    """A process that has started three ranks, once they have run these lines and would stay for long."""
    ready = "open(os.path.join(os.environ['PLACE'], f'ready-{rank}'), 'w').close()\ntime.sleep(600)\n"
    (place / "program_of_a_rank.py").write_text(RANK + lines + ready)
    program = (
        "import signal, sys; from gpt2.pretrain.launcher import launch_ranks; signal.signal(signal.SIGHUP, "
        "signal.SIG_DFL); sys.exit(launch_ranks('program_of_a_rank', 3, {}))"
    )
    paths = os.pathsep.join((str(place), str(ROOT)))
    launcher = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PLACE": str(place), "PYTHONPATH": paths}
    )
    until(lambda: all((place / f"ready-{rank}").exists() for rank in range(3)), launcher)
    return launcher


TWO = settings("toggles.world_size=2", "toggles.micro_batch_size=1", "toggles.threads=1")
TWO += settings("workload.seq_len=32", "workload.tokens_per_step=128", "evaluation.val_tokens=256")


def test_what_a_user_got_wrong_is_one_line_with_two_ranks_too(tmp_path: Path) -> None:
    wrong = settings("workload.data=nowhere", "workload.model=mini", "evaluation.sample_every=0")
    process = command("train", "tiny", *TWO, *wrong, "--out", tmp_path / "run")
    _, err = process.communicate(timeout=300)
    assert (process.returncode, len(err.strip().splitlines())) == (2, 1), err
    assert "corpus 'nowhere'" in err


def await_steps(folder: Path, process: subprocess.Popen[str]) -> None:
    """Until a run has told of some steps."""
    metrics = folder / "metrics.jsonl"
    until(lambda: metrics.exists() and sum(1 for _ in metrics.open()) > 5, process)


@pytest.mark.slow
def test_ctrl_c_ends_two_ranks_in_order_with_a_checkpoint(tmp_path: Path) -> None:
    more = settings("steps=100000", "checkpoints.every=0")
    process = command("train", "tiny", *TWO, *more, "--out", tmp_path / "run")
    await_steps(tmp_path / "run", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130, said
    (kept,) = folders(tmp_path / "run" / "checkpoints")
    steps = [event.step for event in read_metrics(tmp_path / "run") if event.kind == "step"]
    assert read(kept).step == steps[-1]
    assert said.count("--resume goes on") == 1
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_is_named(tmp_path: Path) -> None:
    process = command("train", "tiny", *TWO, "--set", "steps=100000", "--out", tmp_path / "run")
    await_steps(tmp_path / "run", process)
    (second,) = (each for each in psutil.Process(process.pid).children() if each.environ().get("RANK") == "1")
    second.kill()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 6, said
    assert "rank 1 was ended by SIGKILL" in said
    assert "another rank is gone" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_two_ranks_killed_with_what_started_them_go_on_with_the_same_losses(tmp_path: Path) -> None:
    run = ["train", "tiny", *TWO, *settings("steps=60", "checkpoints.every=5", "evaluation.val_every=10")]
    whole = command(*run, "--out", tmp_path / "whole")
    assert whole.wait() == 0, whole.communicate()
    process = command(*run, "--out", tmp_path / "parts")
    until(lambda: len(folders(tmp_path / "parts" / "checkpoints")) >= 2)
    left = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    await_gone(*(each.pid for each in left))  # else they would still hold the folder
    again = command(*run, "--out", tmp_path / "parts", "--resume")
    assert again.wait() == 0, again.communicate()
    assert told_losses(tmp_path / "parts") == told_losses(tmp_path / "whole")


def on_two_nodes(run: list[str], outs: tuple[Path, Path]) -> list[tuple[int, str]]:
    """The same run by a torchrun for each of two nodes; their exit codes, and what they said."""
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    meeting += ["--master-port", str(free_port())]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *meeting, "--node-rank", str(node)),
                *("-m", "gpt2.cli", *run, "--out", str(out)),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, out in enumerate(outs)
    ]
    said = [node.communicate(timeout=600)[1] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, said, strict=True)]


def told_losses(folder: Path) -> list[tuple[str, int, float]]:
    return [(e.kind, e.step, e.values["loss"]) for e in read_metrics(folder) if "loss" in e.values]


@pytest.mark.slow
def test_ranks_that_torchrun_starts_on_two_nodes_train_as_one_process_does(tmp_path: Path) -> None:
    run = ["train", "tiny", *TWO, *settings("steps=4", "evaluation.val_every=2")]
    alone = command(*run, "--set", "toggles.world_size=1", "--out", tmp_path / "one")
    assert alone.wait() == 0, alone.communicate()
    done = on_two_nodes(run, (tmp_path / "two", tmp_path / "two"))
    assert [code for code, _ in done] == [0, 0], done
    found, expected = told_losses(tmp_path / "two"), told_losses(tmp_path / "one")
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], abs=2e-4)


@pytest.mark.slow
def test_ranks_that_share_a_device_share_its_peak(tmp_path: Path) -> None:
    run = ["train", "tiny", *TWO, *settings("steps=2"), "--peak-tflops", "2"]
    process = command(*run, "--out", tmp_path / "run")
    assert process.wait() == 0, process.communicate()
    flops = Workload(model="tiny", seq_len=32).flops_per_token
    steps = [event.values for event in read_metrics(tmp_path / "run") if event.kind == "step"]
    assert [step["mfu"] for step in steps] == pytest.approx([step["tps"] * flops / 2e12 for step in steps])


@pytest.mark.slow
def test_nodes_that_share_no_folder_are_refused(tmp_path: Path) -> None:
    done = on_two_nodes(["train", "tiny", *TWO], (tmp_path / "here", tmp_path / "there"))
    assert all(code for code, _ in done)
    told = "of rank 0 is not seen by rank 1; let --out lie on a shared disk"
    assert all(told in said for _, said in done), done


def test_torchrun_would_lose_the_exit_code_by_which_a_refusal_is_told_from_a_failure(tmp_path: Path) -> None:
    """The reason for a launcher of our own: with torchrun every end but 0 is 1."""
    program = tmp_path / "rank.py"
    program.write_text("import os, sys; sys.exit(2)\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    assert subprocess.run([sys.executable, *torchrun], capture_output=True, timeout=300).returncode == 1

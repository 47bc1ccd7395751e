"""A campaign's parts in order, each bounded in time, over interruptions; by parts that take no time."""

from __future__ import annotations

import errno
import io
import json
import signal
import subprocess
import sys
import tarfile
from itertools import pairwise
from pathlib import Path

import pytest
from places import ROOT
from waiting import Clock, await_gone, is_gone, said_in

from bench import campaign
from bench.campaign import PartOutcome, archive, carry_out, earlier
from bench.campaign_parts import KINDS, Part, report
from bench.ladder.ladder import load
from gpt2.files.lock import Locked, exclusive


@pytest.fixture(autouse=True)
def quick_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of bench report, which has nothing to show here."""
    monkeypatch.setattr(campaign, "report", lambda folder: part("report", "print('reported')"))
    monkeypatch.setattr(campaign, "POLL_SECONDS", 0.02)


@pytest.fixture(autouse=True)
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Once a part has written this file, an hour has passed at once; until then, no time passes at all."""
    path = tmp_path / "ready"
    monkeypatch.setattr(campaign, "time", Clock(lambda: path.exists() and path.read_text()))
    return path


def part(name: str, program: str, *arguments: object, **facts: object) -> Part:
    """A Python program."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return Part(**{"name": name, "command": command, "minutes": 1.0, **facts})  # type: ignore[arg-type]


def noting(name: str, folder: Path, **facts: object) -> Part:
    """Writes its name into ran.txt, for the order."""
    program = "import sys; open(sys.argv[2], 'a').write(sys.argv[1] + ' ')"
    return part(name, program, name, folder / "ran.txt", **facts)


def ran(folder: Path) -> list[str]:
    path = folder / "ran.txt"
    return path.read_text().split() if path.exists() else []


def statuses(outcomes: list[PartOutcome]) -> dict[str, str]:
    return {each.part: each.status for each in outcomes}


SLEEPS = (
    "import pathlib, os, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
)


def test_parts_run_in_order_and_the_report_comes_last(tmp_path: Path) -> None:
    outcomes, interrupted = carry_out([noting(name, tmp_path) for name in "abc"], tmp_path, 1)
    assert ran(tmp_path) == ["a", "b", "c"]
    assert statuses(outcomes) == {"a": "done", "b": "done", "c": "done", "report": "done"}
    assert not interrupted


def test_each_outcome_is_a_line_of_a_file(tmp_path: Path) -> None:
    carry_out([part("a", "print('first\\nlast')"), part("b", "raise SystemExit(3)")], tmp_path, 1)
    lines = [json.loads(line) for line in (tmp_path / "parts.ndjson").read_text().splitlines()]
    ended = [(line["part"], line["status"], line["exit_code"]) for line in lines[:2]]
    assert ended == [("a", "done", 0), ("b", "failed", 3)]
    assert lines[0]["found"] == "last"


def test_what_a_part_prints_is_in_its_log(tmp_path: Path) -> None:
    carry_out([part("a", "import sys; print('one'); print('two', file=sys.stderr)")], tmp_path, 1)
    assert (tmp_path / "logs" / "a.log").read_text().splitlines()[-2:] in (["one", "two"], ["two", "one"])


def test_a_part_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    parts = [noting("a", tmp_path), part("b", "raise SystemExit(1)")]
    carry_out(parts, tmp_path, 1)
    outcomes, _ = carry_out([*parts, noting("c", tmp_path)], tmp_path, 1)
    assert ran(tmp_path) == ["a", "c"]
    assert statuses(outcomes)["a"] == "done"


def test_a_part_whose_result_is_gone_is_run_again(tmp_path: Path) -> None:
    parts = [noting("a", tmp_path, result="ran.txt")]
    carry_out(parts, tmp_path, 1)
    (tmp_path / "ran.txt").unlink()
    carry_out(parts, tmp_path, 1)
    assert ran(tmp_path) == ["a"]


def test_a_part_that_leaves_no_result_is_not_done(tmp_path: Path) -> None:
    parts = [noting("a", tmp_path, result="nothing.txt")]
    for _ in range(2):
        carry_out(parts, tmp_path, 1)
    assert ran(tmp_path) == ["a", "a"]


def test_a_part_that_was_broken_off_goes_on_with_its_result(tmp_path: Path) -> None:
    program = "import sys; open(sys.argv[1], 'a').write('x'); sys.exit('--resume' not in sys.argv)"
    parts = [part("a", program, tmp_path / "r.txt", result="r.txt", go_on=("--resume",))]
    assert statuses(carry_out(parts, tmp_path, 1)[0])["a"] == "failed"
    assert statuses(carry_out(parts, tmp_path, 1)[0])["a"] == "done"


def test_a_ladder_whose_claims_do_not_all_hold_is_done_and_another_command_with_that_exit_code_failed(
    tmp_path: Path,
) -> None:
    four = "raise SystemExit(4)"
    parts = [part("ladder", four, is_ladder=True, result="*.jsonl"), part("other", four)]
    outcomes, _ = carry_out(parts, tmp_path, 1)
    assert statuses(outcomes) == {"ladder": "done", "other": "failed", "report": "done"}


def test_a_part_of_the_same_name_for_another_device_or_corpus_is_not_done_before(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        carry_out([noting("a", tmp_path / place)], tmp_path, 1)
    assert ran(tmp_path / "two") == ["a"]


def test_there_is_nothing_to_report_where_no_part_left_results(tmp_path: Path) -> None:
    assert report(tmp_path).missing == "no part has left results"


def test_a_failed_part_stops_no_other(tmp_path: Path) -> None:
    outcomes, _ = carry_out([part("a", "1 / 0"), noting("b", tmp_path)], tmp_path, 1)
    assert statuses(outcomes) == {"a": "failed", "b": "done", "report": "done"}
    assert outcomes[0].found == "ZeroDivisionError: division by zero"


def test_a_part_over_its_limit_is_asked_to_end(tmp_path: Path, ready: Path) -> None:
    program = (
        "import sys, time\n"
        "try: open(sys.argv[1], 'w').write('x'); time.sleep(600)\n"
        "except KeyboardInterrupt: print('kept')"
    )
    outcomes, _ = carry_out([part("a", program, ready), noting("b", tmp_path)], tmp_path, 100)
    assert (outcomes[0].status, outcomes[0].found) == ("out of time", "kept")
    assert statuses(outcomes)["b"] == "done"


def test_a_part_that_does_not_heed_is_killed_with_all_that_it_started(
    tmp_path: Path, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "GRACE_SECONDS", 0.3)
    # The child has a session of its own, as a worker of bench run has.
    starts = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEPS!r}, sys.argv[1]], start_new_session=True); "
        "time.sleep(600)"
    )
    outcomes, _ = carry_out([part("a", starts, ready)], tmp_path, 100)
    assert outcomes[0].status == "out of time"
    await_gone(int(ready.read_text()))


def test_a_part_that_no_longer_fits_is_skipped_and_said(tmp_path: Path) -> None:
    parts = [noting("long", tmp_path, minutes=20, least=10), noting("short", tmp_path, minutes=20)]
    outcomes, _ = carry_out(parts, tmp_path, 1)
    assert statuses(outcomes) == {"long": "skipped", "short": "done", "report": "done"}
    assert outcomes[0].found == "for time: 1.0 minutes left, and it takes 10 at least"
    carry_out(parts, tmp_path, 20)
    assert ran(tmp_path) == ["short", "long"]


def test_a_part_is_shortened_to_the_minutes_left(tmp_path: Path, ready: Path) -> None:
    outcomes, _ = carry_out([part("a", SLEEPS, ready, minutes=100)], tmp_path, 1)
    assert outcomes[0].status == "out of time"


def test_without_minutes_there_is_the_report_alone(tmp_path: Path) -> None:
    outcomes, _ = carry_out([noting("a", tmp_path, least=0.1)], tmp_path, 0)
    assert statuses(outcomes) == {"a": "skipped", "report": "done"}


def test_a_part_that_cannot_run_here_says_why(tmp_path: Path) -> None:
    outcomes, _ = carry_out([noting("a", tmp_path, missing="pytest is not installed")], tmp_path, 1)
    assert (outcomes[0].status, outcomes[0].found) == ("skipped", "pytest is not installed")


def test_a_part_that_is_to_be_killed_is_done_once_it_was(tmp_path: Path) -> None:
    outcomes, _ = carry_out([part("a", SLEEPS, tmp_path / "saved", killed_at="saved")], tmp_path, 1)
    assert outcomes[0].status == "done"
    await_gone(int((tmp_path / "saved").read_text()))


def test_ctrl_c_ends_the_part_and_the_same_again_goes_on(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys, time; at = pathlib.Path(sys.argv[1]); again = at.exists(); "
        "at.touch()\nif not again: os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    )
    parts = [part("a", program, tmp_path / "begun"), noting("b", tmp_path)]
    outcomes, interrupted = carry_out(parts, tmp_path, 1)
    assert interrupted
    assert statuses(outcomes) == {"a": "interrupted"}
    outcomes, interrupted = carry_out(parts, tmp_path, 1)
    assert not interrupted
    assert statuses(outcomes) == {"a": "done", "b": "done", "report": "done"}


def test_what_a_killed_campaign_left_at_work_is_ended_by_the_next(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from bench.campaign import carry_out; from bench.campaign_parts import Part\n"
        "folder = Path(sys.argv[1]); command = [sys.executable, '-c', sys.argv[2], sys.argv[1] + '/pid']\n"
        "carry_out([Part(name='a', command=command, minutes=1)], folder, 1)"
    )
    first = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), SLEEPS], cwd=ROOT)
    left = int(said_in(tmp_path / "pid"))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not is_gone(left)
    outcomes, _ = carry_out([noting("a", tmp_path)], tmp_path, 1)
    await_gone(left)
    assert statuses(outcomes)["a"] == "done"


def test_a_folder_has_one_campaign_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with exclusive(tmp_path), pytest.raises(Locked):
        carry_out([], tmp_path, 1)


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    whole = json.dumps({"part": "a", "status": "done"})
    (tmp_path / "parts.ndjson").write_text(f'{whole}\n{{"part": "b", "sta')
    assert list(earlier(tmp_path)) == ["a"]


def test_the_archive_holds_all_but_checkpoints_and_compiled_code(tmp_path: Path) -> None:
    large = "training/checkpoints/step-1/large.bin", "compiled/inductor-a/x.so"
    for name in ("logs/a.log", "training/metrics.jsonl", *large):
        path = tmp_path / "mine" / name
        path.parent.mkdir(parents=True)
        path.write_text("x")
    with tarfile.open(fileobj=io.BytesIO(archive(tmp_path / "mine").read_bytes())) as file:
        names = file.getnames()
    assert "mine/logs/a.log" in names
    assert not [name for name in names if "checkpoints" in name or "compiled" in name]


@pytest.mark.parametrize("device", KINDS)
def test_every_ladder_and_training_of_a_campaign_is_there_and_holds(device: str, tmp_path: Path) -> None:
    from gpt2.pretrain import config

    parts = KINDS[device](tmp_path, None)
    assert len({each.name for each in parts}) == len(parts)
    for each in parts:
        sets = [value for option, value in pairwise(each.command) if option == "--set"]
        if each.is_ladder:
            (ladder,) = [word for word in each.command if word.startswith("ladders/")]
            load(ROOT / ladder, sets)
        elif "train" in each.command:
            config.load(each.command[each.command.index("train") + 1], sets)


def test_parts_of_one_ladder_keep_their_results_apart(tmp_path: Path) -> None:
    results = [each.result for each in KINDS["cuda"](tmp_path, None) if each.is_ladder]
    assert len(set(results)) == len(results)


def test_an_unknown_part_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        campaign.main(["--device", "cpu", "--out", str(tmp_path), "--only", "doctor,nothing"])
    assert end.value.code == 2
    assert "no part is called nothing; there are doctor, tests" in capsys.readouterr().err


def test_one_part_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [noting(name, tmp_path) for name in ("a", "b")]
    monkeypatch.setattr(campaign, "KINDS", {"cuda": lambda out, data: parts})
    assert campaign.main(["--out", str(tmp_path / "mine"), "--only", "b"]) == 0
    assert ran(tmp_path) == ["b"]
    assert (tmp_path / "mine.tar.gz").is_file()


def test_a_failed_part_shows_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "KINDS", {"cuda": lambda out, data: [part("a", "1 / 0")]})
    assert campaign.main(["--out", str(tmp_path / "mine")]) == 6


def test_an_archive_that_finds_no_room_leaves_the_one_before_and_says_where_all_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(campaign, "KINDS", {"cuda": lambda out, data: [part("a", "pass")]})
    (tmp_path / "mine.tar.gz").write_bytes(b"an earlier one")
    monkeypatch.setattr(campaign.tarfile.TarFile, "add", full)
    assert campaign.main(["--out", str(tmp_path / "mine")]) == 6
    assert "mine.tar.gz (No space left on device); all of it is in" in capsys.readouterr().err.replace(
        "\n", ""
    )
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "mine.tar.gz"}
    assert (tmp_path / "mine.tar.gz").read_bytes() == b"an earlier one"


def test_the_table_tells_where_the_log_of_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "KINDS", {"cuda": lambda out, data: [part("a", "1 / 0")]})
    monkeypatch.setenv("COLUMNS", "200")
    campaign.main(["--out", str(tmp_path / "mine")])
    assert "ZeroDivisionError: division by zero; see logs/a.log" in capsys.readouterr().err

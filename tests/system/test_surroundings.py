"""Odd but legitimate surroundings: a working directory, a home, an environment and a terminal of any kind."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
import samples
from places import ROOT

from bench.cli.main import FOREIGN
from bench.ladder.peers import PEERS
from bench.run.command import anonymous
from bench.run.peers.checkout import peer_variables
from bench.run.probe import probe
from gpt2 import provenance, terminal
from gpt2.config.toggles import Toggles
from gpt2.config.validation import ConfigError
from gpt2.errors import MORE_PROCESSES
from gpt2.files import cache
from gpt2.files.cache import DataError
from gpt2.hardware import host
from gpt2.hardware.host import missing_compiler, temp_folder
from gpt2.training import reexec, stages
from gpt2.training.reexec import RANK_VARIABLES
from gpt2.training.stages import unheeded_threads

BIN = Path(sys.executable).parent
PROTOCOL = "{repeats: 1, block_seconds: 0.02, blocks: 5, ceiling_seconds: 0}"


def program(name: str, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `bench` or `gpt2` as a user does, in a folder and with variables of his."""
    environ = {**os.environ, **variables}
    words = [BIN / name, *map(str, arguments)]
    return subprocess.run(
        words, cwd=cwd, env=environ, capture_output=True, text=True, errors="replace", timeout=300
    )


def ladder(folder: Path, rung: str = "{name: a, set: {device: cpu}}") -> Path:
    path = folder / "ladder.yaml"
    path.write_text(
        f"name: odd\nworkload: {{model: tiny, data: synthetic, seq_len: 32}}\nprotocol: {PROTOCOL}\nrungs: "
        f"[{rung}]\n",
        encoding="utf-8",
    )
    return path


# --- the working directory

NAMES = ("bench", "gpt2", "torch", "numpy", "json", "random", "pydantic", "psutil", "yaml")


@pytest.fixture
def own_modules(tmp_path: Path) -> Path:
    """A folder with files named like modules, each of which leaves word that it ran."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / f'ran-{name}')!r}, 'w')\n")
    (folder / "bench").mkdir()
    (folder / "bench" / "__init__.py").write_text(f"open({str(tmp_path / 'ran-package')!r}, 'w')\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "run", "LADDER", "--out", "out"),
        ("bench", "run", "LADDER", "--out", "out", "--set", "toggles.world_size=2"),
        ("bench", "roofline", "--seconds", "0.001", "--out", "out"),
        ("bench", "turns", "LADDER", "--starts", "1", "--rounds", "1", "--steps", "1", "--out", "out"),
        ("gpt2", "train", "tiny", "--set", "steps=2", "--set", "toggles.threads=1", "--out", "out"),
        ("gpt2", "train", "tiny", "--set", "steps=2", "--set", "toggles.world_size=2", "--out", "out"),
    ],
    ids=lambda words: " ".join(words[:2]) + (" in ranks" if "toggles.world_size=2" in words else ""),
)
def test_no_file_of_the_working_directory_is_run(
    command: tuple[str, ...], own_modules: Path, tmp_path: Path
) -> None:
    path = ladder(tmp_path, "{name: a, set: {device: cpu, micro_batch_size: 2}}, {name: b}")
    name, *words = (str(path) if word == "LADDER" else word for word in command)
    done = program(name, *words, cwd=own_modules)
    assert done.returncode == 0, done.stderr
    assert [each.name for each in tmp_path.glob("ran-*")] == []


def test_a_peer_may_import_what_lies_beside_it() -> None:
    environ = {**os.environ, **reexec.own_variables()}
    command = [sys.executable, "-c", "import sys; print(sys.flags.safe_path)"]
    ours = subprocess.run(command, env=environ, text=True, capture_output=True, check=True)
    assert ours.stdout.strip() == "True"
    assert all("PYTHONSAFEPATH" not in peer_variables(Toggles(), peer, "cache") for peer in PEERS.values())


def test_a_peer_run_from_a_checkout_that_is_not_installed_does_not_find_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(reexec.ROOT), *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    child = reexec.own_path()["PYTHONPATH"]
    assert child == f"{reexec.ROOT}{os.pathsep}/theirs"
    monkeypatch.setenv("PYTHONPATH", child)
    assert reexec.without_own_path()["PYTHONPATH"] == "/theirs"
    monkeypatch.setenv("PYTHONPATH", str(reexec.ROOT))
    assert "PYTHONPATH" not in reexec.without_own_path()


# --- no home directory


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who is not in the system's list, in a container for one."""

    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for name in ("HOME", "GPT2_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_the_variable_that_names_a_cache_is_named(no_home: None) -> None:
    with pytest.raises(DataError, match=r"no home directory.*set GPT2_CACHE_DIR"):
        cache.cache_dir()


def test_without_a_home_a_text_has_no_home_to_leave_out(no_home: None) -> None:
    assert anonymous("in /somewhere/else") == "in /somewhere/else"


def test_without_a_home_files_are_read_anew_each_time(no_home: None, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    assert cache.sha256_of(tmp_path / "a.txt") == cache.sha256_of(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["~nobody-of-this-name/a.txt", "~", "~x.txt"])
def test_a_name_that_begins_with_a_tilde_is_a_name_where_there_is_no_such_user(name: str) -> None:
    from gpt2.data.corpora.sources import open_documents

    with pytest.raises(DataError):
        open_documents(name)


# --- variables


@pytest.mark.parametrize("columns", ["0", "-5", "1", "abc", "", "99999999999", "80.0", "\u0663"])
def test_a_width_that_no_terminal_has_is_forgotten(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal.use_streams()
    assert "COLUMNS" not in os.environ


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_a_width_that_a_terminal_may_have_stays(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    terminal.use_streams()
    assert os.environ["COLUMNS"] == columns


@pytest.mark.parametrize("name", reexec.RANK_VARIABLES)
@pytest.mark.parametrize("value", ["", " "])
def test_a_rank_variable_set_to_nothing_is_not_set(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    reexec.check_rank_variables()
    assert name not in os.environ


def test_a_command_of_one_process_takes_none_of_the_variables_that_a_job_left_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in reexec.RANK_VARIABLES:
        monkeypatch.setenv(name, "1")
    reexec.forget_ranks()
    assert not any(name in os.environ for name in reexec.RANK_VARIABLES)


@pytest.mark.parametrize("value", ["two", "-1", "1.0", "0x1"])
def test_a_rank_variable_that_is_no_number_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match=r"the environment variable WORLD_SIZE is .*no number; unset it"):
        reexec.check_rank_variables()


@pytest.mark.parametrize("asked", ["1", " 1 ", "7", "1,2"])
def test_threads_asked_for_by_a_variable_and_not_taken_are_told(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "usable_cores", lambda: 2)
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert unheeded_threads(Toggles()) == asked.strip()
    assert unheeded_threads(Toggles(threads=2)) is None


@pytest.mark.parametrize("asked", ["2", "", None])
def test_threads_that_are_taken_as_asked_need_no_word(
    asked: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "usable_cores", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert unheeded_threads(Toggles()) is None


@pytest.mark.slow
def test_a_record_tells_of_threads_that_were_not_taken(tmp_path: Path) -> None:
    from bench.records.record import read

    more = str(host.usable_cores() + 1)
    done = program("bench", "run", ladder(tmp_path), "--out", "out", cwd=tmp_path, OMP_NUM_THREADS=more)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").rglob("*.jsonl")
    (record,) = read(path)[0]
    assert any(f"OMP_NUM_THREADS={more} is ignored" in warning for warning in record.warnings)


# --- places


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a checkout to another user")
def test_the_commit_of_another_user_s_checkout_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs"
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", f"safe.directory={folder}"]
        command = ["git", *who, "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.strip()

    (folder / provenance.THIS_FILE).parent.mkdir(parents=True)
    (folder / provenance.THIS_FILE).write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, 12345, 12345)
    monkeypatch.setattr(provenance, "ROOT", folder)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    assert provenance.git_state() == (git("rev-parse", "HEAD"), False)


def test_the_commit_of_this_checkout_is_told() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert provenance.git_state()[0] == said.stdout.strip()


@pytest.mark.parametrize("name", ["with a blank", "it's", 'say "so"', "back\\slash", "tab\there"])
def test_compilers_work_in_another_folder_where_torch_cannot_quote_the_usual_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path / name))
    folder = temp_folder()
    assert folder is not None
    assert not host.SPLITS_WORDS.search(str(folder))
    assert stages.environment(Toggles(compile="default"))["TMPDIR"] == str(folder)
    assert "TMPDIR" not in stages.environment(Toggles())
    monkeypatch.setattr(host, "temp_folder", lambda: None)
    assert f"cannot compile in {str(tmp_path / name)!r}" in (missing_compiler() or "")


def test_compilers_work_in_another_folder_where_the_usual_one_runs_no_programs(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.tempfile, "tempdir", str(small_disk))
    assert temp_folder() == small_disk
    subprocess.run(["mount", "-o", "remount,noexec", str(small_disk)], check=True)
    folder = temp_folder()
    assert folder not in (None, small_disk)
    assert stages.environment(Toggles(compile="default"))["TMPDIR"] == str(folder)


@pytest.mark.parametrize("command", [("bench.cli", "plan", "smoke"), ("gpt2.cli", "train", "tiny")])
def test_a_folder_for_compiled_code_that_cannot_be_made_is_told_in_one_line(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": "/dev/null/a"}
    words = [sys.executable, "-m", *command]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ, check=False)
    assert done.returncode == 2
    said = "TORCHINDUCTOR_CACHE_DIR=/dev/null/a is no folder that can be written; set it to one, or leave it "
    assert done.stderr.partition(": ")[2] == f"{said}unset\n"


@pytest.mark.parametrize("program", ["bench", "gpt2"])
def test_ctrl_c_before_a_command_begins_is_exit_code_130(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{program}.cli.main.main", interrupted)
    with pytest.raises(SystemExit) as end:
        import_module(f"{program}.cli.__main__").main()
    assert end.value.code == 130


def test_what_others_print_in_our_processes_is_not_taken_for_their_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "import atexit; print('hello'); atexit.register(print, 'bye')"
    (tmp_path / "sitecustomize.py").write_text(words)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert probe("cpu").environment.cpu_cores >= 1


@pytest.mark.parametrize("program", ["bench", "gpt2"])
def test_ctrl_c_while_a_program_is_being_loaded_prints_no_traceback(program: str, tmp_path: Path) -> None:
    # A package of its own stands in for the user, who has no better moment.
    heeded = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell's background ignores it
    (tmp_path / "typer.py").write_text(f"import os, signal; {heeded}; os.kill(os.getpid(), signal.SIGINT)")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-m", f"{program}.cli", "--help"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environ, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_process_that_finds_nothing_of_itself_has_begun_when_it_was_loaded(tmp_path: Path) -> None:
    """Without /proc, as in some sandboxes."""
    script = "from bench.process.worker_side import age; print(age())"
    hidden = f"mount -t tmpfs none /proc && {sys.executable} -c '{script}'"
    words = ["unshare", "--mount", "sh", "-c", hidden]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, check=False)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("hiding /proc needs root")
    assert 0 <= float(done.stdout) < 60, done.stderr


@pytest.mark.parametrize("name", ["plain", "größe", "semi;colon", "dollar$"])
def test_a_folder_that_torch_can_quote_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(host.tempfile, "tempdir", str(tmp_path / name))
    assert temp_folder() == tmp_path / name
    assert "TMPDIR" not in stages.environment(Toggles(compile="default"))


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason=str(missing_compiler()))
def test_compiled_code_runs_whatever_the_folder_for_temporary_files_is_called(tmp_path: Path) -> None:
    from bench.records.record import read

    name = "it's here\twith tabs"
    (tmp_path / name).mkdir()
    path = ladder(tmp_path, "{name: compiled, set: {device: cpu, compile: default}}")
    done = program("bench", "run", path, "--out", "out", cwd=tmp_path, TMPDIR=str(tmp_path / name))
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("*.jsonl")
    assert [record.status for record in read(results)[0]] == ["ok"]
    what = ("--set", "steps=1", "--set", "toggles.compile=default", "--out", "run")
    trained = program("gpt2", "train", "tiny", *what, cwd=tmp_path, TMPDIR=str(tmp_path / name))
    assert trained.returncode == 0, trained.stderr


# --- the terminal


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "koi8-r", "utf-8:strict"])
@pytest.mark.parametrize("how", [("--markdown",), ()], ids=["markdown", "terminal"])
def test_a_table_is_written_in_any_encoding(encoding: str, how: tuple[str, ...], tmp_path: Path) -> None:
    line = samples.record("größer 漢字 😀").model_dump_json(by_alias=True)
    (tmp_path / "r.jsonl").write_text(f"{line}\n", encoding="utf-8")
    done = program("bench", "report", "r.jsonl", *how, cwd=tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    assert "1,000" in done.stdout


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
def test_closed_streams_end_nothing(closed: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(samples.record().model_dump_json(by_alias=True) + "\n")
    command = f"{BIN / 'bench'} report r.jsonl {closed}"
    assert subprocess.run(command, shell=True, cwd=tmp_path, timeout=100).returncode == 0


@pytest.mark.slow
def test_a_ladder_of_any_script_runs_where_only_ascii_can_be_written(tmp_path: Path) -> None:
    from bench.records.record import read

    path = ladder(tmp_path, "{name: größer 漢字, set: {device: cpu}}")
    done = program("bench", "run", path, "--out", "out", cwd=tmp_path, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("*.jsonl")
    assert read(results)[0][0].rung == "größer 漢字"


@pytest.mark.parametrize("words", [("bench", "ladders"), ("gpt2", "prepare", "tinyshakespeare")])
def test_a_working_directory_that_is_gone_is_told_in_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program, *rest = words
    script = f"rmdir {gone} && exec {BIN / program} {' '.join(rest)}"
    done = subprocess.run(["sh", "-c", script], cwd=gone, text=True, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"{program}: the working directory is no longer there; go to another one\n"


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["bench", "run", "smoke", "--data", ""], "the value after --data"),
        (["bench", "run", "smoke", "--compile-cache="], "the value of --compile-cache"),
        (["bench", "report", ""], "an argument"),
        (["gpt2", "train", "runs/tiny.yaml", "--out", ""], "the value after --out"),
    ],
)
def test_an_empty_argument_is_not_taken_for_the_working_directory(
    words: list[str], what: str, tmp_path: Path
) -> None:
    done = program(*words, cwd=tmp_path)
    assert done.returncode == 2
    why = "is empty, as by a shell variable that is not set; give a value or leave it out"
    assert done.stderr == f"{words[0]}: {what} {why}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "before"),
    [
        (["gpt2", "train", "tiny", "--set", "steps=2"], "gpt2: "),
        pytest.param(["bench", "plan", "smoke"], "bench: ", marks=pytest.mark.slow),
        pytest.param(
            ["bench", "run", "smoke"],
            "bench: this machine could not be probed: torch: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_log_that_torch_does_not_have_is_told_in_one_line(
    words: list[str], before: str, tmp_path: Path
) -> None:
    done = program(*words, cwd=tmp_path, TORCH_LOGS="+dynamo,bogus")
    assert done.returncode == 2
    said = "TORCH_LOGS=+dynamo,bogus names a log that torch has not; correct or unset it"
    assert done.stderr == f"{before}{said}\n"


def test_a_prompt_may_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["sample", "runs/mine", "--prompt", ""], ["sample", "runs/mine", "--prompt="]):
        monkeypatch.setattr(sys, "argv", ["gpt2", *words])
        with terminal.surroundings("gpt2"):
            pass


@pytest.mark.parametrize(
    ("error", "code"), [(MemoryError(), 6), (ImportError("libtorch.so: failed to map segment"), 2)]
)
def test_too_little_memory_is_one_line_with_what_to_do(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, terminal.surroundings("gpt2"):
        raise error
    assert end.value.code == code
    told = capsys.readouterr().err
    assert "free some, or raise the limit (ulimit -v, a container's)" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), MORE_PROCESSES),  # as of a fork
        (RuntimeError("can't start new thread"), MORE_PROCESSES),
        (OSError(errno.EMFILE, "Too many open files"), "raise the limit (ulimit -n)"),
        (OSError(errno.ENFILE, "Too many open files in system", "a.txt"), "raise the limit (ulimit -n)"),
    ],
)
def test_a_limit_on_processes_threads_or_files_is_one_line_with_what_to_do(
    error: Exception, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, terminal.surroundings("gpt2"):
        raise error
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.endswith(f"; {told}\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "write could not complete without blocking"),  # a terminal that is full
        RuntimeError("another"),
    ],
)
def test_what_is_no_limit_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), terminal.surroundings("gpt2"):
        raise error


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "run", "smoke", "--rungs", "baseline"],
        ["gpt2", "train", "tiny", "--set", "toggles.world_size=2", "--set", "toggles.micro_batch_size=4"],
    ],
)
def test_with_too_few_open_files_a_command_that_starts_processes_ends_in_one_line(
    words: list[str], tmp_path: Path
) -> None:
    program, *others = words
    limited = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", BIN / program, *others]
    done = subprocess.run(limited, cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: ")
    assert "Too many open files; raise the limit (ulimit -n)" in line


def test_without_a_folder_for_temporary_files_a_command_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null", "/proc"])
    with pytest.raises(SystemExit) as end, terminal.surroundings("gpt2"):
        tempfile.gettempdir()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told == "gpt2: no folder for temporary files can be written; set TMPDIR to one\n"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prepare", "tü.txt", "--out", "here"], "in this locale, whose encoding is ascii"),
        pytest.param(
            ["train", "tiny", "--out", "rü"],
            " was read as ascii, the encoding of this locale",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_in_a_locale_that_lacks_a_names_letters_one_line_says_what_to_set(
    words: list[str], told: str, tmp_path: Path, vocabulary: None
) -> None:
    (tmp_path / "tü.txt").write_text("a text. " * 4000)
    environ = {**os.environ, **ASCII, "GPT2_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([BIN / "gpt2", *words], cwd=tmp_path, env=environ, capture_output=True, check=False)
    last = done.stderr.decode(errors="replace").splitlines()[-1]
    assert done.returncode == 2, last
    assert last.startswith("gpt2: ")
    assert last.endswith("; set PYTHONUTF8=1")
    assert told in last


def test_text_that_another_encoding_lacks_is_not_taken_for_a_files_name() -> None:
    with pytest.raises(UnicodeEncodeError), terminal.surroundings("gpt2"):
        "a secret\u201d".encode("latin-1")


def test_a_corpus_is_read_though_the_home_directory_takes_no_files(tmp_path: Path, vocabulary: None) -> None:
    (tmp_path / "text.txt").write_text("a text. " * 4000)
    (tmp_path / "home").write_text("no folder")
    environ = {name: value for name, value in os.environ.items() if name not in ("HF_HOME", "XDG_CACHE_HOME")}
    environ |= {"HOME": str(tmp_path / "home"), "GPT2_CACHE_DIR": str(tmp_path / "cache")}
    words = [BIN / "gpt2", "prepare", "text.txt", "--out", "here"]
    done = subprocess.run(words, cwd=tmp_path, env=environ, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "index.json").exists()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (FileNotFoundError(2, "No such file or directory", "/no"), "/no: No such file or directory"),
        (OSError(116, "Stale file handle", "/mnt/a"), "/mnt/a: Stale file handle"),
        (NotADirectoryError(20, "Not a directory", "/a/b"), "/a/b: Not a directory"),
    ],
)
def test_a_file_that_fails_unforeseen_is_one_line_with_its_name(
    error: OSError, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, terminal.surroundings("gpt2"):
        raise error
    assert (end.value.code, capsys.readouterr().err) == (6, f"gpt2: {told}\n")


def test_an_error_of_the_system_that_names_no_file_keeps_its_traceback() -> None:
    with pytest.raises(OSError, match="Connection refused"), terminal.surroundings("gpt2"):
        raise OSError(111, "Connection refused")


def test_the_programs_are_where_these_tests_look() -> None:
    assert all(shutil.which(BIN / name) for name in ("bench", "gpt2"))


def test_progress_that_nobody_reads_any_more_ends_no_program() -> None:
    script = (
        "from gpt2.terminal import stderr_console; import os, sys\n"
        "console = stderr_console()\n"
        "for number in range(9): console.print('x' * 9000)\n"
        "os.write(1, b'done')\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        process.stderr.close()
        assert process.stdout
        assert process.stdout.read() == "done"
    assert process.returncode == 0


def test_a_host_called_like_a_word_of_a_command_changes_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "bench")
    assert anonymous("python -m bench.worker a.yaml", command=True) == "python -m bench.worker a.yaml"
    assert anonymous("cannot connect to bench:1234") == "cannot connect to HOST:1234"


def test_no_rank_variable_of_a_launcher_reaches_a_run() -> None:
    assert set(RANK_VARIABLES) <= set(FOREIGN)

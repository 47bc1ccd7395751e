from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import environment
from bench.environment import describe, highest_cpu_mhz
from gpt2.code import code_hash
from gpt2.device import Cpu


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so.2:mine.so")
    monkeypatch.setenv("MALLOC_CONF", "thp:always")


@pytest.mark.usefixtures("preloaded")
def test_variables_that_the_toggles_set_are_not_recorded_as_the_users() -> None:
    given = {"LD_PRELOAD": "libjemalloc.so.2:mine.so", "MALLOC_CONF": "thp:always"}
    assert describe(Cpu(), given).variables == {"LD_PRELOAD": "mine.so"}


@pytest.mark.usefixtures("preloaded")
def test_variables_that_the_user_set_are_recorded() -> None:
    assert describe(Cpu()).variables == {"LD_PRELOAD": "libjemalloc.so.2:mine.so", "MALLOC_CONF": "thp:always"}


@pytest.mark.parametrize("source", ["gpt2/train.py", "gpt2/device/cpu.py", "gpt2/attention.cpp", "bench/runner.py"])
def test_the_hash_of_the_code_changes_with_any_source(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gpt2.code.ROOT", tmp_path)
    (tmp_path / source).parent.mkdir(parents=True)
    (tmp_path / source).write_text("x = 1;")
    before = code_hash()
    (tmp_path / source).with_suffix(".md").write_text("not code")
    assert code_hash() == before
    (tmp_path / source).write_text("x = 2;")
    assert code_hash() != before


CPUINFO = "flags\t\t: fpu amx_tile{}\ncpu MHz\t\t: 2000.000\n"


@pytest.mark.parametrize(
    ("highest", "flags", "expected"),
    [(3800.0, "", 3800.0), (0.0, " hypervisor", 2000.0), (0.0, "", None)],
    ids=["the highest", "in a virtual machine the one it has", "a passing value is none"],
)
def test_the_clock_of_the_cpu(
    highest: float, flags: str, expected: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.psutil, "cpu_freq", lambda: SimpleNamespace(current=1234.5, max=highest))
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(CPUINFO.format(flags))
    assert highest_cpu_mhz(tmp_path) == expected

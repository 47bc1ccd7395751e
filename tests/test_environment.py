import pytest

from bench.environment import describe
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

"""Shared places and helpers; tests that need the real text or vocabulary skip where these are not here."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from places import REAL

if TYPE_CHECKING:
    from bench.run.probe import ProbeResult

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: a thread that spins while it waits takes the core that another worker needs.
    # OpenMP reads this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token cache that no other test has filled; no corpus folder; no network."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GPT2_CACHE_DIR", str(cache))
    monkeypatch.delenv("GPT2_DATA_DIR", raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # a port where nothing listens: refused at once
    return cache


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Code under test collects garbage: it need not look through all that was imported before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def asked() -> ProbeResult:
    """What a run asks of this machine before it begins, by a process that imports torch: once for all."""
    from bench.run.probe import probe

    return probe("cpu")


@pytest.fixture
def asks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command asks of a process that imports torch is answered in this one, which has it."""
    from bench.run import probe, suited

    def asked(module: str, words: Sequence[str], overrides: Sequence[str], *_: object, **__: object) -> str:
        options = [word for each in overrides for word in ("--set", each)]
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(sys, "argv", [module, *words, *options])
            importlib.import_module(module).main()
        return said.getvalue().strip().removeprefix(probe.ANSWER)

    for each in (probe, suited):
        monkeypatch.setattr(each, "asked", asked)


@pytest.fixture
def quick_start(asked: ProbeResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process do not look at the machine; those of the command line do each time."""
    from bench.process import supervisor
    from bench.run import executor, runner

    monkeypatch.setattr(runner, "probe", lambda *arguments, **options: asked)
    monkeypatch.setattr(runner, "costly_page_faults", tuple)
    monkeypatch.setattr(executor, "other_cores", lambda: None)  # would sleep a quarter of a second
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)


@pytest.fixture(scope="session")
def gpu() -> None:
    """Skips a test where there is no CUDA device, or fails it where REQUIRE_CUDA=1 is set."""
    import torch

    if not torch.cuda.is_available():
        (pytest.fail if os.environ.get("REQUIRE_CUDA") == "1" else pytest.skip)("no CUDA device here")


@pytest.fixture
def process_settings():
    """Toggles set what torch keeps per process; put it back for the next test."""
    import torch
    import torch._dynamo.utils

    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch._dynamo.utils.counters.clear()  # of what other tests compiled
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_math_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(True)


@pytest.fixture(scope="module")
def own_compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing comes from code that was compiled before a module's tests.

    torch's cache takes graphs for the same that were compiled for different attention kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken's GPT-2 vocabulary from disk."""
    folder = REAL / "tiktoken_cache"
    if not folder.is_dir():
        pytest.skip("tiktoken's GPT-2 vocabulary is not at hand")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))


@pytest.fixture
def shakespeare(vocabulary: None) -> Path:
    """The text of tiny Shakespeare."""
    text = REAL / "tinyshakespeare.txt"
    if not text.is_file():
        pytest.skip("tiny Shakespeare is not at hand")
    return text


@pytest.fixture
def write_ladder(tmp_path: Path):
    """Write a ladder file; a tiny, quick one unless told otherwise."""

    quick = {
        "repeats": 1,
        "block_seconds": 0.01,
        "blocks": 5,
        "max_window_seconds": 1,
        "timeout_seconds": 600,
        "ceiling_seconds": 0,
    }

    def write(
        rungs: str, *, workload: str = "model: tiny, data: synthetic, seq_len: 32", **protocol: float | str
    ) -> Path:
        path = tmp_path / "ladder.yaml"
        path.write_text(
            f"name: test\nworkload: {{{workload}}}\nprotocol: {json.dumps({**quick, **protocol})}\nrungs: "
            f"{rungs}\n"
        )
        return path

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def peer(write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A ladder whose second rung is this Python program."""

    def write(
        text: str,
        command: str = "python train.py",
        peer: str = "nanogpt",
        threads: int | str = "default",
        allocator: str = "system",
        **protocol: float,
    ) -> Path:
        folder = tmp_path / "checkout"
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(text)
        monkeypatch.setenv("CHECKOUT", str(folder))
        trains = f"model: tiny, seq_len: 32, tokens_per_step: 64, command: {json.dumps(command)}"
        what = f"{{peer: {peer}, folder: $CHECKOUT, allocator: {allocator}, {trains}}}"
        rungs = f"[{{name: a, set: {{device: cpu, threads: {threads}}}}}, {{name: other, external: {what}}}]"
        return write_ladder(rungs, **{"block_seconds": 0.1, "timeout_seconds": 600, **protocol})

    return write

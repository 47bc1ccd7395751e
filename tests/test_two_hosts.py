"""Runs over two hosts that only a cable joins: results, and every way that one of them can go amiss."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from two_hosts import ROOT, TwoHosts, TwoHostsError

from bench.record import Record, progress_path, read

T = TypeVar("T")

LADDER = """
name: story
workload: {model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 64}
protocol: {repeats: 1, block_seconds: 0.5, blocks: 5, max_window_seconds: 9, timeout_seconds: 100, ceiling_seconds: 0}
rungs:
  - {name: worker killed, set: {world_size: 2}}
  - {name: whole, set: {attention: sdpa}}
  - {name: node killed, set: {attention: explicit}}
  - {name: cable cut, set: {attention: sdpa}}
  - {name: without it, set: {attention: explicit}}
"""


def until(found: Callable[[], T | None], seconds: float = 100.0) -> T:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError("it never happened")


class Node:
    """A `bench run` on one of the hosts."""

    def __init__(self, hosts: TwoHosts, host: int, place: Path, *arguments: str) -> None:
        self._log = place / f"node-{host}-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = hosts.start(host, [str(place / "ladder.yaml"), *arguments], stdout=log, stderr=log)
        self.marks: set[str] = set()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def training(self, rung: str) -> psutil.Process:
        """Its worker of a rung, once that has done its first step."""

        def look() -> psutil.Process | None:
            assert self.process.poll() is None, self.said
            with contextlib.suppress(psutil.Error, OSError, KeyError):
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    if {"bench.worker", rung} <= set(child.cmdline()) and "RANK" in child.environ():
                        out = child.environ()["BENCH_OUT"]
                        self.marks.add(out)
                        if re.search('"(warm-up|window)"', progress_path(Path(out)).read_text()):
                            return child
            return None

        return until(look)

    def kill(self) -> None:
        """As the kernel would: without a word."""
        self.process.send_signal(signal.SIGKILL)

    def ended(self) -> int:
        return self.process.wait(100)

    def orphans(self) -> list[psutil.Process]:
        """Processes of its rungs that are still there after a while."""

        def mine(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.Error, OSError):
                return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("BENCH_OUT") in self.marks
            return False

        def left() -> list[psutil.Process]:
            return [process for process in psutil.process_iter() if mine(process)]

        with contextlib.suppress(AssertionError):
            until(lambda: not left(), 20)
        return left()


@dataclass
class Story:
    """What came of a run in which all of it happened."""

    records: dict[str, Record]
    leader: int
    follower: int
    said: list[str]
    orphans: list[psutil.Process]
    alone: list[float]
    """Losses of the rung called whole, both ranks on one host."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        with TwoHosts() as hosts:
            yield hosts
    except TwoHostsError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(scope="module")
def story(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Story:
    place = tmp_path_factory.mktemp("story")
    (place / "ladder.yaml").write_text(LADDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_NODE_SILENCE_SECONDS", "3")
        patch.setenv("GPT2_CACHE_DIR", str(place / "cache"))
        leader = Node(hosts, 0, place, "--out", str(place / "results"))
        first = Node(hosts, 1, place)
        try:
            first.training("worker killed").kill()
            leader.training("whole")
            first.training("node killed")
            leader.training("node killed")
            first.kill()
            leader.process.send_signal(signal.SIGSTOP)  # until the other is back: before the next rung begins
            second = Node(hosts, 1, place)
            until(lambda: "found it" in second.said)
            leader.process.send_signal(signal.SIGCONT)
            second.training("cable cut")
            leader.training("cable cut")
            hosts.cut()
            codes = leader.ended(), second.ended()
        finally:
            leader.kill()
        alone = losses_alone(place)
    (file,) = (place / "results").rglob("*.jsonl")
    return Story(
        records={record.rung: record for record in read(file)[0]},
        leader=codes[0],
        follower=codes[1],
        said=[leader.said, second.said],
        orphans=[*leader.orphans(), *first.orphans(), *second.orphans()],
        alone=alone,
    )


def losses_alone(place: Path) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "bench.worker", str(place / "ladder.yaml"), "whole", "--out", str(place / "m.json")]
    quick = ["--set", "protocol.block_seconds=0.01"]
    subprocess.run([*torchrun, *worker, *quick], check=True, capture_output=True, cwd=ROOT, timeout=100)
    return json.loads((place / "m.json").read_text())["measurement"]["losses"]


def test_two_hosts_compute_what_one_does(story: Story) -> None:
    whole = story.records["whole"]
    assert whole.status == "ok", whole.error
    assert whole.measurement is not None
    assert len(whole.measurement.ranks) == 2
    assert whole.toggles.resolved["nodes"] == 2
    assert whole.measurement.losses[:8] == story.alone[:8]


def test_a_killed_worker_of_another_node_is_a_row_that_names_it(story: Story) -> None:
    record = story.records["worker killed"]
    assert record.status == "failed"
    assert (record.error or "").startswith("node 1 of 2: killed by SIGKILL")


def test_a_killed_node_is_a_row_that_says_so(story: Story) -> None:
    record = story.records["node killed"]
    assert record.status == "failed"
    assert (record.error or "").startswith("node 1 of 2: was lost: ")


def test_a_node_that_is_cut_off_is_a_row_that_says_so(story: Story) -> None:
    record = story.records["cable cut"]
    assert record.status == "failed"
    assert (record.error or "").splitlines()[0] == "node 1 of 2: was lost: silent for 3 s"


def test_what_needs_a_lost_node_fails_at_once(story: Story) -> None:
    record = story.records["without it"]
    assert (record.status, record.error) == ("failed", "node 1 of 2 was lost: silent for 3 s")


def test_a_run_with_lost_nodes_ends_with_exit_code_6_on_both(story: Story) -> None:
    assert (story.leader, story.follower) == (6, 6), story.said
    assert story.said[1].strip().splitlines()[-1] == "bench: node 0 of 2 was lost: silent for 3 s"


def test_lost_nodes_leave_no_process_behind_on_either_side(story: Story) -> None:
    assert story.orphans == []


def test_records_name_no_address(story: Story) -> None:
    for record in story.records.values():
        assert "10.77." not in record.model_dump_json()

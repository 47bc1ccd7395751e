"""Runs over two hosts that only a cable joins: results, and every way that one of them can go amiss."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from two_hosts import ROOT, TwoHosts, TwoHostsError
from waiting import PATIENCE, held, holding, until

from bench.process.supervisor import MARK
from bench.records.record import Record, read

pytestmark = pytest.mark.slow

SILENCE = 10
"""Seconds after which a node counts as lost; no machine halts for as long."""
HELD = ("worker killed", "node killed", "cable cut", "interrupted")
"""Rungs at which host 1 is caught in the middle of the training."""
STORE = ("bench.run.nodes.rendezvous", "10.77.0.1")

LADDER = """
name: story
workload: {model: tiny, data: synthetic, seq_len: 32, tokens_per_step: 64}
protocol: {repeats: 1, block_seconds: 0.1, blocks: 5, max_window_seconds: 9, timeout_seconds: 600,
  ceiling_seconds: 0}
rungs:
  - {name: worker killed, set: {world_size: 2, threads: 1}}
  - {name: whole, set: {attention: sdpa}}
  - {name: node killed, set: {attention: explicit}}
  - {name: cable cut, set: {attention: sdpa}}
  - {name: without it, set: {attention: explicit}}
  - {name: alone, set: {world_size: 1}}
  - {name: interrupted, set: {world_size: 2}}
"""


class Node:
    """A `bench run` on one of the hosts."""

    def __init__(self, hosts: TwoHosts, host: int, place: Path, *arguments: str) -> None:
        self._log = place / f"node-{host}-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = hosts.start(host, [str(place / "ladder.yaml"), *arguments], stdout=log, stderr=log)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_to_say(self, words: str) -> None:
        until(lambda: words in self.said)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        return self.process.wait(PATIENCE)


def orphans(place: Path) -> list[psutil.Process]:
    """Processes of rungs, or that talk to the store, and are still there after a while."""

    def is_one(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            ours = process.environ().get(MARK, "").startswith(str(place)) or set(STORE) <= set(
                process.cmdline()
            )
            return ours and process.status() != psutil.STATUS_ZOMBIE
        return False

    def left() -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if is_one(process)]

    with contextlib.suppress(AssertionError):
        until(lambda: not left())
    return left()


@dataclass
class Story:
    """What came of a run in which all of it happened."""

    records: dict[str, Record]
    codes: dict[str, int]
    said: dict[str, str]
    orphans: list[psutil.Process]
    on_one_host: list[float]
    """Losses of the rung called whole."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    try:
        with TwoHosts() as hosts:
            yield hosts
    except TwoHostsError as error:
        if os.environ.get("NEED_TWO_HOSTS"):  # as where CI runs, which must not pass by skipping
            raise
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture(scope="module")
def story(hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Story:
    place = tmp_path_factory.mktemp("story")
    (place / "ladder.yaml").write_text(LADDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_NODE_SILENCE_SECONDS", str(SILENCE))
        for name, value in holding(place, *HELD, rank=1).items():
            patch.setenv(name, value)
        patch.setenv("GPT2_CACHE_DIR", str(place / "cache"))
        # Where runs have their rungs' files, by which their processes are known.
        patch.setenv("TMPDIR", str(place))
        leader = Node(hosts, 0, place, "--out", str(place / "results"))
        nodes = {"leader": leader, "killed": Node(hosts, 1, place)}
        same = on_one_host(place)
        try:
            with held(nodes["killed"].process, "worker killed") as (worker,):
                worker.kill()
            with held(nodes["killed"].process, "node killed") as (worker,):
                nodes["killed"].send(signal.SIGKILL)
                worker.kill()  # or it could end its short window before it sees that its runner is gone
            nodes["cut"] = come_back(leader, hosts, place)
            with held(nodes["cut"].process, "cable cut"):
                hosts.cut()
            leader.wait_to_say("without it: ")  # before the other node can come back
            hosts.mend()
            nodes["interrupted"] = come_back(leader, hosts, place)
            with held(nodes["interrupted"].process, "interrupted"):
                nodes["interrupted"].send(signal.SIGINT)
            codes = {name: node.ended() for name, node in nodes.items()}
        finally:
            for node in nodes.values():
                node.send(signal.SIGKILL)
    assert same.wait(PATIENCE) == 0
    (file,) = (place / "results").rglob("*.jsonl")
    return Story(
        records={record.rung: record for record in read(file)[0]},
        codes=codes,
        said={name: node.said for name, node in nodes.items()},
        orphans=orphans(place),
        on_one_host=json.loads((place / "m.json").read_text())["measurement"]["losses"],
    )


def come_back(leader: Node, hosts: TwoHosts, place: Path) -> Node:
    """Another `bench run` on host 1, while that on host 0 stands still."""
    leader.send(signal.SIGSTOP)
    node = Node(hosts, 1, place)
    node.wait_to_say("found node 0")
    leader.send(signal.SIGCONT)
    return node


def on_one_host(place: Path) -> subprocess.Popen[bytes]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "bench.worker", str(place / "ladder.yaml"), "whole", "--out", str(place / "m.json")]
    quick = ["--set", "protocol.block_seconds=0.01"]
    return subprocess.Popen([*torchrun, *worker, *quick], cwd=ROOT, stderr=subprocess.DEVNULL)


def test_two_hosts_compute_what_one_does(story: Story) -> None:
    whole = story.records["whole"]
    assert whole.status == "ok", whole.error
    assert whole.measurement is not None
    assert len(whole.measurement.ranks) == 2
    assert whole.toggles.resolved["nodes"] == 2
    assert whole.measurement.losses[:8] == story.on_one_host[:8]


def test_two_hosts_that_are_one_machine_are_said_to_be(story: Story) -> None:
    said = "nodes 0, 1 share the cores of one machine"
    assert any(warning.startswith(said) for warning in story.records["whole"].warnings)
    assert not any(warning.startswith(said) for warning in story.records["alone"].warnings)


@pytest.mark.parametrize(
    ("rung", "said"),
    [
        ("worker killed", "node 1 of 2: killed by SIGKILL"),
        ("node killed", "node 1 of 2: was lost: "),
        ("cable cut", rf"node 1 of 2: was lost: silent for {SILENCE} s$"),
    ],
)
def test_a_killed_worker_and_a_node_that_is_killed_or_cut_off_are_rows_that_say_so(
    rung: str, said: str, story: Story
) -> None:
    record = story.records[rung]
    assert record.status == "failed"
    assert re.match(said, record.error or "", re.MULTILINE)


def test_what_needs_a_lost_node_fails_at_once(story: Story) -> None:
    record = story.records["without it"]
    assert (record.status, record.error) == ("failed", f"node 1 of 2 was lost: silent for {SILENCE} s")


def test_a_rung_that_one_node_can_run_goes_on_without_the_other(story: Story) -> None:
    record = story.records["alone"]
    assert record.status == "ok", record.error
    assert "torch.distributed.run" not in record.command


def test_a_node_that_loses_node_0_says_so_and_fails(story: Story) -> None:
    assert story.codes["cut"] == 6
    assert (
        story.said["cut"].strip().splitlines()[-1] == f"bench: node 0 of 2 was lost: silent for {SILENCE} s"
    )


def test_an_interruption_on_one_node_ends_the_run_in_order_on_both(story: Story) -> None:
    record = story.records["interrupted"]
    assert (record.status, record.error) == ("interrupted", "by Ctrl-C or a signal, on node 1")
    assert (story.codes["leader"], story.codes["interrupted"]) == (130, 130), story.said


def test_nodes_that_end_badly_leave_no_process_behind_on_either_side(story: Story) -> None:
    assert story.orphans == []


def test_records_name_no_address(story: Story) -> None:
    for record in story.records.values():
        assert "10.77." not in record.model_dump_json()

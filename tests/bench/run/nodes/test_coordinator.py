"""A run over several nodes: who takes part, what is refused, whose fault a bad end is."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import GOOD, Silent, instead_of_workers
from samples import MACHINE
from waiting import PATIENCE, Sleepless, is_gone, until

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder, load
from bench.process.shutdown import Stop
from bench.records.record import Outcome, read
from bench.run import runner
from bench.run.command import Options
from bench.run.executor import Executor
from bench.run.nodes import coordinator, rendezvous
from bench.run.nodes.agent import Agent, NodeExit
from bench.run.nodes.coordinator import DistributedTask, Team, described, merged_outcome
from bench.run.nodes.rendezvous import Rendezvous
from bench.run.nodes.topology import Place, PlaceError
from bench.run.probe import ProbeResult
from gpt2.hardware.host import free_port


def at(node: int, port: int = 1, nodes: int = 2) -> Place:
    return Place(nodes=nodes, node=node, host="127.0.0.1", port=port)


class Memory(Rendezvous):
    """A store within this process."""

    def __init__(self, said: dict[int, str], arrival: int) -> None:
        self.outgoing, self.incoming, self.arrival, self.lost, self.said = {}, {}, arrival, None, said

    def exchange(self) -> None:
        if self.lost is None:
            self.said[self.arrival or 0] = json.dumps(self.outgoing)
            seen = sorted(self.said) if self.arrival == 0 else [0]
            self.incoming = {each: json.loads(self.said[each]) for each in seen if each in self.said}


# --- who may take part --------------------------------------------------------------------------------------


class Run:
    """Node 0 of two, and the others as they come."""

    def __init__(self, ladder: Ladder, scratch: Path) -> None:
        self.ladder, self.scratch = ladder, scratch
        self.notes: list[str] = []
        self.said: dict[int, str] = {}
        here = described(at(0), ladder, "da7a", MACHINE)
        self.team = Team(at(0), here, Memory(self.said, 0), Stop(), self.notes.append)

    def come(
        self, node: int = 1, nodes: int = 2, data: str = "da7a", ladder: Ladder | None = None, **changes: Any
    ) -> Memory:
        """Another node's side of the store, when it has arrived."""
        store = Memory(self.said, len(self.said) or 1)
        machine = MACHINE.model_copy(update=changes)
        store.outgoing |= described(at(node, nodes=nodes), ladder or self.ladder, data, machine)
        store.exchange()
        return store

    def agent(self, store: Memory, stop: Stop) -> Agent:
        asked = ProbeResult(environment=MACHINE, memory_bytes={})
        processes = Executor(self.ladder, Options(), self.scratch, "", asked, Silent())
        return Agent(at(1), store, processes, stop)

    def exit_of_node_1(self, meanwhile: Callable[[Memory, Stop], object]) -> tuple[int, str]:
        """How it ends, which runs in a thread of its own."""
        ends: list[NodeExit] = []
        store, stop = self.come(), Stop()

        def follow() -> None:
            try:
                self.agent(store, stop).run(PATIENCE)
            except NodeExit as end:
                ends.append(end)

        self.team.gather(2)
        thread = threading.Thread(target=follow)
        thread.start()
        meanwhile(store, stop)
        thread.join(PATIENCE)
        (end,) = ends
        return end.exit_code, str(end)


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder("[{name: two, set: {world_size: 2}}]"))


@pytest.fixture
def run(ladder: Ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(coordinator, "LEAVE_SECONDS", 0.0)
    monkeypatch.setenv("BENCH_NODE_COME_SECONDS", "120")
    return Run(ladder, tmp_path)


def test_a_node_that_is_alike_is_taken_in(run: Run) -> None:
    node = run.come()
    run.team.gather(2)
    assert run.team.absent(2) is None
    assert run.team.members == {1: node.arrival}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"torch": "2.12.0"}, "torch is 2.12.0 there and 2.11.0 on node 0"),
        ({"chip": "NVIDIA A100"}, "the chip is NVIDIA A100 there and NVIDIA H100 80GB HBM3 on node 0"),
        ({"device_count": 4}, "the number of devices is 4 there and 1 on node 0"),
        ({"code_hash": "0ther"}, "the code of gpt2/ and bench/ (hash) is 0ther there and c0de on node 0"),
        ({"versions": {"cuda": "12.8"}}, "cuda is 12.8 there and 13.0 on node 0"),
        ({"data": "0ther"}, "the text (sha256) is 0ther there and da7a on node 0"),
        ({"nodes": 3}, "--nnodes is 3 there and 2 on node 0"),
    ],
)
def test_a_node_that_differs_is_refused_on_both_sides_by_the_same_line(
    changes: dict[str, Any], difference: str, run: Run
) -> None:
    node = run.come(**changes)
    with pytest.raises(PlaceError) as refused:
        run.team.gather(2)
    line = f"node 1 of 2 does not fit: {difference}; run the same command from the same files on every node"
    assert str(refused.value) == line
    run.team.dismiss(2, "node 0 ended early; it says why")
    with pytest.raises(NodeExit) as end:
        run.agent(node, Stop()).run(PATIENCE)
    assert (end.value.exit_code, str(end.value)) == (2, line)


@pytest.mark.parametrize(
    ("ranks", "protocol", "difference"),
    [
        (4, {}, "the ladder's workload or toggles (hash) is "),
        (2, {"blocks": 7}, "protocol.blocks is 7 there and "),
    ],
)
def test_another_ladder_is_refused(
    ranks: int, protocol: dict[str, Any], difference: str, run: Run, write_ladder
) -> None:
    run.come(ladder=load(write_ladder(f"[{{name: two, set: {{world_size: {ranks}}}}}]", **protocol)))
    with pytest.raises(PlaceError, match=re.escape(difference)):
        run.team.gather(2)


def test_node_0_is_there_once(run: Run) -> None:
    run.come(node=0)
    with pytest.raises(PlaceError, match="--node-rank 0 is node 0's own"):
        run.team.gather(2)


@pytest.mark.parametrize("facts", [{}, {"node": 1}, {"node": 1, "equal": 7}, {"machine": None}])
def test_what_says_nothing_that_a_node_says_is_sent_away(facts: dict[str, Any], run: Run) -> None:
    stranger = Memory(run.said, 1)
    stranger.outgoing |= facts
    stranger.exchange()
    assert run.team.absent(2) == "node 1 of 2 did not come within 120 s"
    stranger.exchange()
    run.team.update()
    stranger.exchange()
    assert stranger.incoming[0]["exits"]["1"] == [2, "node 0 cannot read what this node says of itself"]


def test_a_store_that_ends_while_nodes_are_waited_for_is_named(run: Run) -> None:
    run.team.store.lost = "its store was closed"
    run.team.gather(2)
    assert run.team.absent(2) == "node 1 of 2 cannot come: its store was closed"


def test_more_rounds_on_one_node_are_no_difference(run: Run, write_ladder) -> None:
    run.come(ladder=load(write_ladder("[{name: two, set: {world_size: 2}}]", repeats=9)))
    assert run.team.absent(2) is None


def test_devices_and_network_cards_of_other_names_are_no_difference(run: Run) -> None:
    run.come(variables={"CUDA_VISIBLE_DEVICES": "GPU-77", "NCCL_SOCKET_IFNAME": "ib7"})
    assert run.team.absent(2) is None


def test_a_node_that_is_lost_may_come_back_but_not_twice(run: Run) -> None:
    first = run.come()
    run.team.gather(2)
    first.outgoing["left"] = "its bench run ended"
    first.exchange()
    assert run.team.absent(2) == "node 1 of 2 was lost: its bench run ended"
    second = run.come()
    assert run.team.absent(2) is None
    third = run.come()
    assert run.team.absent(2) is None
    assert "another node with --node-rank 1 is here already" in run.notes[-1]
    assert run.team.members == {1: second.arrival}
    assert str(third.arrival) in run.team.outgoing["exits"]


# --- a node other than node 0 -------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "why"), [(0, "the run is done"), (130, "the run was interrupted")])
def test_a_node_ends_as_node_0_says(code: int, why: str, run: Run) -> None:
    assert run.exit_of_node_1(lambda *_: run.team.dismiss(code, why)) == (code, why)


def test_a_node_that_loses_node_0_says_so_and_fails(run: Run) -> None:
    def meanwhile(store: Memory, _: Stop) -> None:
        store.lost = "silent for 3 s"

    assert run.exit_of_node_1(meanwhile) == (6, "node 0 of 2 was lost: silent for 3 s")


def test_a_node_that_node_0_counts_as_lost_ends(run: Run) -> None:
    def meanwhile(*_: object) -> None:
        run.team.drop(1, "silent for 3 s")
        run.team.update()

    assert run.exit_of_node_1(meanwhile) == (6, "node 1 of 2 was lost: silent for 3 s")


def test_an_interruption_on_one_node_is_one_of_the_run(run: Run) -> None:
    def meanwhile(_: Memory, stop: Stop) -> None:
        stop.requested = True
        until(lambda: run.team.requested)

    assert run.exit_of_node_1(meanwhile)[0] == 130
    assert run.team.interrupted_by == 1


def test_a_node_that_finds_no_node_0_says_so(run: Run) -> None:
    with pytest.raises(NodeExit, match=r"no bench run of node 0 was found at 127.0.0.1:1 within 0.1 s"):
        run.agent(Memory({}, 1), Stop()).run(0.1)


@pytest.mark.parametrize(
    "odd", [{"rung": "other"}, {"nodes": 3}, {"kind": "odd"}], ids=["rung", "nodes", "kind"]
)
def test_a_node_runs_nothing_that_its_own_ladder_does_not_have(odd: dict[str, Any], run: Run) -> None:
    def meanwhile(store: Memory, _: Stop) -> None:
        what = {
            "kind": "cumulative",
            "rung": "two",
            "repetition": 1,
            "nodes": 2,
            "port": 1,
            "proofs": "each",
        } | odd
        run.team.outgoing["task"] = {"number": 1, "arrivals": [store.arrival], **what}
        run.team.update()

    assert run.exit_of_node_1(meanwhile) == (6, "node 0 of 2 asked for what this ladder does not have")
    assert not list(run.scratch.glob("*.log"))


# --- whose fault it was -------------------------------------------------------------------------------------

OK = Outcome(status="ok")
PEER = Outcome(
    status="failed", error="RuntimeError: [pair.cc:537] Connection closed by peer [10.0.0.1]:4711\ntail"
)
COMPLAINT = "node 0 of 2: RuntimeError: [pair.cc:537] Connection closed by peer [10.0.0.1]:4711"
KILLED = Outcome(status="failed", error="killed by SIGKILL: last words\ntail")
SLOW = Outcome(status="too_slow", error="its first steps ran at 3 tokens/s", first_tokens_per_second=3.0)
MEMORY = Outcome(status="out_of_memory", error="OutOfMemoryError: CUDA out of memory")
ENDED = Outcome(status="interrupted", error="by the user")
LATE = Outcome(status="timeout", error="took longer than protocol.timeout_seconds 9")
LOST = Outcome(status="failed", error="was lost: its store was closed")
"""What node 0 says of a node that is gone."""


@pytest.mark.parametrize(
    ("mine", "theirs", "status", "first"),
    [
        (PEER, KILLED, "failed", "node 1 of 2: killed by SIGKILL: last words"),
        (KILLED, PEER, "failed", "node 0 of 2: killed by SIGKILL: last words"),
        (PEER, SLOW, "too_slow", "node 1 of 2: its first steps ran at 3 tokens/s"),
        (PEER, MEMORY, "out_of_memory", "node 1 of 2: OutOfMemoryError: CUDA out of memory"),
        (MEMORY, PEER, "out_of_memory", "node 0 of 2: OutOfMemoryError: CUDA out of memory"),
        (ENDED, KILLED, "failed", "node 1 of 2: killed by SIGKILL: last words"),
        (LATE, PEER, "timeout", "node 0 of 2: took longer than protocol.timeout_seconds 9"),
        (PEER, LOST, "failed", "node 1 of 2: was lost: its store was closed"),
        (ENDED, LOST, "failed", "node 1 of 2: was lost: its store was closed"),
    ],
)
def test_the_side_that_was_the_cause_is_named_first(
    mine: Outcome, theirs: Outcome, status: str, first: str
) -> None:
    found = merged_outcome(at(0), {0: mine, 1: theirs})
    assert (found.status, (found.error or "").splitlines()[0]) == (status, first)


def test_a_window_that_was_complete_stands_whatever_came_after_it() -> None:
    found = merged_outcome(at(0), {0: OK, 1: KILLED})
    said = "after the window: node 1 of 2: killed by SIGKILL: last words"
    assert (found.status, found.warnings) == ("ok", [said])


def test_what_another_node_noticed_is_among_the_warnings() -> None:
    theirs = Outcome(status="ok", warnings=["GPU 3 throttles"], other_work_cores=0.5)
    found = merged_outcome(at(0), {0: OK, 1: theirs})
    assert [each.split(";")[0] for each in found.warnings] == [
        "node 1: other work: others keep 0.50 cores busy",
        "node 1: GPU 3 throttles",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Sleepless:
    """By which node 0 waits."""
    clock = Sleepless()
    monkeypatch.setattr(coordinator, "time", clock)
    return clock


@pytest.fixture
def joint(run: Run, clock: Sleepless) -> tuple[DistributedTask, Memory]:
    """A task begun with node 1, and node 1's side of the store."""
    node = run.come()
    run.team.gather(2)
    return DistributedTask(run.team, Task(kind="cumulative", rung=run.ladder.rungs[0], repetition=1), 2), node


def answer(node: Memory, task: int, **outcome: Any) -> None:
    node.outgoing["answer"] = {"task": task, "outcome": outcome}
    node.exchange()


def test_a_node_is_told_of_a_rung_by_its_name_a_round_and_a_port(
    joint: tuple[DistributedTask, Memory],
) -> None:
    one, node = joint
    node.exchange()
    what = {"kind": "cumulative", "rung": "two", "repetition": 1, "nodes": 2, "port": one.part.port}
    what |= {"without": [], "together": [], "stop_below": None, "proofs": "each"}
    assert node.incoming[0]["task"] == {"number": 1, "arrivals": [node.arrival], **what}


def test_node_0_s_side_ends_a_while_after_another_has_gone_wrong(
    joint: tuple[DistributedTask, Memory], clock: Sleepless
) -> None:
    one, node = joint
    assert not one.requested
    answer(node, 1, status="failed", error="killed by SIGKILL")
    assert not one.requested
    clock.sleep(coordinator.SETTLE_SECONDS + 1)
    assert one.requested
    assert one.conclude(ENDED).error == "node 1 of 2: killed by SIGKILL"


def test_a_node_whose_answer_cannot_be_read_counts_as_lost(joint: tuple[DistributedTask, Memory]) -> None:
    one, node = joint
    answer(node, 1, status="splendid")
    assert one.conclude(PEER).error == f"node 1 of 2: was lost: its answer cannot be read\n{COMPLAINT}"


def test_an_answer_about_an_earlier_rung_is_none(joint: tuple[DistributedTask, Memory]) -> None:
    one, node = joint
    answer(node, 0, status="failed", error="old")
    assert not one.requested
    answer(node, 1, status="ok")
    assert one.conclude(OK) == OK


def test_a_node_that_is_lost_within_a_rung_fails_it(joint: tuple[DistributedTask, Memory]) -> None:
    one, node = joint
    node.outgoing["left"] = "its bench run ended"
    node.exchange()
    assert one.conclude(PEER).error == f"node 1 of 2: was lost: its bench run ended\n{COMPLAINT}"


def test_a_node_that_does_not_answer_is_told_to_end_and_then_counts_as_lost(
    joint: tuple[DistributedTask, Memory],
) -> None:
    one, node = joint
    found = one.conclude(OK)
    node.exchange()
    assert node.incoming[0]["end"] == 1
    assert found.warnings == [
        "after the window: node 1 of 2: was lost: it did not answer, and should have ended its part of a rung"
    ]


# --- the store ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def meeting(silence_seconds: int) -> Iterator[tuple[Rendezvous, Rendezvous, int]]:
    """Two nodes that have found each other, and the port at which they did."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BENCH_NODE_SILENCE_SECONDS", str(silence_seconds))
        near, far = Rendezvous(at(0, port)), Rendezvous(at(1, port))
    with contextlib.closing(near), contextlib.closing(far):
        near.outgoing["text"], far.outgoing["text"] = "near", "far"

        def have_met() -> bool:
            both = exchanged(near) and exchanged(far)
            return both and near.incoming.keys() == {0, 1} and 0 in far.incoming

        until(have_met)
        yield near, far, port


PATIENT, IMPATIENT = 600, 10
"""Seconds of silence after which a node counts as lost: where that is not to happen, and where it is."""


@pytest.fixture(scope="module")
def met() -> Iterator[tuple[Rendezvous, Rendezvous, int]]:
    """Two nodes for tests after which they are as before."""
    with meeting(PATIENT) as found:
        yield found


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Rendezvous, Rendezvous]]:
    """Two nodes for one test alone."""
    with meeting(getattr(request, "param", PATIENT)) as (near, far, _):
        yield near, far


silence_counts = pytest.mark.parametrize("pair", [IMPATIENT], indirect=True)


def exchanged(store: Rendezvous) -> bool:
    store.exchange()
    return True


def child_of(store: Rendezvous) -> psutil.Process:
    return psutil.Process(store._process.pid)


def test_node_0_hears_all_and_the_others_hear_node_0(met: tuple[Rendezvous, Rendezvous, int]) -> None:
    near, far, _ = met
    assert {node: facts["text"] for node, facts in near.incoming.items()} == {0: "near", 1: "far"}
    assert {node: facts["text"] for node, facts in far.incoming.items()} == {0: "near"}
    assert (near.arrival, far.arrival) == (0, 1)


def test_strangers_at_the_port_disturb_nobody(met: tuple[Rendezvous, Rendezvous, int]) -> None:
    near, far, port = met
    with contextlib.ExitStack() as strangers:
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff\xfe\n", b"[" * 9999, b""):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(words)
        far.outgoing["text"] = "still here"
        until(lambda: exchanged(far) and exchanged(near) and near.incoming[1]["text"] == "still here")
    assert near.incoming.keys() == {0, 1}


def test_who_leaves_is_heard_of_with_the_last_that_it_said(pair: tuple[Rendezvous, Rendezvous]) -> None:
    near, far = pair
    far.outgoing["interrupted"] = True
    far.exchange()
    far.close()
    until(lambda: exchanged(near) and "left" in near.incoming[1])
    assert (near.incoming[1]["left"], near.incoming[1]["interrupted"]) == ("its bench run ended", True)


@pytest.mark.slow
@silence_counts
def test_who_hangs_is_heard_of_as_silent(pair: tuple[Rendezvous, Rendezvous]) -> None:
    near, far = pair
    child_of(far).suspend()
    until(lambda: exchanged(near) and "left" in near.incoming[1])
    assert near.incoming[1]["left"] == f"silent for {IMPATIENT} s"


@pytest.mark.slow
@silence_counts
def test_a_store_that_hangs_is_lost_in_bounded_time(pair: tuple[Rendezvous, Rendezvous]) -> None:
    near, far = pair
    child_of(near).suspend()
    until(lambda: exchanged(far) and far.lost)
    assert far.lost == f"silent for {IMPATIENT} s"


def test_a_store_that_is_gone_is_lost(pair: tuple[Rendezvous, Rendezvous]) -> None:
    near, far = pair
    child_of(near).kill()
    until(lambda: exchanged(far) and far.lost and exchanged(near) and near.lost)
    assert (far.lost, near.lost) == ("its store was closed", "its store was closed")


def test_what_talks_to_the_store_ends_with_its_runner_however_that_ends() -> None:
    program = (
        "from bench.run.nodes.rendezvous import Rendezvous\n"
        "from bench.run.nodes.topology import Place\n"
        f"store = Rendezvous(Place(nodes=2, node=0, host='127.0.0.1', port={free_port()}))\n"
        "while store.arrival is None and store.lost is None:\n"
        "    store.exchange()\n"
        "assert store.lost is None, store.lost\n"
        "print(store._process.pid, flush=True)\n"
        "input()"
    )
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    runner = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert runner.stdout
    child = psutil.Process(int(runner.stdout.readline()))
    runner.send_signal(signal.SIGKILL)
    runner.communicate()
    until(lambda: is_gone(child.pid))


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = at(0, other.getsockname()[1])
        said = r"--rdzv 127\.0\.0\.1:\d+: the port is in use; end what listens there"
        with pytest.raises(PlaceError, match=said):
            Rendezvous(place)


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(PlaceError, match="is no address of this machine"):
        Rendezvous(Place(nodes=2, node=0, host="192.0.2.7", port=29400))


def test_a_host_whose_name_is_a_loopback_address_to_itself_listens_to_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: [found])
    with rendezvous._listen(Place(nodes=2, node=0, host="gpu07", port=free_port())) as server:
        assert server.getsockname()[0] == "0.0.0.0"


# --- a node that never comes --------------------------------------------------------------------------------


def test_rungs_of_a_node_that_never_comes_fail_and_the_others_run(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = load(write_ladder("[{name: two, set: {world_size: 2}}, {name: one, set: {world_size: 1}}]"))
    asked = ProbeResult(environment=MACHINE, memory_bytes={})
    monkeypatch.setattr(runner, "probe", lambda *arguments, **options: asked)
    instead_of_workers(monkeypatch, GOOD)
    monkeypatch.setenv("BENCH_NODE_COME_SECONDS", "0.3")
    options = Options(out=tmp_path / "results", place=at(0, free_port()))
    path = runner.run(ladder, options, Silent()).path
    two, one = (record for record in read(path)[0] if record.kind == "cumulative")
    assert (two.status, two.error, two.exit_code) == ("failed", "node 1 of 2 did not come within 0.3 s", None)
    assert one.status == "ok", one.error
    assert (two.environment.nodes, one.environment.nodes) == (2, 2)
    assert path.parent.name.endswith("-2nodes")
    meeting = "--nnodes 2 --node-rank NODE --nproc-per-node 1 --master-addr HOST --master-port PORT"
    assert meeting in two.command
    assert "torch.distributed.run" not in one.command

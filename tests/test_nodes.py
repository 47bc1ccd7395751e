"""A run over several nodes: who takes part, what is refused, whose fault a bad end is."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import MACHINE

from bench.analysis.schedule import Task
from bench.ladder.ladder import Ladder, load
from bench.process.shutdown import Stop
from bench.records.record import Outcome, Record, read
from bench.run import runner
from bench.run.command import Options
from bench.run.executor import Processes
from bench.run.nodes.connection import Link, connect, listen
from bench.run.nodes.coordinator import Patience, Team, described
from bench.run.nodes.distributed_task import Joint, verdict
from bench.run.nodes.node_agent import Farewell, Follower
from bench.run.nodes.topology import Place, PlaceError
from bench.run.probe import Answer
from gpt2.hardware.host import free_port

QUICK = Patience(come_seconds=5.0, silence_seconds=3.0)


# --- who may take part -----------------------------------------------------------------------------------------------


@pytest.fixture
def ladder(write_ladder) -> Ladder:
    return load(write_ladder("[{name: two, set: {world_size: 2}}]"))


def at(node: int, port: int, nodes: int = 2) -> Place:
    return Place(nodes=nodes, node=node, host="127.0.0.1", port=port)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def team(ladder: Ladder, notes: list[str]) -> Iterator[Team]:
    """Node 0 of two, on this host."""
    here = at(0, free_port())
    with Team(here, described(here, ladder, "da7a", MACHINE), QUICK, Stop(), notes.append) as team:
        yield team


def hello(team: Team, ladder: Ladder, node: int = 1, nodes: int = 2, **changes: Any) -> dict[str, Any]:
    return described(at(node, team.place.port, nodes), ladder, "da7a", MACHINE.model_copy(update=changes))


def knock(team: Team, message: dict[str, Any], what: str = "hello") -> Link:
    link = connect(team.place, QUICK.silence_seconds)
    assert link is not None
    link.send(what, **message)
    return link


def answer(link: Link) -> dict[str, Any]:
    (message,) = link.receive(5.0)
    return message


def test_a_node_that_is_alike_is_taken_in(team: Team, ladder: Ladder) -> None:
    link = knock(team, hello(team, ladder))
    team.gather(2)
    assert answer(link) == {"what": "welcome"}
    assert team.absent(2) is None


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"torch": "2.12.0"}, "torch is 2.12.0 there and 2.11.0 on node 0"),
        ({"chip": "NVIDIA A100"}, "the chip is NVIDIA A100 there and NVIDIA H100 80GB HBM3 on node 0"),
        ({"device_count": 4}, "the number of devices is 4 there and 1 on node 0"),
        ({"code_hash": "0ther"}, "the code of gpt2/ and bench/ (hash) is 0ther there and c0de on node 0"),
        ({"versions": {"cuda": "12.8"}}, "cuda is 12.8 there and 13.0 on node 0"),
    ],
)
def test_a_node_that_differs_is_refused_on_both_sides_by_the_same_line(
    changes: dict[str, Any], difference: str, team: Team, ladder: Ladder
) -> None:
    link = knock(team, hello(team, ladder, **changes))
    with pytest.raises(PlaceError) as refused:
        team.gather(2)
    line = f"node 1 of 2 does not fit: {difference}; run the same command from the same files on every node"
    assert str(refused.value) == line
    assert answer(link) == {"what": "refused", "why": line}


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"data": "0ther"}, "the text (sha256) is 0ther there and da7a on node 0"),
        ({"nodes": 3}, "--nnodes is 3 there and 2 on node 0"),
        ({"node": 0}, "--node-rank 0 is node 0's own"),
        ({"ladder": "f" * 64}, "the ladder's workload or toggles (hash) is ffffffffffff there and "),
        ({"protocol": {"blocks": 5}}, "protocol.min_warmup_steps is None there and 3 on node 0"),
        ({"environment": {"chip": 7}}, "what it says of its machine cannot be read here"),
    ],
)
def test_another_task_or_place_is_refused(
    changes: dict[str, Any], difference: str, team: Team, ladder: Ladder
) -> None:
    knock(team, {**hello(team, ladder), **changes})
    with pytest.raises(PlaceError) as refused:
        team.gather(2)
    assert difference in str(refused.value)


def test_more_rounds_on_one_node_are_no_difference(team: Team, write_ladder) -> None:
    more = load(write_ladder("[{name: two, set: {world_size: 2}}]", repeats=9))
    link = knock(team, hello(team, more))
    team.gather(2)
    assert answer(link) == {"what": "welcome"}
    assert team.absent(2) is None


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"what": "hello"}\n', b"\xff\xfe\n", b"[" * 9999]
)
def test_a_stranger_at_the_port_is_sent_away_and_the_nodes_still_come(said: bytes, team: Team, ladder: Ladder) -> None:
    stranger = socket.create_connection(("127.0.0.1", team.place.port))
    stranger.sendall(said)
    stranger.shutdown(socket.SHUT_WR)
    link = knock(team, hello(team, ladder))
    team.gather(2)
    assert answer(link) == {"what": "welcome"}
    stranger.settimeout(5.0)
    assert stranger.recv(100) == b""


def test_a_stranger_that_is_gone_at_once_disturbs_nobody(team: Team, ladder: Ladder) -> None:
    stranger = socket.create_connection(("127.0.0.1", team.place.port))
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a port scanner resets it
    stranger.close()
    link = knock(team, hello(team, ladder))
    team.gather(2)
    assert answer(link) == {"what": "welcome"}


def test_devices_and_network_cards_of_other_names_are_no_difference(team: Team, ladder: Ladder) -> None:
    link = knock(team, hello(team, ladder, variables={"CUDA_VISIBLE_DEVICES": "GPU-77", "NCCL_SOCKET_IFNAME": "ib7"}))
    team.gather(2)
    assert answer(link) == {"what": "welcome"}


def test_a_node_that_is_lost_may_come_back_but_not_twice(team: Team, ladder: Ladder, notes: list[str]) -> None:
    first = knock(team, hello(team, ladder))
    team.gather(2)
    answer(first)
    first.close()
    assert team.absent(2) == "node 1 of 2 was lost: its connection was closed"
    second = knock(team, hello(team, ladder))
    assert wait_for(lambda: team.absent(2) is None)
    third = knock(team, hello(team, ladder))
    assert wait_for(lambda: not team.absent(2) and "another node with --node-rank 1 is here already" in notes[-1])
    assert [answer(link)["what"] for link in (second, third)] == ["welcome", "refused"]


def wait_for(condition: Any, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_port_in_use_is_one_clear_error(team: Team, ladder: Ladder) -> None:
    with pytest.raises(PlaceError, match=r"--rdzv 127\.0\.0\.1:\d+: the port is in use; end what listens there"):
        Team(team.place, {}, QUICK, Stop(), print)


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    elsewhere = Place(nodes=2, node=0, host="192.0.2.7", port=29400)
    with pytest.raises(PlaceError, match="is no address of this machine, and --node-rank 0 is to be there"):
        Team(elsewhere, {}, QUICK, Stop(), print)


def test_a_host_whose_name_is_a_loopback_address_to_itself_listens_to_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: [found])
    with listen(Place(nodes=2, node=0, host="gpu07", port=free_port())) as server:
        assert server.getsockname()[0] == "0.0.0.0"


# --- a follower ------------------------------------------------------------------------------------------------------


class Silent:
    def note(self, text: str) -> None: ...
    def waiting(self, what: str) -> None: ...
    def started(self, task: Task, rounds: int, seconds_left: float | None) -> None: ...
    def working(self, phase: str, steps: int, tps: float | None) -> None: ...
    def finished(self, record: Record) -> None: ...


def follower(team: Team, ladder: Ladder, scratch: Path, stop: Stop | None = None) -> Follower:
    link = connect(team.place, QUICK.silence_seconds)
    assert link is not None
    asked = Answer(environment=MACHINE, memory_bytes={})
    processes = Processes(ladder, Options(), scratch, "r", asked, Silent())
    return Follower(ladder, at(1, team.place.port), link, processes, Silent(), stop or Stop())


def farewell_of(follower: Follower, message: dict[str, Any], meanwhile: Any) -> Farewell:
    """How the follower ends, which runs in a thread of its own."""
    ends: list[Farewell] = []

    def follow() -> None:
        try:
            follower.follow(message)
        except Farewell as farewell:
            ends.append(farewell)

    thread = threading.Thread(target=follow)
    thread.start()
    meanwhile()
    thread.join(10)
    (farewell,) = ends
    return farewell


@pytest.mark.parametrize(("code", "why"), [(0, "the run is done"), (130, "the run was interrupted")])
def test_a_follower_ends_as_node_0_says(code: int, why: str, team: Team, ladder: Ladder, tmp_path: Path) -> None:
    def meanwhile() -> None:
        team.gather(2)
        team.send_home(code, why)

    farewell = farewell_of(follower(team, ladder, tmp_path), hello(team, ladder), meanwhile)
    assert (farewell.exit_code, str(farewell)) == (code, why)


def test_a_follower_that_loses_node_0_says_so_and_fails(team: Team, ladder: Ladder, tmp_path: Path) -> None:
    def meanwhile() -> None:
        team.gather(2)
        team.links[1].close()  # as a killed process leaves it

    farewell = farewell_of(follower(team, ladder, tmp_path), hello(team, ladder), meanwhile)
    assert (farewell.exit_code, str(farewell)) == (6, "node 0 of 2 was lost: its connection was closed")


def test_an_interruption_on_a_follower_is_one_of_the_run(team: Team, ladder: Ladder, tmp_path: Path) -> None:
    stop = Stop()

    def meanwhile() -> None:
        team.gather(2)
        stop.asked = True
        assert wait_for(lambda: team.asked)

    farewell = farewell_of(follower(team, ladder, tmp_path, stop), hello(team, ladder), meanwhile)
    assert farewell.exit_code == 130


@pytest.mark.parametrize(
    "order",
    [
        {"kind": "cumulative", "rung": "two", "repetition": 1, "nodes": 2, "port": 1, "command": "rm"},
        {"kind": "cumulative", "rung": "other", "repetition": 1, "nodes": 2, "port": 1},
        {"kind": "cumulative", "rung": "two", "repetition": 1, "nodes": 3, "port": 1},
        {"kind": "odd", "rung": "two", "repetition": 1, "nodes": 2, "port": 1},
    ],
)
def test_a_follower_runs_nothing_that_its_own_ladder_does_not_have(
    order: dict[str, Any], team: Team, ladder: Ladder, tmp_path: Path
) -> None:
    def meanwhile() -> None:
        team.gather(2)
        team.links[1].send("task", **order)

    farewell = farewell_of(follower(team, ladder, tmp_path), hello(team, ladder), meanwhile)
    assert (farewell.exit_code, str(farewell)) == (6, "node 0 of 2 asked for what this ladder does not have")
    assert not list(tmp_path.glob("*.log"))


# --- whose fault it was ----------------------------------------------------------------------------------------------

OK = Outcome(status="ok")
PEER = Outcome(status="failed", error="RuntimeError: [pair.cc:537] Connection closed by peer [10.0.0.1]:4711\ntail")
KILLED = Outcome(status="failed", error="killed by SIGKILL: last words\ntail")
MEMORY = Outcome(status="out_of_memory", error="OutOfMemoryError: CUDA out of memory")
ENDED = Outcome(status="interrupted", error="by the user")
LATE = Outcome(status="timeout", error="took longer than protocol.timeout_seconds 9")
LOST = Outcome(status="failed", error="was lost: connection reset by peer")
"""What node 0 says of a node that is gone."""


@pytest.mark.parametrize(
    ("mine", "theirs", "status", "first"),
    [
        (PEER, KILLED, "failed", "node 1 of 2: killed by SIGKILL: last words"),
        (KILLED, PEER, "failed", "node 0 of 2: killed by SIGKILL: last words"),
        (PEER, MEMORY, "out_of_memory", "node 1 of 2: OutOfMemoryError: CUDA out of memory"),
        (MEMORY, PEER, "out_of_memory", "node 0 of 2: OutOfMemoryError: CUDA out of memory"),
        (ENDED, KILLED, "failed", "node 1 of 2: killed by SIGKILL: last words"),
        (LATE, PEER, "timeout", "node 0 of 2: took longer than protocol.timeout_seconds 9"),
        (PEER, LOST, "failed", "node 1 of 2: was lost: connection reset by peer"),
        (ENDED, LOST, "failed", "node 1 of 2: was lost: connection reset by peer"),
    ],
)
def test_the_side_that_was_the_cause_is_named_first(mine: Outcome, theirs: Outcome, status: str, first: str) -> None:
    found = verdict(at(0, 1), mine, {1: theirs}, lost={1} if theirs is LOST else ())
    assert (found.status, (found.error or "").splitlines()[0]) == (status, first)


def test_a_window_that_was_complete_stands_whatever_came_after_it() -> None:
    found = verdict(at(0, 1), OK, {1: KILLED})
    assert (found.status, found.warnings) == ("ok", ["after the window: node 1 of 2: killed by SIGKILL: last words"])


def test_what_another_node_noticed_is_among_the_warnings() -> None:
    found = verdict(at(0, 1), OK, {1: Outcome(status="ok", warnings=["GPU 3 throttles"], other_work_cores=0.5)})
    assert [each.split(";")[0] for each in found.warnings] == [
        "node 1: other work: others keep 0.50 cores busy",
        "node 1: GPU 3 throttles",
    ]


@pytest.fixture
def joint(team: Team, ladder: Ladder) -> Iterator[tuple[Joint, Link]]:
    """A rung begun with node 1, and node 1's end of the line."""
    link = knock(team, hello(team, ladder))
    team.gather(2)
    task = Task(kind="cumulative", rung=ladder.rungs[0], repetition=1)
    joint = Joint(team, task, 2)
    welcome, order = answers(link, 2)
    assert (welcome["what"], order) == (
        "welcome",
        {"what": "task", "kind": "cumulative", "rung": "two", "repetition": 1, "nodes": 2, "port": joint.part.port},
    )
    yield joint, link
    link.close()


def answers(link: Link, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    assert wait_for(lambda: found.extend(link.receive()) or len(found) >= count)
    return found


def test_node_0_s_side_ends_a_while_after_another_has_gone_wrong(
    joint: tuple[Joint, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.run.nodes.distributed_task.SETTLE_SECONDS", 0.3)
    one, link = joint
    assert not one.asked
    link.send("ended", task=["cumulative", 0, 1], outcome={"status": "failed", "error": "killed by SIGKILL"})
    assert wait_for(lambda: one.asked)
    assert one.conclude(ENDED).error == "node 1 of 2: killed by SIGKILL"


def test_an_answer_about_an_earlier_rung_is_none(joint: tuple[Joint, Link]) -> None:
    one, link = joint
    link.send("ended", task=["cumulative", 0, 0], outcome={"status": "failed", "error": "old"})
    link.send("ended", task=["cumulative", 0, 1], outcome={"status": "ok"})
    assert one.conclude(OK) == OK


def test_an_answer_that_cannot_be_read_counts_as_a_lost_node(joint: tuple[Joint, Link]) -> None:
    one, link = joint
    link.send("ended", task=["cumulative", 0, 1], outcome={"status": "odd"})
    link.close()
    found = one.conclude(PEER)
    assert (found.status, (found.error or "").splitlines()[0][:22]) == ("failed", "node 1 of 2: was lost:")


def test_a_node_that_does_not_answer_is_told_to_end_and_then_counts_as_lost(
    joint: tuple[Joint, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SETTLE_SECONDS", "ANSWER_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(f"bench.run.nodes.distributed_task.{name}", 0.3)
    one, link = joint
    found = one.conclude(OK)
    assert answer(link) == {"what": "end"}
    assert found.warnings == [
        "after the window: node 1 of 2: was lost: it did not answer, and should have ended its part of a rung"
    ]


# --- a node that never comes -----------------------------------------------------------------------------------------


def test_rungs_of_a_node_that_never_comes_fail_and_the_others_run(
    write_ladder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = load(write_ladder("[{name: two, set: {world_size: 2}}, {name: one, set: {world_size: 1}}]"))
    monkeypatch.setattr(runner, "probe", lambda *arguments, **options: Answer(environment=MACHINE, memory_bytes={}))
    monkeypatch.setenv("BENCH_NODE_COME_SECONDS", "0.3")
    options = Options(out=tmp_path / "results", place=at(0, free_port()))
    path = runner.run(ladder, options, Silent()).path
    two, one = (record for record in read(path)[0] if record.kind == "cumulative")
    assert (two.status, two.error, two.exit_code) == ("failed", "node 1 of 2 did not come within 0.3 s", None)
    assert one.status == "ok", one.error
    assert (two.environment.nodes, one.environment.nodes) == (2, 2)
    assert path.parent.name.endswith("-2nodes")
    assert "--nnodes 2 --node-rank NODE --nproc-per-node 1 --master-addr HOST --master-port PORT" in two.command
    assert "torch.distributed.run" not in one.command

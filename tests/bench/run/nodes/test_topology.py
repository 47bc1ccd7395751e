"""Which node this is, and which ranks of a rung it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from samples import MACHINE, record

from bench.analysis.scoreboard import scoreboard
from bench.records.record import ToggleValues
from bench.report.one_run.caption import caption
from bench.run.nodes.topology import Part, Place, PlaceError, nodes_for, patience, place
from gpt2.config.toggles import Toggles, UnsupportedToggle
from gpt2.hardware.host import usable_cores
from gpt2.training.stages import environment

# --- which node this is -------------------------------------------------------------------------------------


def test_options_make_a_place() -> None:
    assert place(2, 1, "10.0.0.1:29400", {}) == Place(nodes=2, node=1, host="10.0.0.1", port=29400)
    assert place(2, 0, "[fd00::1]:29400", {}) == Place(nodes=2, node=0, host="fd00::1", port=29400)


def test_without_options_or_with_one_node_there_is_no_place() -> None:
    assert place(None, None, None, {}) is None
    assert place(1, 0, "here:29400", {}) is None


WRITE = "write HOST:PORT of node 0, such as 10.0.0.1:29400 or [fd00::1]:29400"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((None, 1, "a:1"), "--node-rank and --rdzv are for several nodes; give their number with --nnodes"),
        ((2, None, "a:1"), "--nnodes 2: give --node-rank (0 to 1) and --rdzv HOST:PORT of node 0, too"),
        ((2, 0, None), "--nnodes 2: give --node-rank (0 to 1) and --rdzv HOST:PORT of node 0, too"),
        ((2, 2, "a:1"), "--node-rank 2 is not one of 0 to 1, the nodes of --nnodes 2"),
        ((2, -1, "a:1"), "--node-rank -1 is not one of 0 to 1, the nodes of --nnodes 2"),
        ((0, 0, "a:1"), "--nnodes 0 is less than 1"),
        ((2, 0, "10.0.0.1"), f"--rdzv 10.0.0.1: {WRITE}"),
        ((2, 0, "a:70000"), f"--rdzv a:70000: {WRITE}"),
        ((2, 0, "fd00::1:29400"), f"--rdzv fd00::1:29400: {WRITE}"),
    ],
)
def test_options_that_make_no_place_are_one_clear_error(given: tuple[Any, Any, Any], says: str) -> None:
    with pytest.raises(PlaceError) as refused:
        place(*given, {})
    assert str(refused.value) == says


@pytest.fixture
def step(tmp_path: Path) -> dict[str, str]:
    """What srun sets for node 1 of 2, and a scontrol that expands one list."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$*" = "show hostnames gpu[07-08]" ] || { echo "Invalid hostlist: $3" >&2; exit 1; }\n'
        "echo gpu07; echo gpu08\n"
    )
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4200123",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_NODEID": "1",
    }


def test_within_a_step_of_slurm_the_place_is_read_from_its_variables(step: dict[str, str]) -> None:
    assert place(None, None, None, step) == Place(nodes=2, node=1, host="gpu07", port=20123)


def test_options_win_over_slurm(step: dict[str, str]) -> None:
    assert place(2, 0, "here:29400", step) == Place(nodes=2, node=0, host="here", port=29400)
    assert place(None, None, "here:29400", step) == Place(nodes=2, node=1, host="here", port=29400)
    assert place(1, None, None, step) is None


def test_outside_a_step_slurm_s_variables_mean_nothing(step: dict[str, str]) -> None:
    del step["SLURM_STEP_NUM_NODES"]
    assert place(None, None, None, {**step, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"SLURM_STEP_NUM_TASKS": "16"},
            "srun started 16 tasks on 2 node(s), but bench run starts the ranks",
        ),
        ({"SLURM_STEP_NUM_NODES": "1"}, "srun started 2 tasks on 1 node(s)"),
        ({"SLURM_NODEID": ""}, "SLURM_NODEID is '' and should be a number"),
        (
            {"SLURM_STEP_NODELIST": "odd"},
            "scontrol show hostnames odd: Invalid hostlist: odd; give --rdzv HOST:PORT",
        ),
        (
            {"PATH": "/nowhere"},
            "scontrol show hostnames gpu[07-08]: No such file or directory; give --rdzv HOST:PORT",
        ),
    ],
)
def test_a_step_of_slurm_that_makes_no_place_is_one_clear_error(
    changed: dict[str, str], says: str, step: dict[str, str]
) -> None:
    with pytest.raises(PlaceError) as refused:
        place(None, None, None, {**step, **changed})
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(("text", "seconds"), [("7", 7.0), ("", 300.0)])
def test_patience_is_set_by_the_environment(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_NODE_COME_SECONDS", text)
    assert patience("come") == seconds


def test_patience_that_is_no_number_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_NODE_SILENCE_SECONDS", "long")
    with pytest.raises(PlaceError, match=r"^BENCH_NODE_SILENCE_SECONDS=long: write seconds, such as 30$"):
        patience("silence")


# --- ranks over nodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "ranks", "nodes", "devices", "taken"),
    [
        ("cpu", 1, 2, 2, 1),
        ("cpu", 2, 2, 64, 2),
        ("cpu", 3, 2, 64, 1),
        ("cpu", 6, 4, 64, 3),
        ("cuda", 8, 2, 8, 1),
        ("cuda", 16, 2, 8, 2),
        ("cuda", 12, 4, 8, 2),
        ("cuda", 9, 4, 8, 3),
        ("cuda", 16, 4, None, 4),
    ],
)
def test_a_rung_takes_few_nodes_of_accelerators_and_many_of_cpus(
    device: Any, ranks: int, nodes: int, devices: int | None, taken: int
) -> None:
    assert nodes_for(Toggles(device=device, world_size=ranks), nodes, devices) == taken


@pytest.mark.parametrize(("ranks", "says"), [(32, "choose at most 16"), (9, "does not divide evenly")])
def test_ranks_that_the_nodes_cannot_hold_are_unsupported(ranks: int, says: str) -> None:
    with pytest.raises(UnsupportedToggle, match=says):
        nodes_for(Toggles(device="cuda", world_size=ranks), 2, 8)


def test_the_threads_of_a_node_are_shared_by_its_own_ranks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    two = Toggles(world_size=2)
    assert environment(two, nodes=2)["OMP_NUM_THREADS"] == str(usable_cores())
    assert environment(two)["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))


def test_gloo_is_told_the_interface_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    part = Part(nodes=2, node=1, host="here", port=1, interface="eth7")
    assert part.environment == {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert part.environment == {}


def test_a_machine_of_several_nodes_is_a_machine_of_its_own() -> None:
    both = MACHINE.model_copy(update={"nodes": 2})
    assert both.machine == f"{MACHINE.machine}-2nodes"


def test_the_caption_says_which_rungs_took_several_nodes() -> None:
    machine = MACHINE.model_copy(update={"nodes": 2})
    wide = record("wide", 1, environment=machine)
    all_toggles = {**wide.toggles.all, "world_size": 2}
    wide = wide.model_copy(update={"toggles": ToggleValues(all=all_toggles, resolved={"nodes": 2})})
    lines = caption(scoreboard([record(environment=machine), wide]))
    assert lines[0].startswith("2 nodes, each: NVIDIA H100")
    assert lines[1] == "Ranks on more than one node: wide on 2."

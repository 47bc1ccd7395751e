"""Training by torch_xla on its CPU backend, whose code is the TPU's; runs where torch_xla is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from bench.host.standstill import uneven
from bench.records.record import Outcome
from gpt2.config.tolerances import LOSS_TOLERANCE

pytest.importorskip("torch_xla", reason="torch_xla is not installed here; make test-xla runs these tests")

STEPS = 8

PROGRAM = """
import json, sys, time
from dataclasses import replace
sys.path.insert(0, "tests/support")
from trainings import WORKLOAD, start
from gpt2.config.toggles import Toggles

STEPS = 8

def run(device, workload, toggles):
    training = start(Toggles(device=device, **toggles), replace(WORKLOAD, **workload))
    steps, compiled, launched = [], [], []
    for number in range(STEPS):
        steps.append(next(training))
        training.device.synchronize()
        compiled.append(training.device.compilations())
        launched.append(training.device.launches())
    found = {"losses": [s.loss.item() for s in steps], "norms": [s.grad_norm.item() for s in steps]}
    found |= {"compiled": compiled, "programs": [each and each.programs for each in launched]}
    if device == "xla":
        found["reads"] = [launched[-1].reads, training.device.launches().reads]
        found["spread"] = training.device.spread(training.micro_batch[0])
        state = [v for s in training.optimizer.state.values() for v in s.values() if v.device.type == "xla"]
        sharding = training.device._xla._XLAC._get_xla_sharding_spec
        found["kept"] = sorted({sharding(tensor) for tensor in [*training.model.parameters(), *state]})
        found["memory"] = training.device.peak_memory().method
    return found

asked = json.loads(sys.argv[1])
print(json.dumps([run("xla", *asked), run("cpu", *asked)]))
"""


def printed(program: str, *arguments: str, devices: int = 1) -> str:
    """What a program says in a process of its own, with so many devices of XLA's CPU backend."""
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def trained(workload: dict[str, Any], **toggles: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training on XLA and, as one rank, on the CPU."""
    alone = dict(toggles)
    devices = alone.pop("world_size", 1)
    # One CPU takes as many sequences in each forward pass as all devices do together.
    alone["micro_batch_size"] = alone.get("micro_batch_size", 1) * devices
    program = PROGRAM.replace('run("cpu", *asked)', f'run("cpu", {workload!r}, {alone!r})')
    said = printed(program, json.dumps([workload, toggles]), devices=devices)
    on_xla, on_cpu = json.loads(said.splitlines()[-1])
    return on_xla, on_cpu


@pytest.fixture(scope="module")
def one_device():
    return trained({}, micro_batch_size=4)


@pytest.fixture(scope="module")
def two_devices():
    return trained({}, micro_batch_size=2, world_size=2)


def difference(on_xla: dict[str, Any], on_cpu: dict[str, Any], what: str) -> list[float]:
    return [abs(a - b) / abs(b) for a, b in zip(on_xla[what], on_cpu[what], strict=True)]


def held(found: tuple[dict[str, Any], dict[str, Any]], precision: str = "float32") -> None:
    tolerance = LOSS_TOLERANCE[precision]
    losses = difference(*found, "losses")
    assert losses[0] < tolerance.first_loss
    assert difference(*found, "norms")[0] < tolerance.first_grad_norm
    assert max(losses) < tolerance.losses


def test_the_loss_curve_is_the_cpus(one_device: Any) -> None:
    held(one_device)


def test_the_loss_curve_of_two_devices_is_that_of_one(two_devices: Any) -> None:
    held(two_devices)


def test_the_loss_curve_holds_when_two_devices_accumulate() -> None:
    held(trained({}, micro_batch_size=2, world_size=2, grad_accum_steps=2))


def test_the_loss_curve_in_bfloat16_is_the_cpus_in_float32(one_device: Any) -> None:
    in_bfloat16, _ = trained({}, micro_batch_size=4, autocast="bfloat16")
    held((in_bfloat16, one_device[1]), "bfloat16")
    assert in_bfloat16["losses"] != one_device[0]["losses"]


@pytest.mark.parametrize("where", ["one_device", "two_devices"])
def test_steady_state_makes_no_new_graph(where: str, request: pytest.FixtureRequest) -> None:
    on_xla, _ = request.getfixturevalue(where)
    assert on_xla["compiled"][0] > 0
    assert len(set(on_xla["compiled"][2:])) == 1


@pytest.mark.parametrize("where", ["one_device", "two_devices"])
def test_a_step_is_one_program(where: str, request: pytest.FixtureRequest) -> None:
    on_xla, _ = request.getfixturevalue(where)
    programs = on_xla["programs"]
    assert [after - before for before, after in pairwise(programs[1:])] == [1] * (STEPS - 2)


def test_a_learning_rate_that_changes_makes_no_new_graph() -> None:
    on_xla, on_cpu = trained({"lr_warmup_steps": 20}, micro_batch_size=4)
    assert len(set(on_xla["compiled"][2:])) == 1
    held((on_xla, on_cpu))


def test_reading_a_loss_is_counted(one_device: Any) -> None:
    on_xla, _ = one_device
    before, after = on_xla["reads"]
    assert before == 0
    assert after == 2 * STEPS  # losses and gradient norms


def test_each_device_gets_its_share_of_the_rows_and_all_weights(two_devices: Any) -> None:
    on_xla, _ = two_devices
    assert on_xla["spread"] == 2
    assert on_xla["kept"] == ["{replicated}"]


def test_absent_memory_says_why(one_device: Any, two_devices: Any) -> None:
    assert one_device[0]["memory"].startswith("absent: XLA's backend")
    assert two_devices[0]["memory"].startswith("absent: torch_xla does not tell it under SPMD")


def test_a_step_that_is_looked_at_is_recorded_whole_and_not_run() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests/support')\n"
        "from trainings import start\n"
        "from gpt2.proofs.profiler import profile\n"
        "from gpt2.config.toggles import Toggles\n"
        "training = start(Toggles(device='xla'))\n"
        "device = training.device\n"
        "for _ in range(3):\n"
        "    next(training)\n"
        "device.synchronize()\n"
        "before = device.compilations(), device.launches()\n"
        "ops = profile(lambda: next(training), device)\n"
        "assert (device.compilations(), device.launches()) == before\n"
        "print(sum(op.name == 'aten::addcdiv_' for op in ops), len(list(training.model.parameters())))\n"
    )
    updates, weights = printed(program).split()[-2:]
    assert updates == weights


@pytest.mark.parametrize("devices", [1, 2])
def test_synchronizing_waits_for_the_work(devices: int) -> None:
    """What is read afterwards is there at once, while the option of torch_xla.sync() to wait is no help."""
    program = (
        "import time, torch\n"
        "from gpt2.device import Xla\n"
        "from gpt2.config.toggles import Toggles\n"
        f"device = Xla(Toggles(device='xla', world_size={devices}))\n"
        "x = device.put(torch.randn(1500, 1500))\n"
        f"assert device.spread(x) == {devices}\n"
        "def work():\n"
        "    y = x\n"
        "    for _ in range(20):\n"
        "        y = (y @ x) * 0.02\n"
        "    start = time.perf_counter()\n"
        "    device.synchronize()\n"
        "    waited = time.perf_counter() - start\n"
        "    y[0, 0].item()\n"
        "    return waited, time.perf_counter() - start - waited\n"
        "work()\n"
        "waited, read = work()\n"
        "print('ratio', waited / read)\n"
    )
    assert float(printed(program, devices=devices).split()[-1]) > 3  # 30 and more; 0.01 where nothing waits


@pytest.mark.parametrize("rung", ["1 device", "2 devices"])
def test_a_rung_is_measured_like_any_other(rung: str, tmp_path: Path) -> None:
    ladder = tmp_path / "xla.yaml"
    ladder.write_text(
        "name: xla\n"
        "workload: {model: tiny, data: synthetic, seq_len: 64, tokens_per_step: 256}\n"
        "protocol: {repeats: 1, block_seconds: 0.02, blocks: 5, timeout_seconds: 200, ceiling_seconds: 0}\n"
        "rungs:\n"
        "  - {name: 1 device, set: {device: xla, autocast: bfloat16, micro_batch_size: 2}}\n"
        "  - {name: 2 devices, set: {world_size: 2}}\n"
    )
    environ = {name: value for name, value in os.environ.items() if name != "CPU_NUM_DEVICES"} | {
        "PJRT_DEVICE": "CPU"
    }
    command = [sys.executable, "-m", "bench.worker", str(ladder), rung, "--out", str(tmp_path / "m.json")]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    outcome = Outcome.model_validate_json((tmp_path / "m.json").read_text())
    assert outcome.status == "ok"
    assert outcome.environment
    assert outcome.environment.versions["xla_backend"] == "CPU"
    found = outcome.measurement
    assert found
    # Nothing but what its own blocks tell of other work on the machine.
    meanwhile = "it ran meanwhile, and waited for data, the device, memory or the disk"
    assert outcome.warnings == uneven(found.block_seconds, meanwhile)
    assert (found.recompiles, found.programs_per_step, found.host_reads) == (0, 1, 0)
    assert found.peak_memory_bytes is None
    assert found.proofs
    assert [name for name, proof in found.proofs.items() if not proof.took_effect] == []


def test_the_precision_of_products_is_set_in_its_own_words() -> None:
    program = (
        "from gpt2.device import Xla\n"
        "device = Xla()\n"
        "for precision in ('highest', 'high', 'medium'):\n"
        "    device.set_matmul_precision(precision)\n"
        "    print(device.matmul_precision(), device._xla.backends.get_mat_mul_precision())\n"
    )
    assert printed(program).splitlines() == ["highest highest", "high high", "medium default"]


def test_tpu_info_has_what_is_asked_of_it() -> None:
    from tpu_info import device, metrics  # pyright: ignore[reportMissingImports]

    assert len(device.get_local_chips()) == 2
    assert device.TpuChip.V5E.value.name == "v5e"
    assert {"device_id", "memory_usage", "total_memory", "duty_cycle_pct"} <= set(metrics.Usage._fields)
    assert callable(metrics.get_chip_usage)


LONG = """
import json
import sys
from pathlib import Path
sys.path.insert(0, "tests/support")
from longruns import broken_off, events, learned, tiny_run
toggles = {"device": "xla", "threads": "default", "adamw": "for_loop"}
toggles |= {"micro_batch_size": 2, "vocab_multiple": 64}
run = tiny_run(steps=6, toggles={**toggles, "world_size": int(sys.argv[2])})
whole = learned(events(run, Path(sys.argv[1]) / "whole"))
parts = Path(sys.argv[1]) / "parts"
found = learned(broken_off(run, parts, 3)) + learned(events(run, parts, resume=True))
print(json.dumps([[[[row["kind"], row["step"]], row["loss"]] for row in each] for each in (whole, found)]))
"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_long_run_goes_on_to_rounding_where_it_was_broken_off(devices: int, tmp_path: Path) -> None:
    whole, found = json.loads(printed(LONG, str(tmp_path), str(devices), devices=devices).splitlines()[-1])
    assert [place for place, _ in found] == [place for place, _ in whole]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in whole], abs=1e-5)

"""What bench plan says of each committed ladder, and how right its estimate is; no process is started."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from places import ROOT
from shown import in_full

from bench.cli import dry_run as plan
from bench.ladder.ladder import Ladder, LadderError, load
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.device import DEVICES
from gpt2.hardware.peaks import CHIPS, named
from gpt2.model.model import build
from gpt2.training.memory_estimate import MemoryEstimate, estimate
from gpt2.training.stages import model_config

LADDERS = ROOT / "ladders"
GIB = 2**30

remembered = cache(estimate)
"""Ladders share rungs, and an estimate takes a quarter of a second."""


@pytest.fixture(autouse=True)
def estimates_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "estimate", remembered)


def read(name: str, *overrides: str) -> Ladder:
    return load(LADDERS / f"{name}.yaml", overrides)


def planned(ladder: Ladder, *rungs: str, chip: str | None = None) -> str:
    """The plan as one line."""
    return " ".join(in_full(plan.plan(ladder, ladder.chosen(rungs), named(chip) if chip else None)).split())


def needs(ladder: Ladder) -> MemoryEstimate:
    return remembered(ladder.workload, ladder.rungs[-1].toggles)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [p.stem for p in sorted(LADDERS.glob("*.yaml")) if "\nchip:" in p.read_text()]
)
def test_each_rung_of_a_ladder_for_a_chip_fits_into_it(name: str) -> None:
    ladder = read(name)
    assert ladder.chip is not None
    assert ladder.chip.memory_bytes is not None
    for rung in ladder.rungs:
        memory = remembered(ladder.workload, rung.toggles)
        assert memory.total <= ladder.chip.memory_bytes, rung.name
        assert not ladder.chip.lacks(rung.toggles.product_format()), rung.name


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("h100", [1024] * 6 + [65_536] * 6),
        ("h100x8", [524_288] * 4),
        ("h100x8-weak", [65_536, 131_072, 262_144, 524_288]),
        ("a100x8", [524_288] * 5),
        ("gpt2-xl-h100x8", [1_048_576] * 3),
    ],
)
def test_tokens_per_step_are_the_published_ones(name: str, tokens: list[int]) -> None:
    ladder = read(name)
    assert [rung.toggles.tokens_per_step(ladder.workload.seq_len) for rung in ladder.rungs] == tokens


def test_gpus_are_scaled_by_accumulating_less_or_not_at_all() -> None:
    def accumulated(name: str) -> list[tuple[int, int]]:
        return [(rung.toggles.world_size, rung.toggles.grad_accum_steps) for rung in read(name).rungs]

    assert accumulated("h100x8") == [(1, 8), (2, 4), (4, 2), (8, 1)]
    assert accumulated("h100x8-weak") == [(1, 1), (2, 1), (4, 1), (8, 1)]


def test_the_last_of_ours_beside_peers_on_cuda_is_the_top_of_the_h100_s_ladder() -> None:
    ours = [rung for rung in read("peers-cuda").rungs if rung.external is None]
    assert ours[-1].toggles == read("h100").rungs[-1].toggles


@pytest.mark.parametrize(
    ("name", "batch", "accumulated"), [("gpt2-xl-h100x8", 16, 8), ("a100x8", 64, 1), ("tpu-v3-8", 8, 8)]
)
def test_the_last_rung_splits_its_step_as_published(name: str, batch: int, accumulated: int) -> None:
    last = read(name).rungs[-1].toggles
    assert (last.world_size, last.micro_batch_size, last.grad_accum_steps) == (8, batch, accumulated)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_plan_for_a_missing_device_compares_memory_with_the_ladder_s_chip() -> None:
    text = planned(read("t4x2"))
    assert "On T4" in text
    assert "2 GPUs" in text
    assert text.count("fits into 16 GiB") == 9
    assert text.count("needs 2 of them") == 2
    assert "Missing here: device: cuda: torch finds no CUDA device here" in text


def test_a_ladder_over_kinds_of_device_says_of_each_whether_it_is_here() -> None:
    ladder = read("hardware")
    assert [rung.toggles.device for rung in ladder.rungs] == ["cpu", "mps", "cuda", "xla"]
    assert len({rung.toggles for rung in ladder.rungs}) == 4
    text = planned(ladder)
    assert "Here" in text
    assert "yes" in text
    assert text.count("not supported: device: ") >= 2  # no machine has a GPU of Apple's and one of NVIDIA's


@pytest.mark.parametrize(
    ("ladder", "chip", "says"),
    [
        ("tpu", "H100 SXM", "trains on device: xla; H100 SXM has device: cuda"),
        ("cuda", "TPU v4", "trains on device: cuda; TPU v4 has device: xla"),
        ("cuda", "M1 Max", "trains on device: cuda; M1 Max has device: mps"),
    ],
)
def test_no_rung_can_run_on_a_chip_of_another_kind(ladder: str, chip: str, says: str) -> None:
    text = planned(read(ladder), chip=chip)
    assert f"On {chip}: 0 of" in text
    assert says in text


def test_a_ladder_for_cpus_is_held_to_no_chip() -> None:
    with pytest.raises(LadderError, match="all rungs train on a CPU"):
        planned(read("cpu"), chip="H100 SXM")


def test_a_chip_given_by_hand_comes_before_the_ladder_s_own() -> None:
    text = planned(read("t4x2"), "CUDA on T4", chip="H100 SXM")
    assert "On H100 SXM" in text
    assert "fits into 80 GiB" in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("autocast=bfloat16", "T4 has no bfloat16 units; choose float16"),
        ("matmul_precision=high", "T4 has no tf32 units; choose highest"),
    ],
)
def test_a_number_format_that_the_chip_lacks_is_named_with_what_to_choose(override: str, said: str) -> None:
    assert said in planned(read("t4x2", f"toggles.{override}"), "CUDA on T4", chip="T4")


def test_flash_attention_is_refused_to_a_chip_that_is_too_old_for_it() -> None:
    ladder = read("t4x2", "toggles.attention=flash")
    assert "older than FlashAttention's kernels; choose efficient" in planned(ladder, "float16", chip="T4")


def test_ranks_that_share_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = read("ddp-cpu", "toggles.autocast=float32")  # which each CPU has units for
    one = needs(ladder).total
    monkeypatch.setattr(DEVICES["cpu"], "memory_bytes", lambda self: int(1.5 * one))
    assert "yes" in planned(ladder, "1 process")
    assert "will not fit" in planned(ladder, "2 processes")


def test_what_does_not_fit_is_told_what_to_try() -> None:
    ladder = read("h200", "toggles.micro_batch_size=256")
    said = "will not fit into 80 GiB; try a smaller micro_batch_size, recompute: block"
    assert said in planned(ladder, "batch of 128", chip="H100 SXM")


def test_gpt2_medium_fits_one_tpu_v3_core_up_to_a_batch_of_4_and_gpt2_large_at_none() -> None:
    def on_core(model: str, batch: int) -> str:
        overrides = (f"workload.model={model}", f"toggles.micro_batch_size={batch}")
        return planned(read("tpu-v3-8", *overrides), "bfloat16", chip="TPU v3, one of two cores")

    assert "fits into 16 GiB" in on_core("gpt2-medium", 4)
    assert "perhaps: tight in 16 GiB" in on_core("gpt2-medium", 5)  # of which programs get 15.5
    assert "will not fit into 16 GiB" in on_core("gpt2-medium", 6)
    assert "will not fit into 16 GiB" in on_core("gpt2-large", 1)


@pytest.mark.slow
def test_gpt3_s_largest_fits_into_no_chip_and_over_as_many_h100s_as_the_plan_says() -> None:
    overrides = ("workload.model=gpt3-175b", "workload.seq_len=2048", "toggles.recompute=block")
    ladder = read("h100x8-weak", *overrides, "toggles.micro_batch_size=1")
    toggles = ladder.rungs[0].toggles
    memory = remembered(ladder.workload, toggles)
    assert all(memory.total > (chip.memory_bytes or 0) for chip in CHIPS)
    assert memory.weights == memory.gradients == memory.optimizer // 2 == 4 * 174_604_259_328
    text = planned(ladder, "1 GPU")
    assert "174,604,259,328 parameters; 1,076,373,430,272 FLOPs per token at T = 2048" in text
    said = re.search(r"will not fit into 80 GiB; try sharding: fsdp2 over (\d+) devices or more", text)
    assert said
    for devices, fits in ((int(said[1]) - 1, False), (int(said[1]), True)):
        sharded = estimate(ladder.workload, replace(toggles, sharding="fsdp2", world_size=devices))
        assert (sharded.total <= 80 * GIB) == fits, devices


@pytest.mark.parametrize(
    ("batch", "mebibytes"),
    [(1, 2448), (2, 2949), (4, 3995), (8, 6094), (16, 10282), (32, 18670), (64, 35457)],
)
def test_the_estimate_is_a_tenth_at_most_above_the_post_s_batch_sweep_on_one_h100(
    batch: int, mebibytes: int
) -> None:
    toggles = Toggles(device="cuda", autocast="bfloat16", attention="flash", compile="default", adamw="fused")
    memory = remembered(Workload(), replace(toggles, micro_batch_size=batch))
    assert 1 <= memory.total / 2**20 / mebibytes <= 1.1


@pytest.mark.parametrize("autocast", ["float32", "bfloat16"])
def test_the_estimate_of_compiled_code_is_what_torch_s_partitioner_keeps(autocast: str) -> None:
    workload, toggles = Workload(model="tiny", seq_len=128), Toggles(attention="sdpa", micro_batch_size=8)
    toggles = replace(toggles, autocast=autocast, compile="default")
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    model = build(model_config(toggles, workload.config), 0, torch.device("cpu"))
    # The compiler's choice of what to keep, without its code.
    model.compile(backend="aot_eager_decomp_partition")
    weights = [parameter.untyped_storage()._cdata for parameter in model.parameters()]
    tokens, dtype = torch.zeros(8, 128, dtype=torch.int64), getattr(torch, autocast)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
    ):
        loss = model(tokens, tokens)
    assert loss.isfinite()  # and what is kept for its backward pass is there still
    activations = sum(size for storage, size in kept.items() if storage not in weights)
    gradient_of_logits = 8 * 128 * 509 * dtype.itemsize
    assert remembered(workload, toggles).activations - gradient_of_logits == pytest.approx(
        activations, rel=0.03
    )

"""The bound computed from a ceiling, and the command that shows it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from rich.console import Console
from samples import MACHINE, append, measurement, record, step_of

from bench.analysis.bound import (
    Bound,
    bound,
    bound_of,
    causal_attention_flops,
    linear_layers,
    most_tokens_per_second,
    product_flops,
    share,
)
from bench.analysis.scoreboard import scoreboard
from bench.analysis.select import load_boards
from bench.host.environment import describe
from bench.ladder.ladder import load
from bench.records.machine import Attention, Ceiling, Matmul
from bench.records.record import Record, ToggleValues, read
from bench.report.one_run.roofline import bound_table, ceiling_table, ladder_lines, measured_ms
from bench.report.table import Table
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.device import Cpu

GPT2 = Workload(model="gpt2", seq_len=1024)


def matmul(name: str, rate: float, number_format: str = "float32", k: int = 4096, n: int = 4096) -> Matmul:
    return Matmul(name=name, number_format=number_format, m=1024, k=k, n=n, flops_per_second=rate)


def ceiling(*matmuls: Matmul, **changes) -> Ceiling:
    facts = {"chip": "c", "threads": None, "copy_bytes_per_second": 1e9, "seconds": 1.0, **changes}
    return Ceiling(matmuls=list(matmuls), **facts)


FLAT = ceiling(matmul("square", 1e12))
"""One TFLOP/s for every product, one GB/s: milliseconds are GFLOPs, and megabytes."""


def test_products_and_whole_attention_are_the_flops_that_mfu_counts() -> None:
    products = sum(each.count * product_flops(1024, each.k, each.n) for each in linear_layers(GPT2.config))
    attention = 3 * 12 * 2 * 2 * 1024 * 768 * 1024
    assert products + attention == GPT2.flops_per_token * 1024


def test_the_parts_are_those_worked_out_by_hand_for_gpt2() -> None:
    found = bound(GPT2, Toggles(), FLAT)
    weights = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072) + 768 * 50257
    assert weights == 123_532_032
    assert found.products_ms == pytest.approx(6 * 1024 * weights / 1e9)
    assert found.attention_ms == pytest.approx(3 * 4 * 12 * 768 * 1024 * 512.5 / 1e9)
    assert found.optimizer_ms == pytest.approx(32 * 124_439_808 / 1e6)


def test_the_bound_is_the_sum_of_its_parts() -> None:
    assert Bound(number_format="float32", products_ms=1.0, attention_ms=2.0, optimizer_ms=4.0).total_ms == 7.0


def test_causal_attention_is_the_half_with_the_diagonal_of_all_of_it() -> None:
    every = GPT2.flops_per_token * 1024 - 6 * 1024 * 123_532_032
    assert causal_attention_flops(GPT2, 1024) == every * 1025 // 2048


def test_a_layers_own_shape_counts_where_it_is_faster_than_the_squares() -> None:
    quick = ceiling(matmul("square", 1e12), matmul("lm_head", 2e12, k=768, n=50304))
    saved = 6 * 1024 * 768 * 50257 / 2 / 1e9
    slow, fast = bound(GPT2, Toggles(), FLAT).products_ms, bound(GPT2, Toggles(), quick).products_ms
    assert slow is not None
    assert fast == pytest.approx(slow - saved)


def test_a_layers_own_shape_does_not_count_where_a_square_is_faster() -> None:
    slow = ceiling(matmul("square", 1e12), matmul("lm_head", 0.5e12, k=768, n=50304))
    assert bound(GPT2, Toggles(), slow) == bound(GPT2, Toggles(), FLAT)


LAYERS = linear_layers(GPT2.config)
ROLES = ("forward", "input_gradient", "weight_gradient")


def by_shape(rates: Sequence[float] = (1e12, 0.5e12, 0.25e12), **changes: Any) -> Ceiling:
    """Each layer's products at these rates, and a square that is faster."""
    own = [
        Matmul(name=layer.name, role=role, number_format="float32", m=m, k=k, n=n, flops_per_second=rate)
        for layer in LAYERS
        for role, rate in zip(ROLES, rates, strict=False)
        for m, k, n in [layer.shape(role, 512)]
    ]
    return ceiling(matmul("square", 4e12), *own, **changes)


def test_measured_gradients_count_at_their_own_rates_though_squares_are_faster() -> None:
    found = bound(GPT2, Toggles(), by_shape())
    forward = 2 * 1024 * 123_532_032 / 1e9
    assert found.products_by_shape
    assert found.products_ms == pytest.approx(forward * (1 + 2 + 4))


@pytest.mark.parametrize(
    ("toggles", "rates"),
    [
        (Toggles(products="tuned"), (1e12, 0.5e12, 0.25e12)),
        (Toggles(compile="gemm"), (1e12, 0.5e12, 0.25e12)),
        (Toggles(float8="rowwise"), (1e12, 0.5e12, 0.25e12)),
        (Toggles(int8="rowwise"), (1e12, 0.5e12, 0.25e12)),
        (Toggles(), (1e12, 0.5e12)),
        (Toggles(), (1e12,)),
    ],
)
def test_the_squares_count_where_products_are_split_or_gradients_were_not_measured(
    toggles: Toggles, rates: tuple[float, ...]
) -> None:
    found = bound(GPT2, toggles, by_shape(rates))
    assert not found.products_by_shape
    assert found.products_ms == bound(GPT2, toggles, ceiling(matmul("square", 4e12))).products_ms


def attention(**changes: Any) -> Attention:
    facts: dict[str, Any] = {"number_format": "float32", "B": 2, "n_head": 12, "seq_len": 1024}
    facts |= {"head_dim": 64, "kernel": "flash"}
    facts |= {"forward_seconds": 0.1, "training_seconds": 0.4, "flops": 10**11, "flops_per_second": 0.25e12}
    return Attention(**{**facts, **changes})


def test_torchs_attention_counts_at_its_measured_rate() -> None:
    found = bound(GPT2, Toggles(attention="sdpa"), ceiling(matmul("square", 1e12), attention=attention()))
    assert found.attention_by_kernel
    assert found.attention_ms == pytest.approx(4 * 3 * 4 * 12 * 768 * 1024 * 512.5 / 1e9)


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        ("brgemm", {}),
        ("explicit", {}),
        ("sdpa", {"number_format": "bfloat16"}),
        ("sdpa", {"head_dim": 128}),
        ("sdpa", {"seq_len": 512}),
    ],
)
def test_attention_unlike_the_measured_one_counts_at_the_best_rate_of_all(
    kernel: Any, changes: dict[str, Any]
) -> None:
    measured = ceiling(matmul("square", 1e12), attention=attention(**changes))
    assert bound(GPT2, Toggles(attention=kernel), measured) == bound(GPT2, Toggles(attention=kernel), FLAT)


def printed(table: Table) -> str:
    shown = StringIO()
    Console(file=shown, width=200).print(*table.to_terminal(200))
    return shown.getvalue()


def test_the_ceiling_shows_a_layers_gradients_in_its_own_line() -> None:
    shown = printed(ceiling_table(by_shape(attention=attention())))
    (line,) = [line for line in shown.splitlines() if "qkv" in line]
    assert line.split() == ["qkv", "512", "x", "768", "x", "2,304", "1.00", "0.5", "0.25"]
    assert "input gradient, float32" in shown
    assert "Attention by flash in float32, 2 x 12 x 1,024 x 64" in shown
    assert "gradient" not in printed(ceiling_table(FLAT))


def test_the_fastest_product_of_a_ceiling_is_named_by_its_role() -> None:
    (fastest,) = [m for m in by_shape((1e12, 9e12)).matmuls if (m.name, m.role) == ("qkv", "input_gradient")]
    assert fastest.title == "input gradient of qkv"
    assert FLAT.best.title == "square"


def test_the_bound_says_which_parts_count_at_their_own_rates() -> None:
    least = bound(GPT2, Toggles(attention="sdpa"), by_shape(attention=attention()))
    assert "matmuls, attention" in printed(bound_table("t", [("a", least, None)], []))
    assert "At own rates" not in printed(bound_table("t", [("a", bound(GPT2, Toggles(), FLAT), None)], []))


def test_the_shape_of_another_model_says_nothing() -> None:
    other = ceiling(matmul("square", 1e12), matmul("qkv", 9e12, k=1024, n=3072))
    assert bound(GPT2, Toggles(), other).products_ms == bound(GPT2, Toggles(), FLAT).products_ms


def test_only_rates_of_the_rungs_number_format_count() -> None:
    both = ceiling(matmul("square", 1e12), matmul("square", 4e12, "bfloat16"))
    exact, rounded = bound(GPT2, Toggles(), both), bound(GPT2, Toggles(autocast="bfloat16"), both)
    assert exact.products_ms is not None
    assert rounded.products_ms == pytest.approx(exact.products_ms / 4)
    assert rounded.optimizer_ms == exact.optimizer_ms


def test_a_format_that_was_not_measured_leaves_the_bound_absent_with_the_reason() -> None:
    lacking = ceiling(matmul("square", 1e12), absent={"float16": "too slow"})
    found = bound(GPT2, Toggles(autocast="float16"), lacking)
    assert found.total_ms is None
    assert found.absent == "no ceiling for float16: too slow"
    assert share(found, 100.0) is None


def test_the_optimiser_moves_memory_as_fast_as_copy_or_change_in_place() -> None:
    found = bound(GPT2, Toggles(), ceiling(matmul("square", 1e12), update_bytes_per_second=2e9))
    assert found.optimizer_ms == pytest.approx(32 * 124_439_808 / 2e6)


def test_tokens_multiply_products_but_not_the_optimiser() -> None:
    one = bound(GPT2, Toggles(), FLAT)
    many = bound(GPT2, Toggles(micro_batch_size=2, grad_accum_steps=3), FLAT)
    assert one.products_ms is not None
    assert one.attention_ms is not None
    assert many.products_ms == pytest.approx(6 * one.products_ms)
    assert many.attention_ms == pytest.approx(6 * one.attention_ms)
    assert many.optimizer_ms == one.optimizer_ms


def test_each_of_several_devices_has_its_own_share() -> None:
    assert bound(GPT2, Toggles(world_size=4), FLAT) == bound(GPT2, Toggles(), FLAT)


def test_ranks_on_a_cpu_share_it() -> None:
    cpu = ceiling(matmul("square", 1e12), threads=2)
    one, two = bound(GPT2, Toggles(), cpu), bound(GPT2, Toggles(world_size=2), cpu)
    assert one.total_ms is not None
    assert two.total_ms == pytest.approx(2 * one.total_ms)


def test_ranks_on_several_nodes_share_their_own_node_s_cpu() -> None:
    cpu = ceiling(matmul("square", 1e12), threads=2)
    assert bound(GPT2, Toggles(world_size=4), cpu, nodes=2) == bound(GPT2, Toggles(world_size=2), cpu)


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "fsdp2"])
def test_ranks_that_share_out_the_optimiser_move_a_part_of_its_bytes_each(sharding: Any) -> None:
    alone, shared = (bound(GPT2, Toggles(world_size=4, sharding=s), FLAT) for s in ("none", sharding))
    assert alone.optimizer_ms is not None
    assert shared.optimizer_ms == pytest.approx(alone.optimizer_ms / 4)
    assert shared.products_ms == alone.products_ms


def of_a_run(*ceilings: Ceiling, **changes: Any):
    toggles = Toggles(device="cuda")
    measured = [
        record("ceiling", 0, n, kind="ceiling", measurement=None, ceiling=each, toggles=toggles)
        for n, each in enumerate(ceilings, start=1)
    ]
    rung = record(toggles=replace(toggles, **changes), measurement=measurement(100.0))
    return scoreboard([rung, *measured])


def test_a_run_s_rung_is_held_to_the_most_that_its_processes_measured() -> None:
    board = of_a_run(FLAT, ceiling(matmul("square", 2e12)), ceiling(matmul("square", 0.5e12)))
    least = bound_of(board, board.rows[0])
    assert least == bound(GPT2, Toggles(device="cuda"), ceiling(matmul("square", 2e12)))


def test_the_most_tokens_per_second_are_a_step_s_tokens_over_the_bound() -> None:
    least = Bound(number_format="f", products_ms=4.0, attention_ms=4.0, optimizer_ms=8.0)
    assert most_tokens_per_second(least, 32) == 2000.0
    assert most_tokens_per_second(Bound(number_format="f", absent="no"), 32) is None


def test_a_run_without_a_ceiling_has_no_bound() -> None:
    board = of_a_run()
    assert bound_of(board, board.rows[0]) is None


def test_a_rung_whose_format_was_not_measured_has_no_bound_but_the_reason() -> None:
    board = of_a_run(FLAT, autocast="bfloat16")
    least = bound_of(board, board.rows[0])
    assert least is not None
    assert least.absent == "no ceiling for bfloat16: not measured"


def test_a_share_is_the_bound_over_what_was_measured() -> None:
    assert share(Bound(number_format="f", products_ms=10.0, attention_ms=0.0, optimizer_ms=0.0), 40.0) == 0.25


def test_measured_milliseconds_are_those_of_the_same_toggles_and_workload_only() -> None:
    toggles = Toggles(device="cuda")
    board = scoreboard([record(measurement=measurement(2048.0))])
    assert measured_ms(board, "baseline", Workload(), toggles) == pytest.approx(500.0)
    assert measured_ms(board, "baseline", Workload(), replace(toggles, attention="sdpa")) is None
    assert measured_ms(board, "baseline", Workload(seq_len=512), toggles) is None
    assert measured_ms(board, "another", Workload(), toggles) is None


def test_a_share_above_all_that_can_be_is_said_to_be_of_another_hour() -> None:
    least = Bound(number_format="float32", products_ms=10.0, attention_ms=0.0, optimizer_ms=0.0)
    said = [printed(bound_table("t", [("a", least, measured)], [])) for measured in (20.0, 5.0)]
    assert ["Above 100 % of the limit" in text for text in said] == [False, True]


def test_a_rung_of_another_device_has_no_bound(write_ladder) -> None:
    ladder = load(write_ladder("[{name: a}, {name: b, set: {device: cuda}}]"))
    (_, here, _), (_, there, _) = ladder_lines(ladder, "cpu", FLAT, None)
    assert here.total_ms is not None
    assert there.total_ms is None
    assert there.absent == "it trains on cuda, the ceiling is that of cpu"


def ceiling_record(**changes) -> Record:
    plain = record("ceiling", kind="ceiling", ladder="roofline", measurement=None)
    return plain.model_copy(update={"ceiling": FLAT, **changes})


def test_a_folder_with_a_roofline_file_gives_no_warning(tmp_path: Path) -> None:
    append(tmp_path / "roofline-1.jsonl", ceiling_record())
    append(tmp_path / "roofline-2.jsonl", ceiling_record(status="failed", error="x", ceiling=None))
    append(tmp_path / "h100-1.jsonl", record())
    boards, warnings = load_boards([tmp_path])
    assert [board.ladder for board in boards] == ["h100"]
    assert warnings == []


def test_a_file_of_other_records_without_rungs_still_gives_a_warning(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", record(kind="control"))
    append(tmp_path / "h100-1.jsonl", record())
    _, warnings = load_boards([tmp_path])
    assert len(warnings) == 1


def roofline(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.cli", "roofline", "--seconds", "0.002", *map(str, arguments)]
    wide = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, cwd=ROOT, env=wide
    )


@pytest.mark.slow
def test_the_command_prints_tables_and_keeps_a_record_that_can_be_read(write_ladder, tmp_path: Path) -> None:
    ladder = write_ladder("[{name: a}, {name: b, set: {attention: sdpa}}]")
    here = MACHINE.model_copy(update={"chip": describe(Cpu()).chip, "device_count": Cpu().count()})
    rung = load(ladder).rung("a")
    workload = asdict(load(ladder).workload)
    step = measurement(tokens_per_step=step_of(rung.toggles, {"workload": workload}))
    earlier = record("a", ladder="test", workload=workload, environment=here, measurement=step).model_copy(
        update={"toggles": ToggleValues(all=asdict(rung.toggles), resolved={})}
    )
    folder = tmp_path / "out" / here.machine
    folder.mkdir(parents=True)
    append(folder / "test-1.jsonl", earlier)
    done = roofline(ladder, "--out", tmp_path / "out", "--results", tmp_path / "out", "--full")
    assert done.returncode == 0, done.stderr
    for part in ("TFLOP/s", "lm_head", "GB/s", "bfloat16", "Of limit"):
        assert part in done.stdout
    measured, unmeasured = (
        line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["a"], ["b"])
    )
    assert measured[-1].endswith("%")
    assert unmeasured[-1] == "-"
    (path,) = (tmp_path / "out").rglob("roofline-*.jsonl")
    ((kept,), warnings) = read(path)
    assert warnings == []
    assert kept.ceiling is not None
    assert kept.ceiling.best.flops_per_second > 0


@pytest.mark.slow
def test_what_was_measured_is_shown_though_its_record_does_not_fit_onto_the_disk(small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    done = roofline("--seconds", "0.001", "--out", small_disk)
    assert done.returncode == 6
    assert "TFLOP/s" in done.stdout
    assert "No space left on device); the record is not kept" in done.stderr


def test_a_wrong_ladder_is_exit_code_2_and_nothing_is_written(tmp_path: Path) -> None:
    done = roofline(tmp_path / "nowhere.yaml", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "why"),
    [
        pytest.param("mps", "torch finds no Apple GPU here", marks=pytest.mark.slow),
        ("tpu", "is not one of cpu, cuda, mps, xpu, xla; choose one of them"),
    ],
)
def test_a_device_that_cannot_be_measured_is_refused_and_leaves_no_results(
    device: str, why: str, tmp_path: Path
) -> None:
    done = roofline("--device", device, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert f"bench: --device: {device}: {why}" in done.stderr
    assert not list((tmp_path / "out").rglob("*.jsonl"))

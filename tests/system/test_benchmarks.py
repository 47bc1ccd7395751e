"""Speed of the parts that are ours: `make benchmark` times them; the tests run each once."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest
from places import ROOT
from samples import append, measurement, record
from shown import to_markdown

from bench.analysis.select import load_boards
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload
from gpt2.data.batches import Batches, open_corpus
from gpt2.device import Cpu
from gpt2.training.train import micro_batches, train

pytestmark = pytest.mark.slow


def test_benchmark_cutting_a_batch_from_the_synthetic_corpus(benchmark) -> None:
    corpus = open_corpus("synthetic", vocab_size=50257, seed=0)
    batches = Batches(corpus, seq_len=1024, tokens_per_step=64 * 1024, seed=0)
    x, _ = benchmark(lambda: batches.sequences(0, 0, 64))
    assert x.shape == (64, 1024)


def test_benchmark_one_step_of_the_tiny_model(benchmark) -> None:
    workload = Workload(model="tiny", seq_len=128)
    toggles = Toggles(micro_batch_size=4, attention="sdpa", adamw="fused")
    corpus = open_corpus("synthetic", vocab_size=509, seed=0)
    batches = Batches(corpus, seq_len=128, tokens_per_step=512, seed=0)
    steps = train(workload, toggles, Cpu(), micro_batches(batches, toggles))
    assert benchmark(lambda: next(steps)).tokens == 512


def test_benchmark_starting_bench_report(benchmark, tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record())
    command = [sys.executable, "-m", "bench.cli", "report", str(tmp_path), "--markdown"]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=5)


def test_benchmark_a_report_over_a_thousand_records(benchmark, tmp_path: Path) -> None:
    found = measurement(losses=[10.0] * 100)
    for number in range(1000):
        index, repetition = number % 10, 1 + number // 10
        append(tmp_path / "r.jsonl", record(f"rung {index}", index, repetition, measurement=found))
    (board,), _ = benchmark.pedantic(lambda: load_boards([tmp_path]), rounds=1)
    assert to_markdown(board).count("\n| rung") == 2 * 10  # here, and where the time goes


def test_benchmark_a_report_over_ten_thousand_records_of_many_rungs(benchmark, tmp_path: Path) -> None:
    found, rungs = measurement(losses=[10.0] * 100), 3334 if benchmark.enabled else 50
    lines = [
        record(f"rung {index}", index, repetition, measurement=found).model_dump_json(by_alias=True)
        for repetition in (1, 2, 3)
        for index in range(rungs)
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n")

    def shown() -> str:
        ((board,), _) = load_boards([tmp_path])
        return to_markdown(board)

    assert benchmark.pedantic(shown, rounds=1).count("\n| rung") == 2 * rungs


def test_benchmark_the_harness_against_a_bare_loop(benchmark, tmp_path: Path) -> None:
    """In turn, on one model and one optimiser; the ratio and its interval are in extra_info."""
    out = tmp_path / "overhead.json"
    model, rounds, seconds = ("gpt2", "20", "6") if benchmark.enabled else ("tiny", "3", "0.2")
    script = ROOT / "tests" / "support" / "overhead.py"
    options = ["--model", model, "--rounds", rounds, "--seconds", seconds, "--out", str(out)]
    command = [sys.executable, str(script), *options]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=1)
    found = json.loads(out.read_text())
    benchmark.extra_info |= found["harness_over_bare_loop"]
    assert {len(tps) for tps in found["tokens_per_second"].values()} == {int(rounds)}
    if benchmark.enabled:  # else it is too short to tell
        assert found["harness_over_bare_loop"]["value"] >= 0.99


def test_benchmark_what_the_runner_adds_to_a_process(benchmark, tmp_path: Path) -> None:
    """Seconds of `bench run` without a process of it, by process; start and end are in extra_info."""
    ladder, rounds = tmp_path / "l.yaml", 3 if benchmark.enabled else 1
    ladder.write_text(
        "name: l\nworkload: {model: tiny, data: synthetic, seq_len: 64}\n"
        f"protocol: {{repeats: {rounds}, min_warmup_steps: 1, "
        "block_seconds: 0.05, blocks: 5, ceiling_seconds: 0}\n"
        "rungs:\n  - {name: a}\n  - {name: b, set: {attention: sdpa}}\n"
    )
    command = [sys.executable, "-m", "bench.cli", "run", str(ladder), "--out", str(tmp_path)]
    benchmark.pedantic(lambda: subprocess.run(command, check=True, capture_output=True), rounds=1)
    (results,) = tmp_path.rglob("*.jsonl")
    records = [json.loads(line) for line in results.read_text().splitlines()]
    begun = [datetime.fromisoformat(each["time"]).timestamp() for each in records]
    between = [
        later - begin - each["process_seconds"]
        for begin, later, each in zip(begun, begun[1:], records, strict=False)
    ]
    assert len(records) == (12 if benchmark.enabled else 2)  # controls need several rounds
    benchmark.extra_info |= {"runner_seconds_per_process": median(between), "most": max(between)}
    if benchmark.enabled:
        assert median(between) < 1

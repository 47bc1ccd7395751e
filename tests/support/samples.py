"""Records made up for tests of what reads them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.ladder.ladder import Protocol
from bench.records.machine import Environment
from bench.records.measurement import Measurement, Rank
from bench.records.record import Record, ResultsFile, ToggleValues
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

MACHINE = Environment(
    chip="NVIDIA H100 80GB HBM3",
    device_count=1,
    device_memory_bytes=80 * 2**30,
    cpu="Some CPU",
    cpu_cores=8,
    usable_cores=8,
    cpu_flags=["avx2"],
    cpu_mhz=2000.0,
    memory_bytes=64 * 2**30,
    os="Linux",
    python="3.12.1",
    torch="2.11.0",
    versions={"cuda": "13.0"},
    load_average=0.1,
    code_hash="c0de",
    commit="abc",
    dirty=False,
)


def measurement(tps: float = 1000.0, losses: list[float] | None = None, **changes: Any) -> Measurement:
    """A window of ten blocks of one step each."""
    tokens = changes.pop("tokens_per_step", 1024)
    seconds = [tokens / tps] * 10
    facts: dict[str, Any] = {
        "tokens_per_step": tokens,
        "block_steps": 1,
        "block_seconds": seconds,
        "startup_seconds": 2.0,
        "first_step_seconds": 3.0,
        "compile_cache": None,
        "warmup_steps": 3,
        "losses": losses or [10.9, 10.5, 10.2, 10.0],
        "grad_norms": [1.0] * len(losses or [0] * 4),
        "peak_memory_bytes": 3 * 2**30,
        "peak_memory_method": "allocated, window (torch.cuda)",
        "reserved_memory_bytes": 4 * 2**30,
        "run_peak_memory_bytes": 5 * 2**30,
        "alloc_retries": 0,
        "recompiles": 0,
        "data_wait_seconds": 0.01,
        "ranks": [Rank(block_seconds=seconds, peak_memory_bytes=3 * 2**30)],
        "parameters": 124_439_808,
        "flops_per_token": 854_438_400,
        "flops_formula": "F",
        "peak_flops_bf16": 989.4e12,
        "peak_flops_source": "a datasheet",
        "proofs": {},
    }
    return Measurement(**{**facts, **changes})


def step_of(toggles: Toggles, changes: dict[str, Any]) -> int:
    """Tokens that these toggles make a step of, in the task that the changes to a record name."""
    return toggles.tokens_per_step(changes.get("workload", asdict(Workload()))["seq_len"])


def record(rung: str = "baseline", index: int = 0, repetition: int = 1, **changes: Any) -> Record:
    """One process of one rung, measured at 1,000 tokens per second unless told otherwise."""
    toggles = changes.pop("toggles", Toggles(device="cuda"))
    facts: dict[str, Any] = {
        "run_id": "r",
        "time": "2026-01-01T00:00:00+00:00",
        "kind": "cumulative",
        "ladder": "h100",
        "ladder_hash": "1add",
        "protocol": asdict(Protocol(repeats=1)),
        "rung": rung,
        "rung_index": index,
        "repetition": repetition,
        "status": "ok",
        "error": None,
        "exit_code": 0,
        "command": f"python -m bench.worker ladders/h100.yaml {rung} --out m.json",
        "warnings": [],
        "changed": ["device=cuda"],
        "workload": asdict(Workload()),
        "data_sha256": "da7a",
        "toggles": ToggleValues(all=asdict(toggles), resolved={"threads": 2}),
        "environment": MACHINE,
        "measurement": measurement(),
    }
    if changes.get("status", "ok") != "ok":
        changes.setdefault("measurement", None)
    return Record(**{**facts, **changes})


def records_of(*rungs: tuple[str, Toggles, float], rounds: int = 1, **changes: Any) -> list[Record]:
    """Rungs of toggles and speeds that do not vary, one rung after the other."""
    return [
        record(name, index, n, **{"toggles": toggles, "measurement": measurement(tps), **changes})
        for index, (name, toggles, tps) in enumerate(rungs)
        for n in range(1, rounds + 1)
    ]


def append(path: Path, record: Record) -> None:
    """Add one record to a results file."""
    with closing(ResultsFile(path)) as file:
        file.append(record)

"""The chain of several runs: who is held to what, what does not rank, and how it is shown."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from places import ROOT
from samples import MACHINE, append, measurement, record, step_of

from bench.analysis.select import load_boards
from bench.analysis.several_runs.rungs import Chain, build_chain, load_baseline, rung_views
from bench.format import training_time
from bench.records.record import RecordError, Scout
from bench.report.assembly import assemble
from bench.report.export import frame
from bench.report.page import page
from bench.report.several_runs.comparison import chain_table as table_of
from gpt2.config.toggles import Toggles
from gpt2.config.workload import Workload

CPU, MPS, CUDA = (Toggles(device=device) for device in ("cpu", "mps", "cuda"))
BF16 = replace(CUDA, autocast="bfloat16")
LAPTOP = MACHINE.model_copy(update={"chip": "Apple M3", "device_count": 8})
GPU = MACHINE.model_copy(update={"chip": "Apple M3", "device_count": 1})
RTX = MACHINE.model_copy(update={"chip": "NVIDIA GeForce RTX 3090"})
EIGHT = MACHINE.model_copy(update={"device_count": 8})


def run_of(path: Path, *rungs: tuple[str, Toggles, tuple[float, ...]], **changes: Any) -> Path:
    """A run of named rungs, with the speed of each in each round."""
    for index, (name, toggles, speeds) in enumerate(rungs):
        for repetition, tps in enumerate(speeds, start=1):
            found = measurement(tps, tokens_per_step=step_of(toggles, changes))
            facts = {"toggles": toggles, "measurement": found, **changes}
            append(path, record(name, index, repetition, **facts))
    return path


def chained(*files: Path, start: str) -> Chain:
    return build_chain(load_boards(files)[0], load_baseline(start))


def cells(shown: Chain, title: str) -> list[str]:
    table = table_of(shown)
    return [row[table.head.index(title)] for row in table.cells]


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    return run_of(tmp_path / "laptop.jsonl", ("baseline", CPU, (600.0, 640.0, 620.0)), environment=LAPTOP)


@pytest.fixture
def h100(tmp_path: Path) -> Path:
    drifting = ("CUDA", CUDA, (20e3, 10e3, 5e3)), ("bfloat16", BF16, (60e3, 30e3, 15e3))
    return run_of(tmp_path / "h100.jsonl", *drifting)


def test_between_runs_the_ratio_is_that_of_geometric_means_and_its_logarithm_the_orders_of_magnitude(
    laptop: Path, h100: Path
) -> None:
    first, cuda, bf16 = chained(laptop, h100, start=f"{laptop}:baseline").rows
    slow = math.cbrt(600 * 640 * 620)
    assert first.over_baseline is not None
    assert first.over_baseline.value == 1
    for row, mean in ((cuda, math.cbrt(20e3 * 10e3 * 5e3)), (bf16, math.cbrt(60e3 * 30e3 * 15e3))):
        assert row.over_baseline is not None
        assert row.over_baseline.value == pytest.approx(mean / slow)
        assert row.orders_of_magnitude == pytest.approx(math.log10(mean / slow))


def test_within_a_run_ratios_are_paired_so_that_drift_does_not_widen_them(laptop: Path, h100: Path) -> None:
    bf16 = chained(laptop, h100, start=f"{laptop}:baseline").rows[2]
    assert bf16.over_first is not None
    assert (bf16.over_first.low, bf16.over_first.value, bf16.over_first.high) == pytest.approx((3, 3, 3))
    assert bf16.over_before == bf16.over_first
    assert bf16.over_baseline is not None
    assert bf16.over_baseline.half_width is not None
    assert bf16.over_baseline.half_width > 1  # the drift is in this one


def test_the_climb_of_the_post_falls_into_its_groups(tmp_path: Path, laptop: Path, h100: Path) -> None:
    speed = (1e3, 1e3, 1e3)
    mps = run_of(tmp_path / "mps.jsonl", ("MPS", MPS, speed), environment=GPU)
    rtx = run_of(tmp_path / "rtx.jsonl", ("CUDA on RTX 3090", CUDA, speed), environment=RTX)
    ddp = run_of(tmp_path / "ddp.jsonl", ("8 GPUs", replace(BF16, world_size=8), speed), environment=EIGHT)
    found = chained(laptop, mps, rtx, h100, ddp, start=f"{laptop}:baseline")
    assert [(row.rung.row.rung, row.group) for row in found.rows] == [
        ("baseline", "Hardware"),
        ("MPS", "Hardware"),
        ("CUDA on RTX 3090", "Hardware"),
        ("CUDA", "Hardware"),
        ("bfloat16", "Software"),
        ("8 GPUs", "Distributed"),
    ]


def test_the_baseline_of_another_file_stands_first_and_alone_of_its_run(tmp_path: Path, h100: Path) -> None:
    rungs = ("plain", CPU, (100.0,)), ("SDPA", CPU, (200.0,))
    other = run_of(tmp_path / "cpu.jsonl", *rungs, environment=LAPTOP)
    found = chained(h100, start=f"{other}:SDPA")
    assert cells(found, "Setup") == ["SDPA", "CUDA", "bfloat16"]
    assert cells(found, "Over baseline")[0] == "baseline"
    assert cells(found, "Over first on device")[0] == "2.00x"  # over its own run's, which is not shown
    assert "the only one shown of its run" in table_of(found).first[0]


def test_a_run_is_shown_once_though_it_holds_the_baseline_or_is_named_twice(h100: Path) -> None:
    found = chained(h100, h100, start=f"{h100}:bfloat16")
    assert cells(found, "Setup") == ["CUDA", "bfloat16"]
    assert cells(found, "Over baseline") == ["0.33x ±0.0%", "baseline"]


def test_a_rung_out_of_memory_is_a_line_with_its_status_and_no_ratio(tmp_path: Path, laptop: Path) -> None:
    file = run_of(tmp_path / "h100.jsonl", ("CUDA", CUDA, (1e3, 1e3, 1e3)))
    large = replace(CUDA, micro_batch_size=4096)
    append(file, record("batch of 4096", 1, toggles=large, status="out_of_memory"))
    found = chained(laptop, file, start=f"{laptop}:baseline")
    line = table_of(found).cells[-1]
    assert line[:2] == ["Software", "batch of 4096"]
    assert line[-1] == "out of memory"
    assert set(line[5:-1]) == {"-"}


def test_a_rung_whose_loss_differs_has_neither_ratio_nor_time(tmp_path: Path, laptop: Path) -> None:
    file = run_of(tmp_path / "h100.jsonl", ("CUDA", CUDA, (1e3, 1e3, 1e3)))
    off = measurement(1e6, losses=[10.9, 10.5, 9.0, 8.0])
    append(file, record("wrong", 1, toggles=replace(CUDA, attention="sdpa"), measurement=off))
    found = chained(laptop, file, start=f"{laptop}:baseline")
    for title in ("Over baseline", "Orders of magnitude", "Over rung before", "Time for 10B tokens"):
        assert cells(found, title)[-1] == "-", title
    assert cells(found, "Status")[-1] == "loss differs"


def test_a_chain_says_which_of_its_rungs_train_otherwise(tmp_path: Path, h100: Path) -> None:
    rungs = ("CUDA", CUDA, (1e3,)), ("narrow", replace(BF16, residual="bfloat16"), (9e3,))
    narrow = run_of(tmp_path / "n.jsonl", *rungs)
    said = "Warning: another training than the first rung's of its run, not a faster one: narrow (A)."
    assert said in table_of(chained(narrow, start=f"{narrow}:CUDA")).notes
    assert not any("another training" in note for note in table_of(chained(h100, start=f"{h100}:CUDA")).notes)


def test_what_was_tried_and_left_out_is_counted_and_not_shown() -> None:
    (board,), _ = load_boards([ROOT / "results/amd-epyc-25-17-1-x2/cpu-20261126T155125Z.jsonl"])
    first = next(rung for rung in rung_views(board) if rung.row.rung == "baseline")
    chain = build_chain([board], first)
    statuses = [row.rung.row.status for row in chain.rows]
    assert statuses == ["ok"] * 5
    assert chain.not_carried == len(board.rows) - 5 == 20
    said = "Left out: 20 rungs that were tried and not carried: no faster, or not supported here."
    assert said in table_of(chain).notes


def test_a_try_that_ran_out_of_memory_has_its_row(tmp_path: Path) -> None:
    large = replace(CUDA, micro_batch_size=512)
    scout = Scout(over="CUDA", ratio=None, floor=0.01, carried=False, check="out_of_memory", reason="full")
    path = run_of(tmp_path / "a.jsonl", ("CUDA", CUDA, (1e3,)))
    append(path, record("large", 9, kind="scout", toggles=large, status="out_of_memory", scout=scout))
    chain = chained(path, start=f"{path}:CUDA")
    assert [row.rung.row.rung for row in chain.rows] == ["CUDA", "large"]
    assert chain.not_carried == 0


def test_memory_that_was_found_out_in_other_ways_is_said_not_to_compare(tmp_path: Path) -> None:
    file = tmp_path / "h100.jsonl"
    for index, (name, size, method) in enumerate((("a", 4, "one"), ("b", 3, "one"), ("c", 2, "other"))):
        toggles = replace(CUDA, micro_batch_size=index + 1)
        tokens = step_of(toggles, {})
        found = measurement(peak_memory_bytes=size * 2**30, peak_memory_method=method, tokens_per_step=tokens)
        append(file, record(name, index, toggles=toggles, measurement=found))
    shown = chained(file, start=f"{file}:a")
    assert any("different methods, which do not compare" in note for note in table_of(shown).notes)


def test_another_torch_text_or_workload_is_said_before_the_table(tmp_path: Path, laptop: Path) -> None:
    facts: dict[str, Any] = {"environment": MACHINE.model_copy(update={"torch": "2.12.0"})}
    facts |= {"data_sha256": "0ther", "workload": asdict(Workload(tokens_per_step=2048))}
    file = run_of(tmp_path / "a.jsonl", ("CUDA", CUDA, (1e3,)), **facts)
    assert table_of(chained(laptop, file, start=f"{laptop}:baseline")).first[1:] == [
        "Warning: not the same in all runs: torch: 2.11.0 in A; 2.12.0 in B.",
        "Warning: not the same in all runs: the text (sha256): da7a in A; 0ther in B.",
        "Warning: not the same in all runs: workload.tokens_per_step: not set in A; 2048 in B.",
    ]


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("baselin", r"no rung is called 'baselin'; did you mean 'baseline'\?"),
        (None, r"--baseline .*: say which rung, as in .*:baseline"),
        ("too large", "'too large' cannot be the baseline: out of memory; choose a rung that is ok"),
    ],
)
def test_what_cannot_be_the_baseline_is_one_clear_error(of: str | None, said: str, laptop: Path) -> None:
    append(laptop, record("too large", 1, toggles=replace(CPU, micro_batch_size=99), status="out_of_memory"))
    with pytest.raises(RecordError, match=said):
        load_baseline(f"{laptop}:{of}" if of else str(laptop))


@pytest.mark.parametrize("unlike", [{"model": "gpt2-medium"}, {"seq_len": 512}])
def test_runs_of_unlike_tasks_are_refused_by_name(
    unlike: dict[str, Any], tmp_path: Path, laptop: Path
) -> None:
    file = run_of(tmp_path / "other.jsonl", ("a", CUDA, (1e3,)), workload=asdict(Workload(**unlike)))
    with pytest.raises(RecordError, match=r"other.jsonl: trains gpt2.* but the baseline gpt2 at T = 1024"):
        chained(file, start=f"{laptop}:baseline")


def test_a_run_of_another_task_among_others_is_left_out_and_named(
    tmp_path: Path, laptop: Path, h100: Path
) -> None:
    medium = asdict(Workload(model="gpt2-medium"))
    file = run_of(tmp_path / "other.jsonl", ("a", CUDA, (1e3,)), workload=medium)
    boards = load_boards([laptop, file, h100])[0]
    found = build_chain(boards, load_baseline(f"{laptop}:baseline"))
    assert [run.source for run in found.runs] == [laptop, h100]
    notes = table_of(found).notes
    assert any("do not rank with these: " in note and "gpt2-medium at T = 1024" in note for note in notes)


def test_other_programs_get_the_unrounded_ratio_of_every_rung(laptop: Path, h100: Path) -> None:
    boards = load_boards([laptop, h100])[0]
    table = frame(boards, build_chain(boards, load_baseline(f"{laptop}:baseline")))
    slow, fast = math.cbrt(600 * 640 * 620), math.cbrt(60e3 * 30e3 * 15e3)
    assert table["over_baseline"].iloc[2] == pytest.approx(fast / slow)
    assert list(table["group"]) == ["Hardware", "Hardware", "Software"]
    assert "over_baseline" not in frame(boards)


@pytest.mark.parametrize(
    ("tokens", "tps", "text"),
    [
        (1e6, 3e6, "0.333 s"),
        (1e6, 350e3, "2.86 s"),
        (1e6, 27e3, "37 s"),
        (1e10, 3e6, "56 min"),
        (1e10, 350e3, "7.9 h"),
        (1e10, 27e3, "4.29 days"),
        (1e10, 209, "554 days"),
    ],
)
def test_times_to_train_are_told_in_the_unit_that_suits_them(tokens: float, tps: float, text: str) -> None:
    assert training_time(tokens, tps) == text


HOSTILE = "</script><b>x</b> | \n `y`"


def test_hostile_names_stay_text_in_every_output(tmp_path: Path, laptop: Path) -> None:
    file = run_of(tmp_path / "a.jsonl", (HOSTILE, CUDA, (1e3, 1e3, 1e3)))
    boards = load_boards([laptop, file])[0]
    found = build_chain(boards, load_baseline(f"{laptop}:baseline"))
    shown = page(assemble(boards, chain=found))
    assert "<b>x" not in shown
    assert shown.index("Baseline: rung baseline of run A") < shown.index("Orders of magnitude</button>")
    text = table_of(found).to_markdown("###")
    assert "<b>" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1


NAMES = ("cpu-20261121T115316Z", "ddp-cpu-20261121T211353Z", "xla-cpu-20261121T215419Z")
FILES = [ROOT / "results" / "intel-xeon-x2" / f"{name}.jsonl" for name in NAMES]


def speed(file: Path, rung: str) -> float:
    """Its geometric mean, straight from the file."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    logs = []
    for each in records:
        if (each["kind"], each["rung"], each["status"]) == ("cumulative", rung, "ok"):
            m = each["measurement"]
            tokens = m["tokens_per_step"] * m["block_steps"] * len(m["block_seconds"])
            logs.append(math.log(tokens / sum(m["block_seconds"])))
    return math.exp(sum(logs) / len(logs))


def test_the_committed_runs_make_a_chain_whose_figures_follow_from_their_files() -> None:
    found = chained(*FILES, start=f"{FILES[0]}:baseline")
    links = {(row.rung.board.ladder, row.rung.row.rung): row for row in found.rows}
    assert len(found.rows) == 8 + 2 + 3
    for file, key in ((FILES[1], ("ddp-cpu", "2 processes")), (FILES[2], ("xla-cpu", "1 device"))):
        expected = speed(file, key[1]) / speed(FILES[0], "baseline")
        ratio = links[key].over_baseline
        assert ratio is not None
        assert ratio.value == pytest.approx(expected)
    assert links["xla-cpu", "1 device"].group == "Hardware"  # XLA on a CPU is a device of its own
    assert links["ddp-cpu", "1 process"].group == "Software"
    assert links["ddp-cpu", "2 processes"].group == "Distributed"
    assert "torch: 2.13.0+cpu in A and B; 2.9.1+cu128 in C" in table_of(found).first[1]


def test_the_command_shows_the_chain_above_the_scoreboards_and_refuses_in_one_line(
    laptop: Path, h100: Path
) -> None:
    def report(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "bench.cli", "report", str(laptop), str(h100), "--markdown"]
        command += arguments
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)

    shown, refused = report("--baseline", f"{laptop}:baseline"), report("--baseline", f"{laptop}:nothing")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("### From one baseline: 2 runs chained\n")
    assert refused.returncode == 2
    assert refused.stderr == f"bench: {laptop}: no rung is called 'nothing'; known are baseline\n"

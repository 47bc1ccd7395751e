"""Results files from elsewhere: whatever is wrong with one, a report says so or shows a labelled gap."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import measurement, record
from shown import to_markdown

from bench.analysis.select import exit_code, load_boards
from bench.records.measurement import Proof
from bench.records.record import Record, RecordError
from bench.report.assembly import assemble
from bench.report.export import to_csv, to_json
from bench.report.page import page
from gpt2.config.toggles import Toggles

CUDA = Toggles(device="cuda")
HOSTILE = "</script><script>alert(1)</script>|\x1b[31m\n# `x` <img src=x onerror=alert(1)>"
ABSENT = object()
NUMBERS: tuple[Any, ...] = (-1, 0, 10**30, 1e-290, float("inf"), float("nan"))
WRONG: tuple[Any, ...] = (None, "", True, [], {}, HOSTILE, ABSENT, *NUMBERS)


def line(of: Record) -> dict[str, Any]:
    return json.loads(of.model_dump_json(by_alias=True))


def lines() -> list[dict[str, Any]]:
    """Of two rungs in three rounds."""
    proofs = {"autocast": Proof(took_effect=True, evidence="bfloat16 products")}
    two = {"toggles": replace(CUDA, autocast="bfloat16"), "measurement": measurement(2000.0, proofs=proofs)}
    rounds = (1, 2, 3)
    return [line(each) for n in rounds for each in (record(repetition=n), record("b", 1, n, **two))]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that a record holds, of a list the first element only."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def spoilt(path: tuple[Any, ...], wrong: Any) -> list[dict[str, Any]]:
    """The lines, with something wrong in one of them."""
    found = lines()
    target: Any = found[3]
    for key in path[:-1]:
        target = target[key]
    if wrong is ABSENT:
        del target[path[-1]]
    else:
        target[path[-1]] = copy.deepcopy(wrong)
    return found


def write(folder: Path, found: list[dict[str, Any]]) -> Path:
    file = folder / "run.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in found))
    return file


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("measurement", marks=pytest.mark.slow),
        "workload",
        pytest.param("toggles", marks=pytest.mark.slow),
        pytest.param("environment", marks=pytest.mark.slow),
        "protocol",
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def test_whatever_is_wrong_in_a_record_is_one_line_or_a_table_without_it(part: str, tmp_path: Path) -> None:
    whole = lines()[3]
    every = [path for path in places(whole) if (path[0] if isinstance(whole[path[0]], dict) else "") == part]
    shown, said = 0, []
    for path in every:
        for wrong in WRONG:
            file = write(tmp_path, spoilt(path, wrong))
            try:
                boards, _ = load_boards([file])
            except RecordError as error:
                said.append(str(error))
                continue
            shown += 1
            text = to_markdown(boards[0])
            assert "<script" not in text
            assert "\x1b" not in text
            to_csv(boards)
            to_json(boards)
            exit_code(boards[0].records)
    assert shown
    assert said
    for text in said:
        assert text.startswith(f"{tmp_path / 'run.jsonl'}")
        assert not set(text) & {"\n", "\x1b"}


def test_no_text_of_a_record_is_script_or_markup_in_the_page(tmp_path: Path) -> None:
    found = lines()
    for each in found:
        each["ladder"] = each["run_id"] = HOSTILE
        each["environment"]["chip"] = each["environment"]["cpu"] = each["environment"]["torch"] = HOSTILE
        each["rung"] += HOSTILE
        each["warnings"] = [HOSTILE]
    boards, _ = load_boards([write(tmp_path, found)])
    text = page(assemble(boards))
    plain, _ = load_boards([write(tmp_path, lines())])
    assert text.count("<script") == page(assemble([plain[0]])).count("<script")
    assert "<img" not in text


@pytest.mark.parametrize(
    ("path", "wrong", "says"),
    [
        (("schema",), 2, "schema 2: written by a newer gpt2-bench; upgrade"),
        (("measurement", "block_seconds", 0), 0.0, "measurement.block_seconds.0: "),
        (
            ("toggles", "all", "autocast"),
            "fp8",
            "toggle 'autocast': 'fp8' is not one of float32, bfloat16, float16",
        ),
        (("toggles", "all", "warp"), 9, "unknown toggle 'warp'"),
        (("workload", "model"), "gpt9", "model 'gpt9' is not one of"),
        (("workload", "seq_len"), ABSENT, "seq_len is missing"),
        (("protocol",), {}, "repeats is missing"),
        (("time",), "yesterday", "Invalid isoformat string"),
        (("time",), "2026-01-01T00:00:00", "time: Value error, is not in UTC"),
        (("time",), "2026-01-01T02:00:00+02:00", "time: Value error, is not in UTC"),
        (("toggles", "resolved", "nodes"), "two", "toggles.resolved.nodes: "),
        (("toggles", "resolved", "nodes"), 2, "world_size 1 is too small for 2 nodes"),
        (("measurement", "block_seconds", 0), 1e-290, "measurement.block_seconds.0: "),
        (("measurement", "peak_flops_bf16"), 1e290, "measurement.peak_flops_bf16: "),
    ],
)
def test_what_a_record_may_not_say_is_named_with_file_and_line(
    path: tuple[Any, ...], wrong: Any, says: str, tmp_path: Path
) -> None:
    found = lines()
    if path[-1] == "warp":
        found[3]["toggles"]["all"]["warp"] = wrong
    else:
        found = spoilt(path, wrong)
    file = write(tmp_path, found)
    with pytest.raises(RecordError) as caught:
        load_boards([file])
    assert f"{file}:4: " in str(caught.value)
    assert says in str(caught.value)


def test_a_rung_whose_nodes_are_not_known_counts_as_on_one(tmp_path: Path) -> None:
    found = spoilt(("toggles", "resolved", "nodes"), None)
    for each in found:
        each["environment"]["nodes"] = 2
    (board,), _ = load_boards([write(tmp_path, found)])
    assert "No rung ran on more than one node." in to_markdown(board)


def test_a_file_of_two_models_is_refused(tmp_path: Path) -> None:
    found = lines()
    found[3]["workload"]["model"] = "gpt2-medium"
    with pytest.raises(RecordError, match="unlike tasks, which do not mix: model gpt2 and gpt2-medium"):
        load_boards([write(tmp_path, found)])


def test_a_file_with_the_same_process_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds the process 'baseline', cumulative, round 1 twice"):
        load_boards([write(tmp_path, [*lines(), lines()[0]])])


TWO, B = "holds records of two ladders,", "'b', cumulative, round 2:"
COMPILE, TOKENS = ("toggles", "all", "compile"), ("measurement", "tokens_per_step")


@pytest.mark.parametrize(
    ("path", "wrong", "says"),
    [
        (("ladder",), "a100", rf"{TWO} h100 \(1add\) and a100 \(1add\); one file each"),
        (("ladder_hash",), "0dd", rf"{TWO} h100 \(1add\) and h100 \(0dd\); one file each"),
        (("rung",), "c", "'c', cumulative, round 2: has the rung_index 1 of 'b'"),
        (COMPILE, "default", f"{B} its toggles are not those of round 1: compile=default"),
        (TOKENS, 2048, f"{B} measured 2,048 tokens per step, but its toggles make 1,024"),
    ],
)
def test_rounds_that_are_not_of_one_rung_are_never_averaged(
    path: tuple[Any, ...], wrong: Any, says: str, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=says):
        load_boards([write(tmp_path, spoilt(path, wrong))])


def test_a_sweep_s_candidates_hold_to_their_toggles_too(tmp_path: Path) -> None:
    found = spoilt(("toggles", "all", "attention"), "sdpa")
    for each in found:
        each["kind"] = "sweep"
    said = "'b', sweep, round 2: its toggles are not those of round 1: attention=sdpa"
    with pytest.raises(RecordError, match=said):
        load_boards([write(tmp_path, found)])


def test_toggles_of_a_rung_alone_are_not_those_within_the_ladder(tmp_path: Path) -> None:
    alone = [{**each, "kind": "alone", "toggles": line(record())["toggles"]} for each in lines()[1::2]]
    (board,), _ = load_boards([write(tmp_path, [*lines(), *alone])])
    assert len(board.records) == len(lines()) + len(alone)


def test_an_empty_folder_says_how_to_get_results(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no results here; bench run ladders/smoke"):
        load_boards([tmp_path])

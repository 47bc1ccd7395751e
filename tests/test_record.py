import json
import math
from pathlib import Path

import pytest
from samples import MACHINE, measurement, record

from bench.record import RecordError, append, read, reserved


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    records = [record(), record("bfloat16", 1), record("too large", 2, status="out_of_memory", error="no memory")]
    for item in records:
        append(tmp_path / "r.jsonl", item)
    assert read(tmp_path / "r.jsonl") == (records, [])


def test_a_record_is_one_line_of_json_with_its_schema_version(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record())
    (line,) = (tmp_path / "r.jsonl").read_text().splitlines()
    assert json.loads(line)["schema"] == 1


def test_what_was_not_measured_is_null_not_zero(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record(measurement=measurement(peak_flops_bf16=None, alloc_retries=None)))
    written = json.loads((tmp_path / "r.jsonl").read_text())["measurement"]
    assert written["peak_flops_bf16"] is None
    assert written["alloc_retries"] is None


def test_a_loss_that_is_not_finite_survives_the_file(tmp_path: Path) -> None:
    append(tmp_path / "r.jsonl", record(measurement=measurement(losses=[10.0, math.nan, math.inf])))
    ((found,), _) = read(tmp_path / "r.jsonl")
    assert found.measurement is not None
    assert math.isnan(found.measurement.losses[1])
    assert found.measurement.losses[2] == math.inf
    json.loads((tmp_path / "r.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_line_torn_within_a_character_is_left_out_as_any_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    append(path, record("ligne de départ", 1))
    content = path.read_bytes()
    path.write_bytes(content[: content.index("é".encode()) + 1])
    records, (warning,) = read(path)
    assert [item.rung for item in records] == ["baseline"]
    assert "the last line is cut off" in warning


def test_a_line_that_is_cut_off_within_a_file_is_called_so(tmp_path: Path) -> None:
    whole = record().model_dump_json(by_alias=True)
    (tmp_path / "r.jsonl").write_text(f"{whole}\n{whole[:90]}\n{whole}\n")
    with pytest.raises(RecordError, match=r"r\.jsonl:2: the line is cut off; delete this line"):
        read(tmp_path / "r.jsonl")


def test_what_bench_turns_keeps_is_refused_by_its_name_and_is_not_said_to_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "turns-cpu-20261123T040602Z.json"
    path.write_text('{\n "command": "bench turns"\n}\n')
    with pytest.raises(RecordError, match=r"bench turns keeps its own as JSON"):
        read(path)


def test_a_torn_last_line_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    whole = path.read_text()
    path.write_text(whole + whole[:100])
    records, (warning,) = read(path)
    assert len(records) == 1
    assert "the last line is cut off" in warning


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", r"r\.jsonl:2"),
        ('{"schema": 2}', r"r\.jsonl:2: no record of schema 1"),
        ("{}", r"r\.jsonl:2"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match=complaint):
        read(path)


def test_a_key_that_the_schema_does_not_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**json.loads(record().model_dump_json(by_alias=True)), "surprise": 1}) + "\n")
    with pytest.raises(RecordError, match="surprise"):
        read(path)


@pytest.mark.parametrize(
    ("chip", "count", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100-80gb-hbm3-x8"),
        ("NVIDIA GeForce RTX 3090", 1, "rtx-3090-x1"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", 2, "intel-xeon-x2"),
        (
            "Intel(R) Xeon(R) Processor (family 6 model 143 stepping 8) @ 2.60GHz",
            2,
            "intel-xeon-6-143-8-x2",
        ),
        ("aarch64 (implementer 0x41 part 0xd40)", 8, "aarch64-0x41-0xd40-x8"),
        ("Apple M3", 8, "apple-m3-x8"),
        ("AMD Ryzen 7 5800X 8-Core Processor", 8, "amd-ryzen-7-5800x-8-core-x8"),
        ("", 1, "unknown-x1"),
    ],
)
def test_a_machine_is_named_by_chip_and_count(chip: str, count: int, machine: str) -> None:
    assert MACHINE.model_copy(update={"chip": chip, "device_count": count}).machine == machine


def test_tokens_per_second_are_those_of_the_whole_window() -> None:
    window = measurement(tokens_per_step=100, block_steps=2, block_seconds=[1.0, 3.0])
    assert window.tokens_per_second == 100 * 2 * 2 / 4.0


def test_one_run_at_a_time_writes_to_a_results_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with reserved(path):
        append(path, record())
        with pytest.raises(RecordError, match=r"r\.jsonl: another bench run is writing to it"), reserved(path):
            pass
    with reserved(path):
        append(path, record())
    assert len(read(path)[0]) == 2


def test_a_results_file_that_nothing_was_written_to_is_taken_away(tmp_path: Path) -> None:
    with reserved(tmp_path / "r.jsonl"):
        pass
    assert not list(tmp_path.iterdir())

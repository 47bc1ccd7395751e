import bz2
import contextlib
import gzip
import json
import lzma
import math
import os
from pathlib import Path

import pytest
from samples import MACHINE, append, measurement, record

from bench.records.record import RecordError, ResultsFile, read, results_files


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    full = record("too large", 2, status="out_of_memory", error="no memory")
    records = [record(), record("bfloat16", 1), full]
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
    assert found.measurement.losses[0] == 10.0
    assert all(math.isnan(loss) for loss in found.measurement.losses[1:])
    text = (tmp_path / "r.jsonl").read_text()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name}"))
    assert written["measurement"]["losses"] == [10.0, None, None]


@pytest.mark.parametrize(
    "spelled", ["null", "NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"', '"-Infinity"']
)
def test_a_loss_that_is_not_finite_is_read_however_older_files_spell_it(spelled: str, tmp_path: Path) -> None:
    line = record(measurement=measurement(losses=[123.0, 10.0])).model_dump_json(by_alias=True)
    (tmp_path / "r.jsonl").write_text(f"{line.replace('123.0', spelled)}\n")
    ((found,), _) = read(tmp_path / "r.jsonl")
    assert found.measurement is not None
    assert [math.isfinite(loss) for loss in found.measurement.losses] == [False, True]


@pytest.mark.parametrize(
    ("difference", "finite"), [(None, None), (1e-7, True), (math.nan, False), (math.inf, False)]
)
def test_a_gradient_difference_that_is_not_finite_is_told_from_one_that_was_not_taken(
    difference: float | None, finite: bool | None, tmp_path: Path
) -> None:
    append(tmp_path / "r.jsonl", record(measurement=measurement(gradient_difference=difference)))
    assert "NaN" not in (tmp_path / "r.jsonl").read_text()
    ((found,), _) = read(tmp_path / "r.jsonl")
    assert found.measurement is not None
    assert found.measurement.gradients_finite is finite


def test_an_older_file_s_gradient_difference_that_is_not_finite_means_the_same(tmp_path: Path) -> None:
    line = record(measurement=measurement(gradient_difference=123.0)).model_dump_json(by_alias=True)
    (tmp_path / "r.jsonl").write_text(
        line.replace("123.0", '"NaN"').replace(',"gradients_finite":true', "") + "\n"
    )
    ((found,), _) = read(tmp_path / "r.jsonl")
    assert found.measurement is not None
    assert (found.measurement.gradient_difference, found.measurement.gradients_finite) == (None, False)


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


@pytest.mark.parametrize("text", ['{\n "command": "bench turns"\n}\n', '{"command": "bench turns"}\n'])
def test_what_bench_turns_keeps_is_refused_by_its_name_and_is_not_said_to_be_damaged(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "turns-cpu-20261123T040602Z.json"
    path.write_text(text)
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
        ('{"schema": 2}', r"r\.jsonl:2: schema 2: written by a newer gpt2-bench; upgrade"),
        ('{"schema": 0}', r"r\.jsonl:2: no record of schema 1: schema: "),
        ('{"schema": "2"}', r"r\.jsonl:2: no record of schema 1: schema: "),
        ("{}", r"r\.jsonl:2"),
        ("[]", r"r\.jsonl:2: a list, no record"),
        ("3.5", r"r\.jsonl:2: a single value, no record"),
        ("null", r"r\.jsonl:2: a single value, no record"),
        ('"text"', r"r\.jsonl:2: a single value, no record"),
        ("{} {}", r"r\.jsonl:2: something follows the record"),
        ("{},", r"r\.jsonl:2: something follows the record"),
        ('{"kind": ', r"r\.jsonl:2: the line is cut off; delete this line"),
        ("<<<<<<< HEAD", r"r\.jsonl:2: no result of bench run; delete this line"),
    ],
)
def test_a_line_that_is_no_record_is_named(line: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordError, match=complaint):
        read(path)


@pytest.mark.parametrize(
    ("measured", "complaint"),
    [(None, "measurement: a process that"), ({"block_seconds": []}, "measurement.block_seconds: a process")],
)
def test_a_process_that_ended_well_without_a_speed_is_no_record(
    measured: dict[str, object] | None, complaint: str, tmp_path: Path
) -> None:
    fields = json.loads(record().as_json())
    fields["measurement"] = measured and {**fields["measurement"], **measured}
    (tmp_path / "r.jsonl").write_text(json.dumps(fields) + "\n")
    with pytest.raises(RecordError, match=rf"r.jsonl:1: no record of schema 1: .*{complaint}"):
        read(tmp_path / "r.jsonl")


def test_a_key_that_the_schema_does_not_know_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**json.loads(record().model_dump_json(by_alias=True)), "surprise": 1}) + "\n")
    said = r"r\.jsonl:1: unknown field 'surprise': written by a newer gpt2-bench"
    with pytest.raises(RecordError, match=said):
        read(path)


def test_a_field_that_is_unknown_further_down_is_named_with_its_place(tmp_path: Path) -> None:
    line = json.loads(record().model_dump_json(by_alias=True))
    line["environment"]["colour"] = "red"
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RecordError, match=r"unknown field 'environment\.colour'"):
        read(tmp_path / "r.jsonl")


def lines(count: int = 2) -> list[bytes]:
    return [record(repetition=n).model_dump_json(by_alias=True).encode() for n in range(1, count + 1)]


EDITED = {
    "CRLF": lambda a, b: a + b"\r\n" + b + b"\r\n",
    "a byte order mark": lambda a, b: b"\xef\xbb\xbf" + a + b"\n" + b + b"\n",
    "blank lines": lambda a, b: b"\n" + a + b"\n \t\n\r\n" + b + b"\n\n",
    "no end of the last line": lambda a, b: a + b"\n" + b,
    "blanks around": lambda a, b: b"  " + a + b" \n\t" + b + b"\n  ",
    "all at once": lambda a, b: b"\xef\xbb\xbf\r\n" + a + b"\r\n\r\n" + b,
}


@pytest.mark.parametrize("how", EDITED)
def test_what_an_editor_does_to_a_file_changes_no_record(how: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content := EDITED[how](*lines()))
    assert read(path) == ([record(repetition=1), record(repetition=2)], [])
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"%b\n%b\n" + bytes(100),
        b"%b\n" + bytes(8) + b"%b\n",
        b"%b\n%b" + bytes(3),
        b"%b\n%b\n" + bytes(3) + b"\n",
    ],
)
def test_nuls_that_a_crash_leaves_are_left_out_with_a_warning(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(content % tuple(lines()))
    records, (warning,) = read(path)
    assert len(records) == 2
    assert "holds NULs" in warning


def pretty(*values: bytes) -> bytes:
    return b"\n".join(json.dumps(json.loads(value), indent=2).encode() for value in values)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (pretty(*lines()), "r.jsonl:1: JSON over several lines"),
        (pretty(lines()[0]).replace(b"\n", b"\r\n"), "r.jsonl:1: JSON over several lines"),
        (b"\xef\xbb\xbf" + pretty(lines()[0]), "r.jsonl:1: JSON over several lines"),
        (b"[\n" + b",\n".join(lines()) + b"\n]\n", "r.jsonl:1: JSON over several lines"),
        (b"[" + b", ".join(lines()) + b"]\n", "r.jsonl:1: a list, no record"),
        (b"\n".join(lines()).decode().encode("utf-16"), "r.jsonl: is UTF-16 text; save it as UTF-8"),
        (gzip.compress(lines()[0]), "r.jsonl: is compressed (gzip); unpack it first"),
        (bz2.compress(lines()[0]), "r.jsonl: is compressed (bzip2); unpack it first"),
        (lzma.compress(lines()[0]), "r.jsonl: is compressed (xz); unpack it first"),
        (lines()[0] + b'\n{"rung": "\xe9"}\n', "r.jsonl:2: is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_json_lines_is_told_in_one_line(
    content: bytes, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(RecordError) as caught:
        read(tmp_path / "r.jsonl")
    assert str(caught.value).startswith(f"{tmp_path}/{complaint}")
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").mkdir()
    with pytest.raises(RecordError, match=r"r\.jsonl: Is a directory"):
        read(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("chip", "count", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100-80gb-hbm3-x8"),
        ("NVIDIA GeForce RTX 3090", 1, "rtx-3090-x1"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", 2, "intel-xeon-x2"),
        ("Intel(R) Xeon(R) Processor (family 6 model 143 stepping 8) @ 2.60GHz", 2, "intel-xeon-6-143-8-x2"),
        ("aarch64 (implementer 0x41 part 0xd40)", 8, "aarch64-0x41-0xd40-x8"),
        ("Apple M3", 8, "apple-m3-x8"),
        ("AMD Ryzen 7 5800X 8-Core Processor", 8, "amd-ryzen-7-5800x-8-core-x8"),
        ("", 1, "unknown-x1"),
    ],
)
def test_a_machine_is_named_by_chip_and_count(chip: str, count: int, machine: str) -> None:
    assert MACHINE.model_copy(update={"chip": chip, "device_count": count}).machine == machine


@pytest.mark.parametrize(
    ("usable", "machine"), [(1, "some-x1"), (8, "some-x8"), (16, "some-x8"), (None, "some-x8")]
)
def test_a_cpu_of_which_only_some_cores_may_be_used_is_another_machine(
    usable: int | None, machine: str
) -> None:
    changes = {"chip": "Some CPU", "device_count": 8, "usable_cores": usable}
    assert MACHINE.model_copy(update=changes).machine == machine


def test_a_gpu_is_the_same_machine_whatever_cores_may_be_used() -> None:
    assert MACHINE.model_copy(update={"device_count": 4, "usable_cores": 1}).machine == "h100-80gb-hbm3-x4"


def test_tokens_per_second_are_those_of_the_whole_window() -> None:
    window = measurement(tokens_per_step=100, block_steps=2, block_seconds=[1.0, 3.0])
    assert window.tokens_per_second == 100 * 2 * 2 / 4.0


def test_one_run_at_a_time_writes_to_a_results_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with contextlib.closing(ResultsFile(path)) as file:
        file.append(record())
        with pytest.raises(RecordError, match=r"r\.jsonl: another bench run is writing to it"):
            ResultsFile(path)
    with contextlib.closing(ResultsFile(path)) as file:
        file.append(record())
    assert len(read(path)[0]) == 2


@pytest.mark.parametrize("line", ["[" * 100_000, '{"schema": 1, "a": ' + "[" * 100_000])
def test_a_line_that_is_nested_beyond_use_is_no_record(line: str, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(RecordError, match=r"r\.jsonl:1: "):
        read(file)


def test_a_results_file_that_nothing_was_written_to_is_taken_away_with_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "machine" / "r.jsonl"
    path.parent.mkdir()
    ResultsFile(path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["removed", "moved", "emptied", "with its folder", "an earlier one", "cut"])
def test_a_results_file_that_is_taken_away_in_the_middle_is_written_again_with_all_records(
    how: str, tmp_path: Path
) -> None:
    path, told = tmp_path / "here" / "r.jsonl", list[str]()
    path.parent.mkdir()
    append(path, record("of the run that is resumed", 0))
    with contextlib.closing(ResultsFile(path, told.append)) as file:
        file.append(record("a", 1))
        if how == "removed":
            path.unlink()
        elif how == "moved":
            path.rename(tmp_path / "r.jsonl.1")
        elif how == "emptied":
            path.write_bytes(b"")
        elif how == "with its folder":
            path.parent.rename(tmp_path / "elsewhere")
        elif how == "an earlier one":
            earlier = path.with_name("earlier")
            earlier.write_bytes(path.read_bytes().splitlines(keepends=True)[0])
            earlier.rename(path)
        else:
            os.truncate(path, path.stat().st_size - 20)
        file.append(record("b", 2))
        with pytest.raises(RecordError, match="another bench run is writing to it"):
            ResultsFile(path)
    assert [each.rung for each in read(path)[0]] == ["of the run that is resumed", "a", "b"]
    assert told == [f"{path} lacked records that were in it, and they are written again"]


def test_what_is_taken_away_after_the_last_record_is_written_again_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with contextlib.closing(ResultsFile(path)) as file:
        file.append(record("a", 1))
        path.write_bytes(b"")
    assert [each.rung for each in read(path)[0]] == ["a"]


@pytest.mark.parametrize("way", ["in place", "by renaming", "without the last line's end"])
def test_what_a_person_edits_meanwhile_stays_as_they_left_it(way: str, tmp_path: Path) -> None:
    path, told = tmp_path / "r.jsonl", list[str]()
    with contextlib.closing(ResultsFile(path, told.append)) as file:
        file.append(record("a", 1))
        file.append(record("b", 2))
        edited = path.with_name("edited") if way == "by renaming" else path
        edited.write_bytes(path.read_bytes().splitlines(keepends=True)[1].rstrip(b"\n" * ("without" in way)))
        if way == "by renaming":
            edited.rename(path)
        file.append(record("c", 3))
        path.unlink()
        file.append(record("d", 4))
    assert [each.rung for each in read(path)[0]] == ["b", "c", "d"]
    assert len(told) == 1


@pytest.mark.parametrize(
    "how", ["by renaming", "in place", "while its run goes on", "before the first record"]
)
def test_a_run_whose_file_another_run_replaced_leaves_that_alone_and_keeps_all_records_in_a_new_file(
    how: str, tmp_path: Path
) -> None:
    path, other, told = tmp_path / "r.jsonl", tmp_path / "other.jsonl", list[str]()
    append(other, record("of another run", 0, run_id="another"))
    foreign = other.read_bytes()
    before = [] if how == "before the first record" else ["a"]
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(ResultsFile(path, told.append)))
        for rung in before:
            file.append(record(rung, 1))
        if how == "while its run goes on":
            stack.enter_context(contextlib.closing(ResultsFile(other)))
        if how == "in place":
            path.write_bytes(foreign)
        else:
            other.rename(path)
        file.append(record("b", 2))
        file.append(record("c", 3))
    assert file.path == tmp_path / "r-2.jsonl"
    assert [each.rung for each in read(file.path)[0]] == [*before, "b", "c"]
    assert path.read_bytes() == foreign
    assert told == [f"{path} holds another run's records now; all of this run's are in {file.path}"]
    with contextlib.closing(ResultsFile(file.path)) as resumed:
        resumed.append(record("d", 4))
    assert [each.run_id for each in read(file.path)[0]] == ["r"] * (len(before) + 3)


def test_records_that_do_not_fit_on_the_disk_again_are_not_said_to_be_kept(small_disk: Path) -> None:
    path = small_disk / "r.jsonl"
    file = ResultsFile(path)
    file.append(record("a", 1))
    with (small_disk / "filler").open("wb", buffering=0) as filler:
        path.unlink()
        with contextlib.suppress(OSError):
            while True:
                filler.write(b"0" * 4096)
        with pytest.raises(OSError, match="No space left"):
            file.append(record("b", 2))
    assert file.whole is False
    (small_disk / "filler").unlink()
    file.append(record("b", 2))
    assert file.whole is True
    file.close()
    assert [each.rung for each in read(path)[0]] == ["a", "b"]


def test_a_results_file_whose_place_is_taken_by_a_file_says_why(tmp_path: Path) -> None:
    path = tmp_path / "here" / "r.jsonl"
    path.parent.mkdir()
    with contextlib.closing(ResultsFile(path)) as file:
        file.append(record())
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("a file")
        with pytest.raises(OSError, match=r"here"):
            file.append(record())
        assert file.whole is False


def tree(root: Path, *files: str) -> None:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("{}\n")


def names(root: Path, prefix: str = "") -> list[str]:
    return [file.relative_to(root).as_posix() for file in results_files(root, prefix)]


def test_results_are_found_at_any_depth_sorted_without_hidden_ones_and_metrics(tmp_path: Path) -> None:
    tree(tmp_path, "b/c/d.jsonl", "b/a.jsonl", "z.jsonl")
    tree(tmp_path, "b/notes.txt", ".git/x.jsonl", "b/.x.jsonl", "run/metrics.jsonl")
    (tmp_path / "run" / "run.json").write_text("{}")
    assert names(tmp_path) == ["b/a.jsonl", "b/c/d.jsonl", "z.jsonl"]
    assert names(tmp_path, "d") == ["b/c/d.jsonl"]
    assert names(tmp_path / "nowhere") == []


def test_links_to_folders_and_files_are_followed(tmp_path: Path) -> None:
    tree(tmp_path, "disk/m/a.jsonl", "disk/b.jsonl", "results/own/c.jsonl")
    (tmp_path / "results" / "linked").symlink_to("../disk/m")
    (tmp_path / "results" / "own" / "d.jsonl").symlink_to("../../disk/b.jsonl")
    assert names(tmp_path / "results") == ["linked/a.jsonl", "own/c.jsonl", "own/d.jsonl"]
    (tmp_path / "all").symlink_to("results")
    assert names(tmp_path / "all") == ["linked/a.jsonl", "own/c.jsonl", "own/d.jsonl"]


def test_a_file_that_links_lead_to_again_is_found_once_by_its_own_path(tmp_path: Path) -> None:
    tree(tmp_path, "m/a.jsonl", "m/b/c.jsonl")
    (tmp_path / "a-link").symlink_to("m")
    (tmp_path / "a.jsonl").symlink_to("m/a.jsonl")
    (tmp_path / "m" / "b" / "deeper").symlink_to("..")
    assert names(tmp_path) == ["m/a.jsonl", "m/b/c.jsonl"]


@pytest.mark.parametrize("target", [".", "..", "../..", "/", "loop"])
def test_links_that_lead_back_or_out_of_the_folder_end(target: str, tmp_path: Path) -> None:
    tree(tmp_path, "out/results/m/a.jsonl", "out/stranger.jsonl")
    (tmp_path / "out" / "results" / "loop").symlink_to(target)
    assert names(tmp_path / "out" / "results") == ["m/a.jsonl"]


def test_a_link_to_nothing_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("nowhere.jsonl")
    (file,) = results_files(tmp_path)
    with pytest.raises(RecordError, match=r"a\.jsonl: No such file"):
        read(file)


def test_a_name_that_is_no_utf_8_loses_no_measurement(tmp_path: Path) -> None:
    """As Python reads the name of a ladder or a variable: a byte that is no UTF-8 is half a character."""
    named = record(command="python -m bench.worker r\udce9seau.yaml baseline --out m.json")
    append(tmp_path / "r.jsonl", named)
    (kept,) = read(tmp_path / "r.jsonl")[0]
    assert kept.command == "python -m bench.worker r\ufffdseau.yaml baseline --out m.json"
    assert kept.measurement == named.measurement

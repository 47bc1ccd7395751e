from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchError
from bench.ladder import ladder
from gpt2.config import yaml_files
from gpt2.config.toggles import Toggles
from gpt2.config.validation import ConfigError
from gpt2.config.workload import Workload
from gpt2.pretrain import config

LADDER = "name: l\n{head}workload: {workload}\nrungs:\n  - name: a\n    set: {toggles}\n"
RUN = "steps: 3\n{head}workload: {workload}\ntoggles: {toggles}\n"


@pytest.fixture(params=["ladder", "run"])
def reads(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., tuple[Workload, Toggles]]:
    """Both commands' way to a file, so that one claim holds for both."""

    def read(workload: str = "{model: tiny, seq_len: 32}", toggles: str = "{device: cpu}", **how: Any) -> Any:
        path = tmp_path / "f.yaml"
        text = (LADDER if request.param == "ladder" else RUN).format(
            workload=workload, toggles=toggles, head=how.get("head", "")
        )
        path.write_bytes(how.get("turned", str.encode)(text + how.get("tail", "")))
        if request.param == "ladder":
            found = ladder.load(path, how.get("overrides", ()))
            return found.workload, found.rungs[-1].toggles
        found = config.load(str(path), how.get("overrides", ()))
        return found.workload, found.toggles

    return read


@pytest.fixture
def complains(reads: Callable[..., Any]) -> Callable[..., str]:
    def complaint(**how: Any) -> str:
        with pytest.raises((BenchError, ConfigError)) as caught:
            reads(**how)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return complaint


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "1.E-3", ".1e-2", "0.1e-02", "+1e-3", "10e-4", ".001"])
def test_a_number_is_read_as_people_write_it(text: str, reads) -> None:
    assert reads(f"{{model: tiny, seq_len: 32, lr: {text}}}")[0].lr == pytest.approx(1e-3)
    assert reads(overrides=[f"workload.lr={text}"])[0].lr == pytest.approx(1e-3)


@pytest.mark.parametrize("text", ["'1e-3'", "1e-3x", "2024-01-02", "1e", "=", "2024-13-45"])
def test_what_is_no_number_is_text_and_refused_where_a_number_is_wanted(text: str, complains) -> None:
    assert f"key 'lr': '{text.strip(chr(39))}' should be a number" in complains(workload=f"{{lr: {text}}}")
    assert "should be a number" in complains(overrides=[f"workload.lr={text}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", "8"), ("1:30", "90"), ("-0b11", "-3"), ("0x1F", "31"), ("1:30.5", "90.5"), ("!!int 017", "15")],
)
def test_a_number_that_is_not_decimal_is_refused_with_what_it_would_be(
    text: str, value: str, complains
) -> None:
    read = f"YAML reads {text.removeprefix('!!int ')} as {value}; write a decimal number"
    assert f"f.yaml: line 2: {read}" in complains(workload=f"{{seq_len: {text}}}")
    assert read in complains(overrides=[f"workload.seq_len={text}"])


@pytest.mark.parametrize("text", ["0", "-7", "1_000", "+12"])
def test_a_decimal_number_may_have_a_sign_and_underscores(text: str, tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(f"key: {text}\n")
    assert yaml_files.read(tmp_path / "f.yaml") == {"key": int(text)}


@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1e999", "[.nan]"])
def test_a_number_that_is_not_finite_is_refused_with_its_line(text: str, complains) -> None:
    said = complains(workload=f"{{lr: {text}}}", head="# what is\n# computed\n")
    assert "f.yaml: line 4: " in said
    assert "is no finite number" in said
    assert "is no finite number" in complains(overrides=[f"workload.lr={text}"])


@pytest.mark.parametrize("word", ["on", "off", "Yes", "NO", "true"])
def test_words_for_truth_are_no_text(word: str, complains) -> None:
    hint = "YAML reads on, off, yes and no as true and false"
    assert hint in complains(toggles=f"{{compile: {word}}}")
    assert hint in complains(overrides=[f"toggles.compile={word}"])


MERGES = {
    "one": ("x: &x {micro_batch_size: 4}\n", "{<<: *x, attention: sdpa}"),
    "one that is overridden": (
        "x: &x {micro_batch_size: 2}\n",
        "{micro_batch_size: 4, <<: *x, attention: sdpa}",
    ),
    "a list": (
        "x: &x {micro_batch_size: 4}\ny: &y {micro_batch_size: 2, attention: sdpa}\n",
        "{<<: [*x, *y]}",
    ),
    "of merges": (
        "x: &x {micro_batch_size: 2}\ny: &y {<<: *x, micro_batch_size: 4}\n",
        "{<<: *y, attention: sdpa}",
    ),
    "in place": ("", "{<<: {micro_batch_size: 4, attention: math}, attention: sdpa}"),
}


@pytest.mark.parametrize("case", MERGES)
def test_mappings_are_merged(case: str, tmp_path: Path) -> None:
    head, text = MERGES[case]
    path = tmp_path / "f.yaml"
    path.write_text(f"{head}toggles: {text}\nagain: {text}\n")
    found = yaml_files.read(path)
    assert found["toggles"] == found["again"] == {"micro_batch_size": 4, "attention": "sdpa"}


def test_a_merge_reaches_both_commands(reads) -> None:
    workload = "{<<: &x {model: tiny, seq_len: 32}, lr: 1e-3}"
    assert reads(workload)[0] == reads("{model: tiny, seq_len: 32, lr: 0.001}")[0]


DUPLICATES = {
    "at the top": ({"tail": "workload: {}\n"}, "key 'workload' is given twice"),
    "within": ({"toggles": "{device: cpu, device: cuda}"}, "key 'device' is given twice"),
    "in other quotes": ({"toggles": "{device: cpu, 'device': cuda}"}, "key 'device' is given twice"),
    "beside a merge": (
        {"toggles": "{<<: {device: cpu}, device: cpu, device: cpu}"},
        "key 'device' is given twice",
    ),
    "a merge": ({"toggles": "{<<: {device: cpu}, <<: {threads: 1}}"}, "merge several by <<: [*a, *b]"),
}


@pytest.mark.parametrize("case", DUPLICATES)
def test_a_key_given_twice_is_refused_with_its_line(case: str, complains) -> None:
    how, said = DUPLICATES[case]
    message = complains(**how)
    assert said in message
    assert "f.yaml: line " in message


@pytest.mark.parametrize(
    "turned",
    [
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: f"---\n{text}...\n".encode(),
        lambda text: text.rstrip("\n").encode(),
    ],
    ids=["BOM", "CRLF", "CR", "document marks", "no last newline"],
)
def test_what_an_editor_does_to_a_file_changes_nothing(turned: Callable[[str], bytes], reads) -> None:
    assert reads(turned=turned)[0] == reads()[0]


LAUGHS = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(8 * [f'*a{n - 1}'])}]\n" for n in range(1, 30)
)
MERGED_LAUGHS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join(8 * [f'*a{n - 1}'])}]}}\n" for n in range(1, 30)
)
BROKEN = {
    "a tab": (b"name: a\nworkload:\n\tmodel: tiny\n", "line 3: ", "indent with spaces"),
    "two documents": (b"name: a\n---\nname: b\n", "line 2: ", "expected a single document"),
    "nothing": (b"", "is empty; a "),
    "a comment alone": (b"# name: a\n", "is empty; a "),
    "an empty document": (b"---\n...\n", "is empty; a "),
    "a list": (b"- name: a\n", "line 1: is a list; a "),
    "a word": (b"name\n", "line 1: is one value; a "),
    "an unknown alias": (b"name: a\nworkload: *b\n", "line 2: found undefined alias 'b'"),
    "an anchor twice": (b"name: &a a\nworkload: &a b\n", "line 2: anchor &a is given twice"),
    "a list within itself": (b"name: a\nrungs: &a\n  - *a\n", "line 3: *a stands within what it names"),
    "a merge of itself": (b"name: a\nworkload: &a\n  <<: *a\n", "line 3: *a stands within what it names"),
    "a merge of a word": (b"name: a\nworkload: {<<: b}\n", "line 2: << merges a mapping, or a list of them"),
    "a merge of a list of words": (b"name: a\nworkload: {<<: [{}, b]}\n", "line 2: << merges a mapping"),
    "nested beyond use": (b"name: " + 3000 * b"[" + 3000 * b"]", "line 1: is nested too deeply"),
    "nested lines": (b"".join(b" " * n + b"a:\n" for n in range(200)), "line 100: is nested too deeply"),
    "a billion laughs": (LAUGHS.encode(), "holds more than 100,000 values"),
    "merged laughs": (MERGED_LAUGHS.encode(), "holds more than 100,000 values"),
    "many megabytes": (b"name: " + 2**21 * b"a", "is larger than 1 MiB"),
    "other encodings": ("name: ä\n".encode("latin-1"), "line 1: is not UTF-8 text"),
    "UTF-16": ("name: a\n".encode("utf-16"), "line 1: is not UTF-8 text"),
    "a control character": (b"name: a\nworkload: \x07\n", "line 2: character #x0007 has no place in YAML"),
    "a set": (b"name: a\nworkload: !!set {a, b}\n", "line 2: tag !!set has no meaning here"),
    "bytes": (b"name: !!binary aGk=\n", "line 1: tag !!binary has no meaning here"),
    "code": (
        b"name: !!python/object/apply:os.system [true]\n",
        "line 1: tag !!python/object/apply:os.system",
    ),
    "a tag that does not fit": (b"name: a\nworkload: !!int four\n", "line 2: four is no int"),
    "too many digits": (b"name: a\nworkload: " + 5000 * b"9" + b"\n", "line 2: 999", "is no int"),
    "a list as a key": (b"name: a\n? [a, b]\n: c\n", "line 2: a key is a word"),
    "a bracket that is open": (b"name: a\nrungs: [{name: b", "line 2: "),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("command", [lambda path: ladder.load(path), lambda path: config.load(str(path))])
def test_a_file_that_cannot_be_read_is_told_in_one_line_with_its_place(
    case: str, command, tmp_path: Path
) -> None:
    content, *said = BROKEN[case]
    path = tmp_path / "f.yaml"
    path.write_bytes(content)
    with pytest.raises((BenchError, ConfigError)) as caught:
        command(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 250 + len(str(path))
    for each in said:
        assert each in message


@pytest.mark.parametrize("value", ["1e-3", "on", "2024-01-02", "=", "<<", "a: b", "ünïcode", ".nan", "1e5"])
def test_a_text_is_written_as_it_is_read_again(value: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(yaml_files.dump({"name": value, "lr": 1e-5}), encoding="utf-8")
    assert yaml_files.read(path) == {"name": value, "lr": 1e-5}


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: is a pipe or a device; write it into a file"):
        yaml_files.read(tmp_path / "pipe")

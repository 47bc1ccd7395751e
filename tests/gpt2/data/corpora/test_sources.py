"""Corpora opened as streams of documents, from files, a local server, and a hub that is not there."""

from __future__ import annotations

import builtins
import codecs
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import standin_hub
import streams
from places import ROOT

from gpt2.data.corpora import readers
from gpt2.data.corpora.sources import Documents, Piece, has_validation, open_documents
from gpt2.files.cache import DataError

TEXTS = streams.documents(400)


def texts(documents: Documents) -> list[str]:
    return [piece.text for piece in documents]


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` tries three times, a tenth of a second apart, and no proxy stands before this machine."""
    import datasets.config

    for what in ("READ", "OPEN"):
        monkeypatch.setattr(datasets.config, f"STREAMING_{what}_MAX_RETRIES", 3)
        monkeypatch.setattr(datasets.config, f"STREAMING_{what}_RETRY_INTERVAL", 0.1)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server(tmp_path: Path, no_patience: None):
    (tmp_path / "served").mkdir()
    server = streams.Server(tmp_path / "served")
    yield server
    server.stop()


# --- files


@pytest.mark.parametrize("file", ["a.parquet", "a.jsonl", "a.jsonl.gz"])
def test_each_row_or_line_of_a_file_is_a_document(file: str, tmp_path: Path) -> None:
    write = streams.parquet if file == "a.parquet" else streams.json_lines
    opened = open_documents(str(write(tmp_path / file, TEXTS)))
    assert [(piece.text, piece.begins) for piece in opened] == [(text, True) for text in TEXTS]
    assert (opened.name, opened.text_column) == ("a", "text")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_folder_is_read_file_by_file_without_its_validation_and_test_files(
    kind: str, tmp_path: Path
) -> None:
    place = streams.folder(tmp_path / "mine", TEXTS, 3, kind)
    streams.WRITERS[kind](place / f"validation-00000.{kind}", ["val"])
    streams.WRITERS[kind](place / f"test-00000.{kind}", ["test"])
    (place / "README.md").write_text("no text of the corpus")
    assert texts(open_documents(str(place))) == TEXTS
    assert texts(open_documents(str(place), split="validation")) == ["val"]
    assert has_validation(str(place))


def test_a_text_file_is_one_document_that_is_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 100)
    text = "".join(f"line {n} of the text\n" for n in range(200))
    (tmp_path / "a.txt").write_text(text)
    pieces = list(open_documents(str(tmp_path / "a.txt")))
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(piece.text) for piece in pieces) < 250


def test_each_text_file_of_a_folder_is_a_document(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    found = [Piece("text a", True, files[0]), Piece("text b", True, files[1])]
    assert list(open_documents(str(tmp_path))) == found


def test_tiny_shakespeare_is_known_as_one_text(shakespeare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT2_DATA_DIR", str(shakespeare.parent))
    assert "".join(texts(open_documents("tinyshakespeare"))) == shakespeare.read_text(encoding="utf-8")


def test_a_copy_of_a_file_in_its_own_corpus_is_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a (1).jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "To be, or not to be."}\n' * (1 + (name == "b.jsonl")))
    (warning,) = open_documents(str(tmp_path)).warnings
    assert warning.startswith("a (1).jsonl, a.jsonl: the same file 2 times")


@pytest.mark.parametrize(
    ("name", "line", "parted"),
    [
        ("a.txt", "one<|endoftext|>two\n", "give these as lines of JSON"),
        ("a.jsonl", '{"text": "one<|endoftext|>"}\n', "each line is one"),
    ],
)
def test_end_of_text_as_text_is_told(name: str, line: str, parted: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(line * 3)
    (warning,) = open_documents(str(tmp_path / name)).warnings
    assert warning.startswith(f"{name} holds <|endoftext|> 3 times")
    assert parted in warning


def test_a_document_that_is_null_is_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    assert texts(open_documents(str(tmp_path / "a.jsonl"))) == ["a", ""]


def test_the_column_of_text_is_found_or_named(tmp_path: Path) -> None:
    told = open_documents(str(streams.parquet(tmp_path / "a.parquet", TEXTS, column="story")))
    assert told.text_column == "story"
    table = pyarrow.table({"title": ["t"], "content": ["c"], "words": [3]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert texts(open_documents(str(tmp_path / "b.parquet"))) == ["c"]
    assert texts(open_documents(str(tmp_path / "b.parquet"), text_column="title")) == ["t"]


# --- positions


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_from_any_position_the_rest_is_read_and_its_positions_hold_too(kind: str, tmp_path: Path) -> None:
    place = str(streams.folder(tmp_path / "mine", TEXTS, 3, kind))
    opened = open_documents(place)
    states = []
    for _ in opened:
        states.append(json.dumps(opened.state_dict()))  # after document n: where n + 1 is
    rng = np.random.default_rng(0)
    for place_in_it in [0, 49, 132, 133, 134, *rng.integers(0, len(TEXTS) - 40, 8)]:
        again = open_documents(place)
        again.load_state_dict(json.loads(states[place_in_it]))
        read, later = [], {}
        for piece in again:
            read.append(piece.text)
            if len(read) == 17:
                later = json.loads(json.dumps(again.state_dict()))
        assert read == TEXTS[place_in_it + 1 :]
        once_more = open_documents(place)
        once_more.load_state_dict(later)
        assert texts(once_more) == TEXTS[place_in_it + 18 :]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("every", [1, 7, 50])
def test_gone_on_with_again_and_again_every_document_comes_once(
    kind: str, every: int, tmp_path: Path
) -> None:
    place = str(streams.folder(tmp_path / "mine", TEXTS[:120], 3, kind))
    read: list[str] = []
    state = None
    while len(read) < 120:
        opened = open_documents(place)
        if state is not None:
            opened.load_state_dict(json.loads(state))
        for piece in islice(opened, every):
            read.append(piece.text)
            state = json.dumps(opened.state_dict())
    assert read == TEXTS[:120]


def test_row_groups_before_a_position_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(streams.parquet(tmp_path / "a.parquet", TEXTS, rows=50))
    opened = open_documents(path)
    for number, _ in enumerate(opened, 1):
        if number == 320:
            break
    state = opened.state_dict()
    groups: list[int] = []
    read = pyarrow.parquet.ParquetFile.iter_batches

    def noted(self, *arguments, **named):
        groups.extend(named["row_groups"])
        return read(self, *arguments, **named)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", noted)
    again = open_documents(path)
    again.load_state_dict(state)
    assert texts(again) == TEXTS[320:]
    assert groups == [6, 7]


def test_a_seed_gives_an_order_of_files_that_others_do_not(tmp_path: Path) -> None:
    opened = open_documents(str(streams.folder(tmp_path / "mine", TEXTS, 8)))
    orders = []
    for seed in ([1, 0], [1, 1], [1, 0], None):
        opened.restart(seed)
        orders.append(texts(opened))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[1]) == sorted(TEXTS)
    assert orders[3] == TEXTS


def test_the_source_names_files_and_sizes_but_no_folder(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    sources = [open_documents(str(streams.folder(tmp_path / at / "mine", TEXTS, 2))).source for at in "xy"]
    assert sources[0] == sources[1] == json.loads(json.dumps(sources[0]))
    other = open_documents(str(streams.folder(tmp_path / "x" / "mine", TEXTS[1:], 2))).source
    assert other != sources[0]


# --- over the network


@pytest.mark.parametrize("file", ["a.parquet", "a.jsonl", "a.jsonl.gz"])
def test_a_url_is_read_like_a_file(file: str, server: streams.Server, tmp_path: Path) -> None:
    write = streams.parquet if file == "a.parquet" else streams.json_lines
    write(tmp_path / "served" / file, TEXTS)
    assert texts(open_documents(f"{server.url}/{file}")) == TEXTS


def test_a_connection_that_breaks_is_taken_up_again(server: streams.Server, tmp_path: Path) -> None:
    path = streams.parquet(tmp_path / "served" / "a.parquet", TEXTS)
    opened = open_documents(f"{server.url}/a.parquet")
    server.most = path.stat().st_size // 2

    def mend() -> None:
        time.sleep(0.15)
        server.most = None

    mending = threading.Thread(target=mend)
    mending.start()
    assert texts(opened) == TEXTS
    mending.join()


def test_a_network_that_stays_away_is_one_line_that_says_nothing_is_lost(
    server: streams.Server, tmp_path: Path
) -> None:
    streams.parquet(tmp_path / "served" / "a.parquet", TEXTS)
    opened = open_documents(f"{server.url}/a.parquet")
    server.most = 0
    with pytest.raises(
        DataError, match=r"a\.parquet cannot be read any further.*nothing is lost.*checkpoint"
    ) as said:
        list(opened)
    assert "\n" not in str(said.value)


def test_a_file_that_a_server_does_not_have_is_refused(server: streams.Server) -> None:
    with pytest.raises(DataError, match=r"none\.parquet is not there"):
        open_documents(f"{server.url}/none.parquet")


@pytest.mark.parametrize("name", ["fineweb-edu", "someone/something:config"])
def test_without_a_network_the_hub_is_not_reachable_and_files_are_the_way(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between the tries
    with pytest.raises(DataError, match=r"hub is not reachable.*or give files") as said:
        open_documents(name)
    assert "\n" not in str(said.value)


# --- the hub

ON_HUB = """
import json, sys
from pathlib import Path
from gpt2.data.corpora.sources import open_documents
from gpt2.data.index import read_index
from gpt2.data.corpora.prepare import prepare

documents = open_documents("fineweb-edu")
texts, state = [], None
for piece in documents:
    texts.append(piece.text)
    if len(texts) == 170:
        state = documents.state_dict()
again = open_documents("fineweb-edu", revision=documents.origin["revision"])
again.load_state_dict(state)
said = []
for name in ("someone/nothing", "HuggingFaceFW/fineweb-edu:sample-1BT"):
    try:
        open_documents(name)
    except Exception as error:
        said.append(str(error))
out = Path(sys.argv[1])
list(prepare("tinystories", out, processes=1))
print(json.dumps({
    "texts": texts, "rest": [piece.text for piece in again], "origin": documents.origin, "said": said,
    "default": [piece.text for piece in open_documents("HuggingFaceFW/fineweb-edu")],
    "index": vars(read_index(out)),
}))
"""
"""In a process of its own: `datasets` reads the hub's address once, when it is imported."""


@pytest.fixture
def on_hub(tmp_path: Path, vocabulary: None) -> dict:
    place = tmp_path / "hub"
    web, stories = place / "HuggingFaceFW" / "fineweb-edu", place / "roneneldan" / "TinyStories"
    for folder in (web / "sample" / "10BT", web / "data" / "CC-MAIN-2024-10", stories / "data"):
        folder.mkdir(parents=True)
    splits = {"default": "data/*/*", "sample-10BT": "sample/10BT/*"}
    configs = [{"config_name": k, "data_files": [{"split": "train", "path": v}]} for k, v in splits.items()]
    (web / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n# FineWeb-Edu\n")
    (stories / "README.md").write_text("---\nlicense: other\n---\n")
    streams.parquet(web / "sample" / "10BT" / "000_00000.parquet", TEXTS[:150])
    streams.parquet(web / "sample" / "10BT" / "001_00000.parquet", TEXTS[150:])
    streams.parquet(web / "data" / "CC-MAIN-2024-10" / "train-00000-of-00014.parquet", ["all of it"])
    streams.parquet(stories / "data" / "train-00000-of-00001-2d5a1467fff1081b.parquet", TEXTS[:60])
    streams.parquet(stories / "data" / "validation-00000-of-00001-869c898b519ad725.parquet", TEXTS[60:70])
    hub = standin_hub.Hub(place)
    own = {"USE_TORCH": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1"}
    command = [sys.executable, "-c", ON_HUB, str(tmp_path / "out")]
    env = {**os.environ, **own}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env)
    hub.stop()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_known_names_are_read_from_a_stand_in_for_the_hub(on_hub: dict) -> None:
    assert on_hub["texts"] == TEXTS  # of the sample, not of all
    assert on_hub["default"] == ["all of it"]
    assert on_hub["origin"] == {
        "corpus": "fineweb-edu",
        "repository": "HuggingFaceFW/fineweb-edu",
        "config": "sample-10BT",
        "revision": standin_hub.COMMIT,  # which position and index hold it to
    }
    assert on_hub["rest"] == TEXTS[170:]
    assert "someone/nothing is no path here, and does not exist on the hub" in on_hub["said"][0]
    assert "'sample-1BT' not found. Available: ['default', 'sample-10BT']" in on_hub["said"][1]
    index = on_hub["index"]
    assert (index["finished"], index["validation"]["split"]) == (True, "validation")
    assert index["corpus"]["revision"] == standin_hub.COMMIT
    assert [(entry["file"], entry["documents"]) for entry in index["shards"]] == [
        ("tinystories_val_000000.bin", 10),
        ("tinystories_train_000001.bin", 60),
    ]


# --- what is wrong


def test_an_unknown_name_is_refused_with_what_is_near() -> None:
    with pytest.raises(DataError, match=r"unknown corpus 'fineweb-ed'; did you mean 'fineweb-edu'\? Known: "):
        open_documents("fineweb-ed")


@pytest.mark.parametrize("name", ["data/none.jsonl", "./nowhere", "/nowhere/at/all"])
def test_a_path_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_documents(name)


def test_a_split_that_a_known_corpus_lacks_is_refused() -> None:
    with pytest.raises(DataError, match="'fineweb' has no validation split of its own"):
        open_documents("fineweb", split="validation")
    assert not has_validation("fineweb")
    assert has_validation("tinystories")


def test_without_datasets_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments, **named):
        if name == "datasets":
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"needs the package `datasets`.*pip install"):
        open_documents("fineweb")


def test_a_version_whose_positions_do_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets, "__version__", "5.0.0")
    with pytest.raises(DataError, match=r"`datasets` 5\.0\.0 loses its position.*pip install"):
        open_documents("fineweb")


GOOD = '{"text": "a"}\n'


def test_compressed_lines_that_were_cut_off_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    lines = "".join(json.dumps({"text": f"{n * n}"}) + "\n" for n in range(20000))
    path.write_bytes(gzip.compress(lines.encode())[:-1000])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz, after line \d+: damaged gzip data"):
        list(open_documents(str(path)))


@pytest.mark.parametrize("damage", ["cut off", "a bad page"])
def test_damaged_parquet_is_named_by_its_file(damage: str, tmp_path: Path) -> None:
    place = streams.folder(tmp_path / "mine", TEXTS, 3)
    bad = place / "train-00001.parquet"
    content = bad.read_bytes()
    middle = len(content) // 2
    bad.write_bytes(content[:middle] + (damage == "a bad page") * (bytes(500) + content[middle + 500 :]))
    with pytest.raises(DataError, match=r"train-00001\.parquet cannot be read \("):
        list(open_documents(str(place)))


def test_a_later_file_without_the_column_is_named(tmp_path: Path) -> None:
    place = streams.folder(tmp_path / "mine", TEXTS, 2)
    streams.parquet(place / "train-00002.parquet", TEXTS, column="body")
    with pytest.raises(DataError, match=r"train-00002\.parquet: no column 'text', but id, body"):
        list(open_documents(str(place)))


@pytest.mark.parametrize(
    ("columns", "asked", "complaint"),
    [
        ({"a": ["x"], "b": ["y"]}, None, "has columns of text a, b; say which with --text-column"),
        ({"a": [1]}, None, "has no column of text"),
        ({"text": ["x"]}, "body", "has no column 'body', but text"),
        ({"text": ["x"], "id": [1]}, "id", "column 'id' of .* is no text; those of text: text"),
    ],
)
def test_a_column_that_cannot_be_told_is_asked_for(columns, asked, complaint: str, tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=complaint):
        open_documents(str(tmp_path / "a.parquet"), text_column=asked)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    streams.parquet(tmp_path / "a.parquet", [])
    for file in ("a.txt", "a.parquet"):
        with pytest.raises(DataError, match=r"holds no document"):
            list(open_documents(str(tmp_path / file)))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xff\xfe")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8"):
        list(open_documents(str(tmp_path / "a.txt")))


def test_a_question_mark_in_a_file_s_name_is_part_of_the_name(tmp_path: Path) -> None:
    (tmp_path / "Who am I?.jsonl").write_text(GOOD)
    assert texts(open_documents(str(tmp_path))) == texts(open_documents(str(tmp_path / "Who am I?.jsonl")))
    (tmp_path / "Is it?.txt").write_text("a")
    assert texts(open_documents(str(tmp_path / "Is it?.txt"))) == ["a"]
    with pytest.raises(DataError, match="a mixture of json and text"):
        open_documents(str(tmp_path))


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_a_column_is_not_taken_for_that_of_a_group(names: tuple[str, str], tmp_path: Path) -> None:
    columns = {"a": [{"b": "of a group"}], "a.b": ["a text"]}
    table = pyarrow.table({name: columns[name] for name in names})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(open_documents(str(tmp_path / "a.parquet"), text_column="a.b")) == ["a text"]


def test_a_hard_link_to_a_text_is_no_second_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "c.txt").hardlink_to(tmp_path / "a.txt")
    assert texts(open_documents(str(tmp_path))) == ["a"]


def test_a_folder_of_several_kinds_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder holds no file of \.txt, "):
        open_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "a.jsonl").write_text(GOOD)
    with pytest.raises(DataError, match="a mixture of json and text"):
        open_documents(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("a.pdf", r"a\.pdf, of no known kind; give files of one kind"),
        ("a.json", r"a\.json, of no known kind; .*\.jsonl"),
        ("a.jsonl.gz", r"a\.jsonl\.gz is not compressed by gzip; name it without \.gz"),
    ],
)
def test_a_file_whose_name_tells_no_known_kind_or_a_wrong_one_is_refused(
    file: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(GOOD)
    with pytest.raises(DataError, match=complaint):
        open_documents(str(tmp_path / file))


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_is_gone_since_it_was_opened_is_one_line(file: str, tmp_path: Path) -> None:
    path = streams.WRITERS[file.split(".")[1]](tmp_path / file, TEXTS)
    opened = open_documents(str(path))
    path.unlink()
    with pytest.raises(DataError, match=rf"{file} does not exist"):
        list(opened)


# --- JSON Lines of every form

TITLED = '{"title": "t", "text": "a"}\n'
FORMS = {
    "null first": ('{"text": null}\n' + GOOD * 2, ["", "a", "a"]),
    "null first, beside another text": ('{"title": "t", "text": null}\n' + TITLED, ["", "a"]),
    "null first, beside an id of text": ('{"id": "1", "text": null}\n{"id": "2", "text": "a"}\n', ["", "a"]),
    "null on 300 lines, beside an id of text": (
        '{"id": "1", "text": null}\n' * 300 + GOOD,
        [""] * 300 + ["a"],
    ),
    "no column first": ('{"id": 0}\n{}\n' + GOOD, ["", "", "a"]),
    "an empty text first": ('{"text": ""}\n' + GOOD, ["", "a"]),
    "content after null": ('{"content": null, "n": 1}\n{"content": "c", "n": 2}\n', ["", "c"]),
    "a column of its own after null": ('{"story": null}\n{"story": "s"}\n', ["", "s"]),
    "a byte order mark": (codecs.BOM_UTF8 + GOOD.encode(), ["a"]),
    "a byte order mark and CRLF": (codecs.BOM_UTF8 + b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
    "blank lines": ("\n\r\n" + GOOD + "  \n\n\t\n" + GOOD, ["a", "a"]),
    "no newline at the end": (GOOD + '{"text": "b"}', ["a", "b"]),
    "NULs at the end": (GOOD + "\0" * 5000, ["a"]),
    "separators within": ('{"text": "a\u2028b\u0085c\u2029d"}\n' + GOOD, ["a\u2028b\u0085c\u2029d", "a"]),
    "a NUL within": ('{"text": "a\\u0000b"}\n', ["a\0b"]),
    "a column twice": ('{"text": "a", "text": "b"}\n', ["b"]),
    "half a surrogate pair": ('{"text": "\\ud800"}\n' + GOOD, ["\ud800", "a"]),
}


BY_NAME = ["null first", "null on 300 lines, beside an id of text", "a byte order mark"]


@pytest.mark.parametrize(
    ("form", "column"), [*((form, None) for form in FORMS), *((form, "text") for form in BY_NAME)]
)
def test_json_lines_of_every_form_are_read_with_and_without_the_columns_name(
    form: str, column: str | None, tmp_path: Path
) -> None:
    content, expected = FORMS[form]
    (tmp_path / "a.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert texts(open_documents(str(tmp_path / "a.jsonl"), text_column=column)) == expected


WRONG_FORMS = {
    "broken": (GOOD * 3 + '{"text": "b\n' + GOOD, r"a\.jsonl, line 4: no JSON"),
    "no UTF-8": (GOOD.encode() * 2 + b'{"text": "\xff"}\n', r"a\.jsonl, line 3: no UTF-8"),
    "a list": (GOOD + "[1]\n", r"a\.jsonl, line 2: no JSON object"),
    "no column": (GOOD + '{"body": "b"}\n', r"a\.jsonl, line 2: no column 'text', but body"),
    "a number": (GOOD + '{"text": 3}\n', r"a\.jsonl, line 2: 'text' is no text but int"),
    "empty": ("", r"a\.jsonl holds no document"),
    "pretty-printed": ('{\n  "text": "a"\n}\n', r"line 1: the beginning of an object over several lines; a"),
    "an object broken within": (
        '{"text": "a",\n"n": 1}\n',
        r"line 1: the beginning of an object over several lines",
    ),
    "an array": ('[{"text": "a"}, {"text": "b"}]', r"line 1: no JSON object but an array; .*jq -c '\.\[\]'"),
    "an array over lines": ('[\n{"text": "a"},\n{"text": "b"}]', r"line 1: the beginning of an array over"),
    "an array, an object a line": ('\n[{"text": "a"},\n{"text": "b"}]', r"line 2: the beginning of an array"),
    "a text": ('"a"\n', r"line 1: no JSON object but str"),
    "a number first": ('{"text": 3}\n' + GOOD, r"line 1: 'text' is no text but int"),
    "a list of texts": (GOOD + '{"text": ["a"]}\n', r"line 2: 'text' is no text but list"),
    "true": (GOOD + '{"text": true}\n', r"line 2: 'text' is no text but bool"),
    "text by another name": ('{"title": "t"}\n' + TITLED, r"line 1: no column 'text', but title"),
    "a huge number": (GOOD + '{"n": ' + "1" * 5000 + "}\n", r"line 2: no JSON that can be read"),
    "deep brackets": (GOOD + '{"n": ' + "[" * 200_000 + "}\n", r"line 2: no JSON"),
    "NULs and no line": (GOOD + "\0\0" + GOOD, r"line 2: no JSON"),
    "UTF-16": (GOOD.encode("utf-16"), r"line 1: no UTF-8 .*; the file is UTF-16"),
    "gzip by another name": (
        gzip.compress(GOOD.encode()),
        r"line 1: no UTF-8 .*; the file is compressed by gzip",
    ),
    "half a surrogate pair's bytes": (GOOD.encode() + b'{"text": "\xed\xa0\x80"}\n', r"line 2: no UTF-8"),
    "a byte order mark alone": (codecs.BOM_UTF8, r"a\.jsonl holds no document"),
    "blank lines alone": ("\n \r\n\0", r"a\.jsonl holds no document"),
    "blank texts alone": (
        '{"text": " "}\n{"text": ""}\n{"text": null}\n',
        r"'a' holds no text: .* all blank",
    ),
    "null alone": ('{"text": null}\n', r"'a' holds no text"),
}


@pytest.mark.parametrize("form", WRONG_FORMS)
def test_json_of_a_wrong_form_is_one_line_that_names_its_file_and_line(form: str, tmp_path: Path) -> None:
    content, complaint = WRONG_FORMS[form]
    (tmp_path / "a.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=complaint) as said:
        list(open_documents(str(tmp_path / "a.jsonl")))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("file", ["A.JSONL", "a.Jsonl.GZ", "A.PARQUET", "A.TXT"])
def test_a_suffix_in_capitals_is_the_same_kind(file: str, tmp_path: Path) -> None:
    path, line = tmp_path / file, b'{"text": "a b"}\n'
    if file == "A.PARQUET":
        streams.parquet(path, ["a b"])
    else:
        path.write_bytes({"A.TXT": b"a b", "A.JSONL": line, "a.Jsonl.GZ": gzip.compress(line)}[file])
    assert texts(open_documents(str(path))) == ["a b"]
    assert texts(open_documents(str(tmp_path))) == ["a b"]


def test_an_empty_first_file_does_not_decide_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": null, "id": 1}\n')
    (tmp_path / "c.jsonl").write_text('{"text": "c", "id": 2}\n')
    assert texts(open_documents(str(tmp_path))) == ["", "c"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_a_document_knows_its_file_and_line_or_row(kind: str, tmp_path: Path) -> None:
    path = streams.WRITERS[kind](tmp_path / f"a.{kind}", TEXTS[:120])
    where = [piece.where for piece in open_documents(str(path))]
    each = {"jsonl": ", line {}", "parquet": ", row {}", "txt": ""}[kind]
    assert where == [f"{path}{each.format(n)}" for n in range(1, 2 if kind == "txt" else 121)]


# --- which files of a folder are data


HIDDEN = [".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/a.txt", "__MACOSX/deep/._a.txt", ".git/a.txt"]
HIDDEN += ["deep/.cache/b.txt", "._a.txt", ".hidden.txt", "deep/.#a.txt"]
COPIES = ["a.txt~", "#a.txt#", "a.txt.bak", ".a.txt.swp"]


@pytest.mark.parametrize("name", [*HIDDEN, *COPIES])
def test_hidden_files_and_copies_are_no_data(name: str, tmp_path: Path) -> None:
    place = tmp_path / ".cache" / "mine"  # a hidden folder that is asked for is read
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text("no data")
    (place / "deep").mkdir(exist_ok=True)
    (place / "a.txt").write_text("a")
    (place / "deep" / "b.txt").write_text("b")
    assert texts(open_documents(str(place))) == ["a", "b"]


def test_hidden_validation_files_are_no_validation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "._validation.txt").write_text("no data")
    assert not has_validation(str(tmp_path))


@pytest.mark.parametrize("link", ["file", "folder", "loop", "twice", "hidden"])
def test_links_are_followed_and_nothing_comes_twice(link: str, tmp_path: Path) -> None:
    place, other = tmp_path / "mine", tmp_path / "other"
    for folder, text in ((place, "a"), (other, "b")):
        folder.mkdir()
        (folder / f"{text}.txt").write_text(text)
    if link == "file":
        (place / "link.txt").symlink_to(other / "b.txt")
    else:
        (place / "link").symlink_to(other)
    if link == "loop":
        (other / "back").symlink_to(place)
        (place / "itself").symlink_to(place)
    if link == "twice":
        (place / "again").symlink_to(other)
        (place / "z.txt").symlink_to(place / "a.txt")
    if link == "hidden":
        (place / ".link").symlink_to(other / "b.txt")
    assert sorted(texts(open_documents(str(place)))) == ["a", "b"]


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"gone\.txt is a link to what is not there"):
        open_documents(str(tmp_path))


@pytest.mark.parametrize("value", [["a", "line"], {"body": "a"}, 3])
def test_another_column_is_not_taken_where_the_one_called_text_holds_none(
    value: object, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "x", "text": value}) + "\n")
    with pytest.raises(DataError, match=r"column 'text' of .* is no text"):
        open_documents(str(tmp_path / "a.jsonl"))


def test_another_column_is_not_taken_where_parquet_s_text_is_of_another_type(tmp_path: Path) -> None:
    table = pyarrow.table({"id": ["x"], "text": pyarrow.array([b"a text"])})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'text' of .* is no text"):
        open_documents(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
def test_a_column_of_strings_is_text_however_it_is_stored(kind: pyarrow.DataType, tmp_path: Path) -> None:
    texts = pyarrow.array(["to be", "or not", "to be"])
    column = texts.dictionary_encode() if pyarrow.types.is_dictionary(kind) else texts.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert [piece.text for piece in open_documents(str(tmp_path / "a.parquet"))] == texts.to_pylist()


@pytest.mark.parametrize(
    "values", [[1, 2], [b"to", b"be"], [["to"], ["be"]]], ids=["numbers", "bytes", "lists"]
)
def test_a_later_file_whose_column_is_no_text_is_named(values: list[Any], tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["to", "be"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: column 'text' is no text but"):
        list(open_documents(str(tmp_path)))


def test_a_later_file_whose_column_is_null_throughout_has_empty_documents(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["to", "be"]}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.nulls(2)}), tmp_path / "b.parquet")
    assert [piece.text for piece in open_documents(str(tmp_path))] == ["to", "be", "", ""]


def test_a_column_that_only_later_lines_have_may_be_asked_for(tmp_path: Path) -> None:
    lines = ['{"id": 1}'] * 300 + ['{"id": 1, "text": "to be"}'] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found = [piece.text for piece in open_documents(str(tmp_path / "a.jsonl"), text_column="text")]
    assert found == [""] * 300 + ["to be"] * 2


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns are called 'text'"):
        list(open_documents(str(tmp_path / "a.parquet")))

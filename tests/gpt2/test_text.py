"""Text to tokens: cuts that change none, stretches that must be cut, files of every shape."""

from __future__ import annotations

import codecs
import gzip
import random
import re
import tempfile
import tracemalloc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2 import text as tokenising
from gpt2.files.cache import DataError
from gpt2.files.shard_format import HEADER_BYTES
from gpt2.text import TokeniseError, encode, pieces, tokenise

ODD = "ab 19.'sdlt!\n\t\r\x00\x1c\x1f\x85\xa0\u2028\u3000é漢字、。ぁ가😀\u0301²Ⅷ_\ufeff\u200b"
TEXTS = st.text(alphabet=st.one_of(st.sampled_from(ODD), st.characters(codec="utf-8")), max_size=150)
with_vocabulary = settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CUT = re.compile(tokenising.LAST_CUT.pattern.removeprefix("(?s:.+)"))
"""Matches at every place of a cut."""


def by_tiktoken(text: str) -> list[int]:
    return tokenising.gpt2_encoding().encode_ordinary(text)


def written(folder: Path | str, text: str) -> Path:
    path = Path(folder) / "text.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def tokens_of(shard: Path) -> list[int]:
    return np.fromfile(shard, dtype="<u2", offset=HEADER_BYTES).tolist()


def stretches(text: str) -> list[str]:
    places = sorted({0, *(match.start() for match in CUT.finditer(text)), len(text)})
    return [text[a:b] for a, b in pairwise(places)]


# --- cuts


@given(text=TEXTS)
@with_vocabulary
def test_a_cut_never_changes_a_token(text: str, vocabulary: None) -> None:
    assert [token for part in stretches(text) for token in by_tiktoken(part)] == by_tiktoken(text)


@given(text=TEXTS, longest=st.integers(2, 40))
@with_vocabulary
def test_a_text_without_a_long_stretch_has_the_tokens_of_tiktoken(
    text: str, longest: int, vocabulary: None
) -> None:
    longest = max([longest, *map(len, stretches(text))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenising, "LONGEST", longest)
        assert all(len(part) <= longest for part in tokenising._parts(text))
        assert encode(text).tolist() == by_tiktoken(text)


@given(text=TEXTS, longest=st.integers(2, 20), piece=st.integers(1, 40))
@with_vocabulary
def test_tokens_do_not_depend_on_the_pieces_that_text_is_read_in(
    text: str, longest: int, piece: int, vocabulary: None
) -> None:
    text = text.removeprefix("\ufeff")  # at the beginning of a file it is no text
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenising, "LONGEST", longest)
        found = list(pieces(written(folder, text), piece))
        assert "".join(found) == text
        assert [token for part in found for token in encode(part).tolist()] == encode(text).tolist()


@pytest.mark.parametrize(
    "text",
    [
        "one\r\ntwo\r\n\r\nthree  \r\n four",
        "all of it on one line, and  two blanks;\ttabs \t mixed \u3000漢字",
        "漢字、漢字。「漢字」\uff01かな\uff1bカナ",
        "it's they'll we're 'tis ''s x'd' 'll 'lx",
        "a\x1cb \x1f c\x85d\xa0e\u2028f",
    ],
)
def test_texts_of_odd_shapes_are_cut_often_and_without_a_change(text: str, vocabulary: None) -> None:
    parts = stretches(text)
    assert len(parts) >= 4
    assert [token for part in parts for token in by_tiktoken(part)] == by_tiktoken(text)


# --- stretches that must be cut

RUNS = {
    "blanks": " ",
    "newlines": "\n",
    "carriage returns": "\r\n",
    "tabs": "\t",
    "no-break spaces": "\xa0",
    "wide blanks": "\u3000",
    "letters": "a",
    "accented letters": "é",
    "digits": "7",
    "carets": "^",
    "equal signs": "=",
    "Chinese": "漢",
    "emoji": "😀",
    "combining marks": "\u0301",
    "NULs": "\0",
    "separators": "\x1c",
    "letters of several kinds": "qZxj9",
    "Thai": "กี",
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_run_of_any_one_class_is_tokenised(run: str, size: int, vocabulary: None) -> None:
    text = "before" + RUNS[run] * (size // len(RUNS[run])) + "after"
    found = encode(text).tolist()
    assert tokenising.gpt2_encoding().decode(found) == text
    if len(text) <= tokenising.LONGEST:
        assert found == by_tiktoken(text)


def test_several_long_runs_in_a_text_leave_the_rest_as_it_was(vocabulary: None) -> None:
    some = " Some words, of which none may change.\n"
    text = some.join(mark * 300_000 for mark in " x^")
    found = encode(text).tolist()
    kept = by_tiktoken(some[:-1])
    assert sum(found[at : at + len(kept)] == kept for at in range(len(found)) if found[at] == kept[0]) == 2
    assert tokenising.gpt2_encoding().decode(found) == text


@pytest.mark.parametrize("text", ["", "\ud800", "a\udc00b", " \ud800" * 3])
def test_half_a_surrogate_pair_is_what_tiktoken_makes_of_it(text: str, vocabulary: None) -> None:
    assert encode(text).tolist() == by_tiktoken(text)


def test_half_a_surrogate_pair_in_a_long_text_is_what_tiktoken_makes_of_it(vocabulary: None) -> None:
    text = "some words " * 40_000 + "\ud800" + " and others" * 10
    assert encode(text).tolist() == by_tiktoken(text)


class Panic(BaseException):
    """As pyo3's PanicException is: no Exception."""


@pytest.mark.parametrize(
    "error", [Panic("StackOverflow\nand a trace"), ValueError("Regex error"), RuntimeError()]
)
def test_whatever_tiktoken_fails_with_is_one_line_that_names_the_text(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tokenising, "gpt2_encoding", lambda: SimpleNamespace(encode_to_numpy=fail))
    with pytest.raises(TokeniseError, match=r"^a\.jsonl, line 3 cannot be tokenised \(tiktoken: \w+") as said:
        encode("text", "a.jsonl, line 3")
    assert "\n" not in str(said.value)
    with pytest.raises(TokeniseError, match=r"text\.txt cannot be tokenised"):
        tokenise(written(tmp_path, "text"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_what_is_not_the_tokenizers_fault_passes_through(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(tokenising, "gpt2_encoding", lambda: SimpleNamespace(encode_to_numpy=fail))
    with pytest.raises(error):
        encode("text")


# --- files

SIZE = 1 << 20
WORDS = ["the", "of", "and", "to", "in", "is", "was", "for", "as", "with", "by", "that"]


def shaped(shape: str) -> str:
    rng = random.Random(7)
    lines = [" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(SIZE // 50)]
    if shape in {"\n", "\r\n", "\r", "\u2028", "\n\n", " "}:
        return shape.join(lines)
    return shape * (SIZE // len(shape))


@pytest.mark.parametrize(
    "shape", ["\n", "\r\n", "\r", "\u2028", "\n\n", " ", "漢字", "漢字、", " \t", "a", "^", "aB3+/"]
)
def test_a_text_of_any_shape_is_never_held_whole(
    shape: str, tmp_path: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "LONGEST", 1 << 14)
    text = shaped(shape)
    path = written(tmp_path, text)
    pieces_of_it = [len(piece) for piece in pieces(path, 1 << 14)]
    assert sum(pieces_of_it) == len(text)
    assert max(pieces_of_it) <= 1 << 15
    tracemalloc.start()
    for _ in pieces(path, 1 << 14):
        pass
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < SIZE // 2


@pytest.mark.parametrize("shape", ["\n", "\r\n", " ", "漢字、"])
def test_the_shard_of_a_text_of_any_shape_is_what_tiktoken_makes_of_the_whole(
    shape: str, tmp_path: Path, vocabulary: None
) -> None:
    text = shaped(shape)
    assert tokens_of(tokenise(written(tmp_path, text), 1 << 14)) == by_tiktoken(text)


def test_a_short_file_is_one_piece(tmp_path: Path) -> None:
    assert list(pieces(written(tmp_path, "a few words\nand lines\n"), 1 << 20)) == [
        "a few words\nand lines\n"
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path, vocabulary: None) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"To be\r\nor not")
    marked.write_bytes(codecs.BOM_UTF8 + plain.read_bytes())
    assert tokens_of(tokenise(marked)) == by_tiktoken("To be\r\nor not")
    assert tokenise(plain) == tokenise(marked)


def test_nul_characters_are_text(tmp_path: Path, vocabulary: None) -> None:
    assert tokens_of(tokenise(written(tmp_path, "a\0\0b"))) == by_tiktoken("a\0\0b")


# --- what is no text, or another one by now


def test_a_text_that_is_overstruck_as_manuals_are_is_tokenised(tmp_path: Path, vocabulary: None) -> None:
    content = "".join(f"{letter}\b{letter}" for letter in "NAME  gpt2 - train a model  SYNOPSIS ") * 50
    (tmp_path / "a.txt").write_text(content)
    assert tokenise(tmp_path / "a.txt").stat().st_size > HEADER_BYTES + 2 * len(content) / 3


BLANK = r"a\.txt holds no text"
NUL = r"a\.txt is not UTF-8 text \(much of it is control characters\)"
NO_TEXT = {
    "an empty file": (b"", BLANK),
    "a blank file": (b" \n\t \r\n", BLANK),
    "a byte order mark": (codecs.BOM_UTF8, BLANK),
    "a byte order mark and a line's end": (codecs.BOM_UTF8 + b"\n", BLANK),
    "a wide blank": ("\u3000".encode(), BLANK),
    "no UTF-8": (b"abc\xff\xfe", r"a\.txt is not UTF-8 text \(.* at byte 3\)$"),
    "no UTF-8 behind a mark": (codecs.BOM_UTF8 + b"ab\xc3(", r"a\.txt is not UTF-8 text \(.* at byte 5\)$"),
    "a letter cut off": (
        "é".encode() * (3 << 19) + b"\xe6\xbc",
        r"a\.txt is not UTF-8 text \(.* at byte 3145728\)$",
    ),
    "half a surrogate pair": (
        b"a " * (1 << 20) + b"\xed\xa0\x80",
        r"a\.txt is not UTF-8 text \(.* at byte 2097152\)$",
    ),
    "UTF-32": ("text".encode("utf-32"), r"is not UTF-8 text .*; the file is .*UTF-32"),
    "UTF-16": ("text".encode("utf-16"), r"is not UTF-8 text .*; the file is .*UTF-16"),
    "gzip": (gzip.compress(b"text", mtime=0), r"is not UTF-8 text .*; the file is .*compressed by gzip"),
    "zstd": (b"\x28\xb5\x2f\xfd", r"is not UTF-8 text .*; the file is .*zstd"),
    "UTF-16LE": ("To be, or not to be: that is the question".encode("utf-16-le"), NUL),
    "UTF-16BE": ("To be, or not to be: that is the question".encode("utf-16-be"), NUL),
    "no end": (b"To be, or not to be. " * 50_000 + bytes(500_000), NUL),
    "no beginning": (bytes(20_000) + b"To be, or not to be. " * 5_000, NUL),
    "a hole": (b"To be, or not to be. " * 200_000 + bytes(9000) + b"To be, or not to be. " * 200_000, NUL),
    "a hole between samples": (
        b"To be, or not to be. " * 300 + bytes(5000) + b"To be, or not to be. " * 9000,
        NUL,
    ),
    "Cyrillic UTF-16LE": ("Быть или не быть, вот в чём вопрос".encode("utf-16-le"), NUL),
    "a pointer of git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        r"a\.txt is a pointer of git LFS in place of the file itself \(git lfs pull\)",
    ),
}


@pytest.mark.parametrize("kind", NO_TEXT)
def test_what_is_no_text_is_refused_with_what_it_is(kind: str, tmp_path: Path, vocabulary: None) -> None:
    content, complaint = NO_TEXT[kind]
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        tokenise(tmp_path / "a.txt")


def test_a_text_about_git_lfs_is_one(tmp_path: Path, vocabulary: None) -> None:
    text = "version https://git-lfs.github.com/spec/v1 is how a pointer begins. " * 100
    assert tokens_of(tokenise(written(tmp_path, text))) == by_tiktoken(text)


def test_tokens_of_a_text_that_changed_meanwhile_are_not_kept_as_those_of_the_text_before(
    tmp_path: Path, vocabulary: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "To be, or not to be.")
    genuine = tokenising.pieces

    def changing(*arguments):
        path.write_text("Or not to be at all.")
        return genuine(*arguments)

    monkeypatch.setattr(tokenising, "pieces", changing)
    with pytest.raises(DataError, match=r"text\.txt changed while it was read"):
        tokenise(path)
    monkeypatch.setattr(tokenising, "pieces", genuine)
    assert tokens_of(tokenise(written(tmp_path, "To be, or not to be."))) == by_tiktoken(
        "To be, or not to be."
    )


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 5, bytes(2000), None], ids=["empty", "short", "zeros", "longer"]
)
def test_cached_tokens_that_were_not_written_to_their_end_are_made_anew(
    damage: bytes | None, tmp_path: Path, vocabulary: None
) -> None:
    shard = tokenise(written(tmp_path, "To be, or not to be."))
    shard.write_bytes(shard.read_bytes() + b"x" if damage is None else damage)
    assert tokens_of(tokenise(written(tmp_path, "To be, or not to be."))) == by_tiktoken(
        "To be, or not to be."
    )

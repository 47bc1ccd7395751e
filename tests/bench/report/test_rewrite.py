"""What bench report --update does to a file of somebody's own."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.report.folder import MARKERS, rewrite

START, END = (marker.encode() for marker in MARKERS)
TEXT = "### new\n\n| a |\n"

KEPT = {
    "LF": (b"# Mine\n" + START + b"\nold\n" + END + b"\nlast\n", b"\n"),
    "CRLF": (b"# Mine\r\n\r\n" + START + b"\r\nold\r\n" + END + b"\r\nlast\r\n", b"\r\n"),
    "CR": (b"# Mine\r" + START + b"\rold\r" + END + b"\rlast\r", b"\r"),
    "mixed": (b"a\nb\r\nc\r" + START + b"\r\nold\n" + END + b"\nd\r\ne\n", b"\r\n"),
    "no last newline": (b"a\n" + START + b"\n" + END, b"\n"),
    "a byte order mark": (b"\xef\xbb\xbf" + START + b"\r\n" + END + b"\r\nb", b"\r\n"),
    "latin-1": (b"caf\xe9 \x85 \x0b\x0c\n" + START + b"\n" + END + b"\n\xff\xfe\n", b"\n"),
    "indented": (b"- a\n  " + START + b"  \n" + b"  " + END + b"\n", b"\n"),
    "named in a sentence": (b"`" + START + b"` begins it.\n" + START + b"\nold\n" + END + b"\n", b"\n"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_every_byte_outside_the_markers_stays_and_the_block_has_their_line_ends(
    kind: str, tmp_path: Path
) -> None:
    content, ending = KEPT[kind]
    path = tmp_path / "README.md"
    path.write_bytes(content)
    rewrite(path, TEXT)
    before, after = content.rfind(START) + len(START), content.rfind(END)
    before += content[before:].index(ending) + len(ending)
    indent = len(content[:after]) - len(content[:after].rstrip(b" "))
    block = f"\n{TEXT}\n".encode().replace(b"\n", ending)
    assert path.read_bytes() == content[:before] + block + content[after - indent :]
    rewrite(path, TEXT)
    assert path.read_bytes() == content[:before] + block + content[after - indent :]


REFUSED = {
    "none": (b"mine\n", "has no lines"),
    "no start": (END + b"\n", "has no lines"),
    "no end": (START + b"\n", "has no lines"),
    "within a line": (b"a " + START + b" b " + END + b"\n", "has no lines"),
    "UTF-16": ((START + b"\n" + END).decode().encode("utf-16"), "has no lines"),
    "reversed": (END + b"\n" + START + b"\n", "README.md:1: the line"),
    "two starts": (START + b"\n" + START + b"\n" + END + b"\n", "2 times (lines 1 and 2)"),
    "two blocks": (2 * (START + b"\n" + END + b"\n"), "2 times (lines 1 and 3)"),
    "two ends": (START + b"\n" + END + b"\n\n" + END, "2 times (lines 2 and 4)"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_whose_markers_are_not_one_pair_is_refused_in_one_line_and_stays(
    kind: str, tmp_path: Path
) -> None:
    content, said = REFUSED[kind]
    path = tmp_path / "README.md"
    path.write_bytes(content)
    with pytest.raises(BenchError, match="README") as caught:
        rewrite(path, TEXT)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_link_stays_a_link_and_a_file_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    target, link = tmp_path / "docs" / "real.md", tmp_path / "README.md"
    target.write_bytes(START + b"\n" + END + b"\n")
    target.chmod(0o640)
    link.symlink_to("docs/real.md")
    rewrite(link, TEXT)
    assert link.is_symlink()
    assert TEXT in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["README.md", "docs", "real.md"]


def test_a_file_that_is_as_it_should_be_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(START + b"\n" + END + b"\n")
    rewrite(path, TEXT)
    before = path.stat()
    rewrite(path, TEXT)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_write_that_fails_leaves_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(content := START + b"\nold\n" + END + b"\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*README\.md"):
        rewrite(path, TEXT)
    assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["README.md"]

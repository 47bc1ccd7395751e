"""A folder that one process at a time writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2.files.lock import Locked, exclusive, own


@pytest.mark.parametrize(("files", "kept"), [([], False), (["index"], False), (["index", "shard"], True)])
def test_a_folder_that_was_made_is_removed_where_nothing_of_worth_came_into_it(
    tmp_path: Path, files: list[str], kept: bool
) -> None:
    folder = tmp_path / "a" / "b"
    with own(folder, worthless=["index"]):
        for name in files:
            (folder / name).write_text("")
    assert folder.exists() is kept
    assert (folder / "index").exists() is kept


def test_a_folder_that_was_there_before_stays_though_it_is_empty(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="broken off"), own(tmp_path):
        raise ValueError("broken off")
    assert tmp_path.exists()


def test_a_folder_that_another_one_writes_to_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with exclusive(tmp_path):
        with pytest.raises(Locked), own(tmp_path):
            raise AssertionError
        assert (tmp_path / ".lock").exists()


def test_a_folder_that_was_moved_meanwhile_is_no_error(tmp_path: Path) -> None:
    with own(tmp_path / "here"):
        (tmp_path / "here").rename(tmp_path / "there")
    assert (tmp_path / "there" / ".lock").exists()

"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpexec.engine.files import absolute, is_writable, write_whole
from mpexec.errors import ConfigError


def test_a_path_is_seen_from_here_and_an_empty_one_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of/mine")
    assert absolute("a/b") == tmp_path / "a/b"
    assert absolute(Path("~/b")) == Path("/home/of/mine/b")
    assert absolute("~nobody-here/b") == tmp_path / "~nobody-here/b"
    with pytest.raises(ConfigError, match="names no file"):
        absolute("")


def test_trying_whether_a_file_can_be_written_leaves_nothing_and_no_change(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"old")
    assert is_writable(there)
    assert is_writable(tmp_path / ("a" * 255))
    assert not is_writable(tmp_path / ("a" * 256))
    assert not is_writable(tmp_path)
    assert os.listdir(tmp_path) == ["there"]
    assert there.read_bytes() == b"old"


def test_a_file_is_replaced_whole_through_a_link_too_and_kept_where_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    write_whole(link, b"old")
    assert (link.is_symlink(), file.read_bytes()) == (True, b"old")

    def disk_full(half: Path, content: bytes) -> None:
        half.touch()
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new")
    assert file.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]

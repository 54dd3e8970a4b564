from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfold.cli import _files
from kvfold.core.errors import ConfigError, DataError


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    _files.write_file(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, "replace", full)
    with pytest.raises(DataError, match="No space left on device"):
        _files.write_file(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("one", "two"):
        _files.write_file(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == text


def test_a_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    _files.write_file(pipe, "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert pipe.is_fifo()


def test_places_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    _files.check_file("--out", tmp_path / "new.PNG", ".png")
    for path, rule in (
        (tmp_path / "folder.png", "it is a folder"),
        (tmp_path / "new.jpg", "ends in .png or .html"),
        (tmp_path / "missing" / "new.png", "existing folder"),
        (tmp_path / "file" / "new.png", "existing folder"),
    ):
        with pytest.raises(ConfigError, match=f"^--out must be .*{rule}"):
            _files.check_file("--out", path, ".png", ".html")


def test_places_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "new" / "deep"):
        _files.check_folder("--out", path)
    for path in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(ConfigError, match=r"^--out must be a folder"):
            _files.check_folder("--out", path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for check in (_files.check_file, _files.check_folder):
        with pytest.raises(ConfigError, match="can be written to"):
            check("--out", tmp_path / "new")

"""Folders of captures, and texts that are written whole."""

from pathlib import Path

import pytest

from harness.base.files import write_text
from harness.errors import Code, HarnessError
from harness.pytest_plugin.items import making, settle


def test_new_captures_take_the_place_of_old_ones(tmp_path: Path) -> None:
    kept = tmp_path / "captures" / "case"
    for name in ("first", "second"):
        with making(kept) as folder:
            (folder / name).touch()
            assert settle(folder, kept) == kept
    assert [path.name for path in kept.iterdir()] == ["second"]
    assert [path.name for path in kept.parent.iterdir()] == ["case"]


def test_captures_that_fail_leave_the_old_ones(tmp_path: Path) -> None:
    kept = tmp_path / "case"
    kept.mkdir()
    (kept / "old").touch()

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError), making(kept) as folder:
        fail(folder)
    assert [path.name for path in kept.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["case"]


def test_captures_that_are_not_kept_are_gone() -> None:
    with making(None) as folder:
        assert settle(folder, None) == folder
        assert folder.is_dir()
    assert not folder.exists()


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "old")

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(HarnessError, match="No space left") as caught:
        write_text(path, "new")
    assert caught.value.code is Code.CANNOT_WRITE
    assert path.read_text() == "old"
    assert [item.name for item in path.parent.iterdir()] == ["a.txt"]

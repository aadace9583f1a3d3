"""The folders of profiles: one for each case, the old one whole until the new one is."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.base.files import writing
from harness.base.scratch import scratch_folder

_FOLDER = "captures"


def captures_folder(path: Path, config: pytest.Config) -> Path | None:
    """Return the folder of the captures of a case file; None if the session keeps none."""
    chosen, junit = config.getoption("captures"), config.getoption("xmlpath", None)
    if not chosen and not junit:
        return None
    # As pytest itself reads the path of the JUnit file.
    junit_file = os.path.expandvars(os.path.expanduser(junit or ""))  # noqa: PTH111  # a variable may hold a `~`
    folder = Path(chosen) if chosen else Path(junit_file).parent / _FOLDER
    root = config.rootpath
    name = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return folder.absolute() / name.with_suffix("")


@contextmanager
def making(kept: Path | None) -> Iterator[Path]:
    """Yield an empty folder to fill; it is gone afterwards, unless `settle` has moved it.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    if kept is not None:
        with writing(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".captures-", kept and kept.parent) as parent:
        folder = parent / "new"
        folder.mkdir()
        yield folder


def settle(folder: Path, kept: Path | None) -> Path:
    """Move a folder that `making` gave to where it is kept, in place of an older one; return where it is.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    if kept is None:
        return folder
    with writing(kept):
        if kept.exists():
            kept.rename(folder.with_name("old"))
        return folder.rename(kept)

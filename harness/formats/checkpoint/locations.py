"""Folders of the harness: its cache, and the cases that come with it."""

import os
from pathlib import Path

from harness.errors import Code, HarnessError


def cache_dir() -> Path:
    """Return the folder for goldens and hashes: `$HARNESS_CACHE`, or `~/.cache/inference-harness`."""
    chosen = os.environ.get("HARNESS_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/inference-harness").expanduser()


def embedded_cases() -> Path:
    """Return the folder of the cases that come with the harness, in a wheel and in a checkout."""
    package = Path(__file__).parents[2]
    for folder in (package / "embedded", package.parent / "cases"):
        if folder.is_dir():
            return folder
    raise HarnessError(
        Code.BAD_CASE,
        "this installation lacks the embedded cases",
        where=package,
        hint="install inference-harness again, or name a checkpoint with --model",
    )

"""The harness's own folders: its cache, with the digests of files, and the cases that come with it.

To hash gigabytes takes seconds, so files that did not change are hashed once.
"""

import hashlib
import json
import math
import os
import re
import reprlib
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from harness.base.files import json_digest, write_text
from harness.errors import Code, HarnessError


def cache_dir() -> Path:
    """Return the folder for goldens and hashes: `$HARNESS_CACHE`, or `~/.cache/inference-harness`.

    It is made for the user alone: whoever writes to it decides what is right.

    Raises:
        HarnessError: as `cache_limit`, before anything is made that may take hours.
    """
    cache_limit()
    chosen = os.environ.get("HARNESS_CACHE")
    folder = Path(chosen) if chosen else Path("~/.cache/inference-harness").expanduser()
    with suppress(OSError):  # whoever writes to it will say so
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def cache_limit() -> float | None:
    """Return the bound of the cache in bytes, `$HARNESS_CACHE_GB` times 10^9; None without one.

    Raises:
        HarnessError: BAD_OPTION: it is no positive number.
    """
    text = os.environ.get("HARNESS_CACHE_GB")
    if not text:
        return None
    try:
        limit = float(text) * 1e9
    except ValueError:
        limit = math.nan
    if limit > 0:
        return limit
    what, hint = "the bound of the cache is no size", "HARNESS_CACHE_GB=50, or inf to evict nothing"
    expected = "a number of GB above 0"
    raise HarnessError(
        Code.BAD_OPTION, what, where="HARNESS_CACHE_GB", expected=expected, actual=reprlib.repr(text), hint=hint
    )


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


_DIGEST = re.compile(r"blake3:[0-9a-f]{64}")
_BLOCK_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
"""Age from which a stamp tells one content from another: two writes within one tick of the clock have one stamp."""


class FileStamp(NamedTuple):
    """Place, size and times of a file, read without opening it: they change whenever it is written again."""

    path: str
    """With links resolved."""
    num_bytes: int
    modified_ns: int
    changed_ns: int
    """When the system last changed the file's entry: `cp -p` and `touch -r` set the other time back, and not this."""

    @classmethod
    def of(cls, file: Path) -> "FileStamp":
        """Return a file's stamp; raises OSError where the file is gone."""
        status = file.stat()
        return cls(str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def files_digest(stamps: Mapping[Path, FileStamp]) -> str:
    """Return "blake3:" and the BLAKE3 over the bytes of files in order; remembered while the stamps are the same.

    A checkpoint has hundreds of gigabytes, and SHA-256 takes three times as long. On one thread: a process that hashed
    with several may not be forked.
    """
    memo = cache_dir() / "weights" / json_digest(list(stamps.values()))
    with suppress(OSError, UnicodeDecodeError):
        known = memo.read_text().strip()
        if _DIGEST.fullmatch(known):
            return known
    hasher, block = blake3(), memoryview(bytearray(_BLOCK_BYTES))
    for file in stamps:
        with file.open("rb", buffering=0) as stream:
            while num_bytes := stream.readinto(block):
                hasher.update(block[:num_bytes])
    digest = f"blake3:{hasher.hexdigest()}"
    if all(time.time_ns() - stamp.changed_ns > _SETTLED_NS for stamp in stamps.values()):
        with suppress(HarnessError):  # a cache that cannot be written costs time, not correctness
            write_text(memo, digest)
    return digest


def folder_digest(place: Path, suffixes: tuple[str, ...] = ("",)) -> str:
    """Return a digest of a file, or of all files in a folder with their names; hidden ones are left out.

    Where the place is missing, that is what the digest says. Names with one of the `suffixes` count.

    Raises:
        OSError: a file cannot be read.
    """
    names = {path: str(path.relative_to(place)) for path in sorted(place.rglob("*")) if path.is_file()}
    names = {place: place.name} if place.is_file() else names
    counted = {
        path: FileStamp.of(path)
        for path, name in names.items()
        if name.endswith(suffixes) and not any(part.startswith(".") for part in Path(name).parts)
    }
    listed = [(names[path], stamp.num_bytes) for path, stamp in counted.items()]
    return hashlib.sha256(f"{json.dumps(listed)} {files_digest(counted)}".encode()).hexdigest()

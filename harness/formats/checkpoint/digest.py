"""The digest of weights. Hashing gigabytes takes seconds, so weights that did not change are hashed once."""

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.base.files import write_text
from harness.errors import HarnessError
from harness.formats.checkpoint.locations import cache_dir
from harness.formats.checkpoint.stamp import FileStamp

_SHA256 = re.compile(r"[0-9a-f]{64}")


def weights_digest(stamps: Mapping[Path, FileStamp]) -> str:
    """Return the sha256 over the bytes of files in order, in hexadecimal; remembered while the stamps are the same."""
    memo = cache_dir() / "weights" / hashlib.sha256(json.dumps(list(stamps.values())).encode()).hexdigest()
    with suppress(OSError, UnicodeDecodeError):
        known = memo.read_text().strip()
        if _SHA256.fullmatch(known):
            return known
    digest = hashlib.sha256()
    for file in stamps:
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    with suppress(HarnessError):  # a cache that cannot be written costs time, not correctness
        write_text(memo, digest.hexdigest())
    return digest.hexdigest()

"""All results as one file, which is written anew after each step: what comes back from a machine is this."""

import tarfile
from pathlib import Path

NAME = "first-gpu-run.tar.gz"
_LARGEST = 16 << 20
"""Bytes of a file that travels; traces may be larger and stay."""


def pack(out: Path) -> None:
    """Write the archive of a folder into it; until all of it is on disk the one before stays."""
    part = out / f".{NAME}"
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(out.rglob("*")):
            member = path.relative_to(out)
            is_result = not member.parts[0].startswith(".") and member.name != NAME
            if path.is_file() and is_result and path.stat().st_size <= _LARGEST:
                archive.add(path, str(member))
    part.replace(out / NAME)


def unpack(archive: Path, out: Path) -> None:
    """Put the results of an earlier call into a folder, so that the next one goes on."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # new in 3.11.4
        packed.extractall(out)

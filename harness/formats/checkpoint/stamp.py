"""A stamp of a file, read without opening it, which changes whenever the file is written again."""

from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Place, size and times of a file."""

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

"""A peer's memory on the host: the growth of this process once the peer is open and has run."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATM = Path("/proc/self/statm")
PAGE_BYTES = 4096


class ResidentMemory:
    """Adds up by how much the process grew while it worked for each peer.

    Pages that a peer gives back and another one takes are counted for the first; what a peer keeps in a process of its
    own is not seen.
    """

    def __init__(self) -> None:
        self.grown_bytes: Counter[str] = Counter()
        """By peer; empty if the system does not tell (not Linux)."""

    @contextmanager
    def of(self, peer: str) -> Iterator[None]:
        """Count what the process grows by in this block."""
        before = _resident_bytes()
        yield
        after = _resident_bytes()
        if before is not None and after is not None:
            self.grown_bytes[peer] += max(0, after - before)


def _resident_bytes() -> int | None:
    try:
        return int(STATM.read_text(encoding="ascii").split()[1]) * PAGE_BYTES
    except OSError:
        return None

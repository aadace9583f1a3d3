"""What is damaged: one kind of file, and the command that is given it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .mutate import Mutation

CHECKPOINTS = Path(__file__).parents[2] / "cases" / "checkpoints"
WORKLOAD = ("--token-ids", "1,4,5,6,7", "--token-ids", "1,9", "--max-new-tokens", "2")


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Keep goldens and hashes in this folder during the block."""
    before = os.environ.get("HARNESS_CACHE")
    os.environ["HARNESS_CACHE"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("HARNESS_CACHE") if before is None else os.environ.update(HARNESS_CACHE=before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of file."""

    name: str
    file: str
    """Of the template's folder: what is damaged."""
    mutations: Sequence[Mutation]
    command: Callable[[Path], Sequence[object]]
    """The arguments, given the folder with the damaged file."""
    repair: Callable[[Path], None] = lambda _folder: None
    """Puts right what depends on the damaged file, for half of the inputs."""
    sound: str = "0"
    """How the command ends with the file as it was."""
    seconds: float = 0.1
    """What one input costs, roughly: dear targets get fewer of them."""

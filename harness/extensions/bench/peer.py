"""The interface of an engine that is timed."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.extensions.bench.workload import BenchWorkload

OURS = "reference"
"""The engine that is timed if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The settings that all engines of a run share."""

    folder: Path
    """The checkpoint."""
    scratch: Path
    """A folder for what a peer makes of it."""
    dtype: str
    device: str
    num_threads: int
    max_request_len: int
    """Tokens of the longest request."""
    max_total_len: int
    """Tokens of all requests of the largest workload: what must fit into the KV cache."""
    max_requests: int
    engine_options: Mapping[str, str]
    """Options of `engine`."""
    engine: str = "reference"
    """The engine that is compared with its peers."""

    def options_of(self, name: str) -> Mapping[str, str]:
        """Return the options of an engine; only the one that is compared with its peers has some."""
        return self.engine_options if name == self.engine else {}


@dataclass(slots=True)
class Generation:
    """The tokens of a workload, and their times."""

    start: float = field(default_factory=time.perf_counter)
    token_ids: list[list[int]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    """When each of the steps that brought tokens ended; one entry where an engine does not show its steps."""

    def end_step(self) -> None:
        """Note that the tokens of a step are on the host."""
        self.step_ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.step_ends[-1] - self.start

    @property
    def prefill_seconds(self) -> float:
        """Until the first tokens."""
        return self.step_ends[0] - self.start

    @property
    def decode_step_seconds(self) -> float:
        """Mean of the steps after the first."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)


class Peer(Protocol):
    """An engine that is timed."""

    name: str
    shows_steps: bool
    """Whether `Generation.step_ends` has every step, so that prefill and decode can be told apart."""

    def generate(self, workload: BenchWorkload) -> Generation:
        """Run the requests greedily, each to its length; an end-of-sequence token ends nothing."""

    def close(self) -> None:
        """Release the model and other memory."""


class PeerMissingError(Exception):
    """A peer is not installed; `package` is what pip would have to install, the peer's own extra if it is None."""

    def __init__(self, reason: str, *, package: str | None = None) -> None:
        super().__init__(reason)
        self.package = package

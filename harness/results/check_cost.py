"""What a check would cost, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One phase of a check."""

    name: str
    seconds: float
    read_bytes: int
    """Weights, golden and recordings that are read from files, of which the system may hold some in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCost:
    """The cost of a check that was not made."""

    kind: ClassVar = "check-cost"
    IN_DOCUMENT: ClassVar = ("kind", "seconds", "read_bytes")
    model: str
    dtype: str
    num_requests: int
    num_tokens: int
    """Of all requests: prompts and what follows them."""
    num_layers: int
    num_measured: int
    """The first layers of the model, which were run."""
    has_golden: bool
    """Whether the golden is in the cache."""
    phases: tuple[PhaseCost, ...]
    golden_bytes: int
    """On disk, kept."""
    recording_bytes: int
    """On disk while a schedule is judged."""
    peak_bytes: int | None
    """Memory of the process beside mapped files; None where the system does not say."""
    available_bytes: int

    @property
    def seconds(self) -> float:
        """Time of all phases; without the engine's own."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def read_bytes(self) -> int:
        """Bytes that all phases read."""
        return sum(phase.read_bytes for phase in self.phases)

"""Results of a comparison of weights, as plain data. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor of either weights against its counterpart."""

    name: str
    counterpart: str
    """The tensor of the other weights, with the rows or columns of it where it is a part."""
    dtypes: tuple[str, str]
    digests: tuple[str, str]
    """First 16 digits of SHA-256 over the values, of both."""
    num_values: int
    num_different: int
    """Values that differ by more than the coarser dtype's rounding; of one dtype, all that are not equal. NaN differs
    from all, also from NaN."""
    max_abs: float
    relative: float
    """L2 norm of the difference over that of the first."""
    arrived: float | None = None
    """Share of the known update that the second weights have; None without earlier weights, or where nothing moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsResult:
    """Two sets of weights."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    first: str
    second: str
    tensors: tuple[TensorDifference, ...]
    """All that were compared."""
    only_first: tuple[str, ...]
    """Names without a counterpart, which were not compared."""
    only_second: tuple[str, ...]
    arrived: float | None = None
    """Of the whole update."""
    settings: tuple[str, ...] = ()
    """Settings of config and tokenizer that differ, in words."""
    not_compared: tuple[str, ...] = ()
    """Which files were not compared, and why."""

    @property
    def different(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ, the furthest apart first."""
        differing = [tensor for tensor in self.tensors if tensor.num_different]
        return tuple(sorted(differing, key=lambda tensor: -tensor.relative))

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a tensor or a setting differs, or a tensor has no counterpart; nothing, if none was compared."""
        if not self.tensors:
            return Outcome.NOTHING
        is_same = not (self.different or self.only_first or self.only_second or self.settings)
        return Outcome.PASS if is_same else Outcome.MISMATCH

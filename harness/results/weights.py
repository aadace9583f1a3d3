"""Results of a comparison of weights, as plain data. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor of the first weights and its counterpart in the second."""

    name: str
    counterpart: str
    """Name of the counterpart, with rows or columns if it is a part of a tensor."""
    dtypes: tuple[str, str]
    digests: tuple[str, str]
    """First 16 digits of the SHA-256 hash of the values, for both."""
    num_values: int
    num_different: int
    """Values that differ by more than the coarser dtype's rounding; of one dtype, all that are not equal. NaN differs
    from all, also from NaN."""
    max_abs: float
    relative: float
    """L2 norm of the difference over that of the first."""
    arrived: float | None = None
    """Share of the update that the second weights have; None without earlier weights or without an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsResult:
    """Two sets of weights."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    first: str
    second: str
    tensors: tuple[TensorDifference, ...]
    """The compared tensors."""
    only_first: tuple[str, ...]
    """Names of tensors without a counterpart, which were not compared."""
    only_second: tuple[str, ...]
    arrived: float | None = None
    """Share of the update over all tensors."""
    settings: tuple[str, ...] = ()
    """Descriptions of settings of config and tokenizer that differ."""
    not_compared: tuple[str, ...] = ()
    """Files that were not compared, with the reason."""

    @property
    def different(self) -> tuple[TensorDifference, ...]:
        """The tensors that differ, the largest difference first."""
        differing = [tensor for tensor in self.tensors if tensor.num_different]
        return tuple(sorted(differing, key=lambda tensor: -tensor.relative))

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a tensor or a setting differs, or a tensor has no counterpart; nothing, if none was compared."""
        if not self.tensors:
            return Outcome.NOTHING
        is_same = not (self.different or self.only_first or self.only_second or self.settings)
        return Outcome.PASS if is_same else Outcome.MISMATCH

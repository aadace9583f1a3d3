"""Two recordings in two precisions, measured and not judged, as plain data. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.results.check import LogitResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TapError:
    """The distance of two recordings at one tap."""

    tap: str
    layer: int | None
    num_rows: int
    roundings_median: float
    """Relative error of a row, in roundings of the coarser dtype."""
    roundings_max: float
    relative_l2_max: float
    """Of the same row as a share of its norm, for which no dtype is needed."""
    num_not_finite: int
    ends_layer: bool
    """Whether it is the last tap of its layer, or lies outside of the layers."""
    growth: float | None = None
    """Of such a tap: the median over that of the one before; None for the first, and after an exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How far two recordings of the same tokens are apart. There is no bound, so there is no verdict."""

    kind: ClassVar = "measurement"
    is_verdict: ClassVar = False
    IN_DOCUMENT: ClassVar = ("kind", "is_verdict", "first_above")
    paths: tuple[str, str]
    dtypes: tuple[str, str]
    """Those that the manifests state."""
    unit: str
    """The coarser of both."""
    level: float
    num_requests: int
    taps: tuple[TapError, ...]
    """In the order of computation."""
    logits: LogitResult | None
    notes: tuple[str, ...]
    """Taps that were not compared, and routers that chose other experts."""

    @property
    def first_above(self) -> TapError | None:
        """The first tap in the order of computation with a row of more roundings than the level, or a NaN."""
        return next((tap for tap in self.taps if not tap.roundings_max <= self.level), None)

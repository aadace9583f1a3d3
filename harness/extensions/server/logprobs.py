"""Errors of log probabilities: which values can be compared, and how large the errors of a sound server may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeGuard

_MISSING = -9990.0
"""At and below it a log probability says `none`: servers write minus infinity as -9999 or so."""
UNDERFLOW = math.log(2.0**-126)
"""Log probability of the smallest normal float32: a server that takes the logarithm of a softmax has none below it."""
_RMS_BOUND, _RMS_BOUND_PER_ROOT = 1.5, 4.0
"""RMS of a sound server's errors over that of HF's, at most: the first, plus the second over the root of the rows.

Calibrated with tests/calibrations/endpoint_floors.py (reports/cpu/endpoints.md)."""
_MAX_BOUND, _MAX_BOUND_PER_ROW = 2.5, 80.0
"""The same for the largest error, with the second over the rows themselves. Of a few rows one may have all the weight
(the tokens of the rest are certain), and HF's error there is a single draw: a sound server had 5.6 times as much over
16 rows, in 1 of 10 to 30 checks. Of many rows several have weight."""


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a log probability can be compared: `null`, NaN, minus infinity and what stands for it cannot."""
    return value is not None and math.isfinite(value) and value > _MISSING


def bounds(num_rows: int) -> tuple[float, float]:
    """Return the bounds of the root mean square and of the maximum, over so many rows, in units of HF's own noise."""
    return _RMS_BOUND + _RMS_BOUND_PER_ROOT / math.sqrt(num_rows), _MAX_BOUND + _MAX_BOUND_PER_ROW / num_rows


def ratio(error: float, noise: float) -> float:
    """Return error over noise; 0 if both vanish."""
    return error / noise if noise else (0.0 if error == 0 else float("inf"))


@dataclass(slots=True)
class LogprobErrors:
    """Errors of log probabilities in nats, and the errors of HF in the server's dtype for the same tokens."""

    values: list[float] = field(default_factory=list)
    noises: list[float] = field(default_factory=list)

    def add(self, value: float, noise: float) -> None:
        """Add the error of one token."""
        self.values.append(value)
        self.noises.append(noise)

    @property
    def rms(self) -> tuple[float, float]:
        """Root mean squares of errors and noises; 0 if there are none."""
        return _rms(self.values), _rms(self.noises)

    @property
    def max(self) -> tuple[float, float]:
        """The largest error and the largest noise; 0 if there are none."""
        return max(map(abs, self.values), default=0.0), max(self.noises, default=0.0)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / max(1, len(values)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DefinitionResult:
    """Log probabilities under one definition: a distribution that they may be of."""

    IN_DOCUMENT: ClassVar = ("fits",)
    name: str
    num_values: int
    num_misfits: int
    """Values where this distribution has none, and none where it has one."""
    rms_ratio: float
    """Error over the error that HF makes in the server's dtype."""
    max_ratio: float
    rms_bound: float
    max_bound: float

    @classmethod
    def of(cls, name: str, errors: LogprobErrors, num_misfits: int, num_rows: int) -> "DefinitionResult":
        """Return how well a definition fits, over so many rows."""
        rms_bound, max_bound = bounds(max(1, num_rows))
        return cls(
            name=name,
            num_values=len(errors.values),
            num_misfits=num_misfits,
            rms_ratio=ratio(*errors.rms),
            max_ratio=ratio(*errors.max),
            rms_bound=rms_bound,
            max_bound=max_bound,
        )

    @property
    def fits(self) -> bool:
        """Whether rounding explains all values: of tokens at the edge of a set, some may be on the other side."""
        is_near = self.rms_ratio <= self.rms_bound and self.max_ratio <= self.max_bound
        return is_near and self.num_misfits <= 0.01 * self.num_values

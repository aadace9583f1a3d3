"""Below one rounding: errors that are too small to see in any row and have a direction over all of them.

Rounding has no direction of its own, but it is deterministic: a channel that hardly varies is rounded the same way in
every row, and a token that comes again is rounded the same way each time. So rows and channels both are samples, not
elements: with p = e t / s^2 per element (e the error, t the truth, s the channel's RMS), S the sum of all p, the
statistic is

    t = S / sqrt(n var_rows + W var_channels)

with the variances of the row sums and of the channel sums about their means (two-way clustering; Cameron, Gelbach and
Miller 2011, equation 2.14, without the interaction term, which can only lower the variance). Rows of the same content
count once. What benign engines reach is measured: docs/how-verdicts-work.md.
"""

import math
from dataclasses import dataclass, field

import torch

from harness.metrics import rounding_unit
from harness.results import Effect
from harness.taps import Kind

THRESHOLD = 8.0
"""Least statistic of an effect; benign operations stay below it, but for attention in float16 and channels of one
value, which the floors below are for."""
MIN_ROWS = 40
"""Distinct rows below which nothing is said."""
MAX_ROWS = 4096
MIN_CHANNELS = 16

_FLOORS = {torch.float32: 2.0, torch.float64: 2.0}
"""Least effect in roundings: a gain of 5e-8 in float32 is the reciprocal root's own, and means nothing."""
_FLOOR = 0.05
_FLOOR_OF_ATTENTION = 0.5
"""Flash kernels round the probabilities and not their sum, which is a gain of up to 0.2 roundings in float16."""
_FLOOR_OF_CHANNEL = 4.0
"""A channel of one value is rounded the same way in every row, by up to 2.3 roundings each time."""


@dataclass(slots=True)
class Effects:
    """Sums over the rows of one operation, chunk by chunk; `W` channels, `N` heads."""

    kind: Kind
    dtype: torch.dtype
    head_dim: int
    seen: set[float] = field(default_factory=set)
    scale: torch.Tensor | None = None
    """[W] RMS of each channel in the first chunk; infinite where it is zero."""
    positions: list[torch.Tensor] = field(default_factory=list)
    row_products: list[torch.Tensor] = field(default_factory=list)
    """[rows, N] each: sums of p over the channels of a head."""
    row_squares: list[torch.Tensor] = field(default_factory=list)
    """[rows, N] each: sums of t^2 / s^2."""
    products: torch.Tensor | float = 0.0
    """[W] sums of p over the rows."""
    moments: torch.Tensor | float = 0.0
    """[W] sums of position times p."""
    errors: torch.Tensor | float = 0.0
    """[W] sums of e / s."""
    squared_errors: torch.Tensor | float = 0.0

    def add(self, positions: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, judged: torch.Tensor) -> None:
        """Add some rows.

        Args:
            positions: [rows].
            actual: [rows, ...].
            expected: [rows, ...] float64.
            judged: [rows] bool, rows that may be looked at.
        """
        if len(self.seen) >= MAX_ROWS or self.kind is Kind.EMBEDDING:
            return
        truth, actual = expected.flatten(1), actual.flatten(1)
        new = self._new_rows(positions, truth, judged & actual.isfinite().all(dim=1))
        if truth.shape[1] < MIN_CHANNELS or not len(new):
            return
        t, e = truth[new], actual[new].to(torch.float64) - truth[new]
        if self.scale is None:
            rms = t.square().mean(dim=0).sqrt()
            self.scale = torch.where(rms > 0, rms, torch.inf)
        t, e = t / self.scale, e / self.scale
        p, position = e * t, positions[new].to(torch.float64)
        num_heads = self._num_heads(t.shape[1])
        self.positions.append(position)
        self.row_products.append(p.unflatten(1, (num_heads, -1)).sum(dim=2))
        self.row_squares.append(t.square().unflatten(1, (num_heads, -1)).sum(dim=2))
        self.products = self.products + p.sum(dim=0)
        self.moments = self.moments + position @ p
        self.errors = self.errors + e.sum(dim=0)
        self.squared_errors = self.squared_errors + e.square().sum(dim=0)

    def _new_rows(self, positions: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Return the indices of rows whose content has not come before; a rotation's errors are its position's."""
        norms = torch.linalg.vector_norm(truth, dim=1).to(torch.float32)
        keys = positions if self.kind is Kind.ROTARY else norms
        new = []
        for at, (key, may) in enumerate(zip(keys.tolist(), (allowed & (norms > 0)).tolist(), strict=True)):
            if may and key not in self.seen:
                self.seen.add(key)
                new.append(at)
        return torch.tensor(new, dtype=torch.int64)

    def _num_heads(self, width: int) -> int:
        has_heads = self.kind in (Kind.ROTARY, Kind.ATTENTION) and width % self.head_dim == 0
        return width // self.head_dim if has_heads and self.head_dim >= MIN_CHANNELS else 1

    def strongest(self) -> Effect | None:
        """Return the effect of the largest statistic that is beyond the threshold and the floor; None for none."""
        found = [effect for effect in self.all() if self.is_significant(effect)]
        return max(found, key=lambda effect: abs(effect.statistic), default=None)

    def is_significant(self, effect: Effect) -> bool:
        """Whether an effect is neither chance nor what rounding may do."""
        floor = _FLOORS.get(self.dtype, _FLOOR)
        if self.kind is Kind.ATTENTION:
            floor = max(floor, _FLOOR_OF_ATTENTION)
        if effect.kind == "offset":
            floor = max(4 * floor, _FLOOR_OF_CHANNEL)
        return abs(effect.statistic) >= THRESHOLD and abs(effect.roundings) >= floor

    def all(self) -> list[Effect]:
        """Return every effect that was looked for, whatever its size; empty where there are too few rows."""
        if sum(map(len, self.positions)) < MIN_ROWS or self.scale is None:
            return []
        rows, squares, position = (torch.cat(parts) for parts in (self.row_products, self.row_squares, self.positions))
        products, moments = torch.as_tensor(self.products), torch.as_tensor(self.moments)
        effects = [self._effect("gain", "", rows.sum(dim=1), products, float(squares.sum()))]
        centered = position - position.mean()
        spread = float(centered.square() @ squares.sum(dim=1))
        if spread > 0:
            trend = moments - position.mean() * products
            span = float(position.max() - position.min())
            effects.append(self._effect("trend", "", centered * rows.sum(dim=1), trend, spread, times=span))
        if rows.shape[1] > 1:
            heads = products.unflatten(0, (rows.shape[1], -1))
            for head in range(rows.shape[1]):
                size = float(squares[:, head].sum())
                effects.append(self._effect("gain of head", str(head), rows[:, head], heads[head], size))
        return [*effects, self._offset(len(position))]

    def _effect(
        self, kind: str, which: str, rows: torch.Tensor, channels: torch.Tensor, size: float, *, times: float = 1.0
    ) -> Effect:
        """Return the relative effect sum(rows) / size with its two-way clustered statistic and interval."""
        total = float(rows.sum())
        deviation = math.sqrt(_variance(rows) + _variance(channels))
        value = total / size * times if size else 0.0
        margin = 1.96 * deviation / size * times if size else 0.0
        return Effect(
            kind=kind,
            which=which,
            size=value,
            low=value - margin,
            high=value + margin,
            roundings=value / rounding_unit(self.dtype),
            statistic=_ratio(total, deviation),
            num_rows=len(rows),
        )

    def _offset(self, num_rows: int) -> Effect:
        """Return the offset of the channel that has the largest, in units of the channel's RMS."""
        errors, squares = torch.as_tensor(self.errors), torch.as_tensor(self.squared_errors)
        mean = errors / num_rows
        deviation = ((squares / num_rows - mean.square()).clamp(min=0) / num_rows).sqrt()
        at = int(mean.abs().argmax())
        value, margin = float(mean[at]), 1.96 * float(deviation[at])
        return Effect(
            kind="offset",
            which=str(at),
            size=value,
            low=value - margin,
            high=value + margin,
            roundings=value / rounding_unit(self.dtype),
            statistic=_ratio(value, float(deviation[at])),
            num_rows=num_rows,
        )


def _ratio(value: float, deviation: float) -> float:
    """Value over deviation; infinite where every row has the same value, 0 where there is none."""
    return value / deviation if deviation else math.copysign(math.inf, value) if value else 0.0


def _variance(sums: torch.Tensor) -> float:
    """Variance of the total of some independent sums, about their mean."""
    count = len(sums)
    return float((sums - sums.mean()).square().sum()) * count / max(1, count - 1)

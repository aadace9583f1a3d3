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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.base.metrics import rounding_unit
from harness.formats.recording.reader import as_slice
from harness.formats.taps import KINDS, Kind
from harness.results.check import Effect

THRESHOLD = 8.0
"""Least statistic of an effect; benign operations stay below it, but for attention in float16 and channels of one
value, which the floors below are for."""
MIN_ROWS = 40
"""Distinct rows below which nothing is said."""
MAX_ROWS = 4096
MIN_CHANNELS = 16
SCALE = "softmax scale"
"""The effect of scores that all have another factor than they should."""

_BLOCK_ELEMENTS = 1 << 17
"""Elements that are added at a time."""
_FLOORS = {torch.float32: 2.0, torch.float64: 2.0}
"""Least effect in roundings: a gain of 5e-8 in float32 is the reciprocal root's own, and means nothing. In 16 bits it
is the kind's own."""
_FLOOR_OF_SCALE = 1.5
"""Least effect on the scores' factor, in roundings: a kernel may round queries or scores, which have no direction."""
_ACCUMULATED = 4.0
"""The largest ratio of the error of one accumulated value to its channel's floor, in float32."""
_FLOOR_OF_TRUNCATED = 40.0
"""Least effect, in roundings to float32, of attention whose sums a GPU's matrix units may have made: they drop what
lies below the largest term of a step (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores"), toward zero.
torch's memory-efficient kernel has a gain of up to 22 on an H200 (5.5e-7), cuBLAS's float32 products have none:
reports/h200/checks.md."""
_FLOOR_OF_CHANNEL = 4.0
"""A channel of one value is rounded the same way in every row, by up to 2.3 roundings each time."""


@dataclass(slots=True)
class Effects:
    """Sums over the rows of one operation, chunk by chunk; `W` channels, `N` heads."""

    kind: Kind
    dtype: torch.dtype
    num_heads: int = 1
    """Heads that a row is made of, where its tensor shows them."""
    may_truncate: bool = False
    """Whether the rows were computed on a GPU, whose matrix units truncate their sums."""
    seen: set[float] = field(default_factory=set)
    scale: torch.Tensor | None = None
    """[W] RMS of each channel in the first chunk; infinite if it is zero."""
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
    slope_products: list[torch.Tensor] = field(default_factory=list)
    """[rows] each, where a slope is known: sums of e g / s^2, with g the slope."""
    slope_squares: list[torch.Tensor] = field(default_factory=list)
    slope_channels: torch.Tensor | float = 0.0
    """[W] sums of e g / s^2 over the rows."""
    measured: tuple[int, list[Effect]] | None = None
    """Number of rows, and the effects that they have."""

    def add(
        self,
        positions: torch.Tensor,
        actual: torch.Tensor,
        expected: torch.Tensor,
        judged: torch.Tensor,
        slope: torch.Tensor | None = None,
    ) -> None:
        """Add some rows.

        Args:
            positions: [rows].
            actual: [rows, ...].
            expected: [rows, ...] the truth's, float64 or float32.
            judged: [rows] bool, rows that may be looked at: finite ones.
            slope: [rows, ...] how the rows of attention move with the logarithm of the softmax scale; None if unknown.
        """
        if len(self.seen) >= MAX_ROWS or self.kind is Kind.EMBEDDING:
            return
        truth, actual = expected.flatten(1), actual.flatten(1)
        new = self._new_rows(positions, truth, judged)
        if truth.shape[1] < MIN_CHANNELS or not len(new):
            return
        size = max(1, _BLOCK_ELEMENTS // truth.shape[1])
        blocks = [as_slice(rows) for rows in new.split(size)]  # on the CPU, as the positions are
        if self.scale is None:
            # The norm of a column takes six times as long as the sum of its squares.
            squares = torch.stack([truth[rows].square().sum(dim=0) for rows in blocks]).sum(dim=0)
            rms = (squares / len(new)).sqrt().to(torch.float32)
            self.scale = torch.where(rms > 0, rms, torch.inf)
        for rows in blocks:
            self._add_block(positions[rows], actual[rows], truth[rows], None if slope is None else slope[rows])

    def _add_block(
        self, positions: torch.Tensor, actual: torch.Tensor, truth: torch.Tensor, slope: torch.Tensor | None
    ) -> None:
        """Add rows whose copies stay in the second-level cache."""
        assert self.scale is not None
        e = (actual.to(truth.device, truth.dtype) - truth).to(torch.float32).div_(self.scale)
        t = truth.to(torch.float32) / self.scale  # sums of errors: it is their difference that had to be exact
        if slope is not None:
            self._add_slope(e, slope.to(e) / self.scale)
        p, position, heads = e * t, positions.to(torch.float64), (self._num_heads(t.shape[1]), -1)
        # Both sums over the rows, plain and weighted by position, in one product.
        weights = torch.stack([torch.ones_like(position), position]).to(t.device, t.dtype)
        products, moments = (weights @ p).to("cpu", torch.float64)
        self.positions.append(position)
        self.row_products.append(p.unflatten(1, heads).sum(dim=2).to("cpu", torch.float64))
        self.row_squares.append(t.square_().unflatten(1, heads).sum(dim=2).to("cpu", torch.float64))
        self.products, self.moments = self.products + products, self.moments + moments
        self.errors = self.errors + e.sum(dim=0).to("cpu", torch.float64)
        self.squared_errors = self.squared_errors + e.square_().sum(dim=0).to("cpu", torch.float64)

    def _add_slope(self, e: torch.Tensor, g: torch.Tensor) -> None:
        products = e * g
        self.slope_products.append(products.sum(dim=1).to("cpu", torch.float64))
        self.slope_squares.append(g.square().sum(dim=1).to("cpu", torch.float64))
        self.slope_channels = self.slope_channels + products.sum(dim=0).to("cpu", torch.float64)

    def _new_rows(self, positions: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Return the indices of rows whose content has not come before; a rotation's errors are its position's."""
        norms = torch.linalg.vector_norm(truth, dim=1).to("cpu", torch.float64)
        # Rows of one content may differ in their last digits: they stood elsewhere in a batch.
        keys = positions if KINDS[self.kind].repeats_by_position else torch.frexp(norms).mantissa.mul(1e6).round()
        new = []
        for at, (key, may) in enumerate(zip(keys.tolist(), (allowed & (norms > 0)).tolist(), strict=True)):
            if may and key not in self.seen:
                self.seen.add(key)
                new.append(at)
        return torch.tensor(new, dtype=torch.int64)

    def _num_heads(self, width: int) -> int:
        size = width // self.num_heads
        return self.num_heads if KINDS[self.kind].has_heads and size >= MIN_CHANNELS else 1

    def strongest(self) -> Effect | None:
        """Return the effect of the largest statistic that is beyond the threshold and the floor; None for none."""
        return max(self.significant(), key=lambda effect: abs(effect.statistic), default=None)

    def significant(self) -> list[Effect]:
        """Return the effects that are neither chance nor what rounding may do."""
        return [effect for effect in self.all() if self.is_significant(effect)]

    def is_significant(self, effect: Effect) -> bool:
        """Whether an effect is neither chance nor what rounding may do."""
        floor = max(_FLOORS.get(self.dtype, 0.0), KINDS[self.kind].least_effect)
        if effect.kind == SCALE:
            floor = _FLOOR_OF_SCALE
        if effect.kind == "offset":
            floor = max(4 * floor, _FLOOR_OF_CHANNEL) * self._least_channel(int(effect.which))
        if self.may_truncate and self.kind is Kind.ATTENTION and self.dtype is torch.float32:
            floor = max(floor, _FLOOR_OF_TRUNCATED)
        return abs(effect.statistic) >= THRESHOLD and abs(effect.roundings) >= floor

    def _least_channel(self, channel: int) -> float:
        """Return by how much larger than elsewhere an offset of a channel must be; more than 1 for attention alone.

        Attention sums values. An engine without a cache computes them anew, with other roundings than those that it
        recorded: the same in every row that reads them, as large in a channel of small numbers as in any other, and in
        float32 several for each value, a product that was accumulated.
        """
        if self.kind is not Kind.ATTENTION or self.scale is None:
            return 1.0
        known = self.scale[self.scale.isfinite()]
        share = max(1.0, float(known.square().mean().sqrt() / self.scale[channel]))
        return share * (_ACCUMULATED if self.dtype in (torch.float32, torch.float64) else 1.0)

    def like(self, effect: Effect) -> Effect | None:
        """Return the same effect of these rows, of the same head or channel; None if it was not measured."""
        if effect.kind == "offset":
            return self._offset(sum(map(len, self.positions)), int(effect.which)) if self.all() else None
        return next((item for item in self.all() if (item.kind, item.which) == (effect.kind, effect.which)), None)

    def all(self) -> list[Effect]:
        """Return every effect that was looked for, whatever its size; empty if there are too few rows."""
        num_rows = sum(map(len, self.positions))
        if num_rows < MIN_ROWS or self.scale is None:
            return []
        if self.measured is None or self.measured[0] != num_rows:
            self.measured = num_rows, self._all()
        return self.measured[1]

    def _all(self) -> list[Effect]:
        rows, squares, position = (torch.cat(parts) for parts in (self.row_products, self.row_squares, self.positions))
        products, moments = torch.as_tensor(self.products), torch.as_tensor(self.moments)
        effects = self._effects("gain", [""], rows.sum(dim=1)[:, None], products[:, None], squares.sum()[None])
        centered = position - position.mean()
        spread = centered.square() @ squares.sum(dim=1)
        if float(spread) > 0:
            trend = moments - position.mean() * products
            span = float(position.max() - position.min())
            sums = (centered * rows.sum(dim=1))[:, None], trend[:, None], spread[None]
            effects += self._effects("trend", [""], *sums, times=span)
        if (num_heads := rows.shape[1]) > 1:
            heads = products.unflatten(0, (num_heads, -1)).T
            effects += self._effects("gain of head", list(map(str, range(num_heads))), rows, heads, squares.sum(dim=0))
        if self.slope_products:
            slopes, size = torch.cat(self.slope_products), torch.cat(self.slope_squares).sum()
            channels = torch.as_tensor(self.slope_channels)
            effects += self._effects(SCALE, [""], slopes[:, None], channels[:, None], size[None])
        return [*effects, self._offset(len(position))]

    def _effects(
        self,
        kind: str,
        which: Sequence[str],
        rows: torch.Tensor,
        channels: torch.Tensor,
        sizes: torch.Tensor,
        *,
        times: float = 1.0,
    ) -> list[Effect]:
        """Return relative effects sum(rows) / size with their two-way clustered statistics and intervals.

        Args:
            kind: of the `n` effects.
            which: name of each.
            rows: [rows, n] sums of each row.
            channels: [channels, n] sums of each channel.
            sizes: [n].
            times: factor of all.
        """
        totals, deviations = rows.sum(dim=0), (_variances(rows) + _variances(channels)).sqrt()
        unit, num_rows, effects = rounding_unit(self.dtype), len(rows), []
        columns = zip(which, totals.tolist(), deviations.tolist(), sizes.tolist(), strict=True)
        for name, total, deviation, size in columns:
            value = total / size * times if size else 0.0
            margin = 1.96 * deviation / size * times if size else 0.0
            effects.append(
                Effect(
                    kind=kind,
                    which=name,
                    size=value,
                    low=value - margin,
                    high=value + margin,
                    roundings=value / unit,
                    statistic=_ratio(total, deviation),
                    num_rows=num_rows,
                )
            )
        return effects

    def _offset(self, num_rows: int, channel: int | None = None) -> Effect:
        """Return the offset of a channel, by default of that which has the largest, in units of the channel's RMS."""
        errors, squares = torch.as_tensor(self.errors), torch.as_tensor(self.squared_errors)
        mean = errors / num_rows
        deviation = ((squares / num_rows - mean.square()).clamp(min=0) / num_rows).sqrt()
        at = int(mean.abs().argmax()) if channel is None else channel
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


def beyond_control(effects: Effects | None, control: Effects | None, *, allowance: float = 0.0) -> Effect | None:
    """Return the strongest effect that lies outside of what truth and control span; None for none.

    Rounding of values that lie on a grid can have a direction: silu of a small bfloat16 number loses its quadratic term
    every time. HF's own module has that effect on the same rows, an engine that rounds less has none, and both are
    right, as is everything between.

    Args:
        effects: of the engine's rows.
        control: of the control's.
        allowance: roundings that the engine's convention allows in addition: no smaller effect is held against it.
    """
    if effects is None:
        return None
    unexplained = []
    for effect in (item for item in effects.significant() if abs(item.roundings) > allowance):
        of_control = control.like(effect) if control is not None else None
        if of_control is None or effects.is_significant(_excess(effect, of_control)):
            unexplained.append(effect)
    return max(unexplained, key=lambda effect: abs(effect.statistic), default=None)


def _excess(effect: Effect, control: Effect) -> Effect:
    """Return what is left of an effect beyond the nearest value between none and the control's."""
    nearest = min(max(effect.size, min(0.0, control.size)), max(0.0, control.size))
    half_width, control_half_width = ((item.high - item.low) / 2 for item in (effect, control))
    margin = half_width if nearest == 0 else math.hypot(half_width, control_half_width)
    size = effect.size - nearest
    return replace(
        effect,
        size=size,
        roundings=effect.roundings * (size / effect.size if effect.size else 0.0),
        statistic=_ratio(size, margin / 1.96),
    )


def _ratio(value: float, deviation: float) -> float:
    """Value over deviation; infinite where every row has the same value, 0 if there is none."""
    return value / deviation if deviation else math.copysign(math.inf, value) if value else 0.0


def _variances(sums: torch.Tensor) -> torch.Tensor:
    """Variance of the total of some independent sums, about their mean, of each column: [n] of [sums, n]."""
    count = len(sums)
    return (sums - sums.mean(dim=0)).square().sum(dim=0) * count / (count - 1)

"""A row in 128 projections and its norm: enough to tell how far another row is from it.

A projection sums one element of each 128 with random signs (a count sketch; Charikar, Chen and Farach-Colton 2002):
each 128 elements are turned by a random number of places and added up. Two elements of a row meet in one projection
with a probability of 1/128 at most. With S for all projections, S(a) - S(e) = S(a - e), and the norm of S(d) estimates
that of d: its square is right in the mean, with a standard deviation of at most sqrt(2 / 128) of it, so a norm is right
to 6 %.
Equal rows have equal sketches, bit for bit: the sums are taken in one order, whatever rows stand beside them.

Sums in float64 are stored in float32: each is off by a rounding to float32 at most, as an element of the engine's row
is. So a distance of one rounding may seem to be two. The norm is stored to 48 bits, and the difference of
two norms is the least distance: rows that differ in a single bit do not seem equal.

A sum or a norm may be larger than float32 holds although no element is. Such a row is sketched times 2^-80, which is
exact, and its norm is stored with a minus.
"""

import hashlib
from functools import cache

import torch

from harness.base.metrics import RowMetrics
from harness.formats.taps import Graph, Kind

PROJECTIONS_A_ROW = 128
_LEAST_WIDTH = 2 * PROJECTIONS_A_ROW
"""Widest row that is kept as it is: less than half of it would be saved."""
_BLOCK_ELEMENTS = 1 << 20
_SMALLER = 2.0**-80
"""Factor of a row whose sketch is too large: then float32 holds the squares of a million elements."""
_HALF = (torch.bfloat16, torch.float16)


def sketched_taps(graph: Graph) -> frozenset[str]:
    """Return the taps of which a distance is all that a comparison needs.

    Others are compared element by element: logits with what leads to them, and the choices of routers.
    """
    kept = {graph.logits, *graph.head}
    return frozenset(op.tap for op in graph if op.kind is not Kind.CHOICE and not op.is_kept and op.tap not in kept)


def is_wide(rows: torch.Tensor) -> bool:
    """Whether a sketch of rows [R, ...] is much smaller than they are."""
    return rows[:1].numel() > _LEAST_WIDTH


def sketch_dtype(engine: torch.dtype, truth: torch.dtype) -> torch.dtype:
    """Return the dtype of the sums: one whose roundings are far below those of the engine."""
    return truth if engine in _HALF else torch.float64


def sketch_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the projections of each row [R, ...] and its norm, summed in `dtype`: float32 [R, 129], or [R, 130].

    Of float64, the norm is the sum of the last two columns.
    """
    rows = rows.flatten(1)
    sketch = _stored(rows, dtype)
    is_large = ~torch.isfinite(sketch).all(dim=1)
    if bool(is_large.any()):
        smaller = _stored(rows[is_large].to(torch.float64) * _SMALLER, dtype)
        smaller[:, PROJECTIONS_A_ROW:] *= -1
        sketch[is_large] = smaller
    return sketch


def _stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sketches of rows [R, W] whose sums float32 holds."""
    step = max(1, _BLOCK_ELEMENTS // max(1, rows.shape[1]))
    sketch = torch.cat([_sketch_block(block.to(dtype)) for block in rows.split(step)])
    stored = sketch.to(torch.float32)
    rest = (sketch[:, -1:] - stored[:, -1:]).to(torch.float32)
    return torch.cat([stored, rest], dim=1) if dtype == torch.float64 else stored


def parts_of(sketch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the projections and the norms in float64, [R, 128] and [R], of what `sketch_rows` returns."""
    values = sketch.to(torch.float64)
    norm = values[:, PROJECTIONS_A_ROW:].sum(dim=1)
    scale = torch.where(norm < 0, 1 / _SMALLER, 1.0).to(torch.float64)
    return values[:, :PROJECTIONS_A_ROW] * scale[:, None], norm.abs() * scale


def _sketch_block(values: torch.Tensor) -> torch.Tensor:
    shifts, signs = _directions(values.shape[1])
    signs = signs.to(values.device, values.dtype)
    sketch = values.new_zeros(len(values), PROJECTIONS_A_ROW)
    for part, sign, shift in zip(
        values.split(PROJECTIONS_A_ROW, 1), signs.split(PROJECTIONS_A_ROW), shifts, strict=True
    ):
        there = sketch[:, shift : shift + part.shape[1]]
        behind = part.shape[1] - there.shape[1]
        there.addcmul_(part[:, : there.shape[1]], sign[: there.shape[1]])
        sketch[:, :behind].addcmul_(part[:, there.shape[1] :], sign[there.shape[1] :])
    return torch.cat([sketch, torch.linalg.vector_norm(values, dim=1, keepdim=True)], dim=1)


@cache
def _directions(width: int) -> tuple[list[int], torch.Tensor]:
    """Return by how much each 128 elements are turned before they are added to those before, and signs, [width]."""
    digest = hashlib.shake_256(f"rows of {width}".encode()).digest(2 * width)
    shifts = [byte % PROJECTIONS_A_ROW for byte in digest[width::PROJECTIONS_A_ROW]]
    return shifts, torch.tensor([1.0 - 2.0 * (byte & 1) for byte in digest[:width]])


def estimated_metrics(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    """Measure rows against the sketches of others, as far as these tell; no element is known: NaN, and index -1.

    Args:
        actual: [R, ...] of any floating dtype.
        expected: [R, 129] or [R, 130], of `sketch_rows`.
    """
    is_fine = expected.shape[1] > PROJECTIONS_A_ROW + 1
    ours, actual_norm = parts_of(sketch_rows(actual, torch.float64 if is_fine else torch.float32))
    theirs, expected_norm = parts_of(expected)
    error_norm = torch.linalg.vector_norm(ours - theirs, dim=1).maximum((actual_norm - expected_norm).abs())
    is_finite, num_nan, num_inf = torch.ones_like(error_norm, dtype=torch.bool), 0, 0
    if not bool(torch.isfinite(error_norm).all()):
        is_finite = torch.isfinite(actual).flatten(1).all(dim=1)
        num_nan, num_inf = int(actual.isnan().sum()), int(actual.isinf().sum())
    unknown = torch.full_like(error_norm, torch.nan)
    return RowMetrics(
        max_abs=unknown,
        max_ulp=unknown,
        error_norm=error_norm,
        expected_norm=expected_norm,
        actual_norm=actual_norm,
        error_dot=(actual_norm.square() - expected_norm.square() - error_norm.square()) / 2,
        is_finite=is_finite,
        worst_index=torch.full_like(unknown, -1, dtype=torch.int64),
        num_nan=num_nan,
        num_inf=num_inf,
        is_estimated=True,
    )

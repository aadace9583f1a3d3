"""Content of the cache that is not what was written, and no other row's: coarser, scaled, reordered, single bits."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.cache.entries import at_boundary, provenance_of
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, cut_off, name_of, rounded
from harness.judge.explain.core.hypothesis import Hypothesis

_LEVELS = 127
_MANTISSA_STEPS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 4}
"""Numbers of a float8 between one power of two and the next."""
_LEAST_GAIN = 1e-3
_ON_GRID, _ALLOWANCE, _TINY, _AS_NEAR = 0.98, 4.0, 1e-6, 1.5
"""Share of the elements that must lie on a grid for it to be the cache's, how near to it in roundings at
least, and in distances from the grid that is nearest of all."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def coarser_dtype(failure: Failure) -> Iterator[Hypothesis]:
    """Written values come back rounded, cut off, or in 8 bits with a scale that its own numbers give."""
    lower, written = "the cache is in a lower dtype", failure.expected
    for dtype in (*HALF_DTYPES, *FLOAT8_DTYPES):
        yield Hypothesis(cause=f"{lower}: {name_of(dtype)}", output=rounded(written, dtype))
    for dtype in HALF_DTYPES:
        cause = f"what is cached is cut off to {name_of(dtype)} instead of rounded"
        yield Hypothesis(cause=cause, output=cut_off(written, dtype))


def grid(failure: Failure) -> Iterator[Hypothesis]:
    """All that comes back lies on one grid, whose scale is fitted: 8 bits with a scale of their own."""
    lower, largest = "the cache is in a lower dtype", float(failure.actual.abs().max())
    if largest == 0:
        return
    for dtype, steps in _MANTISSA_STEPS.items():
        nearest = partial(_on_mantissas, steps=steps)
        scale = _scale(failure, nearest, [largest / (1 + at / steps) for at in range(steps)])
        if scale is not None:
            detail = f"with a scale of {scale:.4g} times a power of two"
            output = nearest(failure.expected / scale) * scale
            yield Hypothesis(cause=f"{lower}: {name_of(dtype)}", output=output, detail=detail, freedom=1)
    scale = _scale(failure, torch.round, [largest / level for level in range(2, _LEVELS + 1)])
    if scale is not None:
        lowest, highest = (float((item / scale).round()) for item in (failure.actual.min(), failure.actual.max()))
        output = (failure.expected / scale).round().clamp(lowest, highest) * scale
        yield Hypothesis(cause=f"{lower}: int8", output=output, detail=f"with one scale, {scale:.4g}", freedom=1)


def _scale(
    failure: Failure, nearest: Callable[[torch.Tensor], torch.Tensor], candidates: Sequence[float]
) -> float | None:
    """Return the coarsest scale under which next to all elements lie on a grid, as near to it as under any."""
    values = failure.actual.abs().unique()
    allowance, found = _ALLOWANCE * rounding_unit(failure.dtype), list[tuple[float, float]]()
    for candidate in candidates:
        on_grid = nearest(values / candidate)
        scale = float((values / on_grid)[on_grid != 0].mean())  # each value once: what is saturated is there often
        x = failure.actual / scale
        error = (x - nearest(x)).abs() / (allowance * x.abs() + _TINY)
        if float((error <= 1).float().mean()) >= _ON_GRID:
            found.append((float(error.mean()), scale))
    best = min(found, default=(0.0, 0.0))[0]
    return next((scale for error, scale in found if error <= _AS_NEAR * best + _TINY), None)


def _on_mantissas(x: torch.Tensor, steps: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2 * steps).round() / (2 * steps), exponent)


def gain(failure: Failure) -> Iterator[Hypothesis]:
    """All of it comes back with one factor, or each head with its own."""
    factor = failure.factor_of(failure.expected)
    if abs(factor) < _LEAST_GAIN:
        return
    cause = f"what comes back is that with a gain of {factor:.6g}"
    yield Hypothesis(cause=cause, output=failure.expected * factor, freedom=1)
    actual, written = (x.unflatten(1, (-1, failure.hf.head_dim)) for x in (failure.actual, failure.expected))
    factors = (actual * written).sum(dim=(0, 2)) / written.square().sum(dim=(0, 2))
    is_off = (factors - 1).abs() > _LEAST_GAIN
    if int(is_off.sum()) == 1 and len(factors) > 1:
        head = int(is_off.int().argmax())
        output = written.clone()
        output[:, head] *= factors[head]
        cause = f"KV head {head} alone comes back with a gain of {float(factors[head]):.6g}"
        yield Hypothesis(cause=cause, output=output.flatten(1), freedom=1)
    shown = ", ".join(f"{float(item):.4g}" for item in factors[:8])
    yield Hypothesis(
        cause="each head comes back with a gain of its own",
        output=(written * factors[:, None]).flatten(1),
        detail=f"by head: {shown}",
        freedom=len(factors),
        is_vague=True,
    )


def heads_in_another_order(failure: Failure) -> Iterator[Hypothesis]:
    """Each head is what another should be; or heads and their elements are exchanged."""
    actual, written = (x.unflatten(1, (-1, failure.hf.head_dim)) for x in (failure.actual, failure.expected))
    by_head = (x.transpose(0, 1).flatten(1) for x in (actual, written))
    source = torch.cdist(*by_head).argmin(dim=1)
    if not torch.equal(source, torch.arange(len(source))):
        cause = f"the heads come back in another order: {source.tolist()}"
        yield Hypothesis(cause=cause, output=written[:, source].flatten(1), freedom=len(source))
    if len(source) > 1:
        cause = "heads and elements of a row are exchanged: it is written as [heads, elements] and read as the reverse"
        yield Hypothesis(cause=cause, output=written.transpose(1, 2).flatten(1))


def single_bits(failure: Failure) -> Iterator[Hypothesis]:
    """One bit of an element differs: of the same element in every row, or here and there."""
    dtype = failure.dtype
    if dtype not in _BITS:
        return
    actual, written = (
        x.to(dtype).contiguous().view(_BITS[dtype]).to(torch.int64) for x in (failure.actual, failure.expected)
    )
    differs = (actual ^ written) & ((1 << (8 * dtype.itemsize)) - 1)
    places = differs.nonzero()
    bits = differs[differs != 0].unique()
    if len(bits) != 1 or not len(places) or int(bits) & (int(bits) - 1):
        return
    bit, elements = int(bits).bit_length() - 1, places[:, 1].unique().tolist()
    is_one = len(elements) == 1
    head, element = divmod(elements[0], failure.hf.head_dim)
    where = f"element {element} of KV head {head}, in every wrong row"
    yield Hypothesis(
        cause=f"one bit is flipped: {_bit_name(bit, dtype)}",
        output=failure.actual,
        detail=where if is_one else f"in {len(places)} elements of {len(failure.rows)} rows",
        freedom=1 if is_one else 2 * len(places),
    )


def _bit_name(bit: int, dtype: torch.dtype) -> str:
    if bit == 8 * dtype.itemsize - 1:
        return "the sign"
    mantissa = _MANTISSA_BITS[dtype]
    return f"bit {bit} of the mantissa" if bit < mantissa else f"bit {bit - mantissa} of the exponent"


def unknown_content(failure: Failure) -> Iterator[Hypothesis]:
    """The content that comes back belongs to no row. This is an observation, and no cause."""
    yield Hypothesis(
        cause=f"the slot holds what no recorded row has{at_boundary(failure)}",
        output=failure.actual,
        is_cause=False,
        provenance=lambda: provenance_of(failure),
    )


EXPLANATIONS = (coarser_dtype, grid, gain, heads_in_another_order, single_bits, unknown_content)

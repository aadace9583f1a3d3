"""The cache does not return what was written: nothing, another row, another tensor, or changed numbers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.compare.align import Prefixes, is_readback
from harness.judge.compare.sequences import Write
from harness.judge.explain.cache.contents import RAW_KEY, contents_of, describe_writes
from harness.judge.explain.core.drafts import given_up, is_draft_of, name_of_row
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, cut_off, name_of, rounded
from harness.judge.explain.core.wrong_operation import KEY, VALUE, Hypothesis, WrongOperation, latest
from harness.oracle.rotation import rotations
from harness.results.check import Provenance

_LEVELS = 127
_MANTISSA_STEPS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 4}
"""Numbers of a float8 between one power of two and the next."""
_LEAST_GAIN = 1e-3
_ON_GRID, _ALLOWANCE, _TINY, _AS_NEAR = 0.98, 4.0, 1e-6, 1.5
"""Share of the elements that must lie on a grid for it to be the cache's, how near to it in roundings at
least, and in distances from the grid that is nearest of all."""
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_NEAR = 4.0
"""Roundings within which two rows are one and the same content."""
_MOST = 0.85
"""Share of the rows that say what the cause is; what nobody wrote may hold what an earlier run left in its memory."""


def coarser_dtype(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Written values come back rounded, cut off, or in 8 bits with a scale that its own numbers give.

    Causes: the cache is in a lower dtype: *dtype*; what is cached is cut off to *dtype* instead of rounded.
    """
    lower, written = "the cache is in a lower dtype", wrong.expected
    for dtype in (*HALF_DTYPES, *FLOAT8_DTYPES):
        yield Hypothesis(cause=f"{lower}: {name_of(dtype)}", output=rounded(written, dtype))
    for dtype in HALF_DTYPES:
        cause = f"what is cached is cut off to {name_of(dtype)} instead of rounded"
        yield Hypothesis(cause=cause, output=cut_off(written, dtype))


def grid(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """All that comes back lies on one grid, whose scale is fitted: 8 bits with a scale of their own.

    Causes: the cache is in a lower dtype: int8 or float8, with a scale that is fitted.
    """
    lower, largest = "the cache is in a lower dtype", float(wrong.actual.abs().max())
    if largest == 0:
        return
    for dtype, steps in _MANTISSA_STEPS.items():
        nearest = partial(_on_mantissas, steps=steps)
        scale = _scale(wrong, nearest, [largest / (1 + at / steps) for at in range(steps)])
        if scale is not None:
            detail = f"with a scale of {scale:.4g} times a power of two"
            output = nearest(wrong.expected / scale) * scale
            yield Hypothesis(cause=f"{lower}: {name_of(dtype)}", output=output, detail=detail, num_fitted=1)
    scale = _scale(wrong, torch.round, [largest / level for level in range(2, _LEVELS + 1)])
    if scale is not None:
        lowest, highest = (float((item / scale).round()) for item in (wrong.actual.min(), wrong.actual.max()))
        output = (wrong.expected / scale).round().clamp(lowest, highest) * scale
        yield Hypothesis(cause=f"{lower}: int8", output=output, detail=f"with one scale, {scale:.4g}", num_fitted=1)


def _scale(
    wrong: WrongOperation, nearest: Callable[[torch.Tensor], torch.Tensor], candidates: Sequence[float]
) -> float | None:
    """Return the coarsest scale under which next to all elements lie on a grid, as near to it as under any."""
    values = wrong.actual.abs().unique()
    allowance, candidate_scales = _ALLOWANCE * rounding_unit(wrong.dtype), list[tuple[float, float]]()
    for candidate in candidates:
        on_grid = nearest(values / candidate)
        scale = float((values / on_grid)[on_grid != 0].mean())  # each value once: what is saturated is there often
        x = wrong.actual / scale
        error = (x - nearest(x)).abs() / (allowance * x.abs() + _TINY)
        if float((error <= 1).float().mean()) >= _ON_GRID:
            candidate_scales.append((float(error.mean()), scale))
    best = min(candidate_scales, default=(0.0, 0.0))[0]
    return next((scale for error, scale in candidate_scales if error <= _AS_NEAR * best + _TINY), None)


def _on_mantissas(x: torch.Tensor, steps: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2 * steps).round() / (2 * steps), exponent)


def gain(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """All of it comes back with one factor, or each head with its own.

    Causes: what comes back is that with a gain of *value*; KV head *n* alone comes back with a gain of *value*; each
    head comes back with a gain of its own.
    """
    factor = wrong.factor_of(wrong.expected)
    if abs(factor) < _LEAST_GAIN:
        return
    cause = f"what comes back is that with a gain of {factor:.6g}"
    yield Hypothesis(cause=cause, output=wrong.expected * factor, num_fitted=1)
    actual, written = (x.unflatten(1, (-1, wrong.head_dim)) for x in (wrong.actual, wrong.expected))
    factors = (actual * written).sum(dim=(0, 2)) / written.square().sum(dim=(0, 2))
    is_off = (factors - 1).abs() > _LEAST_GAIN
    if int(is_off.sum()) == 1 and len(factors) > 1:
        head = int(is_off.int().argmax())
        output = written.clone()
        output[:, head] *= factors[head]
        cause = f"KV head {head} alone comes back with a gain of {float(factors[head]):.6g}"
        yield Hypothesis(cause=cause, output=output.flatten(1), num_fitted=1)
    shown = ", ".join(f"{float(item):.4g}" for item in factors[:8])
    yield Hypothesis(
        cause="each head comes back with a gain of its own",
        output=(written * factors[:, None]).flatten(1),
        detail=f"by head: {shown}",
        num_fitted=len(factors),
        is_vague=True,
    )


def single_bits(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """One bit of an element differs: of the same element in every row, or here and there.

    Causes: one bit is flipped: the sign, bit *n* of the exponent or of the mantissa.
    """
    dtype = wrong.dtype
    if dtype not in _BITS:
        return
    actual, written = (
        x.to(dtype).contiguous().view(_BITS[dtype]).to(torch.int64) for x in (wrong.actual, wrong.expected)
    )
    differs = (actual ^ written) & ((1 << (8 * dtype.itemsize)) - 1)
    places = differs.nonzero()
    bits = differs[differs != 0].unique()
    if len(bits) != 1 or not len(places) or int(bits) & (int(bits) - 1):
        return
    bit, elements = int(bits).bit_length() - 1, places[:, 1].unique().tolist()
    is_one = len(elements) == 1
    head, element = divmod(elements[0], wrong.head_dim)
    where = f"element {element} of KV head {head}, in every wrong row"
    yield Hypothesis(
        cause=f"one bit is flipped: {_bit_name(bit, dtype)}",
        output=wrong.actual,
        detail=where if is_one else f"in {len(places)} elements of {len(wrong.rows)} rows",
        num_fitted=1 if is_one else 2 * len(places),
    )


def _bit_name(bit: int, dtype: torch.dtype) -> str:
    if bit == 8 * dtype.itemsize - 1:
        return "the sign"
    mantissa = _MANTISSA_BITS[dtype]
    return f"bit {bit} of the mantissa" if bit < mantissa else f"bit {bit - mantissa} of the exponent"


def unknown_content(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The content that comes back belongs to no row. This is an observation, and no cause.

    Causes: Not asserted: the slot holds what no recorded row has.
    """
    yield Hypothesis(
        cause=f"the slot holds what no recorded row has{at_boundary(wrong)}",
        output=wrong.actual,
        is_cause=False,
        provenance=lambda: provenance_of(wrong),
    )


def never_written(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Never written: zeros come back; zeros come back: never written, or written over with zeros."""
    boundary = at_boundary(wrong)
    is_certain = bool(boundary) or is_unwritten(wrong) or _are_all_wrong(wrong)
    certain, uncertain = "never written: zeros come back", "zeros come back: never written, or written over with zeros"
    yield Hypothesis(
        cause=f"{certain if is_certain else uncertain}{boundary}",
        output=torch.zeros_like(wrong.expected),
        provenance=lambda: provenance_of(wrong),
    )


def is_unwritten(wrong: WrongOperation) -> bool:
    """Whether the engine's own record has nobody who wrote the slots."""
    return wrong.slot_history.is_known and all(write is None for _, write in _writers(wrong))


def _are_all_wrong(wrong: WrongOperation) -> bool:
    """Whether every row is wrong of the requests that have wrong rows."""
    wrong_places = set(wrong.rows.places())
    steps = [step for step in wrong.recording.steps if is_readback(step) and step.has(wrong.operation.tap)]
    requests = {request for request, _ in wrong_places}
    rows = (zip(step.request.tolist(), step.position.tolist(), strict=True) for step in steps)
    return all(row in wrong_places for step in rows for row in step if row[0] in requests)


def other_tensor(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The same row of another tensor: the value for the key, the key before rotary, another layer's.

    Causes: K and V are written to each other's cache; keys are cached before rotary; the cache holds what comes before
    the norm (latents); the cache holds what layer *n* wrote.
    """
    is_key = wrong.operation.site == "k_cache"
    contents = contents_of(wrong)
    causes = {contents.taps[VALUE if is_key else KEY]: "K and V are written to each other's cache"}
    if is_key and RAW_KEY in contents.taps:
        causes[contents.taps[RAW_KEY]] = "keys are cached before rotary"
    written = wrong.graph[wrong.operation.inputs[0]]
    before = written.inputs[0] if written.kind is Kind.NORM else None
    if before is not None:
        causes[before] = "the cache holds what comes before the norm"
    for layer in wrong.graph.layers:
        attention = wrong.graph.attention_of(layer)
        if attention is not None and layer != wrong.operation.layer:
            causes[attention.inputs[1 if is_key else 2]] = f"the cache holds what layer {layer} wrote"
    for tap, cause in causes.items():
        tensor = latest(wrong.locator, tap, wrong.rows)
        if tensor is not None and tap == before:  # a latent is the first part of a product
            tensor = tensor[:, : wrong.actual.shape[1]]
        if tensor is not None and tensor.shape == wrong.actual.shape:
            yield Hypothesis(cause=cause, output=tensor, provenance=lambda: provenance_of(wrong))


def replayed_reads(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The engine's own block table leads to slots that something else was written to.

    Causes: K and V are written to a wrong slot: ...; the slot holds what another request wrote; the slot holds another
    position, as the engine recorded it.
    """
    memory, tap = wrong.slot_history, wrong.operation.inputs[0]
    if not memory.is_known:
        return
    places = _writers(wrong)
    content = memory.content([write for _, write in places], tap)
    unwritten = torch.tensor([write is None for _, write in places])
    if content is None or bool(unwritten.all()):
        return
    yield Hypothesis(
        cause=_cause(wrong, places, is_recorded=True),
        output=torch.where(unwritten[:, None], wrong.actual, content),  # what nobody wrote may be anything
        detail=describe_writes(places),
        unknown=unwritten if bool(unwritten.any()) else None,
        provenance=lambda: provenance_of(wrong),
    )


def _writers(wrong: WrongOperation) -> list[tuple[int, Write | None]]:
    """Return position and last writer of the slot that each row was read from, by the engine's own record."""
    memory, places = wrong.slot_history, list[tuple[int, Write | None]]()
    for request, position, step in wrong.rows.identities():
        slots = memory.slots(memory.table(step, request), position + 1)
        places.append((position, memory.writer(slots[position], step) if position < len(slots) else None))
    return places


def rotated_once_more(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Rotary is applied to keys once more than this layer does."""
    if wrong.operation.site != "k_cache" or wrong.expected.shape[1] % wrong.head_dim:
        return
    for rotation in rotations(wrong.hf, wrong.head_dim):
        yield Hypothesis(
            cause="rotary is applied to keys once more than this layer does",
            output=rotation.turn(wrong.expected, wrong.positions),
        )


def other_row(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Each row is matched with all that was ever written to this cache; how they came there is the cause.

    Causes: the slot holds a rejected draft, position *p*, written in step *n*; another position, or a rejected draft
    ...: what was given up is still in the cache; the slot holds the token +*n* positions away; ... another position;
    what another request wrote.
    """
    contents = contents_of(wrong)
    kind = KEY if wrong.operation.site == "k_cache" else VALUE
    if kind not in contents.tensors:
        return
    known = contents.rows[kind]
    likelier = 2.0 * (known.position == wrong.positions[:, None])  # a slot holds its own position, or what was given up
    for row, request in enumerate(wrong.rows.request.tolist()):
        drafts = [item.draft for item in given_up(wrong.recording, request)]
        likelier[row] += torch.isin(known.request, torch.tensor(drafts, dtype=torch.int64))
    index, distance = contents.nearest(wrong.actual, kind, likelier)
    is_zero = wrong.actual.norm(dim=1) < distance  # nearer to nothing than to any row
    is_known = ~is_zero & (distance <= _NEAR * rounding_unit(wrong.dtype) * wrong.actual.norm(dim=1))
    output = torch.where(is_zero[:, None], 0.0, contents.tensors[kind][index])
    matches = known.select(index)
    places = [
        (
            int(wrong.positions[at]),
            _write(matches.step[at], matches.request[at], matches.position[at]) if is_known[at] else None,
        )
        for at in range(len(index))
    ]
    if all(write is None for _, write in places):
        return
    elsewhere = {(write.request, write.position) for _, write in places if write is not None}
    lost = torch.tensor([place in elsewhere for place in wrong.rows.places()]) & ~is_known & ~is_zero
    yield Hypothesis(
        cause=_cause(wrong, places, is_recorded=False),
        output=torch.where(lost[:, None], wrong.actual, output),  # a slot whose row went to another may hold anything
        detail=describe_writes(places),
        num_fitted=len(index),
        unknown=lost if bool(lost.any()) else None,
        provenance=lambda: provenance_of(wrong),
    )


def at_boundary(wrong: WrongOperation) -> str:
    """Say so where only the first positions of blocks are wrong, which is where a slot mapping goes wrong."""
    size = wrong.slot_history.block_size or 1
    is_boundary = size > 1 and bool((wrong.positions % size == 0).all()) and bool((wrong.positions > 0).all())
    return ", at a block boundary (slot mapping)" if is_boundary else ""


def _write(step: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> Write:
    return Write(step=int(step), row=0, request=int(request), position=int(position))


def _cause(wrong: WrongOperation, places: list[tuple[int, Write | None]], *, is_recorded: bool) -> str:
    """Say how the slots came to hold what they hold: by the engine's own record, or going by their content."""
    if _is_misplaced(wrong):
        return "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    rejected = [
        write
        for request, (_, write) in zip(wrong.rows.request.tolist(), places, strict=True)
        if write is not None and is_draft_of(wrong.recording, write.request, request)
    ]
    if len(rejected) >= _MOST * sum(write is not None for _, write in places):
        return f"the slot holds {name_of_row(wrong.recording, rejected[0].position, rejected[0].step)}"
    prefixes = Prefixes(wrong.recording.manifest.requests)
    shifted = [
        (_own_position(prefixes, request, write), position)
        for request, (position, write) in zip(wrong.rows.request.tolist(), places, strict=True)
        if write is not None
    ]
    if rejected and len(rejected) == sum(at is None for at, _ in shifted):
        name = name_of_row(wrong.recording, rejected[0].position, rejected[0].step)
        return f"the slot holds another position, or {name}: what was given up is still in the cache"
    share = sum(at is None for at, _ in shifted) / len(shifted)
    if share >= _MOST:
        return "the slot holds what another request wrote: shared, freed or given out wrongly"
    if share > 1 - _MOST:
        return "the slot holds what another request wrote, or another position: shared, freed or given out wrongly"
    if is_recorded:
        return "the slot holds another position, as the engine recorded it: the row itself was not written there"
    shifts = {at - position for at, position in shifted if at is not None}
    if len(shifts) == 1 and len(shifted) > 1:
        shift = f"the slot holds the token {shifts.pop():+d} positions away: written to a wrong slot"
        return shift + at_boundary(wrong)
    return f"the slot holds another position: written to a wrong slot, or read from one{at_boundary(wrong)}"


def _own_position(prefixes: Prefixes, request: int, write: Write) -> int | None:
    """Return which position of a request a written row is, going by the tokens up to it; None if it is none."""
    prefix, written_prefix = (prefixes.up_to(item, write.position + 1).tolist() for item in (request, write.request))
    return write.position if len(prefix) == len(written_prefix) and prefix[-1] == written_prefix[-1] else None


def _is_misplaced(wrong: WrongOperation) -> bool:
    memory = wrong.slot_history
    places = set(wrong.rows.places())
    steps = range(int(wrong.rows.step.max()) + 1)
    return memory.is_known and any(
        (request, position) in places for step in steps for request, position, _, _ in memory.misplaced(step)
    )


def provenance_of(wrong: WrongOperation) -> Provenance:
    """Trace the place of the cache that the first wrong row was read from."""
    return contents_of(wrong).provenance(
        wrong.slot_history,
        step=int(wrong.rows.step[0]),
        request=int(wrong.rows.request[0]),
        position=int(wrong.positions[0]),
        content=wrong.actual[0],
        meant=wrong.expected[0],
        head_dim=wrong.head_dim,
    )

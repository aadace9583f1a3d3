"""Ways in which the cache gives back something else than was written: nothing, another row, another tensor."""

from collections.abc import Iterator

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.compare.align import Prefixes, is_readback
from harness.judge.compare.sequences import Write
from harness.judge.explain.cache.content_index import KEY, RAW_KEY, VALUE, describe_writes
from harness.judge.explain.cache.replay import contents_of
from harness.judge.explain.core.drafts import given_up, is_draft_of, name_of_row
from harness.judge.explain.core.failure import Failure, latest
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.oracle.rotation import rotations
from harness.results.check import Provenance

_NEAR = 4.0
"""Roundings within which two rows are one and the same content."""
_MOST = 0.85
"""Share of the rows that say what the cause is; what nobody wrote may hold what an earlier run left in its memory."""


def never_written(failure: Failure) -> Iterator[Hypothesis]:
    """Zeros come back."""
    boundary = at_boundary(failure)
    is_certain = bool(boundary) or is_unwritten(failure) or _are_all_wrong(failure)
    certain, uncertain = "never written: zeros come back", "zeros come back: never written, or written over with zeros"
    yield Hypothesis(
        cause=f"{certain if is_certain else uncertain}{boundary}",
        output=torch.zeros_like(failure.expected),
        provenance=lambda: provenance_of(failure),
    )


def is_unwritten(failure: Failure) -> bool:
    """Whether the engine's own record has nobody who wrote the slots."""
    return failure.slot_history.is_known and all(write is None for _, write in _writers(failure))


def _are_all_wrong(failure: Failure) -> bool:
    """Whether every row is wrong of the requests that have wrong rows."""
    wrong = set(failure.rows.places())
    steps = [step for step in failure.recording.steps if is_readback(step) and step.has(failure.operation.tap)]
    requests = {request for request, _ in wrong}
    rows = (zip(step.request.tolist(), step.position.tolist(), strict=True) for step in steps)
    return all(row in wrong for step in rows for row in step if row[0] in requests)


def other_tensor(failure: Failure) -> Iterator[Hypothesis]:
    """The same row of another tensor: the value for the key, the key before rotary, another layer's."""
    is_key = failure.operation.site == "k_cache"
    contents = contents_of(failure)
    other = {contents.taps[VALUE if is_key else KEY]: "K and V are written to each other's cache"}
    if is_key and RAW_KEY in contents.taps:
        other[contents.taps[RAW_KEY]] = "keys are cached before rotary"
    written = failure.graph[failure.operation.inputs[0]]
    before = written.inputs[0] if written.kind is Kind.NORM else None
    if before is not None:
        other[before] = "the cache holds what comes before the norm"
    for layer in failure.graph.layers:
        attention = failure.graph.attention_of(layer)
        if attention is not None and layer != failure.operation.layer:
            other[attention.inputs[1 if is_key else 2]] = f"the cache holds what layer {layer} wrote"
    for tap, cause in other.items():
        tensor = latest(failure.locator, tap, failure.rows)
        if tensor is not None and tap == before:  # a latent is the first part of a product
            tensor = tensor[:, : failure.actual.shape[1]]
        if tensor is not None and tensor.shape == failure.actual.shape:
            yield Hypothesis(cause=cause, output=tensor, provenance=lambda: provenance_of(failure))


def replayed_reads(failure: Failure) -> Iterator[Hypothesis]:
    """The engine's own block table leads to slots that something else was written to."""
    memory, own = failure.slot_history, failure.operation.inputs[0]
    if not memory.is_known:
        return
    places = _writers(failure)
    content = memory.content([write for _, write in places], own)
    unwritten = torch.tensor([write is None for _, write in places])
    if content is None or bool(unwritten.all()):
        return
    yield Hypothesis(
        cause=_cause(failure, places, is_recorded=True),
        output=torch.where(unwritten[:, None], failure.actual, content),  # what nobody wrote may be anything
        detail=describe_writes(places),
        unknown=unwritten if bool(unwritten.any()) else None,
        provenance=lambda: provenance_of(failure),
    )


def _writers(failure: Failure) -> list[tuple[int, Write | None]]:
    """Return position and last writer of the slot that each row was read from, by the engine's own record."""
    memory, places = failure.slot_history, list[tuple[int, Write | None]]()
    for request, position, step in failure.rows.identities():
        slots = memory.slots(memory.table(step, request), position + 1)
        places.append((position, memory.writer(slots[position], step) if position < len(slots) else None))
    return places


def rotated_once_more(failure: Failure) -> Iterator[Hypothesis]:
    """Keys go through a rotary that the layer does not have, or twice through its own."""
    if failure.operation.site != "k_cache" or failure.expected.shape[1] % failure.hf.head_dim:
        return
    for rotation in rotations(failure.hf):
        yield Hypothesis(
            cause="rotary is applied to keys once more than this layer does",
            output=rotation.turn(failure.expected, failure.positions),
        )


def other_row(failure: Failure) -> Iterator[Hypothesis]:
    """Each row is matched with all that was ever written to this cache; how they came there is the cause."""
    contents = contents_of(failure)
    kind = KEY if failure.operation.site == "k_cache" else VALUE
    if kind not in contents.tensors:
        return
    known = contents.rows[kind]
    likelier = 2.0 * (
        known.position == failure.positions[:, None]
    )  # a slot holds its own position, or what was given up
    for row, request in enumerate(failure.rows.request.tolist()):
        drafts = [item.draft for item in given_up(failure.recording, request)]
        likelier[row] += torch.isin(known.request, torch.tensor(drafts, dtype=torch.int64))
    index, distance = contents.nearest(failure.actual, kind, likelier)
    is_zero = failure.actual.norm(dim=1) < distance  # nearer to nothing than to any row
    is_known = ~is_zero & (distance <= _NEAR * rounding_unit(failure.dtype) * failure.actual.norm(dim=1))
    output = torch.where(is_zero[:, None], 0.0, contents.tensors[kind][index])
    found = known.select(index)
    places = [
        (
            int(failure.positions[at]),
            _write(found.step[at], found.request[at], found.position[at]) if is_known[at] else None,
        )
        for at in range(len(index))
    ]
    if all(write is None for _, write in places):
        return
    yield Hypothesis(
        cause=_cause(failure, places, is_recorded=False),
        output=output,
        detail=describe_writes(places),
        freedom=len(index),
        provenance=lambda: provenance_of(failure),
    )


def at_boundary(failure: Failure) -> str:
    """Say so where only the first positions of blocks are wrong, which is where a slot mapping goes wrong."""
    size = failure.slot_history.block_size or 1
    is_boundary = size > 1 and bool((failure.positions % size == 0).all()) and bool((failure.positions > 0).all())
    return ", at a block boundary (slot mapping)" if is_boundary else ""


def _write(step: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> Write:
    return Write(step=int(step), row=0, request=int(request), position=int(position))


def _cause(failure: Failure, places: list[tuple[int, Write | None]], *, is_recorded: bool) -> str:
    """Say how the slots came to hold what they hold: by the engine's own record, or going by their content."""
    if _is_misplaced(failure):
        return "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    rejected = [
        write
        for request, (_, write) in zip(failure.rows.request.tolist(), places, strict=True)
        if write is not None and is_draft_of(failure.recording, write.request, request)
    ]
    if len(rejected) >= _MOST * sum(write is not None for _, write in places):
        return f"the slot holds {name_of_row(failure.recording, rejected[0].position, rejected[0].step)}"
    prefixes = Prefixes(failure.recording.manifest.requests)
    found = [
        (_own_position(prefixes, request, write), position)
        for request, (position, write) in zip(failure.rows.request.tolist(), places, strict=True)
        if write is not None
    ]
    if rejected and len(rejected) == sum(at is None for at, _ in found):
        name = name_of_row(failure.recording, rejected[0].position, rejected[0].step)
        return f"the slot holds another position, or {name}: what was given up is still in the cache"
    share = sum(at is None for at, _ in found) / len(found)
    if share >= _MOST:
        return "the slot holds what another request wrote: shared, freed or given out wrongly"
    if share > 1 - _MOST:
        return "the slot holds what another request wrote, or another position: shared, freed or given out wrongly"
    if is_recorded:
        return "the slot holds another position, as the engine recorded it: the row itself was not written there"
    shifts = {at - position for at, position in found if at is not None}
    if len(shifts) == 1 and len(found) > 1:
        shift = f"the slot holds the token {shifts.pop():+d} positions away: written to a wrong slot"
        return shift + at_boundary(failure)
    return f"the slot holds another position: written to a wrong slot, or read from one{at_boundary(failure)}"


def _own_position(prefixes: Prefixes, request: int, write: Write) -> int | None:
    """Return which position of a request a written row is, going by the tokens up to it; None if it is none."""
    own, other = (prefixes.up_to(item, write.position + 1).tolist() for item in (request, write.request))
    return write.position if len(own) == len(other) and own[-1] == other[-1] else None


def _is_misplaced(failure: Failure) -> bool:
    memory = failure.slot_history
    places = set(failure.rows.places())
    steps = range(int(failure.rows.step.max()) + 1)
    return memory.is_known and any(
        (request, position) in places for step in steps for request, position, _, _ in memory.misplaced(step)
    )


def provenance_of(failure: Failure) -> Provenance:
    """Trace the place of the cache that the first wrong row was read from."""
    return contents_of(failure).provenance(
        failure.slot_history,
        step=int(failure.rows.step[0]),
        request=int(failure.rows.request[0]),
        position=int(failure.positions[0]),
        content=failure.actual[0],
        meant=failure.expected[0],
        head_dim=failure.hf.head_dim,
    )


EXPLANATIONS = (replayed_reads, never_written, other_tensor, rotated_once_more, other_row)
